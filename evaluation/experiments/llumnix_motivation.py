"""Llumnix (OSDI'24), section 3: one engine at moderate memory use preempts, and preemptions make the decode tail.

One A10 with LLaMA-7B serves 2,000 requests of the paper's M-M lengths, which arrive as a Poisson process of 0.42
requests/s. The paper reports (Fig. 3) a mean memory use of 62 %, 8 % of the requests preempted, and a P99 decode
latency of 3.8 times the P50.
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

PROFILES = {
    "a10-llama-7b-13616": "13,616 KV tokens, as the paper states",
    "a10-llama-7b": "12,672 KV tokens, as its artifact sets",
}
"""The engine's profiles, and what to call them."""
STREAMS = 10


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

    Returns:
        A table for each of `PROFILES`.
    """
    # One stream of the paper's artifact gives lengths and gaps; the first seed is its own.
    streams = tuple(workload(f"llumnix/M-M?rate=0.42&n=2000&seed={PAPER_SEED + k}") for k in range(STREAMS))
    scenarios = [Scenario(name, streams, FleetConfig.of(load_profile(name), 1), warmup_share=0.0) for name in PROFILES]
    runs = evaluate(scenarios, ["round-robin"], out, seeds=(0,), workers=workers)
    metrics = [run.summary["metrics"] for run in runs]
    return [
        comparison(title, metrics[place : place + STREAMS])
        for title, place in zip(PROFILES.values(), range(0, len(runs), STREAMS), strict=True)
    ]


def comparison(title: str, metrics: list[dict[str, Any]]) -> Table:
    """The paper's figures beside those of our runs."""
    rows = []
    for published in PUBLISHED:
        ours = np.array([published.ours(run) for run in metrics])
        mean, spread = float(ours.mean()), f"{number(float(ours.min()))} to {number(float(ours.max()))}"
        accepted, within = "-", "-"
        if published.tolerance is not None:
            accepted = f"+- {published.tolerance:g}"
            within = "yes" if abs(mean - published.value) <= published.tolerance else "no"
        cells = [published.title, number(published.value), number(mean), spread, accepted, within]
        rows.append([Text(cell) for cell in cells])
    return Table(
        f"Llumnix, motivation (Fig. 3), {title}",
        ["figure", "paper", "ours, mean", "ours, range", "accepted", "within"],
        rows,
        "One A10 with LLaMA-7B, M-M lengths, 2,000 requests, Poisson arrivals of 0.42 requests/s; "
        f"{len(metrics)} random streams.",
    )
