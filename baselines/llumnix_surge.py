"""As `llumnix`, but once instances start, more are started until the fleet's freeness is above the corridor.

Source: ours. Llumnix's corridor starts what the load of the moment needs; while a load rises, that is late by the time
    that an instance takes to start.
Reads: fleet.kind, instance.state, instance.migrating, instance.kv_capacity_blocks, instance.block_size,
    instance.free_blocks, instance.queued_demand_blocks, instance.queued, instance.batched, instance.preempted,
    instance.in_flight, instance.urgent, request.priority
Notes: The instances that start are all that it remembers, so it has no state. None is drained while one starts.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.baselines import llumnix
from fleetpilot.baselines.infaas import (
    check_corridor,
    count_of,
    dispatch_load_by_priority,
    first_candidate_of,
    freeness_without,
    last_candidate_of,
    pooled_freeness,
)
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_READY,
    STATE_STARTING,
)

DEFAULT_LOW = 160.0
DEFAULT_HIGH = 480.0
RANGES = {
    "low": Range(40.0, 480.0, log=True, kind=KIND_SCALE),
    "high": Range(480.0, 1920.0, log=True, kind=KIND_SCALE),
}


@kernel
def instance_to_scale(instances: Any, low: float, high: float) -> int:
    """The instance to keep, to start or to drain, in this order."""
    starting = count_of(instances, STATE_STARTING)
    freeness = pooled_freeness(instances)
    if freeness < low or (starting > 0 and freeness < high):
        draining = first_candidate_of(instances, STATE_DRAINING)
        return draining if draining != NONE else first_candidate_of(instances, STATE_ABSENT)
    last = last_candidate_of(instances, STATE_READY)
    if last == NONE or starting + count_of(instances, STATE_DRAINING) > 0:
        return NONE
    return last if freeness_without(instances, last, True) > high else NONE


def make(low: float = DEFAULT_LOW, high: float = DEFAULT_HIGH) -> CompiledPolicy:
    """The policy with other parameters, both in KV blocks per request.

    Args:
        low: instances are started when the fleet's freeness falls below it, ...
        high: ... until it is above this; one is drained if the others would have a freeness above it.
    """
    check_corridor(low, high)

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        kind = fleets[0].kind
        if kind == KIND_SOURCE:
            return llumnix.source(instances, llumnix.DEFAULT_THRESHOLD, True)
        if kind == KIND_DESTINATION:
            return llumnix.destination(instances, llumnix.DEFAULT_THRESHOLD, True)
        if kind == KIND_SCALE:
            return instance_to_scale(instances, low, high)
        return lowest_candidate(dispatch_load_by_priority, instances, requests, fleets)

    return CompiledPolicy("llumnix-surge", choose, llumnix.KINDS)


POLICY = make()
