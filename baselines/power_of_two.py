"""Two different candidates drawn uniformly, of them the one with fewer requests in flight; ties go to the first.

Source: Mitzenmacher, "How useful is old information?", IEEE TPDS 2000; `power_of_two` of the SGLang and vLLM routers.
Reads: instance.in_flight, fleet.random_key
Notes: The routers compare token loads where the engines report them, else the requests in flight, as here.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.policy import CompiledPolicy, candidate_count, nth_candidate, random_unit


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    count = candidate_count(instances)
    if count < 2:
        return nth_candidate(instances, 0)
    first = int(random_unit(fleets[0].random_key, 0) * count)
    offset = 1 + int(random_unit(fleets[0].random_key, 1) * (count - 1))
    first_slot = nth_candidate(instances, first)
    second_slot = nth_candidate(instances, (first + offset) % count)
    return first_slot if instances[first_slot].in_flight <= instances[second_slot].in_flight else second_slot


POLICY = CompiledPolicy("power-of-two", choose)
