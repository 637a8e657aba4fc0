"""Paired runs: every policy on the same segments of the same scenarios with the same seeds, in parallel, resumable."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetpilot.agents import load_policy
from fleetpilot.cluster import Failures, FleetConfig, simulate
from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.provenance import code_version, config_hash, fleet_json, provenance, table_hash
from fleetpilot.evaluation.runs import Outcome, RunFiles, StoredRun, check_samples, run_one
from fleetpilot.fleet.jit import cache_dir
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads.table import RequestTable, make_table


@dataclass(frozen=True)
class Scenario:
    """A fleet and the trace segments that it has to serve.

    Attributes:
        name: as shown in reports.
        segments: independent request tables; statistics are over them.
        fleet: the instances and what a dispatcher sees of them.
        failures: of each segment, in place of the fleet's; empty where these are the same for all.
        warmup_share: share of a segment's span whose arrivals are not scored.
        sample_interval_s: seconds between samples of the instances.
        family: scenarios of one family differ in their load alone, and are drawn as one curve over it.
        load: share of the fleet's capacity that the segments offer; None where it was not set.
    """

    name: str
    segments: tuple[RequestTable, ...]
    fleet: FleetConfig
    failures: tuple[Failures | None, ...] = ()
    warmup_share: float = 0.1
    sample_interval_s: float = 1.0
    family: str = ""
    load: float | None = None

    def __post_init__(self) -> None:
        if not self.segments or any(len(table) == 0 for table in self.segments):
            raise ValueError(f"scenario {self.name!r}: expected at least one segment, each with at least one request")
        if self.failures and len(self.failures) != len(self.segments):
            raise ValueError(
                f"scenario {self.name!r}: got failures of {len(self.failures)} segments, expected {len(self.segments)}"
            )
        for table in self.segments:
            check_samples(table, len(self.fleet.profiles), self.sample_interval_s)


@dataclass(frozen=True)
class Cell:
    """One run to be made: a policy on a segment of a scenario with a tie-break seed."""

    scenario: Scenario
    segment: int
    policy: str
    seed: int

    @property
    def table(self) -> RequestTable:
        """The requests."""
        return self.scenario.segments[self.segment]

    @property
    def fleet(self) -> FleetConfig:
        """The scenario's, with the failures of the segment."""
        scenario = self.scenario
        return (
            replace(scenario.fleet, failures=scenario.failures[self.segment]) if scenario.failures else scenario.fleet
        )

    def config(self) -> dict[str, Any]:
        """Everything that decides the result."""
        digest = getattr(load_policy(self.policy), "digest", None)  # tells exports of one name apart
        return {
            "policy": self.policy,
            **({} if digest is None else {"policy_digest": digest}),
            "scenario": self.scenario.name,
            "family": self.scenario.family,
            "load": self.scenario.load,
            "segment": self.segment,
            "seed": self.seed,
            "workload": {"name": self.table.name, "hash": table_hash(self.table), "requests": len(self.table)},
            "fleet": fleet_json(self.fleet),
            "warmup_share": self.scenario.warmup_share,
            "sample_interval_s": self.scenario.sample_interval_s,
            "code": code_version(learned=digest is not None),
        }

    def job(self, config: dict[str, Any], command: str) -> Job:
        """What a worker needs."""
        scenario = self.scenario
        return Job(
            self.table,
            self.fleet,
            self.policy,
            self.seed,
            scenario.warmup_share,
            scenario.sample_interval_s,
            config,
            command,
        )

    def stem(self, folder: Path, config: dict[str, Any]) -> Path:
        """Where its files lie: readable, and another place for every other configuration."""
        scenario, policy = (re.sub(r"[^a-zA-Z0-9.=_-]+", "-", name)[:80] for name in (self.scenario.name, self.policy))
        return folder / f"{scenario}-{self.segment:02d}-{policy}-{self.seed}-{config_hash(config)}"


class Interrupted(Exception):
    """Ctrl-C; what was done is kept.

    Attributes:
        done: runs that are on disk.
        total: runs that were asked for.
    """

    def __init__(self, done: int, total: int):
        super().__init__(f"interrupted: {done} of {total} runs are done and kept")
        self.done = done
        self.total = total


