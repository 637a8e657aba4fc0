"""``fleetpilot train``, ``export`` and ``explain``: learned policies on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetpilot.training.config import TrainConfig

MAX_SEED = 2**31 - 1


def add_learning(command: Callable[..., Any], commands: Any) -> None:
    """Add the subcommands."""
    _add_train(command, commands)
    _add_export(command, commands)
    _add_explain(command, commands)


def _count(text: str) -> int:
    """A whole number from 1 to a billion."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {10**9:,}")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 to {MAX_SEED}")
    return int(text)


# --- train -----------------------------------------------------------------------------------------------------------


def _add_train(command: Callable[..., Any], commands: Any) -> None:
    parser = command(
        commands,
        "train",
        _train,
        "train a policy: imitation of a baseline, then reinforcement learning",
        "Ctrl-C ends a run after its update; --resume goes on as if nothing had happened. Several runs - seeds,\n"
        "values, scenarios - are made side by side; the same command goes on with those that were not finished.\n\n"
        "examples:\n"
        "  fleetpilot train --config quick\n"
        "  fleetpilot train --config mine.toml --seed 3 -o runs/mine\n"
        "  fleetpilot train --resume runs/train/ppo/Dispatch-v0_1\n"
        "  fleetpilot train --config dispatch --seeds 0,1,2 --vary ppo.clip=0.1,0.2 --backend ray\n"
        "  tensorboard --logdir runs/train\n",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", metavar="NAME", help="configuration (fleetpilot list configs), or a .toml file")
    which.add_argument("--resume", metavar="FOLDER", type=Path, help="run to go on with")
    parser.add_argument("--seed", metavar="N", type=_seed, help="in place of the configuration's")
    parser.add_argument("--decisions", metavar="N", type=_count, help="in place of the configuration's")
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", type=Path, default=Path("runs/train"), help="of runs (default runs/train)"
    )
    several = parser.add_argument_group("several runs")
    several.add_argument("--seeds", metavar="N,N", type=_seeds, default=[], help="one run for each seed")
    several.add_argument(
        "--vary",
        metavar="SETTING=A,B",
        type=_values,
        action="append",
        default=[],
        help="one for each value of a setting, by its place in the file; again for every combination",
    )
    several.add_argument("--each-scenario", action="store_true", help="one for each scenario alone")
    several.add_argument(
        "--backend", choices=("local", "ray"), default="local", help="where (ray: on a cluster, with a shared folder)"
    )
    several.add_argument("--workers", metavar="N", type=_count, help="runs at a time (default: the cores)")


def _seeds(text: str) -> list[int]:
    return [_seed(part) for part in text.split(",")]


def _values(text: str) -> tuple[str, list[Any]]:
    """``ppo.clip=0.1,0.2``: a setting and values as TOML has them."""
    name, _, values = text.partition("=")
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        found = []
    if not name or not found:
        raise argparse.ArgumentTypeError(
            f'{text!r}: expected SETTING=A,B with values as in TOML, mode="greedy","sample"'
        )
    return name, found


def _train(arguments: argparse.Namespace) -> int:
    from fleetpilot.evaluation.runner import stderr_line
    from fleetpilot.training.config import load_config
    from fleetpilot.training.train import resume, train

    changes = {name: getattr(arguments, name) for name in ("seed", "decisions") if getattr(arguments, name) is not None}
    several = [name for name in ("seeds", "vary", "each_scenario") if getattr(arguments, name)]
    if arguments.resume is not None:
        for name in (*changes, *several):
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: expected none with --resume, which goes on with what was begun")
        resume(arguments.resume, say=_say, tick=stderr_line)
        return 0
    config = dataclasses.replace(load_config(arguments.config), **changes)
    if several:
        return _sweep(arguments, config)
    if arguments.backend != "local" or arguments.workers is not None:
        raise ValueError("--backend, --workers: expected with several runs (--seeds, --vary, --each-scenario)")
    train(config, arguments.out, say=_say, tick=stderr_line)
    return 0


