"""Latencies and costs of a policy on a drawn episode, request by request, as an evaluation measures them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.envs import ENVIRONMENTS, FleetVectorEnv
from fleetpilot.evaluation.runs import run_one
from fleetpilot.fleet.policy import Policy

_SEED = 999


def latencies(policy: Policy, environment: str, scenario: str, arguments: dict[str, Any]) -> dict[str, float]:
    """P99s of an episode of a scenario that runs on the hardware of the profile.

    The environments count costs and no latencies of single requests, so this episode is simulated apart.
    """
    settings = {**ENVIRONMENTS[environment], "scenario": scenario, **arguments}
    envs = FleetVectorEnv(1, **settings)  # knows who decides what, so what moves and scales
    limits = envs.scenario.limits(settings["instances"])
    episode = envs.scenario.draw(np.random.default_rng(_SEED), limits, {"hardware_error": 0.0})
    metrics = run_one(episode.table, episode.fleet, policy, warmup_share=0.1).summary["metrics"]
    latency, fleet = metrics["latency"], metrics["fleet"]
    values = {
        "ttft_p99_s": latency["ttft_s"]["p99"],
        "tpot_p99_s": latency["tpot_s"]["p99"],
        "itl_p99_s": latency["itl_s"]["p99"],
        "e2e_p99_s": latency["e2e_s"]["p99"],
        "run_instances": fleet["run_instances"],
    }
    return {name: float(value) for name, value in values.items() if value is not None}
