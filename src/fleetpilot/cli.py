"""The ``fleetpilot`` command. Everything heavy is imported by the subcommand that needs it."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import fleetpilot
from fleetpilot.learning import add_learning
from fleetpilot.serving import add_replay_log, add_serve

if TYPE_CHECKING:
    from fleetpilot.cluster import FleetConfig, Pools
    from fleetpilot.evaluation import Report, Scenario, StoredRun
    from fleetpilot.fleet.profiles import HardwareProfile
    from fleetpilot.workloads import RequestTable

MAX_MESSAGE = 2000

BAD_INPUT = 2
NOTHING_FINISHED = 1
INTERRUPTED = 130

DEFAULT_PROFILE = "a10-llama-7b"
DEFAULT_INSTANCES = 4
DEFAULT_ENGINE_PROFILE = "l40s-llama-3.1-8b"
DEFAULT_PORT = 8100
DEFAULT_FAMILY = "default"

HOPELESS_GOODPUT = 0.1
"""A policy's share of requests in time at which it is asked whether the fleet can carry them at all."""
MAX_INSTANCES = 4096
MAX_ENGINES = 256
MAX_WINDOWS = 1000
MAX_SEGMENTS = 10_000
MAX_SEEDS = 1000
MAX_TRIALS = 10_000
MAX_WORKERS = 1024
MAX_LOAD = 100.0
MAX_POLL_S = 1e6
MIN_POLL_INTERVAL_S = 1e-3
MAX_POLLS_IN_FLIGHT = 10_000
"""Beyond these a slip of the finger would run for days or out of memory."""

EXTRAS = {
    "serve": {"uvloop", "httptools", "orjson", "prometheus_client"},
    "ray": {"ray"},
    "tune": {"optuna"},
    "train": {"torch", "stable_baselines3", "sb3_contrib", "tensorboard", "onnxscript", "onnx", "onnxruntime", "PIL"},
}
"""Modules that come with an extra; all others that may be missing come with `eval`."""

FLEET_EXAMPLE = "a10-llama-7b:4,h100-llama-3.1-8b:2"
POOLS_EXAMPLE = "2P+4D"
ROLES = {"P": "prefill", "D": "decode", "M": "mixed"}
FAIL_EXAMPLE = "0@600,3@900"

EXAMPLES = """examples:
  fleetpilot demo
  fleetpilot list policies
  fleetpilot simulate --policy lmetric --workload 'twin/azure-conv?n=5000' --instances 12
  fleetpilot simulate --policy freeness --workload trace.csv --load 0.9 --json
  fleetpilot evaluate --policies all --workload trace.csv --load 0.8,0.95 --segments 10 -o runs/mine
  fleetpilot evaluate --experiment llumnix-motivation
  fleetpilot tune --family chat --policies calibrated,llm-d --workload trace.csv --load 0.9
  fleetpilot trace inspect trace.csv
  fleetpilot train --config quick
  fleetpilot evaluate --policies runs/train/ppo/Dispatch-v0_1/export,join-shortest-queue --workload trace.csv
  fleetpilot serve --engines http://127.0.0.1:8001 http://127.0.0.1:8002 --policy llumnix
  fleetpilot emulate --engines 4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        The exit status: 0, 1 where no request finished, 2 for bad input, 130 after Ctrl-C.
    """
    debug = os.environ.get("FLEETPILOT_DEBUG") == "1"
    try:
        arguments = _parser().parse_args(argv)
        with warnings.catch_warnings():
            _say_each_warning_once()
            status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError) as error:
        if debug:
            raise
        return _say(f"error: {_one_line(error)}", BAD_INPUT)
    except ModuleNotFoundError as error:
        if debug or (error.name or "").startswith("fleetpilot"):
            raise
        extra = next((extra for extra, modules in EXTRAS.items() if error.name in modules), "eval")
        return _say(f"error: {error.name} is not installed; this needs: pip install 'fleetpilot[{extra}]'", BAD_INPUT)


def _say(text: str, status: int) -> int:
    over_progress = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{over_progress}fleetpilot: {_printable(text)}", file=sys.stderr)
    return status


