"""min(weight x prefill blocks + decode blocks), both with the request; ties, or all by softmax, are drawn.

Source: NVIDIA Dynamo, KV router (routing concepts and router design in its documentation). Prefill blocks are the
    uncached tokens of active prompts and of the request over the block size, decode blocks those of all active requests
    and of the request. The weight is 1 and the temperature 0.
Reads: instance.block_size, instance.unstarted_uncached_tokens, instance.unstarted_prompt_blocks,
    instance.started_prompt_tokens, instance.streamed_tokens, instance.matched_tokens, request.prompt_tokens,
    fleet.random_key
Notes: With a temperature t a candidate is drawn with a chance proportional to exp(-cost / (t x (highest - lowest
    cost))), the source's normalisation. Credits of other cache tiers are left out: the prefix index knows of one.
    Blocks that active requests share count once there, here for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import uncached_tokens
from fleetpilot.fleet.policy import CompiledPolicy, Range, random_unit
from fleetpilot.fleet.view import NONE

RANGES = {"weight": Range(0.1, 10.0, log=True), "temperature": Range(0.0, 1.0)}


@kernel
def routing_cost(instance: Any, request: Any, weight: float) -> float:
    """In blocks."""
    size = instance.block_size
    prefill_blocks = (instance.unstarted_uncached_tokens + uncached_tokens(instance, request)) / size
    decode_blocks = instance.unstarted_prompt_blocks + np.ceil(request.prompt_tokens / size)
    decode_blocks += (instance.started_prompt_tokens + instance.streamed_tokens) / size
    return float(weight * prefill_blocks + decode_blocks)


@kernel
def softmin(instances: Any, request: Any, fleet: Any, weight: float, temperature: float) -> int:
    """A candidate drawn by its cost: the highest of -cost / temperature + Gumbel noise is a draw from the softmax."""
    lowest, highest = np.inf, -np.inf
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            cost = routing_cost(instances[slot], request, weight)
            lowest, highest = min(lowest, cost), max(highest, cost)
    best, most = NONE, -np.inf
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            cost = routing_cost(instances[slot], request, weight)
            if temperature > 0.0 or cost == lowest:
                scaled = 0.0 if highest == lowest or temperature == 0.0 else cost / ((highest - lowest) * temperature)
                score = -scaled - np.log(-np.log(1.0 - random_unit(fleet.random_key, slot)))
                if best == NONE or score > most:
                    best, most = slot, score
    return best


def make(weight: float = 1.0, temperature: float = 0.0) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        weight: of prefill blocks against decode blocks.
        temperature: of the softmax; 0 takes the lowest cost.
    """
    if temperature < 0:
        raise ValueError(f"temperature = {temperature:g}: expected at least 0")

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        return softmin(instances, requests[0], fleets[0], weight, temperature)

    return CompiledPolicy("dynamo-kv", choose)


POLICY = make()
