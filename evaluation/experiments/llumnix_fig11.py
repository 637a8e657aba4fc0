"""Llumnix (OSDI'24), Fig. 11: latencies of Llumnix, INFaaS++ and round-robin on seven traces, 16 engines.

Sixteen A10s with LLaMA-7B serve 10,000 requests at five rates for each trace. INFaaS++ is Llumnix's dispatch without
migration, so what Llumnix gains here is by migration alone. The engine's constants were chosen on the cells of INFaaS++
and round-robin; those of Llumnix are predictions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fleetpilot.evaluation.experiments.llumnix_figures import FIG11
from fleetpilot.evaluation.experiments.llumnix_runs import (
    Bound,
    Job,
    Size,
    Values,
    all_hold,
    bounds_table,
    by_repeat,
    cells_table,
    fleet,
    mean,
    policy,
    run_jobs,
)
from fleetpilot.evaluation.tables import Table

Cells = dict[tuple[Any, ...], list[Values]]
"""(trace, rate, system) -> a value per repeat."""

TOLERANCE = 0.1
FITTED = ("INFaaS++", "Round-Robin")
"""The systems on whose cells the engine's constants were chosen."""
SHOWN = {
    "decode_mean_s_per_token": ("decode ms", 1e3),
    "request_mean_s": ("request s", 1.0),
    "prefill_p99_s": ("prefill P99 s", 1.0),
    "preemption_loss_mean_s": ("preemption loss s", 1.0),
}
ORDERED = (("Llumnix", "INFaaS++"), ("INFaaS++", "Round-Robin"))
FINDINGS = (
    "Judged on the mean of five runs: on the artifact's own draws with 1 % of engine noise, on ShareGPT and BurstGPT "
    "on five draws, as their samples are not published. The paper's cells are single runs. The constants were chosen "
    "in sample, on one draw of each trace, and the cells of Llumnix were left out of that. Other draws of the "
    "generated traces have other means: on the artifact's and four others, without noise, 29 and 26 of the 45 and 27 "
    "and 25 of the 35 were within 10 % (decode, request). The misses: (1) on BurstGPT every system decodes 10 % "
    "slower than in the paper and round-robin queues less at the high rates; we do not know why. Its lengths are "
    "drawn by Table 1, with a correlation taken from the public data. (2) On S-S from 34 requests/s on Llumnix is "
    "better here than in the paper. Part of it is the rhythm: pairs are chosen every 0.2 s, in the artifact after "
    "four iterations of each instance (0.28 s there), and it leaves out a pair with a busy end; with 0.3 s S-S at 34 "
    "takes 9.5 s instead of 9.1 (paper 10.6). (3) INFaaS++ at the highest rates of M-M and L-S is past saturation, "
    "where runs differ by a multiple in their P99; so may S-S at 33. (4) Llumnix on S-L at 4.1 requests/s is slower "
    "in the paper than at 4.15 and 4.2; here it is not. In that cell the order of the P99s is missed too, by 5 %: "
    "here neither system is saturated."
)
"""What the note of the bounds says."""


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: requests and repeats of each cell.

    Returns:
        The bounds, then a table per trace.
    """
    jobs = [
        Job((trace, rate, system), f"llumnix/{trace}?rate={rate:g}", policy(system, trace), fleet())
        for trace, rate, system in published()
    ]
    cells = by_repeat(run_jobs(jobs, out, workers, size))
    return [bounds(cells), *(comparison(trace, cells) for trace in FIG11)]


def published() -> list[tuple[str, float, str]]:
    """The cells of the figure: trace, rate, system."""
    return [
        (trace, rate, system)
        for trace, shown in FIG11.items()
        for rate in shown["rates_rps"]
        for system in ("Round-Robin", "INFaaS++", "Llumnix")
        if system in shown["request_mean_s"]
    ]


def paper(key: tuple[Any, ...], metric: str) -> float:
    """A cell's value in the paper."""
    trace, rate, system = key
    return float(FIG11[trace][metric][system][FIG11[trace]["rates_rps"].index(rate)])


def comparison(trace: str, cells: Cells) -> Table:
    """A trace's cells beside the paper's."""
    keys = [key for key in cells if key[0] == trace]
    keys.sort(key=lambda key: (key[1], key[2] != "Round-Robin", key[2]))
    rows = {
        f"{key[1]:g} {key[2]}": [
            ([repeat[metric] for repeat in cells[key]], scale, paper(key, metric))
            for metric, (_, scale) in SHOWN.items()
        ]
        for key in keys
    }
    titles = (title for title, _ in SHOWN.values())
    return cells_table(f"Llumnix, Fig. 11, {trace}", "requests/s, system", titles, rows)


def bounds(cells: Cells) -> Table:
    """What was to come out, and whether it did."""
    rows = []
    for metric, title in (
        ("decode_mean_s_per_token", "mean decode latency"),
        ("request_mean_s", "mean request latency"),
    ):
        for chosen, what in ((True, "cells the constants were chosen on"), (False, "Llumnix, left out of that")):
            near = [
                abs(mean(cells[key], metric) / paper(key, metric) - 1) <= TOLERANCE
                for key in cells
                if (key[2] in FITTED) == chosen
            ]
            rows.append(all_hold(f"{title}, {what}", f"all within {TOLERANCE:.0%}", near))
    for metric, title in (("prefill_p99_s", "prefill P99"), ("preemption_loss_mean_s", "preemption loss")):
        for less, more in ORDERED:
            kept = [
                mean(cells[key], metric) <= mean(cells[*key[:2], more], metric)
                for key in cells
                if key[2] == less
                and (*key[:2], more) in cells
                and paper(key, metric) <= paper((*key[:2], more), metric)
            ]
            rows.append(all_hold(f"{title}: {less} <= {more}", "wherever in the paper", kept))
    rows.append(gain_bound(cells))
    return bounds_table("Llumnix, Fig. 11, bounds", rows, FINDINGS)


def gain_bound(cells: Cells) -> Bound:
    """How much better Llumnix's prefill P99 is than that of INFaaS++, over how much better in the paper."""
    ours, theirs = [], []
    for trace, rate, system in cells:
        if system == "Llumnix":
            pair = (trace, rate, "INFaaS++"), (trace, rate, "Llumnix")
            ours.append(mean(cells[pair[0]], "prefill_p99_s") / mean(cells[pair[1]], "prefill_p99_s"))
            theirs.append(paper(pair[0], "prefill_p99_s") / paper(pair[1], "prefill_p99_s"))
    off = float(np.median(np.array(ours) / np.array(theirs)))
    return Bound(
        "gain in prefill P99, INFaaS++ / Llumnix: median over cells of ours / paper's",
        f"gain {np.median(theirs):.2f} (median)",
        f"{off:.2f}, gain {np.median(ours):.2f} (median)",
        "0.5 to 2",
        0.5 <= off <= 2,
    )
