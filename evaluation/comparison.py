"""Policies side by side: the runs of an evaluation, pooled and paired, and the tables that show them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.baselines import BASELINES
from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.runs import StoredRun
from fleetpilot.evaluation.statistics import (
    Interval,
    TrainedInterval,
    hierarchical_bootstrap,
    holm,
    iqm,
    paired_bootstrap,
    wilcoxon_p,
    win_share,
)
from fleetpilot.evaluation.tables import Table, Text, number
from fleetpilot.fleet.policy import kinds_of
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.fleet.view import KIND_SCALE, KIND_SOURCE

RELATIVE_FROM_MISSES = 0.02
"""A relative gain in misses is stated only where the baseline misses at least this share."""
MIN_SEGMENTS = 10
MIN_REQUESTS = 1_000
MIN_LIFETIMES = 20


@dataclass(frozen=True)
class Metric:
    """A column of the comparison.

    Attributes:
        title: with its unit.
        path: keys into a run's ``metrics``.
        factor: to the unit of the title.
        lower_is_better: None where neither is.
    """

    title: str
    path: tuple[str, ...]
    factor: float = 1.0
    lower_is_better: bool | None = True

    def of(self, summary: dict[str, Any]) -> float | None:
        """Its value in the unit of the title, or None."""
        value: Any = summary
        for key in self.path:
            value = value[key]
        return None if value is None else self.factor * value


GOODPUT = Metric("goodput %", ("goodput", "share"), 100, lower_is_better=False)
TTFT_P99 = Metric("TTFT P99 s", ("latency", "ttft_s", "p99"))
E2E_MEAN = Metric("E2E mean s", ("latency", "e2e_s", "mean"))
E2E_P99 = Metric("E2E P99 s", ("latency", "e2e_s", "p99"))
PREEMPTED = Metric("preempted %", ("requests", "preempted_share"), 100)
INSTANCES = Metric("instances", ("fleet", "run_instances"))
MIGRATIONS = Metric("migrations", ("migrations", "outcomes", "completed"), lower_is_better=None)
RESTARTS = Metric("restarts", ("migrations", "restarts"))
COLUMNS = (
    GOODPUT,
    Metric("TTFT mean s", ("latency", "ttft_s", "mean")),
    TTFT_P99,
    Metric("TPOT P99 ms", ("latency", "tpot_s", "p99"), 1e3),
    Metric("ITL P99 ms", ("latency", "itl_s", "p99"), 1e3),
    E2E_MEAN,
    E2E_P99,
    PREEMPTED,
    Metric("fragmentation %", ("fleet", "fragmentation"), 100),
    Metric("KV use %", ("fleet", "kv_use"), 100, lower_is_better=None),
    Metric("prefix hits %", ("fleet", "run_prefix_hit_ratio"), 100, lower_is_better=None),
    Metric("load max/mean", ("fleet", "load_max_over_mean")),
)
LIFE_COLUMNS = (INSTANCES, MIGRATIONS, RESTARTS)
"""Shown where they tell something: per run, instances paid for on average, what moved, what began again."""
COMPARED = (GOODPUT, TTFT_P99, E2E_MEAN)
"""Columns whose differences to the baseline are tested."""


@dataclass(frozen=True)
class PolicyResult:
    """One policy in one scenario.

    Attributes:
        policy: its name.
        pooled: metrics over the pooled requests of all segments and seeds (of fleet and migrations: the mean over
            runs).
        segments: the same of each segment, over its seeds.
        requests: (n,) the pooled scored requests.
        runs: what it was made of.
    """

    policy: str
    pooled: dict[str, Any]
    segments: list[dict[str, Any]]
    requests: NDArray[np.void] = field(repr=False)
    runs: list[StoredRun] = field(repr=False)


@dataclass(frozen=True)
class Difference:
    """A policy's difference to the baseline in one metric, paired by segment.

    Attributes:
        interval: of the mean, None for fewer than two segments.
        p: of the Wilcoxon signed-rank test, adjusted by Holm over the scenarios that were compared together.
        won: share of segments won.
        segments: that both have a value in.
    """

    interval: Interval | None
    p: float | None
    won: float | None
    segments: int


@dataclass(frozen=True)
class ScenarioResult:
    """All policies in one scenario; the first is the baseline.

    Attributes:
        name: of the scenario.
        policies: what they did.
        differences: to the baseline, by policy and title of the metric (`COMPARED`).
        family: scenarios of one family differ in their load alone; empty for none.
        load: share of the fleet's capacity that was offered, if that is what the scenario sets.
    """

    name: str
    policies: list[PolicyResult]
    differences: Mapping[tuple[str, str], Difference] = field(default_factory=dict)
    family: str = ""
    load: float | None = None

    @property
    def baseline(self) -> PolicyResult:
        """The policy that the others are compared with."""
        return self.policies[0]


def collect(runs: Iterable[StoredRun], baseline: str | None = None) -> list[ScenarioResult]:
    """Pool an evaluation's runs by scenario and policy, and compare the policies.

    Args:
        runs: of one or more scenarios.
        baseline: the policy to compare with; by default the first one.

    Raises:
        ValueError: the baseline has no runs, or the policies do not have the same segments and seeds.
    """
    by_scenario: dict[str, dict[str, list[StoredRun]]] = {}
    for run in runs:
        config = run.summary["config"]
        by_scenario.setdefault(config["scenario"], {}).setdefault(config["policy"], []).append(run)
    results = []
    for name, by_policy in by_scenario.items():
        _check_paired(name, by_policy)
        names = list(by_policy)
        if baseline is not None:
            if baseline not in by_policy:
                raise ValueError(f"baseline = {baseline!r}: expected one of {', '.join(names)}")
            names = [baseline, *(policy for policy in names if policy != baseline)]
        config = by_policy[names[0]][0].summary["config"]
        policies = [_policy_result(policy, by_policy[policy]) for policy in names]
        results.append(ScenarioResult(name, policies, family=config["family"], load=config["load"]))
    return _compared(results)


def _compared(results: list[ScenarioResult]) -> list[ScenarioResult]:
    """With the differences to their baselines."""
    differences: list[dict[tuple[str, str], Difference]] = [
        {
            (policy.policy, metric.title): difference(policy, result.baseline, metric)
            for policy in result.policies[1:]
            for metric in COMPARED
        }
        for result in results
    ]
    for key in {key: None for of in differences for key in of}:
        tested = [of for of in differences if key in of and of[key].p is not None]
        adjusted = holm(np.array([of[key].p for of in tested], np.float64))
        for of, p in zip(tested, adjusted, strict=True):
            of[key] = replace(of[key], p=float(p))
    return [replace(result, differences=of) for result, of in zip(results, differences, strict=True)]


def _check_paired(scenario: str, by_policy: dict[str, list[StoredRun]]) -> None:
    drawn = {
        policy: sorted((run.summary["config"]["workload"]["hash"], run.summary["config"]["seed"]) for run in runs)
        for policy, runs in by_policy.items()
    }
    first = next(iter(drawn.values()))
    for policy, theirs in drawn.items():
        if theirs != first:
            raise ValueError(
                f"scenario {scenario!r}: {policy} has other segments or seeds than the rest: expected pairs"
            )


def _policy_result(policy: str, runs: list[StoredRun]) -> PolicyResult:
    slo_classes = [_slo_class(slo) for slo in runs[0].summary["config"]["fleet"]["slo_classes"]]
    by_segment: dict[int, list[StoredRun]] = {}
    for run in runs:
        by_segment.setdefault(run.summary["config"]["segment"], []).append(run)
    requests = {
        segment: np.concatenate([run.scored_requests() for run in runs]) for segment, runs in by_segment.items()
    }
    pooled = np.concatenate(list(requests.values()))
    return PolicyResult(
        policy,
        _pooled_metrics(runs, pooled, slo_classes),
        [_pooled_metrics(by_segment[segment], requests[segment], slo_classes) for segment in sorted(by_segment)],
        pooled,
        runs,
    )


def _pooled_metrics(
    runs: list[StoredRun], requests: NDArray[np.void], slo_classes: Sequence[SLOClass]
) -> dict[str, Any]:
    migrations = [run.summary["metrics"]["migrations"] for run in runs]
    return {
        **metrics.request_summary(requests, metrics.pooled_bins([run.itl() for run in runs]), slo_classes),
        "fleet": _means([run.summary["metrics"]["fleet"] for run in runs]),
        "migrations": {
            "outcomes": _means([of["outcomes"] for of in migrations]),
            "restarts": float(np.mean([of["restarts"] for of in migrations])),
        },
    }


def _means(of_runs: list[dict[str, float | None]]) -> dict[str, float | None]:
    values = {key: [of[key] for of in of_runs if of[key] is not None] for key in of_runs[0]}
    return {key: float(np.mean(known)) if known else None for key, known in values.items()}  # type: ignore[arg-type]


def _slo_class(plain: dict[str, Any]) -> SLOClass:
    fields: dict[str, Any] = {key: np.inf if value is None else value for key, value in plain.items()}
    return SLOClass(**fields)


def difference(policy: PolicyResult, baseline: PolicyResult, metric: Metric) -> Difference:
    """A policy's value less the baseline's, over the segments in which both have one; its p stands alone."""
    differences = paired(policy, baseline, metric)
    return Difference(
        paired_bootstrap(differences),
        wilcoxon_p(differences),
        win_share(differences, lower_is_better=bool(metric.lower_is_better)),
        len(differences),
    )


def paired(policy: PolicyResult, baseline: PolicyResult, metric: Metric) -> NDArray[np.float64]:
    """(n,) a policy's value less the baseline's, of the segments in which both have one."""
    pairs = [
        (metric.of(ours), metric.of(theirs)) for ours, theirs in zip(policy.segments, baseline.segments, strict=True)
    ]
    return np.array([ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None])


def trained_difference(
    trainings: Sequence[PolicyResult], baseline: PolicyResult, metric: Metric
) -> TrainedInterval | None:
    """The difference of a method to the baseline, from policies that it trained with several seeds.

    Args:
        trainings: one per training seed, of the baseline's scenario.
        baseline: the policy to compare with.
        metric: what is compared.

    Returns:
        None for fewer than two training seeds, or fewer than two segments in which all have a value.
    """
    values = np.array(
        [[_or_nan(metric.of(segment)) for segment in policy.segments] for policy in (baseline, *trainings)], np.float64
    )
    known = values[:, np.isfinite(values).all(axis=0)]
    return hierarchical_bootstrap(known[1:] - known[0])


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


# --- tables ------------------------------------------------------------------------------------------------------


def values_table(result: ScenarioResult) -> Table:
    """Every policy's metrics over the pooled requests of all segments and seeds, the best of each column marked."""
    shown = [*COLUMNS, *(metric for metric in LIFE_COLUMNS if _tells(result, metric))]
    columns = [column(result, metric) for metric in shown]
    goodputs = [Text(number(_goodput_iqm(policy))) for policy in result.policies]
    runs = len(result.baseline.runs)
    return Table(
        f"{result.name}: {len(result.baseline.requests):,} scored requests in {runs} runs each",
        ["policy", *(metric.title for metric in shown), "goodput IQM %"],
        [
            [Text(policy.policy), *cells, iqm_cell]
            for policy, *cells, iqm_cell in zip(result.policies, *columns, goodputs, strict=True)
        ],
        "Pooled over all runs, percentiles too; goodput IQM: interquartile mean over segments. The best of a column is "
        "marked. Plots shorten long names of policies and give their rows here.",
    )


