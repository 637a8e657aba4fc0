"""The scheduler of one instance: who is in the next iteration (docs/model.md; vLLM's names).

`schedule` is called at every boundary, again if `all_preempted`. It leaves the list of slots that prefill in the coming
iteration in ``inst.prefilling`` and returns what the iteration time depends on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import links, prefix_cache, shared_cache
from fleetpilot.cluster.kv_cache import available_blocks, blocks_for, decode_demand, release, take
from fleetpilot.cluster.memory import batch_at, env_at, residue_at, slot_at, transfer_at
from fleetpilot.cluster.state import MODE_CHUNKED, MODE_PREFILL_FIRST, NEVER, NIL, SHARED_CACHE
from fleetpilot.fleet.cost_model import base_time_s, leap_end_s
from fleetpilot.fleet.jit import inlined, kernel


@inlined
def earlier(engine: Any, a: Any, b: Any) -> bool:
    """Whether request `a` goes before `b` by (priority, dispatch time, row).

    Without priority order all priorities are equal.
    """
    if engine.priority_order != 0 and a.priority != b.priority:
        return a.priority < b.priority
    if a.dispatch_s != b.dispatch_s:
        return a.dispatch_s < b.dispatch_s
    return a.row < b.row


@inlined
def enqueue(s: Any, inst: Any, engine: Any, index: int, front: bool) -> None:
    """Put a request into the waiting queue: at its place by priority, or at the front or back."""
    slot = slot_at(s, index)
    if engine.priority_order != 0:
        before = inst.tail
        while before != NIL and earlier(engine, slot, slot_at(s, before)):
            before = slot_at(s, before).previous
    else:
        before = NIL if front else inst.tail
    after = inst.head if before == NIL else slot_at(s, before).next
    slot.previous = before
    slot.next = after
    if before == NIL:
        inst.head = index
    else:
        slot_at(s, before).next = index
    if after == NIL:
        inst.tail = index
    else:
        slot_at(s, after).previous = index
    inst.waiting += 1
    inst.waiting_blocks += blocks_for(slot.prefill_tokens, engine.block_size)


@inlined
def dequeue(s: Any, inst: Any, engine: Any, index: int) -> None:
    """Take a request out of the waiting queue."""
    slot = slot_at(s, index)
    if slot.previous == NIL:
        inst.head = slot.next
    else:
        slot_at(s, slot.previous).next = slot.next
    if slot.next == NIL:
        inst.tail = slot.previous
    else:
        slot_at(s, slot.next).previous = slot.previous
    inst.waiting -= 1
    inst.waiting_blocks -= blocks_for(slot.prefill_tokens, engine.block_size)


@inlined
def join_decodes(s: Any, inst: Any, engine: Any, position: int, time_s: float) -> None:
    """The request at this position of the batch has its prefill behind it and decodes from now on."""
    entry = batch_at(s, inst.batch0 + position)
    slot = slot_at(s, entry.slot)
    entry.finish_step = inst.steps_done + slot.output_tokens - slot.generated
    if entry.finish_step < inst.first_finish_step:
        inst.first_finish_step = entry.finish_step
        inst.first_finish_slot = entry.slot
    inst.decodes += 1
    inst.decode_tokens += slot.prompt_tokens + slot.generated
    residue = (slot.prompt_tokens + slot.generated - 1 - inst.steps_done) % engine.block_size
    residue_at(s, inst.residues0 + residue).decodes += 1
    slot.generated -= inst.steps_done
    slot.joined_s = time_s


@inlined
def leave_decodes(s: Any, inst: Any, engine: Any, slot: Any) -> int:
    """Take a decoding request out of the sums over the decodes; returns the tokens whose KV it holds."""
    slot.generated += inst.steps_done
    tokens = slot.prompt_tokens + slot.generated
    inst.decodes -= 1
    inst.decode_tokens -= tokens
    residue_at(s, inst.residues0 + (tokens - 1 - inst.steps_done) % engine.block_size).decodes -= 1
    return tokens - 1


@inlined
def move(s: Any, inst: Any, origin: int, position: int) -> None:
    """Copy the entry of the batch at `origin` to `position`."""
    source = batch_at(s, inst.batch0 + origin)
    entry = batch_at(s, inst.batch0 + position)
    entry.slot = source.slot
    entry.finish_step = source.finish_step


@inlined
def remove(s: Any, inst: Any, position: int) -> None:
    """Take the entry at this position out of the batch."""
    for k in range(position, inst.in_batch - 1):
        move(s, inst, k + 1, k)
    inst.in_batch -= 1


@kernel
def _preempt(s: Any, inst: Any, engine: Any, position: int, has_block: bool, time_s: float) -> None:
    """Recompute preemption of the request at this position; `has_block`: it took what this iteration needs already."""
    entry = batch_at(s, inst.batch0 + position)
    index = entry.slot
    slot = slot_at(s, index)
    step_s = leap_end_s(
        0.0, base_time_s(engine.cost, 0, 0.0, inst.decodes), engine.cost.e_s, inst.decode_tokens, inst.decodes, 1
    )
    if entry.finish_step != NEVER:
        computed = leave_decodes(s, inst, engine, slot)
        if slot.sat_out == 0:
            slot.joined_s = max(slot.joined_s, inst.last_decode_s)
        slot.sat_out = 0
        held = blocks_for(computed + 1 if has_block else computed, engine.block_size)
    else:
        computed = slot.computed_tokens
        held = slot.held_blocks
    release(s, inst, engine, index, computed, held, True)
    remove(s, inst, position)
    inst.preemptions += 1
    inst.preempted_waiting += 1
    inst.preempted = 1
    slot.preemptions += 1
    slot.prefill_tokens = slot.prompt_tokens + slot.generated
    slot.computed_tokens = 0
    slot.held_blocks = 0
    if np.isnan(slot.preempted_s):
        slot.preempted_s = time_s
        slot.preempted_step_s = step_s
    enqueue(s, inst, engine, index, True)


@kernel
def _victim(s: Any, inst: Any, engine: Any) -> int:
    """Position in the batch of the request to preempt."""
    last = inst.in_batch - 1
    if engine.priority_order != 0:
        for position in range(inst.in_batch - 1):
            candidate = slot_at(s, batch_at(s, inst.batch0 + position).slot)
            if earlier(engine, slot_at(s, batch_at(s, inst.batch0 + last).slot), candidate):
                last = position
    return last


@inlined
def _demand(s: Any, inst: Any, engine: Any, position: int, budget: int) -> tuple[int, int]:
    """Blocks and tokens that the request at this position takes in the next iteration."""
    entry = batch_at(s, inst.batch0 + position)
    slot = slot_at(s, entry.slot)
    if entry.finish_step != NEVER:
        computed = slot.prompt_tokens + slot.generated + inst.steps_done - 1
        return (1 if computed % engine.block_size == 0 else 0), 1 + engine.cost.draft_tokens
    chunk = min(slot.prefill_tokens - slot.computed_tokens, budget)
    return max(0, blocks_for(slot.computed_tokens + chunk, engine.block_size) - slot.held_blocks), chunk


@inlined
def _chunk(s: Any, inst: Any, engine: Any, index: int, chunk: int) -> float:
    """The request prefills so many tokens in the next iteration (blocks are taken already). Returns its share of Q."""
    slot = slot_at(s, index)
    slot.chunk_tokens = chunk
    slot.held_blocks = max(slot.held_blocks, blocks_for(slot.computed_tokens + chunk, engine.block_size))
    if engine.prefix_cache != 0:
        prefix_cache.fill(s, inst, slot, slot.computed_tokens + chunk, engine.block_size)
    slot.next = NIL
    if inst.prefilling == NIL:
        inst.prefilling = index
    else:
        last = inst.prefilling
        while slot_at(s, last).next != NIL:
            last = slot_at(s, last).next
        slot_at(s, last).next = index
    return chunk * (slot.computed_tokens + chunk * 0.5)


@kernel
def _continue_batch(s: Any, inst: Any, engine: Any, time_s: float) -> tuple[int, float]:
    """One pass over the running requests, preempting where blocks are missing. Returns prefill tokens and Q."""
    position = 0
    budget = engine.max_num_batched_tokens
    prefill = 0
    attention = 0.0
    while position < inst.in_batch and budget > 0:
        index = batch_at(s, inst.batch0 + position).slot
        blocks, tokens = _demand(s, inst, engine, position, budget)
        scheduled = True
        while scheduled and blocks > available_blocks(inst):
            victim = _victim(s, inst, engine)
            scheduled = victim != position
            _preempt(s, inst, engine, victim, victim < position, time_s)
            if victim < position:
                position -= 1
                budget += 1 + engine.cost.draft_tokens
        if not scheduled:
            break
        take(s, inst, blocks)
        budget -= tokens
        if batch_at(s, inst.batch0 + position).finish_step == NEVER:
            prefill += tokens
            attention += _chunk(s, inst, engine, index, tokens)
        position += 1
    inst.sitting_out = position
    return prefill, attention


@kernel
def _pull(s: Any, inst: Any, engine: Any, index: int, time_s: float) -> bool:
    """Take the blocks of a request whose KV is elsewhere, and begin to pull it; False if they are not free."""
    slot, transfer, env = slot_at(s, index), transfer_at(s, index), env_at(s, inst.env)
    size = engine.block_size
    matched, unpinned = 0, 0
    if engine.prefix_cache != 0:
        matched, unpinned = prefix_cache.match(s, inst, slot, size, (slot.prefill_tokens - 1) // size)
    blocks = blocks_for(slot.prefill_tokens, size)
    if blocks - matched + unpinned > available_blocks(inst):
        return False
    inst.remote -= 1
    transfer.loaded_blocks = 0
    _await(s, inst, engine, index, matched)
    copied_bytes = (blocks_for(slot.prefill_tokens - 1, size) - matched) * engine.kv_bytes_per_block
    ends = (transfer.source, slot.instance)
    links.begin(s, env, index, ends, env.pull_round_trip_s, copied_bytes, env.pull_bandwidth_bytes_per_s, time_s)
    return True


@kernel
def _load(s: Any, inst: Any, engine: Any, index: int, matched: int, blocks: int, time_s: float) -> None:
    """The request's blocks from the `matched` first ones to `blocks` begin to be loaded from the shared cache."""
    slot, transfer, env = slot_at(s, index), transfer_at(s, index), env_at(s, inst.env)
    shared_cache.load(s, env, inst, slot, engine.block_size, matched, blocks, time_s)
    if not np.isnan(slot.preempted_s):
        inst.preempted_waiting -= 1
    if np.isnan(slot.admitted_s):
        slot.admitted_s = time_s
    slot.cached_tokens += blocks * engine.block_size
    transfer.loaded_blocks = blocks - matched
    transfer.loaded_tokens += transfer.loaded_blocks * engine.block_size
    _await(s, inst, engine, index, matched)
    copied_bytes = transfer.loaded_blocks * engine.kv_bytes_per_block
    ends = (SHARED_CACHE, slot.instance)
    links.begin(s, env, index, ends, env.shared_round_trip_s, copied_bytes, env.shared_bandwidth_bytes_per_s, time_s)


