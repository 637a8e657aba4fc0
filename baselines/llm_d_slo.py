"""Of the candidates predicted to meet both targets the one with the least headroom; if none does, an idle one first.

Source: llm-d inference scheduler, `scorer/latency` and `filter/sloheadroomtier` (predicted-latency-based scheduling):
    headroom is target - prediction; the tier with headroom is kept but for 1 % of the requests; within a tier headrooms
    are scaled to [0, 1] and summed, 0.8 TTFT + 0.2 TPOT; the strategy `least` packs. Without targets the lowest
    prediction wins.
Reads: instance.kv_capacity_blocks, instance.block_size, instance.free_blocks, instance.queued_demand_blocks,
    instance.batched, instance.predicted_output_tokens, instance.streamed_tokens, instance.unstarted_uncached_tokens,
    instance.prefill_s_per_token, instance.matched_tokens, instance.decode_step_s, instance.decode_s_per_seq,
    instance.in_flight, request.prompt_tokens, request.ttft_target_s, request.tpot_target_s, fleet.random_key
Notes: The predictions are those of the profile's constants (`fleet/latency.py`); the source trains XGBoost models on
    the requests served. Its tier without headroom takes the smallest lack. A missing target is met and weighs nothing.
    Where the source draws among its scores, the best is taken, ties to the lowest slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import tpot_s, ttft_s
from fleetpilot.fleet.policy import CompiledPolicy, Range, random_unit
from fleetpilot.fleet.view import NONE

RANGES = {
    "ttft": Range(0.0, 1.0),
    "tpot": Range(0.0, 1.0),
    "explore": Range(0.0, 0.1),
    "buffer": Range(0.2, 1.2),
}


@kernel
def headroom_s(instance: Any, request: Any, buffer: float) -> tuple[float, float]:
    """Of TTFT and of TPOT, negative where the target would be missed.

    0 where there is no target; without any, the predictions with the sign turned.
    """
    ttft, tpot = ttft_s(instance, request), tpot_s(instance)
    if np.isinf(request.ttft_target_s) and np.isinf(request.tpot_target_s):
        return -ttft, -tpot
    return (
        0.0 if np.isinf(request.ttft_target_s) else buffer * float(request.ttft_target_s) - ttft,
        0.0 if np.isinf(request.tpot_target_s) else buffer * float(request.tpot_target_s) - tpot,
    )


@kernel
def scaled(value: float, least: float, most: float) -> float:
    """To [0, 1] between the least and the most."""
    return 0.0 if most == least else (value - least) / (most - least)


@kernel
def in_tier(instance: Any, request: Any, with_headroom: bool, buffer: float) -> bool:
    """Whether it is a candidate of the tier that meets both targets, or of the other."""
    ttft, tpot = headroom_s(instance, request, buffer)
    return bool(instance.candidate != 0 and (ttft >= 0.0 and tpot >= 0.0) == with_headroom)


@kernel
def best_of_tier(
    instances: Any, request: Any, with_headroom: bool, ttft_weight: float, tpot_weight: float, buffer: float
) -> int:
    """The least headroom, or the smallest lack of it and an idle instance first."""
    least_ttft, most_ttft, least_tpot, most_tpot = np.inf, -np.inf, np.inf, -np.inf
    for slot in range(len(instances)):
        if in_tier(instances[slot], request, with_headroom, buffer):
            ttft, tpot = headroom_s(instances[slot], request, buffer)
            least_ttft, most_ttft = min(least_ttft, ttft), max(most_ttft, ttft)
            least_tpot, most_tpot = min(least_tpot, tpot), max(most_tpot, tpot)
    best, least = NONE, (0, 0.0)
    for slot in range(len(instances)):
        if in_tier(instances[slot], request, with_headroom, buffer):
            ttft, tpot = headroom_s(instances[slot], request, buffer)
            weighed = ttft_weight * scaled(ttft, least_ttft, most_ttft)
            weighed += tpot_weight * scaled(tpot, least_tpot, most_tpot)
            busy = 0 if with_headroom or instances[slot].in_flight == 0 else 1
            key = (busy, weighed if with_headroom else -weighed)
            if best == NONE or key < least:
                best, least = slot, key
    return best


def make(ttft: float = 0.8, tpot: float = 0.2, explore: float = 0.01, buffer: float = 1.0) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        ttft: weight of the headroom of TTFT.
        tpot: weight of the headroom of TPOT.
        explore: share of requests for the tier without headroom.
        buffer: share of the targets that predictions may take.
    """

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        exploring = random_unit(fleets[0].random_key, 0) < explore
        best = best_of_tier(instances, requests[0], not exploring, ttft, tpot, buffer)
        return best if best != NONE else best_of_tier(instances, requests[0], exploring, ttft, tpot, buffer)

    return CompiledPolicy("llm-d-slo", choose)


POLICY = make()
