"""From the prefill instance to the decode instance: requests in fleets with pools (docs/model.md).

A request's own instance (`slot.instance`) is that of the prefill until this is done, then that of the decode. Its KV
stays where it was computed until the decode instance, at whose queue it waits, has taken blocks and pulled it.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.cluster import links, prefix_cache
from fleetpilot.cluster.iterations import interrupt
from fleetpilot.cluster.kv_cache import release
from fleetpilot.cluster.memory import engine_at, instance_at, next_at, slot_at, transfer_at, view_instance_at
from fleetpilot.cluster.requests import leave_ledger
from fleetpilot.cluster.scheduler import enqueue
from fleetpilot.cluster.state import IDLE, NIL, SHARED_CACHE, UNDECIDED
from fleetpilot.cluster.telemetry import clock_s, remember_prefix
from fleetpilot.cluster.unstarted import enter_unstarted
from fleetpilot.fleet import ledger
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.view import STATE_READY


@kernel
def commit(s: Any, env: Any, index: int, g: int) -> None:
    """The request will be decoded by the instance: from now on its ledger counts it, with nothing to prefill."""
    slot, inst, view = slot_at(s, index), instance_at(s, g), view_instance_at(s, g)
    prompt_tokens = slot.prompt_tokens + slot.restart_tokens
    ledger.on_dispatch(view, prompt_tokens, slot.predicted_output_tokens, prompt_tokens, slot.priority)
    ledger.stock_load(view)
    inst.dispatched += 1
    remember_prefix(s, env, slot, g)
    transfer_at(s, index).decode_instance = g


@kernel
def withdraw(s: Any, index: int) -> None:
    """The request will not be decoded by the instance that it was to be: its ledger forgets it."""
    slot, transfer = slot_at(s, index), transfer_at(s, index)
    if transfer.decode_instance >= 0:
        view = view_instance_at(s, transfer.decode_instance)
        prompt_tokens = slot.prompt_tokens + slot.restart_tokens
        ledger.on_end(view, prompt_tokens, slot.predicted_output_tokens, prompt_tokens, 0, slot.priority)
        ledger.stock_load(view)


@kernel
def stay(s: Any, index: int) -> None:
    """The request is all its instance's, which has it for the prefill."""
    slot, transfer = slot_at(s, index), transfer_at(s, index)
    if transfer.decode_instance != NIL:
        withdraw(s, index)
        view_instance_at(s, slot.instance).predicted_output_tokens += slot.predicted_output_tokens
        transfer.decode_instance = NIL


@kernel
def end_prefill(s: Any, env: Any, g: int, index: int, time_s: float) -> None:
    """The request, out of the batch, has its prefill done; the instance keeps its KV until it is pulled."""
    slot, transfer = slot_at(s, index), transfer_at(s, index)
    leave_ledger(s, index, 0.0)
    transfer.source = g
    transfer.prefill_instance = g
    transfer.held_blocks = slot.held_blocks
    transfer.node_blocks = slot.node_blocks
    transfer.computed_tokens = slot.computed_tokens
    transfer.prefilled_s = time_s
    instance_at(s, g).exports += 1
    slot.held_blocks = 0
    slot.node_blocks = 0
    slot.computed_tokens = 0
    slot.prefill_tokens = slot.prompt_tokens + slot.generated
    slot.next = NIL
    if env.prefilled_head == NIL:
        env.prefilled_head = index
    else:
        slot_at(s, env.prefilled_tail).next = index
    env.prefilled_tail = index