def _printable(text: str) -> str:
    """Names and values come from users and files: nothing of them may control a terminal or fill it."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return shown if len(shown) <= MAX_MESSAGE else f"{shown[:MAX_MESSAGE]}..."


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _say_each_warning_once() -> None:
    said = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            _say(f"warning: {message}", 0)

    warnings.simplefilter("default")
    warnings.showwarning = show


# --- the parser --------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Errors are one line, and a misspelt choice is answered with the nearest ones."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found:
            message += _did_you_mean(found[1], [choice.strip("' ") for choice in found[2].split(",")])
        _say(f"error: {message} (see {self.prog} --help)", BAD_INPUT)
        sys.exit(BAD_INPUT)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known(kind: str, name: str, known: Iterable[str]) -> str:
    """The name, if it is a known one.

    Raises:
        ValueError: naming the nearest and all known ones.
    """
    known = list(known)
    if name not in known:
        raise ValueError(f"{kind} {name!r} is not known{_did_you_mean(name, known)}; known: {', '.join(known)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fleetpilot",
        description="Scheduling policies for fleets of LLM inference engines, compared in simulation.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"fleetpilot {fleetpilot.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    _add_demo(commands)
    _add_list(commands)
    _add_simulate(commands)
    _add_evaluate(commands)
    _add_tune(commands)
    _add_plan(commands)
    _add_trace(commands)
    add_learning(_command, commands)
    add_serve(_command, commands)
    add_replay_log(_command, commands)
    _add_emulate(commands)
    _add_calibrate(commands)
    _add_validate(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, epilog: str = "") -> Any:
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog)
    parser.set_defaults(run=run)
    return parser


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {low} to {high}")
        return value

    return parse


def _seconds(low: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not low <= _number(text) <= MAX_POLL_S:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds from {low:g} to {MAX_POLL_S:g}")
        return _number(text)

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _load(text: str) -> float:
    if not 0 < _number(text) <= MAX_LOAD:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one number > 0 and <= {MAX_LOAD:g}, as 0.9")
    return _number(text)


def _loads(text: str) -> list[float]:
    loads = [_load(part) for part in text.split(",")]
    if len(set(loads)) < len(loads):
        raise argparse.ArgumentTypeError(f"{text!r}: expected different numbers joined by commas, as 0.8,0.95")
    return loads


def _share(text: str) -> float:
    if not 0 <= _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number >= 0 and < 1")
    return _number(text)


def _names(example: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r}: expected different names joined by commas, as {example}")
        return names

    return parse


def _count(text: str) -> int:
    """A whole number >= 1, or 0 for anything else."""
    return int(text) if text.isdecimal() and 1 <= len(text) <= 9 else 0


def _parts(text: str) -> list[tuple[str, int]]:
    """NAME:N,... as pairs."""
    expected = f"NAME:N,... with whole numbers N from 1 to {MAX_INSTANCES} in all, as {FLEET_EXAMPLE}"
    parts = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        if not name or not _count(count):
            raise argparse.ArgumentTypeError(f"{part!r}: expected {expected}")
        parts.append((name, _count(count)))
    if sum(count for _, count in parts) > MAX_INSTANCES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return parts


class _Size(NamedTuple):
    """How many instances, and of each its role; no roles where there are no pools."""

    number: int
    roles: tuple[str, ...]


def _sized(text: str) -> _Size | None:
    """N, or pools as 2P+4D; None for anything else."""
    sizes = [(_count(part.strip().rstrip("PDM")), part.strip().lstrip("0123456789")) for part in text.split("+")]
    whole = len(sizes) == 1 and sizes[0][1] == ""
    known = all(count for count, _ in sizes) and (whole or all(role in ROLES for _, role in sizes))
    count = sum(count for count, _ in sizes)
    if not known or count > MAX_INSTANCES:
        return None
    return _Size(count, () if whole else tuple(ROLES[role] for count, role in sizes for _ in range(count)))


def _size(text: str) -> _Size:
    size = _sized(text)
    if size is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a whole number from 1 to {MAX_INSTANCES}, or so many for prefill (P), decode (D) and "
            f"both (M), as {POOLS_EXAMPLE}"
        )
    return size


def _fleet(text: str) -> list[tuple[str, _Size]]:
    """NAME:N,... as pairs, where N may be pools."""
    expected = (
        f"NAME:N,... with whole numbers N from 1 to {MAX_INSTANCES} in all, as {FLEET_EXAMPLE}, or with pools, as "
        "h100-llama-3.1-8b:2P,a100-llama-3.1-8b:4D"
    )
    parts = []
    for part in text.split(","):
        name, _, size = part.strip().rpartition(":")
        sized = _sized(size)
        if not name or sized is None:
            raise argparse.ArgumentTypeError(f"{part!r}: expected {expected}")
        parts.append((name, sized))
    if sum(size.number for _, size in parts) > MAX_INSTANCES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return parts


def _failures(text: str) -> tuple[tuple[float, int], ...]:
    """N@S,... as (time in s, instance)."""
    failures = []
    for part in text.split(","):
        instance, _, time_s = part.strip().partition("@")
        known = instance.isdecimal() and len(instance) <= len(str(MAX_INSTANCES))
        if not known or not 0 <= _number(time_s) <= MAX_POLL_S:
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected INSTANCE@SECONDS, joined by commas, seconds from 0 to {MAX_POLL_S:g}, "
                f"as {FAIL_EXAMPLE}"
            )
        failures.append((_number(time_s), int(instance)))
    return tuple(failures)


def _add_workload_options(parser: Any, *, several: bool) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        metavar="NAME",
        action="append" if several else "store",
        help="a trace file, or a generated workload with its parameters such as 'gamma?rate=8&cv=3' "
        "(fleetpilot list workloads)" + ("; may be given again" if several else ""),
    )
    group.add_argument(
        "--superpose",
        metavar="K",
        type=_whole(1, MAX_WINDOWS),
        default=1,
        help=f"lay K windows of the workload over each other (at most {MAX_WINDOWS})",
    )
    group.add_argument(
        "--drop-over-length", action="store_true", help="leave out requests that are too long for an instance"
    )
    group.add_argument(
        "--load",
        metavar="SHARE",
        type=_loads if several else _load,
        help="speed the arrivals up or down to this share of the fleet's measured capacity, at most to twice their "
        "speed; without --instances the fleet is sized for it" + ("; several joined by commas" if several else ""),
    )
    group.add_argument(
        "--warmup-share",
        metavar="X",
        type=_share,
        default=0.1,
        help="share of the span that is not scored (default 0.1)",
    )


def _add_fleet_options(parser: Any) -> None:
    group = parser.add_argument_group("fleet")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--profile",
        metavar="NAME",
        default=DEFAULT_PROFILE,
        help=f"hardware profile of all instances, or a .toml file (default {DEFAULT_PROFILE}; "
        "fleetpilot list profiles)",
    )
    kind.add_argument(
        "--fleet",
        metavar="NAME:N,...",
        type=_fleet,
        help=f"a fleet of several kinds, as {FLEET_EXAMPLE}; N may be as of --instances",
    )
    group.add_argument(
        "--instances",
        metavar="N",
        type=_size,
        help=f"number of instances (default {DEFAULT_INSTANCES}, at most {MAX_INSTANCES}); or so many for prefill (P), "
        f"for decode (D) and for both (M), as {POOLS_EXAMPLE}",
    )
    group.add_argument(
        "--first-token-from",
        choices=("decode", "prefill"),
        help="with P and D: who gives a request's first token (default decode, as vLLM's hand-over with NIXL)",
    )
    group.add_argument(
        "--decode-choice",
        choices=("at-admission", "after-prefill"),
        help="with P and D: when the policy says who decodes a request (default at-admission)",
    )
    group.add_argument(
        "--shared-cache-gb",
        metavar="GB",
        type=_positive,
        help="a cache of so many GB of KV behind the prefix caches of all instances, from which they load",
    )
    group.add_argument(
        "--slo",
        metavar="NAME,...",
        type=_names("chat,tight"),
        default=["chat"],
        help="SLO classes, by index (default chat)",
    )
    group.add_argument(
        "--poll-interval-s",
        metavar="S",
        type=_seconds(MIN_POLL_INTERVAL_S),
        default=0.1,
        help=f"period of telemetry polls (default 0.1, at least {MIN_POLL_INTERVAL_S:g})",
    )
    group.add_argument(
        "--poll-delay-s",
        metavar="S",
        type=_seconds(0.0),
        default=0.0,
        help=f"time until a poll is visible (default 0, at most {MAX_POLLS_IN_FLIGHT:,} intervals)",
    )
    group.add_argument(
        "--engine-reported",
        action="store_true",
        help="engines report their load at the end of every step, as in the Llumnix paper; stock vLLM does not",
    )
    group.add_argument(
        "--rebalance-s",
        metavar="S",
        type=_seconds(MIN_POLL_INTERVAL_S),
        help="let running requests move between instances with their KV cache: the policy is asked every S seconds "
        "(Llumnix: 0.2; policies that only dispatch are never asked)",
    )
    group.add_argument(
        "--protocol",
        choices=("llumnix", "vllm"),
        help="how they move, with --rebalance-s: Llumnix's protocol (default), or what stock vLLM can do",
    )
    group.add_argument(
        "--ready",
        metavar="N",
        type=_whole(1, MAX_INSTANCES),
        help="let the fleet scale: N of the instances are ready at the start, and every 10 s the policy may start or "
        "drain one (policies that only dispatch are never asked, and stay with N)",
    )
    group.add_argument(
        "--start-up-s", metavar="S", type=_seconds(0.0), help="of an instance, with --ready (default 30)"
    )
    group.add_argument(
        "--mtbf-s",
        metavar="S",
        type=_seconds(1.0),
        help="instances fail at random, on average every S seconds each; repaired after 60 s, their requests restart",
    )
    group.add_argument(
        "--fail",
        metavar="N@S,...",
        type=_failures,
        help=f"instance N, counted from 0, fails at S seconds, as {FAIL_EXAMPLE}; repaired and restarted likewise",
    )
    group.add_argument(
        "--notice-s",
        metavar="S",
        type=_seconds(0.0),
        help="failures of --fail are announced S seconds before, and the instance drains (default 0)",
    )


# --- fleets and workloads ----------------------------------------------------------------------------------------


def _served(
    arguments: argparse.Namespace, workload: str | None, load: float | None
) -> tuple[RequestTable, FleetConfig]:
    """What is to be served and by what, as the options say."""
    from fleetpilot.cluster import Failures, FleetConfig, Rebalancing, Scaling, SharedCache, Telemetry
    from fleetpilot.evaluation.runner import compile_kernels, stderr_line
    from fleetpilot.evaluation.segments import at_load, instances_for_load
    from fleetpilot.fleet.slo import SLO_CLASSES
    from fleetpilot.workloads.selection import superpose

    if arguments.poll_delay_s > MAX_POLLS_IN_FLIGHT * arguments.poll_interval_s:
        raise ValueError(
            f"--poll-delay-s {arguments.poll_delay_s:g}: expected at most {MAX_POLLS_IN_FLIGHT:,} times "
            f"--poll-interval-s {arguments.poll_interval_s:g}"
        )
    _expect_with(arguments, "rebalance_s", "protocol")
    _expect_with(arguments, "ready", "start_up_s")
    _expect_with(arguments, "fail", "notice_s")
    table = _table(workload)
    if arguments.superpose > 1:
        table = superpose(table, arguments.superpose)
    profiles = _mixed(arguments) if arguments.fleet is not None else (_profile(arguments.profile),)
    table = _fitting(table, profiles, arguments.drop_over_length)
    if load:
        compile_kernels(["round-robin"], stderr_line)  # measuring a capacity takes a run
    if arguments.fleet is None:
        sized = instances_for_load(table, profiles[0], load) if load and not arguments.instances else DEFAULT_INSTANCES
        if sized > MAX_INSTANCES:
            raise ValueError(
                f"--load {load:g}: {table.name} would need {sized:,} instances; expected at most {MAX_INSTANCES}"
            )
        profiles *= arguments.instances.number if arguments.instances else sized
    fleet = FleetConfig(
        profiles,
        Telemetry(arguments.poll_interval_s, arguments.poll_delay_s, arguments.engine_reported),
        slo_classes=tuple(SLO_CLASSES[_known("SLO class", name, SLO_CLASSES)] for name in arguments.slo),
        rebalancing=None
        if arguments.rebalance_s is None
        else Rebalancing(arguments.rebalance_s, protocol=arguments.protocol or "llumnix"),
        scaling=None
        if arguments.ready is None
        else Scaling(ready=arguments.ready, start_up_s=30.0 if arguments.start_up_s is None else arguments.start_up_s),
        failures=None
        if arguments.mtbf_s is None and arguments.fail is None
        else Failures(
            at=arguments.fail or (),
            notice_s=arguments.notice_s or 0.0,
            mtbf_s=math.inf if arguments.mtbf_s is None else arguments.mtbf_s,
        ),
        pools=_pools(arguments),
        shared_cache=None
        if arguments.shared_cache_gb is None
        else SharedCache(capacity_bytes=1e9 * arguments.shared_cache_gb),
    )
    return (at_load(table, fleet, load) if load else table), fleet


def _expect_with(arguments: argparse.Namespace, needed: str, option: str) -> None:
    """Refuse an option that says something of another one that is not given."""
    value = getattr(arguments, option)
    if value is not None and getattr(arguments, needed) is None:
        named, other = (f"--{name.replace('_', '-')}" for name in (option, needed))
        raise ValueError(f"{named} {value}: expected with {other}")


def _table(name: str | None) -> RequestTable:
    """The requests of a trace file, or of a workload by name."""
    from fleetpilot.workloads import list_workloads, workload

    if not name:
        given = "--workload" if name is None else repr(name)
        raise ValueError(f"{given}: expected a trace file or the name of a workload (fleetpilot list workloads)")
    base, question_mark, parameters = name.partition("?")
    if Path(base).is_file():
        table = workload(f"file:{name}").replace(name=f"{Path(base).name}{question_mark}{parameters}")
    else:
        known = [info.name for info in list_workloads()]
        if base not in known and ":" not in base:
            if _looks_like_a_path(base, known):
                raise ValueError(f"{base}: no such file; expected a trace or a workload (fleetpilot list workloads)")
            _known("workload (and no file is called so)", base, known)
        table = workload(name)
    if not len(table):
        raise ValueError(f"{name}: no requests: {_what_was_read(table)}; expected at least one")
    return table


def _looks_like_a_path(text: str, workloads: Iterable[str]) -> bool:
    folder, slash, _ = text.rpartition("/")
    groups = {name.partition("/")[0] for name in workloads}
    return bool(Path(text).suffix) or os.path.exists(text) or (bool(slash) and folder not in groups)


def _what_was_read(table: RequestTable) -> str:
    from fleetpilot.workloads.readers.read import rows_summary

    return rows_summary(cast("dict[str, object]", table.meta["read"]))


def _fitting(table: RequestTable, profiles: Iterable[HardwareProfile], drop: bool) -> RequestTable:
    """The requests that every instance can hold.

    Raises:
        ValueError: some do not fit and are not to be dropped.
    """
    from fleetpilot.workloads.selection import within_length

    smallest = min(profiles, key=lambda profile: profile.max_model_len)
    kept = within_length(table, smallest.max_model_len)
    left_out = f"{len(table) - len(kept):,} of {len(table):,} requests"
    limit = f"more than the {smallest.max_model_len:,} tokens of {smallest.name}"
    if len(kept) < len(table) and not drop:
        raise ValueError(f"{table.name}: {left_out} have {limit}; --drop-over-length leaves them out")
    if not len(kept):
        raise ValueError(f"{table.name}: {left_out} have {limit}; expected some that fit")
    if len(kept) < len(table):
        warnings.warn(f"{table.name}: left out {left_out}: they have {limit}", stacklevel=2)
    return kept


def _profile(name: str) -> HardwareProfile:
    from fleetpilot.fleet.profiles import list_profiles, load_profile

    return load_profile(name if name.endswith(".toml") else _known("profile", name, list_profiles()))


def _mixed(arguments: argparse.Namespace) -> tuple[HardwareProfile, ...]:
    """The profiles of ``--fleet NAME:N,...``, one per instance."""
    if arguments.instances:
        raise ValueError(
            f"--instances {arguments.instances.number}: expected without --fleet, which has its own numbers"
        )
    return tuple(profile for name, size in arguments.fleet for profile in [_profile(name)] * size.number)


def _pools(arguments: argparse.Namespace) -> Pools | None:
    """The roles of the instances, if any of them has one, and what becomes of requests that go from one to another."""
    from fleetpilot.cluster import Pools

    sizes = [size for _, size in arguments.fleet] if arguments.fleet else [arguments.instances or _Size(0, ())]
    options = {
        name: value.replace("-", "_")
        for name in ("first_token_from", "decode_choice")
        if (value := getattr(arguments, name)) is not None
    }
    if not any(size.roles for size in sizes):
        for name in options:
            given = f"--{name.replace('_', '-')} {getattr(arguments, name)}"
            raise ValueError(f"{given}: expected with instances as {POOLS_EXAMPLE}")
        return None
    return Pools(tuple(role for size in sizes for role in size.roles or ("mixed",) * size.number), **options)


def _policy(name: str) -> str:
    from fleetpilot.agents import SHIPPED, is_export_name, load_policy
    from fleetpilot.baselines import BASELINES, ORACLE_BOUNDS

    base = name.partition("?")[0]
    if not is_export_name(base):
        _known("policy (and no folder is called so)", base, [*BASELINES, *SHIPPED, *ORACLE_BOUNDS])
    load_policy(name)
    return name


# --- simulate ----------------------------------------------------------------------------------------------------


def _add_simulate(commands: Any) -> None:
    parser = _command(
        commands,
        "simulate",
        _simulate,
        "run one policy on one workload and print what happened",
        "examples:\n"
        "  fleetpilot simulate --workload 'twin/azure-conv?n=5000' --instances 12\n"
        "  fleetpilot simulate --policy lmetric --workload trace.csv --load 0.9 --slo tight,loose --json\n"
        "  fleetpilot simulate --workload 'gamma?rate=8&cv=3' --profile a40-qwen2.5-3b --instances 2P+4D\n"
        "  fleetpilot simulate --workload 'llumnix/M-M?rate=3' --fleet a10-llama-7b:4,a10-llama-7b-13616:2 -o runs/a\n",
    )
    parser.add_argument(
        "--policy", metavar="NAME", default="join-shortest-queue", help="policy (default join-shortest-queue)"
    )
    _add_workload_options(parser, several=False)
    _add_fleet_options(parser)
    parser.add_argument(
        "--seed", metavar="N", type=_whole(0, 2**64 - 1), default=0, help="seed of tie-breaks (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("-o", "--out", metavar="FOLDER", type=Path, help="write requests, samples and summary there")


def _simulate(arguments: argparse.Namespace) -> int:
    from fleetpilot.agents import load_policy
    from fleetpilot.evaluation.provenance import fleet_json, provenance, table_hash, to_json
    from fleetpilot.evaluation.report import run_text
    from fleetpilot.evaluation.runner import compile_kernels, stderr_line
    from fleetpilot.evaluation.runs import run_one

    policy = _policy(arguments.policy)
    table, fleet = _served(arguments, arguments.workload, arguments.load)
    compile_kernels([policy], stderr_line)
    outcome = run_one(table, fleet, load_policy(policy), seed=arguments.seed, warmup_share=arguments.warmup_share)
    config = {"workload_hash": table_hash(table), "fleet": fleet_json(fleet), "warmup_share": arguments.warmup_share}
    record = {"config": config, "command": shlex.join(sys.argv), **provenance()}
    if arguments.out:
        outcome.write(arguments.out / "run", record)
    stderr_line("")
    print(to_json({**outcome.summary, **record}) if arguments.json else run_text(outcome.summary, fleet))
    return NOTHING_FINISHED if outcome.summary["completed"] == 0 else 0


# --- evaluate ----------------------------------------------------------------------------------------------------


def _add_evaluate(commands: Any) -> None:
    from fleetpilot.evaluation.tuned import OURS

    parser = _command(
        commands,
        "evaluate",
        _evaluate,
        "compare policies on the same segments of the same workloads, and write a report",
        "Runs that are in the folder already are not run again: after Ctrl-C the same command goes on.\n\n"
        "examples:\n"
        "  fleetpilot evaluate --policies all --workload trace.csv --drop-over-length --load 0.8,0.95 --segments 10\n"
        "  fleetpilot evaluate --policies round-robin,lmetric --workload twin/azure-code --instances 12 -o runs/two\n"
        "  fleetpilot evaluate --tuned --family azure-conv --workload twin/azure-conv --drop-over-length --load 0.95\n"
        "  fleetpilot evaluate --experiment llumnix-motivation\n",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME,...",
        type=_names("round-robin,lmetric"),
        default=["all"],
        help="policies, or all (the default): the baselines and learned, as fleetpilot list policies has them, but no "
        "oracle bounds, exports of yours and tuned parameters",
    )
    parser.add_argument(
        "--baseline", metavar="NAME", help="policy that the others are compared with (default the first)"
    )
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        help="run a paper's experiment, or one of ours, instead (fleetpilot list experiments)",
    )
    _add_workload_options(parser, several=True)
    _add_segments_option(parser)
    parser.add_argument(
        "--windows",
        choices=("all", "development", "test"),
        default="all",
        help="of each workload: all (the default), or what tune leaves out or takes",
    )
    parser.add_argument(
        "--tuned",
        metavar="FILE",
        type=Path,
        nargs="?",
        const=OURS,
        help="take the parameters that tune wrote; without FILE those that come with fleetpilot",
    )
    parser.add_argument(
        "--family",
        metavar="NAME",
        help=f"of the parameters in the file of --tuned (default {DEFAULT_FAMILY}), such as azure-conv in ours",
    )
    _add_fleet_options(parser)
    parser.add_argument(
        "--seeds", metavar="N", type=_whole(1, MAX_SEEDS), default=3, help="number of tie-break seeds (default 3)"
    )
    parser.add_argument("--workers", metavar="N", type=_whole(1, MAX_WORKERS), help="processes (default: all cores)")
    parser.add_argument(
        "--backend",
        choices=("local", "ray"),
        default="local",
        help="where runs are made: this machine, or a Ray cluster (RAY_ADDRESS; without one, Ray on this machine)",
    )
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", type=Path, help="folder of runs and report (default runs/evaluation)"
    )


def _add_segments_option(parser: Any) -> None:
    parser.add_argument(
        "--segments",
        metavar="K",
        type=_whole(1, MAX_SEGMENTS),
        default=10,
        help="cut each workload into K windows (default 10)",
    )


def _evaluate(arguments: argparse.Namespace) -> int:
    from fleetpilot.evaluation import Interrupted, evaluate, write_report
    from fleetpilot.evaluation.tuned import tuned_names

    out = arguments.out or Path("runs") / (arguments.experiment or "evaluation")
    try:
        if arguments.experiment is not None:
            return _experiment(arguments, out)
        policies, baseline = _policies(arguments.policies), arguments.baseline
        if baseline is not None and baseline not in policies:
            raise ValueError(f"--baseline {baseline!r}: expected one of the policies: {', '.join(policies)}")
        _expect_with(arguments, "tuned", "family")
        if arguments.tuned is not None:
            names = tuned_names(arguments.tuned, arguments.family or DEFAULT_FAMILY, policies)
            tuned = dict(zip(policies, names, strict=True))
            policies, baseline = list(tuned.values()), tuned.get(baseline)
        scenarios = [
            _scenario(arguments, workload, load, arguments.windows)
            for workload in arguments.workload or [None]
            for load in arguments.load or [None]
        ]
        runs = evaluate(
            scenarios,
            policies,
            out,
            seeds=range(arguments.seeds),
            workers=arguments.workers,
            backend=arguments.backend,
        )
        status = _report(write_report(runs, out, baseline=baseline))
        for scenario in scenarios:
            _warn_of_overload(scenario, [run for run in runs if run.summary["config"]["scenario"] == scenario.name])
        return status
    except Interrupted as interrupted:
        return _say(f"{interrupted} in {out}; the same command goes on from there", INTERRUPTED)


def _warn_of_overload(scenario: Scenario, runs: list[StoredRun]) -> None:
    """Say what fleet it takes where hardly a request meets its targets, and no load was asked for."""
    from fleetpilot.evaluation.segments import offered_load

    goodputs = [run.summary["metrics"]["goodput"]["share"] for run in runs]
    if (
        scenario.load is not None
        or min((share for share in goodputs if share is not None), default=1.0) > HOPELESS_GOODPUT
    ):
        return
    load, instances = offered_load(scenario.segments, scenario.fleet), len(scenario.fleet.profiles)
    if load is not None and load > 1:
        warnings.warn(
            f"{scenario.name}: requests come at {load:.1f} times the rate that the fleet can carry, so most are late "
            f"whoever dispatches them; it takes {math.ceil(instances * load)} such instances or more, see "
            "--load and fleetpilot plan",
            stacklevel=2,
        )


def _policies(names: list[str]) -> list[str]:
    from fleetpilot.agents import SHIPPED
    from fleetpilot.baselines import BASELINES

    if "all" in names and len(names) > 1:
        raise ValueError(f"--policies {','.join(names)}: expected all alone, which stands for every policy")
    return [*BASELINES, *SHIPPED] if names == ["all"] else [_policy(name) for name in names]


def _scenario(arguments: argparse.Namespace, workload: str | None, load: float | None, windows: str) -> Scenario:
    from fleetpilot.evaluation import Scenario, cut
    from fleetpilot.evaluation.segments import windows_of

    table, fleet = _served(arguments, workload, load)
    kinds = Counter(profile.name for profile in fleet.profiles)
    name = f"{table.name} on {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}"
    return Scenario(
        name if load is None else f"{name} at load {load:g}",
        windows_of(cut(table, arguments.segments), windows),
        fleet,
        warmup_share=arguments.warmup_share,
        family=f"{table.name} on {', '.join(kinds)}",  # --load may size the fleet
        load=load,
    )


def _report(report: Report) -> int:
    from fleetpilot.evaluation.runner import stderr_line

    stderr_line("")
    print(report.text)
    for path in (report.html, report.markdown, report.csv, *report.plots):
        print(path)
    return 0


def _experiment(arguments: argparse.Namespace, out: Path) -> int:
    from inspect import signature

    from fleetpilot.evaluation.experiments import EXPERIMENTS, load_experiment
    from fleetpilot.evaluation.runner import stderr_line
    from fleetpilot.evaluation.tables import markdown, plain

    experiment = load_experiment(_known("experiment", arguments.experiment, EXPERIMENTS))
    chooses = "policies" in signature(experiment.run).parameters
    fixed = {"experiment", "out", "workers", "run", *(["policies"] if chooses else [])}
    defaults = vars(_parser().parse_args(["evaluate"]))
    for name, value in vars(arguments).items():
        if name not in fixed and value != defaults.get(name, value):
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected none, an experiment sets its own")
    given = {"policies": _policies(arguments.policies)} if chooses and arguments.policies != ["all"] else {}
    tables = experiment.run(out, workers=arguments.workers, **given)
    (out / "report.md").write_text("\n".join(map(markdown, tables)))
    stderr_line("")
    print("\n".join(map(plain, tables)))
    print(out / "report.md")
    return 0


# --- tune --------------------------------------------------------------------------------------------------------


def _add_tune(commands: Any) -> None:
    parser = _command(
        commands,
        "tune",
        _tune,
        "look for the parameters of policies on development windows, with the same budget for each",
        "Each workload is cut into windows, every other one for development: evaluate --windows test scores the rest.\n"
        "Trials that are in the folder already are not made again: after Ctrl-C the same command goes on.\n\n"
        "examples:\n"
        "  fleetpilot tune --family chat --policies calibrated,llm-d --workload trace.csv --load 0.8,0.95\n"
        "  fleetpilot evaluate --tuned runs/tuning/tuned.json --family chat --windows test --workload trace.csv\n",
    )
    parser.add_argument(
        "--family",
        metavar="NAME",
        default=DEFAULT_FAMILY,
        help=f"name of the scenarios, which get parameters in common (default {DEFAULT_FAMILY})",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME,...",
        type=_names("calibrated,llm-d"),
        default=["all"],
        help="policies, or all (the default) that have parameters to look for",
    )
    _add_workload_options(parser, several=True)
    _add_segments_option(parser)
    _add_fleet_options(parser)
    parser.add_argument(
        "--trials", metavar="N", type=_whole(1, MAX_TRIALS), default=30, help="of each policy, at most (default 30)"
    )
    parser.add_argument("--seed", metavar="N", type=_whole(0, 2**31 - 1), default=0, help="of the search (default 0)")
    parser.add_argument(
        "--seeds", metavar="N", type=_whole(1, MAX_SEEDS), default=1, help="number of tie-break seeds (default 1)"
    )
    parser.add_argument("--workers", metavar="N", type=_whole(1, MAX_WORKERS), help="processes (default: all cores)")
    parser.add_argument("--backend", choices=("local", "ray"), default="local", help="where runs are made")
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", type=Path, default=Path("runs/tuning"), help="folder (default runs/tuning)"
    )


def _tune(arguments: argparse.Namespace) -> int:
    from fleetpilot.baselines import BASELINES, policy_ranges
    from fleetpilot.evaluation.runner import stderr_line
    from fleetpilot.evaluation.tables import plain
    from fleetpilot.evaluation.tuning import tune, tuned_table

    policies = _policies(arguments.policies)
    if arguments.policies == ["all"]:
        policies = [name for name in BASELINES if policy_ranges(name)]
    scenarios = [
        _scenario(arguments, workload, load, "development")
        for workload in arguments.workload or [None]
        for load in arguments.load or [None]
    ]
    try:
        found = tune(
            scenarios,
            policies,
            arguments.out,
            family=arguments.family,
            trials=arguments.trials,
            seeds=range(arguments.seeds),
            seed=arguments.seed,
            workers=arguments.workers,
            backend=arguments.backend,
        )
    except KeyboardInterrupt:
        return _say(f"interrupted; trials are kept in {arguments.out}, the same command goes on", INTERRUPTED)
    stderr_line("")
    print(plain(tuned_table(arguments.family, found)))
    print(arguments.out / "tuned.json")
    return 0


# --- plan --------------------------------------------------------------------------------------------------------


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        _plan,
        "say how many instances meet a latency target at a workload's rate, and what binds",
        "examples:\n"
        "  fleetpilot plan --workload 'twin/azure-conv?rate=200&n=20000' --ttft-ms 500 "
        "--profiles h100-llama-3.1-8b,l40s-llama-3.1-8b\n"
        "  fleetpilot plan --workload trace.csv --policies round-robin,lmetric --ttft-ms 300 --tpot-ms 40\n"
        "  fleetpilot plan --workload 'poisson?rate=100' --profiles h100-llama-3.1-8b --tpot-ms 50 "
        "--engine max_num_seqs=64 --engine draft_tokens=3,acceptance=0.7,draft_ms=1\n"
        "  fleetpilot plan --workload 'sessions/chat?rate=100&n=5000' --ttft-ms 300 --tpot-ms 30 "
        "--engine pools=false --engine pools=true --engine shared_cache_gb=500\n",
    )
    parser.add_argument(
        "--workload", metavar="NAME", help="a trace file or a generated workload; its rate is what is to be served"
    )
    parser.add_argument(
        "--superpose", metavar="K", type=_whole(1, MAX_WINDOWS), default=1, help="lay K windows of it over each other"
    )
    parser.add_argument(
        "--drop-over-length", action="store_true", help="leave out requests that are too long for an instance"
    )
    parser.add_argument(
        "--profiles",
        metavar="NAME,...",
        type=_names("h100-llama-3.1-8b,b200-llama-3.1-8b"),
        default=[DEFAULT_PROFILE],
        help=f"hardware profiles or .toml files, each a fleet of its own (default {DEFAULT_PROFILE})",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME,...",
        type=_names("round-robin,lmetric"),
        default=["join-shortest-queue"],
        help="policies (default join-shortest-queue)",
    )
    parser.add_argument(
        "--engine",
        metavar="FIELD=VALUE,...",
        action="append",
        type=_engine,
        help=f"change the engines and what the fleet has besides: {', '.join(ENGINE_FIELDS)}; may be given again, for "
        "another fleet of each kind",
    )
    parser.add_argument("--ttft-ms", metavar="MS", type=_positive, help="target for the time to the first token")
    parser.add_argument("--tpot-ms", metavar="MS", type=_positive, help="target for the mean time per token after it")
    parser.add_argument(
        "--percentile", metavar="P", type=_positive, default=99.0, help="of the requests that meet it (default 99)"
    )
    parser.add_argument(
        "--max-instances", metavar="N", type=_whole(1, MAX_INSTANCES), default=MAX_INSTANCES, help="most to try"
    )
    parser.add_argument("--workers", metavar="N", type=_whole(1, MAX_WORKERS), help="processes (default: all cores)")
    parser.add_argument("--backend", choices=("local", "ray"), default="local", help="where runs are made")
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")


def _positive(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number > 0")
    return _number(text)


ENGINE_FIELDS = {
    "prefix_cache": bool,
    "chunked_prefill": bool,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "draft_tokens": int,
    "acceptance": float,
    "draft_ms": float,
    "draft_per_seq_ms": float,
    "shared_cache_gb": float,
    "pools": bool,
}
"""What a plan can change (`fleetpilot.evaluation.planning.configured`), and what its values are."""


def _engine(text: str) -> dict[str, bool | int | float]:
    """FIELD=VALUE,... as the changes of a profile and of a fleet."""
    expected = f"FIELD=VALUE,... of {', '.join(ENGINE_FIELDS)}, as max_num_seqs=64,prefix_cache=false"
    changes: dict[str, bool | int | float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        known = _engine_value(ENGINE_FIELDS[name], value) if name in ENGINE_FIELDS and name not in changes else None
        if known is None:
            raise argparse.ArgumentTypeError(f"{part!r}: expected {expected}")
        changes[name] = known
    return changes


def _engine_value(kind: type, text: str) -> bool | int | float | None:
    """The value of a field, None for anything else."""
    if kind is bool:
        return {"true": True, "false": False}.get(text)
    if kind is int:
        return int(text) if text.isdecimal() else None
    return _number(text) if 0 <= _number(text) < math.inf else None


def _plan(arguments: argparse.Namespace) -> int:
    from fleetpilot.evaluation.backends import map_over_workers
    from fleetpilot.evaluation.planning import Answer, Target, answer, configured, plan_table
    from fleetpilot.evaluation.provenance import to_json
    from fleetpilot.evaluation.runner import compile_kernels, stderr_line
    from fleetpilot.evaluation.tables import plain
    from fleetpilot.workloads.selection import superpose

    if arguments.ttft_ms is None and arguments.tpot_ms is None:
        raise ValueError("expected --ttft-ms, --tpot-ms or both: a plan needs a target")
    target = Target(
        arguments.percentile,
        *(math.inf if most is None else most / 1e3 for most in (arguments.ttft_ms, arguments.tpot_ms)),
    )
    profiles = [_profile(name) for name in arguments.profiles]
    policies = [_policy(name) for name in arguments.policies]
    table = _fitting(superpose(_table(arguments.workload), arguments.superpose), profiles, arguments.drop_over_length)
    questions = [
        configured(table, profile, policy, target, changes, arguments.max_instances)
        for profile in profiles
        for changes in arguments.engine or [{}]
        for policy in policies
    ]
    compile_kernels(policies, stderr_line)
    found: dict[int, Answer] = {}

    def keep(place: int, of: Answer) -> None:
        found[place] = of
        stderr_line(f"{len(found)}/{len(questions)} {of.question.profile.name} {of.question.policy}: {of.binds}")

    status = 0
    try:
        map_over_workers(answer, questions, keep, backend=arguments.backend, workers=arguments.workers, say=stderr_line)
    except KeyboardInterrupt:
        status = _say(f"interrupted: {len(found)} of {len(questions)} fleets are planned", INTERRUPTED)
    answers = [found[place] for place in sorted(found)]
    stderr_line("")
    if answers and arguments.json:
        print(to_json([of.record() for of in answers]))
    elif answers:
        shown = plan_table(answers)
        print(f"{plain(shown)}{shown.note}")
    return status


# --- demo --------------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        _demo,
        "compare policies on a small workload, draw the result, and serve",
        "These are the baselines that only say where requests go, none that moves requests or scales, and with\n"
        "--train the policy that was trained. Of all policies: fleetpilot evaluate.\n",
    )
    parser.add_argument("-o", "--out", metavar="FOLDER", type=Path, default=Path("demo"), help="folder (default demo)")
    parser.add_argument(
        "--train",
        action="store_true",
        help="train a policy first, which takes some minutes and fleetpilot[train], and let it compete",
    )


def _demo(arguments: argparse.Namespace) -> int:
    from fleetpilot.evaluation import Interrupted
    from fleetpilot.evaluation.demo import demo
    from fleetpilot.learning import train_quick
    from fleetpilot.serving import serve_demo

    try:
        trained = train_quick(arguments.out) if arguments.train else None
        status = _report(demo(arguments.out, trained))
        serve_demo(str(trained or "llumnix"))
        return status
    except Interrupted as interrupted:
        return _say(f"{interrupted} in {arguments.out}; the same command goes on from there", INTERRUPTED)


# --- emulate -----------------------------------------------------------------------------------------------------


def _add_emulate(commands: Any) -> None:
    parser = _command(
        commands,
        "emulate",
        _emulate,
        "serve emulated engines: vLLM's HTTP interface over the simulator, in real time, no GPU",
        "examples:\n  fleetpilot emulate --engines 4\n"
        "  fleetpilot emulate --fleet h100-llama-3.1-8b:2,l40s-llama-3.1-8b:4 --port 9000\n",
    )
    parser.set_defaults(instances=None)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--profile",
        metavar="NAME",
        default=DEFAULT_ENGINE_PROFILE,
        help=f"hardware profile of all engines, or a .toml file (default {DEFAULT_ENGINE_PROFILE})",
    )
    kind.add_argument("--fleet", metavar="NAME:N,...", type=_parts, help=f"a mixed fleet, as {FLEET_EXAMPLE}")
    parser.add_argument(
        "--engines",
        metavar="N",
        type=_whole(1, MAX_ENGINES),
        help=f"number of engines (default {DEFAULT_INSTANCES}, at most {MAX_ENGINES})",
    )
    parser.add_argument(
        "--port",
        metavar="P",
        type=_whole(1, 65535),
        default=DEFAULT_PORT,
        help=f"of the first engine; the others have the ports that follow (default {DEFAULT_PORT})",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--model", metavar="NAME", default="emulated", help="served model name (default emulated)")
    parser.add_argument(
        "--mean-tokens",
        metavar="N",
        type=_whole(1, 1_000_000),
        default=256,
        help="mean length of answers that nothing else ends (default 256)",
    )
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default="priority",
        help="order of waiting requests and victims, as vLLM's option (default priority)",
    )


def _emulate(arguments: argparse.Namespace) -> int:
    from fleetpilot.dispatcher.emulator import Options, run

    if arguments.fleet is not None and arguments.engines is not None:
        raise ValueError(f"--engines {arguments.engines}: expected without --fleet, which has its own numbers")
    if arguments.fleet is None:
        profiles = (_profile(arguments.profile),) * (arguments.engines or DEFAULT_INSTANCES)
    else:
        profiles = _mixed(arguments)
    if arguments.port + len(profiles) - 1 > 65535:
        raise ValueError(f"--port {arguments.port}: expected room for {len(profiles)} engines, up to port 65535")
    options = Options(
        model=arguments.model,
        mean_tokens=float(arguments.mean_tokens),
        priority_order=arguments.scheduling_policy == "priority",
    )
    run(profiles, options, host=arguments.host, port=arguments.port)
    return 0


# --- trace -------------------------------------------------------------------------------------------------------


def _add_trace(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="inspect, convert, generate and fetch request traces",
        description="Inspect, convert, generate and fetch request traces. Where a trace is wanted, a file does (with\n"
        "the parameters of 'file:' behind a ?), and so does a workload's name.",
        epilog="examples:\n"
        "  fleetpilot trace inspect trace.csv\n"
        "  fleetpilot trace convert trace.csv trace.jsonl\n"
        "  fleetpilot trace generate 'gamma?rate=8&cv=3&n=20000' bursty.csv\n"
        "  fleetpilot trace fetch azure_2023_conv -o traces\n",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    inspect = _command(actions, "inspect", _inspect, "describe a trace: rate, burstiness, lengths, sessions, prefixes")
    inspect.add_argument("trace", metavar="TRACE")
    inspect.add_argument("--json", action="store_true", help="print the description as JSON")
    for action, source in {"convert": "TRACE", "generate": "WORKLOAD"}.items():
        summary = f"write a {source.lower()} as Mooncake JSON lines (.jsonl) or Vidur CSV (.csv)"
        writer = _command(actions, action, _convert, summary)
        writer.add_argument("trace", metavar=source)
        writer.add_argument("target", metavar="FILE", type=Path, help="ends in .jsonl (Mooncake) or .csv (Vidur)")
    fetch = _command(actions, "fetch", _fetch, "download a public trace and check it (fleetpilot list traces)")
    fetch.add_argument("name", metavar="NAME")
    fetch.add_argument(
        "-o", "--out", metavar="FOLDER", type=Path, default=Path("traces"), help="folder (default traces)"
    )
    fetch.add_argument("--url", help="a mirror")


def _inspect(arguments: argparse.Namespace) -> int:
    from fleetpilot.evaluation.provenance import to_json
    from fleetpilot.evaluation.workload_summary import workload_summary, workload_text
    from fleetpilot.workloads import read_summary

    table = _table(arguments.trace)
    if arguments.json:
        print(to_json({**workload_summary(table), "meta": table.meta}))
        return 0
    if "read" in table.meta:
        print(read_summary(table))
    print(workload_text(workload_summary(table)))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from fleetpilot.workloads import write_mooncake, write_vidur

    writers = {".jsonl": write_mooncake, ".csv": write_vidur}
    if arguments.target.suffix not in writers:
        raise ValueError(f"FILE {str(arguments.target)!r}: expected a name that ends in {' or '.join(writers)}")
    table = _table(arguments.trace)
    writers[arguments.target.suffix](table, arguments.target)
    print(f"{arguments.target}: {len(table):,} requests")
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from fleetpilot.workloads.fetch import SOURCES, fetch

    source = SOURCES[_known("trace", arguments.name, SOURCES)]
    path = fetch(arguments.name, arguments.out, arguments.url)
    print(f"{path}\n{source.attribution}; {source.licence}")
    return 0


# --- calibrate ---------------------------------------------------------------------------------------------------


def _add_calibrate(commands: Any) -> None:
    parser = _command(
        commands,
        "calibrate",
        _calibrate,
        "measure live vLLM engines for some minutes and write their hardware profile",
        "Engines that share cores or a host are measured while all are loaded: give all their URLs. Points are kept\n"
        "beside the profile, so that the same command goes on after Ctrl-C.\n\nexample:\n"
        "  fleetpilot calibrate http://127.0.0.1:8001 http://127.0.0.1:8002 -o mine.toml --max-num-seqs 256\n",
    )
    parser.add_argument("urls", metavar="URL", nargs="+", help="engines; with two the link between them is measured")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the profile, ends in .toml")
    count = _whole(1, 2**31 - 1)
    group = parser.add_argument_group("what stock vLLM does not say (measured where possible if not given)")
    group.add_argument("--max-num-seqs", metavar="N", type=count)
    group.add_argument("--max-num-batched-tokens", metavar="N", type=count)
    group.add_argument("--kv-bytes-per-token", metavar="N", type=count)
    group.add_argument("--hardware", metavar="TEXT", default="not stated", help="what the engines run on")
    parser.add_argument("--start-command", metavar="COMMAND", default="", help="starts the first engine, and is timed")
    parser.add_argument(
        "--limit-s", metavar="S", type=_seconds(1.0), default=270.0, help="for the points (default 270)"
    )
    parser.add_argument(
        "--longest-prompt", metavar="N", type=_whole(64, 2**20), default=8192, help="tokens to measure (default 8192)"
    )
    parser.add_argument(
        "--poll-interval-s",
        metavar="S",
        type=_seconds(0.01),
        default=0.1,
        help="between readings of the engines' metrics meanwhile, as serve reads them (default 0.1)",
    )
    parser.add_argument(
        "--max-error",
        metavar="X",
        type=_share,
        default=0.15,
        help="median relative error on points held out at which the fit is refused (default 0.15)",
    )
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the engines' API key")


def _calibrate(arguments: argparse.Namespace) -> int:
    from fleetpilot.calibration.facts import Given
    from fleetpilot.calibration.measure import CalibrationError, Request, calibrate, calibration_text
    from fleetpilot.evaluation.runner import stderr_line

    if arguments.out.suffix != ".toml":
        raise ValueError(f"--out {str(arguments.out)!r}: expected a name that ends in .toml")
    request = Request(
        urls=tuple(arguments.urls),
        out=arguments.out,
        given=Given(arguments.max_num_seqs, arguments.max_num_batched_tokens, arguments.kv_bytes_per_token),
        hardware=arguments.hardware,
        start_command=arguments.start_command,
        api_key=os.environ.get(arguments.api_key_env or "", ""),
        limit_s=arguments.limit_s,
        longest_prompt=arguments.longest_prompt,
        poll_interval_s=arguments.poll_interval_s,
        max_error=arguments.max_error,
    )
    try:
        found = calibrate(request, stderr_line)
    except CalibrationError as error:
        return _say(f"error: {error}", BAD_INPUT)
    except KeyboardInterrupt:
        return _say(f"interrupted; points are kept in {request.points_path}, the same command goes on", INTERRUPTED)
    stderr_line("")
    print(calibration_text(found))
    return 0


# --- validate ----------------------------------------------------------------------------------------------------


def _add_validate(commands: Any) -> None:
    parser = _command(
        commands,
        "validate",
        _validate,
        "replay a trace on live engines and in the simulator, and compare the two",
        "The engines must serve nobody else meanwhile.\n\nexample:\n"
        "  fleetpilot validate --trace 'gamma?rate=2&n=200' --engines http://127.0.0.1:8001 http://127.0.0.1:8002 \\\n"
        "    --profile mine.toml --policies round-robin,join-shortest-queue -o runs/validation\n",
    )
    parser.add_argument("--trace", metavar="NAME", required=True, help="a trace file, or a workload's name")
    parser.add_argument("--engines", metavar="URL", nargs="+", required=True)
    parser.add_argument(
        "--profile",
        metavar="P[,P...]",
        type=lambda text: text.split(","),
        required=True,
        help="as calibrate wrote it, one for all engines or one each",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME,...",
        type=_names("round-robin,llumnix"),
        default=["round-robin", "join-shortest-queue", "least-kv", "freeness"],
        help="policies (default round-robin,join-shortest-queue,least-kv,freeness)",
    )
    parser.add_argument("--repeats", metavar="N", type=_whole(1, 100), default=3, help="of every policy (default 3)")
    parser.add_argument("--seed", metavar="N", type=_whole(0, 2**31 - 1), default=0, help="of prompts and tie breaks")
    parser.add_argument("--slo", metavar="NAME", default="chat", help="that goodput is measured by (default chat)")
    parser.add_argument("--poll-interval-s", metavar="S", type=_seconds(0.01), default=0.1, help="default 0.1")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the engines' API key")
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", type=Path, default=Path("runs/validation"), help="default runs/validation"
    )


def _validate(arguments: argparse.Namespace) -> int:
    from fleetpilot.agents import load_policy
    from fleetpilot.calibration.report import verdict, write_validation
    from fleetpilot.calibration.validation import Setup, ValidationError, validate
    from fleetpilot.dispatcher.config import ServeConfig
    from fleetpilot.evaluation.runner import stderr_line
    from fleetpilot.fleet.slo import SLO_CLASSES

    setup = Setup(
        table=_table(arguments.trace),
        urls=tuple(arguments.engines),
        profiles=tuple(arguments.profile),
        policies=tuple(load_policy(_policy(name)) for name in arguments.policies),
        repeats=arguments.repeats,
        seed=arguments.seed,
        slo=SLO_CLASSES[_known("SLO class", arguments.slo, SLO_CLASSES)],
        api_key=os.environ.get(arguments.api_key_env or "", ""),
        dispatcher=ServeConfig(poll_interval_s=arguments.poll_interval_s),
    )
    try:
        found = validate(setup, stderr_line)
    except ValidationError as error:
        return _say(f"error: {error}", BAD_INPUT)
    stderr_line("")
    report = write_validation(found, arguments.out, "fleetpilot " + shlex.join(sys.argv[1:]))
    print(verdict(found))
    print(report)
    return 0


# --- list --------------------------------------------------------------------------------------------------------


def _add_list(commands: Any) -> None:
    parser = _command(commands, "list", _list, "name the " + ", ".join(_LISTS))
    parser.add_argument(
        "what", nargs="?", choices=_LISTS, metavar="WHAT", help=f"one of {', '.join(_LISTS)}; all of them by default"
    )


def _list(arguments: argparse.Namespace) -> int:
    for what in [arguments.what] if arguments.what else _LISTS:
        if not arguments.what:
            print(f"\n{what}")
        for row in _aligned(_LISTS[what]()):
            print(row if arguments.what else f"  {row}")
    return 0


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _list_policies() -> list[tuple[str, ...]]:
    from fleetpilot.agents.runtime import SHIPPED, read_card
    from fleetpilot.baselines import policy_rows

    rows: list[tuple[str, ...]] = [(row.name, row.rule) for row in policy_rows()]
    for name, folder in SHIPPED.items():
        card = read_card(folder)
        rows.append((name, f"Learned with the configuration {card['provenance']['config']}, else {card['fallback']}."))
    return rows


def _list_profiles() -> list[tuple[str, ...]]:
    from fleetpilot.fleet.profiles import profile_rows

    rows = profile_rows()
    return [tuple(rows[0]), *(tuple(row.values()) for row in rows)]


def _list_workloads() -> list[tuple[str, ...]]:
    from fleetpilot.workloads import list_workloads

    return [
        (info.name, info.summary, "?" + "&".join(f"{name}={default}" for name, default in info.parameters.items()))
        for info in list_workloads()
    ]


def _list_experiments() -> list[tuple[str, ...]]:
    from fleetpilot.evaluation.experiments import EXPERIMENTS, load_experiment

    return [(name, (load_experiment(name).__doc__ or "").splitlines()[0]) for name in EXPERIMENTS]


def _list_traces() -> list[tuple[str, ...]]:
    from fleetpilot.workloads.fetch import SOURCES

    return [(name, source.format, source.licence, source.attribution) for name, source in SOURCES.items()]


def _list_configs() -> list[tuple[str, ...]]:
    from fleetpilot.training.config import configurations

    return list(configurations().items())


def _list_scenarios() -> list[tuple[str, ...]]:
    from fleetpilot.envs.scenarios import scenario_rows

    return list(scenario_rows())


_LISTS: dict[str, Callable[[], list[tuple[str, ...]]]] = {
    "policies": _list_policies,
    "profiles": _list_profiles,
    "workloads": _list_workloads,
    "traces": _list_traces,
    "scenarios": _list_scenarios,
    "experiments": _list_experiments,
    "configs": _list_configs,
}
