"""Instances are scaled by Kubernetes' HPA on the P99 of the time to the first token; dispatch is another policy's.

Source: Kubernetes HorizontalPodAutoscaler, as `hpa-queue`, on a metric of the fleet as a whole (type Object): desired =
    ceil(ready instances x P99 / target). The target is ours.
Reads: fleet.kind, fleet.time_s, instance.state, instance.unstarted, instance.in_flight, request.waited_s
Notes: As `hpa-queue`, and without a first token in the window nothing changes. A view has no latencies: they are
    told from the dispatches and from how many requests of an instance have no first token, oldest first. A first token
    counts as having come right after the last decision at which there was none.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from fleetpilot.baselines import join_shortest_queue
from fleetpilot.baselines.hpa import DEFAULT_STABILIZATION_S, STABILIZATION_RANGE, TOLERANCE, HorizontalPodAutoscaler
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import KIND_SCALE, NONE, STATE_READY, FleetView

RANGES = {
    "target": Range(0.2, 20.0, log=True, kind=KIND_SCALE),
    "stabilization_s": STABILIZATION_RANGE,
}
PERCENTILE = 99.0


class LatencyAutoscaler(HorizontalPodAutoscaler):
    """One whose metric is the P99 of first tokens.

    Args:
        target: of the P99 in s.
        window_s: of the first tokens that count.
        stabilization_s: of scaling in.
        dispatch: answers all other decisions.
    """

    def __init__(self, target: float, window_s: float, stabilization_s: float, dispatch: CompiledPolicy):
        self.window_s = window_s
        super().__init__("hpa-latency", target, stabilization_s, dispatch)

    def reset(self, batch: int, seed: int) -> None:
        """Forget everything."""
        super().reset(batch, seed)
        self._arrivals_s: list[dict[int, deque[float]]] = [{} for _ in range(batch)]  # of the unstarted, by slot
        self._first_tokens: list[deque[tuple[float, float]]] = [deque() for _ in range(batch)]  # (time, TTFT) in s
        self._looked_s = np.zeros(batch)

    def dispatched(self, view: FleetView, row: int, slot: int) -> None:
        """Remember when the request arrived."""
        now_s = float(view.fleet["time_s"][row])
        self._look_for_first_tokens(view.instances[row], now_s, row)
        if slot != NONE:
            arrivals_s = self._arrivals_s[row].setdefault(slot, deque())
            arrivals_s.append(now_s - float(view.request["waited_s"][row]))

    def _look_for_first_tokens(self, instances: NDArray[np.void], now_s: float, row: int) -> None:
        unstarted = instances["unstarted"]
        for slot, arrivals_s in self._arrivals_s[row].items():
            while len(arrivals_s) > unstarted[slot]:
                self._first_tokens[row].append((now_s, self._looked_s[row] - arrivals_s.popleft()))
        self._looked_s[row] = now_s

    def wanted(self, instances: NDArray[np.void], now_s: float, row: int, current: int) -> int:
        """By the P99 of the window."""
        self._look_for_first_tokens(instances, now_s, row)
        first_tokens = self._first_tokens[row]
        while first_tokens and first_tokens[0][0] <= now_s - self.window_s:
            first_tokens.popleft()
        if not first_tokens:
            return current
        ratio = float(np.percentile([ttft_s for _, ttft_s in first_tokens], PERCENTILE)) / self.target
        ready = int((instances["state"] == STATE_READY).sum())
        return current if abs(ratio - 1.0) <= TOLERANCE else math.ceil(ratio * ready)


def make(
    target: float = 2.0,
    window_s: float = 60.0,
    stabilization_s: float = DEFAULT_STABILIZATION_S,
    dispatch: CompiledPolicy = join_shortest_queue.POLICY,
) -> LatencyAutoscaler:
    """The policy with other parameters, those of `LatencyAutoscaler`."""
    return LatencyAutoscaler(target, window_s, stabilization_s, dispatch)


POLICY = make()
