"""Rewards against a recount from the log of the same run, and against tricks."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.utils import seeding
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import RunLog, simulate
from fleetpilot.envs import FleetEnv, FleetVectorEnv, RewardWeights
from fleetpilot.envs import rewards as module
from fleetpilot.envs.rewards import COMPONENTS
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import NONE, Decision, FleetView

NONE_ACTION = 4
SCARCE = load_profile("h100-llama-3.1-8b").replace(kv_blocks=1_200, max_model_len=16_384)
"""So little memory that engines preempt."""
SETTINGS: dict[str, Any] = {
    "instances": 4,
    "profile": SCARCE,
    "hardware_error": 0.0,
    "load": 1.1,
    "warmup_requests": 30,
    "scored_requests": 60,
}

Rule = Callable[[int, NDArray[np.bool_]], int]


def scattered(decision: int, mask: NDArray[np.bool_]) -> int:
    """Unevenly over the instances, holding one request in nine."""
    return NONE_ACTION if decision % 9 == 0 and mask[-1] else (decision * decision) % 4


def always_hold(decision: int, mask: NDArray[np.bool_]) -> int:
    return NONE_ACTION


class Episode:
    """One episode under a rule: what it paid, step by step."""

    def __init__(self, rule: Rule, seed: int = 0, **changes: Any):
        self.env = FleetEnv(scenario="bursty", **{**SETTINGS, **changes})
        self.env.reset(seed=seed)
        self.actions: list[int] = []
        self.infos: list[dict[str, Any]] = []
        self.rewards: list[float] = []
        terminated = False
        while not terminated:
            self.actions.append(rule(len(self.actions), self.env.action_masks()))
            _, reward, terminated, _, info = self.env.step(self.actions[-1])
            self.rewards.append(reward)
            self.infos.append(info)
        self.metrics = self.infos[-1]["episode_metrics"]
        self.start = self.env._batch._episodes["start"][0]

    def component(self, name: str) -> float:
        return -sum(float(info[f"reward_{name}"]) for info in self.infos)

    def log(self, seed: int = 0) -> RunLog:
        """The same requests, fleet and decisions, simulated apart."""
        scenario = self.env.scenario
        episode = scenario.draw(seeding.np_random(seed)[0], scenario.limits(4), {})
        policy = Replay(episode.warmup_s, self.actions)
        log = simulate(episode.table, episode.fleet, policy, seed=episode.seed)
        assert not policy.actions
        return log


class Replay:
    """Join-shortest-queue through the warm-up, then what was done."""

    name = "replay"

    def __init__(self, warmup_s: float, actions: list[int]):
        self.warmup_s = warmup_s
        self.actions = actions[::-1]
        self.warm_up = load_policy("join-shortest-queue")

    def reset(self, batch: int, seed: int) -> None:
        pass

    def decide(self, view: FleetView) -> Decision:
        if view.fleet["time_s"][0] < self.warmup_s:
            return self.warm_up.decide(view)
        action = self.actions.pop()
        return Decision(np.array([NONE if action == NONE_ACTION else action]))


@pytest.mark.parametrize("rule", [scattered, always_hold])
def test_components_are_what_a_recount_of_the_log_says(rule: Rule) -> None:
    weights = RewardWeights(waiting=0.3, slo_miss=2.0, preemption=0.7, instance_cost=0.05)
    episode = Episode(rule, reward=weights)
    log = episode.log()
    requests = log.requests
    start_s = episode.start[6]
    since_s = np.maximum(requests["arrival_s"], start_s)
    waiting_s = np.maximum(requests["first_token_s"] - since_s, 0.0).sum()
    classes = [(0.175, 0.0397), (0.525, 0.1191)]
    ttft_s, tpot_s = np.array(classes)[requests["slo_class"]].T
    due_s = requests["arrival_s"] + ttft_s
    late = requests["first_token_s"] > due_s
    per_token_s = (requests["finish_s"] - requests["first_token_s"]) / np.maximum(requests["output_tokens"] - 1, 1)
    slow = ~late & (per_token_s > tpot_s) & (requests["output_tokens"] > 1)
    misses = np.sum(late & (due_s > start_s)) + np.sum(slow & (requests["finish_s"] > start_s))
    assert misses > 20
    assert requests["preemption_loss_s"].sum() > 0.5
    assert episode.component("waiting") == pytest.approx(0.3 * waiting_s)
    assert episode.component("slo_miss") == pytest.approx(2.0 * misses)
    loss_s = requests["preemption_loss_s"].sum() - episode.start[2]
    assert episode.component("preemption") == pytest.approx(0.7 * loss_s)
    assert episode.component("instance_cost") == pytest.approx(0.05 * 4 * (log.end_s - start_s))
    assert episode.metrics["misses"] == misses
    assert episode.metrics["waiting_s"] == pytest.approx(waiting_s)
    at_risk = np.sum((requests["finish_s"] > start_s) & ~(late & (due_s <= start_s)))
    assert episode.metrics["requests"] == at_risk
    assert episode.metrics["duration_s"] == pytest.approx(log.end_s - start_s)


@pytest.mark.parametrize("rule", [scattered, always_hold])
def test_a_miss_is_charged_when_the_target_passes(rule: Rule) -> None:
    """At every decision, as many as there are targets that have passed by then."""
    episode = Episode(rule)
    requests = episode.log().requests
    classes = [(0.175, 0.0397), (0.525, 0.1191)]
    ttft_s, tpot_s = np.array(classes)[requests["slo_class"]].T
    due_s = requests["arrival_s"] + ttft_s
    late = requests["first_token_s"] > due_s
    per_token_s = (requests["finish_s"] - requests["first_token_s"]) / np.maximum(requests["output_tokens"] - 1, 1)
    slow = ~late & (per_token_s > tpot_s)
    passed_s = np.sort(np.where(late, due_s, requests["finish_s"])[late | slow])
    charged = -np.cumsum([info["reward_slo_miss"] for info in episode.infos])
    time_s = episode.start[6] + np.cumsum([info["dt_s"] for info in episode.infos])
    before = np.searchsorted(passed_s, [episode.start[6], *time_s[:-1]])
    np.testing.assert_allclose(charged[:-1], (before - before[0])[1:], atol=1e-9)
    assert before[-1] > before[0] + 20


def test_a_reward_is_the_sum_of_its_components() -> None:
    episode = Episode(scattered)
    for reward, info in zip(episode.rewards, episode.infos, strict=True):
        assert reward == pytest.approx(sum(info[f"reward_{name}"] for name in COMPONENTS))
    assert sum(float(info["dt_s"]) for info in episode.infos) == pytest.approx(episode.metrics["duration_s"])


def test_holding_does_not_pay() -> None:
    """Neither always nor in the last decisions, which end the episode without a further observation."""
    spread = Episode(lambda decision, mask: decision % 4)
    assert Episode(always_hold).metrics["return"] < spread.metrics["return"]
    last = len(spread.actions) - 20
    late = Episode(lambda decision, mask: decision % 4 if decision < last else NONE_ACTION)
    assert late.metrics["return"] < spread.metrics["return"]
    assert late.metrics["requests"] == spread.metrics["requests"]


def test_every_request_is_served_before_the_end() -> None:
    log = Episode(always_hold).log()
    assert np.isfinite(log.requests["finish_s"]).all()


def test_what_a_truncated_episode_leaves_unserved_counts_as_missed() -> None:
    envs = FleetVectorEnv(2, max_episode_steps=5, **{**SETTINGS, "load": 0.3})
    envs.reset(seed=1)
    for step in range(5):
        _, rewards, terminated, truncated, infos = envs.step(np.full(2, step % 4))
    assert truncated.all()
    assert not terminated.any()
    unserved = envs._cluster.state.env["active"]
    assert unserved.min() > 0
    assert np.all(infos["episode_metrics"]["misses"] >= unserved)
    assert rewards.min() > -1.0  # a truncated episode goes on, for whoever bootstraps: nothing is charged for it


def test_the_worked_example_is_right() -> None:
    results = doctest.testmod(module)
    assert results.attempted == 7
    assert results.failed == 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "x", None])
def test_a_weight_that_rewards_costs_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"reward weight waiting = .*: expected a finite number >= 0"):
        RewardWeights(waiting=weight)
