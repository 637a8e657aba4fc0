"""Policies over several scenarios, from results written down by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation import Scenario, cut, evaluate
from fleetpilot.evaluation.comparison import (
    COMPARED,
    GOODPUT,
    PolicyResult,
    ScenarioResult,
    collect,
    difference,
    trained_difference,
)
from fleetpilot.evaluation.overview import common_policies, leaders_table, overview_table
from fleetpilot.evaluation.statistics import holm
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload


def policy(name: str, goodputs: list[float]) -> PolicyResult:
    """Of segments with these goodputs in %."""
    segments: list[dict[str, Any]] = [{"goodput": {"share": value / 100}} for value in goodputs]
    pooled = {"goodput": {"share": float(np.mean(goodputs)) / 100}}
    return PolicyResult(name, pooled, segments, np.zeros(0), [])


def result(name: str, **goodputs: list[float]) -> ScenarioResult:
    policies = [policy(of.replace("_", "-"), values) for of, values in goodputs.items()]
    found = {(of.policy, GOODPUT.title): difference(of, policies[0], GOODPUT) for of in policies[1:]}
    return ScenarioResult(name, policies, found)


CALM = result("calm", round_robin=[90.0, 92.0, 91.0, 93.0], lmetric=[95.0, 96.0, 97.0, 98.0], hasty=[99.0] * 4)
STORM = result("storm", round_robin=[40.0, 50.0, 30.0, 20.0], lmetric=[60.0, 70.0, 50.0, 60.0], hasty=[10.0] * 4)


def test_the_leader_of_each_scenario_is_named() -> None:
    table = leaders_table([CALM, STORM])
    assert [[cell.text for cell in row[:4]] for row in table.rows] == [
        ["calm", "hasty", "99.0", "91.5"],
        ["storm", "lmetric", "60.0", "35.0"],
    ]


def test_over_all_scenarios_the_middle_half_of_all_segments_counts() -> None:
    table = overview_table([CALM, STORM])
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["round-robin"][0] == f"{(40 + 50 + 90 + 91) / 4:.1f}"
    assert rows["lmetric"][0] == f"{(60 + 70 + 95 + 96) / 4:.1f}"
    assert rows["lmetric"][2].startswith(f"+{(5 + 6 + 20 + 20) / 4:.1f}")  # of 4 5 5 6 20 20 20 40
    assert rows["lmetric"][3] == "100"
    assert rows["hasty"][3] == "50"
    assert [row[0].text for row in table.rows if row[1].best] == ["lmetric"]


def test_only_policies_that_are_everywhere_are_compared_over_all() -> None:
    assert common_policies([CALM, result("alone", round_robin=[1.0, 2.0], hasty=[1.0, 2.0])]) == [
        "round-robin",
        "hasty",
    ]


def test_p_values_are_adjusted_over_the_scenarios(tmp_path: Any) -> None:
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 2)
    segments = cut(workload("poisson?n=200&rate=2.5"), 2)
    scenarios = [Scenario(name, segments, fleet, warmup_share=share) for name, share in (("one", 0.0), ("two", 0.1))]
    runs = evaluate(scenarios, ["round-robin", "random"], tmp_path, seeds=(0,), workers=1)
    together = collect(runs)
    alone = [difference(of.policies[1], of.baseline, metric) for of in together for metric in COMPARED]
    for place, metric in enumerate(COMPARED):
        expected = holm(np.array([alone[place].p, alone[place + len(COMPARED)].p], np.float64))
        found = [of.differences["random", metric.title].p for of in together]
        assert found == pytest.approx(expected.tolist())


def test_a_method_is_judged_over_its_training_seeds() -> None:
    """By hand: +2, +4 and +6 points on average, the same on every segment: only the training is uncertain."""
    baseline = policy("round-robin", [50.0, 60.0, 70.0])
    trainings = [policy(f"seed {gain}", [50 + gain, 60 + gain, 70 + gain]) for gain in (2.0, 4.0, 6.0)]
    found = trained_difference(trainings, baseline, GOODPUT)
    assert found is not None
    assert found.both.estimate == pytest.approx(4.0)
    assert found.traces.low == pytest.approx(4.0)
    assert found.traces.high == pytest.approx(4.0)
    assert (found.training.low, found.training.high) == pytest.approx((2.0, 6.0), abs=0.7)
    assert trained_difference(trainings[:1], baseline, GOODPUT) is None
