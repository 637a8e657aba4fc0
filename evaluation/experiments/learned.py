"""Whether a learned policy beats the field of dispatch policies: on windows that chose neither it nor its opponents.

``learned.toml`` fixes the cells - workloads at loads relative to the fleet's capacity - and their windows. On the
validation windows all baselines run. The one that meets most targets in a cell is the learned policy's opponent there;
the one that misses least over all cells is its opponent everywhere, for a fleet runs one policy. Both are met on the
test windows, and both are chosen twice: of all baselines, and of those that serve every request. A baseline whose
parameters were tuned for the workload (`fleetpilot.evaluation.tuned`, on development windows) stands for itself with
these and with its defaults: whichever was better on the validation windows. The report begins with
how far the best baseline is from rules that know what no dispatcher does. On fleets of sizes that no training has seen,
and with telemetry of other ages, the policy meets the opponent that is best as usual.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot import baselines
from fleetpilot.cluster import FleetConfig, Telemetry
from fleetpilot.envs.scenarios import load_scenario
from fleetpilot.evaluation.comparison import (
    GOODPUT,
    RELATIVE_FROM_MISSES,
    PolicyResult,
    ScenarioResult,
    collect,
    difference,
    fallback_share,
    interval_text,
)
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.segments import at_load, capacity_rps, rate_rps
from fleetpilot.evaluation.statistics import Interval, holm, iqm
from fleetpilot.evaluation.tables import Table, Text, number
from fleetpilot.evaluation.tuned import OURS, tuned_names
from fleetpilot.fleet.policy import kinds_of, only_places
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import KIND_DISPATCH
from fleetpilot.workloads import RequestTable, workload
from fleetpilot.workloads.selection import superpose, within_length

LEARNED = ("learned",)
DEVELOPMENT, VALIDATION, TEST = "development", "validation", "test"
TOLERANCE_POINTS = 0.2
"""Where the opponent misses next to nothing, a learned policy may miss so much more."""
RESAMPLES = 10_000
_SPEED_UP = 1.9
"""Of a workload, before parts of it are laid over each other: these are not quite equally long."""


class Size(NamedTuple):
    """How much to run: what is written in the file, or less in tests.

    Attributes:
        windows: of each part; None: all.
        share: of a window's requests.
        seeds: of tie breaks, on the test windows; one is enough to choose opponents.
        cells: names of workloads; None: all.
        loads: None: all.
        sizes: of fleets besides the usual one; None: all.
        delays: of telemetry besides the usual one; None: all.
    """

    windows: int | None = None
    share: float = 1.0
    seeds: int = 3
    cells: tuple[str, ...] | None = None
    loads: tuple[float, ...] | None = None
    sizes: tuple[int, ...] | None = None
    delays: tuple[float, ...] | None = None


@cache
def plan() -> dict[str, Any]:
    """``learned.toml``."""
    return tomllib.loads((resources.files(__package__) / "learned.toml").read_text("utf-8"))


def field() -> list[str]:
    """The baselines that dispatch and need no more than that."""
    return [name for name, make in baselines.BASELINES.items() if only_places(make())]


def tunable() -> list[str]:
    """Of the field, those that have parameters of placing to look for."""
    return [
        name
        for name in field()
        if any(allowed.kind == KIND_DISPATCH for allowed in baselines.policy_ranges(name).values())
    ]


def variants(name: str) -> list[str]:
    """The field, with default parameters and with those tuned for a workload."""
    return [*dict.fromkeys([*field(), *tuned_names(OURS, name, field())])]


def bounds() -> list[str]:
    """Policies that know what no dispatcher does."""
    return [name for name, make in baselines.ORACLE_BOUNDS.items() if KIND_DISPATCH in kinds_of(make())]


# --- cells -------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Of the workloads."""
    return [*plan()["scenarios"], *plan()["workloads"]]


def cells(name: str, part: str, size: Size) -> list[Scenario]:
    """A workload's windows of a part, at every load."""
    make = of_environment if name in plan()["scenarios"] else _of_workload
    return [make(name, load, _seeds(part, size), size.share) for load in _loads(size)]


def _seeds(part: str, size: Size) -> range:
    """Of the windows of a part."""
    first, count = plan()["windows"][part], size.windows or plan()["windows"]["count"]
    return range(first, first + count)


def _loads(size: Size) -> Sequence[float]:
    loads: Sequence[float] = plan()["fleet"]["loads"] if size.loads is None else size.loads
    return loads


