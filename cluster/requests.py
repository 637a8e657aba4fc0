"""What befalls requests: their ends, above all, where they are logged and their slots are free again."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster.memory import counts_at, instance_at, log_at, slot_at, transfer_at, view_instance_at
from fleetpilot.cluster.state import NIL
from fleetpilot.cluster.unstarted import leave_unstarted
from fleetpilot.fleet import ledger
from fleetpilot.fleet.jit import inlined, kernel


@inlined
def count_unstarted(env: Any, change: int, time_s: float) -> None:
    """Requests without a first token become more or fewer: add up what they have waited.

    Instances run one after the other, so time may go back; the sum, linear in it, is right all the same.
    """
    env.unstarted_area_s += env.unstarted * (time_s - env.unstarted_since_s)
    env.unstarted_since_s = time_s
    env.unstarted += change


@kernel
def leave_ledger(s: Any, index: int, predicted_output_tokens: float) -> None:
    """The dispatcher's account of the request's instance, which counts so many tokens to come, forgets the request."""
    slot = slot_at(s, index)
    inst, view = instance_at(s, slot.instance), view_instance_at(s, slot.instance)
    streamed_tokens = 0 if slot.unstarted != 0 else slot.generated - slot.restart_tokens
    ledger.on_end(
        view,
        slot.prompt_tokens + slot.restart_tokens,
        predicted_output_tokens,
        slot.indexed_match_tokens,
        streamed_tokens,
        slot.priority,
    )
    inst.streamed_tokens -= streamed_tokens
    if slot.unstarted != 0:
        leave_unstarted(s, inst, view, slot)
    ledger.stock_load(view)


@kernel
def log_request(s: Any, env: Any, index: int, status: int, end_s: float) -> None:
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
    entry.migrations = slot.migrations
    entry.restarts = slot.restarts
    entry.downtime_s = slot.downtime_s
    entry.prefill_instance = NIL
    entry.handover_s = 0.0
    entry.loaded_tokens = 0
    if env.transfers != 0:
        transfer = transfer_at(s, index)
        entry.loaded_tokens = transfer.loaded_tokens
        entry.handover_s = transfer.handover_s
        if transfer.prefill_instance != NIL:
            entry.prefill_instance = transfer.prefill_instance - env.instance0
    counts_at(s, 0).log += 1


@inlined
def take_slot(s: Any, env: Any) -> int:
    """A free slot; the caller made sure that there is one."""
    index = env.free_slot
    if index == NIL:
        index = env.slot0 + env.used_slots
        env.used_slots += 1
        slot_at(s, index).next = NIL
    env.free_slot = slot_at(s, index).next
    return index  # type: ignore[no-any-return]


@inlined
def free_slot(s: Any, env: Any, index: int) -> None:
    """The request has left the system."""
    slot = slot_at(s, index)
    slot.row = NIL
    slot.next = env.free_slot
    env.free_slot = index
    env.active -= 1


@kernel
def end_unanswered(s: Any, env: Any, index: int, status: int, time_s: float) -> None:
    """A request that no instance has ends without its answer: it failed, or was rejected."""
    slot = slot_at(s, index)
    if slot.started == 0:
        count_unstarted(env, -1, time_s)
    if slot.missed == 0:
        env.misses += 1
    env.failed += 1
    if env.track_log != 0:
        log_request(s, env, index, status, np.nan)
    free_slot(s, env, index)
