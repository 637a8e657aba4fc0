"""Paged KV memory of one instance: what requests hold, what a row of decode steps will take, release."""

from __future__ import annotations

from typing import Any

from fleetpilot.cluster import prefix_cache
from fleetpilot.cluster.memory import residue_at, slot_at
from fleetpilot.fleet.jit import inlined


@inlined
def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + block_size - 1) // block_size


@inlined
def available_blocks(inst: Any) -> int:
    """Blocks that can be had: never used, or unpinned."""
    return inst.free_blocks + inst.lru_blocks


@inlined
def take(s: Any, inst: Any, blocks: int) -> None:
    """Take blocks from the front of the free list (the caller made sure that they are there)."""
    if inst.free_blocks < blocks:
        prefix_cache.evict(s, inst, blocks)
    inst.free_blocks -= blocks


@inlined
def decode_demand(s: Any, inst: Any, engine: Any, first_step: int, steps: int) -> int:
    """Blocks that the decodes take in `steps` steps from step number `first_step` (counted like `steps_done`).

    A decode takes a block in the step before which its computed tokens fill whole blocks; counts by residue make that
    a sum over at most `block_size` numbers, whatever the batch and however many the steps.
    """
    size = engine.block_size
    cycles = steps // size
    demand = cycles * inst.decodes
    residue = (-first_step) % size
    for _ in range(steps - cycles * size):
        demand += residue_at(s, inst.residues0 + residue).decodes
        residue = residue - 1 if residue > 0 else size - 1
    return demand


@inlined
def steps_that_fit(s: Any, inst: Any, engine: Any, first_step: int, most: int, blocks: int) -> int:
    """How many decode steps from `first_step`, `most` at the most, take no more than `blocks` blocks."""
    size = engine.block_size
    if inst.decodes * blocks_for(most, size) <= blocks or decode_demand(s, inst, engine, first_step, most) <= blocks:
        return most
    cycles = blocks // inst.decodes
    steps = cycles * size
    left = blocks - cycles * inst.decodes
    residue = (-first_step) % size
    while steps < most:
        left -= residue_at(s, inst.residues0 + residue).decodes
        if left < 0:
            break
        residue = residue - 1 if residue > 0 else size - 1
        steps += 1
    return steps


@inlined
def release(s: Any, inst: Any, engine: Any, slot_index: int, computed: int, held: int, preempted: bool) -> None:
    """Give back the `held` blocks of a request that leaves the batch with `computed` tokens."""
    slot = slot_at(s, slot_index)
    if engine.prefix_cache == 0:
        inst.free_blocks += held
        return
    size = engine.block_size
    prefix_cache.fill(s, inst, slot, computed, size)
    private = held - slot.node_blocks
    tail = 0
    if preempted and slot.own_node < 0:
        tail = max(0, computed // size - prefix_cache.shared_blocks(s, inst, slot, size))
    prefix_cache.append_dead(s, inst, private - tail)
    if tail > 0:
        slot.resident_blocks = tail
        prefix_cache.append_extent(s, inst, -2 - slot_index, tail)
    prefix_cache.unpin(s, inst, slot)
    slot.node_blocks = 0