def _tells(result: ScenarioResult, metric: Metric) -> bool:
    """Whether a column of `LIFE_COLUMNS` does."""
    if metric is INSTANCES:
        fleet = result.baseline.runs[0].summary["config"]["fleet"]
        return fleet["scaling"] is not None or fleet["failures"] is not None
    return any(metric.of(policy.pooled) for policy in result.policies)


def column(result: ScenarioResult, metric: Metric) -> list[Text]:
    """A metric of every policy, the best marked."""
    values = [metric.of(policy.pooled) for policy in result.policies]
    known = [value for value in values if value is not None]
    best = None
    if known and metric.lower_is_better is not None:
        best = number(min(known) if metric.lower_is_better else max(known))
    return [Text(number(value), best=value is not None and number(value) == best) for value in values]


def _goodput_iqm(policy: PolicyResult) -> float | None:
    values = [GOODPUT.of(segment) for segment in policy.segments]
    known = np.array([value for value in values if value is not None])
    return float(iqm(known)) if len(known) else None


def differences_table(result: ScenarioResult) -> Table:
    """Every other policy's differences to the baseline."""
    baseline = result.baseline
    misses = 1 - (GOODPUT.of(baseline.pooled) or 0) / 100
    rows = []
    for policy in result.policies[1:]:
        row = [Text(policy.policy)]
        for metric in COMPARED:
            found = result.differences[policy.policy, metric.title]
            row += [
                Text(interval_text(found.interval), best=_is_better(found.interval, metric)),
                Text("-" if found.p is None else f"{found.p:.2g}"),
                Text("-" if found.won is None else f"{100 * found.won:.0f}"),
            ]
        rows.append([*row, Text(_relative_misses(policy, misses))])
    note = (
        f"Mean of the paired differences over {len(baseline.segments)} segments with its 95 % bootstrap interval, "
        "marked where all of it is better; p of the Wilcoxon signed-rank test, adjusted (Holm) where there are several "
        "scenarios; share of segments won. Goodput in points; misses relative to the baseline's only where it misses "
        f"at least {RELATIVE_FROM_MISSES:.0%}."
    )
    header = ["policy", *(title for metric in COMPARED for title in (metric.title, "p", "won %")), "misses %"]
    return Table(f"{result.name}: differences to {baseline.policy}", header, rows, note)


