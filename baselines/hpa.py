"""Kubernetes' HorizontalPodAutoscaler over a metric of the fleet, beside any policy that dispatches.

The algorithm of the Kubernetes documentation (horizontal-pod-autoscale, "Algorithm details" and "Configurable scaling
behavior") with its defaults: every tick desired = ceil(instances x metric / target), unless the ratio is within the
tolerance; instances without a metric count as at the target when fewer are wanted, as idle when more are; the ratio so
found must not turn the direction. Of the last 300 s the highest recommendation holds before fewer instances are kept,
and within 15 s no more than 4 or as many again as there are are started.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import (
    KIND_DISPATCH,
    KIND_SCALE,
    NONE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_READY,
    STATE_STARTING,
    Decision,
    FleetView,
)

TOLERANCE = 0.1
SCALE_UP_PERIOD_S = 15.0
SCALE_UP_INSTANCES = 4
"""At least so many may be started in a period, ..."""
SCALE_UP_SHARE = 1.0
"""... or so many times those that there are."""
DEFAULT_STABILIZATION_S = 300.0
STABILIZATION_RANGE = Range(15.0, 600.0, log=True, kind=KIND_SCALE)


def desired_instances(current: int, metrics: NDArray[np.float64], missing: int, target: float) -> int:
    """How many instances a tick asks for, before windows and limits.

    Args:
        current: instances that serve or start.
        metrics: (n,) of those that have one.
        missing: that have none: they start, or were never polled.
        target: for the mean of the metric, > 0.
    """
    if not len(metrics):
        return current
    ratio = float(metrics.mean()) / target
    if not missing:
        return current if abs(ratio - 1.0) <= TOLERANCE else math.ceil(ratio * len(metrics))
    if abs(ratio - 1.0) <= TOLERANCE:
        return current
    assumed = 0.0 if ratio > 1.0 else target
    count = len(metrics) + missing
    cautious = (float(metrics.sum()) + missing * assumed) / count / target
    if abs(cautious - 1.0) <= TOLERANCE or (cautious > 1.0) != (ratio > 1.0):
        return current
    desired = math.ceil(cautious * count)
    return current if (desired > current) != (cautious > 1.0) else desired


class _Fleet:
    """What the autoscaler remembers of one fleet."""

    def __init__(self) -> None:
        self.recommended: deque[tuple[float, int]] = deque()  # (time in s, instances)
        self.started: deque[tuple[float, int]] = deque()  # (time in s, instances), of a scale-up period
        self.tick_s = -math.inf
        self.desired = 0

    def tick(self, now_s: float, current: int, wanted: int, stabilization_s: float) -> None:
        """Take a recommendation in and settle what is wanted now."""
        self.tick_s = now_s
        while self.recommended and self.recommended[0][0] <= now_s - stabilization_s:
            self.recommended.popleft()
        self.recommended.append((now_s, wanted))
        if wanted < current:
            wanted = min(current, max(count for _, count in self.recommended))
        while self.started and self.started[0][0] <= now_s - SCALE_UP_PERIOD_S:
            self.started.popleft()
        before = current - sum(count for _, count in self.started)
        most = before + max(SCALE_UP_INSTANCES, math.ceil(before * SCALE_UP_SHARE))
        self.desired = max(current, min(wanted, most)) if wanted > current else wanted
        if self.desired > current:
            self.started.append((now_s, self.desired - current))


class HorizontalPodAutoscaler(ABC):
    """A policy that scales by a metric and leaves the rest to another one.

    Args:
        name: of the policy.
        target: of the metric, > 0.
        stabilization_s: of scaling in.
        dispatch: answers all other decisions.
    """

    def __init__(self, name: str, target: float, stabilization_s: float, dispatch: CompiledPolicy):
        if not target > 0:
            raise ValueError(f"target = {target:g}: expected a number > 0")
        if stabilization_s < 0:
            raise ValueError(f"stabilization_s = {stabilization_s:g}: expected at least 0")
        self.name = name
        self.target = target
        self.stabilization_s = stabilization_s
        self.dispatch = dispatch
        self.kinds = tuple(sorted({*dispatch.kinds, KIND_SCALE}))
        self.reset(1, 0)

    def reset(self, batch: int, seed: int) -> None:
        """Forget everything."""
        self._fleets = [_Fleet() for _ in range(batch)]

    def decide(self, view: FleetView) -> Decision:
        """Choose for each row of the view."""
        scales = view.fleet["kind"] == KIND_SCALE
        choice = np.full(len(view), NONE, np.int64) if scales.all() else self.dispatch.decide(view).choice
        for row in np.flatnonzero(scales):
            choice[row] = self._scale(view.instances[row], float(view.fleet["time_s"][row]), int(row))
        for row in np.flatnonzero(view.fleet["kind"] == KIND_DISPATCH):
            self.dispatched(view, int(row), int(choice[row]))
        return Decision(choice)

    def dispatched(self, view: FleetView, row: int, slot: int) -> None:  # noqa: B027 - most metrics need none of it
        """A request was sent to an instance, or is held with `NONE`; for metrics made of what was."""

    @abstractmethod
    def wanted(self, instances: NDArray[np.void], now_s: float, row: int, current: int) -> int:
        """How many instances the metric asks for."""

    def _scale(self, instances: NDArray[np.void], now_s: float, row: int) -> int:
        fleet = self._fleets[row]
        current = int(np.isin(instances["state"], (STATE_READY, STATE_STARTING)).sum())
        if now_s != fleet.tick_s:
            fleet.tick(now_s, current, self.wanted(instances, now_s, row, current), self.stabilization_s)
        if fleet.desired > current:
            absent = _candidates(instances, STATE_ABSENT)
            return int([*absent, *_candidates(instances, STATE_DRAINING), NONE][0])
        if fleet.desired < current:
            return int([NONE, *_candidates(instances, STATE_READY)][-1])
        return NONE


class PodMetricAutoscaler(HorizontalPodAutoscaler):
    """One whose metric each instance has for itself, as of its last poll.

    Args:
        name: of the policy.
        field: of the view's instances.
        target: of the metric, > 0.
        stabilization_s: of scaling in.
        dispatch: answers all other decisions.
    """

    def __init__(self, name: str, field: str, target: float, stabilization_s: float, dispatch: CompiledPolicy):
        super().__init__(name, target, stabilization_s, dispatch)
        self.field = field

    def wanted(self, instances: NDArray[np.void], now_s: float, row: int, current: int) -> int:
        """By the mean of the instances that serve and were polled."""
        known = (instances["state"] == STATE_READY) & np.isfinite(instances["poll_age_s"])
        metrics = instances[self.field][known]
        return desired_instances(current, metrics, current - len(metrics), self.target)


def _candidates(instances: NDArray[np.void], state: int) -> NDArray[np.int64]:
    return np.flatnonzero((instances["candidate"] != 0) & (instances["state"] == state))
