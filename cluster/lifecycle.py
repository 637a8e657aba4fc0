"""Instances that start, drain, fail and are repaired, and what becomes of their requests (docs/model.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster import handover, links
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
    transfer_at,
    view_instance_at,
)
from fleetpilot.cluster.requests import end_unanswered, leave_ledger
from fleetpilot.cluster.scheduler import leave_decodes
from fleetpilot.cluster.state import (
    DESTINATION_DIED,
    FAILED,
    HANDING_OVER,
    IDLE,
    NEVER,
    NIL,
    PROTOCOL_VLLM,
    SHARED_CACHE,
    SOURCE_DIED,
)
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.policy import random_unit
from fleetpilot.fleet.view import (
    ROLE_DECODE,
    ROLE_PREFILL,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_FAILED,
    STATE_READY,
    STATE_STARTING,
)

_FAILURE_STREAM = 3_000_000_019
"""Keys of the draws of failures, apart from all others."""


@inlined
def _live(env: Any, inst: Any, life: int, due_s: float) -> None:
    """From now on."""
    change = (1 if life == STATE_READY else 0) - (1 if inst.life == STATE_READY else 0)
    env.ready_to_prefill += change if inst.role != ROLE_DECODE else 0
    env.ready_to_decode += change if inst.role != ROLE_PREFILL else 0
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


@inlined
def _may_change(env: Any, inst: Any) -> bool:
    """Neither chosen in this SCALE tick nor about to fail."""
    return inst.scale_tick != env.scale_tick and inst.notices == 0  # type: ignore[no-any-return]


@kernel
def may_scale(s: Any, env: Any, g: int, ready: int, present: int) -> bool:
    """Whether a SCALE decision may choose the instance, with so many of `count_serving`."""
    inst = instance_at(s, g)
    if not _may_change(env, inst):
        return False
    if inst.life == STATE_DRAINING:
        return True
    if inst.life == STATE_READY:
        last = inst.role != ROLE_DECODE and env.ready_to_prefill == 1
        last = last or (inst.role != ROLE_PREFILL and env.ready_to_decode == 1)
        return ready > env.min_instances and not last  # type: ignore[no-any-return]
    if inst.life != STATE_ABSENT or present >= env.max_instances:
        return False
    for other in range(env.instance0, g):  # one for each profile and role
        same = engine_at(s, other).profile == engine_at(s, g).profile
        if same and instance_at(s, other).life == STATE_ABSENT and _may_change(env, instance_at(s, other)):
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
    """A draining instance that has nothing more to do is absent, but for one that waits for its failure."""
    inst = instance_at(s, g)
    busy = inst.in_batch > 0 or inst.waiting > 0 or inst.incoming != NIL or inst.migration != NIL
    busy = busy or inst.exports > 0 or inst.pulls > 0
    if inst.life == STATE_DRAINING and inst.notices == 0 and not busy:
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
    inst.exports = 0
    inst.remote = 0
    inst.pulls = 0
    inst.pulled = NIL
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
    if env.pools != 0:
        handover.stay(s, index)
    leave_ledger(s, index, slot_at(s, index).predicted_output_tokens)
    come_back(s, env, index)


@kernel
def come_back(s: Any, env: Any, index: int) -> None:
    """A request that no instance has any more waits to be asked for again."""
    slot = slot_at(s, index)
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
        end_unanswered(s, env, index, FAILED, time_s)


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
    if env.transfers != 0:
        _clear_pulls(s, env, g, time_s)
    index = inst.head
    while index != NIL:
        following = slot_at(s, index).next
        send_back(s, env, index)
        index = following
    if env.pools != 0:
        _lose_exports(s, env, g, time_s)
    _forget(s, env, g, time_s)


@kernel
def _clear_pulls(s: Any, env: Any, g: int, time_s: float) -> None:
    """Requests whose KV the instance has pulled, or pulls, go back; those that wait for that hold nothing elsewhere."""
    inst = instance_at(s, g)
    index = inst.pulled
    while index != NIL:
        following = slot_at(s, index).next
        send_back(s, env, index)
        index = following
    index = handover.first_pull(s, env, g)
    while index != NIL:
        links.end(s, env, index, time_s)
        if transfer_at(s, index).source == SHARED_CACHE:
            transfer_at(s, index).source = NIL
        else:
            leave_if_drained(s, env, handover.let_go(s, env, index, time_s), time_s)
        send_back(s, env, index)
        index = handover.first_pull(s, env, g)
    index = inst.head
    while index != NIL:
        if transfer_at(s, index).source != NIL:
            leave_if_drained(s, env, handover.let_go(s, env, index, time_s), time_s)
        index = slot_at(s, index).next


@kernel
def _lose_exports(s: Any, env: Any, g: int, time_s: float) -> None:
    """Requests whose KV was on the instance alone go back from where they wait for it."""
    for other in range(env.instance0, env.instance0 + env.instances):
        if other == g:
            continue
        inst = instance_at(s, other)
        index = handover.first_pull(s, env, other)
        while index != NIL:
            following = transfer_at(s, index).next
            if index >= env.slot0 and transfer_at(s, index).source == g:
                handover.stop_pull(s, env, other, index, time_s)
                _lose_export(s, env, index)
            index = following
        index = inst.head
        while index != NIL:
            following = slot_at(s, index).next
            if transfer_at(s, index).source == g:
                interrupt(s, env, other, time_s)
                moves.leave_queue(s, other, index)
                inst.remote -= 1
                _lose_export(s, env, index)
            index = following
        leave_if_drained(s, env, other, time_s)


@kernel
def _lose_export(s: Any, env: Any, index: int) -> None:
    transfer_at(s, index).source = NIL
    send_back(s, env, index)


@kernel
def _announce(env: Any, inst: Any) -> None:
    """A failure to come is known from now on."""
    inst.notices += 1
    if inst.life == STATE_READY:
        _live(env, inst, STATE_DRAINING, np.inf)


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
    """When the next copy, start-up, drain or repair ends, or a failure is announced or happens."""
    time_s = np.inf
    for g in range(env.instance0, env.instance0 + env.instances):
        inst = instance_at(s, g)
        time_s = min(time_s, min(inst.due_s, inst.fail_s))
        if inst.migration == g:
            time_s = min(time_s, migration_at(s, g).end_s)
        if inst.transfers != NIL:
            time_s = min(time_s, links.next_end_s(s, env, g))
    if env.next_announcement < env.failures:
        time_s = min(time_s, failure_at(s, env.failure0 + env.next_announcement).announced_s)
    if env.next_failure < env.failures:
        time_s = min(time_s, failure_at(s, env.failure0 + env.next_failure).time_s)
    return time_s  # type: ignore[no-any-return]


@kernel
def _end_pulls(s: Any, env: Any, time_s: float) -> None:
    """Requests whose KV has come by now, by instance: each of them may bring the end of another forward."""
    g = env.instance0
    while g < env.instance0 + env.instances:
        index = instance_at(s, g).transfers
        while index != NIL and (index < env.slot0 or transfer_at(s, index).end_s > time_s):
            index = transfer_at(s, index).next
        if index == NIL:
            g += 1
        else:
            source = handover.end_pull(s, env, g, index, time_s)
            if source != SHARED_CACHE:
                leave_if_drained(s, env, source, time_s)
            g = env.instance0


@kernel
def handle_events(s: Any, e: int, time_s: float) -> None:
    """All that `next_event_s` means and is due now."""
    env = env_at(s, e)
    env.time_s = time_s
    first, last = env.instance0, env.instance0 + env.instances
    given = env.failure0
    while env.next_announcement < env.failures and failure_at(s, given + env.next_announcement).announced_s <= time_s:
        _announce(env, instance_at(s, first + failure_at(s, given + env.next_announcement).instance))
        env.next_announcement += 1
    while env.next_failure < env.failures and failure_at(s, given + env.next_failure).time_s <= time_s:
        g = first + failure_at(s, given + env.next_failure).instance
        instance_at(s, g).notices -= 1
        _fail(s, env, g, time_s)
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
            _live(env, inst, STATE_READY if inst.notices == 0 else STATE_DRAINING, np.inf)
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
    if env.transfers != 0:
        _end_pulls(s, env, time_s)
    env.next_event_s = next_event_s(s, env)
