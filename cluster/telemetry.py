"""What the dispatcher can see of an instance.

Progress by now, polls as old as they are, the ledger, the view of a decision.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster.kv_cache import available_blocks, blocks_for, decode_demand
from fleetpilot.cluster.memory import (
    counts_at,
    engine_at,
    env_at,
    indexed_array,
    instance_at,
    itl_at,
    next_at,
    node_array,
    poll_at,
    sample_at,
    slot_at,
    view_fleet_at,
    view_instance_at,
    view_request_at,
)
from fleetpilot.cluster.state import DECODE, ITL_BINS, ITL_BINS_PER_OCTAVE, ITL_LOWEST_EXPONENT, NIL
from fleetpilot.fleet import prefix_index
from fleetpilot.fleet.cost_model import leap_end_s
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.ledger import stock_load
from fleetpilot.fleet.policy import random_unit
from fleetpilot.fleet.view import KIND_DECODE, KIND_DISPATCH, KIND_PREFILL, KIND_SOURCE

_BITS_BELOW_BIN = 52 - (ITL_BINS_PER_OCTAVE - 1).bit_length()
_BITS_OF_BIN_0 = (1022 + ITL_LOWEST_EXPONENT) * ITL_BINS_PER_OCTAVE  # 1022 is the exponent field of 0.5


@inlined
def step_end_s(inst: Any, engine: Any, steps: int) -> float:
    """End of the `steps`-th iteration since the anchor."""
    if inst.jitter != 1.0:
        one = leap_end_s(0.0, inst.base_s, engine.cost.e_s, inst.kv_tokens, inst.decodes_in_leap, steps)
        return inst.anchor_s + one * inst.jitter
    return leap_end_s(inst.anchor_s, inst.base_s, engine.cost.e_s, inst.kv_tokens, inst.decodes_in_leap, steps)


@inlined
def steps_before(inst: Any, engine: Any, time_s: float) -> int:
    """Iterations since the anchor, of those planned, that end strictly before `time_s`."""
    if inst.planned - inst.steps <= 1:
        if inst.planned > inst.steps and step_end_s(inst, engine, inst.planned) < time_s:
            return inst.planned
        return inst.steps
    elapsed = (time_s - inst.anchor_s) / inst.jitter
    slope = 0.5 * engine.cost.e_s * inst.decodes_in_leap
    linear = inst.base_s + engine.cost.e_s * inst.kv_tokens - slope
    root = np.sqrt(max(0.0, linear * linear + 4.0 * slope * elapsed))
    guess = np.int64(2.0 * elapsed / (linear + root)) if linear + root > 0.0 else inst.planned
    steps = min(max(guess, inst.steps), inst.planned)
    while steps > inst.steps and step_end_s(inst, engine, steps) >= time_s:
        steps -= 1
    while steps < inst.planned and step_end_s(inst, engine, steps + 1) < time_s:
        steps += 1
    return steps


@inlined
def clock_s(env: Any, g: int) -> float:
    """The time of the decision, or just after it for an instance whose boundary at that time has been.

    It has where a completion of that time brought the decision forward: boundaries of equal times go by instance.
    """
    if env.time_s == env.completion_s and g <= env.completion_instance:
        return np.nextafter(env.time_s, np.inf)  # type: ignore[no-any-return]
    return env.time_s  # type: ignore[no-any-return]


@kernel
def used_blocks(s: Any, inst: Any, engine: Any, time_s: float) -> int:
    """Blocks in use at a time between the last boundary and the next, those of the iteration in progress included."""
    used = engine.kv_blocks - available_blocks(inst)
    if inst.doing == DECODE and inst.planned - inst.steps > 1:
        begun = min(steps_before(inst, engine, time_s) + 1, inst.planned)
        used += decode_demand(s, inst, engine, inst.steps_done + 1, begun - inst.steps - 1)
    return used


@inlined
def _polls_until(env: Any, time_s: float) -> int:
    """How many polls there are until `time_s`, that time included."""
    polls = int(np.floor(time_s / env.poll_interval_s)) + 1
    while polls > 0 and (polls - 1) * env.poll_interval_s > time_s:
        polls -= 1
    while polls * env.poll_interval_s <= time_s:
        polls += 1
    return polls


@inlined
def record_polls(s: Any, inst: Any, engine: Any, env: Any, time_s: float) -> None:
    """Keep what the polls until `time_s` saw, before the instance changes."""
    if inst.next_poll * env.poll_interval_s <= time_s:
        _record_polls(s, inst, engine, env, _polls_until(env, time_s))


@kernel
def _record_polls(s: Any, inst: Any, engine: Any, env: Any, due: int) -> None:
    """Keep what the first `due` polls saw, the last ones that fit the ring."""
    for k in range(max(inst.next_poll, due - inst.polls), due):
        poll = poll_at(s, inst.poll0 + k % inst.polls)
        poll.running = inst.in_batch
        poll.waiting = inst.waiting + inst.pulls
        poll.used_blocks = used_blocks(s, inst, engine, k * env.poll_interval_s)
        poll.preemptions = inst.preemptions
        poll.prefix_queries_tokens = inst.prefix_queries_tokens
        poll.prefix_hits_tokens = inst.prefix_hits_tokens
    inst.next_poll = due


@inlined
def _see_poll(s: Any, inst: Any, engine: Any, view: Any, visible: int) -> None:
    """The last one of the first `visible` polls."""
    poll = poll_at(s, inst.poll0 + (visible - 1) % inst.polls)
    view.running = poll.running
    view.waiting = poll.waiting
    view.kv_usage = poll.used_blocks / engine.kv_blocks
    view.preemptions = poll.preemptions
    view.prefix_queries_tokens = poll.prefix_queries_tokens
    view.prefix_hits_tokens = poll.prefix_hits_tokens
    stock_load(view)


@inlined
def _see_tokens(s: Any, g: int, inst: Any, engine: Any, view: Any, now_s: float) -> None:
    """Tokens streamed by now, and until when no more will have been."""
    view.streamed_tokens = inst.streamed_tokens
    until_s = np.inf
    if inst.doing == DECODE:
        steps = steps_before(inst, engine, now_s)
        view.streamed_tokens += (steps - inst.steps) * inst.decodes
        until_s = step_end_s(inst, engine, steps + 1)
    next_at(s, g).streamed_until_s = until_s


@inlined
def _reported_load(s: Any, inst: Any, engine: Any, view: Any, now_s: float) -> None:
    """The load fields as the engine reported them at the end of its last iteration (papers' experiments only).

    The report is of the moment at which that iteration had been scheduled, as a llumlet's of Llumnix's artifact.
    """
    load = inst.reported
    steps = steps_before(inst, engine, now_s) - inst.steps if inst.doing == DECODE else 0
    if steps > 0:
        load = inst.scheduled
    view.free_blocks = load.free_blocks
    if steps > 1:
        view.free_blocks = available_blocks(inst) - decode_demand(s, inst, engine, inst.steps_done + 1, steps - 1)
    view.queued_demand_blocks = load.waiting_blocks
    view.head_demand_blocks = load.head_blocks
    view.queued = load.waiting
    view.batched = load.in_batch
    view.preempted = load.preempted


@inlined
def head_demand_blocks(s: Any, inst: Any, engine: Any) -> int:
    """KV blocks that the head of the waiting queue needs, 0 for none."""
    return 0 if inst.head == NIL else blocks_for(slot_at(s, inst.head).prefill_tokens, engine.block_size)


@kernel
def fill_view(s: Any, e: int) -> None:
    """Bring the view of environment `e` up to date for the decision about its `decision_slot`; NIL: no request.

    Which instances are candidates is up to the caller.
    """
    env = env_at(s, e)
    now_s = env.time_s
    prefix_node = slot_at(s, env.decision_slot).prefix_node if env.decision_slot != NIL else NIL
    shared = prefix_node >= 0
    # Most of what a decision shows, the one before has shown: what has not changed is not touched again.
    taken = _polls_until(env, now_s)
    visible = max(_polls_until(env, now_s - env.poll_delay_s), 0)
    age_s = now_s - (visible - 1) * env.poll_interval_s if visible > 0 else np.inf
    for i in range(env.instances):
        g = env.instance0 + i
        inst, engine, view = instance_at(s, g), engine_at(s, g), view_instance_at(s, g)
        if taken != env.polls_taken:
            record_polls(s, inst, engine, env, now_s)
        if visible != env.polls_visible:
            _see_poll(s, inst, engine, view, visible)
        view.poll_age_s = age_s
        seen_s = clock_s(env, g)
        if seen_s > next_at(s, g).streamed_until_s:
            _see_tokens(s, g, inst, engine, view, seen_s)
        if env.engine_reported != 0:
            _reported_load(s, inst, engine, view, seen_s)
        if shared:
            view.matched_tokens = prefix_index.match(
                indexed_array(s, inst.residency0 + env.nodes),
                inst.residency0,
                node_array(s, inst.node0 + env.nodes),
                inst.node0,
                prefix_node,
            )
        elif env.matched_dirty != 0:
            view.matched_tokens = 0.0
    env.polls_taken = taken
    env.polls_visible = visible
    env.matched_dirty = 1 if shared else 0
    fleet = view_fleet_at(s, e)
    if env.decision_slot == NIL:
        _see_no_request(view_request_at(s, e))
        fleet.may_hold = 1
    else:
        slot = slot_at(s, env.decision_slot)
        _see_request(s, env, view_request_at(s, e), slot, now_s)
        may_hold = now_s < slot.due_s + env.max_hold_s
        if env.decision_kind == KIND_DECODE and env.prefill_choice == NIL:
            may_hold = False  # its prefill is done
        fleet.may_hold = 1 if may_hold or env.decision_kind >= KIND_SOURCE else 0
    fleet.time_s = now_s
    fleet.kind = env.decision_kind
    fleet.held = env.held
    fleet.decisions = env.decisions
    if env.pools != 0:
        _see_pools(env, fleet)
    fleet.random_key = np.uint64(random_unit(env.seed, env.asked) * 9007199254740992.0)
    fleet.engine_reported = env.engine_reported


@inlined
def _see_pools(env: Any, fleet: Any) -> None:
    """The turn of a DECODE is its own; who does not know pools is asked to dispatch twice."""
    if env.decision_kind == KIND_DECODE:
        fleet.decisions = env.decode_decisions
        fleet.kind = KIND_DECODE if env.knows_decode != 0 else KIND_DISPATCH
    elif env.decision_kind == KIND_PREFILL and env.knows_prefill == 0:
        fleet.kind = KIND_DISPATCH


@inlined
def remember_prefix(s: Any, env: Any, slot: Any, g: int) -> None:
    """The request goes to the instance: its sequence enters the dispatcher's prefix index of it."""
    sequence = slot.own_node if slot.own_node >= 0 else slot.prefix_node
    if sequence >= 0:
        inst = instance_at(s, g)
        prefix_index.insert(
            inst,
            view_instance_at(s, g),
            indexed_array(s, inst.residency0 + env.nodes),
            inst.residency0,
            node_array(s, inst.node0 + env.nodes),
            inst.node0,
            sequence,
            engine_at(s, g).index_tokens,
        )


@inlined
def _see_no_request(request: Any) -> None:
    """The decision is about the fleet."""
    request.prompt_tokens = 0.0
    request.streamed_tokens = 0.0
    request.predicted_output_tokens = 0.0
    request.priority = 0.0
    request.slo_class = 0
    request.ttft_target_s = np.inf
    request.tpot_target_s = np.inf
    request.waited_s = 0.0
    request.session = NIL
    request.turn = 0.0


@inlined
def _see_request(s: Any, env: Any, request: Any, slot: Any, now_s: float) -> None:
    """The request that the decision is about; one that decodes has streamed what its instance has generated by now."""
    request.prompt_tokens = slot.prompt_tokens
    request.streamed_tokens = slot.generated
    if env.decision_kind >= KIND_SOURCE and slot.unstarted == 0 and slot.preempted_s != slot.preempted_s:
        inst = instance_at(s, slot.instance)
        steps = steps_before(inst, engine_at(s, slot.instance), clock_s(env, slot.instance)) - inst.steps
        request.streamed_tokens += inst.steps_done + (steps if inst.decodes_in_leap > 0 else 0)
    request.predicted_output_tokens = slot.predicted_output_tokens
    request.priority = slot.priority
    request.slo_class = slot.slo_class
    request.ttft_target_s = slot.ttft_target_s
    request.tpot_target_s = slot.tpot_target_s
    request.waited_s = now_s - slot.arrival_s
    request.session = slot.session
    request.turn = slot.turn


@kernel
def sample(s: Any, e: int, time_s: float) -> None:
    """Append one row per instance to the samples."""
    env = env_at(s, e)
    for i in range(env.instances):
        inst = instance_at(s, env.instance0 + i)
        engine = engine_at(s, env.instance0 + i)
        row = sample_at(s, counts_at(s, 0).samples)
        row.time_s = time_s
        row.instance = i
        row.running = inst.in_batch
        row.waiting = inst.waiting + inst.pulls
        row.used_blocks = used_blocks(s, inst, engine, time_s)
        row.free_blocks = engine.kv_blocks - row.used_blocks
        row.head_demand_blocks = head_demand_blocks(s, inst, engine)
        counts_at(s, 0).samples += 1


@inlined
def itl_bin(gap_s: float) -> int:
    """Bin of a gap between tokens: `ITL_BINS_PER_OCTAVE` equal parts of each power of two.

    They are the exponent and the first bits of the mantissa, side by side in a float.
    """
    bits: Any = np.float64(gap_s).view(np.int64)
    return min(max((bits >> _BITS_BELOW_BIN) - _BITS_OF_BIN_0, 0), ITL_BINS - 1)  # type: ignore[no-any-return]


@inlined
def count_gaps(s: Any, inst: Any, engine: Any, first: int, last: int, decodes: int) -> None:
    """Count the gaps of iterations `first` to `last` since the anchor, one for each decode."""
    linear = inst.base_s + engine.cost.e_s * inst.kv_tokens
    slope = engine.cost.e_s * inst.decodes_in_leap
    j = first
    while j <= last:
        here = itl_bin((linear + slope * (j - 1)) * inst.jitter)
        end = last
        while end > j and itl_bin((linear + slope * (end - 1)) * inst.jitter) != here:
            end = j + (end - j) // 2
        itl_at(s, here).count += (end - j + 1) * decodes
        j = end + 1
