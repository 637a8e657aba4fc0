"""Train MaskablePPO on a small fleet and compare it with random choices and join-shortest-queue, in less than a minute.

python examples/train_sb3.py

Needs the extra `train`. So short a training shows how it is done, not what can be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO

from fleetpilot.envs.sb3 import SB3VecEnv
from fleetpilot.fleet.features import INSTANCE_FEATURES

INSTANCES = 4
EPISODES = 32
SETTINGS = {"scenario": "bursty", "instances": INSTANCES, "load": 0.9, "scored_requests": 100, "warmup_requests": 30}
LOAD = [feature.name for feature in INSTANCE_FEATURES].index("load")

Choose = Callable[[dict[str, NDArray[np.float32]]], NDArray[np.int64]]


def environments(rows: int, mode: AutoresetMode) -> Any:
    return gym.make_vec("fleetpilot.envs:fleetpilot/Dispatch-v0", num_envs=rows, autoreset_mode=mode, **SETTINGS)


def evaluate(choose: Choose) -> tuple[float, float]:
    """Mean return and SLO attainment of the first episodes of `EPISODES` rows: the same requests for every policy."""
    envs = environments(EPISODES, AutoresetMode.NEXT_STEP)
    observations, _ = envs.reset(seed=1_000)
    running = np.ones(EPISODES, bool)
    returns, attainments = np.zeros(EPISODES), np.zeros(EPISODES)
    while running.any():
        observations, _, terminated, truncated, infos = envs.step(choose(observations))
        ended = running & (terminated | truncated)
        if ended.any():
            returns[ended] = infos["episode_metrics"]["return"][ended]
            attainments[ended] = infos["episode_metrics"]["slo_attainment"][ended]
            running &= ~ended
    return float(returns.mean()), float(attainments.mean())


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    model = MaskablePPO(
        "MultiInputPolicy",
        SB3VecEnv(environments(64, AutoresetMode.SAME_STEP)),
        n_steps=128,
        batch_size=2048,
        n_epochs=4,
        gamma=0.99,
        learning_rate=2e-3,
        seed=0,
        device="cpu",
    )

    def learned(observations: dict[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        # Sampled: the one instance that looks best would draw all requests between two looks at it.
        return np.asarray(model.predict(observations, action_masks=observations["action_mask"] > 0)[0])

    def random(observations: dict[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        return rng.integers(0, INSTANCES, EPISODES)

    def shortest_queue(observations: dict[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        return np.argmin(observations["instances"][:, :, LOAD], axis=1)

    model.learn(600_000)
    for name, choose in {"random": random, "shortest queue": shortest_queue, "MaskablePPO": learned}.items():
        mean_return, attainment = evaluate(choose)
        print(f"{name:15s} return {mean_return:8.2f}, SLO attainment {attainment:.1%}")


if __name__ == "__main__":
    main()
