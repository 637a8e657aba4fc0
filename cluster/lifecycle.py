"""Instances that start, drain, fail and are repaired, and what becomes of their requests (docs/model.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import migration as moves
from fleetpilot.cluster.iterations import interrupt
from fleetpilot.cluster.memory import (
    batch_at,
    engine_at,
    env_at,
    failure_at,
    indexed_array,
    instance_at,
    migration_at,
    next_at,
    residency_at,
    residue_at,
    slot_at,
    view_instance_at,
)
from fleetpilot.cluster.requests import fail_request
from fleetpilot.cluster.scheduler import leave_decodes
from fleetpilot.cluster.state import (
    DESTINATION_DIED,
    HANDING_OVER,
    IDLE,
    NEVER,
    NIL,
    PROTOCOL_VLLM,
    SOURCE_DIED,
)
from fleetpilot.cluster.unstarted import leave_unstarted
from fleetpilot.fleet import ledger
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.policy import random_unit
from fleetpilot.fleet.view import STATE_ABSENT, STATE_DRAINING, STATE_FAILED, STATE_READY, STATE_STARTING

_FAILURE_STREAM = 3_000_000_019
"""Keys of the draws of failures, apart from all others."""


@inlined
def _live(env: Any, inst: Any, life: int, due_s: float) -> None:
    """From now on."""
    env.ready += (1 if life == STATE_READY else 0) - (1 if inst.life == STATE_READY else 0)
    inst.life = life
    inst.due_s = due_s
    env.candidates_kind = NIL


@inlined
def _stop_billing(inst: Any, time_s: float) -> None:
    if not np.isnan(inst.billed_from_s):
        inst.alive_s += time_s - inst.billed_from_s
        inst.billed_from_s = np.nan


@kernel
def count_serving(s: Any, env: Any) -> tuple[int, int]:
    """Instances that are ready, and those that are starting, ready or draining."""
    ready = 0
    present = 0
    for g in range(env.instance0, env.instance0 + env.instances):
        life = instance_at(s, g).life
        ready += 1 if life == STATE_READY else 0
        present += 1 if life in (STATE_STARTING, STATE_READY, STATE_DRAINING) else 0
    return ready, present


@kernel
def may_scale(s: Any, env: Any, g: int, ready: int, present: int) -> bool:
    """Whether a SCALE decision may choose the instance, with so many of `count_serving`."""
    inst = instance_at(s, g)
    if inst.scale_tick == env.scale_tick:
        return False
    if inst.life == STATE_DRAINING:
        return True
    if inst.life == STATE_READY:
        return ready > env.min_instances  # type: ignore[no-any-return]
    if inst.life != STATE_ABSENT or present >= env.max_instances:
        return False
    for other in range(env.instance0, g):  # one for each profile
        same = engine_at(s, other).profile == engine_at(s, g).profile
        if same and instance_at(s, other).life == STATE_ABSENT and instance_at(s, other).scale_tick != env.scale_tick:
            return False
    return True


@kernel
def scale(s: Any, e: int, g: int) -> None:
    """A SCALE decision chose the instance: start it, drain it or keep it."""
    env = env_at(s, e)
    inst = instance_at(s, g)
    inst.scale_tick = env.scale_tick
    if inst.life == STATE_ABSENT:
        _live(env, inst, STATE_STARTING, env.time_s + env.start_up_s)
        inst.billed_from_s = env.time_s
    elif inst.life == STATE_READY:
        _live(env, inst, STATE_DRAINING, env.time_s + env.drain_deadline_s)
        leave_if_drained(s, env, g, env.time_s)
    else:
        _live(env, inst, STATE_READY, np.inf)


@kernel
def leave_if_drained(s: Any, env: Any, g: int, time_s: float) -> None:
    """A draining instance that has nothing more to do is absent."""
    inst = instance_at(s, g)
    busy = inst.in_batch > 0 or inst.waiting > 0 or inst.incoming != NIL or inst.migration != NIL
    if inst.life == STATE_DRAINING and not busy:
        _forget(s, env, g, time_s)
        _live(env, inst, STATE_ABSENT, np.inf)
        _stop_billing(inst, time_s)


@kernel
def _forget(s: Any, env: Any, g: int, time_s: float) -> None:
    """All that the engine's memory, and the prefix index of it, hold is gone; it holds no request any more."""
    inst, engine, view = instance_at(s, g), engine_at(s, g), view_instance_at(s, g)
    for node in range(env.nodes):
        here = residency_at(s, inst.residency0 + node)
        here.next = 0
        here.previous = 0
        here.blocks = 0
        here.dead_blocks = 0
        here.pins = 0
        indexed_array(s, inst.residency0 + env.nodes)[inst.residency0 + node].present = 0
    for residue in range(engine.block_size):
        residue_at(s, inst.residues0 + residue).decodes = 0
    view.indexed_tokens = 0.0
    inst.index_head = NIL
    inst.index_tail = NIL
    inst.lru_head = NIL
    inst.lru_tail = NIL
    inst.lru_blocks = 0
    inst.free_blocks = engine.kv_blocks
    inst.reserved_blocks = 0
    inst.in_batch = 0
    inst.decodes = 0
    inst.decode_tokens = 0
    inst.first_finish_step = NEVER
    inst.prefilling = NIL
    inst.head = NIL
    inst.tail = NIL
    inst.waiting = 0
    inst.waiting_blocks = 0
    inst.incoming = NIL
    inst.preempted_waiting = 0
    inst.scheduled.free_blocks = engine.kv_blocks
    inst.scheduled.waiting_blocks = 0
    inst.scheduled.head_blocks = 0
    inst.scheduled.waiting = 0
    inst.scheduled.in_batch = 0
    inst.scheduled.preempted = 0
    inst.reported = inst.scheduled
    inst.uneven = 0
    inst.guest_tokens = 0
    inst.guest_attention = 0.0
    inst.changed = 1
    inst.doing = IDLE
    inst.steps = 0
    inst.planned = 0
    inst.decodes_in_leap = 0
    next_at(s, g).time_s = np.inf
    next_at(s, g).streamed_until_s = -1.0


