"""Llumnix (OSDI'24), section 3: one engine at moderate memory use preempts, and preemptions make the decode tail.

One A10 with LLaMA-7B serves 2,000 requests of the paper's M-M lengths, which arrive as a Poisson process of 0.42
requests/s. The paper reports (Fig. 3) a mean memory use of 62 %, 8 % of the requests preempted, and a P99 decode latency
of 3.8 times the P50.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.tables import Table, Text, number
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload
from fleetpilot.workloads.llumnix import PAPER_SEED

RUNS = 10


class Published(NamedTuple):
    """A figure of the paper.

    Attributes:
        title: with its unit.
        value: as published.
        tolerance: how far off our mean may be; None where that is not judged.
        ours: the same from a run's metrics.
    """

    title: str
    value: float
    tolerance: float | None
    ours: Callable[[dict[str, Any]], float]


PUBLISHED = (
    Published("mean KV use %", 62.0, 6.0, lambda metrics: 100 * metrics["fleet"]["kv_use"]),
    Published("preempted requests %", 8.0, 3.0, lambda metrics: 100 * metrics["requests"]["preempted_share"]),
    Published(
        "decode latency P99 / P50",
        3.8,
        None,
        lambda metrics: metrics["latency"]["tpot_s"]["p99"] / metrics["latency"]["tpot_s"]["p50"],
    ),
)


def run(out: Path, *, workers: int | None = None) -> list[Table]:
    """Run it with the paper's own random stream and with others, and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
    """
    # The stream of the paper's artifact gives lengths and gaps; its 10,000-request runs start with the same seed.
    streams = tuple(workload(f"llumnix/M-M?rate=0.42&n=2000&seed={PAPER_SEED + k}") for k in range(RUNS))
    scenario = Scenario(
        "llumnix-motivation", streams, FleetConfig.of(load_profile("a10-llama-7b"), 1), warmup_share=0.0
    )
    runs = evaluate([scenario], ["round-robin"], out, seeds=(0,), workers=workers)
    return [comparison([run.summary["metrics"] for run in runs])]


def comparison(metrics: list[dict[str, Any]]) -> Table:
    """The paper's figures beside those of our runs."""
    rows = []
    for published in PUBLISHED:
        ours = np.array([published.ours(run) for run in metrics])
        accepted = "-" if published.tolerance is None else f"+- {published.tolerance:g}"
        off = abs(float(ours.mean()) - published.value)
        judged = "-" if published.tolerance is None else "yes" if off <= published.tolerance else "no"
        spread = f"{number(float(ours.min()))} to {number(float(ours.max()))}"
        cells = [published.title, number(published.value), number(float(ours.mean())), spread, accepted, judged]
        rows.append([Text(cell) for cell in cells])
    return Table(
        f"Llumnix, motivation (Fig. 3): {len(metrics)} random streams",
        ["figure", "paper", "ours, mean", "ours, range", "accepted", "within"],
        rows,
        "One A10 with LLaMA-7B, M-M lengths, 2,000 requests, Poisson arrivals of 0.42 requests/s.",
    )
