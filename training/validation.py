"""How good a policy is on episodes that are kept for that: the same ones each time, for every policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from fleetpilot.envs import ENVIRONMENTS, FleetVectorEnv
from fleetpilot.fleet.policy import Policy

ROWS = 16


@dataclass(frozen=True)
class Validated:
    """Episodes of one scenario.

    Attributes:
        metrics: (episodes,) of each of `fleetpilot.envs.kernel.METRICS`.
        fallback_share: of a learned policy's decisions, those that its fallback made.
    """

    metrics: dict[str, NDArray[np.float64]]
    fallback_share: float

    @property
    def cost(self) -> float:
        """Minus the mean return."""
        return -float(self.metrics["return"].mean())

    def means(self) -> dict[str, float]:
        """What is worth a curve."""
        m = self.metrics
        requests, duration_s = m["requests"].sum(), m["duration_s"].sum()
        return {
            "return": float(m["return"].mean()),
            "goodput": float(1.0 - m["misses"].sum() / requests),
            "waiting_s_per_request": float(m["waiting_s"].sum() / requests),
            "preemption_loss_s_per_request": float(m["preemption_loss_s"].sum() / requests),
            "migrations_per_request": float(m["migrations"].sum() / requests),
            "instances": float(m["instance_s"].sum() / duration_s),
            "fallback_share": self.fallback_share,
        }


def validate(
    policy: Policy, environment: str, scenarios: Mapping[str, Mapping[str, Any]], episodes: int, seed: int
) -> dict[str, Validated]:
    """Run a policy on the first `episodes` episodes of each scenario.

    Args:
        policy: answers what the agent of the environment answers.
        environment: an id of `fleetpilot.envs.ENVIRONMENTS`.
        scenarios: name -> arguments of its environments.
        episodes: of each.
        seed: of the first; the others have the next ones.
    """
    return {
        name: _episodes(policy, {**ENVIRONMENTS[environment], "scenario": name, **arguments}, episodes, seed)
        for name, arguments in scenarios.items()
    }


def _episodes(policy: Policy, arguments: dict[str, Any], episodes: int, seed: int) -> Validated:
    found: dict[str, NDArray[np.float64]] = {}
    decisions = outside = 0
    for first in range(0, episodes, ROWS):
        rows = min(ROWS, episodes - first)
        envs = FleetVectorEnv(rows, autoreset_mode=AutoresetMode.NEXT_STEP, **arguments)
        envs.reset(seed=seed + first)
        policy.reset(rows, seed)
        none = envs.single_action_space.n - 1  # type: ignore[attr-defined]
        running = np.ones(rows, np.bool_)
        while running.any():
            choice = policy.decide(envs.view).choice
            _, _, terminated, truncated, infos = envs.step(np.where(choice < 0, none, choice))
            ended = running & (terminated | truncated)
            for name, values in infos.get("episode_metrics", {}).items() if ended.any() else ():
                if not name.startswith("_"):
                    found.setdefault(name, np.zeros(episodes))[first : first + rows][ended] = values[ended]
            running &= ~ended
        envs.close()
        counts = getattr(policy, "counts", {"decisions": 0, "out_of_range": 0})
        decisions, outside = decisions + counts["decisions"], outside + counts["out_of_range"]
    return Validated(found, outside / max(decisions, 1))


def relative_cost(found: Mapping[str, Validated], reference: Mapping[str, Validated]) -> float:
    """Mean over episodes and scenarios of the cost over the mean of it and a reference's: 1 is as good, less is better.

    From 0 to 2, so that no single overloaded episode, which costs a hundred times an ordinary one, decides what is
    best.
    """
    ratios = []
    for name in reference:
        ours, theirs = found[name].metrics["return"], reference[name].metrics["return"]
        ratios.append(np.mean(2.0 * ours / np.minimum(ours + theirs, -1e-9)))
    return float(np.mean(ratios))
