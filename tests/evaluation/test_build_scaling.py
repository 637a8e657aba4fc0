"""The comparison of learned scaling with a frontier of rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fleetpilot.training.config import config_to_toml, load_config, with_settings

ROOT = Path(__file__).parents[2]
COSTS, WAITS = np.array([100.0, 80.0, 90.0, 60.0]), np.array([1.0, 2.0, 2.5, 4.0])
"""Of four rules; the third is worse than the second in both."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_scaling", ROOT / "tools" / "build_scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rule_that_another_beats_in_both_is_not_on_the_frontier(tool: ModuleType) -> None:
    assert tool.frontier(COSTS, WAITS).tolist() == [0, 1, 3]
    assert tool.frontier(np.array([5.0, 5.0]), np.array([2.0, 1.0])).tolist() == [1]


def test_between_two_rules_the_frontier_is_linear_in_the_logarithm_of_the_wait(tool: ModuleType) -> None:
    assert tool.cost_at(2.0, COSTS, WAITS) == pytest.approx(80.0)
    assert tool.cost_at(np.sqrt(2.0), COSTS, WAITS) == pytest.approx(90.0)
    assert np.isnan([tool.cost_at(wait, COSTS, WAITS) for wait in (0.9, 4.1)]).all()


def points(tool: ModuleType, costs: list[float], waits: list[float]) -> object:
    """The same in three episodes."""
    return tool.Points(*(np.repeat(np.array(values)[:, None], 3, axis=1) for values in (costs, waits, waits)))


def test_what_is_saved_is_the_share_of_what_the_frontier_costs_at_the_same_wait(tool: ModuleType) -> None:
    rules = points(tool, COSTS.tolist(), WAITS.tolist())
    for by in ("p99_s", "missed"):
        saved = tool.saved(points(tool, [72.0], [2.0]), rules, by)
        assert (saved.estimate, saved.low, saved.high) == pytest.approx((0.1, 0.1, 0.1))
        assert tool.saved(points(tool, [72.0], [5.0]), rules, by) is None


def test_over_all_cases_fleets_of_all_sizes_count_alike(tool: ModuleType) -> None:
    together = tool.all_cases([points(tool, [80.0], [1.0]), points(tool, [80.0], [4.0])], [8, 16])
    assert together.instance_s[0, 0] == pytest.approx(7.5)
    assert together.p99_s[0, 0] == pytest.approx(2.0)
    assert together.missed[0, 0] == pytest.approx(2.5)


def trained(tool: ModuleType, costs: list[list[float]]) -> object:
    """Of one or several seeds, the same in all else."""
    return tool.Trained(np.array(costs), goodput=0.99, instances=5.0, migrations=0.01, fallback=0.0)


def test_policies_stand_by_rising_cost_beside_the_reference(tool: ModuleType) -> None:
    found = {"rule": trained(tool, [[2.0, 2.0]]), "mine": trained(tool, [[1.8, 1.8]])}
    rows = [[cell.text for cell in row] for row in tool.rows_beside(found, "rule", "8 slots: ")]
    assert rows == [
        ["8 slots: mine", "1.80", "99.0", "5.00", "10.0", "0.00", "-10.0 [-10.0, -10.0]"],
        ["8 slots: rule", "2.00", "99.0", "5.00", "10.0", "0.00", ""],
    ]


def test_a_difference_is_of_the_reference_with_the_same_seed_and_episodes(tool: ModuleType) -> None:
    full = trained(tool, [[1.0, 3.0], [3.0, 1.0]])
    shifted = tool.difference(trained(tool, [[1.2, 3.2], [3.2, 1.2]]), full)
    assert (shifted.estimate, shifted.low, shifted.high) == pytest.approx((0.1, 0.1, 0.1))
    without_training = tool.difference(trained(tool, [[2.0, 2.0]]), full)
    assert without_training.low < without_training.estimate == 0.0 < without_training.high


def test_an_ablation_is_run_with_its_own_deciders_on_the_episodes_of_the_full_recipe(
    tool: ModuleType, tmp_path: Path
) -> None:
    scale = load_config("scale")
    settings = {"changes.others": "infaas++", "changes.load": 0.9}
    (tmp_path / "training.toml").write_text(config_to_toml(with_settings(scale, settings)))
    arguments = scale.environments()["tides"]
    assert tool.own_part(arguments, [str(tmp_path)]) == {**arguments, "others": "infaas++"}
    assert arguments["load"] == (0.3, 0.65)
