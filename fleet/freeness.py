"""Freeness and virtual usage (Llumnix, OSDI 2024): how far an instance is from running out of KV memory.

Freeness is in KV blocks per request,

    F = (memory - sum of the requests' virtual usages) / requests,

so with blocks of 16 tokens the batch can go on for 16 F decode steps. What a request takes virtually differs between
the paper (Algorithm 1) and its artifact (vllm/instance_info.py, whose load is -F):

===================  ==================================  ======================================================
virtual usage of     paper                               artifact
===================  ==================================  ======================================================
a request in a       its blocks                          its blocks
batch
the head of line     its demand                          its demand
behind it            0                                   its demand
urgent requests      a headroom that they share          the same, one of the sizes below
the engine's         0                                   1 % of the blocks
watermark
===================  ==================================  ======================================================

Urgent are requests with a priority before the default. The headroom's size is stated in the artifact alone: an instance
with an urgent request counts as one of 1,600 tokens. Its denominators are `dispatch_freeness`'s, running and queued
requests, and `migration_freeness`'s, running ones and one more for a queue.

All functions take a record of `fleetpilot.fleet.view.INSTANCE_VIEW`. They read the load fields, so with engines that
report nothing but what stock vLLM does, free blocks are as old as the poll and queues are the ledger's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel

WATERMARK = 0.01
"""Fraction of the blocks that the engine keeps free."""
URGENT_CAPACITY_TOKENS = 1600.0
"""What the capacity of an instance with an urgent request is taken for."""


@kernel
def watermark_blocks(instance: Any) -> float:
    """Blocks that the engine keeps free."""
    return float(np.floor(WATERMARK * instance.kv_capacity_blocks))


@kernel
def headroom_blocks(instance: Any) -> float:
    """Blocks that are set aside where an urgent request is."""
    return float(instance.kv_capacity_blocks - np.floor(URGENT_CAPACITY_TOKENS / instance.block_size))


@kernel
def available_blocks(instance: Any) -> float:
    """Artifact: free blocks, less the watermark and what is queued."""
    return float(instance.free_blocks - watermark_blocks(instance) - instance.queued_demand_blocks)


@kernel
def blocks_per_request(blocks: float, requests: float) -> float:
    """Artifact: freeness, infinite without requests."""
    return np.inf if requests == 0.0 else blocks / requests


@kernel
def dispatch_freeness(instance: Any) -> float:
    """Artifact: what a request is dispatched by, priorities apart."""
    return blocks_per_request(available_blocks(instance), instance.batched + instance.queued)


@kernel
def dispatch_freeness_for(instance: Any, urgent: bool) -> float:
    """Artifact: what a request is dispatched by, with the headroom where it would be the only one of its urgency.

    So urgent requests gather where others of them are, and the rest keeps away from there.
    """
    blocks = available_blocks(instance)
    if urgent != (instance.urgent > 0):
        blocks -= headroom_blocks(instance)
    return blocks_per_request(blocks, instance.batched + instance.queued)


@kernel
def migration_freeness(instance: Any, headroom: bool) -> float:
    """Artifact: what instances are paired by, with the headroom of urgent requests or without."""
    blocks = available_blocks(instance)
    if headroom and instance.urgent > 0:
        blocks -= headroom_blocks(instance)
    return blocks_per_request(blocks, instance.batched + (1.0 if instance.queued > 0 else 0.0))


@kernel
def virtual_usage_blocks(instance: Any) -> float:
    """Paper: the sum over the instance's requests."""
    used = instance.kv_capacity_blocks - instance.free_blocks + instance.head_demand_blocks
    return float(used + (headroom_blocks(instance) if instance.urgent > 0 else 0.0))


@kernel
def virtual_freeness(instance: Any) -> float:
    """Paper: over the requests of the batch, at least one, so that an empty instance has all its blocks."""
    return float((instance.kv_capacity_blocks - virtual_usage_blocks(instance)) / max(instance.batched, 1.0))