def evaluate(
    scenarios: Iterable[Scenario],
    policies: Sequence[str],
    out: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    workers: int | None = None,
    backend: str = "local",
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[StoredRun]:
    """Run every policy on every segment with every seed. What is on disk already, of the same config, is not run again.

    Arrivals, lengths, predictions and failures belong to the segments: the same for all policies (common random
    numbers).

    Args:
        scenarios: what to serve, on what.
        policies: names for `fleetpilot.agents.load_policy`.
        out: folder of the evaluation; the runs go to ``out/runs``.
        seeds: tie-break seeds.
        workers: processes; the machine's cores by default. With 1 all happens in this process.
        backend: where they are, see `fleetpilot.evaluation.backends.map_over_workers`.
        command: the command line for the record; this process's by default.
        progress: called with one line per finished run; by default a line on stderr, if that is a terminal.

    Returns:
        The runs in the order (scenario, segment, policy, seed).

    Raises:
        ValueError: an unknown policy, two scenarios of one name, or nothing to run.
        ChildProcessError: a worker died.
        Interrupted: after Ctrl-C. Running cells are finished first; a second Ctrl-C ends them.
    """
    scenarios = list(scenarios)
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) < len(names):
        raise ValueError(f"scenarios = {names}: expected different names")
    for policy in policies:
        load_policy(policy)
    if not (scenarios and policies and seeds):
        raise ValueError("evaluate: expected at least one scenario, one policy and one seed")
    cells = [
        Cell(scenario, segment, policy, seed)
        for scenario in scenarios
        for segment, policy, seed in itertools.product(range(len(scenario.segments)), policies, seeds)
    ]
    configs = [cell.config() for cell in cells]
    stems = [cell.stem(out / "runs", config) for cell, config in zip(cells, configs, strict=True)]
    found = [StoredRun.read(stem) for stem in stems]
    missing = [index for index, run in enumerate(found) if run is None]
    command = shlex.join(sys.argv) if command is None else command
    say = progress or stderr_line
    report = _Progress(len(cells), len(cells) - len(missing), say)
    if missing:
        compile_kernels(policies, say)

    def keep(place: int, files: RunFiles) -> None:
        index = missing[place]
        found[index] = files.write(stems[index])
        report.finished(cells[index])

    jobs = [cells[index].job(configs[index], command) for index in missing]
    try:
        map_over_workers(run_job, jobs, keep, backend=backend, workers=workers, say=say)
    except KeyboardInterrupt:
        raise Interrupted(report.done, report.total) from None
    return [run for run in found if run is not None]


def compile_kernels(policies: Sequence[str], say: Callable[[str], None]) -> None:
    """Fill the kernel cache, so that several processes do not do it side by side; quick where it is filled."""
    if not any(cache_dir().rglob("kernel.run-*.nbc")):
        say("compiling the simulator, once for these sources (about a minute)")
    request = make_table("one request", [0.0], [1], [1])
    for policy in policies:
        simulate(request, FleetConfig.of(load_profile("tiny-cpu"), 1), load_policy(policy))


@dataclass(frozen=True)
class Job:
    """A cell as a worker needs it: its own segment alone.

    Attributes:
        table: the requests.
        fleet: the instances.
        policy: name of it.
        seed: of tie-breaks.
        warmup_share: share of the span that is not scored.
        sample_interval_s: seconds between samples of the instances.
        config: everything that decides the result.
        command: for the record.
    """

    table: RequestTable
    fleet: FleetConfig
    policy: str
    seed: int
    warmup_share: float
    sample_interval_s: float
    config: dict[str, Any]
    command: str


def run_job(job: Job) -> RunFiles:
    """Make a run; its files. Raises what `outcome_of` does."""
    return outcome_of(job).files({"config": job.config, "command": job.command, **provenance()})


def outcome_of(job: Job) -> Outcome:
    """Make a run.

    Raises:
        RuntimeError: a worker on another machine has other sources, whose runs would not be what their config says.
    """
    expected = job.config["code"]
    found = code_version(learned="learned" in expected)
    if found != expected:
        raise RuntimeError(f"a worker has fleetpilot {found}, expected {expected}: install the same everywhere")
    return run_one(
        job.table,
        job.fleet,
        load_policy(job.policy),
        seed=job.seed,
        warmup_share=job.warmup_share,
        sample_interval_s=job.sample_interval_s,
    )


class _Progress:
    """Counts finished runs and says so."""

    def __init__(self, total: int, done: int, say: Callable[[str], None]):
        self.total = total
        self.done = done
        self.say = say
        if done:
            say(f"{done} of {total} runs are on disk already")

    def finished(self, cell: Cell) -> None:
        self.done += 1
        self.say(f"{self.done}/{self.total} {cell.scenario.name} segment {cell.segment} {cell.policy} seed {cell.seed}")


def stderr_line(line: str) -> None:
    """Show a line of progress on stderr, over the one before; nothing where stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
