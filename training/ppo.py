"""PPO with a discount by time and a baseline per workload: `FleetPPO`.

Decisions are milliseconds to a second apart, and their effects come seconds later, so a constant factor per decision
would mean another horizon at every rate. A step that takes ``dt_s`` is discounted by ``exp(-dt_s / tau_s)``, and the
trace of the generalised advantage decays by ``exp(-dt_s / trace_s)``.

What requests come in the next seconds moves returns more than any one decision does. Rows of a group meet the same
requests (`fleetpilot.training.environments`), so the mean advantage of the group's other rows at the same simulated
time is an estimate of just that, independent of the row's own action; it is subtracted (Mao et al., Variance reduction
for reinforcement learning in input-driven environments, ICLR 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.utils import update_learning_rate
from torch import Tensor

from fleetpilot.agents.schema import PRESENT
from fleetpilot.envs.rewards import COMPONENTS
from fleetpilot.training.environments import TrainingEnvs

_EPISODE_S = 1e9  # longer than any episode: parts the times of consecutive ones


class TimedRolloutBuffer(DictRolloutBuffer):
    """A rollout whose steps have durations.

    Args:
        tau_s: (rows,) of the discount.
        trace_s: (rows,) of the advantage's trace.
        scale: (rows,) factor on rewards, for the critic's sake.

    Attributes:
        envs: whose steps are added; set before the first one.
    """

    envs: TrainingEnvs

    def __init__(self, *args: Any, tau_s: float, trace_s: float, scale: float, **kwargs: Any):
        self.tau_s, self.trace_s, self.scale = tau_s, trace_s, scale
        self.clock_s: NDArray[np.float64] = np.zeros(0)
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Empty it; the rows' clocks go on."""
        super().reset()
        self.dt_s = np.zeros((self.buffer_size, self.n_envs))
        self.time_s = np.zeros((self.buffer_size, self.n_envs))
        self.components: NDArray[np.float64] = np.zeros(len(COMPONENTS))
        if len(self.clock_s) != self.n_envs:
            self.clock_s = np.zeros(self.n_envs)

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """As Stable-Baselines3 calls it, after the step."""
        dt_s = self.envs.dt_s
        self.components += self.envs.components.mean(axis=0)
        started = np.asarray(episode_start, bool)
        self.clock_s[started] = (np.floor(self.clock_s[started] / _EPISODE_S) + 1.0) * _EPISODE_S
        self.dt_s[self.pos], self.time_s[self.pos] = dt_s, self.clock_s
        self.clock_s = self.clock_s + dt_s
        super().add(obs, action, self.scale * np.asarray(reward), episode_start, value, log_prob)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: NDArray[Any]) -> None:
        """Generalised advantages by time, less the baseline of each workload; returns are without it."""
        gamma = np.exp(-self.dt_s / self.tau_s)
        decay = gamma * np.exp(-self.dt_s / self.trace_s)
        next_values = np.concatenate([self.values[1:], last_values.cpu().numpy().reshape(1, -1)])
        goes_on = 1.0 - np.concatenate([self.episode_starts[1:], dones.reshape(1, -1).astype(np.float32)])
        delta = self.rewards + gamma * next_values * goes_on - self.values
        advantage = np.zeros(self.n_envs)
        for step in reversed(range(self.buffer_size)):
            advantage = delta[step] + decay[step] * goes_on[step] * advantage
            self.advantages[step] = advantage
        self.returns = self.advantages + self.values
        self.advantages -= workload_baseline(self.advantages, self.time_s, self.envs.group)


