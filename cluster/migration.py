"""Live migration: a running request moves to another instance with its KV cache (docs/model.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import links, prefix_cache, stock_migration
from fleetpilot.cluster.iterations import interrupt
from fleetpilot.cluster.kv_cache import available_blocks, blocks_for, release, take
from fleetpilot.cluster.memory import (
    batch_at,
    counts_at,
    engine_at,
    env_at,
    instance_at,
    migration_at,
    migration_log_at,
    next_at,
    slot_at,
    transfer_at,
    view_instance_at,
)
from fleetpilot.cluster.scheduler import (
    dequeue,
    enqueue,
    first_finish,
    insert_in_batch,
    join_decodes,
    leave_decodes,
    remove,
)
from fleetpilot.cluster.state import (
    COMPLETED,
    COPYING,
    DESTINATION_DIED,
    HANDING_OVER,
    IDLE,
    LEFT,
    MOVED,
    NEVER,
    NIL,
    NO_SPACE,
    PREEMPTED,
    PROBED,
    PROBING,
    PROTOCOL_VLLM,
    STOPPING,
    TOO_LONG,
)
from fleetpilot.cluster.unstarted import enter_unstarted, leave_unstarted
from fleetpilot.fleet import ledger
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.view import ROLE_PREFILL, STATE_DRAINING, STATE_READY

LAST, SHORTEST, LONGEST, LOWEST_PRIORITY = range(4)
"""Which request leaves a source: `cluster.config.REQUEST_CHOICES`."""


@kernel
def leaving_position(s: Any, inst: Any, choice: int) -> int:
    """Position in the batch of the decoding request that leaves by the rule, NIL without one."""
    best = NIL
    best_tokens = 0
    best_priority = 0
    for position in range(inst.in_batch):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step != NEVER:
            slot = slot_at(s, entry.slot)
            tokens = slot.prompt_tokens + slot.generated
            better = best == NIL or choice == LAST
            if choice == SHORTEST:
                better = better or tokens <= best_tokens
            elif choice == LONGEST:
                better = better or tokens >= best_tokens
            elif choice == LOWEST_PRIORITY:
                better = better or slot.priority > best_priority
                better = better or (slot.priority == best_priority and tokens <= best_tokens)
            if better:
                best, best_tokens, best_priority = position, tokens, slot.priority
    return best


@kernel
def leaving_slot(s: Any, env: Any, g: int) -> int:
    """The request that leaves instance `g`, which can be a source: a decoding one, else the last that waits."""
    inst = instance_at(s, g)
    if inst.decodes > 0:
        position = leaving_position(s, inst, env.request_choice)
        return batch_at(s, inst.batch0 + position).slot  # type: ignore[no-any-return]
    return inst.tail  # type: ignore[no-any-return]


@inlined
def may_be_source(s: Any, env: Any, g: int) -> bool:
    """Whether a SOURCE decision may choose the instance."""
    inst = instance_at(s, g)
    serving = inst.life == STATE_READY or inst.life == STATE_DRAINING
    if not serving or inst.migration != NIL or inst.source_tick == env.rebalance_tick:
        return False
    if env.pools != 0:
        return inst.decodes > 0  # type: ignore[no-any-return]
    return inst.decodes > 0 or (inst.life == STATE_DRAINING and inst.tail != NIL)  # type: ignore[no-any-return]


@inlined
def may_be_destination(s: Any, env: Any, g: int) -> bool:
    """Whether a DESTINATION decision may choose the instance."""
    inst = instance_at(s, g)
    here, there = engine_at(s, env.source), engine_at(s, g)
    same = here.block_size == there.block_size and here.kv_bytes_per_block == there.kv_bytes_per_block
    free = inst.life == STATE_READY and inst.migration == NIL and g != env.source
    return free and same and inst.role != ROLE_PREFILL  # type: ignore[no-any-return]


@inlined
def _reserve(s: Any, env: Any, g: int, blocks: int) -> bool:
    """PRE-ALLOC: take blocks at the destination, if so many are free."""
    inst = instance_at(s, g)
    if blocks > available_blocks(inst):
        return False
    take(s, inst, blocks)
    inst.reserved_blocks += blocks
    return True


@inlined
def _copy(s: Any, env: Any, g: int, blocks: int, time_s: float) -> None:
    """The next stage of the migration from `g` begins: so many blocks, reserved already."""
    migration = migration_at(s, g)
    engine = engine_at(s, g)
    migration.stages += 1
    migration.stage_blocks = blocks
    migration.sent_blocks += blocks
    copied_bytes = blocks * engine.kv_bytes_per_block
    migration.end_s = time_s + (env.round_trip_s + copied_bytes / env.bandwidth_bytes_per_s)
    if env.transfers != 0:
        ends = (g, migration.destination)
        links.begin(s, env, g, ends, env.round_trip_s, copied_bytes, env.bandwidth_bytes_per_s, time_s)


@inlined
def _end_copy(s: Any, env: Any, g: int, time_s: float) -> None:
    """The stage is copied, or not wanted any more."""
    if env.transfers != 0 and transfer_at(s, g).source != NIL:
        links.end(s, env, g, time_s)
        transfer_at(s, g).source = NIL


@inlined
def _log(s: Any, env: Any, g: int, outcome: int, time_s: float) -> None:
    migration = migration_at(s, g)
    if counts_at(s, 0).migrations_size > 0:
        entry = migration_log_at(s, counts_at(s, 0).migrations)
        entry.row = migration.row
        entry.source = g - env.instance0
        entry.destination = migration.destination - env.instance0
        entry.start_s = migration.start_s
        entry.stop_s = migration.stop_s
        entry.end_s = time_s
        entry.stages = migration.stages
        entry.blocks = migration.sent_blocks
        entry.outcome = outcome
        counts_at(s, 0).migrations += 1
    env.migrations_ended += 1
    if outcome in (COMPLETED, MOVED):
        env.migrations_completed += 1


@kernel
def begin(s: Any, e: int, g: int, destination: int) -> None:
    """The request that leaves `g` begins to move to another instance."""
    env = env_at(s, e)
    interrupt(s, env, g, env.time_s)
    interrupt(s, env, destination, env.time_s)
    index = leaving_slot(s, env, g)
    slot = slot_at(s, index)
    inst = instance_at(s, g)
    migration = migration_at(s, g)
    migration.slot = index
    migration.row = slot.row
    migration.destination = destination
    migration.stages = 0
    migration.sent_blocks = 0
    migration.copied_blocks = 0
    migration.stage_blocks = 0
    migration.preemptions = slot.preemptions
    migration.start_s = env.time_s
    migration.stop_s = np.nan
    if inst.decodes == 0:
        _move_waiting(s, env, g, destination, index)
        _log(s, env, g, MOVED, env.time_s)
        return
    engine = engine_at(s, g)
    migration.shadow = NIL
    if env.protocol == PROTOCOL_VLLM:
        stock_migration.take_shadow(s, g, index)
        _await_boundary(s, env, g, PROBING)
    else:
        blocks = _computed(inst, slot) // engine.block_size
        if not _reserve(s, env, destination, blocks):
            _log(s, env, g, NO_SPACE, env.time_s)
            return
        migration.phase = COPYING
        _copy(s, env, g, blocks, env.time_s)
    inst.migration = g
    instance_at(s, destination).migration = g
    inst.changed = 1
    instance_at(s, destination).changed = 1


@inlined
def _await_boundary(s: Any, env: Any, g: int, phase: int) -> None:
    """The migration from `g` goes on at the instance's next boundary."""
    migration = migration_at(s, g)
    migration.phase = phase
    migration.end_s = np.inf
    instance_at(s, g).stopping = 1
    env.stopping += 1