def _sweep(arguments: argparse.Namespace, config: TrainConfig) -> int:
    from fleetpilot.evaluation.tables import plain
    from fleetpilot.training.sweep import members, sweep, table

    runs = members(
        config,
        arguments.out.resolve(),  # workers may stand elsewhere
        seeds=arguments.seeds,
        vary=dict(arguments.vary),
        each_scenario=arguments.each_scenario,
        command=shlex.join(sys.argv),
    )
    trained = sweep(
        runs,
        lambda run, made: _say(f"{run.name}: cost {made.cost:.3f} of the baselines', {made.folder}"),
        backend=arguments.backend,
        workers=arguments.workers,
        say=_say,
    )
    print(plain(table(runs, trained)), end="")
    return 0


def train_quick(out: Path) -> Path:
    """The folder of a policy that was trained with the configuration ``quick`` there, now or before."""
    from fleetpilot.agents.runtime import CARD
    from fleetpilot.evaluation.runner import stderr_line
    from fleetpilot.training.config import load_config
    from fleetpilot.training.train import export_run, train

    folder = out / "trained"
    if not (folder / CARD).is_file():
        export_run(train(load_config("quick"), out / "training", say=_say, tick=stderr_line), folder)
    return folder


def _say(line: str) -> None:
    """A line worth keeping, over one of progress."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(line, flush=True)


# --- export ----------------------------------------------------------------------------------------------------------


def _add_export(command: Callable[..., Any], commands: Any) -> None:
    parser = command(
        commands,
        "export",
        _export,
        "write the best policy of a training run to a folder that needs no PyTorch",
        "Training does this itself at its end.\n\nexample:\n"
        "  fleetpilot export runs/train/ppo/Dispatch-v0_1 -o policies/mine --mode sample\n",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of the training run")
    parser.add_argument("-o", "--out", metavar="FOLDER", type=Path, help="folder of the export (default RUN/export)")
    parser.add_argument("--mode", choices=("greedy", "sample"), help="how it chooses (default: as it was validated)")
    parser.add_argument("--fallback", metavar="NAME", help="baseline that decides where the policy is not at home")
    parser.add_argument(
        "--late", metavar="X", type=float, help="reject what would be later than X times its target (docs/training.md)"
    )
    parser.add_argument(
        "--busy", metavar="X", type=float, help="where tokens take long, what would be later than X times that"
    )


def _export(arguments: argparse.Namespace) -> int:
    from fleetpilot.agents import load_export
    from fleetpilot.training.train import export_run

    asked = {name: getattr(arguments, name) for name in ("late", "busy")}
    admission = {name: value for name, value in asked.items() if value is not None}
    folder = export_run(arguments.folder, arguments.out, arguments.mode, arguments.fallback, admission)
    load_export(folder)
    print(folder)
    return 0


# --- explain ---------------------------------------------------------------------------------------------------------


def _add_explain(command: Callable[..., Any], commands: Any) -> None:
    parser = command(
        commands,
        "explain",
        _explain,
        "show how a learned policy scored the instances for one decision, and which features moved the scores",
        "The decision is the N-th of an episode of a scenario that the policy itself runs.\n\nexample:\n"
        "  fleetpilot explain runs/train/ppo/Dispatch-v0_1/export --scenario bursty --decision 500 -o explained\n",
    )
    parser.add_argument("policy", metavar="FOLDER", help="folder of the export")
    parser.add_argument("--scenario", metavar="NAME", default="steady", help="(default steady)")
    parser.add_argument("--instances", metavar="N", type=_count, default=8, help="size of the fleet (default 8)")
    parser.add_argument("--load", metavar="SHARE", type=float, help="of the episode (default the scenario's)")
    parser.add_argument("--decision", metavar="N", type=_count, default=100, help="which one (default the 100th)")
    parser.add_argument("--seed", metavar="N", type=_seed, default=0, help="of the episode (default 0)")
    parser.add_argument("-o", "--out", metavar="FOLDER", type=Path, default=Path("runs/explain"))


def _explain(arguments: argparse.Namespace) -> int:
    from fleetpilot.agents import load_policy
    from fleetpilot.agents.explain import LearnedPolicy, explain, recorded_view

    policy = load_policy(arguments.policy)
    if not isinstance(policy, LearnedPolicy):
        raise ValueError(f"FOLDER {arguments.policy!r}: expected the folder of an exported policy")
    view = recorded_view(
        policy,
        arguments.scenario,
        arguments.instances,
        arguments.decision,
        seed=arguments.seed,
        load=arguments.load,
    )
    said = explain(policy, view)
    print(said.text())
    for path in said.write(arguments.out):
        print(path)
    return 0
