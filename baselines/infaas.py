"""max((free - watermark - queued demand - headroom blocks) / requests), an idle instance first; no request moves.

Source: INFaaS++ of Llumnix, OSDI 2024: its artifact's `load` dispatch (vllm/instance_info.py) with migration off, and
    the same scaling (`need_scale` in vllm/core/request_scheduler.py). The corridor was [10, 60].
Reads: fleet.kind, instance.state, instance.kv_capacity_blocks, instance.block_size, instance.free_blocks,
    instance.queued_demand_blocks, instance.queued, instance.batched, instance.urgent, request.priority
Notes: The headroom, all but 1,600 tokens, counts for an urgent request where no urgent one is and for any other where
    one is. Scaling: instances are started while the fleet's pooled freeness is below the corridor, but first one that
    drains is kept; the one of the highest slot is drained, one at a time, if the others with all running requests would
    be above it. Instances that start count as empty; the artifact waits for them instead. Where its queue counts in
    blocks of whole prompts, it is in fractions of blocks there.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.freeness import available_blocks, blocks_per_request, dispatch_freeness_for, watermark_blocks
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, Range, lowest_candidate
from fleetpilot.fleet.view import (
    KIND_DISPATCH,
    KIND_SCALE,
    NONE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_READY,
    STATE_STARTING,
)

KINDS = (KIND_DISPATCH, KIND_SCALE)
DEFAULT_LOW = 10.0
DEFAULT_HIGH = 60.0
CORRIDOR = {"low": Range(1.0, 40.0, log=True, kind=KIND_SCALE), "high": Range(40.0, 160.0, log=True, kind=KIND_SCALE)}
RANGES = CORRIDOR


@kernel
def dispatch_load_by_priority(instance: Any, request: Any, fleet: Any) -> float:
    """The artifact's load as the request's priority has it: freeness with the sign turned."""
    return -dispatch_freeness_for(instance, request.priority < 0)


@kernel
def pooled_freeness(instances: Any) -> float:
    """Of all that serve, and of those that start as if they were empty."""
    blocks, requests = 0.0, 0.0
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.state == STATE_STARTING:
            blocks += instance.kv_capacity_blocks
        elif instance.state == STATE_READY or instance.state == STATE_DRAINING:
            blocks += available_blocks(instance)
            requests += instance.batched + instance.queued
    return blocks_per_request(blocks, requests)


@kernel
def freeness_without(instances: Any, leaving: int, queue_counts: bool) -> float:
    """Of the ready ones but `leaving`, with what all of them hold."""
    free, kept, batched, queued = 0.0, 0.0, 0.0, 0.0
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.state == STATE_READY:
            free += instance.free_blocks
            batched += instance.batched
            if slot == leaving:
                free -= instance.kv_capacity_blocks
            else:
                kept += watermark_blocks(instance)
            if queue_counts:
                kept += instance.queued_demand_blocks
                queued += instance.queued
    return blocks_per_request(max(0.0, free) - kept, batched + (1.0 if queued > 0 else 0.0))


@kernel
def count_of(instances: Any, state: int) -> int:
    """How many instances are in a state."""
    count = 0
    for slot in range(len(instances)):
        count += 1 if instances[slot].state == state else 0
    return count


@kernel
def first_candidate_of(instances: Any, state: int) -> int:
    """The candidate of the lowest slot in a state."""
    for slot in range(len(instances)):
        if instances[slot].candidate != 0 and instances[slot].state == state:
            return slot
    return NONE


@kernel
def last_candidate_of(instances: Any, state: int) -> int:
    """The candidate of the highest slot in a state."""
    for slot in range(len(instances) - 1, -1, -1):
        if instances[slot].candidate != 0 and instances[slot].state == state:
            return slot
    return NONE


@kernel
def instance_to_scale(instances: Any, low: float, high: float, queue_counts: bool) -> int:
    """The instance to keep, to start or to drain, in this order."""
    if pooled_freeness(instances) < low:
        draining = first_candidate_of(instances, STATE_DRAINING)
        return draining if draining != NONE else first_candidate_of(instances, STATE_ABSENT)
    last = last_candidate_of(instances, STATE_READY)
    if last == NONE or count_of(instances, STATE_DRAINING) > 0:
        return NONE
    return last if freeness_without(instances, last, queue_counts) > high else NONE


def check_corridor(low: float, high: float) -> None:
    """Refuse a corridor that would start and drain at the same time.

    Raises:
        ValueError: naming both ends.
    """
    if low > high:
        raise ValueError(f"low = {low:g}: expected at most high, {high:g}")


def make(low: float = DEFAULT_LOW, high: float = DEFAULT_HIGH) -> CompiledPolicy:
    """The policy with other parameters, both in KV blocks per request.

    Args:
        low: instances are started while the fleet's freeness is below it.
        high: one is drained if the others would have a freeness above it.
    """
    check_corridor(low, high)

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        if fleets[0].kind == KIND_SCALE:
            return instance_to_scale(instances, low, high, False)
        return lowest_candidate(dispatch_load_by_priority, instances, requests, fleets)

    return CompiledPolicy("infaas++", choose, KINDS)


POLICY = make()