@inlined
def _await(s: Any, inst: Any, engine: Any, index: int, matched: int) -> None:
    """The request leaves the queue with all blocks of its prefill, of which the first are matched, the next to come."""
    slot = slot_at(s, index)
    dequeue(s, inst, engine, index)
    inst.pulls += 1
    if engine.prefix_cache != 0:
        prefix_cache.pin(s, inst, index, matched, engine.block_size)
    slot.held_blocks = blocks_for(slot.prefill_tokens, engine.block_size)
    take(s, inst, slot.held_blocks - matched)
    slot.computed_tokens = matched * engine.block_size
    inst.prefix_queries_tokens += slot.prefill_tokens
    inst.prefix_hits_tokens += slot.computed_tokens


@kernel
def _take_in(s: Any, inst: Any, engine: Any, budget: int, time_s: float) -> tuple[int, float]:
    """The first request whose KV has come joins the batch. Returns the tokens that it computes, and its share of Q."""
    index = inst.pulled
    slot, transfer = slot_at(s, index), transfer_at(s, index)
    inst.pulled = slot.next
    inst.pulls -= 1
    inst.changed = 1
    if transfer.loaded_blocks == 0:
        transfer.handover_s += time_s - transfer.prefilled_s
    if not np.isnan(slot.stopped_s):
        slot.downtime_s += time_s - slot.stopped_s
        slot.stopped_s = np.nan
    insert_in_batch(s, inst, engine, index, False)
    tokens = min(slot.prefill_tokens - slot.computed_tokens, budget)
    return tokens, _chunk(s, inst, engine, index, tokens)


