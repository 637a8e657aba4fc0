"""What the experiments of the Llumnix paper share: systems, runs, the paper's metrics, and how bounds are judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import FleetConfig, Rebalancing, Telemetry
from fleetpilot.cluster.state import FINISHED
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.runs import StoredRun
from fleetpilot.evaluation.tables import Table, Text, number
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.workloads import workload
from fleetpilot.workloads.llumnix import PAPER_REQUESTS, PAPER_SEED
from fleetpilot.workloads.table import RequestTable

PROFILE = "a10-llama-7b-fig11"
INSTANCES = 16
REPEATS = 5
JITTER_SIGMA = 0.01
"""Noise of iterations, the engine's: near saturation a run is chaotic, and one is no measurement."""
REAL = ("ShareGPT", "BurstGPT")
"""Traces whose draws the artifact does not give."""
POLICIES = {"Round-Robin": "round-robin", "INFaaS++": "infaas++", "Llumnix": "llumnix"}
"""The paper's systems, and what they are called here."""
THRESHOLD_10 = ("M-M", "S-L")
"""Traces on which the artifact migrates below a freeness of 10 blocks per request; elsewhere it is 3, the default."""
TRUNCATED_S = 0.0005
"""The artifact notes gaps between tokens in whole milliseconds, cut off: half a one is missing in the mean."""

Values = dict[str, float]


class Size(NamedTuple):
    """How much to run: the paper's size, or less in tests.

    Attributes:
        requests: of each run.
        repeats: runs of each cell. On generated traces all have the artifact's own draws and differ by the engines'
            noise; on `REAL` ones each has draws of its own.
    """

    requests: int = PAPER_REQUESTS
    repeats: int = REPEATS

    def tables(self, spec: str) -> tuple[RequestTable, ...]:
        """The request tables of a workload."""
        seeds = range(PAPER_SEED, PAPER_SEED + (self.repeats if is_real(spec) else 1))
        return tuple(workload(f"{spec}&n={self.requests}&seed={seed}") for seed in seeds)

    def seeds(self, spec: str) -> range:
        """Seeds of the engines' noise."""
        return range(1 if is_real(spec) else self.repeats)


def is_real(spec: str) -> bool:
    """Whether a workload is one of `REAL`."""
    return any(trace in spec for trace in REAL)


def policy(system: str, trace: str) -> str:
    """What a system is called here, with the threshold that it had on a trace."""
    name = POLICIES[system]
    return f"{name}?threshold=10" if system == "Llumnix" and trace in THRESHOLD_10 else name


def fleet(profile: HardwareProfile | None = None, **options: Any) -> FleetConfig:
    """Sixteen A10s whose engines report their load; policies that move nothing are not asked to."""
    options = {"telemetry": Telemetry(engine_reported=True), "rebalancing": Rebalancing(), **options}
    profile = (profile or load_profile(PROFILE)).replace(jitter_sigma=JITTER_SIGMA)
    return FleetConfig.of(profile, INSTANCES, **options)


class Job(NamedTuple):
    """A cell of a figure.

    Attributes:
        key: what it is called.
        spec: its workload, with parameters.
        policy: its policy.
        fleet: its fleet.
    """

    key: tuple[Any, ...]
    spec: str
    policy: str
    fleet: FleetConfig


def run_jobs(jobs: Sequence[Job], out: Path, workers: int | None, size: Size) -> dict[tuple[Any, ...], list[StoredRun]]:
    """Every job, repeated, all requests scored; what is on disk is not run again."""
    runs: dict[tuple[Any, ...], list[StoredRun]] = {}
    tables = {job.spec: size.tables(job.spec) for job in jobs}
    for (name, seeds), mine in _grouped(jobs, size).items():
        scenarios = [
            Scenario(" ".join(map(str, job.key)), tables[job.spec], job.fleet, warmup_share=0.0) for job in mine
        ]
        stored = evaluate(scenarios, [name], out, seeds=seeds, workers=workers)
        for place, job in enumerate(mine):
            runs[job.key] = stored[place * size.repeats : (place + 1) * size.repeats]
    return {job.key: runs[job.key] for job in jobs}


def _grouped(jobs: Sequence[Job], size: Size) -> dict[tuple[str, range], list[Job]]:
    """Jobs by what `evaluate` takes one of: the policy and the seeds."""
    groups: dict[tuple[str, range], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.policy, size.seeds(job.spec)), []).append(job)
    return groups


