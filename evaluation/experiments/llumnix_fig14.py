"""Llumnix (OSDI'24), Fig. 14: instances that are used, and prefill latency, with automatic scaling.

One to sixteen A10s with LLaMA-7B, eight at the start, serve 10,000 requests of L-L lengths: Poisson arrivals at
several rates, Gamma gaps of several CVs at 2 requests/s. Both systems keep the fleet's freeness in [10, 60], asked
every 10 s from 100 s on. A new instance is ready at once: the paper states no delay, and keeps the weights loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fleetpilot.cluster import Scaling
from fleetpilot.evaluation.experiments.llumnix_figures import FIG14
from fleetpilot.evaluation.experiments.llumnix_runs import (
    INSTANCES,
    Bound,
    Job,
    Size,
    Values,
    all_hold,
    bounds_table,
    cells_table,
    fleet,
    instances_used,
    mean,
    measured,
    policy,
    run_jobs,
    with_range,
)
from fleetpilot.evaluation.tables import Table

SCALING = Scaling(interval_s=10, first_s=100, ready=8, min_instances=1, max_instances=INSTANCES, start_up_s=0)
SYSTEMS = ("INFaaS++", "Llumnix")
SPECS = {"poisson_rate_rps": "llumnix/L-L?rate={:g}", "gamma_cv": "llumnix/L-L?rate=2&cv={:g}"}
TITLES = {"poisson_rate_rps": "Poisson, {:g} requests/s", "gamma_cv": "Gamma, 2 requests/s, CV {:g}"}
METRICS = {"avg_instances": "instances", "prefill_p99_s": "prefill P99 s"}
TOLERANCE = 0.1
FINDINGS = (
    "Without migration an instance drains until its last request ends, which may take minutes; that is what INFaaS++ "
    "pays for. Our P99s are lower than the paper's by up to a half, mostly at few instances."
)
"""What the note of the bounds says."""

Cells = dict[tuple[Any, ...], list[Values]]
"""(panel, x, system) -> a value per repeat."""


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: requests and repeats of each cell.

    Returns:
        The bounds, then all cells.
    """
    jobs = [
        Job((panel, x, system), SPECS[panel].format(x), policy(system, "L-L"), fleet(scaling=SCALING))
        for panel, shown in FIG14.items()
        for x in shown["x"]
        for system in SYSTEMS
    ]
    cells = scaled_cells(jobs, out, workers, size)
    return [bounds(cells), comparison(cells)]


def scaled_cells(jobs: list[Job], out: Path, workers: int | None, size: Size) -> Cells:
    """The metrics of every run and how many instances it used."""
    runs = run_jobs(jobs, out, workers, size)
    return {
        key: [{**measured(run.requests()), "avg_instances": instances_used(run)} for run in stored]
        for key, stored in runs.items()
    }


def bounds(cells: Cells) -> Table:
    """Fewer instances, and less latency, at every point; and how many fewer."""
    points = [(panel, x) for panel, shown in FIG14.items() for x in shown["x"]]
    rows = []
    for metric, title in METRICS.items():
        better = [mean(cells[*point, "Llumnix"], metric) <= mean(cells[*point, "INFaaS++"], metric) for point in points]
        rows.append(all_hold(f"{title}: Llumnix <= INFaaS++", "at every point, as in the paper", better, "all"))
    near = [
        abs(mean(cells[panel, x, system], "avg_instances") / shown["avg_instances"][system][place] - 1) <= TOLERANCE
        for panel, shown in FIG14.items()
        for place, x in enumerate(shown["x"])
        for system in SYSTEMS
    ]
    rows.append(all_hold("instances of each system, ours / paper", f"all within {TOLERANCE:.0%}", near))
    for panel, shown in FIG14.items():
        theirs = 1 - np.array(shown["avg_instances"]["Llumnix"]) / shown["avg_instances"]["INFaaS++"]
        ours = [
            1 - mean(cells[panel, x, "Llumnix"], "avg_instances") / mean(cells[panel, x, "INFaaS++"], "avg_instances")
            for x in shown["x"]
        ]
        what = f"instances saved %, {TITLES[panel].split(',')[0]} (mean of points)"
        rows.append(Bound(what, f"{100 * theirs.mean():.1f}", with_range(ours, 100), "-", None))
    return bounds_table("Llumnix, Fig. 14, bounds", rows, FINDINGS)


def comparison(cells: Cells) -> Table:
    """All cells beside the paper's."""
    rows = {
        f"{TITLES[panel].format(x)}, {system}": [
            ([repeat[metric] for repeat in cells[panel, x, system]], 1.0, shown[metric][system][place])
            for metric in METRICS
        ]
        for panel, shown in FIG14.items()
        for place, x in enumerate(shown["x"])
        for system in SYSTEMS
    }
    return cells_table("Llumnix, Fig. 14", "cell", METRICS.values(), rows)
