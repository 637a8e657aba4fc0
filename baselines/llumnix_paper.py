"""max(freeness by virtual usage); a running request moves from min(freeness) below one threshold to max above another.

Source: Llumnix, OSDI 2024, arXiv 2406.03243, Algorithm 1 and sections 4.3 and 4.4, where its artifact (`llumnix`)
    differs.
Reads: fleet.kind, instance.state, instance.migrating, instance.kv_capacity_blocks, instance.block_size,
    instance.free_blocks, instance.head_demand_blocks, instance.batched, instance.urgent
Notes: Of a queue only the head of line counts; freeness is over the batch, at least one request; a draining instance
    has none. The two thresholds are not published: 3 and 10 are the two values of the artifact's one. Nor is the
    headroom of urgent requests: it is the artifact's. Scaling keeps the mean freeness in [10, 60]; the paper asks for
    it over a period, here the interval of decisions is that period. The instance with the fewest running requests is
    drained, one at a time. Which request moves is the fleet's `Rebalancing.choice`: the paper's is `lowest_priority`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.baselines.infaas import (
    CORRIDOR,
    DEFAULT_HIGH,
    DEFAULT_LOW,
    check_corridor,
    count_of,
    first_candidate_of,
)
from fleetpilot.baselines.llumnix import KINDS
from fleetpilot.fleet.freeness import virtual_freeness
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

RANGES = {
    "below": Range(1.0, 10.0, log=True, kind=KIND_SOURCE),
    "above": Range(10.0, 60.0, log=True, kind=KIND_SOURCE),
    **CORRIDOR,
}


@kernel
def freeness(instance: Any, request: Any, fleet: Any) -> float:
    """Least first. A draining instance holds a request of infinite usage."""
    return -np.inf if instance.state == STATE_DRAINING else virtual_freeness(instance)


@kernel
def load(instance: Any, request: Any, fleet: Any) -> float:
    """Most freeness first."""
    return -freeness(instance, request, fleet)


@kernel
def best_destination(instances: Any) -> float:
    """The most freeness of an instance that could take a request."""
    most = -np.inf
    for slot in range(len(instances)):
        if instances[slot].state == STATE_READY and instances[slot].migrating == 0:
            most = max(most, virtual_freeness(instances[slot]))
    return most


@kernel
def mean_freeness(instances: Any) -> float:
    """Of those that serve and those that start, which are empty."""
    total, count = 0.0, 0
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.state == STATE_READY:
            total, count = total + virtual_freeness(instance), count + 1
        elif instance.state == STATE_STARTING:
            total, count = total + instance.kv_capacity_blocks, count + 1
    return total / count if count > 0 else 0.0


@kernel
def fewest_running(instances: Any) -> int:
    """The ready candidate with the smallest batch."""
    best = NONE
    for slot in range(len(instances)):
        instance = instances[slot]
        ready = instance.candidate != 0 and instance.state == STATE_READY
        if ready and (best == NONE or instance.batched < instances[best].batched):
            best = slot
    return best


@kernel
def instance_to_scale(instances: Any, low: float, high: float) -> int:
    """The instance to keep, to start or to drain, in this order."""
    mean = mean_freeness(instances)
    if mean < low:
        draining = first_candidate_of(instances, STATE_DRAINING)
        return draining if draining != NONE else first_candidate_of(instances, STATE_ABSENT)
    return fewest_running(instances) if mean > high and count_of(instances, STATE_DRAINING) == 0 else NONE


def make(
    below: float = 3.0, above: float = 10.0, low: float = DEFAULT_LOW, high: float = DEFAULT_HIGH
) -> CompiledPolicy:
    """The policy with other parameters, all in KV blocks per request.

    Args:
        below: a source's freeness is below it.
        above: a destination's freeness is above it.
        low: instances are started while the mean freeness is below it.
        high: one is drained if it is above it.
    """
    check_corridor(low, high)

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        kind = fleets[0].kind
        if kind == KIND_SCALE:
            return instance_to_scale(instances, low, high)
        if kind == KIND_SOURCE:
            least = lowest_candidate(freeness, instances, requests, fleets)
            if least != NONE and freeness(instances[least], requests[0], fleets[0]) >= below:
                return NONE
            return least if best_destination(instances) > above else NONE
        most = lowest_candidate(load, instances, requests, fleets)
        if kind == KIND_DESTINATION and most != NONE and virtual_freeness(instances[most]) <= above:
            return NONE
        return most

    return CompiledPolicy("llumnix-paper", choose, KINDS)


POLICY = make()
