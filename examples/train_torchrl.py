"""Train a dispatcher with TorchRL's PPO.

TorchRL is not among fleetpilot's extras, so it needs an environment of its own:

    python3 -m venv .venv-torchrl
    .venv-torchrl/bin/pip install torch torchrl -e .
    OMP_NUM_THREADS=1 .venv-torchrl/bin/python examples/train_torchrl.py

The network is fleetpilot's own, which scores any number of instances and masks what is not legal. Collecting through
tensordicts is about ten times slower than through the adapter of Stable-Baselines3, which `fleetpilot train` uses.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from fleetpilot.agents.schema import ARRAYS, sizes_for
from fleetpilot.agents.scorer import SetScorer
from fleetpilot.fleet.view import KIND_DISPATCH

ENVS, STEPS, EPOCHS, BATCH = 64, 64, 4, 1024
SETTINGS: dict[str, Any] = {
    "scenario": "bursty",
    "instances": 8,
    "load": (0.7, 1.0),
    "scored_requests": 200,
    "warmup_requests": 30,
}


class Actor(nn.Module):
    """Logits of fleetpilot's scorer, whatever comes before the instances' axis."""

    def __init__(self, scorer: SetScorer):
        super().__init__()
        self.scorer = scorer

    def forward(self, *observation: Tensor) -> Tensor:
        """(..., N + 1) of the instances and of none."""
        return on_rows(lambda *rows: self.scorer(*rows).logits, observation)


class Critic(nn.Module):
    """A value from what the scorer makes of the fleet as a whole."""

    def __init__(self, scorer: SetScorer):
        super().__init__()
        self.scorer = scorer
        self.value = nn.Sequential(nn.Linear(scorer.hidden, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, *observation: Tensor) -> Tensor:
        """(..., 1) what is to come."""
        with torch.no_grad():
            context = on_rows(lambda *rows: self.scorer(*rows).context, observation)
        return self.value(context)


def on_rows(function: Any, observation: tuple[Tensor, ...]) -> Tensor:
    """Call with one axis for the batch, however many there are: TorchRL has (envs, steps)."""
    shape = observation[ARRAYS.index("request")].shape[:-1]
    result: Tensor = function(*(each.reshape(-1, *each.shape[len(shape) :]) for each in observation))
    return result.reshape(*shape, *result.shape[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO of TorchRL on bursts for eight instances.")
    parser.add_argument("--iterations", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    envs = GymWrapper(
        gym.make_vec(
            "fleetpilot.envs:fleetpilot/Dispatch-v0",
            num_envs=ENVS,
            autoreset_mode=AutoresetMode.SAME_STEP,
            **SETTINGS,
        ),
        categorical_action_encoding=True,
    )
    scorer = SetScorer(sizes_for([KIND_DISPATCH]))
    actor = ProbabilisticActor(
        TensorDictModule(Actor(scorer), in_keys=list(ARRAYS), out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        distribution_kwargs={"validate_args": False},
        return_log_prob=True,
    )
    critic = ValueOperator(Critic(scorer), in_keys=list(ARRAYS))
    advantage = GAE(gamma=0.99, lmbda=0.9, value_network=critic)
    loss_of = ClipPPOLoss(actor, critic, entropy_coeff=0.001, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=1e-3)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(ENVS * STEPS), sampler=SamplerWithoutReplacement(), batch_size=BATCH
    )
    collector = Collector(
        envs,
        actor,
        frames_per_batch=ENVS * STEPS,
        total_frames=arguments.iterations * ENVS * STEPS,
        auto_register_policy_transforms=False,
    )
    decisions, started_s = 0, time.monotonic()
    for iteration, data in enumerate(collector, 1):
        with torch.no_grad():
            advantage(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(EPOCHS):
            for batch in buffer:
                losses = loss_of(batch)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(loss_of.parameters(), 0.5)
                optimizer.step()
        decisions += ENVS * STEPS
        reward = float(data["next", "reward"].mean())
        print(
            f"{iteration:3d}: {decisions:9,d} decisions, {decisions / (time.monotonic() - started_s):7,.0f}/s, "
            f"reward per decision {reward:8.4f}",
            flush=True,
        )
    collector.shutdown()


if __name__ == "__main__":
    main()