def development(name: str) -> list[Scenario]:
    """What a workload's parameters are tuned on: the first of its development windows, at every load."""
    return cells(name, DEVELOPMENT, Size(windows=plan()["tuning"]["windows"]))


def elsewhere(name: str, size: Size) -> list[Scenario]:
    """A scenario's test windows on fleets of other sizes, and with telemetry of other ages."""
    of = plan()["elsewhere"]
    counts = of["instances"] if size.sizes is None else size.sizes
    delays = of["poll_delay_s"] if size.delays is None else size.delays
    given = name, of["load"], _seeds(TEST, size), size.share * of["share"]
    return [
        *(of_environment(*given, instances=count) for count in counts),
        *(of_environment(*given, poll_delay_s=delay_s) for delay_s in delays),
    ]


def starved(size: Size) -> list[Scenario]:
    """The test windows of pools with a single prefill instance, at every load."""
    of, seeds = plan()["starved"], _seeds(TEST, size)
    return [of_environment(of["scenario"], load, seeds, size.share, instances=of["instances"]) for load in _loads(size)]


def of_environment(
    name: str,
    load: float,
    seeds: Sequence[int],
    share: float,
    *,
    instances: int | None = None,
    poll_delay_s: float | None = None,
) -> Scenario:
    """Episodes of an environment, with the hardware of the profile and telemetry that is late by a fixed time."""
    fleet = plan()["fleet"]
    count = instances or fleet["instances"]
    scenario = load_scenario(name).with_changes(
        load=load,
        scored_requests=max(1, round(share * plan()["scenarios"][name])),
        hardware_error=0.0,
        poll_interval_s=fleet["poll_interval_s"],
        poll_delay_s=fleet["poll_delay_s"] if poll_delay_s is None else poll_delay_s,
        predicted_share=1.0,
        predictor_error=fleet["predictor_error"],
        rebalancing=None,
        scaling=None,
    )
    limits = scenario.limits(count)
    episodes = [scenario.draw(np.random.default_rng(seed), limits, {}, length=1.0) for seed in seeds]
    tables = tuple(episode.table for episode in episodes)
    failures = tuple(episode.fleet.failures for episode in episodes)
    title = cell_name(name, load) + (f", {instances} instances" if instances else "")
    title += "" if poll_delay_s is None else f", polls {poll_delay_s:g} s late"
    return Scenario(
        title,
        tables,
        replace(episodes[0].fleet, failures=None),
        failures if any(failures) else (),
        family=name,
        load=load,
    )


def cell_name(name: str, load: float) -> str:
    """Of a workload at a load, on the usual fleet."""
    return f"{name} at {load:g}"


def _of_workload(name: str, load: float, seeds: Sequence[int], share: float) -> Scenario:
    """Draws of a workload, at a load by measured capacity."""
    given, of_fleet = plan()["workloads"][name], plan()["fleet"]
    profile = load_profile(given["profile"]).replace(priority_order=given.get("priority_order", False))
    telemetry = Telemetry(of_fleet["poll_interval_s"], of_fleet["poll_delay_s"])
    fleet = FleetConfig.of(profile, of_fleet["instances"], telemetry=telemetry)

    def draw(seed: int) -> RequestTable:
        mark = "&" if "?" in given["spec"] else "?"
        n = max(1, round(share * given["requests"]))
        spec = f"{given['spec']}{mark}n={n}&seed={seed}&predict=error:{of_fleet['predictor_error']}"
        return within_length(workload(spec), profile.max_model_len)

    capacity = capacity_rps(draw(plan()["windows"]["development"]), fleet)
    tables = []
    for seed in seeds:
        table = draw(seed)
        parts = math.ceil(load * capacity / rate_rps(table) / _SPEED_UP)
        tables.append(at_load(superpose(table, parts) if parts > 1 else table, fleet, load, capacity))
    return Scenario(cell_name(name, load), tuple(tables), fleet, family=name, load=load)


# --- the experiment ----------------------------------------------------------------------------------------------


ANY, SERVING = "any baseline", "baselines that serve all"
"""Groups of opponents: of the field, and of those that reject no request."""


class Opponents(NamedTuple):
    """Of a group: the best baseline of the validation windows.

    Attributes:
        of: cell -> its name.
        everywhere: the policy that misses least over all cells: cell -> its name with the better parameters there.
    """

    of: dict[str, str]
    everywhere: dict[str, str]


