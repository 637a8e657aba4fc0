"""The event loop: bring a cluster to its next decision, and carry the decision out."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import handover, heap, lifecycle, migration, prefix_cache, shared_cache
from fleetpilot.cluster.iterations import account, record_load
from fleetpilot.cluster.kv_cache import available_blocks, release, steps_that_fit
from fleetpilot.cluster.memory import (
    batch_at,
    counts_at,
    deadline_at,
    deadline_heap,
    engine_at,
    env_at,
    instance_at,
    itl_at,
    migration_at,
    next_at,
    prefetch,
    released_at,
    released_heap,
    row_at,
    slot_at,
    target_at,
    transfer_at,
    view_fleet_at,
    view_instance_at,
)
from fleetpilot.cluster.requests import count_unstarted, end_unanswered, free_slot, log_request, take_slot
from fleetpilot.cluster.scheduler import (
    all_preempted,
    decoding,
    enqueue,
    join_decodes,
    leave_decodes,
    move,
    remove,
    schedule,
)
from fleetpilot.cluster.state import (
    CUT,
    DECODE,
    ENDED,
    FAILED,
    FINISHED,
    HANDING_OVER,
    IDLE,
    MIXED,
    NEED_DECISION,
    NEED_FLUSH,
    NEED_ROWS,
    NEED_SLOTS,
    NEVER,
    NIL,
    REJECTED,
    STUCK,
    UNDECIDED,
)
from fleetpilot.cluster.telemetry import (
    clock_s,
    fill_view,
    itl_bin,
    record_polls,
    remember_prefix,
    sample,
    step_end_s,
    steps_before,
)
from fleetpilot.cluster.unstarted import enter_unstarted, leave_unstarted
from fleetpilot.fleet import ledger
from fleetpilot.fleet.cost_model import base_time_s
from fleetpilot.fleet.jit import inlined, kernel, part
from fleetpilot.fleet.policy import random_unit
from fleetpilot.fleet.view import (
    KIND_DECODE,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SCALE,
    KIND_SOURCE,
    REJECT,
    ROLE_DECODE,
    ROLE_MIXED,
    ROLE_PREFILL,
    STATE_DRAINING,
    STATE_READY,
)

_SPARE_TARGETS = 16
"""Targets that cannot be missed any more are forgotten once there are so many more of them than of those that can."""

# --- one instance ---------------------------------------------------------------------------------------------------


@kernel
def _jitter(env: Any, engine: Any, g: int, iteration: int) -> float:
    """Log-normal factor of mean 1, keyed by (seed, instance, iteration)."""
    sigma = engine.cost.jitter_sigma
    if sigma == 0.0:
        return 1.0
    stream = 2 * ((g - env.instance0) * 4_000_000_000 + iteration) + 1_000_000_007
    radius = np.sqrt(-2.0 * np.log(1.0 - random_unit(env.seed, stream)))
    normal = radius * np.cos(2.0 * np.pi * random_unit(env.seed, stream + 1))
    return np.exp(sigma * normal - 0.5 * sigma * sigma)


@inlined
def start_iteration(s: Any, env: Any, g: int, time_s: float) -> None:
    """Form the next iteration at a boundary, and plan how far it leaps."""
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    while True:
        if inst.incoming != NIL:
            migration.join(s, g, time_s)
        prefill, attention = schedule(s, inst, engine, time_s)
        if not all_preempted(inst, prefill):
            break
    if inst.guest_tokens > 0:
        prefill += inst.guest_tokens if inst.in_batch > 0 else 0
        attention += inst.guest_attention
        inst.guest_tokens = 0
        inst.guest_attention = 0.0
    next_at(s, g).streamed_until_s = -np.inf
    if inst.in_batch == 0:
        inst.doing = IDLE
        inst.planned = inst.steps
        next_at(s, g).time_s = np.inf
        return
    one_by_one = engine.cost.jitter_sigma != 0.0 or engine.cost.draft_tokens > 0
    if inst.changed != 0 or inst.doing != DECODE or prefill > 0 or one_by_one:
        decodes, tokens = inst.decodes, inst.decode_tokens
        if inst.sitting_out < inst.in_batch:
            decodes, tokens = decoding(s, inst)
        inst.anchor_s = time_s
        inst.steps = 0
        inst.base_s = base_time_s(engine.cost, prefill, attention, decodes)
        inst.kv_tokens = tokens
        inst.decodes_in_leap = decodes
        inst.jitter = _jitter(env, engine, g, inst.iterations)
        if inst.migration != NIL:
            inst.jitter *= env.slowdown
        inst.changed = 0
    inst.doing = MIXED if prefill > 0 else DECODE
    leap = 1
    if prefill == 0 and env.leap != 0 and inst.preempted == 0 and not one_by_one:
        most = inst.first_finish_step - inst.steps_done
        # the blocks of the first step are taken, those of the others must fit
        leap = 1 + steps_that_fit(s, inst, engine, inst.steps_done + 1, most - 1, available_blocks(inst))
    inst.planned = inst.steps + leap
    if env.engine_reported != 0:
        record_load(s, inst, engine)
    next_at(s, g).time_s = step_end_s(inst, engine, inst.planned)


@inlined
def _end_prefill(s: Any, env: Any, g: int, time_s: float) -> None:
    """The prefill chunks of the iteration that ended are computed; complete prefills have sampled a token."""
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    index = inst.prefilling
    while index != NIL:
        slot = slot_at(s, index)
        following = slot.next
        slot.computed_tokens += slot.chunk_tokens
        if slot.computed_tokens == slot.prefill_tokens:
            position = inst.in_batch - 1
            while batch_at(s, inst.batch0 + position).slot != index:
                position -= 1
            if env.shared_cache != 0 and prefix_cache.leaf(slot) >= 0:
                shared_cache.store(s, env, inst, slot, slot.computed_tokens, engine.block_size, time_s)
            if env.pools != 0 and _decodes_elsewhere(s, env, slot, index):
                _leave_after_prefill(s, env, g, index, position, time_s)
            else:
                _sample_token(s, env, g, slot, time_s)
                join_decodes(s, inst, engine, position, time_s)
        index = following
    inst.prefilling = NIL


@inlined
def _decodes_elsewhere(s: Any, env: Any, slot: Any, index: int) -> bool:
    """Whether the request, whose prefill is done, goes to another instance; not where its last token is sampled now."""
    if env.first_token_from_prefill != 0 and slot.generated + 1 == slot.output_tokens:
        handover.stay(s, index)
    return transfer_at(s, index).decode_instance != NIL  # type: ignore[no-any-return]


@kernel
def _leave_after_prefill(s: Any, env: Any, g: int, index: int, position: int, time_s: float) -> None:
    """The request leaves the batch, to be decoded by another instance."""
    inst, slot = instance_at(s, g), slot_at(s, index)
    remove(s, inst, position)
    inst.changed = 1
    if env.first_token_from_prefill != 0:
        _sample_token(s, env, g, slot, time_s)
        slot.joined_s = time_s
    handover.end_prefill(s, env, g, index, time_s)
    if env.held > 0:
        env.next_hold_s = time_s


@inlined
def _sample_token(s: Any, env: Any, g: int, slot: Any, time_s: float) -> None:
    """The token at the end of a prefill: the first, or the next after a preemption."""
    inst = instance_at(s, g)
    slot.generated += 1
    inst.streamed_tokens += 1
    env.generated_tokens += 1
    if not np.isnan(slot.preempted_s):
        loss_s = max(0.0, time_s - slot.preempted_s - slot.preempted_step_s)
        slot.preemption_loss_s += loss_s
        env.preemption_loss_s += loss_s
        slot.preempted_s = np.nan
    if counts_at(s, 0).itl_bins > 0 and slot.started != 0:
        itl_at(s, itl_bin(time_s - slot.joined_s)).count += 1
    if slot.unstarted != 0:
        view = view_instance_at(s, g)
        ledger.on_first_token(view, slot.prompt_tokens + slot.restart_tokens, slot.indexed_match_tokens)
        leave_unstarted(s, inst, view, slot)
    if slot.started == 0:
        slot.started = 1
        slot.first_token_s = time_s
        count_unstarted(env, -1, time_s)
        if time_s - slot.arrival_s > slot.ttft_target_s and slot.missed == 0:
            slot.missed = 1
            env.misses += 1


@inlined
def _finish(s: Any, e: int, g: int, index: int, time_s: float) -> None:
    """The request has all its tokens: release what it holds, release its next turns, forget it."""
    env = env_at(s, e)
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    slot = slot_at(s, index)
    computed = leave_decodes(s, inst, engine, slot)
    if env.shared_cache != 0 and prefix_cache.leaf(slot) >= 0:
        shared_cache.store(s, env, inst, slot, computed, engine.block_size, time_s)
    release(s, inst, engine, index, computed, (computed + engine.block_size - 1) // engine.block_size, False)
    streamed_tokens = slot.output_tokens - slot.restart_tokens
    inst.streamed_tokens -= streamed_tokens
    view = view_instance_at(s, g)
    ledger.on_end(
        view,
        slot.prompt_tokens + slot.restart_tokens,
        slot.predicted_output_tokens,
        slot.indexed_match_tokens,
        streamed_tokens,
        slot.priority,
    )
    ledger.stock_load(view)
    late = slot.output_tokens > 1 and time_s - slot.first_token_s > slot.tpot_target_s * (slot.output_tokens - 1)
    if late and slot.missed == 0:
        env.misses += 1
    env.finished += 1
    env.last_finish_s = max(env.last_finish_s, time_s)
    if env.track_log != 0:
        log_request(s, env, index, FINISHED, time_s)
    child = slot.first_child
    while child != NIL:
        row = row_at(s, env.row0 + child)
        env.released = heap.push(
            released_heap(s, env.released0 + env.released + 1),
            env.released0,
            env.released,
            time_s + row.think_s,
            child,
            child,
        )
        child = row.next_sibling
    free_slot(s, env, index)


@inlined
def _finish_due(s: Any, e: int, g: int, time_s: float) -> None:
    """Requests that have all their tokens leave the batch."""
    inst = instance_at(s, g)
    kept = 0
    first = NEVER
    for position in range(inst.in_batch):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step <= inst.steps_done:
            _finish(s, e, g, entry.slot, time_s)
        else:
            if entry.finish_step < first:
                first = entry.finish_step
                inst.first_finish_slot = entry.slot
            if kept != position:
                move(s, inst, position, kept)
            kept += 1
    inst.in_batch = kept
    inst.first_finish_step = first
    inst.changed = 1
    if env_at(s, e).held > 0:
        env_at(s, e).next_hold_s = time_s


@inlined
def end_iteration(s: Any, e: int, g: int, time_s: float) -> None:
    """An iteration, or a leap of them, ends: account for it, let requests leave."""
    env = env_at(s, e)
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    record_polls(s, inst, engine, env, time_s)
    if inst.doing != IDLE:
        account(s, env, inst, engine, inst.planned - inst.steps, time_s)
        if inst.doing == MIXED:
            _end_prefill(s, env, g, time_s)
        if inst.first_finish_step <= inst.steps_done:
            _finish_due(s, e, g, time_s)


@kernel
def boundary(s: Any, e: int, g: int, time_s: float) -> None:
    """An iteration, or a leap of them, ends, and the next is formed."""
    env = env_at(s, e)
    inst = instance_at(s, g)
    end_iteration(s, e, g, time_s)
    if inst.stopping != 0:
        migration.at_boundary(s, env, g, time_s)
        lifecycle.leave_if_drained(s, env, migration_at(s, g).destination, time_s)
        env.next_event_s = min(env.next_event_s, migration_at(s, g).end_s)
    start_iteration(s, env, g, time_s)
    if inst.life == STATE_DRAINING:
        lifecycle.leave_if_drained(s, env, g, time_s)


# --- the fleet ------------------------------------------------------------------------------------------------------


@inlined
def _first_boundary(s: Any, env: Any) -> int:
    """The instance with the next boundary; the smaller index at equal times."""
    first = env.instance0
    for g in range(env.instance0 + 1, env.instance0 + env.instances):
        if next_at(s, g).time_s < next_at(s, first).time_s:
            first = g
    return first


@part
def _run_instances(s: Any, e: int, until_s: float) -> bool:
    """Boundaries before `until_s`. False if a completion may have brought the next arrival or hold retry forward."""
    env = env_at(s, e)
    coupled = env.closed_loop != 0 or env.held != 0 or env.stopping != 0 or env.transfers != 0
    stopping = env.stopping
    active = env.active
    g = env.instance0
    while True:
        if coupled:
            g = _first_boundary(s, env)
        else:
            # nothing couples the instances, so each runs on its own
            while next_at(s, g).time_s >= until_s and g < env.instance0 + env.instances - 1:
                g += 1
        if next_at(s, g).time_s >= until_s:
            return True
        time_s = next_at(s, g).time_s
        boundary(s, e, g, time_s)
        if coupled and (
            env.active != active or env.stopping != stopping or env.prefilled_head != NIL or env.next_event_s < until_s
        ):
            env.completion_s = time_s
            env.completion_instance = g
            return False


@inlined
def _next_arrival(s: Any, env: Any) -> tuple[float, int]:
    """Time and row of the next arrival, from the table or from a session's last turn; inf for none."""
    time_s = np.inf
    row = NIL
    while env.cursor < env.rows and row_at(s, env.row0 + env.cursor).closed != 0:
        env.cursor += 1
    if env.cursor < env.rows:
        time_s = row_at(s, env.row0 + env.cursor).arrival_s
        row = env.cursor
    if env.released > 0:
        first = released_at(s, env.released0)
        if first.time_s < time_s or (first.time_s == time_s and first.row < row):
            time_s = first.time_s
            row = first.row
    return time_s, row


