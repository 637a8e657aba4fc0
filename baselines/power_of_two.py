"""Two different candidates drawn uniformly, of them the one with fewer requests in flight; ties go to the first.

Source: Mitzenmacher, "How useful is old information?", IEEE TPDS 2000; `power_of_two` of the SGLang and vLLM routers.
Reads: instance.in_flight, fleet.random_key
Notes: The routers compare token loads where the engines report them, else the requests in flight, as here.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, candidate_count, nth_candidate, random_unit
from fleetpilot.fleet.view import NONE


@kernel
def two_candidates(instances: Any, fleet: Any) -> tuple[int, int]:
    """Two different ones drawn uniformly; the same one twice, or `NONE`, where there are fewer than two."""
    count = candidate_count(instances)
    first = int(random_unit(fleet.random_key, 0) * count)
    offset = 1 + int(random_unit(fleet.random_key, 1) * (count - 1))
    return nth_candidate(instances, first), nth_candidate(instances, (first + offset) % max(count, 1))


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    first, second = two_candidates(instances, fleets[0])
    if first == NONE:
        return NONE
    return first if instances[first].in_flight <= instances[second].in_flight else second


POLICY = CompiledPolicy("power-of-two", choose)