def workload_baseline(advantages: NDArray[np.float32], time_s: NDArray[np.float64], group: int) -> NDArray[np.float32]:
    """(steps, rows) the mean advantage of the group's other rows at the time of each step.

    Args:
        advantages: (steps, rows).
        time_s: (steps, rows) rising; episodes more than 1e8 s apart.
        group: consecutive rows that meet the same requests.
    """
    baseline = np.zeros_like(advantages)
    if group == 1:
        return baseline
    for row in range(advantages.shape[1]):
        total, count = np.zeros(len(advantages)), np.zeros(len(advantages))
        first = row - row % group
        for other in range(first, first + group):
            if other != row:
                at = np.searchsorted(time_s[:, other], time_s[:, row], side="right") - 1
                same = (at >= 0) & (time_s[:, row] - time_s[at, other] < 0.1 * _EPISODE_S)
                total += np.where(same, advantages[at, other], 0.0)
                count += same
        baseline[:, row] = total / np.maximum(count, 1.0)
    return baseline


def advantage_sizes(advantages: NDArray[np.float32], group: int, scenarios: int) -> NDArray[np.float32]:
    """(rows,) what to divide advantages by, so that each group of rows counts alike.

    A decision in an overloaded fleet moves a hundred times what one at ordinary load does; undivided, such rows would
    be all that is learned from. It is the root mean square over the group, at least the median of those of its
    scenario: where decisions hardly matter, noise is not blown up.

    Args:
        advantages: (steps, rows).
        group: consecutive rows that meet the same requests.
        scenarios: each has as many consecutive rows.
    """
    squares = np.square(advantages).mean(axis=0).reshape(scenarios, -1, group)
    sizes = np.sqrt(squares.mean(axis=2))
    sizes = np.maximum(sizes, np.median(sizes, axis=1, keepdims=True))
    return np.repeat(np.maximum(sizes, 1e-8).ravel(), group)


class FleetPPO(PPO):
    """PPO on `TrainingEnvs` with a `TimedRolloutBuffer`.

    Args:
        decisions: of the whole run, over which the learning rate falls to a tenth.
        critic_decisions: in the first so many decisions the critic alone learns: after imitation the policy is good,
            and the advantages of an untrained critic would spoil it.
        **kwargs: of `PPO`.
    """

    def __init__(self, policy: Any, env: Any, *, decisions: int = 1, critic_decisions: int = 0, **kwargs: Any):
        self.decisions = decisions
        self.critic_decisions = critic_decisions
        super().__init__(policy, env, rollout_buffer_class=TimedRolloutBuffer, **kwargs)

    def _update_learning_rate(self, optimizers: Any) -> None:
        """By the share of the whole run, of which `learn` may be a part."""
        rate = self.lr_schedule(1.0) * max(1.0 - self.num_timesteps / self.decisions, 0.1)
        self.logger.record("train/learning_rate", rate)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            update_learning_rate(optimizer, rate)

    def train(self) -> None:
        """Update the critic, and the policy once it is time to."""
        buffer: Any = self.rollout_buffer
        widen_ranges(self.policy.scorer, buffer.observations)  # type: ignore[union-attr, operator]
        for name, value in zip(COMPONENTS, buffer.components / buffer.buffer_size, strict=True):
            self.logger.record(f"reward/{name}", float(value))
        if self.num_timesteps > self.critic_decisions:
            buffer.advantages /= advantage_sizes(buffer.advantages, buffer.envs.group, len(buffer.envs.scenarios))
            super().train()
        else:
            self._train_critic()

    def _train_critic(self) -> None:
        critic: Any = self.policy.value_net
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
        loss = torch.zeros(())
        for _ in range(self.n_epochs):
            for batch in self.rollout_buffer.get(self.batch_size):
                with torch.no_grad():
                    features: Any = self.policy.extract_features(batch.observations)
                    summary = self.policy.mlp_extractor.forward_critic(features)
                loss = torch.nn.functional.mse_loss(critic(summary).flatten(), batch.returns)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        self.logger.record("train/value_loss", loss.item())


def widen_ranges(scorer: Any, observations: Mapping[str, NDArray[np.float32]]) -> None:
    """Note what the features have been, for an export to say where the policy is at home."""
    instances = observations["instances"].reshape(-1, observations["instances"].shape[-1])
    scorer.widen_ranges(
        instances[instances[:, PRESENT] > 0],
        *(observations[key].reshape(-1, observations[key].shape[-1]) for key in ("request", "fleet")),
    )
