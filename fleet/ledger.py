"""What a dispatcher knows of its own requests in flight, kept in the `INSTANCE_VIEW` record that policies read.

The same functions keep the simulator's ledger and the dispatcher's. `head_prompt_blocks` is set by the owner of the
record, who knows the order of the unstarted requests: the simulator's kernel, and `Ledger` for a dispatcher.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.view import INSTANCE_VIEW, STATE_READY


@inlined
def on_dispatch(
    instance: Any, prompt_tokens: float, predicted_output_tokens: float, matched_tokens: float, priority: float
) -> None:
    """A request was sent to the instance."""
    instance.dispatched += 1
    _take_in(instance, predicted_output_tokens, priority)
    instance.unstarted += 1
    instance.unstarted_prompt_tokens += prompt_tokens
    instance.unstarted_prompt_blocks += np.ceil(prompt_tokens / instance.block_size)
    instance.unstarted_uncached_tokens += prompt_tokens - matched_tokens


@inlined
def on_arrival(
    instance: Any, prompt_tokens: float, predicted_output_tokens: float, streamed_tokens: float, priority: float
) -> None:
    """A running request moved to the instance, `streamed_tokens` of its answer behind it."""
    _take_in(instance, predicted_output_tokens, priority)
    instance.started_prompt_tokens += prompt_tokens
    instance.streamed_tokens += streamed_tokens


@inlined
def _take_in(instance: Any, predicted_output_tokens: float, priority: float) -> None:
    instance.in_flight += 1
    instance.urgent += 1 if priority < 0 else 0
    instance.predicted_output_tokens += predicted_output_tokens


@inlined
def _forget_unstarted(instance: Any, prompt_tokens: float, matched_tokens: float) -> None:
    instance.unstarted -= 1
    instance.unstarted_prompt_tokens -= prompt_tokens
    instance.unstarted_prompt_blocks -= np.ceil(prompt_tokens / instance.block_size)
    instance.unstarted_uncached_tokens -= prompt_tokens - matched_tokens


@inlined
def on_first_token(instance: Any, prompt_tokens: float, matched_tokens: float) -> None:
    """The request's first token came. `streamed_tokens` is counted apart, by `on_tokens`."""
    _forget_unstarted(instance, prompt_tokens, matched_tokens)
    instance.started_prompt_tokens += prompt_tokens


@inlined
def on_tokens(instance: Any, tokens: float) -> None:
    """Tokens were streamed back."""
    instance.streamed_tokens += tokens


@inlined
def on_end(
    instance: Any,
    prompt_tokens: float,
    predicted_output_tokens: float,
    matched_tokens: float,
    streamed_tokens: float,
    priority: float,
) -> None:
    """The request finished, failed, moved or was cancelled after `streamed_tokens` (0: it never started)."""
    if streamed_tokens == 0:
        _forget_unstarted(instance, prompt_tokens, matched_tokens)
    else:
        instance.started_prompt_tokens -= prompt_tokens
    instance.streamed_tokens -= streamed_tokens
    instance.predicted_output_tokens -= predicted_output_tokens
    instance.urgent -= 1 if priority < 0 else 0
    instance.in_flight -= 1


@inlined
def stock_load(instance: Any) -> None:
    """Fill the five load fields from what stock vLLM and the ledger tell."""
    instance.free_blocks = instance.kv_capacity_blocks * (1.0 - instance.kv_usage)
    instance.queued_demand_blocks = instance.unstarted_prompt_blocks
    instance.head_demand_blocks = instance.head_prompt_blocks
    instance.queued = instance.unstarted
    instance.batched = instance.in_flight - instance.unstarted
    instance.preempted = 0.0


@kernel
def add_up(instances: Any, fleet: Any, ledgers: Any, head_s: Any, row: int) -> None:
    """What several ledgers of the same instances say together.

    Args:
        instances: (N,) records that are filled.
        fleet: (M,) records of the same instances, M >= N: all that no ledger says.
        ledgers: (rows, M) records, of which the ledger's fields and ``migrating`` are added up.
        head_s: (rows, M) see `Ledger`.
        row: in `ledgers`, whose instances are given the ``block_size`` of `fleet` to count in.
    """
    for slot in range(len(instances)):
        instances[slot] = fleet[slot]
        ledgers[row, slot].block_size = fleet[slot].block_size
        _add_up_instance(instances[slot], ledgers, head_s, slot)