@kernel
def send_back(s: Any, env: Any, index: int) -> None:
    """A request loses its instance and waits to be asked for again."""
    slot = slot_at(s, index)
    inst, view = instance_at(s, slot.instance), view_instance_at(s, slot.instance)
    streamed_tokens = 0 if slot.unstarted != 0 else slot.generated - slot.restart_tokens
    ledger.on_end(
        view,
        slot.prompt_tokens + slot.restart_tokens,
        slot.predicted_output_tokens,
        slot.indexed_match_tokens,
        streamed_tokens,
        slot.priority,
    )
    inst.streamed_tokens -= streamed_tokens
    if slot.unstarted != 0:
        leave_unstarted(s, inst, view, slot)
    ledger.stock_load(view)
    slot.instance = NIL
    slot.prefill_tokens = slot.prompt_tokens + slot.generated
    slot.restart_tokens = slot.generated
    slot.computed_tokens = 0
    slot.held_blocks = 0
    slot.node_blocks = 0
    slot.resident_blocks = 0
    slot.dead_blocks = 0
    slot.preempted_s = np.nan
    slot.sat_out = 0
    slot.stopped_s = np.nan
    slot.due_s = env.time_s
    slot.next = NIL
    if env.returned_head == NIL:
        env.returned_head = index
    else:
        slot_at(s, env.returned_tail).next = index
    env.returned_tail = index


@kernel
def fail_returned(s: Any, env: Any, g: int, time_s: float) -> None:
    """The requests that come back from the instance end without their answers."""
    while env.returned_head != NIL:
        index = env.returned_head
        env.returned_head = slot_at(s, index).next
        slot_at(s, index).instance = g
        fail_request(s, env, index, time_s)


