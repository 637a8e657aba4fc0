"""A bound: min(final KV share + batch share + whether it would queue), with true output lengths and exact loads.

Source: ours, mixed by hand of what a request's latency depends on; what knowing lengths is worth to a policy that fills
    memory.
Reads: instance.block_size, instance.kv_capacity_blocks, instance.max_num_seqs, instance.free_blocks,
    instance.queued_demand_blocks, instance.queued, instance.in_flight, instance.started_prompt_tokens,
    instance.unstarted_prompt_tokens, instance.predicted_output_tokens, instance.streamed_tokens,
    request.prompt_tokens, request.predicted_output_tokens
Notes: Not a policy: the simulator tells it true lengths where others see predictions. The final share is what the
    memory would hold if all requests in flight, and this one, were at their last token.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import final_tokens
from fleetpilot.fleet.policy import OracleBound, lowest_candidate

BATCH_WEIGHT = 1.0
QUEUE_WEIGHT = 1.0


@kernel
def final_share(instance: Any, request: Any) -> float:
    """Of the KV memory, with every answer whole."""
    return float(final_tokens(instance, request) / (instance.kv_capacity_blocks * instance.block_size))


@kernel
def mixed_cost(instance: Any, request: Any, fleet: Any) -> float:
    """Memory in the end, batch now, and a wait for memory."""
    blocks = request.prompt_tokens / instance.block_size
    would_queue = instance.queued > 0 or instance.free_blocks - instance.queued_demand_blocks < blocks
    batch_share = instance.in_flight / instance.max_num_seqs
    return final_share(instance, request) + float(BATCH_WEIGHT * batch_share + (QUEUE_WEIGHT if would_queue else 0.0))


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(mixed_cost, instances, requests, fleets)


POLICY = OracleBound("oracle-final-memory", choose)
