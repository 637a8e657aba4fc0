"""Prefill: min(predicted TTFT) of those without decodes; decode: the fullest below 0.85 of the TPOT target; both move.

Source: Llumnix v1 (llumnix-project), its adaptive prefill and decode pools: decodes are packed, max(predicted TPOT)
    below 0.85 of the SLO; `binpacking_mitigation` moves from above 0.95 to the fullest below 0.85,
    `binpacking_consolidation` empties what is below 0.60. The SLO defaults to 50 ms.
Reads: fleet.kind, instance.kv_capacity_blocks, instance.block_size, instance.predicted_output_tokens,
    instance.streamed_tokens, instance.state, instance.role, instance.migrating, instance.free_blocks,
    instance.queued_demand_blocks, instance.unstarted_uncached_tokens, instance.prefill_s_per_token,
    instance.matched_tokens, instance.decode_step_s, instance.decode_s_per_seq, instance.in_flight, instance.batched,
    request.prompt_tokens
Notes: The predictions are those of the profile's constants (`fleet/latency.py`); the source's are fitted online, over
    batched tokens. One SLO holds for all requests, as in the source. A destination has free memory for what it has
    queued. Without pools a request goes where its TTFT is least.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import step_s, tpot_s, ttft_s
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import (
    KIND_DECODE,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SOURCE,
    NONE,
    ROLE_PREFILL,
    STATE_DRAINING,
    STATE_READY,
)

KINDS = (KIND_DISPATCH, KIND_PREFILL, KIND_DECODE, KIND_SOURCE, KIND_DESTINATION)
RANGES = {
    "slo_s": Range(0.01, 0.2, log=True, kind=KIND_DECODE),
    "fill": Range(0.6, 0.95, kind=KIND_DECODE),
    "mitigate": Range(0.95, 1.5, kind=KIND_SOURCE),
    "consolidate": Range(0.0, 0.6, kind=KIND_SOURCE),
}


@kernel
def least_ttft(instances: Any, request: Any) -> int:
    """The candidate of the least predicted TTFT, first of those that decode nothing."""
    best, least = NONE, (0, np.inf)
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            key = (1 if instances[slot].batched > 0 else 0, ttft_s(instances[slot], request))
            if best == NONE or key < least:
                best, least = slot, key
    return best


@kernel
def has_room(instance: Any) -> bool:
    """Whether there is memory beyond what is queued."""
    return bool(instance.free_blocks > instance.queued_demand_blocks)


@kernel
def fullest_below(instances: Any, most_s: float, or_least: bool) -> int:
    """The candidate of the highest predicted TPOT up to `most_s` with room; else the lowest TPOT, or none."""
    best, fullest, lightest, least = NONE, -np.inf, NONE, np.inf
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.candidate != 0:
            tpot = tpot_s(instance)
            if tpot <= most_s and has_room(instance) and tpot > fullest:
                best, fullest = slot, tpot
            if tpot < least:
                lightest, least = slot, tpot
    return lightest if best == NONE and or_least else best


@kernel
def could_take_one(instances: Any, leaving: int, most_s: float, fuller: bool) -> bool:
    """Whether another ready instance, a fuller one if that is asked for, stays below `most_s` with one more."""
    for slot in range(len(instances)):
        other = instances[slot]
        here = other.state == STATE_READY and other.migrating == 0 and other.role != ROLE_PREFILL
        fits = has_room(other) and tpot_s(other) <= most_s
        if slot != leaving and here and fits and (not fuller or other.batched > instances[leaving].batched):
            return True
    return False


@kernel
def source(instances: Any, most_s: float, mitigate_s: float, consolidate_s: float) -> int:
    """The slowest above `mitigate_s`; else the one with the fewest requests below `consolidate_s`."""
    slowest, highest, emptiest = NONE, -np.inf, NONE
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.candidate == 0 or instance.batched == 0:
            continue
        step = np.inf if instance.state == STATE_DRAINING else step_s(instance, instance.batched)
        if step > mitigate_s and step > highest and could_take_one(instances, slot, most_s, False):
            slowest, highest = slot, step
        emptier = emptiest == NONE or instance.batched < instances[emptiest].batched
        if step < consolidate_s and emptier and could_take_one(instances, slot, most_s, True):
            emptiest = slot
    return slowest if slowest != NONE else emptiest


def make(slo_s: float = 0.05, fill: float = 0.85, mitigate: float = 0.95, consolidate: float = 0.6) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        slo_s: target for the time per output token.
        fill: share of it up to which instances are filled.
        mitigate: share of it above which requests leave.
        consolidate: share of it below which an instance is emptied.
    """
    if not consolidate <= fill <= mitigate:
        raise ValueError(f"fill = {fill:g}: expected consolidate, {consolidate:g}, to mitigate, {mitigate:g}")

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        kind = fleets[0].kind
        if kind == KIND_DECODE:
            return fullest_below(instances, fill * slo_s, True)
        if kind == KIND_SOURCE:
            return source(instances, fill * slo_s, mitigate * slo_s, consolidate * slo_s)
        if kind == KIND_DESTINATION:
            return fullest_below(instances, fill * slo_s, False)
        return least_ttft(instances, requests[0])

    return CompiledPolicy("llumnix-v1", choose, KINDS)


POLICY = make()
