"""Dispatch as `infaas++`; a running request moves from min(freeness) below a threshold to max(freeness) above it.

Source: Llumnix, OSDI 2024, as its artifact has it: `need_migrate_prefill_v2` and `need_scale` in
    vllm/core/request_scheduler.py. The threshold was 3 blocks per request in its experiments, 10 on M-M and S-L;
    the corridor of scaling [10, 60].
Reads: fleet.kind, instance.state, instance.migrating, instance.kv_capacity_blocks, instance.block_size,
    instance.free_blocks, instance.queued_demand_blocks, instance.queued, instance.batched, instance.preempted,
    instance.in_flight, instance.urgent, request.priority
Notes: For a migration freeness is over running requests and one more for a queue, and an instance with an urgent
    request counts as one of 1,600 tokens. A source is below the threshold or has preempted requests, and holds a
    request that is not urgent, or it drains; a destination is above it and has none preempted. A pair that has begun is
    asked for no more, so asking again pairs index by index; the artifact leaves out a pair with an end that is busy,
    here the next in order takes its place. With stock telemetry `preempted` is 0. Scaling is that of `infaas++`, with
    the queue in its second condition too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.baselines.freeness import dispatch_load
from fleetpilot.baselines.infaas import (
    CORRIDOR,
    DEFAULT_HIGH,
    DEFAULT_LOW,
    check_corridor,
    count_of,
    dispatch_load_by_priority,
    instance_to_scale,
)
from fleetpilot.fleet.freeness import migration_freeness
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    STATE_DRAINING,
    STATE_READY,
    STATE_STARTING,
)

KINDS = (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE)
DEFAULT_THRESHOLD = 3.0
RANGES = {"threshold": Range(1.0, 60.0, log=True, kind=KIND_SOURCE), **CORRIDOR}


@kernel
def could_take_a_request(instance: Any, threshold: float, headroom: bool) -> bool:
    """Whether it may be a destination, by its load."""
    return bool(instance.preempted == 0 and migration_freeness(instance, headroom) > threshold)


@kernel
def has_a_request_to_move(instance: Any, headroom: bool) -> bool:
    """Whether it drains, or not all its requests are urgent; both counts are the ledger's, so of one time."""
    if not headroom or instance.urgent == 0 or instance.state == STATE_DRAINING:
        return True
    return bool(instance.in_flight > instance.urgent)


@kernel
def source(instances: Any, threshold: float, headroom: bool) -> int:
    """The candidate of the least freeness that is a source, if there is a destination too."""
    best, least, destinations = NONE, np.inf, 0
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.state == STATE_READY and instance.migrating == 0:
            destinations += 1 if could_take_a_request(instance, threshold, headroom) else 0
        if instance.candidate != 0 and has_a_request_to_move(instance, headroom):
            freeness = -np.inf if instance.state == STATE_DRAINING else migration_freeness(instance, headroom)
            if (instance.preempted > 0 or freeness < threshold) and (best == NONE or freeness < least):
                best, least = slot, freeness
    return best if destinations > 0 else NONE


@kernel
def destination(instances: Any, threshold: float, headroom: bool) -> int:
    """The candidate of the most freeness that is a destination."""
    best, most = NONE, -np.inf
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.candidate != 0 and could_take_a_request(instance, threshold, headroom):
            freeness = migration_freeness(instance, headroom)
            if best == NONE or freeness > most:
                best, most = slot, freeness
    return best


def by_artifact(
    name: str, threshold: float, low: float, high: float, *, priorities: bool, surge: bool = False
) -> CompiledPolicy:
    """The artifact's rules, with its regard for priorities or without.

    With `surge`, not the artifact's, starting goes on to the corridor's upper end, and none drains while one starts.
    """

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        kind = fleets[0].kind
        if kind == KIND_SOURCE:
            return source(instances, threshold, priorities)
        if kind == KIND_DESTINATION:
            return destination(instances, threshold, priorities)
        if kind == KIND_SCALE:
            if surge and count_of(instances, STATE_STARTING) > 0:
                return instance_to_scale(instances, high, np.inf, True)
            return instance_to_scale(instances, low, high, True)
        if priorities:
            return lowest_candidate(dispatch_load_by_priority, instances, requests, fleets)
        return lowest_candidate(dispatch_load, instances, requests, fleets)

    return CompiledPolicy(name, choose, KINDS)


def make(threshold: float = DEFAULT_THRESHOLD, low: float = DEFAULT_LOW, high: float = DEFAULT_HIGH) -> CompiledPolicy:
    """The policy with other parameters, all in KV blocks per request.

    Args:
        threshold: freeness that parts sources from destinations.
        low: instances are started while the fleet's freeness is below it.
        high: one is drained if the others would have a freeness above it.
    """
    check_corridor(low, high)
    return by_artifact("llumnix", threshold, low, high, priorities=True)


POLICY = make()
