"""More cached than not: the least loaded holder of the longest prefix; else min(load + eviction + missed prefill).

Source: Preble, ICLR 2025, E2 (WukLab/preble, `global_scheduler_with_time.py`): load is the work sent in the last 3
    minutes, eviction what must be computed again for the room that the prompt takes, all in seconds. A holder loaded
    1.5 times as much as the least loaded gives the request to that one, at most every 10 s.
Reads: instance.kv_capacity_blocks, instance.block_size, instance.prefill_s_per_token, instance.decode_step_s,
    instance.decode_s_per_seq, instance.matched_tokens, instance.indexed_tokens,
    instance.prefix_hits_tokens, instance.prefix_queries_tokens, request.prompt_tokens,
    request.predicted_output_tokens, fleet.time_s
Notes: It remembers what it sent where. A request's work is its missed prefill and its predicted tokens, each at a
    step's share of a batch of 16; the source takes the mean output of earlier requests. A stock engine reports no
    evictions: what is evicted is how far the prefix index and the prompt exceed the memory, and it is worth its prefill
    times the engine's hit ratio.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import TYPICAL_BATCH, decode_s_per_token, prefill_s, uncached_tokens
from fleetpilot.fleet.policy import Range
from fleetpilot.fleet.view import NONE, Decision, FleetView

RANGES = {"window_s": Range(10.0, 600.0, log=True), "imbalance": Range(1.1, 4.0)}


@kernel
def eviction_s(instance: Any, request: Any) -> float:
    """To compute again what has to go for the prompt."""
    capacity_tokens = instance.kv_capacity_blocks * instance.block_size
    evicted = max(0.0, instance.indexed_tokens + uncached_tokens(instance, request) - capacity_tokens)
    if instance.prefix_queries_tokens <= 0.0:
        return 0.0
    hits = min(1.0, instance.prefix_hits_tokens / instance.prefix_queries_tokens)
    return float(evicted * hits * instance.prefill_s_per_token)


@kernel
def work_s(instance: Any, request: Any) -> float:
    """What the request adds to the instance's load."""
    decode_s = float(request.predicted_output_tokens) * decode_s_per_token(instance, TYPICAL_BATCH)
    return prefill_s(instance, request) + decode_s


@kernel
def e2(instances: Any, requests: Any, loads_s: Any, imbalance: float, may_rebalance: bool) -> tuple[int, float, bool]:
    """The instance, what the request adds to its load, and whether it was to rebalance."""
    request = requests[0]
    longest, lightest = -1.0, NONE
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            longest = max(longest, instances[slot].matched_tokens)
            if lightest == NONE or loads_s[slot] < loads_s[lightest]:
                lightest = slot
    if lightest == NONE:
        return NONE, 0.0, False
    exploit = longest > request.prompt_tokens - longest
    best, least = NONE, np.inf
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.candidate != 0 and (not exploit or instance.matched_tokens == longest):
            cost = loads_s[slot]
            if not exploit:
                cost += eviction_s(instance, request) + prefill_s(instance, request)
            if best == NONE or cost < least:
                best, least = slot, cost
    rebalances = exploit and may_rebalance and loads_s[best] > imbalance * loads_s[lightest]
    if rebalances:
        best = lightest
    return best, work_s(instances[best], request), rebalances


class Preble:
    """The policy, which remembers what it sent.

    Args:
        window_s: for so long a request counts as load.
        imbalance: load of a holder over the least load from which the request goes to the least loaded.
        interval_s: at most so often.
    """

    def __init__(self, window_s: float, imbalance: float, interval_s: float):
        self.name = "preble"
        self.window_s = window_s
        self.imbalance = imbalance
        self.interval_s = interval_s
        self.reset(1, 0)

    def reset(self, batch: int, seed: int) -> None:
        """Forget everything."""
        self._sent: list[deque[tuple[float, int, float]]] = [deque() for _ in range(batch)]
        self._loads_s = np.zeros((batch, 0))
        self._rebalanced_s = np.full(batch, -np.inf)

    def decide(self, view: FleetView) -> Decision:
        """Choose for each row of the view."""
        more = view.instances.shape[1] - self._loads_s.shape[1]
        if more > 0:
            self._loads_s = np.pad(self._loads_s, ((0, 0), (0, more)))
        return Decision(np.array([self._choose(view, row) for row in range(len(view))], np.int64))

    def _choose(self, view: FleetView, row: int) -> int:
        now_s = float(view.fleet["time_s"][row])
        loads_s: NDArray[np.float64] = self._loads_s[row]
        sent = self._sent[row]
        while sent and sent[0][0] <= now_s - self.window_s:
            _, slot, added_s = sent.popleft()
            loads_s[slot] = max(0.0, loads_s[slot] - added_s)
        may_rebalance = now_s - self._rebalanced_s[row] >= self.interval_s
        choice, added_s, rebalances = e2(
            view.instances[row], view.request[row : row + 1], loads_s, self.imbalance, may_rebalance
        )
        if choice != NONE:
            sent.append((now_s, choice, added_s))
            loads_s[choice] += added_s
        if rebalances:
            self._rebalanced_s[row] = now_s
        return int(choice)


def make(window_s: float = 180.0, imbalance: float = 1.5, interval_s: float = 10.0) -> Preble:
    """The policy with other parameters, those of `Preble`."""
    return Preble(window_s, imbalance, interval_s)


POLICY = make()
