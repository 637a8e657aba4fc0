"""Stable-Baselines3 trains on the environment as it comes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")

import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO

from fleetpilot.envs.sb3 import SB3VecEnv

torch.set_num_threads(1)  # the tests' networks are too small for more


def environments(**changes: Any) -> SB3VecEnv:
    settings = {"instances": 4, "warmup_requests": 10, "scored_requests": 25, **changes}
    vector_env = gymnasium.make_vec(
        "fleetpilot.envs:fleetpilot/Dispatch-v0", num_envs=8, autoreset_mode=AutoresetMode.SAME_STEP, **settings
    )
    return SB3VecEnv(vector_env)


@pytest.mark.parametrize("algorithm", [PPO, MaskablePPO])
def test_ppo_runs_and_counts_episodes(algorithm: Any) -> None:
    model = algorithm("MultiInputPolicy", environments(), n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.learn(1_200)
    episodes = list(model.ep_info_buffer)
    assert len(episodes) > 3
    assert all(episode["r"] < 0 and episode["l"] > 10 for episode in episodes)


def test_maskable_ppo_takes_no_illegal_action() -> None:
    envs = environments(fleet_size=(1, 3))
    model = MaskablePPO("MultiInputPolicy", envs, n_steps=16, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.learn(600)
    assert envs.vector_env.unwrapped._cluster.state.env["invalid"].sum() == 0  # type: ignore[attr-defined]


def test_the_metrics_of_an_episode_reach_the_infos() -> None:
    envs = environments()
    envs.seed(0)
    envs.reset()
    seen = {}
    for step in range(300):
        _, _, dones, infos = envs.step(np.full(8, step % 4))
        for row in np.flatnonzero(dones):
            seen = infos[row]
    assert seen["episode_metrics"]["decisions"] == seen["episode"]["l"]
    assert seen["episode_metrics"]["return"] == pytest.approx(seen["episode"]["r"], abs=1e-4)
    assert seen["TimeLimit.truncated"] is False
