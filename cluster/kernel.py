"""The event loop: bring a cluster to its next decision, and carry the decision out."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import heap
from fleetpilot.cluster.kv_cache import available_blocks, decode_demand, release, steps_that_fit, take
from fleetpilot.cluster.memory import (
    batch_at,
    counts_at,
    deadline_at,
    deadline_heap,
    engine_at,
    env_at,
    indexed_array,
    instance_at,
    itl_at,
    log_at,
    next_at,
    node_array,
    released_at,
    released_heap,
    row_at,
    slot_at,
    target_at,
    view_fleet_at,
    view_instance_at,
)
from fleetpilot.cluster.scheduler import decoding, enqueue, join_decodes, leave_decodes, move, schedule, sit_out
from fleetpilot.cluster.state import (
    CUT,
    DECODE,
    ENDED,
    FINISHED,
    IDLE,
    MIXED,
    NEED_DECISION,
    NEED_FLUSH,
    NEED_ROWS,
    NEED_SLOTS,
    NEVER,
    NIL,
    STUCK,
)
from fleetpilot.cluster.telemetry import (
    clock_s,
    count_gaps,
    fill_view,
    itl_bin,
    record_polls,
    sample,
    step_end_s,
    steps_before,
)
from fleetpilot.fleet import ledger, prefix_index
from fleetpilot.fleet.cost_model import base_time_s
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.policy import random_unit

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
def _start(s: Any, env: Any, g: int, time_s: float) -> None:
    """Form the next iteration at a boundary, and plan how far it leaps."""
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    prefill, attention = schedule(s, inst, engine, time_s)
    next_at(s, g).streamed_until_s = -np.inf
    if inst.in_batch == 0:
        inst.doing = IDLE
        inst.planned = inst.steps
        next_at(s, g).time_s = np.inf
        return
    if inst.changed != 0 or inst.doing != DECODE or prefill > 0 or engine.cost.jitter_sigma != 0.0:
        decodes, tokens = inst.decodes, inst.decode_tokens
        if inst.sitting_out < inst.in_batch:
            decodes, tokens = decoding(s, inst)
        inst.anchor_s = time_s
        inst.steps = 0
        inst.base_s = base_time_s(engine.cost, prefill, attention, decodes)
        inst.kv_tokens = tokens
        inst.decodes_in_leap = decodes
        inst.jitter = _jitter(env, engine, g, inst.iterations)
        inst.changed = 0
    inst.doing = MIXED if prefill > 0 else DECODE
    leap = 1
    if prefill == 0 and env.leap != 0 and inst.preempted == 0 and inst.jitter == 1.0:
        most = inst.first_finish_step - inst.steps_done
        # the blocks of the first step are taken, those of the others must fit
        leap = 1 + steps_that_fit(s, inst, engine, inst.steps_done + 1, most - 1, available_blocks(inst))
    inst.planned = inst.steps + leap
    next_at(s, g).time_s = step_end_s(inst, engine, inst.planned)


@inlined
def _account_decodes(s: Any, env: Any, inst: Any, engine: Any, steps: int, time_s: float) -> None:
    """`steps` decode steps have ended: tokens, blocks, gaps."""
    decodes = inst.decodes_in_leap
    if steps > 1:
        take(s, inst, decode_demand(s, inst, engine, inst.steps_done + 1, steps - 1))
    if counts_at(s, 0).itl_bins > 0:
        _count_gaps(s, inst, engine, steps)
    previous_s = inst.last_decode_s
    inst.last_decode_s = time_s
    inst.steps_done += steps
    inst.decode_steps += steps
    inst.decode_tokens += steps * decodes
    inst.streamed_tokens += steps * decodes
    env.generated_tokens += steps * decodes
    if inst.sitting_out < inst.in_batch:
        sit_out(s, inst, engine, previous_s)


@inlined
def _count_gaps(s: Any, inst: Any, engine: Any, steps: int) -> None:
    """Gaps of the `steps` decode steps that end.

    The first is longer for requests that waited for others' prefill, or sat out.
    """
    first = inst.steps + 1
    if inst.uneven != 0 or inst.last_decode_s != step_end_s(inst, engine, inst.steps):
        _count_first_gaps(s, inst, step_end_s(inst, engine, first))
        first += 1
    count_gaps(s, inst, engine, first, inst.steps + steps, inst.decodes_in_leap)


@kernel
def _count_first_gaps(s: Any, inst: Any, end_s: float) -> None:
    """One gap for each decode in the step that ended, from its own last token."""
    inst.uneven = 0
    for position in range(inst.sitting_out):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step != NEVER:
            slot = slot_at(s, entry.slot)
            last_token_s = slot.joined_s if slot.sat_out != 0 else max(slot.joined_s, inst.last_decode_s)
            itl_at(s, itl_bin(end_s - last_token_s)).count += 1
            slot.sat_out = 0


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
            _sample_token(s, env, g, slot, time_s)
            position = inst.in_batch - 1
            while batch_at(s, inst.batch0 + position).slot != index:
                position -= 1
            join_decodes(s, inst, engine, position, time_s)
        index = following
    inst.prefilling = NIL


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
        if counts_at(s, 0).itl_bins > 0 and slot.started != 0:
            itl_at(s, itl_bin(time_s - slot.joined_s)).count += 1
        slot.preempted_s = np.nan
    if slot.started == 0:
        slot.started = 1
        slot.first_token_s = time_s
        view = view_instance_at(s, g)
        _count_unstarted(env, -1, time_s)
        _leave_unstarted(s, inst, slot)
        ledger.on_first_token(view, slot.prompt_tokens, slot.indexed_match_tokens)
        _update_head(s, inst, view)
        if time_s - slot.arrival_s > slot.ttft_target_s and slot.missed == 0:
            slot.missed = 1
            env.misses += 1


@inlined
def _count_unstarted(env: Any, change: int, time_s: float) -> None:
    """Requests without a first token become more or fewer: add up what they have waited.

    Instances run one after the other, so time may go back; the sum, linear in it, is right all the same.
    """
    env.unstarted_area_s += env.unstarted * (time_s - env.unstarted_since_s)
    env.unstarted_since_s = time_s
    env.unstarted += change


@inlined
def _enter_unstarted(s: Any, inst: Any, index: int) -> None:
    slot = slot_at(s, index)
    slot.unstarted_next = NIL
    slot.unstarted_previous = inst.unstarted_tail
    if inst.unstarted_tail == NIL:
        inst.unstarted_head = index
    else:
        slot_at(s, inst.unstarted_tail).unstarted_next = index
    inst.unstarted_tail = index


@inlined
def _leave_unstarted(s: Any, inst: Any, slot: Any) -> None:
    if slot.unstarted_previous == NIL:
        inst.unstarted_head = slot.unstarted_next
    else:
        slot_at(s, slot.unstarted_previous).unstarted_next = slot.unstarted_next
    if slot.unstarted_next == NIL:
        inst.unstarted_tail = slot.unstarted_previous
    else:
        slot_at(s, slot.unstarted_next).unstarted_previous = slot.unstarted_previous


@inlined
def _update_head(s: Any, inst: Any, view: Any) -> None:
    if inst.unstarted_head == NIL:
        view.head_prompt_blocks = 0.0
    else:
        view.head_prompt_blocks = np.ceil(slot_at(s, inst.unstarted_head).prompt_tokens / view.block_size)
    ledger.stock_load(view)


@kernel
def _log(s: Any, env: Any, index: int, status: int, end_s: float) -> None:
    """Append a request that ended to the log."""
    slot = slot_at(s, index)
    entry = log_at(s, counts_at(s, 0).log)
    entry.row = slot.row
    entry.status = status
    entry.instance = slot.instance - env.instance0 if slot.instance >= 0 else -1
    entry.arrival_s = slot.arrival_s
    entry.dispatch_s = slot.dispatch_s
    entry.admitted_s = slot.admitted_s
    entry.first_token_s = slot.first_token_s
    entry.finish_s = end_s
    entry.prompt_tokens = slot.prompt_tokens
    entry.output_tokens = slot.output_tokens
    entry.generated = slot.generated
    entry.predicted_output_tokens = slot.predicted_output_tokens
    entry.priority = slot.priority
    entry.slo_class = slot.slo_class
    entry.preemptions = slot.preemptions
    entry.preemption_loss_s = slot.preemption_loss_s
    entry.cached_tokens = slot.cached_tokens
    counts_at(s, 0).log += 1


@inlined
def _finish(s: Any, e: int, g: int, index: int, time_s: float) -> None:
    """The request has all its tokens: release what it holds, release its next turns, forget it."""
    env = env_at(s, e)
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    slot = slot_at(s, index)
    computed = leave_decodes(s, inst, engine, slot)
    release(s, inst, engine, index, computed, (computed + engine.block_size - 1) // engine.block_size, False)
    inst.streamed_tokens -= slot.output_tokens
    view = view_instance_at(s, g)
    ledger.on_end(
        view,
        slot.prompt_tokens,
        slot.predicted_output_tokens,
        slot.indexed_match_tokens,
        slot.output_tokens,
    )
    ledger.stock_load(view)
    late = slot.output_tokens > 1 and time_s - slot.first_token_s > slot.tpot_target_s * (slot.output_tokens - 1)
    if late and slot.missed == 0:
        env.misses += 1
    env.finished += 1
    if env.track_log != 0:
        _log(s, env, index, FINISHED, time_s)
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
    slot.row = NIL
    slot.next = env.free_slot
    env.free_slot = index
    env.active -= 1


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
            first = min(first, entry.finish_step)
            if kept != position:
                move(s, inst, position, kept)
            kept += 1
    inst.in_batch = kept
    inst.first_finish_step = first
    inst.changed = 1
    if env_at(s, e).held > 0:
        env_at(s, e).next_hold_s = time_s


@kernel
def boundary(s: Any, e: int, g: int, time_s: float) -> None:
    """An iteration, or a leap of them, ends: account for it, let requests leave, form the next."""
    env = env_at(s, e)
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    record_polls(s, inst, engine, env, time_s)
    if inst.doing != IDLE:
        steps = inst.planned - inst.steps
        inst.busy_s += time_s - step_end_s(inst, engine, inst.steps)
        inst.iterations += steps
        if inst.decodes_in_leap > 0:
            _account_decodes(s, env, inst, engine, steps, time_s)
        if inst.doing == MIXED:
            _end_prefill(s, env, g, time_s)
        inst.steps = inst.planned
        if inst.first_finish_step <= inst.steps_done:
            _finish_due(s, e, g, time_s)
    _start(s, env, g, time_s)


# --- the fleet ------------------------------------------------------------------------------------------------------


@inlined
def _first_boundary(s: Any, env: Any) -> int:
    """The instance with the next boundary; the smaller index at equal times."""
    first = env.instance0
    for g in range(env.instance0 + 1, env.instance0 + env.instances):
        if next_at(s, g).time_s < next_at(s, first).time_s:
            first = g
    return first


@inlined
def _run_instances(s: Any, e: int, until_s: float) -> bool:
    """Boundaries before `until_s`. False if a completion may have brought the next arrival or hold retry forward."""
    env = env_at(s, e)
    coupled = env.closed_loop != 0 or env.held != 0
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
        if coupled and env.active != active:
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
def _arrive(s: Any, e: int, row_index: int, time_s: float) -> int:
    """Give the request a slot; it now waits for a decision."""
    env = env_at(s, e)
    if row_index == env.cursor:
        env.cursor += 1
    else:
        env.released = heap.pop(released_heap(s, env.released0 + env.released), env.released0, env.released)
    row = row_at(s, env.row0 + row_index)
    index = env.free_slot
    if index == NIL:
        index = env.slot0 + env.used_slots
        env.used_slots += 1
        slot_at(s, index).next = NIL
    slot = slot_at(s, index)
    env.free_slot = slot.next
    env.active += 1
    _count_unstarted(env, 1, time_s)
    slot.row = env.row_base + row_index
    slot.arrival_s = time_s
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
    slot.started = 0
    slot.sat_out = 0
    slot.missed = 0
    target = target_at(s, env.target0 + slot.slo_class)
    slot.ttft_target_s = target.ttft_s + target.ttft_s_per_token * row.prompt_tokens
    slot.tpot_target_s = target.tpot_s
    if env.track_targets != 0 and slot.ttft_target_s < np.inf:
        due_s = time_s + slot.ttft_target_s
        env.deadlines = heap.push(
            deadline_heap(s, env.deadline0 + env.deadlines + 1), env.deadline0, env.deadlines, due_s, index, slot.row
        )
    return index


@kernel
def _ask(s: Any, e: int, index: int, held: int, time_s: float) -> int:
    env = env_at(s, e)
    env.time_s = time_s
    env.decision_slot = index
    env.decision_held = held
    _pass_targets(s, env, time_s)
    fill_view(s, e)
    env.asked += 1
    return NEED_DECISION


@kernel
def _pass_targets(s: Any, env: Any, time_s: float) -> None:
    """Count requests whose target for the first token has passed without one."""
    while env.deadlines > 0 and deadline_at(s, env.deadline0).time_s < time_s:
        first = deadline_at(s, env.deadline0)
        slot = slot_at(s, first.index)
        if slot.row == first.row and slot.started == 0 and slot.missed == 0:
            slot.missed = 1
            env.misses += 1
        env.deadlines = heap.pop(deadline_heap(s, env.deadline0 + env.deadlines), env.deadline0, env.deadlines)


@kernel
def advance(s: Any, e: int) -> int:
    """Run environment `e` until it needs something; returns what (a status of state.py)."""
    env = env_at(s, e)
    while True:
        if env.track_log != 0 and counts_at(s, 0).log + env.active >= counts_at(s, 0).log_size:
            return NEED_FLUSH
        arrival_s, row = _next_arrival(s, env)
        if row == NIL and env.more_rows != 0:
            return NEED_ROWS
        if row == NIL and env.active == 0:
            return ENDED
        hold_s = env.next_hold_s if env.held > 0 else np.inf
        sample_s = env.next_sample * env.sample_interval_s if env.sample_interval_s < np.inf else np.inf
        until_s = min(min(arrival_s, hold_s), min(sample_s, env.stop_s))
        if not _run_instances(s, e, until_s) or (row == NIL and env.active == 0):
            continue
        if row == NIL and env.held == 0 and env.active > 0 and next_at(s, _first_boundary(s, env)).time_s == np.inf:
            return STUCK
        if env.stop_s <= until_s and env.stop_s < np.inf:
            env.time_s = env.stop_s
            _pass_targets(s, env, env.stop_s)
            return ENDED
        if arrival_s <= until_s and row != NIL:
            if env.free_slot == NIL and env.used_slots == env.slots:
                return NEED_SLOTS
            return _ask(s, e, _arrive(s, e, row, arrival_s), 0, arrival_s)
        if hold_s <= until_s and env.held > 0:
            return _ask(s, e, env.held_head, 1, hold_s)
        if sample_s <= until_s and sample_s < np.inf:
            if counts_at(s, 0).samples + env.instances > counts_at(s, 0).samples_size:
                return NEED_FLUSH
            sample(s, e, sample_s)
            env.next_sample += 1
            env.time_s = sample_s


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
        env.next_hold_s = min(env.time_s + env.hold_interval_s, slot.arrival_s + env.max_hold_s)


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


@kernel
def apply(s: Any, e: int, choice: int) -> None:
    """Carry out the answer to the pending decision. An illegal one is taken as none, and counted."""
    env = env_at(s, e)
    legal = 0 <= choice < env.instances
    if legal:
        legal = view_instance_at(s, env.instance0 + choice).candidate != 0
    if not legal:
        may_hold = view_fleet_at(s, e).may_hold != 0
        if choice != NIL or not may_hold:
            env.invalid += 1
        if may_hold:
            _hold(s, env)
            return
        env.forced += 1
        choice = _least_loaded(s, env)
    if env.decision_held != 0:
        _unhold(s, env)
    env.decisions += 1
    _dispatch(s, env, env.decision_slot, env.instance0 + choice)


@inlined
def _dispatch(s: Any, env: Any, index: int, g: int) -> None:
    """The request joins the instance's waiting queue now."""
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    view = view_instance_at(s, g)
    slot = slot_at(s, index)
    time_s = env.time_s
    slot.dispatch_s = time_s
    slot.instance = g
    env.held_s += time_s - slot.arrival_s
    inst.dispatched += 1
    _enter_unstarted(s, inst, index)
    slot.indexed_match_tokens = view.matched_tokens
    ledger.on_dispatch(view, slot.prompt_tokens, slot.predicted_output_tokens, view.matched_tokens)
    _update_head(s, inst, view)
    sequence = slot.own_node if slot.own_node >= 0 else slot.prefix_node
    if sequence >= 0:
        prefix_index.insert(
            inst,
            view,
            indexed_array(s, inst.residency0 + env.nodes),
            inst.residency0,
            node_array(s, inst.node0 + env.nodes),
            inst.node0,
            sequence,
            engine.index_tokens,
        )
    enqueue(s, inst, engine, index, False)
    if inst.doing == IDLE:
        next_at(s, g).time_s = time_s
    elif inst.doing == DECODE and inst.head == index:
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
            _log(s, env, entry.slot, CUT, np.nan)
        index = inst.head
        while index != NIL:
            _log(s, env, index, CUT, np.nan)
            index = slot_at(s, index).next
    index = env.held_head if env.held > 0 else NIL
    while index != NIL:
        _log(s, env, index, CUT, np.nan)
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
    out[5] = out[3] + env.active
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