@inlined
def arrive(s: Any, e: int, row_index: int, time_s: float) -> int:
    """Give the request a slot; it now waits for a decision."""
    env = env_at(s, e)
    if row_index == env.cursor:
        env.cursor += 1
    else:
        env.released = heap.pop(released_heap(s, env.released0 + env.released), env.released0, env.released)
    row = row_at(s, env.row0 + row_index)
    index = take_slot(s, env)
    slot = slot_at(s, index)
    env.active += 1
    count_unstarted(env, 1, time_s)
    slot.row = env.row_base + row_index
    slot.arrival_s = time_s
    slot.due_s = time_s
    slot.dispatch_s = np.nan
    slot.admitted_s = np.nan
    slot.first_token_s = np.nan
    slot.preempted_s = np.nan
    slot.preempted_step_s = 0.0
    slot.preemption_loss_s = 0.0
    slot.predicted_output_tokens = row.predicted_output_tokens
    slot.prompt_tokens = row.prompt_tokens
    slot.output_tokens = row.output_tokens
    slot.priority = row.priority
    slot.slo_class = min(row.slo_class, env.classes - 1)
    slot.session = row.session
    slot.turn = row.turn
    slot.prefix_node = row.prefix_node
    slot.own_node = row.own_node
    slot.first_child = row.first_child
    slot.instance = NIL
    slot.generated = 0
    slot.prefill_tokens = row.prompt_tokens
    slot.computed_tokens = 0
    slot.held_blocks = 0
    slot.node_blocks = 0
    slot.resident_blocks = 0
    slot.dead_blocks = 0
    slot.cached_tokens = 0
    slot.preemptions = 0
    slot.migrations = 0
    slot.restarts = 0
    slot.restart_tokens = 0
    slot.downtime_s = 0.0
    slot.stopped_s = np.nan
    slot.started = 0
    slot.sat_out = 0
    slot.missed = 0
    if env.transfers != 0:
        transfer = transfer_at(s, index)
        transfer.loaded_tokens = 0
        transfer.source = NIL
        transfer.decode_instance = NIL
        transfer.prefill_instance = NIL
        transfer.handover_s = 0.0
    target = target_at(s, env.target0 + slot.slo_class)
    slot.ttft_target_s = target.ttft_s + target.ttft_s_per_token * row.prompt_tokens
    slot.tpot_target_s = target.tpot_s
    if env.track_targets != 0 and slot.ttft_target_s < np.inf:
        if env.deadlines > 2 * env.unstarted + _SPARE_TARGETS:
            _forget_targets(s, env)
        due_s = time_s + slot.ttft_target_s
        env.deadlines = heap.push(
            deadline_heap(s, env.deadline0 + env.deadlines + 1), env.deadline0, env.deadlines, due_s, index, slot.row
        )
    return index


