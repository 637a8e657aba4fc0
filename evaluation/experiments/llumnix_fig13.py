"""Llumnix (OSDI'24), Fig. 13: what requests of high priority gain by it, and what the others lose.

Sixteen A10s with LLaMA-7B serve 10,000 requests of S-S lengths at 26 requests/s with Gamma gaps; every tenth request
is of high priority, chosen at random. Llumnix is compared with Llumnix-base, which regards no priorities; engines
order their queue by priority under Llumnix alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fleetpilot.evaluation.experiments.llumnix_figures import FIG13, FIG13_CV
from fleetpilot.evaluation.experiments.llumnix_runs import (
    PROFILE,
    Bound,
    Job,
    Size,
    Values,
    bounds_table,
    cells_table,
    fleet,
    measured,
    run_jobs,
    with_range,
)
from fleetpilot.evaluation.tables import Table
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads.library import HIGH_PRIORITY

SYSTEMS = {"Llumnix-base": "llumnix-base", "Llumnix": "llumnix"}
METRICS = {
    "request_mean_s": ("request mean s", 1.0),
    "prefill_mean_s": ("prefill mean s", 1.0),
    "prefill_p99_s": ("prefill P99 s", 1.0),
    "decode_mean_s_per_token": ("decode mean ms", 1e3),
}
BOUNDS = (
    ("high", "request_mean_s", "request mean", 1.2, 1.5),
    ("high", "prefill_mean_s", "prefill mean", 2.9, 8.6),
    ("normal", "request_mean_s", "request mean", 1 / 1.045, np.inf),
    ("normal", "prefill_mean_s", "prefill mean", 1 / 1.13, np.inf),
)
"""Llumnix-base over Llumnix, as the paper quotes it, and within which it is to be."""
FINDINGS = (
    "The one that misses, by 8 %, is the prefill mean at the least bursty gaps: 0.10 s for high priority where the "
    "paper has 0.095, Llumnix-base as in the paper. Probably it is the floor under a short prefill, 38.5 ms, which no "
    "measurement supports. The artifact means to queue by priority and, by a slip, inserts one place before the end; "
    "here engines queue by priority, as the paper says."
)
"""What the note of the bounds says."""

Cells = dict[tuple[int, str, str], list[Values]]
"""(CV, system, high or normal) -> a value per repeat."""


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: requests and repeats of each cell.

    Returns:
        The bounds, then all cells.
    """
    jobs = []
    for system, name in SYSTEMS.items():
        profile = load_profile(PROFILE).replace(priority_order=system == "Llumnix")
        for cv in FIG13_CV:
            spec = f"llumnix/S-S?rate=26&cv={cv:g}&high_priority=0.1"
            jobs.append(Job((cv, system), spec, name, fleet(profile)))
    cells: Cells = {}
    for (cv, system), runs in run_jobs(jobs, out, workers, size).items():
        requests = [run.requests() for run in runs]
        cells[cv, system, "high"] = [measured(of[of["priority"] == HIGH_PRIORITY]) for of in requests]
        cells[cv, system, "normal"] = [measured(of[of["priority"] != HIGH_PRIORITY]) for of in requests]
    return [bounds(cells), *(comparison(who, cells) for who in FIG13)]


def bounds(cells: Cells) -> Table:
    """Llumnix-base over Llumnix, at every CV."""
    rows = []
    for who, metric, title, low, high in BOUNDS:
        for place, cv in enumerate(FIG13_CV):
            theirs = FIG13[who][metric]["Llumnix-base"][place] / FIG13[who][metric]["Llumnix"][place]
            ours = [
                base[metric] / llumnix[metric]
                for base, llumnix in zip(cells[cv, "Llumnix-base", who], cells[cv, "Llumnix", who], strict=True)
            ]
            # to the digits in which the paper quotes it: its own 1.157 is called 1.2
            gain = float(np.mean(ours))
            within = low <= (round(gain, 1) if np.isfinite(high) else gain) <= high
            accepted = f"{low:g} to {high:g}" if np.isfinite(high) else f">= {low:.3f}"
            what = f"{title}, {who} priority, CV {cv:g}: Llumnix-base / Llumnix"
            rows.append(Bound(what, f"{theirs:.2f}", with_range(ours), accepted, within))
    return bounds_table("Llumnix, Fig. 13, bounds", rows, FINDINGS)


def comparison(who: str, cells: Cells) -> Table:
    """All cells of requests of one priority beside the paper's."""
    rows = {
        f"CV {cv:g}, {system}": [
            ([repeat[metric] for repeat in cells[cv, system, who]], scale, FIG13[who][metric][system][place])
            for metric, (_, scale) in METRICS.items()
        ]
        for place, cv in enumerate(FIG13_CV)
        for system in SYSTEMS
    }
    titles = (title for title, _ in METRICS.values())
    return cells_table(f"Llumnix, Fig. 13, requests of {who} priority", "cell", titles, rows)
