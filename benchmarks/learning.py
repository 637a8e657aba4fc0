"""Speed of learning and of learned policies.

python benchmarks/learning.py

PPO end to end, 16 instances, the set scorer, against Stable-Baselines3's own MLP on an environment that costs nothing
and has observations of the same size: the share of the machine's best that training here reaches. Then a decision of
an exported policy, features included, and the network alone, in compiled loops and in ONNX Runtime.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from _report import machine, print_table, spread
from gymnasium.spaces import Box, Discrete
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv
from torch.distributions import Distribution

from fleetpilot.agents import load_export
from fleetpilot.agents.export import export_policy
from fleetpilot.agents.inference import score_rows
from fleetpilot.agents.runtime import OnnxNetwork
from fleetpilot.agents.sb3_policy import SetPolicy
from fleetpilot.agents.schema import ARRAYS
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.fleet.view import KIND_DISPATCH, FleetView
from fleetpilot.training.environments import TrainingEnvs
from fleetpilot.training.ppo import FleetPPO

ROWS, STEPS, INSTANCES = 128, 64, 16
PPO_SETTINGS: dict[str, Any] = {"n_steps": STEPS, "batch_size": 2048, "n_epochs": 4, "device": "cpu", "seed": 0}
ROUNDS, ROLLOUTS = 5, 6
CALLS = 5_000


class Trivial(VecEnv):
    """Random observations and rewards, made beforehand: what remains is Stable-Baselines3."""

    def __init__(self, rows: int, size: int, actions: int):
        rng = np.random.default_rng(0)
        self.observations = rng.random((16, rows, size), np.float32)
        self.rewards = rng.random((16, rows), np.float32)
        self.steps = 0
        super().__init__(rows, Box(0.0, 1.0, (size,), np.float32), Discrete(actions))

    def reset(self) -> Any:
        """The first observations."""
        return self.observations[0]

    def step_async(self, actions: Any) -> None:
        """Nothing depends on them."""

    def step_wait(self) -> Any:
        """The next observations; episodes never end."""
        self.steps += 1
        now = self.steps % 16
        return self.observations[now].copy(), self.rewards[now], np.zeros(self.num_envs, bool), [{}] * self.num_envs

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Nothing has any."""
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Nothing to set."""

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Nothing to call."""
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """It is not."""
        return [False] * self.num_envs


class Timed:
    """CPU time spent in a function."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.cpu_s = function, 0.0

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        started = time.process_time()
        try:
            return self.function(*args)
        finally:
            self.cpu_s += time.process_time() - started


def rate(model: Any) -> float:
    """Decisions per CPU-second of rollouts and updates."""
    decisions = ROLLOUTS * STEPS * ROWS
    started = time.process_time()
    model.learn(decisions, reset_num_timesteps=False)
    return decisions / (time.process_time() - started)


def measure_training() -> None:
    """The set scorer on the fleet against the MLP on nothing, turn by turn."""
    settings = {"instances": INSTANCES, "scored_requests": 200, "warmup_requests": 30}
    envs = TrainingEnvs("fleetpilot/Dispatch-v0", {"steady": settings}, ROWS, group=4)
    scorer = FleetPPO(
        SetPolicy,
        envs,
        rollout_buffer_kwargs={"tau_s": 20.0, "trace_s": 2.0, "scale": 0.1},
        **PPO_SETTINGS,
    )
    scorer.rollout_buffer.envs = envs  # type: ignore[attr-defined]
    size = sum(int(np.prod(space.shape)) for space in envs.observation_space.spaces.values())  # type: ignore[attr-defined]
    mlp = PPO("MlpPolicy", Trivial(ROWS, size, INSTANCES + 1), **PPO_SETTINGS)
    step = Timed(envs.step_wait)
    envs.step_wait = step  # type: ignore[method-assign]
    rate(scorer), rate(mlp)
    scorer_rates, mlp_rates, shares = [], [], []
    for _ in range(ROUNDS):
        before, started = step.cpu_s, time.process_time()
        scorer_rates.append(rate(scorer))
        shares.append((step.cpu_s - before) / (time.process_time() - started))
        mlp_rates.append(rate(mlp))
    print(f"PPO, set scorer, {ROWS} x {INSTANCES} instances: decisions per CPU-s {spread(scorer_rates)}")
    print(f"  share of the environment {spread(shares, '.1%')}")
    print(f"PPO, MLP of Stable-Baselines3 on {size} numbers that cost nothing: {spread(mlp_rates)}")
    ratios = [one / other for one, other in zip(scorer_rates, mlp_rates, strict=True)]
    print(f"  the scorer's rate over it {spread(ratios, '.2f')}")


def p50_us(call: Callable[[], Any]) -> float:
    """Median time of a call."""
    for _ in range(CALLS // 10):
        call()
    times = np.empty(CALLS)
    for n in range(CALLS):
        started = time.perf_counter()
        call()
        times[n] = time.perf_counter() - started
    return float(np.median(times)) * 1e6


def measure_decisions() -> None:
    """Decisions of an export."""
    space = FleetVectorEnv(1, instances=2).single_observation_space
    scorer = SetPolicy(space, Discrete(3), lambda _: 1e-3).scorer
    for key in ("instances", "request", "fleet"):
        getattr(scorer, f"low_{key}").fill_(-10.0)
        getattr(scorer, f"high_{key}").fill_(10.0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder)
        export_policy(scorer, (KIND_DISPATCH,), export, fallback="lmetric", mode="greedy", provenance={})
        policy, onnx = load_export(export), OnnxNetwork(export)
        for instances in (4, 16, 64, 256):
            envs = FleetVectorEnv(1, instances=instances, scored_requests=50, warmup_requests=20)
            observations, _ = envs.reset(seed=1)
            view = FleetView(*(array.copy() for array in vars(envs.view).values()))
            arrays = [observations[key] for key in ARRAYS]
            said = np.empty((1, instances + 1), np.float32), np.empty(1, np.float32), np.empty(1, np.bool_)
            decision = p50_us(lambda: policy.decide(view))  # noqa: B023
            bare = p50_us(lambda: score_rows(policy._address, *arrays, *said))  # noqa: B023
            other = p50_us(lambda: onnx.logits(observations))  # noqa: B023
            cells = (decision, bare, other, decision / bare, decision / other)
            rows.append([str(instances), *(f"{c:.1f}" for c in cells[:3]), *(f"{c:.2f}" for c in cells[3:])])
    print("A decision of an export, p50 in us; calls from Python, all of them")
    print_table(["instances", "decision", "network", "ONNX Runtime", "over network", "over ONNX Runtime"], rows)


def main() -> None:
    torch.set_num_threads(1)
    Distribution.set_default_validate_args(False)
    gym.logger.min_level = gym.logger.ERROR
    print(machine())
    measure_decisions()
    measure_training()


if __name__ == "__main__":
    main()
