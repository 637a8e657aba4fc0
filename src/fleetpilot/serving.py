"""``fleetpilot serve``, whose options are the fields of the dispatcher's configuration, and ``replay-log``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import inspect
import json
import logging
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin, get_type_hints

EXAMPLES = """examples:
  fleetpilot serve --emulate 4
  fleetpilot serve --engines http://127.0.0.1:8001 http://127.0.0.1:8002 --policy llumnix
  fleetpilot serve --engines http://127.0.0.1:8001 http://127.0.0.1:8002 --check
  fleetpilot serve --scaler process --max-instances 4 --scale-command "vllm serve MODEL --port {port}"
  FLEETPILOT_SERVE_API_KEYS=secret fleetpilot serve --config fleet.toml
"""

REPLAY_EXAMPLES = """examples:
  fleetpilot serve --emulate 4 --policy llumnix --explore 0.05 --decision-log decisions.jsonl
  fleetpilot replay-log decisions.jsonl --policy lmetric
"""

_GRACE_S = 30.0
_IN_FILES_ONLY = ("api_keys", "engine_api_key")
"""Secrets: an argument could be read by everyone on the machine."""


def add_serve(command: Callable[..., Any], commands: Any) -> None:
    """Add the subcommand."""
    from fleetpilot.dispatcher.config import ServeConfig

    parser = command(commands, "serve", run_serve, "serve the OpenAI API in front of vLLM engines", EXAMPLES)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same settings; flags go before it")
    parser.add_argument("--check", action="store_true", help="say what will not work with these engines, and stop")
    parser.add_argument("--json", action="store_true", help="with --check: print JSON")
    kinds, meanings = get_type_hints(ServeConfig), _meanings(ServeConfig)
    for field in dataclasses.fields(ServeConfig):
        if field.name in _IN_FILES_ONLY:
            continue
        kind, flag = kinds[field.name], "--" + field.name.replace("_", "-")
        help_text = f"{meanings[field.name]} (default: {field.default})".replace("%", "%%")
        if get_origin(kind) is tuple:
            parser.add_argument(flag, nargs="+", metavar="URL", help=meanings[field.name])
        elif kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
        else:
            parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=help_text)


def add_replay_log(command: Callable[..., Any], commands: Any) -> None:
    """Add the subcommand."""
    summary = "ask another policy for the decisions of a recorded log, and estimate what its choices are worth"
    parser = command(commands, "replay-log", run_replay_log, summary, REPLAY_EXAMPLES)
    parser.add_argument("log", metavar="LOG", type=Path, help="file of fleetpilot serve --decision-log")
    parser.add_argument(
        "--policy", metavar="NAME", required=True, help="baseline, or folder of an exported policy, that is asked"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_replay_log(arguments: argparse.Namespace) -> int:
    """Replay, and print what was found.

    Returns:
        The exit status.
    """
    from fleetpilot.agents import load_policy
    from fleetpilot.dispatcher.decision_log import read_log
    from fleetpilot.dispatcher.replay import replay

    unreadable: Counter[str] = Counter()
    found = replay(read_log(arguments.log, unreadable), load_policy(arguments.policy))
    for file, count in unreadable.items():
        print(f"{file}: {count:,} lines are no records and were left out", file=sys.stderr)
    print(json.dumps(dataclasses.asdict(found), indent=2) if arguments.json else found.text())
    return 0


def _meanings(config: type) -> dict[str, str]:
    """What the docstring's list of attributes says of each."""
    text = (inspect.getdoc(config) or "").partition("Attributes:\n")[2]
    return {
        name: " ".join(words.split()).rstrip(".")
        for name, words in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.M)
    }


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted.

    Returns:
        The exit status: with ``--check`` 1 if something will not work.
    """
    from fleetpilot.dispatcher.config import ServeConfig, load_config

    names = {field.name for field in dataclasses.fields(ServeConfig)}
    flags = {name: value for name, value in vars(arguments).items() if name in names}
    if flags.get("engines"):
        flags["engines"] = tuple(flags["engines"])

    def load() -> ServeConfig:
        return load_config(flags, arguments.config)

    config = load()
    _allow_files()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if arguments.check:
        return _check(config, as_json=arguments.json)
    from fleetpilot.dispatcher.loop import run

    run(_serve(config, load))
    return 0


def _allow_files() -> None:
    """As many open files as may be: each request takes two, and shells allow 1,024."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check(config: Any, *, as_json: bool) -> int:
    from fleetpilot.dispatcher.check import check
    from fleetpilot.dispatcher.loop import run

    findings = run(check(config))
    if as_json:
        print(json.dumps({"config": config.public(), "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.works else 'FAIL'} {finding.engine or 'fleet'}: {finding.text}")
    return 0 if all(finding.works for finding in findings) else 1


def serve_demo(policy: str) -> None:
    """Serve emulated engines with a policy under a short load, where fleetpilot[serve] is installed."""
    try:
        from fleetpilot.dispatcher.demo import serve_for_a_while
        from fleetpilot.dispatcher.loop import run
    except ModuleNotFoundError as error:
        print(f"not served: there is no {error.name}; pip install 'fleetpilot[serve]'")
        return
    run(serve_for_a_while(policy))


async def _serve(config: Any, load: Callable[[], Any]) -> None:
    from fleetpilot.dispatcher.service import load_policies

    loaded = None
    async with contextlib.AsyncExitStack() as stack:
        if config.emulate:
            loaded = load_policies(config)  # a mistake is said before it takes a minute
            config = await _emulated(config, stack)
        await _serve_engines(config, loaded, load, stack)


async def _serve_engines(config: Any, loaded: Any, load: Callable[[], Any], stack: contextlib.AsyncExitStack) -> None:
    from fleetpilot.dispatcher.service import Dispatcher

    dispatcher = Dispatcher(config, loaded=loaded)
    stack.push_async_callback(dispatcher.stop)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    reloads = set()

    def reload() -> None:
        task = loop.create_task(_reload(dispatcher, load))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    if hasattr(signal, "SIGHUP"):  # not on Windows
        loop.add_signal_handler(signal.SIGHUP, reload)
    await dispatcher.start()
    gc.freeze()  # what is there now stays: not to be looked at again while requests come and go
    scheme = "https" if config.tls_cert else "http"
    engines = f"the engines of {config.engines_file}" if config.engines_file else f"{len(config.engines)} engines"
    if config.scaler:
        engines = f"{config.min_instances} to {config.max_instances} engines"
    url = f"{scheme}://{config.host}:{dispatcher.port}"
    print(f"serving {engines} with {config.policy} at {url}/v1, live page at {url}/dashboard", flush=True)
    await stopped.wait()
    print(f"requests on their way may end within {_GRACE_S:g} s; interrupt again to stop at once", file=sys.stderr)
    stopped.clear()
    drained = asyncio.create_task(dispatcher.stop(grace_s=_GRACE_S))
    await asyncio.wait((drained, asyncio.create_task(stopped.wait())), return_when=asyncio.FIRST_COMPLETED)


async def _reload(dispatcher: Any, load: Callable[[], Any]) -> None:
    """Read the settings again; where they cannot be, all stays as it is."""

    def read() -> Any:
        config = load()
        return dataclasses.replace(config, emulate=0, engines=dispatcher.config.engines) if config.emulate else config

    try:
        await dispatcher.reload(read)
    except (ValueError, OSError) as error:
        logging.getLogger("fleetpilot.dispatcher").warning("not reloaded, nothing has changed: %s", error)


async def _emulated(config: Any, stack: contextlib.AsyncExitStack) -> Any:
    """Have emulated engines listen; the configuration with their URLs."""
    from fleetpilot.dispatcher.emulator.engine import warm_up
    from fleetpilot.dispatcher.emulator.fleet import EmulatedFleet
    from fleetpilot.fleet.profiles import load_profile

    profiles = [load_profile(config.profile)] * config.emulate
    words = "compiling the emulated engines' scheduler, which takes a minute, this once"
    said = threading.Timer(2.0, print, (words,), {"file": sys.stderr})
    said.start()
    warm_up(profiles)
    said.cancel()
    emulated = EmulatedFleet(profiles)
    stack.push_async_callback(emulated.stop)
    await emulated.start()
    return dataclasses.replace(config, emulate=0, engines=tuple(emulated.urls))
