"""Out of balance: min(in flight); else the longest cached prefix if over 0.3 of the prompt, else the smallest index.

Source: SGLang's router, `cache_aware.rs`, with the defaults of its successor SMG: out of balance is
    max - min > 64 and max > 1.5 x min, over requests in flight.
Reads: instance.in_flight, instance.matched_tokens, instance.indexed_tokens, request.prompt_tokens
Notes: Equal prefixes and equal indexes go to fewer requests in flight, then the lowest slot, which is SMG's order with
    KV events. The source matches characters of its own tree, here tokens of the prefix index. Later SMG sends a request
    without a prefix to the shortest queue rather than the smallest tree.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.baselines.join_shortest_queue import requests_in_flight
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import NONE

RANGES = {"least": Range(1.0, 128.0, log=True), "ratio": Range(1.0, 3.0), "prefix": Range(0.0, 0.9)}


@kernel
def busiest(instance: Any, request: Any, fleet: Any) -> float:
    """Most requests in flight first."""
    return -float(instance.in_flight)


@kernel
def longest_prefix(instance: Any, request: Any, fleet: Any) -> tuple[float, float]:
    """Most matched tokens first, then fewest requests in flight."""
    return -instance.matched_tokens, instance.in_flight


@kernel
def smallest_index(instance: Any, request: Any, fleet: Any) -> tuple[float, float]:
    """Fewest indexed tokens first, then fewest requests in flight."""
    return instance.indexed_tokens, instance.in_flight


def make(least: float = 64.0, ratio: float = 1.5, prefix: float = 0.3) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        least: requests in flight by which the fullest exceeds the emptiest when they are out of balance.
        ratio: of their requests in flight, likewise; both have to be exceeded.
        prefix: share of the prompt that a cached prefix has to exceed.
    """

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        shortest = lowest_candidate(requests_in_flight, instances, requests, fleets)
        if shortest == NONE:
            return NONE
        fewest = instances[shortest].in_flight
        most = instances[lowest_candidate(busiest, instances, requests, fleets)].in_flight
        if most - fewest > least and most > ratio * fewest:
            return shortest
        holder = lowest_candidate(longest_prefix, instances, requests, fleets)
        if instances[holder].matched_tokens > prefix * requests[0].prompt_tokens:
            return holder
        return lowest_candidate(smallest_index, instances, requests, fleets)

    return CompiledPolicy("cache-aware", choose)


POLICY = make()