@kernel
def _admit(s: Any, inst: Any, engine: Any, budget: int, time_s: float) -> tuple[int, float]:
    """Admit waiting requests, the head first, until one does not fit. Returns prefill tokens and Q."""
    size = engine.block_size
    prefill = 0
    attention = 0.0
    while inst.pulled != NIL and budget > 0 and inst.in_batch < engine.max_num_seqs:
        tokens, share = _take_in(s, inst, engine, budget, time_s)
        attention += share
        prefill += tokens
        budget -= tokens
    while inst.head != NIL and budget > 0 and inst.in_batch < engine.max_num_seqs:
        index = inst.head
        slot = slot_at(s, index)
        if inst.remote > 0 and transfer_at(s, index).source != NIL:
            if not _pull(s, inst, engine, index, time_s):
                break
            continue
        matched, unpinned = 0, 0
        if engine.prefix_cache != 0 and (slot.resident_blocks > 0 or prefix_cache.leaf(slot) >= 0):
            matched, unpinned = prefix_cache.match(s, inst, slot, size, (slot.prefill_tokens - 1) // size)
        missing = blocks_for(slot.prefill_tokens, size) - matched
        if engine.prefix_cache != 0 and prefix_cache.leaf(slot) >= 0 and env_at(s, inst.env).shared_cache != 0:
            reach = shared_cache.reach(
                s, env_at(s, inst.env), inst, slot, size, (slot.prefill_tokens - 1) // size, time_s
            )
            if reach > matched:
                if missing + unpinned > available_blocks(inst):
                    break
                _load(s, inst, engine, index, matched, reach, time_s)
                continue
        if missing + unpinned + engine.watermark_blocks > available_blocks(inst):
            break
        chunk = slot.prefill_tokens - matched * size
        if engine.mode == MODE_CHUNKED:
            chunk = min(chunk, budget)
        elif chunk > budget:
            break
        dequeue(s, inst, engine, index)
        if not np.isnan(slot.preempted_s):
            inst.preempted_waiting -= 1
        if engine.prefix_cache != 0:
            prefix_cache.pin(s, inst, index, matched, size)
        take(s, inst, blocks_for(matched * size + chunk, size) - matched)
        slot.computed_tokens = matched * size
        slot.cached_tokens += matched * size
        inst.prefix_queries_tokens += slot.prefill_tokens
        inst.prefix_hits_tokens += matched * size
        if np.isnan(slot.admitted_s):
            slot.admitted_s = time_s
        if not np.isnan(slot.stopped_s):
            slot.downtime_s += time_s - slot.stopped_s
            slot.stopped_s = np.nan
        insert_in_batch(s, inst, engine, index, False)
        prefill += chunk
        attention += _chunk(s, inst, engine, index, chunk)
        budget -= chunk
        inst.changed = 1
    return prefill, attention


@inlined
def insert_in_batch(s: Any, inst: Any, engine: Any, index: int, decodes: bool) -> int:
    """Append to the running list, one that decodes before a prefill that is not complete.

    `prefill_first` keeps the list in order of (priority, dispatch time, row). Returns the position.
    """
    position = inst.in_batch
    if engine.mode == MODE_CHUNKED:
        while decodes and position > 0 and batch_at(s, inst.batch0 + position - 1).finish_step == NEVER:
            move(s, inst, position - 1, position)
            position -= 1
    else:
        slot = slot_at(s, index)
        while position > 0 and earlier(engine, slot, slot_at(s, batch_at(s, inst.batch0 + position - 1).slot)):
            move(s, inst, position - 1, position)
            position -= 1
    entry = batch_at(s, inst.batch0 + position)
    entry.slot = index
    entry.finish_step = NEVER
    inst.in_batch += 1
    return position


@kernel
def first_finish(s: Any, inst: Any) -> int:
    """The decode step at which the first request of the batch finishes."""
    first = NEVER
    for position in range(inst.in_batch):
        first = min(first, batch_at(s, inst.batch0 + position).finish_step)
    return first


@inlined
def _decodes_fit(s: Any, inst: Any, engine: Any) -> bool:
    """Take the blocks for one step of a batch that only decodes, if they are there."""
    demand = decode_demand(s, inst, engine, inst.steps_done, 1)
    if demand > available_blocks(inst):
        return False
    take(s, inst, demand)
    return True


@kernel
def schedule(s: Any, inst: Any, engine: Any, time_s: float) -> tuple[int, float]:
    """One try at forming the next iteration. Returns prefill tokens and Q."""
    inst.prefilling = NIL
    inst.preempted = 0
    prefill = 0
    attention = 0.0
    if engine.mode == MODE_PREFILL_FIRST and inst.head != NIL:
        prefill, attention = _admit(s, inst, engine, engine.max_num_batched_tokens, time_s)
        if prefill > 0:
            inst.sitting_out = 0
            return prefill, attention
    if inst.in_batch > inst.decodes or not _decodes_fit(s, inst, engine):
        prefill, attention = _continue_batch(s, inst, engine, time_s)
        if inst.preempted != 0:
            inst.changed = 1
            inst.first_finish_step = first_finish(s, inst)
            return prefill, attention
    if engine.mode == MODE_CHUNKED and (inst.head != NIL or inst.pulled != NIL):
        budget = engine.max_num_batched_tokens - inst.decodes * (1 + engine.cost.draft_tokens) - prefill
        more, more_attention = _admit(s, inst, engine, budget, time_s)
        prefill += more
        attention += more_attention
    inst.sitting_out = inst.in_batch
    return prefill, attention


@inlined
def all_preempted(inst: Any, prefill: int) -> bool:
    """Whether a try that scheduled `prefill` tokens preempted all that it had scheduled."""
    return prefill == 0 and inst.preempted != 0 and inst.sitting_out == 0  # type: ignore[no-any-return]


@kernel
def sit_out(s: Any, inst: Any, engine: Any, last_token_s: float) -> None:
    """The decode step that was just counted was not theirs: requests from `sitting_out` on stay where they were."""
    for position in range(inst.sitting_out, inst.in_batch):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step != NEVER:
            slot = slot_at(s, entry.slot)
            residue = (slot.prompt_tokens + slot.generated - 1) % engine.block_size
            residue_at(s, inst.residues0 + residue).decodes -= 1
            entry.finish_step += 1
            slot.generated -= 1
            if slot.sat_out == 0:
                slot.sat_out = 1
                slot.joined_s = max(slot.joined_s, last_token_s)
            residue = residue - 1 if residue > 0 else engine.block_size - 1
            residue_at(s, inst.residues0 + residue).decodes += 1
    inst.first_finish_step = first_finish(s, inst)
    inst.changed = 1
    inst.uneven = 1


@inlined
def advance_decode(s: Any, inst: Any, engine: Any, entry: Any, tokens: int) -> None:
    """A decode is so many tokens further than the steps say."""
    slot = slot_at(s, entry.slot)
    residue = (slot.prompt_tokens + slot.generated - 1) % engine.block_size
    residue_at(s, inst.residues0 + residue).decodes -= 1
    entry.finish_step -= tokens
    slot.generated += tokens
    residue = (slot.prompt_tokens + slot.generated - 1) % engine.block_size
    residue_at(s, inst.residues0 + residue).decodes += 1
    inst.decode_tokens += tokens


@kernel
def decoding(s: Any, inst: Any) -> tuple[int, int]:
    """Decodes in the next iteration, and the KV tokens they read, where some sit out."""
    decodes = 0
    tokens = 0
    for position in range(inst.sitting_out):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step != NEVER:
            slot = slot_at(s, entry.slot)
            decodes += 1
            tokens += slot.prompt_tokens + slot.generated + inst.steps_done
    return decodes, tokens