@inlined
def _computed(inst: Any, slot: Any) -> int:
    """Tokens whose KV a decoding request holds."""
    return slot.prompt_tokens + slot.generated + inst.steps_done - 1  # type: ignore[no-any-return]


@kernel
def leave_queue(s: Any, g: int, index: int) -> None:
    """A waiting request leaves the queue, and what the instance has kept for it is free."""
    inst, slot = instance_at(s, g), slot_at(s, index)
    dequeue(s, inst, engine_at(s, g), index)
    if slot.resident_blocks > 0:
        prefix_cache.remove_extent(s, inst, -2 - index)
        inst.free_blocks += slot.resident_blocks
        slot.resident_blocks = 0
    if not np.isnan(slot.preempted_s):
        inst.preempted_waiting -= 1


@kernel
def _move_waiting(s: Any, env: Any, g: int, destination: int, index: int) -> None:
    """A waiting request leaves the queue and joins the destination's."""
    other = instance_at(s, destination)
    slot = slot_at(s, index)
    leave_queue(s, g, index)
    waits_again = 0 if np.isnan(slot.preempted_s) else 1
    other.preempted_waiting += waits_again
    move_in_ledger(s, env, index, destination)
    enqueue(s, other, engine_at(s, destination), index, False)
    if other.doing == IDLE:
        next_at(s, destination).time_s = env.time_s
    slot.migrations += 1


