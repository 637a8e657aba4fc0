"""Llumnix (OSDI'24) with stock engines: what it loses where engines do not report their load, on Fig. 11's M-M.

The paper's engines report their load to the scheduler after every iteration. Stock engines are polled ten times a
second, and the dispatcher keeps account of what it sent; preempted requests are not seen at all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fleetpilot.cluster import Telemetry
from fleetpilot.evaluation.experiments.llumnix_fig11 import paper
from fleetpilot.evaluation.experiments.llumnix_figures import FIG11
from fleetpilot.evaluation.experiments.llumnix_runs import (
    Job,
    Size,
    by_repeat,
    fleet,
    policy,
    ratio,
    run_jobs,
    table,
    with_range,
)
from fleetpilot.evaluation.tables import Table

TRACE = "M-M"
TELEMETRY = {"reported": Telemetry(engine_reported=True), "stock": Telemetry()}
METRICS = {"request_mean_s": "request mean s", "prefill_mean_s": "prefill mean s", "prefill_p99_s": "prefill P99 s"}
FINDINGS = (
    "Stock: counters polled every 0.1 s and the dispatcher's ledger. The mean request loses a few per cent, prefill "
    "most near saturation."
)
"""What the note of the bounds says."""


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: requests and repeats of each cell.

    Returns:
        One table.
    """
    rates = FIG11[TRACE]["rates_rps"]
    jobs = [
        Job(
            (rate, system, kind),
            f"llumnix/{TRACE}?rate={rate:g}",
            policy(system, TRACE),
            fleet(telemetry=telemetry),
        )
        for rate in rates
        for system in ("INFaaS++", "Llumnix")
        for kind, telemetry in TELEMETRY.items()
    ]
    cells = by_repeat(run_jobs(jobs, out, workers, size))
    rows = []
    for rate in rates:
        for system in ("INFaaS++", "Llumnix"):
            rows.append([f"{rate:g} {system}"])
            for metric in METRICS:
                ours = {kind: [repeat[metric] for repeat in cells[rate, system, kind]] for kind in TELEMETRY}
                lost = ratio(float(np.mean(ours["stock"])), float(np.mean(ours["reported"])))
                published = f"{paper((TRACE, rate, system), metric):.3g}"
                rows[-1] += [published, with_range(ours["reported"]), with_range(ours["stock"]), lost]
    header = ["requests/s, system"]
    for title in METRICS.values():
        header += [f"{title}: paper", "reported", "stock", "stock / reported"]
    return [table("Llumnix, stock telemetry on M-M", header, rows, FINDINGS)]