@kernel
def _ask_for_dispatch(s: Any, e: int, index: int, held: int, time_s: float) -> bool:
    """Ask where the request goes; where no instance is ready it is held, or fails, and nobody is asked: False."""
    env = env_at(s, e)
    if env.ready_to_prefill > 0 and env.ready_to_decode > 0:
        _ask(s, e, KIND_DISPATCH if env.pools == 0 else KIND_PREFILL, index, held, time_s)
        return True
    env.time_s = time_s
    env.decision_slot = index
    env.decision_held = held
    if time_s < slot_at(s, index).due_s + env.max_hold_s:
        _hold(s, env)
    else:
        if held != 0:
            _unhold(s, env)
        end_unanswered(s, env, index, FAILED, time_s)
    env.decision_slot = NIL
    return False


@kernel
def _ask_for_decode(s: Any, e: int) -> bool:
    """The first request whose prefill is done goes on; True if the policy is to say where."""
    env = env_at(s, e)
    env.time_s = env.completion_s
    index = env.prefilled_head
    if not handover.undecided(s, env, index):
        env.prefilled_head = slot_at(s, index).next
        handover.deliver(s, env, index, transfer_at(s, index).decode_instance)
        return False
    if env.ready_to_decode == 0:
        env.prefilled_head = slot_at(s, index).next
        transfer_at(s, index).decode_instance = NIL
        source = handover.let_go(s, env, index, env.time_s)
        lifecycle.leave_if_drained(s, env, source, env.time_s)
        lifecycle.come_back(s, env, index)
        return False
    _ask(s, e, KIND_DECODE, index, 0, env.time_s)
    return True


