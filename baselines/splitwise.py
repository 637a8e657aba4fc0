"""Prompts: min(pending prompt tokens) of the prefill pool; answers: min(pending tokens) of the decode pool; else mixed.

Source: Splitwise, ISCA 2024, and SplitwiseSim's `mixed_pool.yml`: join the shortest queue by pending tokens in either
    pool; where the shortest has more than 8,192 tokens of prompts, or 2,048 of decodes, the mixed pool takes over.
Reads: fleet.kind, instance.role, instance.in_flight, instance.unstarted_prompt_tokens,
    instance.predicted_output_tokens, instance.streamed_tokens
Notes: A decode counts one pending token per request, as in SplitwiseSim. Its machines change pools as they fill and
    empty; here roles are the fleet's. Without pools it is `token-jsq`. Where the mixed pool is fuller
    still, an overfull pool keeps the request.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.baselines.token_jsq import pending_tokens
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import KIND_DECODE, KIND_DISPATCH, KIND_PREFILL, NONE, ROLE_MIXED

RANGES = {
    "prompt": Range(512.0, 65536.0, log=True, kind=KIND_PREFILL),
    "token": Range(8.0, 4096.0, log=True, kind=KIND_DECODE),
}


@kernel
def pending_of_pool(instance: Any, prompts: bool) -> float:
    """Prompt tokens that wait for their prefill, or a token for each request that decodes."""
    return float(instance.unstarted_prompt_tokens if prompts else instance.in_flight)


@kernel
def shortest_of_pool(instances: Any, prompts: bool, mixed: bool) -> int:
    """The candidate with the fewest pending tokens among the mixed ones, or the others."""
    best = NONE
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.candidate != 0 and (instance.role == ROLE_MIXED) == mixed:
            pending = pending_of_pool(instance, prompts)
            if best == NONE or pending < pending_of_pool(instances[best], prompts):
                best = slot
    return best


@kernel
def pool_or_mixed(instances: Any, prompts: bool, most: float) -> int:
    """The shortest of the pool, unless it is too long and one of the mixed pool is shorter."""
    pool, mixed = shortest_of_pool(instances, prompts, False), shortest_of_pool(instances, prompts, True)
    if pool == NONE or mixed == NONE:
        return pool if mixed == NONE else mixed
    pending = pending_of_pool(instances[pool], prompts)
    return mixed if pending > most and pending_of_pool(instances[mixed], prompts) < pending else pool


def make(prompt: float = 8192.0, token: float = 2048.0) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        prompt: pending prompt tokens above which the mixed pool takes a prefill.
        token: pending tokens above which it takes a decode.
    """

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        if fleets[0].kind == KIND_PREFILL:
            return pool_or_mixed(instances, True, prompt)
        if fleets[0].kind == KIND_DECODE:
            return pool_or_mixed(instances, False, token)
        return lowest_candidate(pending_tokens, instances, requests, fleets)

    return CompiledPolicy("splitwise", choose, (KIND_DISPATCH, KIND_PREFILL, KIND_DECODE))


POLICY = make()