def rescored_table(result: ScenarioResult) -> Table:
    """Every policy's goodput with all SLO targets multiplied, and by SLO class where there are several."""
    classes = sorted({name for policy in result.policies for name in policy.pooled["goodput"]["by_class"]})
    by_scale = [
        Metric(f"{scale:g}x", ("goodput", "by_scale", f"{scale:g}"), 100, False) for scale in metrics.SLO_SCALES
    ]
    by_class = [Metric(name, ("goodput", "by_class", name), 100, False) for name in classes]
    shown = by_scale + (by_class if len(by_class) > 1 else [])
    columns = [column(result, metric) for metric in shown]
    return Table(
        f"{result.name}: goodput % with other targets",
        ["policy", *(metric.title for metric in shown)],
        [[Text(policy.policy), *cells] for policy, *cells in zip(result.policies, *columns, strict=True)],
        "All SLO targets multiplied, from the same runs; by SLO class where there are several.",
    )


def _relative_misses(policy: PolicyResult, baseline_misses: float) -> str:
    share = GOODPUT.of(policy.pooled)
    if share is None or baseline_misses < RELATIVE_FROM_MISSES:
        return "-"
    return f"{100 * ((1 - share / 100) / baseline_misses - 1):+.0f}"


def _is_better(interval: Interval | None, metric: Metric) -> bool:
    if interval is None:
        return False
    return interval.high < 0 if metric.lower_is_better else interval.low > 0