@kernel
def _ask(s: Any, e: int, kind: int, index: int, held: int, time_s: float) -> None:
    env = env_at(s, e)
    env.time_s = time_s
    env.decision_kind = kind
    env.decision_slot = index
    env.decision_held = held
    _pass_targets(s, env, time_s)
    if env.candidates_kind != kind or kind == KIND_DECODE:
        _find_candidates(s, env, kind)
    fill_view(s, e)
    env.asked += 1


@kernel
def _find_candidates(s: Any, env: Any, kind: int) -> int:
    """Say in the view whom the decision may choose; returns how many. It holds until an instance's state changes."""
    ready, present = lifecycle.count_serving(s, env)
    candidates = 0
    origin = env.source if kind == KIND_DESTINATION else NIL
    if kind == KIND_DECODE:
        origin = env.prefill_choice if env.prefill_choice != NIL else transfer_at(s, env.decision_slot).source
    for g in range(env.instance0, env.instance0 + env.instances):
        inst, view = instance_at(s, g), view_instance_at(s, g)
        candidate = inst.life == STATE_READY
        if kind == KIND_PREFILL:
            candidate = candidate and inst.role != ROLE_DECODE
        elif kind == KIND_DECODE:
            candidate = candidate and inst.role != ROLE_PREFILL
        elif kind == KIND_SOURCE:
            candidate = migration.may_be_source(s, env, g)
        elif kind == KIND_DESTINATION:
            candidate = migration.may_be_destination(s, env, g)
        elif kind == KIND_SCALE:
            candidate = lifecycle.may_scale(s, env, g, ready, present)
        view.candidate = 1 if candidate else 0
        view.state = inst.life
        view.migrating = 1 if inst.migration != NIL else 0
        view.origin = 1 if g == origin else 0
        candidates += view.candidate
    env.candidates_kind = kind
    return candidates


