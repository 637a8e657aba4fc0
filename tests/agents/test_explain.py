"""Explanations: the effects are those of the features that the network reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch
from networks import some_scorer

from fleetpilot.agents import LearnedPolicy
from fleetpilot.agents.explain import explain, recorded_view
from fleetpilot.agents.export import network_of
from fleetpilot.fleet.features import INSTANCE_FEATURES

NAMES = [feature.name for feature in INSTANCE_FEATURES]


def policy_that_reads(name: str) -> LearnedPolicy:
    """Prefers little of one feature and sees nothing else."""
    scorer = some_scorer()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.zero_()
        scorer.instance.weight[0, NAMES.index(name)] = 1.0
        scorer.key.weight[0, 0] = 1.0
        scorer.score.weight[0, 0] = -5.0
        scorer.gate_bias[0] = -5.0
    return LearnedPolicy("reader", network_of(scorer, (0,)), "lmetric")


def test_only_the_feature_that_the_policy_reads_has_an_effect(tmp_path: Path) -> None:
    policy = policy_that_reads("load")
    view = recorded_view(policy, "bursty", 4, 60, load=0.9)
    said = explain(policy, view)
    load = said.values[:, NAMES.index("load")]
    assert said.choice == int(load.argmin())
    effects = said.effects[:, NAMES.index("load")]
    assert np.all((effects > 0) == (load < load.mean() - 1e-6))
    assert np.abs(np.delete(said.effects, NAMES.index("load"), axis=1)).max() < 1e-5
    assert said.probability.sum() == pytest.approx(1.0)
    assert f"chooses instance {said.choice}" in said.text()
    table, picture = said.write(tmp_path)
    assert len(table.read_text().splitlines()) == 1 + 4 * len(NAMES)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_decision_that_the_episode_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="decision 1000000: the episode has"):
        recorded_view(policy_that_reads("load"), "llumnix/M-M", 1, 1_000_000)
