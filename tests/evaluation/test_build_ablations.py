"""The ablations of the recipe of `learned`: what is changed, and nothing else."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fleetpilot.evaluation.experiments import learned
from fleetpilot.training.config import TrainConfig, load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "build_ablations.py")))


@pytest.fixture(scope="module")
def recipe(tool: SimpleNamespace) -> TrainConfig:
    return tool.shortened(load_config("dispatch"))  # type: ignore[no-any-return]


def test_all_have_a_fifth_of_the_decisions(tool: SimpleNamespace, recipe: TrainConfig) -> None:
    whole = load_config("dispatch")
    assert whole.imitation is not None
    fifth = (whole.decisions + whole.imitation.decisions) / 5
    for variant in tool.VARIANTS.values():
        config = variant(recipe)
        assert config.decisions + (config.imitation.decisions if config.imitation else 0) == fifth


def test_nobody_is_taught_by_the_policy_that_has_had_all(recipe: TrainConfig) -> None:
    assert recipe.imitation is not None
    assert len(recipe.imitation.policies) > 3
    assert not any(name.startswith("learned") for name in recipe.imitation.policies)


def test_without_randomisation_nothing_is_a_range(tool: SimpleNamespace, recipe: TrainConfig) -> None:
    config = tool.without_randomisation(recipe)
    for changes in (config.changes, *config.scenarios.values()):
        assert not any(isinstance(value, list | tuple) for value in changes.values())
    assert (config.changes["fleet_size"], config.changes["hardware_error"]) == (10, 0.0)
    assert config.scenarios["agents"]["load"] == pytest.approx(0.75)


def test_privileged_state_is_known_in_training_and_in_the_test(tool: SimpleNamespace, recipe: TrainConfig) -> None:
    config = tool.privileged(recipe)
    assert all(arguments["predictor_error"] == 0.0 for arguments in config.environments().values())
    (cell,) = learned.cells("bursty", learned.DEVELOPMENT, learned.Size(windows=1, share=0.02, loads=(0.8,)))
    known = tool.knowing(cell)
    assert (known.fleet.telemetry.poll_interval_s, known.fleet.telemetry.poll_delay_s) == (0.05, 0.0)
    (table,), (usual,) = known.segments, cell.segments
    assert np.array_equal(table.predicted_output_tokens, usual.output_tokens)
    assert not np.array_equal(usual.predicted_output_tokens, usual.output_tokens)
    assert replace(known, fleet=cell.fleet, segments=cell.segments) == cell


def test_a_variant_is_compared_with_the_recipe_seed_by_seed(tool: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    whole = {"w": rng.uniform(0, 10, (3, 6)), "v": rng.uniform(0, 10, (3, 6))}
    worse = {name: values + 1.5 for name, values in whole.items()}
    costs = {tool.WHOLE: [1.0, 1.0, 1.0], "no imitation": [1.2, 1.3, 1.25]}
    rows = tool.table({tool.WHOLE: whole, "no imitation": worse}, costs).rows
    assert rows[0][3].text == ""
    assert rows[1][1].text == "1.200 1.300 1.250"
    assert rows[1][3].text == "+1.50 [+1.50, +1.50]"
