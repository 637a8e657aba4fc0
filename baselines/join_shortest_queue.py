"""min(requests in flight); ties go to the lowest slot.

Source: Vidur, `lor_global_scheduler.py` (least outstanding requests, the first minimum).
Reads: instance.in_flight
Notes: Running plus waiting. Vidur reads the replicas' queues; a dispatcher's ledger holds the same count with no delay.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate


@kernel
def requests_in_flight(instance: Any, request: Any, fleet: Any) -> float:
    """The length of the instance's queue, its batch included."""
    return float(instance.in_flight)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(requests_in_flight, instances, requests, fleets)


POLICY = CompiledPolicy("join-shortest-queue", choose)