@kernel
def move_in_ledger(s: Any, env: Any, index: int, destination: int) -> None:
    """The dispatcher's account of the request goes from its instance to another, and the request with it."""
    slot = slot_at(s, index)
    inst, view = instance_at(s, slot.instance), view_instance_at(s, slot.instance)
    other, other_view = instance_at(s, destination), view_instance_at(s, destination)
    prompt_tokens = slot.prompt_tokens + slot.restart_tokens
    streamed_tokens = slot.generated - slot.restart_tokens
    ledger.on_end(
        view,
        prompt_tokens,
        slot.predicted_output_tokens,
        slot.indexed_match_tokens,
        0 if slot.unstarted != 0 else streamed_tokens,
        slot.priority,
    )
    if slot.unstarted != 0:
        leave_unstarted(s, inst, view, slot)
        slot.indexed_match_tokens = 0
        ledger.on_dispatch(other_view, prompt_tokens, slot.predicted_output_tokens, 0, slot.priority)
        other_view.dispatched -= 1
        enter_unstarted(s, other, other_view, index)
    else:
        inst.streamed_tokens -= streamed_tokens
        other.streamed_tokens += streamed_tokens
        ledger.on_arrival(other_view, prompt_tokens, slot.predicted_output_tokens, streamed_tokens, slot.priority)
    ledger.stock_load(view)
    ledger.stock_load(other_view)
    slot.instance = destination


@kernel
def end_stage(s: Any, env: Any, g: int, time_s: float) -> None:
    """What was being copied from `g` is there."""
    _end_copy(s, env, g, time_s)
    migration = migration_at(s, g)
    migration.copied_blocks += migration.stage_blocks
    migration.stage_blocks = 0
    interrupt(s, env, g, time_s)
    interrupt(s, env, migration.destination, time_s)
    if migration.phase == HANDING_OVER:
        if env.protocol == PROTOCOL_VLLM:
            _resume(s, env, g, time_s)
        else:
            _commit(s, env, g, time_s)
        return
    if env.protocol == PROTOCOL_VLLM:
        stock_migration.end_copy(s, g)
    outcome = _gone(s, migration)
    if outcome != NIL:
        abort(s, env, g, outcome, time_s)
        return
    inst, engine = instance_at(s, g), engine_at(s, g)
    computed = _computed(inst, slot_at(s, migration.slot))
    if blocks_for(computed, engine.block_size) - migration.copied_blocks <= env.last_stage_blocks:
        _await_boundary(s, env, g, STOPPING)
    elif migration.stages >= env.max_stages - 1:
        abort(s, env, g, TOO_LONG, time_s)
    elif env.protocol == PROTOCOL_VLLM:
        _await_boundary(s, env, g, PROBING)
    else:
        blocks = computed // engine.block_size - migration.copied_blocks
        if _reserve(s, env, migration.destination, blocks):
            _copy(s, env, g, blocks, time_s)
        else:
            abort(s, env, g, NO_SPACE, time_s)


