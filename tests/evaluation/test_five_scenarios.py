"""The five scenarios: the pairs of policies differ in migration alone, and the verdicts say what the runs do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, Rebalancing, simulate
from fleetpilot.evaluation.comparison import PolicyResult, ScenarioResult
from fleetpilot.evaluation.experiments import five_scenarios as five
from fleetpilot.evaluation.experiments.five_scenarios import CASES, PAIRS, Size, Verdict
from fleetpilot.evaluation.tables import Table, markdown
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload

MAINTENANCE = "maintenance, load 0.9"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Table]]:
    out = tmp_path_factory.mktemp("five")
    return out, five.run(out, workers=1, size=Size(segments=2, seeds=1, length=0.05))


def column_of(table: Table, title: str) -> dict[str, str]:
    return {row[0].text: row[table.header.index(title)].text for row in table.rows}


def test_a_verdict_for_each_scenario_and_a_table_of_each(small: tuple[Path, list[Table]]) -> None:
    out, tables = small
    assert [row[0].text for row in tables[0].rows] == list(CASES)
    assert len(tables[1].rows) == len(CASES) * len(PAIRS)
    assert [table.title for table in tables[2:]] == list(CASES)
    for table in tables:
        assert all(len(row) == len(table.header) for row in table.rows)
        assert not re.search(r"\bnan\b", markdown(table))
    drawn = (out / five.PLOT).read_text()
    assert "<svg" in drawn
    assert len(drawn) < 300_000


def test_requests_move_where_they_may_and_leave_an_instance_that_goes(small: tuple[Path, list[Table]]) -> None:
    maintenance = small[1][2 + list(CASES).index(MAINTENANCE)]
    moved, began_again = column_of(maintenance, "migrations"), column_of(maintenance, "restarts")
    for moving, staying in PAIRS.items():
        assert float(moved[five.LABELS.get(staying, staying)]) == 0 < float(moved[moving])
        assert float(began_again[moving]) < float(began_again[five.LABELS.get(staying, staying)])


def test_what_is_on_disk_is_not_run_again(small: tuple[Path, list[Table]], monkeypatch: pytest.MonkeyPatch) -> None:
    out, tables = small
    monkeypatch.setattr("fleetpilot.evaluation.runner.run_job", None)
    assert five.run(out, workers=1, size=Size(segments=2, seeds=1, length=0.05)) == tables


@pytest.mark.parametrize("moving", PAIRS)
def test_pairs_dispatch_alike_where_nothing_moves(moving: str) -> None:
    table = workload("llumnix/S-S?rate=9&n=400&high_priority=0.1&seed=3")
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 4)
    logs = [simulate(table, fleet, load_policy(name)).requests for name in (moving, PAIRS[moving])]
    np.testing.assert_array_equal(*logs)
    may_move = FleetConfig.of(load_profile("a10-llama-7b"), 4, rebalancing=Rebalancing())
    assert len(simulate(table, may_move, load_policy(PAIRS[moving])).migrations) == 0
    assert len(simulate(table, may_move, load_policy(moving)).migrations) > 0


def result(without: list[float], moving: list[float], missed: tuple[float, float] = (5.0, 5.0)) -> ScenarioResult:
    """Restarts of each segment of `maintenance`; the share of misses is the same in all."""

    def policy(name: str, restarts: list[float], share: float) -> PolicyResult:
        segments: list[dict[str, Any]] = [
            {"migrations": {"restarts": value}, "goodput": {"share": 1 - share / 100}} for value in restarts
        ]
        return PolicyResult(name, {}, segments, np.zeros(0), [])

    return ScenarioResult(
        MAINTENANCE, [policy(PAIRS["llumnix"], without, missed[0]), policy("llumnix", moving, missed[1])]
    )


@pytest.mark.parametrize(
    ("moving", "missed", "text"),
    [
        ([5.0, 4.0, 5.0, 4.0], (5.0, 5.0), "solved"),
        ([5.0, 4.0, 5.0, 4.0], (5.0, 6.0), "solved, but more misses"),
        ([7.0, 8.0, 9.0, 7.0], (5.0, 4.0), "less"),
        ([10.0, 11.0, 9.0, 12.0], (5.0, 5.0), "no difference"),
        ([14.0, 15.0, 13.0, 14.0], (5.0, 5.0), "worse"),
    ],
)
def test_verdicts(moving: list[float], missed: tuple[float, float], text: str) -> None:
    assert five.verdict(result([10.0, 11.0, 10.0, 11.0], moving, missed), "llumnix").text == text


def test_migration_solves_what_it_solves_for_every_policy() -> None:
    solved, less, same, worse = (
        five.verdict(result([10.0, 11.0, 10.0, 11.0], [change + 10.0, change + 11.0] * 2), "llumnix")
        for change in (-9.0, -2.0, 0.0, 2.0)
    )
    answers: list[tuple[list[Verdict], str]] = [
        ([solved, solved], "yes"),
        ([solved, same], "partly"),
        ([same, less], "partly"),
        ([same, worse], "no"),
    ]
    for verdicts, answer in answers:
        assert five.overall(verdicts) == answer
    judged = {case: dict.fromkeys(PAIRS, solved) for case in CASES}
    assert five.answers(judged).title == "Migration solves 5 of 5, and 0 partly"
    judged[MAINTENANCE] = dict.fromkeys(PAIRS, same)
    assert five.answers(judged).title == "Migration solves 4 of 5, and 1 partly"
