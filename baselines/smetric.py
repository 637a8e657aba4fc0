"""A first turn: min(prefill backlog + its own prefill); a later one: the longest cached prefix, if it is in time there.

Source: SMetric, arXiv 2607.08565: later turns leave the best hit where it would miss its target for the first token
    times a slack, for the least loaded instance.
Reads: instance.kv_capacity_blocks, instance.block_size, instance.free_blocks, instance.queued_demand_blocks,
    instance.batched, instance.predicted_output_tokens, instance.streamed_tokens, instance.unstarted_uncached_tokens,
    instance.prefill_s_per_token, instance.matched_tokens, instance.decode_step_s, instance.decode_s_per_seq,
    instance.in_flight, request.prompt_tokens, request.turn, request.ttft_target_s
Notes: Least loaded is read as the first turn's rule. The source's prefill work is quadratic in the context, here the
    profile's time per token; the slack is not known, 1 is its neutral value. Ties go to fewer requests in flight, then
    to the lowest slot.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.baselines.cache_aware import longest_prefix
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import prefill_backlog_s, prefill_s, ttft_s
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import NONE

RANGES = {"slack": Range(0.1, 3.0)}


@kernel
def prefill_done_s(instance: Any, request: Any, fleet: Any) -> tuple[float, float]:
    """The backlog and the request's prefill, then fewest requests in flight."""
    return prefill_backlog_s(instance) + prefill_s(instance, request), instance.in_flight


def make(slack: float = 1.0) -> CompiledPolicy:
    """The policy with another slack.

    Args:
        slack: share of the target for the first token within which the best hit has to be.
    """

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        if requests[0].turn > 0:
            holder = lowest_candidate(longest_prefix, instances, requests, fleets)
            hit = holder != NONE and instances[holder].matched_tokens > 0
            if hit and ttft_s(instances[holder], requests[0]) <= slack * requests[0].ttft_target_s:
                return holder
        return lowest_candidate(prefill_done_s, instances, requests, fleets)

    return CompiledPolicy("smetric", choose)


POLICY = make()
