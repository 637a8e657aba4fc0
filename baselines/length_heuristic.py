"""A request predicted longer than a threshold goes to min(pending tokens), any other to min(requests in flight).

Source: "Calibrate, Then Route", arXiv 2609.16206, the baseline "threshold on predicted length".
Reads: request.predicted_output_tokens, instance.in_flight, instance.unstarted_prompt_tokens,
    instance.predicted_output_tokens, instance.streamed_tokens
Notes: Published is only that a threshold on the predicted length is used: not its value, nor where either side goes.
    This is the simplest reading; 256 tokens lie between the median answers of BurstGPT (243) and ShareGPT (487).
"""

from __future__ import annotations

from typing import Any

from fleetpilot.baselines.join_shortest_queue import requests_in_flight
from fleetpilot.baselines.token_jsq import pending_tokens
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate

RANGES = {"threshold": Range(32.0, 2048.0, log=True)}


def make(threshold: float = 256.0) -> CompiledPolicy:
    """The policy with another threshold.

    Args:
        threshold: predicted output in tokens above which a request is long.
    """

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        if requests[0].predicted_output_tokens > threshold:
            return lowest_candidate(pending_tokens, instances, requests, fleets)
        return lowest_candidate(requests_in_flight, instances, requests, fleets)

    return CompiledPolicy("length-heuristic", choose)


POLICY = make()