@dataclass(frozen=True)
class Cell:
    """What came out in one cell.

    Attributes:
        name: of it.
        opponents: group -> the best baseline of the validation windows.
        test: results on the test windows.
    """

    name: str
    opponents: dict[str, str]
    test: dict[str, PolicyResult]


def run(
    out: Path,
    *,
    workers: int | None = None,
    policies: Sequence[str] = LEARNED,
    size: Size = Size(),  # noqa: B008 (immutable)
) -> list[Table]:
    """Choose the opponents, meet them.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        policies: the learned ones; more than one for several seeds of a training.
        size: how much to run.

    Returns:
        The room; what all miss, cell by cell; then for each policy all cells together, each cell against the best
        baseline of each group, and fleets of other sizes and with other telemetry.
    """
    chosen = [name for name in names() if size.cells is None or name in size.cells]
    misses: dict[str, dict[str, float]] = {}
    rejecting: set[str] = set()
    for name in chosen:
        scenarios = cells(name, VALIDATION, size)
        runs = evaluate(scenarios, [*variants(name), *bounds()], out, seeds=(0,), workers=workers)
        for result in _collected(runs, scenarios):
            misses[result.name] = {of.policy: missed(of.pooled) for of in result.policies}
            rejecting |= {of.policy for of in result.policies if of.pooled["requests"]["rejected"]}
    groups = {ANY: _best(misses, set(bounds())), SERVING: _best(misses, {*bounds(), *rejecting})}
    found = []
    for name in chosen:
        scenarios = cells(name, TEST, size)
        met = [
            opponent
            for group in groups.values()
            for scenario in scenarios
            for opponent in (group.everywhere[scenario.name], group.of[scenario.name])
        ]
        runs = evaluate(scenarios, [*dict.fromkeys([*policies, *met])], out, seeds=range(size.seeds), workers=workers)
        for result in _collected(runs, scenarios):
            opponents = {title: group.of[result.name] for title, group in groups.items()}
            found.append(Cell(result.name, opponents, {policy.policy: policy for policy in result.policies}))
    usual = [name for name in chosen if cell_name(name, plan()["elsewhere"]["load"]) in misses]
    others = _elsewhere(usual, policies, groups, out, workers, size)
    hungry = _starved(policies, out, workers, size) if plan()["starved"]["scenario"] in chosen else []
    answers = [table for policy in policies for table in _answers(policy, groups, found, others, hungry)]
    return [_room(misses, groups), _overview(policies, groups, found), *answers]


def _best(misses: dict[str, dict[str, float]], others: set[str]) -> Opponents:
    """Of all that ran in the cells but `others`."""
    better: dict[str, dict[str, str]] = {}  # policy -> cell -> its name with the better parameters
    for cell, values in misses.items():
        for name in sorted(values.keys() - others, key=values.__getitem__, reverse=True):
            better.setdefault(baselines.read_name(name)[0], {})[cell] = name
    of = {
        cell: min((names[cell] for names in better.values() if cell in names), key=values.__getitem__)
        for cell, values in misses.items()
    }
    everywhere = [names for names in better.values() if names.keys() == misses.keys()]
    return Opponents(of, min(everywhere, key=lambda names: np.mean([misses[cell][names[cell]] for cell in misses])))


def _elsewhere(
    chosen: Sequence[str],
    policies: Sequence[str],
    groups: dict[str, Opponents],
    out: Path,
    workers: int | None,
    size: Size,
) -> list[Cell]:
    """Against the usual opponents."""
    found = []
    for name in [name for name in plan()["elsewhere"]["scenarios"] if name in chosen]:
        scenarios = elsewhere(name, size)
        opponents = {title: group.of[cell_name(name, plan()["elsewhere"]["load"])] for title, group in groups.items()}
        met = [*dict.fromkeys([*policies, *opponents.values()])]
        runs = evaluate(scenarios, met, out, seeds=range(size.seeds), workers=workers)
        for result in _collected(runs, scenarios):
            found.append(Cell(result.name, opponents, {policy.policy: policy for policy in result.policies}))
    return found


