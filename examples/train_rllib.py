"""Train a dispatcher with RLlib's PPO: environments in several processes, on this machine or on a Ray cluster.

RLlib pins an older Gymnasium than Stable-Baselines3 wants, so it needs an environment of its own:

    python3 -m venv .venv-rllib
    .venv-rllib/bin/pip install torch 'ray[rllib]==2.60.0' -e .
    OMP_NUM_THREADS=1 .venv-rllib/bin/python examples/train_rllib.py

The network is fleetpilot's own, which scores any number of instances and masks what is not legal. Per core RLlib is
several times slower than `fleetpilot train` (it keeps an object for every episode and step), which spreads whole runs
over Ray instead: docs/training.md.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium as gym
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from fleetpilot.agents.schema import ARRAYS, sizes_for
from fleetpilot.agents.scorer import SetScorer
from fleetpilot.fleet.view import KIND_DISPATCH

SETTINGS = {
    "scenario": "bursty",
    "instances": 8,
    "load": (0.7, 1.0),
    "scored_requests": 200,
    "warmup_requests": 30,
}


class SetModule(TorchRLModule, ValueFunctionAPI):
    """fleetpilot's scorer as an actor, and a critic on what it makes of the fleet as a whole."""

    def setup(self) -> None:
        """Make the networks."""
        self.scorer = SetScorer(sizes_for([KIND_DISPATCH]))
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(self.scorer.hidden, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        scored = self.scorer(*(batch[Columns.OBS][key] for key in ARRAYS))
        return {Columns.ACTION_DIST_INPUTS: scored.logits, Columns.EMBEDDINGS: scored.context}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        """(B,) what the critic expects."""
        if embeddings is None:
            embeddings = self.scorer(*(batch[Columns.OBS][key] for key in ARRAYS)).context
        return self.critic(embeddings).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO of RLlib on bursts for eight instances.")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--runners", type=int, default=2, help="processes with environments")
    arguments = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()
        .environment("fleetpilot.envs:fleetpilot/Dispatch-v0", env_config=SETTINGS)
        .env_runners(
            num_env_runners=arguments.runners,
            num_envs_per_env_runner=32,  # one kernel call steps all of a process
            gym_env_vectorize_mode=gym.VectorizeMode.VECTOR_ENTRY_POINT,
            rollout_fragment_length=64,
        )
        .training(
            train_batch_size_per_learner=64 * 32 * max(arguments.runners, 1),
            minibatch_size=2048,
            num_epochs=4,
            lr=1e-3,
            gamma=0.99,
            lambda_=0.9,
            entropy_coeff=0.001,
            use_kl_loss=False,
            vf_clip_param=float("inf"),
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=SetModule))
    )
    algorithm = config.build_algo()
    started_s = time.monotonic()
    for iteration in range(1, arguments.iterations + 1):
        result = algorithm.train()
        decisions = result["num_env_steps_sampled_lifetime"]
        print(
            f"{iteration:3d}: {decisions:9,.0f} decisions, {decisions / (time.monotonic() - started_s):7,.0f}/s, "
            f"return {result['env_runners'].get('episode_return_mean', float('nan')):8.2f}",
            flush=True,
        )
    algorithm.stop()


if __name__ == "__main__":
    main()
