"""Another policy on a recorded log: where it would have chosen the same, and what its choices are worth.

The worth is that of single choices: one request is placed by the other policy, all others as they were recorded. It is
estimated by self-normalised inverse propensity (Swaminathan and Joachims, "The Self-Normalized Estimator for
Counterfactual Learning", NeurIPS 2015), which needs a log that was recorded with exploration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.dispatcher.decision_log import DECISION, OUTCOME
from fleetpilot.dispatcher.decisions import choice_of, is_legal, view_of
from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.policy import Policy, kinds_of, refuse_oracle
from fleetpilot.fleet.view import KIND_DISPATCH, FleetView

LEAST_EFFECTIVE = 30.0
"""Effective sample size below which nothing is estimated."""
_STRETCHES = 50
"""A log is cut into so many for the bootstrap: requests near in time share their fate, so they are drawn together."""
_CONFIDENCE = 0.95
_RESAMPLES = 10_000
METRICS = ("finished", "ttft_s", "tpot_s", "duration_s")
"""Means that are estimated: the share of requests that finished, and times over the requests that have one."""


@dataclass
class Agreement:
    """Choices of one kind.

    Attributes:
        decisions: in the log.
        agreed: the policy chose what the recorded one preferred.
        none: it chose no instance: to hold, or to reject.
        failed: it raised an error, or chose what it may not; its fallback would decide.
    """

    decisions: int = 0
    agreed: int = 0
    none: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Estimate:
    """A mean with the log's own policy and with the other; intervals of 95 %."""

    metric: str
    requests: int
    recorded: float
    estimate: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float


@dataclass
class Replay:
    """What a replay found.

    Attributes:
        policy: that was asked.
        recorded: policy of the log -> its decisions.
        agreement: by kind.
        not_asked: kind -> decisions of kinds that the policy does not answer.
        requests: with a decision and an outcome, on which estimates stand.
        effective: effective sample size of these.
        estimates: none where there is a refusal.
        refusal: why nothing is estimated; empty if something is.
    """

    policy: str
    recorded: dict[str, int] = field(default_factory=dict)
    agreement: dict[str, Agreement] = field(default_factory=dict)
    not_asked: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    effective: float = 0.0
    estimates: list[Estimate] = field(default_factory=list)
    refusal: str = ""

    def text(self) -> str:
        """For a terminal."""
        recorded = ", ".join(f"{count:,} decisions of {name}" for name, count in self.recorded.items())
        lines = [
            f"{recorded}; asked: {self.policy}",
            "",
            f"{'kind':<12} {'decisions':>10} {'agree':>7} {'none':>8} {'failed':>8}",
        ]
        for kind, of in self.agreement.items():
            share = f"{100 * of.agreed / of.decisions:.1f}%"
            lines.append(f"{kind:<12} {of.decisions:>10,} {share:>7} {of.none:>8,} {of.failed:>8,}")
        lines += [f"{kind:<12} {count:>10,} not asked: it is not for such" for kind, count in self.not_asked.items()]
        return "\n".join([*lines, "", *([f"no estimate: {self.refusal}"] if self.refusal else self._worth())])

    def _worth(self) -> list[str]:
        return [
            f"one request placed by {self.policy}, all others as they were; means and 95 % intervals, from choices "
            f"that weigh as much as {self.effective:,.0f} of {self.requests:,} requests",
            f"{'':<12} {'recorded':>9} {'estimate':>9} {'':>18} {'difference':>11}",
            *(
                f"{e.metric:<12} {e.recorded:>9.4g} {e.estimate:>9.4g} {_interval(e.low, e.high):>18} "
                f"{e.difference:>+11.3g} {_interval(e.difference_low, e.difference_high)}"
                for e in self.estimates
            ),
        ]


def _interval(low: float, high: float) -> str:
    return f"[{low:.3g}, {high:.3g}]"


class _Placed(NamedTuple):
    """The decision that sent a request to its first engine."""

    propensity: float
    candidates: int
    chosen: int | None  # by the other policy
    weight: float  # how much more often it makes the choice that was made

    @property
    def explored(self) -> bool:
        """Whether every candidate could be chosen."""
        return self.propensity < 1 or self.candidates == 1