@inlined
def _may_miss(slot: Any, target: Any) -> bool:
    """Whether the request that the target is of is still there without a first token, and not counted yet."""
    return slot.row == target.row and slot.started == 0 and slot.missed == 0  # type: ignore[no-any-return]


@kernel
def _pass_targets(s: Any, env: Any, time_s: float) -> None:
    """Count requests whose target for the first token has passed without one."""
    while env.deadlines > 0 and deadline_at(s, env.deadline0).time_s < time_s:
        first = deadline_at(s, env.deadline0)
        slot = slot_at(s, first.index)
        if _may_miss(slot, first):
            slot.missed = 1
            env.misses += 1
        env.deadlines = heap.pop(deadline_heap(s, env.deadline0 + env.deadlines), env.deadline0, env.deadlines)


@kernel
def _forget_targets(s: Any, env: Any) -> None:
    """Keep only the targets that may still be missed: to wait for the others to pass takes a cache miss for each."""
    kept = 0
    for k in range(env.deadlines):
        entry = deadline_at(s, env.deadline0 + k)
        if _may_miss(slot_at(s, entry.index), entry):
            kept = heap.push(
                deadline_heap(s, env.deadline0 + kept + 1), env.deadline0, kept, entry.time_s, entry.index, entry.row
            )
    env.deadlines = kept