def _starved(policies: Sequence[str], out: Path, workers: int | None, size: Size) -> list[Cell]:
    """Against what nobody may be worse than."""
    opponent, scenarios = plan()["starved"]["opponent"], starved(size)
    runs = evaluate(scenarios, [*policies, opponent], out, seeds=range(size.seeds), workers=workers)
    return [
        Cell(result.name, {opponent: opponent}, {policy.policy: policy for policy in result.policies})
        for result in _collected(runs, scenarios)
    ]


def _collected(runs: Sequence[Any], scenarios: Sequence[Scenario]) -> Iterator[ScenarioResult]:
    """One at a time: all requests of all cells are gigabytes."""
    for scenario in scenarios:
        yield from collect([run for run in runs if run.summary["config"]["scenario"] == scenario.name])


def missed(summary: dict[str, Any]) -> float:
    """Requests that did not meet their targets, in %."""
    return 100.0 - (GOODPUT.of(summary) or 0.0)


def by_window(result: PolicyResult) -> NDArray[np.float64]:
    """(windows,) misses in %."""
    return np.array([missed(segment) for segment in result.segments])


# --- tables ------------------------------------------------------------------------------------------------------


def _room(misses: dict[str, dict[str, float]], groups: dict[str, Opponents]) -> Table:
    """How far the best baselines of each cell are from the bounds, on the validation windows."""
    known = bounds()
    rows = []
    for cell, values in misses.items():
        best = [group.of[cell] for group in groups.values()]
        named = [text for policy in best for text in (policy, number(values[policy]))]
        room = values[groups[SERVING].of[cell]] - min(values[bound] for bound in known)
        rows.append([cell, *named, *map(number, (*(values[of] for of in known), room))])
    note = (
        "Requests that missed a target, in %, on the validation windows. Room: what the best baseline that serves all "
        "misses less what the best of the rules misses that know every answer's length and serve all, too. These are "
        "rules, so a baseline can be better (room below 0); what the best baseline misses is in any case the most that "
        "can be won. In overload whoever rejects early misses less than any that serves all."
    )
    named = [text for title in groups for text in (f"best of {title}", "misses %")]
    header = ["cell", *named, *known, "room"]
    return Table("Room", header, [[Text(text) for text in row] for row in rows], note)


def _overview(policies: Sequence[str], groups: dict[str, Opponents], found: Sequence[Cell]) -> Table:
    """What the policies and their opponents miss in each cell, on the test windows."""
    rows = []
    for cell in found:
        least = min(missed(result.pooled) for result in cell.test.values())
        row = [Text(cell.name)]
        for title in groups:
            opponent = cell.opponents[title]
            value = missed(cell.test[opponent].pooled)
            row += [Text(opponent), Text(number(value), best=value == least)]
        values = [missed(cell.test[policy].pooled) for policy in policies]
        rows.append([*row, *(Text(number(value), best=value == least) for value in values)])
    header = ["cell", *(text for title in groups for text in (f"best of {title}", "misses %"))]
    note = (
        "Requests that missed a target, in %, on the test windows; opponents as the validation windows chose them. "
        "What misses least is marked; whether it is more than chance say the tables that follow."
    )
    return Table("What is missed", [*header, *(f"{policy} %" for policy in policies)], rows, note)


def _answers(
    policy: str,
    groups: dict[str, Opponents],
    found: Sequence[Cell],
    others: Sequence[Cell],
    hungry: Sequence[Cell],
) -> list[Table]:
    """Of one learned policy."""

    def against(cells_of: Sequence[Cell], title: str) -> Pairs:
        return {cell.name: (cell.test[policy], cell.test[cell.opponents[title]]) for cell in cells_of}

    rows: dict[str, Pairs] = {}
    for title, group in groups.items():
        rows[f"the best of {title} in each cell"] = against(found, title)
        everywhere = {cell.name: (cell.test[policy], cell.test[group.everywhere[cell.name]]) for cell in found}
        policy_everywhere, _ = baselines.read_name(next(iter(group.everywhere.values())))
        rows[f"the best of {title} over all cells, {policy_everywhere}"] = everywhere
    return [
        _summary(policy, rows),
        *(_cells(f"{policy}: against the best of {title} in each cell", against(found, title)) for title in groups),
        *(_cells(f"{policy}: other sizes and telemetry, against {title}", against(others, title)) for title in groups),
        *(
            _cells(f"{policy}: starved pools, against {title}", against(hungry, title))
            for title in (hungry[0].opponents if hungry else ())
        ),
    ]


Pairs = dict[str, tuple[PolicyResult, PolicyResult]]
"""Cell -> the learned policy's result and its opponent's."""


