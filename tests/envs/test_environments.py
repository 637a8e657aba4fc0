"""The registered environments against Gymnasium's conventions, each other and themselves."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from subprocesses import printed_compiled_and_uncompiled

from fleetpilot.envs import SCENARIOS, FleetEnv, FleetVectorEnv
from fleetpilot.envs.kernel import METRICS
from fleetpilot.envs.testing import check_vector_env
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.features import features

ID = "fleetpilot.envs:fleetpilot/Dispatch-v0"
SMALL: dict[str, Any] = {"instances": 4, "warmup_requests": 10, "scored_requests": 25}

make = functools.partial(gymnasium.make, ID, **SMALL)
make_vec = functools.partial(gymnasium.make_vec, ID, **SMALL)


def legal_actions(envs: FleetVectorEnv, rng: np.random.Generator) -> Any:
    masks = envs.action_masks()
    return np.argmax(masks * rng.random(masks.shape), axis=1)


# --- conventions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.filterwarnings("error")
def test_gymnasiums_checker_is_content(scenario: str) -> None:
    check_env(make(scenario=scenario, render_mode="rgb_array").unwrapped)


@pytest.mark.filterwarnings("error", "ignore:Your observation instances has an unconventional shape")
def test_stable_baselines_checker_is_content() -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    sb3.check_env(make().unwrapped)


def test_the_documented_headings_are_there() -> None:
    headings = [line.strip()[3:] for line in (FleetEnv.__doc__ or "").splitlines() if line.strip().startswith("## ")]
    assert headings == [
        "Description",
        "Action Space",
        "Observation Space",
        "Rewards",
        "Starting State",
        "Episode End",
        "Arguments",
        "Vectorized environment",
        "Version History",
    ]


def test_the_documented_shapes_are_right() -> None:
    env = make()
    assert isinstance(env.observation_space, gymnasium.spaces.Dict)
    for key, space in env.observation_space.items():
        shape = str(space.shape).replace("(4", "(N").replace("(5,", "(N + 1,")
        assert f"| `{key}`" in (FleetEnv.__doc__ or "")
        assert shape in (FleetEnv.__doc__ or ""), f"{key} {shape}"


def test_the_registered_id_serialises() -> None:
    spec = gymnasium.spec("fleetpilot/Dispatch-v0")
    assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()) == spec


# --- the vector environment is the single one -------------------------------------------------------------------------


def test_each_row_is_a_single_environment_in_all_modes() -> None:
    check_vector_env(make_vec, make, steps=1_500)


@pytest.mark.parametrize("scenario", ["agents", "llumnix/M-M", "chat_and_batch"])
def test_each_row_of_other_scenarios_is_a_single_environment(scenario: str) -> None:
    changes = {"scenario": scenario, "scored_requests": 12, "fleet_size": (2, 4)}
    check_vector_env(functools.partial(make_vec, **changes), functools.partial(make, **changes), num_envs=3, steps=400)


def test_truncation_is_that_of_a_time_limit() -> None:
    check_vector_env(
        functools.partial(make_vec, max_episode_steps=20),
        functools.partial(make, max_episode_steps=20),
        num_envs=3,
        steps=200,
    )


def rollout(num_envs: int, threads: int, steps: int = 400, **changes: Any) -> list[Any]:
    envs = FleetVectorEnv(num_envs, autoreset_mode=AutoresetMode.SAME_STEP, threads=threads, **SMALL, **changes)
    assert envs.threads == min(threads, num_envs)
    rng = np.random.default_rng(0)
    observations, infos = envs.reset(seed=7)
    seen: list[Any] = [observations, infos]
    for _ in range(steps):
        seen.append(envs.step(rng.integers(0, 5, 8)[:num_envs]))
    envs.close()
    return seen


def same(a: Any, b: Any, rows: slice) -> bool:
    if isinstance(a, dict):
        return set(a) <= set(b) and all(same(a[key], b[key], rows) for key in a)
    if isinstance(a, tuple | list):
        return all(same(x, y, rows) for x, y in zip(a, b, strict=True))
    return a[rows].tobytes() == b[rows].tobytes()


@pytest.mark.parametrize("threads", [2, 3, 50])
def test_threads_change_nothing(threads: int, shared_steps: None) -> None:
    assert same(rollout(8, 1), rollout(8, threads), slice(None))


def test_a_thread_is_used_where_it_has_enough_to_do() -> None:
    used = {rows: FleetVectorEnv(rows, threads=2).threads for rows in (2, 64, 256)}
    assert used == {2: 1, 64: 1, 256: 2}


def test_rows_do_not_depend_on_how_many_there_are(shared_steps: None) -> None:
    for few, many in zip(rollout(3, 1), rollout(8, 2), strict=True):
        first = few[:4] if isinstance(few, tuple) else few  # infos of other rows' ends are in the larger one alone
        assert same(first, many[:4] if isinstance(many, tuple) else many, slice(0, 3))


def test_the_uncompiled_kernels_compute_the_same() -> None:
    code = """