@kernel
def advance(s: Any, e: int) -> int:
    """Run environment `e` until it needs something; returns what (a status of state.py)."""
    env = env_at(s, e)
    while True:
        if env.track_log != 0 and counts_at(s, 0).log + env.active >= counts_at(s, 0).log_size:
            return NEED_FLUSH
        if counts_at(s, 0).migrations + env.instances > counts_at(s, 0).migrations_size > 0:
            return NEED_FLUSH
        if env.prefill_choice != NIL:
            _ask(s, e, KIND_DECODE, env.decision_slot, env.decision_held, env.time_s)
            return NEED_DECISION
        if env.prefilled_head != NIL:
            if _ask_for_decode(s, e):
                return NEED_DECISION
            continue
        if env.returned_head != NIL:
            index = env.returned_head
            env.returned_head = slot_at(s, index).next
            slot_at(s, index).restarts += 1
            if slot_at(s, index).restarts > env.max_restarts:
                env.decision_slot = NIL  # it may have been the last one asked about
                end_unanswered(s, env, index, FAILED, env.time_s)
            elif _ask_for_dispatch(s, e, index, 0, env.time_s):
                return NEED_DECISION
            continue
        if env.rebalance_open != 0:
            if _ask_for_move(s, e):
                return NEED_DECISION
            continue
        if env.scale_open != 0:
            if _ask_for_scale(s, e):
                return NEED_DECISION
            continue
        arrival_s, row = _next_arrival(s, env)
        if row == NIL and env.more_rows != 0:
            return NEED_ROWS
        if row == NIL and env.active == 0:
            return ENDED
        hold_s = env.next_hold_s if env.held > 0 else np.inf
        sample_s = env.next_sample * env.sample_interval_s if env.sample_interval_s < np.inf else np.inf
        rebalance_s = (env.rebalance_tick + 1) * env.rebalance_interval_s
        scale_s = env.scale_first_s + env.scale_tick * env.scale_interval_s
        until_s = min(min(arrival_s, hold_s), min(sample_s, env.stop_s))
        until_s = min(until_s, min(env.next_event_s, min(rebalance_s, scale_s)))
        if not _run_instances(s, e, until_s) or (row == NIL and env.active == 0):
            continue
        quiet = row == NIL and env.held == 0 and env.active > 0 and env.next_event_s == np.inf
        if quiet and next_at(s, _first_boundary(s, env)).time_s == np.inf:
            return STUCK
        if env.stop_s <= until_s and env.stop_s < np.inf:
            env.time_s = env.stop_s
            _pass_targets(s, env, env.stop_s)
            return ENDED
        if env.next_event_s <= until_s and env.next_event_s < np.inf:
            lifecycle.handle_events(s, e, until_s)
            continue
        if arrival_s <= until_s and row != NIL:
            if env.free_slot == NIL and env.used_slots == env.slots:
                return NEED_SLOTS
            if _ask_for_dispatch(s, e, arrive(s, e, row, arrival_s), 0, arrival_s):
                return NEED_DECISION
            continue
        if hold_s <= until_s and env.held > 0:
            if _ask_for_dispatch(s, e, env.held_head, 1, hold_s):
                return NEED_DECISION
            continue
        if rebalance_s <= until_s and rebalance_s < np.inf:
            env.time_s = rebalance_s
            env.rebalance_tick += 1
            env.pairs = 0
            env.rebalance_open = 1
            continue
        if scale_s <= until_s and scale_s < np.inf:
            env.time_s = scale_s
            env.scale_open = 1
            continue
        if sample_s <= until_s and sample_s < np.inf:
            if counts_at(s, 0).samples + env.instances > counts_at(s, 0).samples_size:
                return NEED_FLUSH
            sample(s, e, sample_s)
            env.next_sample += 1
            env.time_s = sample_s


@inlined
def prefetch_arrival(s: Any, e: int) -> None:
    """Prefetch the next arrival of environment `e`, for `prefetch_events` and `advance`."""
    env = env_at(s, e)
    if env.cursor < env.rows:
        prefetch(row_at(s, env.row0 + env.cursor))


@inlined
def prefetch_events(s: Any, e: int) -> None:
    """Prefetch what `apply` and `advance` touch in environment `e` and nothing did for long."""
    env = env_at(s, e)
    prefetch(slot_at(s, env.decision_slot))
    arrival_s = row_at(s, env.row0 + env.cursor).arrival_s if env.cursor < env.rows else np.inf
    for g in range(env.instance0, env.instance0 + env.instances):
        if next_at(s, g).time_s < arrival_s:
            inst = instance_at(s, g)
            if inst.doing == MIXED:
                prefetch(slot_at(s, inst.prefilling))
            if inst.first_finish_step <= inst.steps_done + inst.planned - inst.steps:
                prefetch(slot_at(s, inst.first_finish_slot))
                for position in range(0, inst.in_batch, 8):  # of each cache line
                    prefetch(batch_at(s, inst.batch0 + position))


@kernel
def _hold(s: Any, env: Any) -> None:
    """Keep the request at the dispatcher."""
    index = env.decision_slot
    slot = slot_at(s, index)
    if env.decision_held == 0:
        slot.next = NIL
        if env.held == 0:
            env.held_head = index
        else:
            slot_at(s, env.held_tail).next = index
        env.held_tail = index
        env.held += 1
    if index == env.held_head:
        env.next_hold_s = min(env.time_s + env.hold_interval_s, slot.due_s + env.max_hold_s)


@kernel
def _unhold(s: Any, env: Any) -> None:
    """The head of the held queue is dispatched; the next is asked at once."""
    env.held_head = slot_at(s, env.held_head).next
    env.held -= 1
    env.next_hold_s = env.time_s


@kernel
def _least_loaded(s: Any, env: Any) -> int:
    """Where a request goes whose policy gave no legal answer and that may not be held."""
    best = NIL
    for i in range(env.instances):
        view = view_instance_at(s, env.instance0 + i)
        if view.candidate != 0 and (
            best == NIL or view.in_flight < view_instance_at(s, env.instance0 + best).in_flight
        ):
            best = i
    return best


