"""Train a dispatcher with nothing but Gymnasium and PyTorch: PPO on one page.

python examples/train_gymnasium.py

Eight instances under bursts, 64 environments in one kernel. The network scores every instance by itself and against
the others, so it works for any number of them. `fleetpilot train` does more of everything: see docs/training.md.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

ENVS, STEPS, UPDATES = 64, 64, 60
EPOCHS, BATCH, CLIP, ENTROPY = 4, 1024, 0.2, 0.002
TAU_S, TRACE_S, REWARD_SCALE = 20.0, 2.0, 0.1
SETTINGS: dict[str, Any] = {
    "scenario": "bursty",
    "instances": 8,
    "load": (0.7, 1.0),
    "scored_requests": 200,
    "warmup_requests": 30,
}


class Network(nn.Module):
    """Scores of the instances and of none, and the value of the state."""

    def __init__(self, instance: int, rest: int, hidden: int = 32):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(instance + rest, hidden), nn.ReLU())
        self.context = nn.Sequential(nn.Linear(2 * hidden + rest, hidden), nn.ReLU())
        self.score = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.none = nn.Linear(hidden, 1)
        self.value = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        nn.init.constant_(self.none.bias, -4.0)  # do not hold requests before there is a reason to

    def forward(self, instances: Tensor, rest: Tensor, mask: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        """(B, N, F), (B, R) and (B, N + 1) to a distribution of N + 1 choices, and (B,) values."""
        count = instances.shape[1]
        embedding = self.embed(torch.cat([instances, rest.unsqueeze(1).expand(-1, count, -1)], dim=2))
        context = self.context(torch.cat([embedding.mean(dim=1), embedding.amax(dim=1), rest], dim=1))
        scores = self.score(torch.cat([embedding, context.unsqueeze(1).expand(-1, count, -1)], dim=2)).squeeze(2)
        logits = torch.cat([scores, self.none(context)], dim=1).masked_fill(mask == 0, -1e8)
        return torch.distributions.Categorical(logits=logits, validate_args=False), self.value(context).squeeze(1)


def tensors(observations: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    rest = np.concatenate([observations["request"], observations["fleet"]], axis=1)
    return tuple(map(torch.as_tensor, (observations["instances"], rest, observations["action_mask"])))  # type: ignore[return-value]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    envs: Any = gym.make_vec(
        "fleetpilot.envs:fleetpilot/Dispatch-v0", num_envs=ENVS, autoreset_mode=AutoresetMode.SAME_STEP, **SETTINGS
    )
    shapes = {key: space.shape for key, space in envs.single_observation_space.spaces.items()}
    network = Network(shapes["instances"][1], shapes["request"][0] + shapes["fleet"][0])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    observations, _ = envs.reset(seed=1)
    attainments: list[float] = []

    for update in range(1, UPDATES + 1):
        seen, actions, log_probs, values = [], [], [], []
        rewards, goes_on, dt_s = np.zeros((3, STEPS, ENVS), np.float32)
        for step in range(STEPS):
            with torch.no_grad():
                inputs = tensors(observations)
                distribution, value = network(*inputs)
                action = distribution.sample()
            seen.append(inputs)
            actions.append(action)
            log_probs.append(distribution.log_prob(action))
            values.append(value)
            observations, reward, terminated, truncated, infos = envs.step(action.numpy())
            rewards[step], dt_s[step] = REWARD_SCALE * reward, infos["dt_s"]
            goes_on[step] = ~(terminated | truncated)
            if "final_info" in infos:
                metrics = infos["final_info"]["episode_metrics"]
                attainments += metrics["slo_attainment"][infos["_final_info"]].tolist()
        with torch.no_grad():
            values.append(network(*tensors(observations))[1])

        # Decisions are irregular in time, so both factors of the generalised advantage are too.
        gamma = torch.as_tensor(goes_on * np.exp(-dt_s / TAU_S))
        trace = torch.as_tensor(np.exp(-dt_s / TRACE_S))
        advantages = torch.zeros(STEPS, ENVS)
        last = torch.zeros(ENVS)
        for step in reversed(range(STEPS)):
            delta = torch.as_tensor(rewards[step]) + gamma[step] * values[step + 1] - values[step]
            last = delta + gamma[step] * trace[step] * last
            advantages[step] = last
        returns = (advantages + torch.stack(values[:-1])).flatten()
        advantages = advantages.flatten()
        inputs = tuple(torch.cat(parts) for parts in zip(*seen, strict=True))
        chosen, old = torch.cat(actions), torch.cat(log_probs)

        for _ in range(EPOCHS):
            for rows in torch.randperm(STEPS * ENVS).split(BATCH):
                distribution, value = network(*(part[rows] for part in inputs))
                ratio = torch.exp(distribution.log_prob(chosen[rows]) - old[rows])
                gain = (advantages[rows] - advantages[rows].mean()) / (advantages[rows].std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = nn.functional.mse_loss(value, returns[rows])
                loss = policy_loss + 0.5 * value_loss - ENTROPY * distribution.entropy().mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                optimizer.step()

        if update % 10 == 0 or update == UPDATES:
            recent = f"{np.mean(attainments[-ENVS:]):.1%}" if attainments else "-"
            print(f"{update * STEPS * ENVS:,} decisions: reward {rewards.mean():.4f}, SLO attainment {recent}")


if __name__ == "__main__":
    main()
