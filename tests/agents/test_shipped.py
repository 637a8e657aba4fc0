"""The policies that come with fleetpilot: small, whole, at hand by a short name, and better than chance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fleetpilot.agents import SHIPPED, LearnedPolicy, load_policy
from fleetpilot.agents.runtime import CARD, NETWORK, OnnxNetwork
from fleetpilot.cluster import FleetConfig, simulate
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.evaluation import run_one
from fleetpilot.evaluation.experiments.learned import Size, cells
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload

DEVELOPMENT = "development"
WORKLOAD = "gamma?rate=60&cv=3&n=3000&predict=error:0.5"
FLEET = FleetConfig.of(load_profile("h100-llama-3.1-8b"), 8)


def test_there_is_one() -> None:
    assert "learned" in SHIPPED


@pytest.fixture(params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> LearnedPolicy:
    policy = load_policy(request.param)
    assert isinstance(policy, LearnedPolicy)
    assert policy.name == request.param
    return policy


def test_it_is_at_home_on_what_it_was_trained_for(shipped: LearnedPolicy) -> None:
    log = simulate(workload(WORKLOAD), FLEET, shipped)
    assert np.all(log.requests["finish_s"] > 0)
    assert shipped.counts["out_of_range"] < 0.05 * shipped.counts["decisions"]


def test_it_meets_more_targets_than_policies_that_look_at_less(shipped: LearnedPolicy) -> None:
    (cell,) = cells("bursty", DEVELOPMENT, Size(windows=1, share=0.2, loads=(0.95,)))

    def goodput(policy: str) -> float:
        return float(run_one(cell.segments[0], cell.fleet, load_policy(policy)).summary["metrics"]["goodput"]["share"])

    assert goodput(shipped.name) > max(goodput("join-shortest-queue"), goodput("round-robin"))


@pytest.mark.parametrize("instances", [2, 16, 64])
def test_its_network_for_other_runtimes_says_the_same(shipped: LearnedPolicy, instances: int) -> None:
    pytest.importorskip("onnxruntime")
    assert b".py" not in (SHIPPED[shipped.name] / "policy.onnx").read_bytes()  # no trace of whose files made it
    onnx = OnnxNetwork(SHIPPED[shipped.name])
    envs = FleetVectorEnv(16, scenario="bursty", instances=instances, scored_requests=30)
    observations, _ = envs.reset(seed=5)
    for _ in range(20):
        ours, theirs = shipped.score(observations).logits, onnx.logits(observations)
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-6 * np.abs(ours).max())  # float32, summed differently
        np.testing.assert_array_equal(theirs.argmax(axis=1), ours.argmax(axis=1))
        observations, *_ = envs.step(ours.argmax(axis=1))
    envs.close()


def test_it_draws_where_asked_to(shipped: LearnedPolicy) -> None:
    sampled = load_policy(f"{shipped.name}?mode=sample")
    assert sampled.name == f"{shipped.name}?mode=sample"
    greedy, drawn = (simulate(workload(WORKLOAD), FLEET, each).requests["instance"] for each in (shipped, sampled))
    assert np.any(greedy != drawn)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_small_and_says_where_it_comes_from(name: str) -> None:
    folder = SHIPPED[name]
    assert (folder / NETWORK).stat().st_size < 2_000_000
    card = json.loads((folder / CARD).read_text("utf-8"))
    assert card["provenance"]["command"].startswith("fleetpilot train --config ")
    assert "-dirty" not in card["provenance"]["commit"]
    assert str(Path.home()) not in (folder / CARD).read_text("utf-8")