@inlined
def _may_reject(s: Any, env: Any) -> bool:
    """Whether the request that is asked about has neither a prefill behind it nor a token."""
    prefilled = env.decision_kind == KIND_DECODE and env.prefill_choice == NIL
    return not prefilled and slot_at(s, env.decision_slot).generated == 0  # type: ignore[no-any-return]


@kernel
def _reject(s: Any, env: Any) -> None:
    """The policy turns the request away."""
    index = env.decision_slot
    if env.decision_held != 0:
        _unhold(s, env)
    env.decision_slot = NIL
    env.prefill_choice = NIL
    end_unanswered(s, env, index, REJECTED, env.time_s)


@kernel
def apply(s: Any, e: int, choice: int) -> None:
    """Carry out the answer to the pending decision. An illegal one is taken as none, and counted."""
    env = env_at(s, e)
    legal = 0 <= choice < env.instances
    if legal:
        legal = view_instance_at(s, env.instance0 + choice).candidate != 0
    if env.decision_kind >= KIND_SOURCE:
        if not legal and choice != NIL:
            env.invalid += 1
        _apply_to_fleet(s, e, env.instance0 + choice if legal else NIL)
        return
    if choice == REJECT and _may_reject(s, env):
        _reject(s, env)
        return
    if not legal:
        may_hold = view_fleet_at(s, e).may_hold != 0
        if choice != NIL or not may_hold:
            env.invalid += 1
        if may_hold:
            env.prefill_choice = NIL
            _hold(s, env)
            return
        env.forced += 1
        choice = _least_loaded(s, env)
    g = env.instance0 + choice
    if env.pools != 0:
        g = _choose_in_pools(s, env, env.decision_slot, g)
        if g == NIL:
            return
    if env.decision_held != 0:
        _unhold(s, env)
    env.decisions += 1
    _dispatch(s, env, env.decision_slot, g)


@kernel
def _choose_in_pools(s: Any, env: Any, index: int, g: int) -> int:
    """The answer to a PREFILL or a DECODE. Returns where the request is dispatched to now, or NIL."""
    if env.decision_kind == KIND_PREFILL:
        elsewhere = instance_at(s, g).role != ROLE_MIXED
        transfer_at(s, index).decode_instance = UNDECIDED if elsewhere else NIL
        if elsewhere and env.decode_after_prefill == 0:
            env.prefill_choice = g
            return NIL
        return g
    env.decode_decisions += 1
    if env.prefill_choice == NIL:
        env.prefilled_head = slot_at(s, index).next
        handover.deliver(s, env, index, g)
        return NIL
    handover.commit(s, env, index, g)
    prefill = env.prefill_choice
    env.prefill_choice = NIL
    return prefill  # type: ignore[no-any-return]


@kernel
def _ask_for_move(s: Any, e: int) -> bool:
    """The next SOURCE or DESTINATION of the tick in progress; False if there is nothing left to ask."""
    env = env_at(s, e)
    kind = KIND_SOURCE if env.source == NIL else KIND_DESTINATION
    candidates = _find_candidates(s, env, kind)
    if kind == KIND_SOURCE and (candidates == 0 or env.pairs == env.max_pairs):
        env.rebalance_open = 0
        return False
    if candidates == 0:
        env.source = NIL
        return False
    index = NIL if kind == KIND_SOURCE else migration.leaving_slot(s, env, env.source)
    _ask(s, e, kind, index, 0, env.time_s)
    return True


@kernel
def _ask_for_scale(s: Any, e: int) -> bool:
    """The next SCALE of the tick in progress; False if there is nothing left to ask."""
    env = env_at(s, e)
    if _find_candidates(s, env, KIND_SCALE) == 0:
        env.scale_open = 0
        env.scale_tick += 1
        return False
    _ask(s, e, KIND_SCALE, NIL, 0, env.time_s)
    return True


@kernel
def _apply_to_fleet(s: Any, e: int, g: int) -> None:
    """The answer to a SOURCE, DESTINATION or SCALE: an instance, or NIL for none."""
    env = env_at(s, e)
    env.candidates_kind = NIL
    if env.decision_kind == KIND_SCALE:
        if g == NIL:
            env.scale_open = 0
            env.scale_tick += 1
            return
        lifecycle.scale(s, e, g)
    elif env.decision_kind == KIND_SOURCE:
        if g == NIL:
            env.rebalance_open = 0
            return
        env.source = g
        env.pairs += 1
        instance_at(s, g).source_tick = env.rebalance_tick
        return
    else:
        source = env.source
        env.source = NIL
        if g == NIL:
            return
        migration.begin(s, e, source, g)
        lifecycle.leave_if_drained(s, env, source, env.time_s)
    env.next_event_s = lifecycle.next_event_s(s, env)


