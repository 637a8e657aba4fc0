"""Llumnix (OSDI'24), Fig. 10: what a live migration costs, by the length of the request.

Two instances on two machines; the source's batch holds 8,192 tokens in all, as requests of one length, the last of
which moves. Downtime is from the request's stop to the hand-over, as the paper's engines see it; beside it, until the
request has joined the destination's batch, which runs one request of its own. LLaMA-7B runs on one A10, LLaMA-30B on
four; the 30B's link takes 4.8 GB/s in the figure.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpilot.cluster import FleetConfig, Rebalancing, RunLog, simulate
from fleetpilot.cluster.state import COMPLETED
from fleetpilot.evaluation.experiments.llumnix_figures import FIG10, FIG10_LENGTHS
from fleetpilot.evaluation.experiments.llumnix_runs import Bound, bounds_table, ratio, table, with_range
from fleetpilot.evaluation.tables import Table
from fleetpilot.fleet.policy import CompiledPolicy
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.fleet.view import KIND_DESTINATION, KIND_DISPATCH, KIND_SOURCE, NONE
from fleetpilot.workloads.table import RequestTable, make_table

BATCH_TOKENS = 8192
PLACES = 16
"""Migrations of each length, begun at as many places within a block of tokens and within a decode step."""
STEPS_BEFORE = 10
"""Decode steps of the source until its requests have the length; the migrations begin around there."""
FINDINGS = (
    "The 7B link (2.6 GB/s, 12 ms) and the 30B link (4.8 GB/s, 20 ms) were fitted to this very figure: the blocking "
    "copy's slope and the downtime of the shortest request. That the downtime hardly grows with the length is the "
    "protocol's doing."
)
"""What the note of the bounds says."""


class Setup(NamedTuple):
    """A model of the figure.

    Attributes:
        profile: of its engines.
        link: how they migrate.
        downtime_ms: the figure's, from and to, at any length.
    """

    profile: str
    link: Rebalancing
    downtime_ms: tuple[float, float]


SETUPS = {
    "LLaMA-7B": Setup("a10-llama-7b-vllm0.2", Rebalancing(max_pairs=1), (11, 26)),
    # the figure's downtime of its shortest requests, less one or two blocks of 5.3 ms
    "LLaMA-30B": Setup(
        "a10-llama-30b-tp4",
        Rebalancing(max_pairs=1, bandwidth_bytes_per_s=4.8e9, round_trip_s=0.02),
        (22, 48),
    ),
}


def _choose(instances: Any, requests: Any, fleets: Any) -> int:
    """Requests go where their priority says; the first instance is the source."""
    kind = fleets[0].kind
    if kind == KIND_DISPATCH:
        return 1 if requests[0].priority > 0 else 0
    slot = 0 if kind == KIND_SOURCE else 1
    return slot if instances[slot].candidate != 0 else NONE


POLICY = CompiledPolicy("first-to-second", _choose, (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION))


class Measured(NamedTuple):
    """Of one length; milliseconds.

    Attributes:
        handed_over: downtime until the hand-over, of each migration.
        joined: downtime until it has joined the destination's batch.
        step: a decode step of the source before it migrates.
        slower: factor on it while it migrates.
        recompute: prefilling the request anew.
        blocking: copying its KV all at once.
    """

    handed_over: list[float]
    joined: list[float]
    step: float
    slower: float
    recompute: float
    blocking: float


def run(out: Path, *, workers: int | None = None) -> list[Table]:
    """Run it and lay the figures side by side; nothing is stored.

    Args:
        out: not used.
        workers: not used: it takes a second.

    Returns:
        The bounds, then a table per model.
    """
    measured = {model: {length: measure(setup, length) for length in FIG10_LENGTHS} for model, setup in SETUPS.items()}
    return [bounds(measured), *(comparison(model, of) for model, of in measured.items())]


def measure(setup: Setup, length: int) -> Measured:
    """Move a request of so many tokens, some times."""
    # the longest request goes on beyond the longest that the profile takes
    profile = load_profile(setup.profile).replace(max_model_len=BATCH_TOKENS + 512)
    step_s = profile.decode_s(BATCH_TOKENS // length, length)
    still = _run(batch(length), profile, None)
    started_s = float(still.requests["first_token_s"][0])
    handed_over, joined = [], []
    for place in range(PLACES):
        first_s = started_s + (STEPS_BEFORE + (place - PLACES / 2) * (1 + 1 / PLACES)) * step_s
        log = _run(batch(length), profile, setup.link, first_s)
        migration = log.migrations[0]
        if migration["outcome"] != COMPLETED:
            raise RuntimeError(f"{setup.profile}, {length} tokens: the migration ended as {migration['outcome']}")
        handed_over.append(1e3 * float(migration["end_s"] - migration["stop_s"]))
        joined.append(1e3 * float(log.requests["downtime_s"][migration["row"]]))
    copy_s = setup.link.round_trip_s + length * profile.kv_bytes_per_token / setup.link.bandwidth_bytes_per_s
    prefill_s = profile.prefill_s(length)
    return Measured(handed_over, joined, 1e3 * step_s, setup.link.slowdown, 1e3 * prefill_s, 1e3 * copy_s)


def batch(length: int) -> RequestTable:
    """Requests for the source that reach a length after some decode steps, and one for the destination, to go last."""
    count = BATCH_TOKENS // length
    prompts = [length - STEPS_BEFORE] * count + [256]
    outputs = [3 * STEPS_BEFORE + length // 64] * count + [300]
    return make_table("batch", np.zeros(count + 1), prompts, outputs, priority=[0] * count + [1])


def _run(requests: RequestTable, profile: HardwareProfile, link: Rebalancing | None, at_s: float = math.inf) -> RunLog:
    """One run; the policy is asked to migrate at a time, and at multiples of it when the first one has ended."""
    if link is not None:
        link = Rebalancing(**{**vars(link), "interval_s": at_s})
    return simulate(requests, FleetConfig.of(profile, 2, rebalancing=link), POLICY, sample_interval_s=None)


def bounds(measured: dict[str, dict[int, Measured]]) -> Table:
    """Whether the downtime is short at every length."""
    rows = []
    for model, of in measured.items():
        low, high = SETUPS[model].downtime_ms
        for length, theirs in zip(FIG10_LENGTHS, FIG10[model]["downtime_ms"], strict=True):
            ours = of[length].handed_over
            within = low <= min(ours) and max(ours) <= high
            what = f"downtime ms, {model}, {length:,} tokens"
            rows.append(Bound(what, f"{theirs:.1f}", with_range(ours), f"{low:g} to {high:g}", within))
        slower = max(
            migrating / normal
            for migrating, normal in zip(FIG10[model]["migrating_step_ms"], FIG10[model]["step_ms"], strict=True)
        )
        ours_slower = max(row.slower for row in of.values())
        what = f"decode step of {model} while it migrates / before, largest (a setting of the model)"
        rows.append(Bound(what, f"{slower:.3f}", f"{ours_slower:.3f}", "<= 1.03", ours_slower <= 1.03))
    return bounds_table("Llumnix, Fig. 10, bounds", rows, FINDINGS)


def comparison(model: str, measured: dict[int, Measured]) -> Table:
    """All lengths beside the paper's."""
    rows = []
    for length, ours, *theirs in zip(
        FIG10_LENGTHS,
        measured.values(),
        *(FIG10[model][name] for name in ("downtime_ms", "recompute_ms", "blocking_ms", "step_ms")),
        strict=True,
    ):
        rows.append([f"{length:,}", f"{theirs[0]:.1f}", with_range(ours.handed_over), with_range(ours.joined)])
        for paper_ms, ours_ms in zip(theirs[1:], (ours.recompute, ours.blocking, ours.step), strict=True):
            rows[-1] += [f"{paper_ms:.4g}", f"{ours_ms:.4g}", ratio(ours_ms, paper_ms)]
    header = ["tokens", "downtime ms: paper", "ours, hand-over", "ours, joined"]
    for title in ("recompute", "blocking copy", "decode step"):
        header += [f"{title} ms: paper", "ours", "ratio"]
    note = f"Ours: mean (range) over {PLACES} migrations begun at different places within a block and a decode step."
    return table(f"Llumnix, Fig. 10, {model}", header, rows, note)
