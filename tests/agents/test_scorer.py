"""The network: no instance is special, any number of them will do, illegal choices are never taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from networks import ALL_KINDS, fleet_envs, logits_of, some_scorer
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO

from fleetpilot.agents.sb3_policy import MaskableSetPolicy, SetPolicy
from fleetpilot.agents.schema import ARRAYS, ILLEGAL, PRESENT, sizes_for
from fleetpilot.agents.scorer import SetScorer, likeliest, log_odds_of_none
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.envs.sb3 import SB3VecEnv
from fleetpilot.fleet.features import KINDS

torch.set_num_threads(1)


@pytest.mark.parametrize("instances", [1, 2, 8, 32])
def test_permuting_the_instances_permutes_the_logits(instances: int) -> None:
    scorer = some_scorer(ALL_KINDS)
    observations, _ = fleet_envs(16, instances).reset(seed=1)
    order = np.random.default_rng(0).permutation(instances)
    choices = np.append(order, instances)
    permuted = {
        **observations,
        "instances": observations["instances"][:, order],
        "action_mask": observations["action_mask"][:, choices],
    }
    np.testing.assert_allclose(
        logits_of(scorer, permuted), logits_of(scorer, observations)[:, choices], rtol=1e-5, atol=1e-5
    )


def test_empty_slots_change_nothing() -> None:
    scorer = some_scorer()
    observations, _ = FleetVectorEnv(4, instances=3, scored_requests=20, warmup_requests=5).reset(seed=1)
    wider = {
        **observations,
        "instances": np.pad(observations["instances"], ((0, 0), (0, 5), (0, 0))),
        "action_mask": np.insert(observations["action_mask"], [3] * 5, 0.0, axis=1),
    }
    logits, padded = logits_of(scorer, observations), logits_of(scorer, wider)
    np.testing.assert_allclose(padded[:, [0, 1, 2, 8]], logits, rtol=1e-6, atol=1e-6)
    assert np.all(padded[:, 3:8] == ILLEGAL)


def test_present_is_told_by_its_feature() -> None:
    observations, infos = fleet_envs(16, 8).reset(seed=3)
    present = (observations["instances"][:, :, PRESENT] > 0).sum(axis=1)
    np.testing.assert_array_equal(present, infos["parameters"]["fleet_size"])


def test_an_untrained_policy_dispatches_and_neither_moves_nor_scales() -> None:
    torch.manual_seed(0)
    scorer = SetScorer(sizes_for(ALL_KINDS))
    observations, _ = fleet_envs(8).reset(seed=1)
    everything = {**observations, "action_mask": np.ones_like(observations["action_mask"])}
    for kind, name in enumerate(KINDS):
        one = {**everything, "kind": np.eye(len(KINDS), dtype=np.float32)[np.full(8, kind)]}
        odds = log_odds_of_none(torch.as_tensor(logits_of(scorer, one)))
        assert bool((odds > 2.0).all()) == (name in ("source", "scale")), name
        assert bool((odds < -2.0).all()) == (name not in ("source", "scale")), name


def test_the_gate_does_not_depend_on_how_many_instances_are_legal() -> None:
    scorer = some_scorer()
    observations, _ = FleetVectorEnv(1, instances=8, scored_requests=20, warmup_requests=5).reset(seed=1)
    odds = []
    for legal in (1, 4, 8):
        mask = np.zeros((1, 9), np.float32)
        mask[0, :legal] = mask[0, 8] = 1.0
        logits = torch.as_tensor(logits_of(scorer, {**observations, "action_mask": mask}))
        odds.append(float(log_odds_of_none(logits)))
    assert odds == pytest.approx([odds[0]] * 3, abs=1e-5)


def test_the_likeliest_choice_is_none_only_where_it_outweighs_all_instances() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.2, 0.15, 0.45], [0.2, 0.15, 0.1, 0.55]]))
    assert likeliest(logits).tolist() == [0, 3]


@pytest.mark.parametrize(("algorithm", "policy"), [(PPO, SetPolicy), (MaskablePPO, MaskableSetPolicy)])
def test_both_algorithms_train_take_no_illegal_action_and_load_for_another_fleet(
    algorithm: type, policy: type, tmp_path: object
) -> None:
    envs = SB3VecEnv(fleet_envs(8, 4, autoreset_mode=AutoresetMode.SAME_STEP))
    model = algorithm(policy, envs, n_steps=32, batch_size=128, n_epochs=1, seed=0, device="cpu")
    model.learn(512)
    assert envs.vector_env.unwrapped._cluster.state.env["invalid"].sum() == 0  # type: ignore[attr-defined]
    model.save(f"{tmp_path}/model")
    larger = fleet_envs(4, 32)
    spaces = {"observation_space": larger.single_observation_space, "action_space": larger.single_action_space}
    loaded = algorithm.load(f"{tmp_path}/model", custom_objects=spaces)  # type: ignore[attr-defined]
    observations, _ = larger.reset(seed=1)
    for _ in range(20):
        actions, _ = loaded.predict(observations, deterministic=True)
        assert np.all(observations["action_mask"][np.arange(4), actions] == 1)
        observations, *_ = larger.step(actions)
    assert larger._cluster.state.env["invalid"].sum() == 0
    weights, same = model.policy.state_dict(), loaded.policy.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_entropy_is_one_where_all_legal_choices_are_equally_likely() -> None:
    envs = SB3VecEnv(FleetVectorEnv(4, instances=6, autoreset_mode=AutoresetMode.SAME_STEP, scored_requests=20))
    policy = PPO(SetPolicy, envs, device="cpu").policy
    scorer = policy.scorer  # type: ignore[attr-defined]
    with torch.no_grad():
        scorer.score.weight.zero_()
    observations = {key: torch.as_tensor(value) for key, value in envs.reset().items()}  # type: ignore[union-attr]
    for legal in (2, 4):
        mask = torch.zeros(4, 7)
        mask[:, :legal] = 1.0
        _, _, entropy = policy.evaluate_actions({**observations, "action_mask": mask}, torch.zeros(4, 1))
        assert entropy is not None
        np.testing.assert_allclose(entropy.detach().numpy(), 1.0, atol=1e-5)


def test_the_critic_teaches_the_scorer_nothing() -> None:
    envs = SB3VecEnv(FleetVectorEnv(4, instances=6, autoreset_mode=AutoresetMode.SAME_STEP, scored_requests=20))
    policy: Any = PPO(SetPolicy, envs, device="cpu").policy
    observations = {key: torch.as_tensor(value) for key, value in envs.reset().items()}  # type: ignore[union-attr]
    values, _, _ = policy.evaluate_actions(observations, torch.zeros(4, 1))
    values.sum().backward()
    assert all(weight.grad is None or not weight.grad.any() for weight in policy.scorer.parameters())
    assert all(weight.grad.any() for weight in policy.value_net.parameters())


def test_another_observation_space_is_refused() -> None:
    space = Dict({"instances": Box(0.0, 1.0, (3, 2), np.float32)})
    with pytest.raises(ValueError, match="expected that of fleetpilot's environments"):
        SetPolicy(space, Discrete(4), lambda _: 1e-3)  # type: ignore[arg-type]


def test_the_network_reads_the_observation_s_arrays() -> None:
    assert set(fleet_envs(1).single_observation_space.spaces) == set(ARRAYS)