@kernel
def _clear(s: Any, env: Any, g: int, time_s: float) -> None:
    """All requests of the instance go back to the dispatcher, and its migrations end."""
    inst, engine = instance_at(s, g), engine_at(s, g)
    interrupt(s, env, g, time_s)
    stopped = NIL
    source = inst.migration
    if source != NIL:
        migration = migration_at(s, source)
        other = source if source != g else migration.destination
        interrupt(s, env, other, time_s)
        handing_over = migration.phase == HANDING_OVER
        on_its_way = handing_over and env.protocol == PROTOCOL_VLLM
        if handing_over and (source == g) != on_its_way:
            stopped = migration.slot
        if source != g or not on_its_way:  # else it has left this instance, and arrives
            moves.abort(s, env, source, SOURCE_DIED if source == g else DESTINATION_DIED, time_s)
            leave_if_drained(s, env, other, time_s)
    for position in range(inst.in_batch):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step != NEVER:
            slot = slot_at(s, entry.slot)
            if slot.sat_out == 0:
                slot.joined_s = max(slot.joined_s, inst.last_decode_s)
            leave_decodes(s, inst, engine, slot)
        send_back(s, env, entry.slot)
    if stopped != NIL:
        send_back(s, env, stopped)
    index = inst.incoming
    while index != NIL:
        following = slot_at(s, index).next
        send_back(s, env, index)
        index = following
    index = inst.head
    while index != NIL:
        following = slot_at(s, index).next
        send_back(s, env, index)
        index = following
    _forget(s, env, g, time_s)


@kernel
def _fail(s: Any, env: Any, g: int, time_s: float) -> None:
    """The instance fails, unless there is none."""
    inst = instance_at(s, g)
    if inst.life != STATE_ABSENT and inst.life != STATE_FAILED:
        _clear(s, env, g, time_s)
        _stop_billing(inst, time_s)
        _live(env, inst, STATE_FAILED, time_s + env.repair_s)
        if env.restart == 0:
            fail_returned(s, env, g, time_s)


@kernel
def draw_failure(env: Any, inst: Any, g: int) -> None:
    """The time of the instance's next failure, whatever happens until then."""
    stream = _FAILURE_STREAM + (g - env.instance0) * 4_000_000_000 + inst.failures
    if env.mtbf_s == np.inf:
        inst.fail_s = np.inf
    else:
        inst.fail_s -= env.mtbf_s * np.log(1.0 - random_unit(env.seed, stream))
    inst.failures += 1


@kernel
def prepare(s: Any, e: int) -> None:
    """The first failures of a run that begins."""
    env = env_at(s, e)
    for g in range(env.instance0, env.instance0 + env.instances):
        draw_failure(env, instance_at(s, g), g)
    env.next_event_s = next_event_s(s, env)


@kernel
def next_event_s(s: Any, env: Any) -> float:
    """When the next copy, start-up, drain or repair ends, or an instance fails."""
    time_s = np.inf
    for g in range(env.instance0, env.instance0 + env.instances):
        inst = instance_at(s, g)
        time_s = min(time_s, min(inst.due_s, inst.fail_s))
        if inst.migration == g:
            time_s = min(time_s, migration_at(s, g).end_s)
    if env.next_failure < env.failures:
        time_s = min(time_s, failure_at(s, env.failure0 + env.next_failure).time_s)
    return time_s  # type: ignore[no-any-return]


@kernel
def handle_events(s: Any, e: int, time_s: float) -> None:
    """All that `next_event_s` means and is due now."""
    env = env_at(s, e)
    env.time_s = time_s
    first, last = env.instance0, env.instance0 + env.instances
    while env.next_failure < env.failures and failure_at(s, env.failure0 + env.next_failure).time_s <= time_s:
        _fail(s, env, first + failure_at(s, env.failure0 + env.next_failure).instance, time_s)
        env.next_failure += 1
    for g in range(first, last):
        inst = instance_at(s, g)
        if inst.fail_s <= time_s:
            draw_failure(env, inst, g)
            _fail(s, env, g, time_s)
    for g in range(first, last):
        inst = instance_at(s, g)
        if inst.due_s <= time_s and (inst.life == STATE_STARTING or inst.life == STATE_FAILED):
            if inst.life == STATE_FAILED:
                inst.billed_from_s = time_s
            _live(env, inst, STATE_READY, np.inf)
    for g in range(first, last):
        inst = instance_at(s, g)
        if inst.due_s <= time_s and inst.life == STATE_DRAINING:
            _clear(s, env, g, time_s)
            inst.due_s = np.inf
            leave_if_drained(s, env, g, time_s)
    for g in range(first, last):
        if instance_at(s, g).migration == g and migration_at(s, g).end_s <= time_s:
            destination = migration_at(s, g).destination
            moves.end_stage(s, env, g, time_s)
            leave_if_drained(s, env, g, time_s)
            leave_if_drained(s, env, destination, time_s)
    env.next_event_s = next_event_s(s, env)
