"""min((queued prefill tokens + uncached tokens of the request) x batch size, the queue included).

Source: LMetric, OSDI 2026, arXiv 2603.15202.
Reads: instance.unstarted_uncached_tokens, instance.matched_tokens, instance.in_flight, request.prompt_tokens
Notes: The batch size is the instance's now, without the request: an idle instance scores 0. Its order of ties is not
    known; fewer tokens to prefill go first, then the lowest slot, so a cached prefix still decides among idle ones.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate


@kernel
def prefill_times_batch(instance: Any, request: Any, fleet: Any) -> tuple[float, float]:
    """The product, then its first factor."""
    prefill_tokens = instance.unstarted_uncached_tokens + max(0.0, request.prompt_tokens - instance.matched_tokens)
    return prefill_tokens * instance.in_flight, prefill_tokens


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(prefill_times_batch, instances, requests, fleets)


POLICY = CompiledPolicy("lmetric", choose)
