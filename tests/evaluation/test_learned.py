"""The experiment on learned policies: its windows are nobody's training, opponents are chosen apart from the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetpilot.baselines import BASELINES
from fleetpilot.evaluation.comparison import PolicyResult
from fleetpilot.evaluation.experiments import learned
from fleetpilot.evaluation.experiments.learned import TEST, VALIDATION, Size, cells, fewer_misses, judge
from fleetpilot.evaluation.tables import Table
from fleetpilot.evaluation.tuned import OURS, read_tuned

SMALL = Size(
    windows=2,
    share=0.05,
    seeds=1,
    cells=("bursty", "azure-conv", "pd_mixed_bursty"),
    loads=(0.95,),
    sizes=(2,),
    delays=(0.5,),
)
STAND_IN = "join-shortest-queue"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Table]]:
    out = tmp_path_factory.mktemp("learned")
    return out, learned.run(out, workers=1, policies=(STAND_IN,), size=SMALL)


def test_it_begins_with_the_room_and_judges_every_cell(small: tuple[Path, list[Table]]) -> None:
    room, overview, summary, *against = small[1]
    assert room.title == "Room"
    assert [row[0].text for row in room.rows] == ["bursty at 0.95", "pd_mixed_bursty at 0.95", "azure-conv at 0.95"]
    assert len(against) == 5
    assert [[row[0].text, row[1].text] for row in against[-1].rows] == [
        ["pd_mixed_bursty at 0.95, 3 instances", "round-robin"]
    ]
    assert [row[0].text for row in against[-2].rows] == [
        "bursty at 0.95, 2 instances",
        "bursty at 0.95, polls 0.5 s late",
    ]
    assert overview.header[-1] == f"{STAND_IN} %"
    judged = against[0].header.index("misses %")
    assert [row[-1].text for row in overview.rows] == [row[judged].text for row in against[0].rows]
    assert [row[1].text for row in overview.rows] == [row[1].text for row in room.rows]
    for table in (room, overview, summary, *against):
        assert all(len(row) == len(table.header) for row in table.rows)
    verdicts = [row[summary.header.index("better") :] for row in summary.rows]
    assert [sum(int(cell.text) for cell in row) for row in verdicts] == [3, 3, 3, 3]
    rejecting = room.header.index("best of any baseline"), room.header.index("best of baselines that serve all")
    assert "mooncake" in [row[rejecting[0]].text for row in room.rows]
    assert "mooncake" not in [row[rejecting[1]].text for row in room.rows]


def test_opponents_are_chosen_on_windows_that_do_not_score(
    small: tuple[Path, list[Table]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, list[str]]] = []
    real = learned.evaluate

    def seen(scenarios: Any, policies: list[str], out: Path, **options: Any) -> Any:
        ran.extend((table.name, policies) for scenario in scenarios for table in scenario.segments)
        return real(scenarios, policies, small[0], **options)

    monkeypatch.setattr(learned, "evaluate", seen)
    monkeypatch.setattr("fleetpilot.evaluation.runner.run_job", None)  # all is on disk
    assert learned.run(tmp_path, workers=1, policies=(STAND_IN,), size=SMALL) == small[1]
    fields = [[*learned.variants(name), *learned.bounds()] for name in SMALL.cells or ()]
    chosen_with = [policies for _, policies in ran if policies in fields]
    scored_with = [policies for _, policies in ran if policies[0] == STAND_IN]
    assert len(chosen_with) == 6
    assert len(scored_with) == 6 + 4 + 2, "of one workload on a fleet of another size and with other telemetry; pools"


@pytest.mark.parametrize("name", learned.names())
def test_windows_of_the_parts_are_different_and_meet_the_same_requests_at_every_load(name: str) -> None:
    size = Size(windows=1, share=0.02)
    (validation, *_), (test, *others) = cells(name, VALIDATION, size), cells(name, TEST, size)
    assert not np.array_equal(validation.segments[0].prompt_tokens[:50], test.segments[0].prompt_tokens[:50])
    for other in others:
        assert sorted(other.segments[0].output_tokens) == sorted(test.segments[0].output_tokens)
    rates = [len(of.segments[0]) / of.segments[0].span_s for of in (test, *others) if name != "agents"]
    assert rates == sorted(rates)


def test_every_window_of_node_loss_has_losses_of_its_own() -> None:
    (cell,) = cells("node_loss", TEST, Size(windows=2, share=0.02, loads=(0.8,)))
    first, second = cell.failures
    assert first
    assert second
    assert first.at != second.at
    assert cell.fleet.failures is None


def test_no_window_is_drawn_with_a_seed_of_training() -> None:
    windows = learned.plan()["windows"]
    firsts = [windows[part] for part in ("development", "validation", "test")]
    seeds = {first + k for first in firsts for k in range(windows["count"])}
    assert len(seeds) == 3 * windows["count"]
    assert min(seeds) >= 2_000
    assert max(seeds) < 1_000_000


def test_the_field_is_what_dispatches_and_nothing_else() -> None:
    assert {"lmetric", "calibrated"} <= set(learned.field())
    assert "oracle-least-work" in learned.bounds()
    assert "llumnix" not in learned.field()
    assert set(learned.field()) <= set(BASELINES)


def test_a_baseline_stands_with_the_better_of_its_parameters() -> None:
    misses = {
        "x at 1": {
            "lmetric": 5.0,
            "mooncake": 2.0,
            "mooncake?margin=2": 1.0,
            "dynamo-kv": 6.0,
            "dynamo-kv?weight=3": 4.0,
        },
        "y at 1": {
            "lmetric": 2.0,
            "mooncake": 9.0,
            "mooncake?reject=0": 7.0,
            "dynamo-kv": 5.0,
            "dynamo-kv?weight=2": 6.0,
        },
    }
    every = learned._best(misses, set())
    assert every.of == {"x at 1": "mooncake?margin=2", "y at 1": "lmetric"}
    assert every.everywhere == {"x at 1": "lmetric", "y at 1": "lmetric"}
    serving = learned._best(misses, {"mooncake", "mooncake?margin=2", "lmetric"})
    assert serving.of == {"x at 1": "dynamo-kv?weight=3", "y at 1": "dynamo-kv"}
    assert serving.everywhere == serving.of, "mooncake does not serve all of x"


def test_the_parameters_tuned_for_a_workload_are_in_its_field() -> None:
    families = read_tuned(OURS)
    for name in learned.names():
        tuned = [families[name][policy]["chosen"] for policy in families[name]]
        assert set(learned.variants(name)) == {*learned.field(), *tuned}
        assert families[name].keys() == set(learned.tunable())


def result(*goodput: float) -> PolicyResult:
    """A policy's, from the goodput of each window."""
    segments = [{"goodput": {"share": share}} for share in goodput]
    return PolicyResult("p", {"goodput": {"share": float(np.mean(goodput))}}, segments, np.zeros(0), [])


def test_verdicts() -> None:
    theirs = result(0.90, 0.92, 0.88, 0.91)
    assert judge(result(0.93, 0.95, 0.91, 0.93), theirs) == "better"
    assert judge(result(0.89, 0.91, 0.87, 0.905), theirs) == "worse"
    assert judge(result(0.93, 0.90, 0.86, 0.93), theirs) == "no difference"
    little = result(0.999, 0.998, 0.999, 0.998)
    assert judge(result(0.998, 0.997, 0.998, 0.997), little) == "no difference", "within what is tolerated"
    assert judge(result(0.99, 0.98, 0.99, 0.98), little) == "worse"


def test_fewer_misses_is_relative_and_over_the_middle_of_the_cells() -> None:
    base = result(0.90, 0.90)
    pairs = [(result(share, share), base) for share in (0.0, 0.95, 0.95, 0.99)]
    found = fewer_misses(pairs)
    assert found is not None
    assert found.estimate == found.low == found.high == pytest.approx(-50.0)
    assert fewer_misses([]) is None
