"""The candidates in turn: the n-th decision takes candidate n modulo their number.

Source: `round_robin` of the SGLang and vLLM routers, a counter modulo the number of healthy workers. With a fixed fleet
    also the Llumnix artifact's `balanced` (fewest dispatched so far), its Round-Robin.
Reads: fleet.decisions
Notes: A decision answered with "hold" does not advance the turn.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.policy import CompiledPolicy, candidate_count, nth_candidate


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return nth_candidate(instances, fleets[0].decisions % max(candidate_count(instances), 1))


POLICY = CompiledPolicy("round-robin", choose)
