"""As `llumnix`, but once instances start, more are started until the fleet's freeness is above the corridor.

Source: ours. Llumnix's corridor starts what the load of the moment needs; while a load rises, that is late by the time
    that an instance takes to start.
Reads: fleet.kind, instance.state, instance.migrating, instance.kv_capacity_blocks, instance.block_size,
    instance.free_blocks, instance.queued_demand_blocks, instance.queued, instance.batched, instance.preempted,
    instance.in_flight, instance.urgent, request.priority
Notes: The instances that start are all that it remembers, so it has no state. None is drained while one starts.
"""

from __future__ import annotations

from fleetpilot.baselines.infaas import check_corridor
from fleetpilot.baselines.llumnix import DEFAULT_THRESHOLD, by_artifact
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import KIND_SCALE

DEFAULT_LOW = 160.0
DEFAULT_HIGH = 480.0
RANGES = {
    "low": Range(40.0, 480.0, log=True, kind=KIND_SCALE),
    "high": Range(480.0, 1920.0, log=True, kind=KIND_SCALE),
}


def make(low: float = DEFAULT_LOW, high: float = DEFAULT_HIGH) -> CompiledPolicy:
    """The policy with other parameters, both in KV blocks per request.

    Args:
        low: instances are started when the fleet's freeness falls below it, ...
        high: ... until it is above this; one is drained if the others would have a freeness above it.
    """
    check_corridor(low, high)
    return by_artifact("llumnix-surge", DEFAULT_THRESHOLD, low, high, priorities=True, surge=True)


POLICY = make()