@inlined
def _gone(s: Any, migration: Any) -> int:
    """Why the request no longer decodes at the source, or NIL."""
    slot = slot_at(s, migration.slot)
    if slot.row != migration.row:
        return LEFT
    return PREEMPTED if slot.preemptions != migration.preemptions else NIL


@kernel
def at_boundary(s: Any, env: Any, g: int, time_s: float) -> None:
    """The boundary of the source that the migration waited for: a probe, what follows it, or the request stops."""
    migration = migration_at(s, g)
    inst, engine = instance_at(s, g), engine_at(s, g)
    inst.stopping = 0
    env.stopping -= 1
    # boundaries of equal times go by instance: one of the destination may have been already
    seen_s = np.nextafter(time_s, np.inf) if migration.destination < g else time_s
    interrupt(s, env, migration.destination, seen_s)
    outcome = _gone(s, migration)
    if outcome == NIL:
        computed = _computed(inst, slot_at(s, migration.slot))
        if migration.phase == PROBING:
            went_on = _probe(s, env, g, computed)
        elif migration.phase == PROBED:
            blocks = computed // engine.block_size
            went_on = stock_migration.begin_copy(s, g, blocks)
            if went_on:
                migration.phase = COPYING
                _copy(s, env, g, blocks - migration.copied_blocks, time_s)
        elif env.protocol == PROTOCOL_VLLM:
            _take_out(s, g, time_s)
            release(s, inst, engine, migration.slot, computed, blocks_for(computed, engine.block_size), False)
            migration.end_s = time_s + env.round_trip_s
            went_on = True
        else:
            blocks = blocks_for(computed, engine.block_size) - migration.copied_blocks
            went_on = _reserve(s, env, migration.destination, blocks)
            if went_on:
                _take_out(s, g, time_s)
                _copy(s, env, g, blocks, time_s)
        if went_on:
            return
        outcome = NO_SPACE
    abort(s, env, g, outcome, time_s)


@inlined
def _probe(s: Any, env: Any, g: int, computed: int) -> bool:
    """A request of one token that shares the blocks of the one that moves takes a seat for one iteration."""
    inst = instance_at(s, g)
    if inst.in_batch >= engine_at(s, g).max_num_seqs:
        return False
    stock_migration.ask_for_one_token(inst, computed)
    _await_boundary(s, env, g, PROBED)
    return True


@inlined
def _take_out(s: Any, g: int, time_s: float) -> None:
    """The request stops: it leaves the source's batch."""
    migration = migration_at(s, g)
    inst, engine = instance_at(s, g), engine_at(s, g)
    slot = slot_at(s, migration.slot)
    position = inst.in_batch - 1
    while batch_at(s, inst.batch0 + position).slot != migration.slot:
        position -= 1
    if slot.sat_out == 0:
        slot.joined_s = max(slot.joined_s, inst.last_decode_s)
    leave_decodes(s, inst, engine, slot)
    remove(s, inst, position)
    inst.first_finish_step = first_finish(s, inst)
    inst.changed = 1
    slot.stopped_s = time_s
    migration.stop_s = time_s
    migration.phase = HANDING_OVER


@inlined
def _end(s: Any, env: Any, g: int) -> None:
    """Both sides are free for other migrations and run at full speed again."""
    env.candidates_kind = NIL
    inst = instance_at(s, g)
    other = instance_at(s, migration_at(s, g).destination)
    inst.migration = NIL
    other.migration = NIL
    inst.changed = 1
    other.changed = 1


