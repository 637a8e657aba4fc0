"""Discounts by time, baselines per workload, groups that meet the same requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")

import torch

from fleetpilot.training.environments import TrainingEnvs
from fleetpilot.training.ppo import TimedRolloutBuffer, advantage_sizes, workload_baseline

SMALL = {"instances": 4, "scored_requests": 20, "warmup_requests": 10}


def envs(rows: int = 8, group: int = 4, **scenarios: Any) -> TrainingEnvs:
    return TrainingEnvs("fleetpilot/Dispatch-v0", scenarios or {"steady": SMALL}, rows, group)


def test_rows_of_a_group_meet_the_same_requests_whatever_is_done() -> None:
    both = envs(steady=SMALL, bursty=SMALL)
    both.seed(3)
    observations: Any = both.reset()
    rng = np.random.default_rng(0)
    for _ in range(60):
        request = observations["request"]
        for first in (0, 4):
            np.testing.assert_array_equal(
                request[first : first + 4, :2], np.repeat(request[first : first + 1, :2], 4, 0)
            )
        assert not np.array_equal(request[0], request[4])
        observations = both.step(rng.integers(0, 4, 8))[0]


def test_scenarios_get_their_rows_and_uneven_ones_are_refused() -> None:
    both = envs(steady=SMALL, bursty=SMALL)
    assert [part.num_envs for part in both.parts] == [4, 4]
    with pytest.raises(ValueError, match="rows = 10: expected a multiple of 2 scenarios x group = 4"):
        envs(10, steady=SMALL, bursty=SMALL)


def buffer_with(dt_s: Any, rewards: Any, values: Any, episode_starts: Any, group: int = 1, **settings: Any) -> Any:
    """One row per column of the arrays."""
    made = envs(rows=dt_s.shape[1], group=group)
    buffer = TimedRolloutBuffer(
        len(dt_s), made.observation_space, made.action_space, n_envs=dt_s.shape[1], **{"scale": 1.0, **settings}
    )
    observations: Any = made.reset()
    for step in range(len(dt_s)):
        buffer.envs = SimpleNamespace(dt_s=dt_s[step], components=np.zeros((dt_s.shape[1], 5)), group=group)  # type: ignore[assignment]
        action = np.zeros((dt_s.shape[1], 1))
        value, log_prob = torch.as_tensor(values[step]), torch.zeros(dt_s.shape[1])
        buffer.add(observations, action, rewards[step], episode_starts[step], value, log_prob)
    return buffer


def test_a_long_trace_gives_returns_discounted_by_time() -> None:
    rng = np.random.default_rng(0)
    dt_s, rewards = rng.exponential(0.5, (6, 2)), rng.normal(size=(6, 2))
    values = rng.normal(size=(6, 2)).astype(np.float32)
    starts = np.zeros((6, 2))
    starts[4, 1] = 1.0  # row 1 begins an episode at its fifth step
    buffer = buffer_with(dt_s, rewards, values, starts, tau_s=3.0, trace_s=1e12)
    last = np.array([0.5, -0.5], np.float32)
    buffer.compute_returns_and_advantage(torch.as_tensor(last), np.array([False, False]))
    for row in range(2):
        after = float(last[row])
        for step in reversed(range(6)):
            ends = row == 1 and step == 3
            after = rewards[step, row] + (0.0 if ends else np.exp(-dt_s[step, row] / 3.0) * after)
            assert buffer.returns[step, row] == pytest.approx(after, abs=1e-5)


def test_a_short_trace_trusts_the_critic_after_one_step() -> None:
    dt_s, rewards = np.full((3, 1), 0.5), np.ones((3, 1))
    values = np.array([[1.0], [2.0], [3.0]], np.float32)
    buffer = buffer_with(dt_s, rewards, values, np.zeros((3, 1)), tau_s=10.0, trace_s=1e-9)
    buffer.compute_returns_and_advantage(torch.zeros(1), np.array([True]))
    gamma = np.exp(-0.05)
    np.testing.assert_allclose(buffer.advantages[:, 0], [1 + 2 * gamma - 1, 1 + 3 * gamma - 2, 1 - 3], rtol=1e-6)


def test_the_baseline_of_a_workload_is_the_others_mean_at_the_same_time() -> None:
    time_s = np.array([[0.0, 0.0, 0.0], [1.0, 2.0, 1.5], [3.0, 3.0, 1e9]])
    advantages = np.array([[1, 10, 100], [2, 20, 200], [3, 30, 300]], np.float32)
    baseline = workload_baseline(advantages, time_s, group=3)
    # row 0 at 1 s: row 1 and row 2 are still at their first step; at 3 s row 2 is in another episode
    np.testing.assert_allclose(baseline[:, 0], [(10 + 100) / 2, (10 + 100) / 2, (30 + 200) / 2])
    np.testing.assert_allclose(baseline[:, 2], [(1 + 10) / 2, (2 + 10) / 2, 0.0])


def test_what_a_group_has_in_common_is_taken_out_of_its_advantages() -> None:
    rng = np.random.default_rng(1)
    common, own = rng.normal(size=(50, 1)) * 10.0, rng.normal(size=(50, 4))
    time_s = np.repeat(np.arange(50.0)[:, None], 4, axis=1)
    advantages = (common + own).astype(np.float32)
    left = advantages - workload_baseline(advantages, time_s, group=4)
    assert left.std() < 0.2 * advantages.std()
    np.testing.assert_array_equal(workload_baseline(advantages, time_s, group=1), 0.0)


def test_groups_count_alike_and_noise_is_not_blown_up() -> None:
    rng = np.random.default_rng(2)
    sizes = np.array([0.01, 1.0, 100.0, 5.0, 6.0, 7.0])  # of groups of two rows, three in each of two scenarios
    advantages = (rng.choice([-1.0, 1.0], (40, 12)) * np.repeat(sizes, 2)).astype(np.float32)
    np.testing.assert_allclose(advantage_sizes(advantages, 2, 2)[::2], [1.0, 1.0, 100.0, 6.0, 6.0, 7.0], rtol=1e-6)
    np.testing.assert_array_equal(advantage_sizes(np.zeros((4, 4), np.float32), 2, 1) > 0, np.ones(4, np.bool_))


def test_each_row_has_the_time_and_the_scale_of_its_scenario() -> None:
    dt_s, rewards = np.full((2, 2), 0.5), np.ones((2, 2))
    starts, values = np.zeros((2, 2)), np.zeros((2, 2), np.float32)
    both = {"tau_s": np.array([1.0, 4.0]), "trace_s": 1e12, "scale": np.array([1.0, 0.1])}
    buffer = buffer_with(dt_s, rewards, values, starts, **both)
    buffer.compute_returns_and_advantage(torch.zeros(2), np.array([True, True]))
    np.testing.assert_allclose(buffer.returns[0], [1 + np.exp(-0.5), 0.1 * (1 + np.exp(-0.125))], rtol=1e-6)


def test_state_is_saved_and_restored() -> None:
    some = envs()
    some.seed(1)
    some.reset()
    rng = np.random.default_rng(0)
    for _ in range(30):
        some.step(rng.integers(0, 4, 8))
    saved = some.save_state()
    first = [some.step(np.full(8, step % 4)) for step in range(80)]
    again_observations: Any = some.restore_state(saved)
    again = [some.step(np.full(8, step % 4)) for step in range(80)]
    assert set(again_observations) == {"instances", "request", "fleet", "kind", "action_mask"}
    for (one, one_reward, _, one_infos), (other, other_reward, _, other_infos) in zip(first, again, strict=True):
        np.testing.assert_array_equal(one["instances"], other["instances"])  # type: ignore[index, call-overload]
        np.testing.assert_array_equal(one_reward, other_reward)
        assert [info.get("episode", {}).get("r") for info in one_infos] == [
            info.get("episode", {}).get("r") for info in other_infos
        ]
