"""One instance driven from outside, an iteration at a time: what an emulated engine is made of.

The caller has the clock, the one environment of one instance, and the requests: it lets one arrive by writing row 0
and calling `submit`, and at the time that `next_boundary` says calls `end_iteration`, what may be called only between
two iterations (`drop`, `end_hold`), and `start_iteration`. It sees to it that a slot is free before it asks for one.

A *hold* is a slot that pins a sequence's blocks without being in the batch: those that another instance will read, or
those that come from one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import kernel as loop
from fleetpilot.cluster import prefix_cache
from fleetpilot.cluster.kv_cache import available_blocks, blocks_for, release, take
from fleetpilot.cluster.lifecycle import fail_returned, send_back
from fleetpilot.cluster.memory import batch_at, engine_at, env_at, instance_at, next_at, slot_at
from fleetpilot.cluster.migration import leave_queue
from fleetpilot.cluster.requests import take_slot
from fleetpilot.cluster.scheduler import first_finish, leave_decodes, remove
from fleetpilot.cluster.state import IDLE, NEVER, NIL
from fleetpilot.fleet.jit import kernel

PROGRESS = np.dtype([("slot", "i4"), ("generated", "i4")], align=True)
"""Of a request that was in the batch: its tokens by now, or -1 if it has finished."""


@kernel
def submit(s: Any, number: int, time_s: float) -> int:
    """The request of row 0, called by this number, joins the waiting queue. Returns its slot."""
    env = env_at(s, 0)
    env.time_s = time_s
    env.cursor = 0
    env.row_base = number
    index = loop.arrive(s, 0, 0, time_s)
    slot_at(s, index).indexed_match_tokens = 0
    loop.join_queue(s, env, index, 0)
    return index


@kernel
def end_iteration(s: Any, time_s: float, progress: Any) -> int:
    """The iteration in progress ends now. Writes who has how many tokens; returns how many requests that is."""
    env = env_at(s, 0)
    inst, engine = instance_at(s, 0), engine_at(s, 0)
    env.time_s = time_s
    count = 0
    for position in range(inst.in_batch):
        progress[count].slot = batch_at(s, inst.batch0 + position).slot
        progress[count].generated = -1
        count += 1
    loop.end_iteration(s, 0, 0, time_s)
    at = 0
    for position in range(inst.in_batch):  # who has not finished is still in the same order
        entry = batch_at(s, inst.batch0 + position)
        slot = slot_at(s, entry.slot)
        while progress[at].slot != entry.slot:
            at += 1
        if entry.finish_step == NEVER:
            progress[at].generated = slot.generated
            continue
        generated = slot.generated + inst.steps_done
        progress[at].generated = generated
        computed = slot.prompt_tokens + generated - 1
        if engine.prefix_cache != 0 and computed % engine.block_size == 0:
            prefix_cache.fill(s, inst, slot, computed, engine.block_size)
    return count


@kernel
def start_iteration(s: Any, time_s: float) -> None:
    """Form the next iteration."""
    loop.start_iteration(s, env_at(s, 0), 0, time_s)


@kernel
def drop(s: Any, index: int, time_s: float) -> None:
    """The request is wanted no more: it leaves batch or queue, and its blocks are released."""
    env = env_at(s, 0)
    inst, engine = instance_at(s, 0), engine_at(s, 0)
    slot = slot_at(s, index)
    env.time_s = time_s
    position = inst.in_batch - 1
    while position >= 0 and batch_at(s, inst.batch0 + position).slot != index:
        position -= 1
    if position == NIL:
        leave_queue(s, 0, index)
    else:
        if batch_at(s, inst.batch0 + position).finish_step != NEVER:
            computed = leave_decodes(s, inst, engine, slot)
            held = blocks_for(computed, engine.block_size)
        else:
            computed, held = slot.computed_tokens, slot.held_blocks
        release(s, inst, engine, index, computed, held, False)
        remove(s, inst, position)
        inst.first_finish_step = first_finish(s, inst)
        inst.changed = 1
    send_back(s, env, index)
    fail_returned(s, env, 0, time_s)


@kernel
def begin_hold(s: Any, node: int, blocks: int, partial: int) -> int:
    """Pin the `blocks` blocks of the sequence that ends in this node, and take those that are not resident.

    `partial` more are taken, for tokens that fill no block. Returns the hold's slot, or NIL if the blocks are not free.
    Those that were taken hold nothing until `fill_hold`.
    """
    inst, engine = instance_at(s, 0), engine_at(s, 0)
    index = take_slot(s, env_at(s, 0))
    slot = slot_at(s, index)
    slot.row = NIL
    slot.prefix_node = node
    slot.own_node = NIL
    slot.node_blocks = 0
    slot.resident_blocks = 0
    slot.dead_blocks = 0
    matched, unpinned = prefix_cache.match(s, inst, slot, engine.block_size, blocks)
    missing = blocks - matched + partial
    if missing + unpinned > available_blocks(inst):
        slot.next = env_at(s, 0).free_slot
        env_at(s, 0).free_slot = index
        return NIL
    prefix_cache.pin(s, inst, index, matched, engine.block_size)
    take(s, inst, missing)
    slot.computed_tokens = matched * engine.block_size
    slot.held_blocks = blocks + partial
    inst.reserved_blocks += missing
    return index


@kernel
def fill_hold(s: Any, index: int) -> None:
    """The blocks of the hold have their content."""
    inst, engine = instance_at(s, 0), engine_at(s, 0)
    slot = slot_at(s, index)
    slot.computed_tokens = prefix_cache.shared_blocks(s, inst, slot, engine.block_size) * engine.block_size
    before = slot.node_blocks
    prefix_cache.fill(s, inst, slot, slot.computed_tokens, engine.block_size)
    inst.reserved_blocks -= slot.node_blocks - before


@kernel
def end_hold(s: Any, index: int, time_s: float) -> None:
    """The blocks are pinned no more: those that have content stay cached, the others are free."""
    env = env_at(s, 0)
    inst, engine = instance_at(s, 0), engine_at(s, 0)
    slot = slot_at(s, index)
    inst.reserved_blocks -= slot.held_blocks - slot.node_blocks
    release(s, inst, engine, index, slot.computed_tokens, slot.held_blocks, False)
    slot.next = env.free_slot
    env.free_slot = index
    if inst.doing == IDLE and inst.waiting > 0:
        next_at(s, 0).time_s = min(next_at(s, 0).time_s, time_s)