def _summary(policy: str, against: dict[str, Pairs]) -> Table:
    """All cells together."""
    rows = []
    for title, pairs in against.items():
        wins = [judge(ours, theirs) for ours, theirs in pairs.values()]
        counted = [pair for pair in pairs.values() if missed(pair[1].pooled) >= 100 * RELATIVE_FROM_MISSES]
        less = fewer_misses(counted)
        cells_of = [title, str(len(counted)), interval_text(less), *(str(wins.count(of)) for of in VERDICTS)]
        rows.append([Text(text) for text in cells_of])
    return Table(
        f"{policy}: all {len(next(iter(against.values())))} cells",
        ["against", f"cells with misses from {RELATIVE_FROM_MISSES:.0%}", "misses there, %", *VERDICTS],
        rows,
        "Misses: relative to the opponent's, interquartile mean over the cells in which it misses enough, with the "
        "95 % interval of a bootstrap over the windows of each cell. Better and worse: the interval of the cell's "
        f"difference is on one side of 0, and where the opponent misses less than {RELATIVE_FROM_MISSES:.0%} the "
        f"difference is also over {TOLERANCE_POINTS:g} points.",
    )


def _cells(title: str, pairs: Pairs) -> Table:
    """One row per cell."""
    found = {name: difference(*pair, GOODPUT) for name, pair in pairs.items()}
    known = [name for name, of in found.items() if of.p is not None]
    adjusted = dict(zip(known, holm(np.array([found[name].p for name in known], np.float64)), strict=True))
    rows = []
    for name, (ours, theirs) in pairs.items():
        verdict = judge(ours, theirs)
        fallback = fallback_share([run.summary for run in ours.runs])
        rows.append(
            [
                Text(name),
                Text(theirs.policy),
                Text(number(missed(theirs.pooled))),
                Text(number(missed(ours.pooled)), best=verdict == "better"),
                Text(interval_text(found[name].interval)),
                Text(f"{adjusted[name]:.2g}" if name in adjusted else "-"),
                Text(_relative(ours, theirs)),
                Text(verdict),
                Text(f"{100 * fallback:.1f}"),
            ]
        )
    header = ["cell", "opponent", "its misses %", "misses %", "goodput", "p", "misses, %", "verdict", "fallback %"]
    return Table(
        title,
        header,
        rows,
        "Test windows. Goodput: mean of the paired differences in points with its 95 % bootstrap interval, p of the "
        "Wilcoxon signed-rank test adjusted over the cells (Holm). Misses relative to the opponent's only where it "
        f"misses at least {RELATIVE_FROM_MISSES:.0%}. Fallback: decisions out of the trained range, which a baseline "
        "made.",
    )


def _relative(ours: PolicyResult, theirs: PolicyResult) -> str:
    base = missed(theirs.pooled)
    return f"{100 * (missed(ours.pooled) / base - 1):+.0f}" if base >= 100 * RELATIVE_FROM_MISSES else "-"


VERDICTS = ("better", "no difference", "worse")


def judge(ours: PolicyResult, theirs: PolicyResult) -> str:
    """One of `VERDICTS`."""
    interval = difference(ours, theirs, GOODPUT).interval
    little = missed(theirs.pooled) < 100 * RELATIVE_FROM_MISSES
    if interval is None or not interval.excludes_zero or (little and abs(interval.estimate) <= TOLERANCE_POINTS):
        return "no difference"
    return "better" if interval.low > 0 else "worse"


def fewer_misses(pairs: Sequence[tuple[PolicyResult, PolicyResult]]) -> Interval | None:
    """Change of the misses in %, interquartile mean over cells, with its interval over windows; None without cells."""
    if not pairs:
        return None
    rng = np.random.default_rng(0)
    drawn = []
    for ours, theirs in pairs:
        values = np.stack([by_window(ours), by_window(theirs)])  # (2, windows)
        rows = rng.integers(0, values.shape[1], (RESAMPLES, values.shape[1]))
        rows[0] = np.arange(values.shape[1])  # the first is the estimate
        means = values[:, rows].mean(axis=2)
        drawn.append(100.0 * (means[0] / np.maximum(means[1], 1e-9) - 1.0))
    change = iqm(np.array(drawn), axis=0)
    low, high = np.percentile(change[1:], (2.5, 97.5))
    return Interval(float(change[0]), float(low), float(high))