@kernel
def deliver(s: Any, env: Any, index: int, g: int) -> None:
    """The request whose prefill is done joins the waiting queue of the instance that decodes it."""
    slot, transfer = slot_at(s, index), transfer_at(s, index)
    inst, engine, view = instance_at(s, g), engine_at(s, g), view_instance_at(s, g)
    if transfer.decode_instance != g:
        commit(s, env, index, g)
    transfer.decode_instance = NIL
    interrupt(s, env, g, clock_s(env, g))
    slot.instance = g
    prompt_tokens = slot.prompt_tokens + slot.restart_tokens
    slot.indexed_match_tokens = prompt_tokens
    streamed_tokens = slot.generated - slot.restart_tokens
    if streamed_tokens > 0:
        ledger.on_first_token(view, prompt_tokens, prompt_tokens)
        ledger.on_tokens(view, streamed_tokens)
        ledger.stock_load(view)
        inst.streamed_tokens += streamed_tokens
    else:
        enter_unstarted(s, inst, view, index)
    inst.remote += 1
    enqueue(s, inst, engine, index, False)
    if inst.doing == IDLE:
        next_at(s, g).time_s = env.time_s


@kernel
def let_go(s: Any, env: Any, index: int, time_s: float) -> int:
    """The KV of the request is needed no more where it was computed; returns the instance."""
    slot, transfer = slot_at(s, index), transfer_at(s, index)
    source = transfer.source
    inst, engine = instance_at(s, source), engine_at(s, source)
    interrupt(s, env, source, time_s)
    here = slot.node_blocks  # of the decode instance
    slot.node_blocks = transfer.node_blocks
    release(s, inst, engine, index, transfer.computed_tokens, transfer.held_blocks, False)
    slot.node_blocks = here
    inst.exports -= 1
    transfer.source = NIL
    return source  # type: ignore[no-any-return]


@kernel
def end_pull(s: Any, env: Any, g: int, index: int, time_s: float) -> int:
    """The KV is there: the request joins the batch at the next boundary.

    Returns the instance that held it, or SHARED_CACHE.
    """
    transfer = transfer_at(s, index)
    slot, inst, engine = slot_at(s, index), instance_at(s, g), engine_at(s, g)
    interrupt(s, env, g, time_s)
    links.end(s, env, index, time_s)
    source = transfer.source
    if source == SHARED_CACHE:
        transfer.source = NIL
        slot.computed_tokens += transfer.loaded_blocks * engine.block_size
    else:
        let_go(s, env, index, time_s)
        slot.computed_tokens = slot.prefill_tokens - 1
    if engine.prefix_cache != 0:
        prefix_cache.fill(s, inst, slot, slot.computed_tokens, engine.block_size)
    slot.next = NIL
    if inst.pulled == NIL:
        inst.pulled = index
    else:
        last = inst.pulled
        while slot_at(s, last).next != NIL:
            last = slot_at(s, last).next
        slot_at(s, last).next = index
    if inst.doing == IDLE:
        next_at(s, g).time_s = min(next_at(s, g).time_s, time_s)
    return source  # type: ignore[no-any-return]


@kernel
def stop_pull(s: Any, env: Any, g: int, index: int, time_s: float) -> None:
    """The KV will not come: what was taken for it is free, and holds nothing."""
    slot, inst, engine = slot_at(s, index), instance_at(s, g), engine_at(s, g)
    interrupt(s, env, g, time_s)
    links.end(s, env, index, time_s)
    inst.pulls -= 1
    inst.free_blocks += slot.held_blocks - slot.node_blocks
    if engine.prefix_cache != 0:
        prefix_cache.unpin(s, inst, slot)
    slot.node_blocks = 0


@kernel
def undecided(s: Any, env: Any, index: int) -> bool:
    """Whether it is to be asked who decodes the request whose prefill is done, or again."""
    transfer = transfer_at(s, index)
    if transfer.decode_instance >= 0 and instance_at(s, transfer.decode_instance).life == STATE_READY:
        return False
    withdraw(s, index)
    transfer.decode_instance = UNDECIDED
    return True


@kernel
def first_pull(s: Any, env: Any, g: int) -> int:
    """The first request whose KV the instance pulls or loads, or NIL."""
    index = instance_at(s, g).transfers
    while index != NIL and index < env.slot0:
        index = transfer_at(s, index).next
    return index  # type: ignore[no-any-return]
