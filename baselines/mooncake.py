"""Prefill: min(predicted TTFT); decode: min(predicted TPOT); a request that would miss either target is rejected.

Source: Mooncake, FAST 2025, the Conductor: TTFT = cache transfer + queue + prefill of the uncached part on the best
    prefill instance, TBT on the best decode instance; a request whose SLO would be missed by either is rejected early.
Reads: fleet.kind, instance.kv_capacity_blocks, instance.block_size, instance.free_blocks,
    instance.queued_demand_blocks, instance.batched, instance.predicted_output_tokens, instance.streamed_tokens,
    instance.unstarted_uncached_tokens, instance.prefill_s_per_token, instance.matched_tokens, instance.decode_step_s,
    instance.decode_s_per_seq, instance.in_flight, request.prompt_tokens, request.ttft_target_s, request.tpot_target_s,
    request.waited_s, request.streamed_tokens, fleet.may_hold
Notes: The predictions are those of the profile's constants (`fleet/latency.py`). Caches are not fetched from other
    instances, so there is no transfer of cache. `reject` = 0 rejects none; the time that a request has waited counts,
    one that was restarted is kept. TBT is asked for when the decode instance is chosen, unless the prefill is done by
    then, which is not thrown away.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import tpot_s, ttft_s
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import KIND_DECODE, KIND_DISPATCH, KIND_PREFILL, NONE, REJECT

RANGES = {"margin": Range(0.5, 2.0), "reject": Range(0, 1, whole=True)}


@kernel
def first_token_s(instance: Any, request: Any, fleet: Any) -> tuple[float, float]:
    """The predicted TTFT, then TPOT."""
    return ttft_s(instance, request), tpot_s(instance)


@kernel
def token_s(instance: Any, request: Any, fleet: Any) -> float:
    """The predicted TPOT."""
    return tpot_s(instance)


def make(margin: float = 1.0, reject: float = 1.0) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        margin: share of the targets that predictions may take.
        reject: 1 to reject requests that would miss a target, 0 to serve all.
    """
    if reject not in (0, 1):
        raise ValueError(f"reject = {reject:g}: expected 0 or 1")

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        kind, request = fleets[0].kind, requests[0]
        if kind == KIND_DECODE:
            best = lowest_candidate(token_s, instances, requests, fleets)
        else:
            best = lowest_candidate(first_token_s, instances, requests, fleets)
        if best == NONE or reject == 0 or request.streamed_tokens > 0:
            return best
        ttft = request.waited_s + ttft_s(instances[best], request)
        late = kind != KIND_DECODE and ttft > margin * request.ttft_target_s
        early = kind == KIND_DISPATCH or (kind == KIND_DECODE and fleets[0].may_hold != 0)
        slow = early and tpot_s(instances[best]) > margin * request.tpot_target_s
        return REJECT if late or slow else best

    return CompiledPolicy("mooncake", choose, (KIND_DISPATCH, KIND_PREFILL, KIND_DECODE))


POLICY = make()
