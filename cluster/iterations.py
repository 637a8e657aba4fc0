"""Iterations that have ended: what they generated, the blocks they took, the gaps between tokens."""

from __future__ import annotations

from typing import Any

from fleetpilot.cluster.kv_cache import available_blocks, blocks_for, decode_demand, take
from fleetpilot.cluster.memory import batch_at, counts_at, engine_at, instance_at, itl_at, next_at, slot_at
from fleetpilot.cluster.scheduler import advance_decode, first_finish, sit_out
from fleetpilot.cluster.state import DECODE, IDLE, NEVER, NIL
from fleetpilot.cluster.telemetry import count_gaps, head_demand_blocks, itl_bin, record_polls, step_end_s, steps_before
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.policy import random_unit

_DRAFT_STREAM = 7_000_000_033
"""Keys of the draws of speculative decoding, apart from all others."""

_MOST_TOKENS = 2**31
"""More than an answer has."""


@inlined
def account(s: Any, env: Any, inst: Any, engine: Any, steps: int, time_s: float) -> None:
    """`steps` iterations have ended, the last one at this time."""
    inst.busy_s += time_s - step_end_s(inst, engine, inst.steps)
    inst.iterations += steps
    if inst.decodes_in_leap > 0:
        _account_decodes(s, env, inst, engine, steps, time_s)
    inst.steps += steps
    if env.engine_reported != 0:
        if steps > 1:
            inst.scheduled.free_blocks = available_blocks(inst)
        inst.reported = inst.scheduled


@inlined
def _account_decodes(s: Any, env: Any, inst: Any, engine: Any, steps: int, time_s: float) -> None:
    """Tokens, blocks, gaps. The blocks of the first step were taken when it began."""
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
    if engine.cost.draft_tokens > 0:
        _accept_drafts(s, env, inst, engine)


@kernel
def _accept_drafts(s: Any, env: Any, inst: Any, engine: Any) -> None:
    """Speculative decoding: tokens that the step which was just counted generated besides, as far as there are blocks.

    The draws are keyed by (seed, request, tokens so far).
    """
    for position in range(inst.sitting_out):
        entry = batch_at(s, inst.batch0 + position)
        if entry.finish_step == NEVER:
            continue
        slot = slot_at(s, entry.slot)
        generated = slot.generated + inst.steps_done
        draw = random_unit(env.seed, _DRAFT_STREAM + slot.row * _MOST_TOKENS + generated)
        right, probability = 0, engine.cost.acceptance
        while right < engine.cost.draft_tokens and draw < probability:
            right += 1
            probability *= engine.cost.acceptance
        computed = slot.prompt_tokens + generated - 1
        room = blocks_for(computed, engine.block_size) + available_blocks(inst)
        more = min(right, min(slot.output_tokens - generated, room * engine.block_size - computed))
        if more > 0:
            take(s, inst, blocks_for(computed + more, engine.block_size) - blocks_for(computed, engine.block_size))
            advance_decode(s, inst, engine, entry, more)
            inst.streamed_tokens += more
            env.generated_tokens += more
            if counts_at(s, 0).itl_bins > 0:
                itl_at(s, itl_bin(0.0)).count += more
    inst.first_finish_step = first_finish(s, inst)
    inst.changed = 1


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
def record_load(s: Any, inst: Any, engine: Any) -> None:
    """An iteration begins: what the engine will report when it ends."""
    load = inst.scheduled
    load.free_blocks = available_blocks(inst)
    load.waiting_blocks = inst.waiting_blocks
    load.head_blocks = head_demand_blocks(s, inst, engine)
    load.waiting = inst.waiting
    load.in_batch = inst.in_batch
    load.preempted = inst.preempted_waiting


@kernel
def interrupt(s: Any, env: Any, g: int, time_s: float) -> None:
    """Something happens to instance `g` between two boundaries: bring it up to date, its next boundary is the next.

    Iterations that ended before `time_s` are accounted for, and the one in progress has its blocks.
    """
    inst, engine = instance_at(s, g), engine_at(s, g)
    record_polls(s, inst, engine, env, time_s)
    next_at(s, g).streamed_until_s = -1.0
    if inst.doing == IDLE:
        if inst.waiting > 0 or inst.incoming != NIL or inst.pulled != NIL:
            next_at(s, g).time_s = min(next_at(s, g).time_s, time_s)
    elif inst.doing == DECODE and inst.planned - inst.steps > 1:
        steps = steps_before(inst, engine, time_s) - inst.steps
        if steps > 0:
            account(s, env, inst, engine, steps, step_end_s(inst, engine, inst.steps + steps))
            if inst.steps < inst.planned:
                take(s, inst, decode_demand(s, inst, engine, inst.steps_done, 1))
                inst.scheduled.free_blocks = available_blocks(inst)
        if inst.steps < inst.planned:
            inst.planned = inst.steps + 1
            next_at(s, g).time_s = step_end_s(inst, engine, inst.planned)
