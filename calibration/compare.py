"""Replays on engines against simulated runs: distributions, and whether the same policy wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.state import FINISHED
from fleetpilot.evaluation.metrics import met_slo, request_metrics
from fleetpilot.evaluation.statistics import Interval, paired_bootstrap
from fleetpilot.fleet.slo import SLOClass

METRICS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
STATISTICS = ("mean", "p50", "p95")
MEAN_TARGET = 0.15
"""The simulator's means are to be within this, or twice the spread of repeats where that is larger."""
P95_TARGET = 0.25
_BLOCK_REQUESTS = 10
"""Requests in a row whose differences are averaged: neighbours share their queue and are no independent draws."""

Logs = Mapping[str, Sequence[NDArray[np.void]]]
"""Policy -> one `REQUEST_LOG` array per repeat."""


@dataclass(frozen=True)
class Compared:
    """One statistic of one metric under one policy, on the engines and in the simulator.

    Attributes:
        spread: standard deviation of the repeats on the engines, relative to their mean; None for one repeat.
    """

    policy: str
    metric: str
    statistic: str
    engines: float
    simulator: float
    spread: float | None

    @property
    def ratio(self) -> float:
        """The simulator's over the engines'."""
        return self.simulator / self.engines

    @property
    def allowed(self) -> float | None:
        """How far off it may be; None for what has no target."""
        if self.statistic == "mean":
            return max(MEAN_TARGET, 2 * (self.spread or 0.0))
        return P95_TARGET if self.statistic == "p95" else None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.allowed is None else abs(self.ratio - 1) <= self.allowed


@dataclass(frozen=True)
class Pair:
    """Two policies by a metric's mean: the second's less the first's.

    Attributes:
        engines: the difference on the engines, relative to the first's mean, with its interval.
        simulator: the same in the simulator.
    """

    first: str
    second: str
    metric: str
    engines: Interval
    simulator: float

    @property
    def separates(self) -> bool:
        """Whether the engines really tell the two apart."""
        return self.engines.excludes_zero

    @property
    def agrees(self) -> bool:
        """Whether the simulator orders them as the engines do."""
        return bool(np.sign(self.engines.estimate) == np.sign(self.simulator))


def compared(engines: Logs, simulated: Logs) -> list[Compared]:
    """Every statistic of every metric, policy by policy, over the pooled requests of all repeats."""
    rows = []
    for policy in engines:
        for metric in METRICS:
            real = [_values(log, metric) for log in engines[policy]]
            ours = np.concatenate([_values(log, metric) for log in simulated[policy]])
            for statistic in STATISTICS:
                repeats = [_statistic(values, statistic) for values in real]
                mean = float(np.mean(repeats))
                spread = float(np.std(repeats, ddof=1) / mean) if len(repeats) > 1 else None
                pooled = _statistic(np.concatenate(real), statistic)
                rows.append(Compared(policy, metric, statistic, pooled, _statistic(ours, statistic), spread))
    return rows


def pairs(engines: Logs, simulated: Logs, seed: int = 0) -> list[Pair]:
    """Every pair of policies by the means of TTFT, TPOT and E2E.

    The interval is a paired bootstrap over blocks of consecutive requests, of all repeats.
    """
    rows = []
    for metric in METRICS:
        real = {policy: _blocks(logs, metric) for policy, logs in engines.items()}
        ours = {
            policy: float(np.nanmean([_values(log, metric).mean() for log in logs]))
            for policy, logs in simulated.items()
        }
        for first, second in combinations(engines, 2):
            base = float(np.nanmean(real[first]))
            differences = (real[second] - real[first]) / base
            interval = paired_bootstrap(differences[np.isfinite(differences)], seed=seed)
            if interval is not None:
                rows.append(Pair(first, second, metric, interval, (ours[second] - ours[first]) / ours[first]))
    return rows


def goodput_share(logs: Sequence[NDArray[np.void]], slo: SLOClass) -> float:
    """Requests that met both targets, of all."""
    return float(np.mean(np.concatenate([met_slo(log, (slo,)) for log in logs])))


def _values(log: NDArray[np.void], metric: str) -> NDArray[np.float64]:
    values = request_metrics(log[log["status"] == FINISHED])[metric]
    return values[~np.isnan(values)]


def _statistic(values: NDArray[np.float64], statistic: str) -> float:
    if not len(values):
        return float("nan")
    return float(values.mean() if statistic == "mean" else np.percentile(values, float(statistic[1:])))


def _blocks(logs: Sequence[NDArray[np.void]], metric: str) -> NDArray[np.float64]:
    """Means over blocks of consecutive requests, of every repeat; NaN for a block of which none finished."""
    means = []
    for log in logs:
        values = np.where(log["status"] == FINISHED, request_metrics(log)[metric], np.nan)
        for start in range(0, len(values), _BLOCK_REQUESTS):
            block = values[start : start + _BLOCK_REQUESTS]
            means.append(np.nanmean(block) if not np.all(np.isnan(block)) else np.nan)
    return np.array(means)
