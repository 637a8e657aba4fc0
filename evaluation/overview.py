"""All scenarios of an evaluation together: who leads where, and how policies do over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetpilot.evaluation.comparison import (
    GOODPUT,
    PolicyResult,
    ScenarioResult,
    interval_text,
    paired,
)
from fleetpilot.evaluation.statistics import Interval, iqm, stratified_bootstrap, win_share
from fleetpilot.evaluation.tables import Table, Text, number


def policies_of(results: Sequence[ScenarioResult], name: str) -> list[PolicyResult]:
    """A policy's result in every scenario."""
    return [policy for result in results for policy in result.policies if policy.policy == name]


def common_policies(results: Sequence[ScenarioResult]) -> list[str]:
    """The policies that are in all scenarios, in the order of the first."""
    names = [{policy.policy for policy in result.policies} for result in results]
    return [policy.policy for policy in results[0].policies if all(policy.policy in of for of in names)]


def goodputs(results: Sequence[ScenarioResult], name: str) -> list[NDArray[np.float64]]:
    """A policy's goodput in % of each segment, one array per scenario."""
    values = [[GOODPUT.of(segment) for segment in policy.segments] for policy in policies_of(results, name)]
    return [np.array([value for value in of if value is not None], np.float64) for of in values]


def leaders_table(results: Sequence[ScenarioResult]) -> Table:
    """The policy of the best goodput in each scenario."""
    rows = []
    for result in results:
        best = max(result.policies, key=lambda policy: GOODPUT.of(policy.pooled) or 0.0)
        found = result.differences.get((best.policy, GOODPUT.title))
        rows.append(
            [
                Text(result.name),
                Text(best.policy),
                Text(number(GOODPUT.of(best.pooled))),
                Text(number(GOODPUT.of(result.baseline.pooled))),
                Text(interval_text(found.interval if found else None)),
                Text("-" if found is None or found.p is None else f"{found.p:.2g}"),
            ]
        )
    return Table(
        "Best goodput of each scenario",
        ["scenario", "best", "goodput %", f"{results[0].baseline.policy} %", "difference", "p"],
        rows,
        "Goodput: share of all offered requests that met both their targets. Difference to the baseline in points, "
        "mean over segments with its 95 % interval. The best of many is flattered by chance: before a claim, run it "
        "again on segments that did not choose it.",
    )


def overview_table(results: Sequence[ScenarioResult]) -> Table:
    """The policies over all scenarios."""
    rows = []
    names = common_policies(results)
    baseline = policies_of(results, names[0])
    values = {name: goodputs(results, name) for name in names}
    centres = {name: float(iqm(np.concatenate(of))) for name, of in values.items()}
    for name in names:
        differences = [
            paired(ours, theirs, GOODPUT) for ours, theirs in zip(policies_of(results, name), baseline, strict=True)
        ]
        gain = stratified_bootstrap(differences) if name != names[0] else None
        won = win_share(np.concatenate(differences), lower_is_better=False) if name != names[0] else None
        rows.append(
            [
                Text(name),
                Text(number(centres[name]), best=centres[name] == max(centres.values())),
                Text(_range_text(stratified_bootstrap(values[name]))),
                Text(interval_text(gain), best=gain is not None and gain.low > 0),
                Text("-" if won is None else f"{100 * won:.0f}"),
            ]
        )
    return Table(
        f"All {len(results)} scenarios",
        ["policy", "goodput IQM %", "95 %", f"less {names[0]}'s", "won %"],
        rows,
        "Interquartile mean of the goodput of all segments of all scenarios, and of the paired differences in points; "
        "95 % intervals of a bootstrap that draws segments inside each scenario; share of segments won.",
    )


def _range_text(interval: Interval | None) -> str:
    return "-" if interval is None else f"{number(interval.low)} to {number(interval.high)}"
