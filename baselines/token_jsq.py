"""min(prompt tokens without a first token + predicted tokens still to come); ties go to the lowest slot.

Source: Splitwise, ISCA 2024, join the shortest queue by pending tokens; SplitwiseSim, `token_jsq` (the first minimum).
Reads: instance.unstarted_prompt_tokens, instance.predicted_output_tokens, instance.streamed_tokens
Notes: SplitwiseSim counts one decode token per request; here the decode side is the whole predicted rest,
    max(0, predicted - streamed) over the instance's requests in flight.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import remaining_tokens
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate


@kernel
def pending_tokens(instance: Any, request: Any, fleet: Any) -> float:
    """Prompt tokens to prefill and predicted tokens to decode."""
    return float(instance.unstarted_prompt_tokens) + remaining_tokens(instance)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(pending_tokens, instances, requests, fleets)


POLICY = CompiledPolicy("token-jsq", choose)