def notes(result: ScenarioResult) -> list[str]:
    """What limits the conclusions from a scenario: too few or too short segments, requests that did not finish.

    And policies that cannot be told apart.
    """
    said = []
    segments = len(result.baseline.segments)
    if segments < MIN_SEGMENTS:
        said.append(f"only {segments} segments: {MIN_SEGMENTS} independent ones are wanted before a claim")
    fewest = min(segment["requests"]["offered"] for segment in result.baseline.segments)
    if fewest < MIN_REQUESTS:
        said.append(f"a segment has only {fewest:,} scored requests: {MIN_REQUESTS:,} are wanted")
    windows = [run.summary["metrics"]["window"] for run in result.baseline.runs]
    lifetime = E2E_MEAN.of(result.baseline.pooled)
    shortest = min(window["end_s"] - window["start_s"] for window in windows)
    if lifetime is not None and shortest < MIN_LIFETIMES * lifetime:
        said.append(
            f"a segment scores {shortest:.0f} s, less than {MIN_LIFETIMES} mean request lifetimes ({lifetime:.1f} s)"
        )
    for policy in result.policies:
        counts = policy.pooled["requests"]
        unfinished = {name: counts[name] for name in metrics.STATUSES if name != "finished" and counts[name]}
        if unfinished:
            said.append(f"{policy.policy}: " + ", ".join(f"{count:,} {name}" for name, count in unfinished.items()))
        share = fallback_share([run.summary for run in policy.runs])
        if share:
            said.append(f"{policy.policy}: its fallback made {share:.1%} of the decisions, out of its trained range")
    return [*said, *_alike(result)]


def _alike(result: ScenarioResult) -> list[str]:
    """Policies that did the same in every run, and which of them were not asked all that they answer."""
    by_outcome: dict[str, list[str]] = {}
    for policy in result.policies:
        runs = sorted(policy.runs, key=lambda run: (run.summary["config"]["segment"], run.summary["config"]["seed"]))
        outcome = json.dumps([run.summary["metrics"] for run in runs])
        by_outcome.setdefault(outcome, []).append(policy.policy)
    fleet = result.baseline.runs[0].summary["config"]["fleet"]
    said = []
    for names in by_outcome.values():
        if len(names) > 1:
            moving = [] if fleet["rebalancing"] else [name for name in names if KIND_SOURCE in _kinds(name)]
            scaling = [] if fleet["scaling"] else [name for name in names if KIND_SCALE in _kinds(name)]
            said.append(
                f"{', '.join(names)}: the same in every run"
                + (f"; with --rebalance-s {', '.join(moving)} would move requests" if moving else "")
                + (f"; with --ready {', '.join(scaling)} would scale" if scaling else "")
            )
    return said


def _kinds(policy: str) -> tuple[int, ...]:
    """Of decision that a baseline answers; none for others, whose folders may have gone."""
    base = policy.partition("?")[0]
    return kinds_of(BASELINES[base]()) if base in BASELINES else ()


def fallback_share(summaries: Iterable[dict[str, Any]]) -> float:
    """Of a learned policy's decisions, those that its fallback made; 0 for others."""
    counts = [summary.get("policy_counts") or {} for summary in summaries]
    decisions = sum(count.get("decisions", 0) for count in counts)
    return sum(count.get("out_of_range", 0) for count in counts) / decisions if decisions else 0.0


def interval_text(interval: Interval | None) -> str:
    """A difference and its interval."""
    if interval is None:
        return "-"
    return f"{_signed(interval.estimate)} [{_signed(interval.low)}, {_signed(interval.high)}]"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)
