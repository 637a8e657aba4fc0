"""The end of a request: it is logged and its slot is free again."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster.memory import counts_at, log_at, slot_at
from fleetpilot.cluster.state import FAILED, NIL
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
def fail_request(s: Any, env: Any, index: int, time_s: float) -> None:
    """A request that no instance has ends without its answer."""
    slot = slot_at(s, index)
    if slot.started == 0:
        count_unstarted(env, -1, time_s)
    if slot.missed == 0:
        env.misses += 1
    env.failed += 1
    if env.track_log != 0:
        log_request(s, env, index, FAILED, np.nan)
    free_slot(s, env, index)
