"""The experiment of "Calibrate, Then Route": it runs, and its table of signs judges rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleetpilot.baselines import load_policy
from fleetpilot.evaluation.experiments import calibrate_then_route as experiment
from fleetpilot.evaluation.experiments.calibrate_then_route import (
    CALIBRATED,
    FULL,
    HEURISTIC,
    JSQ,
    MAIN,
    MID_COLLAPSE,
    PAPER,
    PAPER_MAIN,
    ROUND_ROBIN,
    STARVED_POOLS,
    WRONG,
    Cell,
    Size,
    concentration,
    drawn,
    in_place_of,
    miscalibrated,
    mixed,
    of_weights,
    pools,
    rate_where,
    signs,
)
from fleetpilot.evaluation.runs import run_one
from fleetpilot.evaluation.tables import markdown


def cell(goodput: float) -> Cell:
    return Cell(goodput + np.array([-0.001, 0.0, 0.001]), 0.3, 0.02)


def paper_cells() -> dict[tuple[str, str], Cell]:
    """What the paper reports, and where it says that nothing changes, the same."""
    goodputs = {(MAIN, policy): goodput for policy, (goodput, _) in PAPER_MAIN.items()} | PAPER
    main = goodputs[MAIN, CALIBRATED]
    goodputs |= {(MAIN, policy): main for policy in experiment.ABLATIONS.values()}
    goodputs |= {("error 0", CALIBRATED): main, ("error 1", CALIBRATED): main - 0.005}
    goodputs |= {("2P+3D", JSQ): 0.822, ("2P+5D", ROUND_ROBIN): main}
    goodputs |= {(FULL, policy): goodputs[STARVED_POOLS, policy] for policy in (ROUND_ROBIN, CALIBRATED)}
    goodputs |= {(experiment.LONG, policy): goodputs[MAIN, policy] for policy in (ROUND_ROBIN, CALIBRATED)}
    return {key: cell(goodput) for key, goodput in goodputs.items()}


def answers(cells: dict[tuple[str, str], Cell]) -> dict[str, str]:
    table = signs(cells)
    assert table.header[-1] == "within"
    return {row[0].text: row[-1].text for row in table.rows}


def test_the_paper_itself_has_its_signs() -> None:
    assert set(answers(paper_cells()).values()) == {"yes"}


def test_another_sign_and_none_are_told() -> None:
    cells = paper_cells()
    cells[MAIN, WRONG] = cell(0.85)
    cells["chat", HEURISTIC] = Cell(cells["chat", CALIBRATED].goodput + np.array([-0.1, 0.1, 0.1]), 0.3, 0.02)
    cells["2P+6D", CALIBRATED] = cell(0.88)
    judged = answers(cells)
    assert [title for title, answer in judged.items() if answer == "no"] == [
        "wrong constants - round robin",
        "2P+6D: calibrated - round robin",
        "chat: calibrated - length heuristic",
    ]


def test_weights_are_counted_that_bring_the_papers_finding() -> None:
    routers = drawn(3)
    cells = paper_cells()
    chats = (0.70, 0.80, 0.90)  # the length heuristic meets 0.855
    cells |= {("chat", router): cell(goodput) for router, goodput in zip(routers, chats, strict=True)}
    cells |= {(MAIN, in_place_of(router)[WRONG]): cell(0.80) for router in routers}
    rows = {row[0].text: [text.text for text in row[2:]] for row in of_weights(cells, routers).rows}
    assert rows == {
        "chat: calibrated - length heuristic": ["-15.50", "-5.50", "+4.50", "below 0", "2"],
        "wrong constants - round robin": ["-3.60", "-3.60", "-3.60", "below 0", "3"],
    }


def test_other_weights_stand_for_those_set_by_hand() -> None:
    others = in_place_of("calibrated?backlog=2&queue=0.5", "length-heuristic?threshold=9")
    assert others[CALIBRATED] == "calibrated?backlog=2&queue=0.5"
    assert others[WRONG] == "calibrated?backlog=2&queue=3.7"
    assert others[HEURISTIC] == "length-heuristic?threshold=9"
    assert miscalibrated(10.0, "calibrated?backlog=2") == "calibrated?backlog=2&queue=5", "of the default"
    for router in drawn(2):
        load_policy(router)
    assert drawn(2) == drawn(3)[:2]


def test_where_memory_fills_the_pressure_term_sends_short_requests_to_the_fullest() -> None:
    with_it, without = (
        [float(cell.text) for cell in row[1:]] for row in concentration(11.5, Size(requests=1_500, traces=3)).rows
    )
    long_answer, long_prompt, both_short = (one - other for one, other in zip(with_it, without, strict=True))
    assert long_prompt > 20
    assert both_short > 20
    assert long_answer < long_prompt


def test_constants_that_are_too_small_are_a_dearer_queue() -> None:
    """All terms but the queue's are in times per token."""
    fleet, trace = pools(2, 4), mixed(13.0, 1, 300)
    profile = fleet.profiles[0]
    assert profile.name == "a40-qwen2.5-3b"
    weights = dict(part.split("=") for part in CALIBRATED.partition("?")[2].split("&"))
    scaled = {**weights, "backlog": float(weights["backlog"]) / 7.4, "work": float(weights["work"]) / 7.4}
    same = "calibrated?" + "&".join(f"{name}={value}" for name, value in scaled.items())
    one, other = (
        run_one(trace, fleet, load_policy(policy)).log.requests["instance"] for policy in (same, miscalibrated(7.4))
    )
    assert np.array_equal(one, other)


def test_the_rate_is_where_round_robin_meets_the_goodput() -> None:
    size = Size(requests=1_000, traces=3)
    rate_rps = rate_where(MID_COLLAPSE, mixed, pools(2, 4), size)
    trace = mixed(rate_rps, experiment.DEVELOPMENT_SEEDS[0], size.requests)
    run = run_one(trace, pools(2, 4), load_policy(ROUND_ROBIN))
    assert run.summary["metrics"]["goodput"]["share"] == pytest.approx(MID_COLLAPSE, abs=0.02)


def test_it_runs_and_lays_its_figures_beside_the_papers(tmp_path: Path) -> None:
    tables = experiment.run(tmp_path, workers=1, size=Size(requests=150, traces=2, drawn=2))
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows)
        assert "nan" not in markdown(table)
    shown = "\n".join(markdown(table) for table in tables)
    assert all(f"{100 * goodput:.1f}" in shown for goodput in PAPER.values())