@kernel
def see_engines(instances: Any, polled_s: Any, blocked_until_s: Any, now_s: float) -> int:
    """Mark as candidates the instances that are ready and not blocked, and set the age of polls.

    Args:
        instances: (N,) records.
        polled_s: (M,) when the last poll was sent, M >= N.
        blocked_until_s: (M,) no request is sent there before.
        now_s: by the same clock.

    Returns:
        How many candidates there are.
    """
    candidates = 0
    for slot in range(len(instances)):
        ready = instances[slot].state == STATE_READY and blocked_until_s[slot] <= now_s
        instances[slot].candidate = 1 if ready else 0
        instances[slot].poll_age_s = now_s - polled_s[slot]
        candidates += instances[slot].candidate
    return candidates


@kernel
def _add_up_instance(instance: Any, ledgers: Any, head_s: Any, slot: int) -> None:
    instance.migrating = 0
    instance.dispatched = instance.in_flight = instance.urgent = instance.unstarted = 0.0
    instance.unstarted_prompt_tokens = instance.unstarted_prompt_blocks = instance.unstarted_uncached_tokens = 0.0
    instance.started_prompt_tokens = instance.streamed_tokens = instance.predicted_output_tokens = 0.0
    instance.head_prompt_blocks = 0.0
    oldest_s = np.inf
    for row in range(len(ledgers)):
        told = ledgers[row, slot]
        instance.migrating |= told.migrating
        instance.dispatched += told.dispatched
        instance.in_flight += told.in_flight
        instance.urgent += told.urgent
        instance.unstarted += told.unstarted
        instance.unstarted_prompt_tokens += told.unstarted_prompt_tokens
        instance.unstarted_prompt_blocks += told.unstarted_prompt_blocks
        instance.unstarted_uncached_tokens += told.unstarted_uncached_tokens
        instance.started_prompt_tokens += told.started_prompt_tokens
        instance.streamed_tokens += told.streamed_tokens
        instance.predicted_output_tokens += told.predicted_output_tokens
        if head_s[row, slot] < oldest_s:
            oldest_s = head_s[row, slot]
            instance.head_prompt_blocks = told.head_prompt_blocks
    stock_load(instance)


# What `Ledger` calls, one kernel per event. Numba takes 5 us to recognise a record, and 1 us for an array and an index.


@kernel
def _dispatched(
    instances: Any,
    slot: int,
    prompt_tokens: float,
    predicted_output_tokens: float,
    matched_tokens: float,
    priority: float,
    head_blocks: float,
) -> None:
    on_dispatch(instances[slot], prompt_tokens, predicted_output_tokens, matched_tokens, priority)
    _set_head(instances[slot], head_blocks)


@kernel
def _started(
    instances: Any, slot: int, prompt_tokens: float, matched_tokens: float, tokens: float, head_blocks: float
) -> None:
    on_first_token(instances[slot], prompt_tokens, matched_tokens)
    on_tokens(instances[slot], tokens)
    _set_head(instances[slot], head_blocks)


@kernel
def _streamed(instances: Any, slot: int, tokens: float) -> None:
    on_tokens(instances[slot], tokens)


@kernel
def _ended(
    instances: Any,
    slot: int,
    prompt_tokens: float,
    predicted_output_tokens: float,
    matched_tokens: float,
    streamed_tokens: float,
    priority: float,
    head_blocks: float,
) -> None:
    on_end(instances[slot], prompt_tokens, predicted_output_tokens, matched_tokens, streamed_tokens, priority)
    _set_head(instances[slot], head_blocks)


@inlined
def _set_head(instance: Any, head_blocks: float) -> None:
    instance.head_prompt_blocks = head_blocks
    stock_load(instance)


_NO_HEAD = 0.0, math.inf


@dataclass
class _InFlight:
    """What must be taken out of the records again when the request ends."""

    slot: int
    prompt_tokens: int
    predicted_output_tokens: float
    matched_tokens: int
    priority: float
    streamed_tokens: int = 0


