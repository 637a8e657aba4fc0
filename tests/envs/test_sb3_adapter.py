"""The Stable-Baselines3 adapter does what its own `DummyVecEnv` of monitored single environments does."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import MAX_STEPS, VectorWalk, Walk

pytest.importorskip("stable_baselines3", reason="needs fleetpilot[train]")

from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from fleetpilot.envs.sb3 import SB3VecEnv

ROWS = 4


def native(rows: int = ROWS, **arguments: Any) -> SB3VecEnv:
    return SB3VecEnv(VectorWalk(rows, AutoresetMode.SAME_STEP, **arguments))


def synchronous() -> SB3VecEnv:
    return SB3VecEnv(SyncVectorEnv([Walk] * ROWS, autoreset_mode=AutoresetMode.SAME_STEP))


def assert_same_observation(got: Any, expected: Any) -> None:
    assert set(got) == set(expected)
    for key in expected:
        assert got[key].dtype == expected[key].dtype
        np.testing.assert_array_equal(got[key], expected[key])


@pytest.mark.parametrize("make", [native, synchronous])
def test_equals_a_dummy_vec_env_of_monitored_environments(make: Any) -> None:
    adapter = make()
    reference = DummyVecEnv([lambda: Monitor(Walk())] * ROWS)
    for env in (adapter, reference):
        env.seed(7)
    assert_same_observation(adapter.reset(), reference.reset())
    rng = np.random.default_rng(0)
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(300):
        actions = rng.integers(3, size=ROWS)
        observations, rewards, dones, infos = adapter.step(actions)
        expected_observations, expected_rewards, expected_dones, expected_infos = reference.step(actions)
        assert_same_observation(observations, expected_observations)
        assert rewards.dtype == np.float32
        np.testing.assert_array_equal(rewards, expected_rewards)
        np.testing.assert_array_equal(dones, expected_dones)
        for done, info, expected in zip(dones, infos, expected_infos, strict=True):
            if not done:
                assert info == {}
                continue
            assert_same_observation(info.pop("terminal_observation"), expected.pop("terminal_observation"))
            assert info["episode"].pop("t") >= 0.0
            expected["episode"].pop("t")
            assert info == expected
            ends["truncated" if info["TimeLimit.truncated"] else "terminated"] += 1
    assert min(ends.values()) > 10
    assert adapter.reset_infos == [{"steps": 0}] * ROWS == reference.reset_infos


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_refuses_other_modes_and_says_how_to_get_the_right_one(mode: AutoresetMode) -> None:
    with pytest.raises(
        ValueError, match=rf"= {mode}: expected AutoresetMode.SAME_STEP; make it with gymnasium.make_vec"
    ):
        SB3VecEnv(VectorWalk(ROWS, mode))


def test_seeds_and_options_hold_for_the_next_reset_alone() -> None:
    env = native()
    env.seed(3)
    env.set_options({"place": 0.5})
    pinned = env.reset()
    np.testing.assert_array_equal(pinned["place"][:, 0], np.full(ROWS, 0.5, np.float32))
    env.seed(3)
    env.set_options([{}] * ROWS)
    first, second = env.reset(), env.reset()
    assert len(set(first["place"][:, 0])) == ROWS
    assert not np.array_equal(first["place"], second["place"])
    with pytest.raises(ValueError, match="expected one dict for all rows"):
        env.set_options([{"place": float(row)} for row in range(ROWS)])


def test_a_reset_in_mid_episode_starts_its_statistics_again() -> None:
    env = native()
    env.seed(0)
    env.reset()
    env.step(np.ones(ROWS, np.int64))
    env.reset()
    lengths = []
    while len(lengths) < 20:
        infos = env.step(np.ones(ROWS, np.int64))[3]
        lengths += [(info["episode"]["l"], info["episode_metrics"]["length"]) for info in infos if info]
    assert all(ours == its_own for ours, its_own in lengths)
    assert max(lengths)[0] == MAX_STEPS


def test_action_masks_come_by_row() -> None:
    env = native()
    env.seed(5)
    env.reset()
    assert is_masking_supported(env)
    np.testing.assert_array_equal(get_action_masks(env), env.vector_env.action_masks())
    rows = env.env_method("action_masks", indices=[2, 0])
    np.testing.assert_array_equal(rows, env.vector_env.action_masks()[[2, 0]])


def test_attributes_are_those_of_the_vector_environment_and_its_wrappers() -> None:
    vector_env = VectorWalk(ROWS, AutoresetMode.SAME_STEP, render_mode="rgb_array")
    env = SB3VecEnv(gymnasium.wrappers.vector.NormalizeReward(vector_env))
    assert env.get_attr("render_mode") == ["rgb_array"] * ROWS
    assert env.get_attr("gamma", indices=1) == [0.99]
    assert env.has_attr("action_masks")
    assert not env.has_attr("no_such_attribute")
    env.set_attr("gamma", 0.5)
    env.set_attr("note", "kept")
    assert env.get_attr("gamma") == [0.5] * ROWS
    assert vector_env.note == "kept"
    with pytest.raises(ValueError, match="'gamma' can be set for all rows only"):
        env.set_attr("gamma", 0.9, indices=[0])
    assert env.env_is_wrapped(Monitor) == [True] * ROWS
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices=[0, 1]) == [False] * 2


def test_pictures_are_tiled() -> None:
    env = native(render_mode="rgb_array")
    env.reset()
    picture = env.render()
    assert picture is not None
    assert picture.shape == (4, 4, 3)


@pytest.mark.parametrize("wrap", [lambda env: env, partial(VecNormalize, norm_obs=False)])
def test_maskable_ppo_learns_from_what_really_happened(wrap: Any) -> None:
    rows, steps = 8, 32
    env: VecEnv = wrap(native(rows))
    model = MaskablePPO("MultiInputPolicy", env, n_steps=steps, batch_size=64, n_epochs=1, seed=0)
    model.learn(rows * steps)

    def by_step(values: Any) -> Any:
        return values.reshape(rows, steps, -1).swapaxes(0, 1)

    buffer = model.rollout_buffer
    assert isinstance(buffer, MaskableDictRolloutBuffer)
    again = native(rows)
    again.seed(0)
    observation: Any = again.reset()
    for step, actions in enumerate(by_step(buffer.actions)):
        np.testing.assert_array_equal(by_step(buffer.observations["place"])[step], observation["place"])
        np.testing.assert_array_equal(by_step(buffer.action_masks)[step], again.vector_env.action_masks())
        observation = again.step(actions[:, 0].astype(np.int64))[0]
    assert len(model.ep_info_buffer or ()) > rows
    assert all(0 < episode["l"] <= MAX_STEPS for episode in model.ep_info_buffer or ())


def test_evaluation_takes_the_episodes_that_were_counted_here(recwarn: pytest.WarningsRecorder) -> None:
    env = native()
    env.seed(1)
    model = MaskablePPO("MultiInputPolicy", env, n_steps=8, batch_size=16, seed=0)
    returns, lengths = evaluate_policy(model, env, n_eval_episodes=8, return_episode_rewards=True)
    assert len(lengths) == 8
    assert all(value < 0 for value in returns)
    assert not [warning for warning in recwarn if "Monitor" in str(warning.message)]
