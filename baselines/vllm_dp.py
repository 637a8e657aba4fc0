"""min(4 x waiting + running) of the last poll, requests sent since then counted as waiting; ties go to the lowest slot.

Source: vLLM, `DPLBAsyncMPClient` in v1/engine/core_client.py, which adds each request it sends to its copy of the
    waiting count until the next statistics come (every 100 ms).
Reads: instance.waiting, instance.running, instance.in_flight
Notes: What was sent since the poll is told from the ledger: max(0, in flight - running - waiting); the source counts
    the sends and forgets what ended since. Later vLLM weighs the waiting requests by KV usage instead.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate

WAITING_WEIGHT = 4.0


@kernel
def queue_score(instance: Any, request: Any, fleet: Any) -> float:
    """The engine's queue as vLLM's front end weighs it."""
    unreported = max(0.0, instance.in_flight - instance.running - instance.waiting)
    return float(WAITING_WEIGHT * (instance.waiting + unreported) + instance.running)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(queue_score, instances, requests, fleets)


POLICY = CompiledPolicy("vllm-dp", choose)
