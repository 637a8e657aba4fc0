"""A candidate drawn uniformly.

Source: the floor of every comparison; `random` of the SGLang and vLLM routers.
Reads: fleet.random_key
Notes: The draw is a function of the decision's random key alone, so a run repeats.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.policy import CompiledPolicy, candidate_count, nth_candidate, random_unit


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return nth_candidate(instances, int(random_unit(fleets[0].random_key, 0) * candidate_count(instances)))


POLICY = CompiledPolicy("random", choose)
