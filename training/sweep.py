"""Several training runs side by side - seeds, values of settings, scenarios - on this machine or on a Ray cluster.

Each run is one of `fleetpilot.training.train` on one core, in its own folder. A run that lost its worker goes on from
its last checkpoint when it is tried again: by Ray on another worker, or by whoever calls `sweep` again.
"""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpilot.agents.runtime import CARD
from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.tables import Table, Text
from fleetpilot.training.checkpoint import CHECKPOINT
from fleetpilot.training.config import TrainConfig, with_settings
from fleetpilot.training.train import EXPORT, begin, resume, run_config

LOG = "log.txt"


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        name: what is its own in it, as ``seed=1,ppo.clip=0.1``.
        config: of the run.
        folder: of the run.
        command: for the record.
    """

    name: str
    config: TrainConfig
    folder: Path
    command: str


class Trained(NamedTuple):
    """What a run came to.

    Attributes:
        folder: of the run.
        decisions: of its best policy.
        cost: of that on validation, relative to the baselines.
    """

    folder: Path
    decisions: int
    cost: float


def members(
    config: TrainConfig,
    out: Path,
    *,
    seeds: Sequence[int] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    each_scenario: bool = False,
    command: str = "",
) -> list[Member]:
    """Every combination of seeds, values and scenarios.

    Args:
        config: what they have in common.
        out: folder of runs; a run's is ``out/ppo/<environment>_<its name>``.
        seeds: the configuration's if there are none.
        vary: values of settings, by their place in the file: ``{"ppo.clip": [0.1, 0.2]}``.
        each_scenario: a run for each scenario alone, in place of one for all.
        command: for the record.

    Raises:
        ValueError: a setting or a value is wrong; or there is nothing to vary.
    """
    axes: dict[str, Sequence[Any]] = {"seed": seeds, **(vary or {})}
    axes = {name: values for name, values in axes.items() if values}
    shards = [{name: changes} for name, changes in config.scenarios.items()] if each_scenario else [config.scenarios]
    short = config.environment.rpartition("/")[2]
    found = []
    for scenarios, *values in itertools.product(shards, *axes.values()):
        own = dict(zip(axes, values, strict=True))
        names = [f"{name}={value}" for name, value in own.items()]
        if each_scenario:
            names.insert(0, *scenarios)
        factors = {name: factor for name, factor in config.time_factors.items() if name in scenarios}
        one = with_settings(replace(config, scenarios=scenarios, time_factors=factors), own)
        folder = out / "ppo" / f"{short}_{','.join(names).replace('/', '-')}"
        found.append(Member(",".join(names), one, folder, command))
    if len(found) < 2:
        raise ValueError("nothing varies: expected several seeds, values of settings or scenarios")
    if len({member.folder for member in found}) < len(found):
        raise ValueError(f"expected different runs, got {', '.join(member.name for member in found)}")
    return found


def sweep(
    runs: Sequence[Member],
    done: Callable[[Member, Trained], None],
    *,
    backend: str = "local",
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Trained]:
    """Train all members that are not trained yet.

    Args:
        runs: from `members`. Their folders have to be the same for all workers: on a cluster, of a shared file system.
        done: called with every finished run, as they come.
        backend: see `fleetpilot.evaluation.backends.map_over_workers`, which says what is raised, too.
        workers: runs at a time, each on one core.
        say: told when Ctrl-C is heeded.

    Raises:
        ValueError: a folder holds a run with another configuration.
    """
    for member in runs:
        if list(member.folder.glob("*/config.toml")) and run_config(member.folder) != member.config:
            raise ValueError(
                f"{member.folder}: holds a run with another configuration; expected another folder of runs"
            )
    found: dict[int, Trained] = {}

    def keep(index: int, trained: Trained) -> None:
        found[index] = trained
        done(runs[index], trained)

    map_over_workers(train_member, runs, keep, backend=backend, workers=workers, say=say)
    return [found[index] for index in range(len(runs))]


def train_member(member: Member) -> Trained:
    """Begin a run, or go on with it, or find that it is trained; what it says goes to ``log.txt`` in its folder."""
    folder = member.folder
    if not (folder / EXPORT / CARD).is_file():

        def say(line: str) -> None:
            with (folder / LOG).open("a", encoding="utf-8") as log:
                print(line, file=log)

        if (folder / CHECKPOINT).is_file():
            resume(folder, say=say, tick=_quiet)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # begun, and lost before the first checkpoint
            begin(member.config, folder, command=member.command, say=say, tick=_quiet)
        gc.collect()  # a run's environments are gigabytes and refer to each other: the next run would stand beside them
    with np.load(folder / "evaluations.npz") as curve:
        best = int(np.argmin(curve["costs"]))
        return Trained(folder, int(curve["timesteps"][best]), float(curve["costs"][best]))


def _quiet(line: str) -> None:
    pass


def table(runs: Sequence[Member], trained: Sequence[Trained]) -> Table:
    """All runs, the best marked."""
    best = min(each.cost for each in trained)
    rows = [
        [Text(member.name), Text(f"{each.decisions:,}"), Text(f"{each.cost:.3f}", best=each.cost == best)]
        for member, each in zip(runs, trained, strict=True)
    ]
    return Table("Runs", ["run", "decisions of the best", "validation cost"], rows)
