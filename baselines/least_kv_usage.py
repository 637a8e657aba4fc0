"""min(KV usage as polled); ties are broken at random.

Source: llm-d, `kv-cache-utilization-scorer` (score 1 - usage) with the gateway's max-score picker, which shuffles ties.
Reads: instance.kv_usage, fleet.random_key
Notes: Nothing but the poll: between two polls all requests go to one instance, as in the source.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate, random_unit


@kernel
def kv_usage(instance: Any, request: Any, fleet: Any) -> tuple[float, float]:
    """The polled usage, then a random number per instance."""
    return instance.kv_usage, random_unit(fleet.random_key, instance.slot)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(kv_usage, instances, requests, fleets)


POLICY = CompiledPolicy("least-kv", choose)