@kernel
def abort(s: Any, env: Any, g: int, outcome: int, time_s: float) -> None:
    """Both sides are brought to the present already; the destination forgets what it holds for the request."""
    migration = migration_at(s, g)
    inst, other = instance_at(s, g), instance_at(s, migration.destination)
    _end_copy(s, env, g, time_s)
    if inst.stopping != 0:
        inst.stopping = 0
        env.stopping -= 1
    if env.protocol == PROTOCOL_VLLM:
        stock_migration.drop_shadow(s, g)
    else:
        blocks = migration.copied_blocks + migration.stage_blocks
        other.free_blocks += blocks
        other.reserved_blocks -= blocks
        if outcome == DESTINATION_DIED and migration.phase == HANDING_OVER:
            _await_join(s, g, migration.slot, time_s)
    _log(s, env, g, outcome, time_s)
    _end(s, env, g)


@inlined
def _await_join(s: Any, g: int, index: int, time_s: float) -> None:
    """The request joins the batch of `g` at its next boundary, after those that came before it."""
    inst = instance_at(s, g)
    if inst.doing == IDLE:
        next_at(s, g).time_s = time_s
    slot_at(s, index).next = NIL
    if inst.incoming == NIL:
        inst.incoming = index
        return
    last = inst.incoming
    while slot_at(s, last).next != NIL:
        last = slot_at(s, last).next
    slot_at(s, last).next = index


@kernel
def _commit(s: Any, env: Any, g: int, time_s: float) -> None:
    """The request is the destination's; the source forgets it."""
    migration = migration_at(s, g)
    destination = migration.destination
    index = migration.slot
    slot = slot_at(s, index)
    inst, engine = instance_at(s, g), engine_at(s, g)
    computed = slot.prompt_tokens + slot.generated - 1
    release(s, inst, engine, index, computed, blocks_for(computed, engine.block_size), False)
    move_in_ledger(s, env, index, destination)
    other, other_engine = instance_at(s, destination), engine_at(s, destination)
    other.reserved_blocks -= migration.copied_blocks
    if other_engine.prefix_cache != 0:
        prefix_cache.pin(s, other, index, 0, other_engine.block_size)
        prefix_cache.fill(s, other, slot, computed, other_engine.block_size)
    slot.migrations += 1
    _await_join(s, destination, index, time_s)
    _log(s, env, g, COMPLETED, time_s)
    _end(s, env, g)


@kernel
def _resume(s: Any, env: Any, g: int, time_s: float) -> None:
    """The request, aborted at the source, waits at the destination, ahead of its class, for the rest of its prefill."""
    migration = migration_at(s, g)
    destination = migration.destination
    slot = slot_at(s, migration.slot)
    slot.prefill_tokens = slot.prompt_tokens + slot.generated
    slot.computed_tokens = 0
    slot.held_blocks = 0
    slot.sat_out = 0
    move_in_ledger(s, env, migration.slot, destination)
    stock_migration.hand_shadow_over(s, g)
    enqueue(s, instance_at(s, destination), engine_at(s, destination), migration.slot, True)
    if instance_at(s, destination).doing == IDLE:
        next_at(s, destination).time_s = time_s
    slot.migrations += 1
    _log(s, env, g, COMPLETED, time_s)
    _end(s, env, g)


@kernel
def join(s: Any, g: int, time_s: float) -> None:
    """A boundary: requests that have come, or come back from a hand-over, join the batch."""
    inst, engine = instance_at(s, g), engine_at(s, g)
    while inst.incoming != NIL and inst.in_batch < engine.max_num_seqs:
        index = inst.incoming
        slot = slot_at(s, index)
        inst.incoming = slot.next
        last_token_s = slot.joined_s
        join_decodes(s, inst, engine, insert_in_batch(s, inst, engine, index, True), time_s)
        slot.joined_s = last_token_s
        slot.sat_out = 1
        slot.downtime_s += time_s - slot.stopped_s
        slot.stopped_s = np.nan
        inst.uneven = 1
        inst.changed = 1