def measured(requests: NDArray[np.void]) -> Values:
    """The paper's metrics, as its artifact takes them, in its figures' units.

    Raises:
        ValueError: a request did not finish.
    """
    if not np.all(requests["status"] == FINISHED):
        raise ValueError(f"{np.sum(requests['status'] != FINISHED)} requests did not finish: expected all to")
    first, finish, arrival = requests["first_token_s"], requests["finish_s"], requests["arrival_s"]
    many = requests["generated"] > 1
    decode = (finish - first)[many] / (requests["generated"][many] - 1) - TRUNCATED_S
    prefill = first - arrival
    return {
        "decode_mean_s_per_token": float(decode.mean()),
        "request_mean_s": float((finish - arrival).mean()),
        "prefill_mean_s": float(prefill.mean()),
        "prefill_p99_s": float(np.percentile(prefill, 99)),
        "preemption_loss_mean_s": float(requests["preemption_loss_s"].mean()),
    }


def instances_used(run: StoredRun) -> float:
    """Mean number of instances that were paid for."""
    return float(run.summary["metrics"]["fleet"]["run_instance_seconds"] / run.summary["simulated_s"])


def mean(values: Sequence[Values], name: str) -> float:
    """Over the repeats."""
    return float(np.mean([repeat[name] for repeat in values]))


def with_range(values: Sequence[float], scale: float = 1.0) -> str:
    """Mean and, of several, range."""
    scaled = [scale * value for value in values]
    text = number(float(np.mean(scaled)))
    return text if len(scaled) == 1 else f"{text} ({number(min(scaled))} to {number(max(scaled))})"


def ratio(ours: float, paper: float) -> str:
    """Ours over the paper's; a dash where that is nothing."""
    return f"{ours / paper:.2f}" if paper else "-"


class Bound(NamedTuple):
    """What was to come out.

    Attributes:
        title: of what.
        paper: as published.
        ours: the same here.
        accepted: the bound.
        within: whether it is met; None: not judged.
    """

    title: str
    paper: str
    ours: str
    accepted: str
    within: bool | None

    def row(self) -> list[str]:
        """As cells of a table."""
        return [self.title, self.paper, self.ours, self.accepted, yes_or_no(self.within)]


def yes_or_no(within: bool | None) -> str:
    """Of a bound."""
    return {True: "yes", False: "no", None: "-"}[within if within is None else bool(within)]


def bounds_table(title: str, bounds: Iterable[Bound], note: str) -> Table:
    """The bounds, and whether they are met."""
    header = ["bound", "paper", "ours", "accepted", "within"]
    return table(title, header, (bound.row() for bound in bounds), note)


def table(title: str, header: list[str], rows: Iterable[Sequence[str]], note: str) -> Table:
    """A table of texts."""
    return Table(title, header, [[Text(cell) for cell in row] for row in rows], note)


def cells_table(
    title: str, of: str, titles: Iterable[str], cells: Mapping[str, Sequence[tuple[Sequence[float], float, float]]]
) -> Table:
    """Cells beside the paper's.

    Args:
        title: of the table.
        of: what a cell is, the first column.
        titles: of the metrics.
        cells: by name, for each metric ours over the repeats, the factor to the figure's unit, and the paper's value.
    """
    rows = []
    for name, metrics in cells.items():
        rows.append([name])
        for ours, scale, paper in metrics:
            theirs = scale * paper
            rows[-1] += [f"{theirs:.3g}", with_range(ours, scale), ratio(scale * float(np.mean(ours)), theirs)]
    header = [of]
    for metric in titles:
        header += [f"{metric}: paper", "ours", "ratio"]
    return table(title, header, rows, "Ours: mean (range) over the repeats; ratio: ours / paper.")


def all_hold(title: str, accepted: str, ours: Sequence[bool], paper: str = "-") -> Bound:
    """A bound that every one of several cells is to meet."""
    return Bound(title, paper, f"{sum(ours)} of {len(ours)}", accepted, all(ours))


def by_repeat(runs: dict[tuple[Any, ...], list[StoredRun]]) -> dict[tuple[Any, ...], list[Values]]:
    """The metrics of every run."""
    return {key: [measured(run.requests()) for run in stored] for key, stored in runs.items()}
