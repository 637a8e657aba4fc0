"""Serve one episode with random legal choices, and say how it went.

python examples/random_policy.py
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np


def main() -> None:
    env = gym.make("fleetpilot.envs:fleetpilot/Dispatch-v0", scenario="steady", instances=8, scored_requests=100)
    env.action_space.seed(0)
    observation, info = env.reset(seed=0)
    print(f"{info['parameters']['rate_rps']:.0f} requests/s to {info['parameters']['fleet_size']:.0f} instances")
    terminated = False
    while not terminated:
        action = env.action_space.sample(observation["action_mask"].astype(np.int8))
        observation, _, terminated, _, info = env.step(action)
    for name, value in info["episode_metrics"].items():
        print(f"{name:20s} {value:12.3f}")


if __name__ == "__main__":
    main()