def replay(records: Iterable[Mapping[str, Any]], policy: Policy) -> Replay:
    """Ask a policy what it would have chosen.

    Args:
        records: of a decision log (`fleetpilot.dispatcher.decision_log.read_log`), in order.
        policy: asked for every decision of its kinds.

    Raises:
        ValueError: there is no decision, or one is of another version or damaged; the policy is an oracle bound.
    """
    refuse_oracle("policy", policy)
    found = Replay(policy.name)
    policy.reset(1, 0)
    kinds = kinds_of(policy)
    placed: dict[tuple[str, str], _Placed] = {}
    ended: list[tuple[_Placed, Mapping[str, Any]]] = []
    for record in records:
        try:
            if record["record"] == DECISION:
                _count(found.recorded, record["policy"])
                _decide(found, record, policy, kinds, placed)
            elif record["record"] == OUTCOME and (request := _request(record)) in placed:
                ended.append((placed.pop(request), record))
        except (KeyError, TypeError) as error:
            raise ValueError(f"log: {type(error).__name__}: {error}; expected records of a decision log") from None
    if not found.recorded:
        raise ValueError("log: no decision in it, expected at least one")
    found.refusal = _estimate(found, ended)
    return found


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _request(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["run"], record["request"]


def _decide(
    found: Replay,
    record: Mapping[str, Any],
    policy: Policy,
    kinds: tuple[int, ...],
    placed: dict[tuple[str, str], _Placed],
) -> None:
    if record["kind"] not in KINDS:
        raise ValueError(f"log: kind = {record['kind']!r}; expected one of {', '.join(KINDS)}")
    kind = KINDS.index(record["kind"])
    if kind not in kinds:
        _count(found.not_asked, record["kind"])
        return
    view = view_of(record["view"])
    agreement = found.agreement.setdefault(record["kind"], Agreement())
    agreement.decisions += 1
    choice = _asked(policy, view)
    if choice is None:
        agreement.failed += 1
    else:
        agreement.none += choice < 0
        agreement.agreed += choice == choice_of(record["preferred"])
    made = choice_of(record["choice"])
    if not is_legal(made, view):
        raise ValueError(f"log: choice = {record['choice']!r}: expected one that its view allows")
    if kind == KIND_DISPATCH and made >= 0 and _request(record) not in placed:
        propensity = float(record["propensity"])
        if not 0 < propensity <= 1:
            raise ValueError(f"log: propensity = {propensity:g}; expected a number in (0, 1]")
        weight = float(choice == made) / propensity
        placed[_request(record)] = _Placed(propensity, int(view.candidates.sum()), choice, weight)


def _asked(policy: Policy, view: FleetView) -> int | None:
    """The choice, or None where it is none that could be carried out."""
    try:
        choice = int(policy.decide(view).choice[0])
    except Exception:  # a policy is a plug-in
        return None
    return choice if is_legal(choice, view) else None


# --- what choices are worth ------------------------------------------------------------------------------------------


def _estimate(found: Replay, ended: list[tuple[_Placed, Mapping[str, Any]]]) -> str:
    """Fill in the estimates, or say why there are none."""
    if KINDS[KIND_DISPATCH] not in found.agreement:
        return "the log has no decision on where a request goes"
    explored = [(decision, outcome) for decision, outcome in ended if decision.explored]
    found.requests = len(explored)
    if not any(decision.propensity < 1 for decision, _ in ended):
        return (
            "the log was recorded without exploration: all choices in it are the recorded policy's own, and what "
            "others would have led to is not in it. Record one with fleetpilot serve --explore 0.05 --decision-log FILE"
        )
    without = sum(decision.chosen is None or decision.chosen < 0 for decision, _ in explored)
    if without:
        return (
            f"for {without:,} of {len(explored):,} requests that were sent somewhere the policy chose no instance, and "
            "what that would have led to is not in the log"
        )
    weights = np.array([decision.weight for decision, _ in explored])
    found.effective = _effective(weights)
    if found.effective < LEAST_EFFECTIVE:
        return (
            f"choices that the policy shares with the log weigh as much as {found.effective:.1f} requests, expected "
            f"{LEAST_EFFECTIVE:g} at least: a longer log is needed, or more exploration"
        )
    for metric in METRICS:
        values = np.array([_value(metric, outcome) for _, outcome in explored])
        if (estimate := _compared(metric, values, weights)) is not None:
            found.estimates.append(estimate)
    return ""


def _value(metric: str, outcome: Mapping[str, Any]) -> float:
    finished = outcome["outcome"] == "finished"
    if metric == "finished":
        return float(finished)
    value = outcome[metric]
    return float("nan") if value is None or (metric == "duration_s" and not finished) else float(value)


def _effective(weights: NDArray[np.float64]) -> float:
    """Kish's effective sample size."""
    return float(weights.sum() ** 2 / (weights**2).sum()) if weights.any() else 0.0


def _compared(metric: str, values: NDArray[np.float64], weights: NDArray[np.float64]) -> Estimate | None:
    """A metric's estimate; None where too few requests have one."""
    from scipy.stats import bootstrap

    there = np.isfinite(values)
    if _effective(weights[there]) < LEAST_EFFECTIVE:
        return None
    requests = int(there.sum())
    stretch = np.arange(requests) * min(_STRETCHES, requests) // requests
    sums: list[Any] = [
        np.bincount(stretch, terms)
        for terms in (weights[there] * values[there], weights[there], values[there], np.ones(requests))
    ]

    def estimate(weighted: Any, weight: Any, *_: Any, axis: int = -1) -> Any:
        return weighted.sum(axis) / weight.sum(axis)

    def difference(weighted: Any, weight: Any, plain: Any, count: Any, axis: int = -1) -> Any:
        return weighted.sum(axis) / weight.sum(axis) - plain.sum(axis) / count.sum(axis)

    with np.errstate(invalid="ignore"):
        intervals = [
            bootstrap(
                sums,
                statistic,
                paired=True,
                vectorized=True,
                n_resamples=_RESAMPLES,
                batch=1_000,
                confidence_level=_CONFIDENCE,
                method="percentile",
                rng=np.random.default_rng(0),
            ).confidence_interval
            for statistic in (estimate, difference)
        ]
    (low, high), (difference_low, difference_high) = intervals
    if not np.isfinite([low, high]).all():
        return None
    return Estimate(
        metric,
        requests,
        float(values[there].mean()),
        float(estimate(*sums)),
        float(low),
        float(high),
        float(difference(*sums)),
        float(difference_low),
        float(difference_high),
    )