class Ledger:
    """A dispatcher's requests in flight, accounted for in the instance records of its view.

    Args:
        instances: (N,) records of `INSTANCE_VIEW`, one row of a view, written in place: the ledger fields and the load
            fields that follow from them. An instance's `block_size` must be set before its first request and stay.
        head_s: (N,) written in place as well: when each instance's oldest unstarted request was dispatched; inf where
            there is none. None for who does not need it.
    """

    def __init__(self, instances: NDArray[np.void], head_s: NDArray[np.float64] | None = None):
        self._instances = instances
        self._head_s = np.full(len(instances), np.inf) if head_s is None else head_s
        self._in_flight: dict[str, _InFlight] = {}
        # Per instance: its unstarted requests, with their prompts' blocks and when they were dispatched, oldest first.
        self._unstarted: defaultdict[int, dict[str, tuple[float, float]]] = defaultdict(dict)

    @staticmethod
    def warm_up() -> None:
        """Compile what a ledger runs now, not at the first request: it takes a second, and files."""
        record = np.zeros(1, INSTANCE_VIEW)
        record["block_size"] = 16
        ledger = Ledger(record)
        ledger.dispatch("", 0, 1, 1.0, 0)
        ledger.tokens("", 1)
        ledger.tokens("", 1)
        ledger.end("")

    def dispatch(
        self,
        request_id: str,
        slot: int,
        prompt_tokens: int,
        predicted_output_tokens: float,
        matched_tokens: int,
        priority: float = 0.0,
        now_s: float = 0.0,
    ) -> None:
        """A request was sent to the instance in this slot.

        Args:
            request_id: not in flight already.
            slot: index of the instance.
            prompt_tokens: exact length of the prompt, at least 1.
            predicted_output_tokens: predicted length of the answer.
            matched_tokens: tokens of the prompt that the prefix index held for the instance.
            priority: lower is earlier.
            now_s: by a clock of the caller's, for `head_s`.

        Raises:
            ValueError: an argument is out of its range; nothing is accounted for.
        """
        if request_id in self._in_flight:
            raise ValueError(f"request {request_id!r} is in flight already; expected a new request_id")
        if not 0 <= slot < len(self._instances):
            raise ValueError(f"slot of request {request_id!r} is {slot}; expected 0 to {len(self._instances) - 1}")
        if prompt_tokens < 1:
            raise ValueError(f"prompt_tokens of request {request_id!r} is {prompt_tokens}; expected at least 1")
        if not 0 <= matched_tokens <= prompt_tokens:
            raise ValueError(
                f"matched_tokens of request {request_id!r} is {matched_tokens}; expected 0 to {prompt_tokens}"
            )
        if not (math.isfinite(predicted_output_tokens) and predicted_output_tokens >= 0):
            raise ValueError(
                f"predicted_output_tokens of request {request_id!r} is {predicted_output_tokens}; "
                "expected a finite number >= 0"
            )
        block_size = self._instances["block_size"][slot]
        if not block_size > 0:
            raise ValueError(f"block_size of instance {slot} is {block_size}; expected it set before a dispatch")
        self._in_flight[request_id] = _InFlight(slot, prompt_tokens, predicted_output_tokens, matched_tokens, priority)
        self._unstarted[slot][request_id] = math.ceil(prompt_tokens / block_size), now_s
        _dispatched(
            self._instances,
            slot,
            float(prompt_tokens),
            float(predicted_output_tokens),
            float(matched_tokens),
            float(priority),
            self._head_blocks(slot),
        )

    def tokens(self, request_id: str, tokens: int) -> None:
        """The instance streamed this many further tokens of the request, at least 1.

        Raises:
            ValueError: fewer than 1, or the request is not in flight.
        """
        request = self._request(request_id)
        if tokens < 1:
            raise ValueError(f"tokens of request {request_id!r} is {tokens}; expected at least 1")
        if request.streamed_tokens == 0:
            del self._unstarted[request.slot][request_id]
            _started(
                self._instances,
                request.slot,
                float(request.prompt_tokens),
                float(request.matched_tokens),
                float(tokens),
                self._head_blocks(request.slot),
            )
        else:
            _streamed(self._instances, request.slot, float(tokens))
        request.streamed_tokens += tokens

    def end(self, request_id: str) -> None:
        """The request finished, failed or was cancelled: release what it was accounted for, once.

        Raises:
            ValueError: the request is not in flight (never dispatched, or ended before).
        """
        request = self._request(request_id)
        del self._in_flight[request_id]
        self._unstarted[request.slot].pop(request_id, None)
        _ended(
            self._instances,
            request.slot,
            float(request.prompt_tokens),
            float(request.predicted_output_tokens),
            float(request.matched_tokens),
            float(request.streamed_tokens),
            float(request.priority),
            self._head_blocks(request.slot),
        )

    def _request(self, request_id: str) -> _InFlight:
        if request_id not in self._in_flight:
            raise ValueError(
                f"request {request_id!r} is not in flight; expected one that was dispatched and has not ended"
            )
        return self._in_flight[request_id]

    def _head_blocks(self, slot: int) -> float:
        """Of the prompt of the instance's oldest unstarted request."""
        blocks, self._head_s[slot] = next(iter(self._unstarted[slot].values()), _NO_HEAD)
        return float(blocks)