from fleetpilot.envs import FleetEnv
env = FleetEnv(instances=3, scored_requests=3, warmup_requests=2)
env.reset(seed=0)
step, terminated = 0, False
while not terminated:
    observation, _, terminated, _, info = env.step(step % 4)
    step += 1
print(info["episode_metrics"], observation["instances"].tobytes().hex())
"""
    said = printed_compiled_and_uncompiled(code)
    assert said[0] == said[1] != ""


# --- resets -----------------------------------------------------------------------------------------------------------


def test_a_step_needs_a_reset() -> None:
    envs = make_vec(num_envs=2)
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros(2, np.int64))


def test_without_autoreset_an_ended_row_must_be_reset() -> None:
    envs = make_vec(num_envs=2, autoreset_mode=AutoresetMode.DISABLED, max_episode_steps=3)
    envs.reset(seed=0)
    envs.reset(options={"reset_mask": np.array([True, False])})
    for _ in range(3):
        _, _, _, truncated, _ = envs.step(np.zeros(2, np.int64))
    assert truncated.all()
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded, match=r"rows \[1\]"):
        envs.step(np.zeros(2, np.int64))


def test_a_partial_reset_leaves_the_options_and_other_rows_alone() -> None:
    envs = make_vec(num_envs=3, autoreset_mode=AutoresetMode.DISABLED)
    before, _ = envs.reset(seed=0)
    options = {"reset_mask": np.array([False, True, False]), "load": 0.5}
    after, infos = envs.reset(options=options)
    assert set(options) == {"reset_mask", "load"}
    np.testing.assert_array_equal(before["instances"][[0, 2]], after["instances"][[0, 2]])
    assert not np.array_equal(before["instances"][1], after["instances"][1])
    np.testing.assert_array_equal(infos["_parameters"], options["reset_mask"])
    assert infos["parameters"]["load"][1] == 0.5


@pytest.mark.parametrize("mask", [[True, False], np.array([1, 0]), np.array([True]), np.array([False, False])], ids=str)
def test_a_bad_reset_mask_is_refused(mask: Any) -> None:
    envs = make_vec(num_envs=2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"reset_mask = .*: expected a bool array of shape \(2,\)"):
        envs.reset(options={"reset_mask": mask})


def test_the_first_reset_is_of_all_rows() -> None:
    with pytest.raises(ResetNeeded, match="reset all rows first"):
        make_vec(num_envs=2).reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.parametrize("actions", [np.zeros(3, np.int64), np.zeros(2), [0.5, 1.0]], ids=str)
def test_bad_actions_are_refused(actions: Any) -> None:
    envs = make_vec(num_envs=2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions: .* expected integers of \(2,\)"):
        envs.step(actions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs = 0"),
        ({"num_envs": "x"}, "num_envs = 'x': expected a whole number from 1 to 65,536"),
        ({"num_envs": None}, "num_envs = None: expected a whole number"),
        ({"instances": "nope"}, "instances = 'nope': expected a whole number from 1 to 4,096"),
        ({"instances": None}, "instances = None: expected a whole number"),
        ({"instances": float("nan")}, "instances = nan: expected a whole number"),
        ({"instances": 2.5}, "instances = 2.5: expected a whole number"),
        ({"instances": 10**9}, "instances = 1000000000: expected a whole number from 1 to 4,096"),
        ({"threads": "two"}, "threads = 'two': expected a whole number"),
        ({"max_episode_steps": "x"}, "max_episode_steps = 'x': expected a whole number"),
        ({"autoreset_mode": "never"}, "autoreset_mode = 'never': expected an AutoresetMode, one of NextStep"),
        ({"max_hold_s": -1}, "max_hold_s = -1: expected a number from 0"),
        ({"cv": 0}, r"cv = 0: expected a number from 0.1 to 10$"),
        ({"max_episode_steps": 0}, "max_episode_steps = 0"),
        ({"render_mode": "human"}, "render_mode = 'human'"),
        ({"threads": 0}, "threads = 0"),
        ({"scenario": "stady"}, "scenario 'stady' is not known; expected one of steady"),
        ({"lod": 0.5}, "parameter of scenario 'steady' 'lod' is not known"),
        ({"load": -1}, "load = -1: expected a number from 0.01 to 3"),
        ({"load": (0.9, 0.5)}, "expected the lower end of the range first"),
        ({"fleet_size": 5}, "fleet_size = .*: expected at most instances = 4"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FleetVectorEnv(**{**SMALL, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": -1}, "scenario = -1: expected the name of a scenario, a trace file, or a Scenario"),
        ({"scenario": None}, "scenario = None: expected the name"),
        ({"scenario": []}, r"scenario = \[\]: expected the name"),
        ({"profile": 3}, "profile = 3: expected a HardwareProfile, or the name or file of one"),
        ({"reward": "x"}, "reward = 'x': expected RewardWeights"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        gymnasium.make("fleetpilot/Dispatch-v0", **{**SMALL, **arguments})
    with pytest.raises(TypeError, match=message):
        FleetVectorEnv(**{**SMALL, **arguments})


def test_a_single_environment_takes_no_arguments_of_many() -> None:
    with pytest.raises(TypeError, match=r"num_envs = 3: expected none here: .* gymnasium\.make_vec"):
        FleetEnv(**SMALL, num_envs=3)


@pytest.mark.parametrize("seed", ["x", 1.5, [1], [1, "x"]])
def test_seeds_are_whole_numbers(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed = .*: expected a whole number, or one or None for each of 2 rows"):
        FleetVectorEnv(2, **SMALL).reset(seed=seed)


@pytest.mark.parametrize("options", [[1], "load", 3])
def test_options_are_a_dict(options: Any) -> None:
    with pytest.raises(TypeError, match=r"options = .*: expected a dict of parameters to pin, or None"):
        FleetEnv(**SMALL).reset(options=options)


# --- actions ----------------------------------------------------------------------------------------------------------


def test_illegal_actions_are_counted_and_do_no_harm() -> None:
    env = FleetEnv(fleet_size=2, **SMALL)
    observation, _ = env.reset(seed=0)
    np.testing.assert_array_equal(observation["action_mask"], [1, 1, 0, 0, 1])
    counts = []
    for action in (0, 3, 4, 99, -1, 1):
        observation, _, terminated, _, info = env.step(action)
        assert not terminated
        counts.append(int(info["invalid_actions"]))
    assert counts == [0, 1, 1, 2, 3, 3]


def test_holding_for_too_long_is_not_offered() -> None:
    env = FleetEnv(max_hold_s=0.25, **SMALL)
    observation, _ = env.reset(seed=0)
    offered = []
    for _ in range(200):
        offered.append(bool(env.action_masks()[-1]))
        observation, _, terminated, _, _ = env.step(4)
        assert observation["action_mask"].any()
        if terminated:
            break
    assert {True, False} == set(offered)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_restored_state_goes_on_as_before(mode: AutoresetMode) -> None:
    envs = FleetVectorEnv(3, autoreset_mode=mode, **SMALL)
    rng = np.random.default_rng(0)
    envs.reset(seed=3)
    for _ in range(100):
        last = envs.step(rng.integers(0, 5, 3))
    saved = envs.save_state()
    actions = rng.integers(0, 5, (250, 3))
    first = [envs.step(row) for row in actions]
    assert any(ended.any() for step in first for ended in step[2:4])
    for other in (envs, FleetVectorEnv(3, autoreset_mode=mode, **SMALL)):
        assert same(other.restore_state(saved), last[0], slice(None))
        assert same(first, [other.step(row) for row in actions], slice(None))


def test_what_is_no_saved_state_is_refused() -> None:
    for envs in (FleetEnv(**SMALL), FleetVectorEnv(2, **SMALL)):
        envs.reset(seed=0)
        with pytest.raises(TypeError, match="saved = None: expected what save_state returned"):
            envs.restore_state(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="saved with shape"):
        FleetVectorEnv(3, **SMALL).restore_state(envs.save_state())


def test_observations_are_the_features_of_the_view_and_nothing_else() -> None:
    """What a policy sees is a function of what a dispatcher knows: no way around the view."""
    envs = FleetVectorEnv(4, **SMALL)
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    for _ in range(150):
        observations, *_ = envs.step(legal_actions(envs, rng))
        assert same(observations, features(envs._cluster.view), slice(None))


def test_true_lengths_are_not_seen() -> None:
    """Answers of other lengths, with the same predictions: all is equal until the first effect of a length."""
    envs = [FleetEnv(**SMALL) for _ in range(2)]
    observations = [env.reset(seed=0)[0] for env in envs]
    cluster = envs[1]._batch._cluster
    ahead = cluster.state.row["arrival_s"] > cluster.state.env["time_s"][0]
    assert ahead.any()
    cluster.state.row["output_tokens"][ahead] += 50
    for step in range(3):
        assert same(observations[0], observations[1], slice(None)), step
        observations = [env.step(step)[0] for env in envs]


def test_the_end_of_an_episode_tells_its_metrics() -> None:
    env = make()
    env.reset(seed=0)
    total, steps, terminated = 0.0, 0, False
    while not terminated:
        _, reward, terminated, truncated, info = env.step(np.int64(steps % 4))
        assert not truncated
        assert ("episode_metrics" in info) == terminated
        total, steps = total + float(reward), steps + 1
    metrics = info["episode_metrics"]
    assert tuple(metrics) == METRICS
    assert metrics["return"] == pytest.approx(total)
    assert metrics["decisions"] == steps
    assert 0 < metrics["slo_attainment"] <= 1
    assert metrics["slo_attainment"] == pytest.approx(1 - metrics["misses"] / metrics["requests"])


def test_rendering_in_all_modes() -> None:
    for mode, kind in {"ansi": str, "rgb_array": np.ndarray}.items():
        env = make(render_mode=mode)
        env.reset(seed=0)
        env.step(np.int64(0))
        assert isinstance(env.render(), kind)
    frames = make_vec(num_envs=2, render_mode="rgb_array")
    frames.reset(seed=0)
    shapes = {frame.shape for frame in frames.render()}
    assert len(shapes) == 1


def test_a_video_can_be_recorded(tmp_path: Any) -> None:
    pytest.importorskip("moviepy")
    env = gymnasium.wrappers.RecordVideo(
        make(render_mode="rgb_array"),
        str(tmp_path),
        episode_trigger=lambda _: True,
        video_length=8,
        disable_logger=True,
    )
    env.reset(seed=0)
    for step in range(10):
        env.step(np.int64(step % 4))
    env.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]


def test_with_an_admission_nothing_is_added_to_a_queue_that_makes_it_late() -> None:
    waiting: dict[bool, float] = {}
    misses: dict[bool, float] = {}
    for admits in (False, True):
        envs = FleetVectorEnv(
            16,
            scenario="bursty",
            load=1.2,
            admission=Admission(late=0.0, cold=0.0) if admits else None,
            autoreset_mode=AutoresetMode.NEXT_STEP,
            **SMALL,
        )
        envs.reset(seed=3)
        most, ended, missed = 0.0, np.zeros(16, np.bool_), 0.0
        for _ in range(500):
            before = envs.view.instances["unstarted"].copy()
            *_, terminated, _, infos = envs.step(np.zeros(16, np.int64))
            grown = (envs.view.instances["unstarted"] > np.maximum(before, 1)) & ~ended[:, None]
            most = max(most, float(grown.sum()))
            first = terminated & ~ended
            missed += float(infos["episode_metrics"]["misses"][first].sum()) if first.any() else 0.0
            ended |= terminated
            if ended.all():
                break
        waiting[admits], misses[admits] = most, missed
    assert waiting[False] > 0
    assert waiting[True] == 0
    assert misses[True] > 0