@inlined
def _dispatch(s: Any, env: Any, index: int, g: int) -> None:
    """The request goes to the instance now."""
    slot = slot_at(s, index)
    env.held_s += env.time_s - slot.due_s
    slot.indexed_match_tokens = view_instance_at(s, g).matched_tokens
    remember_prefix(s, env, slot, g)
    join_queue(s, env, index, g)


@inlined
def join_queue(s: Any, env: Any, index: int, g: int) -> None:
    """The request joins the instance's waiting queue now."""
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    view = view_instance_at(s, g)
    slot = slot_at(s, index)
    time_s = env.time_s
    slot.dispatch_s = time_s
    slot.instance = g
    inst.dispatched += 1
    prompt_tokens = slot.prompt_tokens + slot.restart_tokens
    matched_tokens = slot.indexed_match_tokens
    output_tokens = slot.predicted_output_tokens
    if env.pools != 0 and transfer_at(s, index).decode_instance != NIL:
        output_tokens = 0.0
    ledger.on_dispatch(view, prompt_tokens, output_tokens, matched_tokens, slot.priority)
    enter_unstarted(s, inst, view, index)
    enqueue(s, inst, engine, index, False)
    if inst.doing == IDLE:
        next_at(s, g).time_s = time_s
    elif inst.doing == DECODE and (inst.head == index or env.engine_reported != 0):
        boundary_step = steps_before(inst, engine, clock_s(env, g)) + 1
        if boundary_step < inst.planned:
            inst.planned = boundary_step
            next_at(s, g).time_s = step_end_s(inst, engine, boundary_step)


@kernel
def run(s: Any, e: int, choose: Any, instances: Any, requests: Any, fleets: Any) -> int:
    """Run environment `e` with a compiled policy until it needs something else than a decision.

    `instances`, `requests` and `fleets` are the environment's own part of the views.
    """
    while True:
        status = advance(s, e)
        if status != NEED_DECISION:
            return status
        apply(s, e, choose(instances, requests, fleets))


@kernel
def cut(s: Any, e: int) -> None:
    """The run ends here: log what is still in the system as cut."""
    env = env_at(s, e)
    for g in range(env.instance0, env.instance0 + env.instances):
        inst = instance_at(s, g)
        engine = engine_at(s, g)
        decoded = inst.steps_done
        if inst.doing != IDLE and inst.decodes_in_leap > 0:
            decoded += steps_before(inst, engine, env.time_s) - inst.steps
        for position in range(inst.in_batch):
            entry = batch_at(s, inst.batch0 + position)
            if entry.finish_step != NEVER:
                slot_at(s, entry.slot).generated += decoded
            log_request(s, env, entry.slot, CUT, np.nan)
        if inst.migration == g and migration_at(s, g).phase == HANDING_OVER:
            log_request(s, env, migration_at(s, g).slot, CUT, np.nan)
        _cut_list(s, env, inst.incoming)
        _cut_list(s, env, inst.pulled)
        pull = inst.transfers
        while pull != NIL:
            if pull >= env.slot0:
                log_request(s, env, pull, CUT, np.nan)
            pull = transfer_at(s, pull).next
        _cut_list(s, env, inst.head)
    if env.held > 0:
        _cut_list(s, env, env.held_head)


@kernel
def _cut_list(s: Any, env: Any, index: int) -> None:
    while index != NIL:
        log_request(s, env, index, CUT, np.nan)
        index = slot_at(s, index).next


COSTS = 7
"""What `costs` writes: waiting_s, misses, preemption_loss_s, finished, generated_tokens, arrived, time_s."""


@kernel
def costs(s: Any, e: int, out: Any) -> None:
    """The costs of environment `e` from its start to now, its last decision or end (see `COSTS`).

    `waiting_s` sums the time that requests have been without a first token, `misses` counts requests that have missed
    a target.
    """
    env = env_at(s, e)
    now_s = env.time_s
    out[0] = env.unstarted_area_s + env.unstarted * (now_s - env.unstarted_since_s)
    out[1] = env.misses
    out[2] = env.preemption_loss_s
    out[3] = env.finished
    out[4] = env.generated_tokens
    out[5] = env.finished + env.failed + env.active
    out[6] = now_s


@kernel
def unmissed(s: Any, e: int) -> int:
    """Requests in the system that have not missed a target yet: where the run ends now, they are misses too."""
    env = env_at(s, e)
    count = 0
    for index in range(env.slot0, env.slot0 + env.used_slots):
        slot = slot_at(s, index)
        if slot.row != NIL and slot.missed == 0:
            count += 1
    return count
