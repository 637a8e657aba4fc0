"""Environments with prefill and decode pools: Disaggregated-v0, and the others where the scenario has some."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from equality import same
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from subprocesses import printed_compiled_and_uncompiled

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import Pools, Rebalancing, Scaling
from fleetpilot.envs import ENVIRONMENTS, FleetEnv, FleetVectorEnv
from fleetpilot.envs.testing import check_vector_env
from fleetpilot.fleet.features import features, features_for
from fleetpilot.fleet.view import KIND_DECODE, KIND_DISPATCH, KIND_PREFILL, NONE, ROLE_DECODE, ROLE_MIXED, ROLE_PREFILL

DISAGGREGATED, FLEET = "fleetpilot/Disaggregated-v0", "fleetpilot/Fleet-v0"
POOLS = Pools(("prefill", "decode", "decode", "mixed"))
SMALL: dict[str, Any] = {"scenario": "pd_mixed_bursty", "instances": 4, "warmup_requests": 10, "scored_requests": 10}
OF_ALL: dict[str, Any] = {
    **SMALL,
    "pools": POOLS,
    "ready_share": 0.75,
    "start_up_s": (1.0, 5.0),
    "failures_per_hour": 60.0,
    "repair_s": (2.0, 10.0),
    "rebalancing": Rebalancing(interval_s=1.0, protocol="vllm"),
    "scaling": Scaling(interval_s=2.0, first_s=2.0, drain_deadline_s=8.0),
}
SETTINGS = {
    "Disaggregated-v0": (DISAGGREGATED, SMALL),
    "after the prefill": (
        DISAGGREGATED,
        {**SMALL, "pools": Pools(POOLS.roles, decode_choice="after_prefill", first_token_from="prefill")},
    ),
    "Fleet-v0": (FLEET, OF_ALL),
}
CASES = pytest.mark.parametrize(("id", "settings"), SETTINGS.values(), ids=SETTINGS)


def made(id: str, settings: dict[str, Any], rows: int = 3, **changes: Any) -> FleetVectorEnv:
    return FleetVectorEnv(rows, **{**ENVIRONMENTS[id], **settings, **changes})


def legal_actions(envs: FleetVectorEnv, rng: np.random.Generator) -> NDArray[np.int64]:
    masks = envs.action_masks()
    return np.argmax(masks * rng.random(masks.shape), axis=1)


# --- conventions ------------------------------------------------------------------------------------------------------


@CASES
@pytest.mark.filterwarnings("error")
def test_gymnasiums_checker_is_content(id: str, settings: dict[str, Any]) -> None:
    check_env(gymnasium.make(id, render_mode="rgb_array", **settings).unwrapped)


@pytest.mark.filterwarnings("error", "ignore:Your observation instances has an unconventional shape")
def test_stable_baselines_checker_is_content() -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    sb3.check_env(gymnasium.make(DISAGGREGATED, **SMALL).unwrapped)


@CASES
def test_each_row_is_a_single_environment_in_all_modes(id: str, settings: dict[str, Any]) -> None:
    settings = {**settings, "scored_requests": 5}
    make = functools.partial(gymnasium.make, id, **settings)
    check_vector_env(functools.partial(gymnasium.make_vec, id, **settings), make, num_envs=3, steps=800)


@CASES
def test_threads_change_nothing(id: str, settings: dict[str, Any], shared_steps: None) -> None:
    runs = []
    for threads in (1, 3):
        envs = made(id, settings, 6, threads=threads, autoreset_mode=AutoresetMode.SAME_STEP)
        assert envs.threads == threads
        rng = np.random.default_rng(0)
        envs.reset(seed=7)
        runs.append([envs.step(legal_actions(envs, rng)) for _ in range(300)])
        envs.close()
    assert same(*runs)


@CASES
def test_a_state_saved_while_caches_are_pulled_goes_on_as_before(id: str, settings: dict[str, Any]) -> None:
    envs = made(id, settings, 6, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(0)
    envs.reset(seed=3)
    for _ in range(2_000):
        last = envs.step(legal_actions(envs, rng))
        if (envs._cluster.state.instance["pulls"] > 0).sum() > 1:
            break
    else:
        raise AssertionError("there was no moment with two pulls")
    saved = envs.save_state()
    actions = rng.integers(0, 5, (1_000, 6))
    first = [envs.step(row) for row in actions]
    assert any(step[2].any() for step in first)
    for other in (envs, made(id, settings, 6, autoreset_mode=AutoresetMode.SAME_STEP)):
        assert same(other.restore_state(saved), last[0])
        assert same(first, [other.step(row) for row in actions])


def test_the_uncompiled_kernels_compute_the_same() -> None:
    code = """
from fleetpilot.cluster import Pools
from fleetpilot.envs import FleetEnv
env = FleetEnv(scenario="pd_mixed_bursty", instances=3, scored_requests=2, warmup_requests=2, kinds=["prefill"],
               others="join-shortest-queue", pools=Pools(("prefill", "decode", "mixed")))
observation, _ = env.reset(seed=0)
step, terminated = 0, False
while not terminated:
    observation, reward, terminated, _, info = env.step(2 * (step % 2))
    step += 1
print(step, reward, info["episode_metrics"], observation["instances"].tobytes().hex())
"""
    said = printed_compiled_and_uncompiled(code)
    assert said[0] == said[1] != ""


# --- what is asked, and what is seen ----------------------------------------------------------------------------------


@CASES
def test_prefill_and_decode_are_asked_in_place_of_dispatch(id: str, settings: dict[str, Any]) -> None:
    envs = made(id, settings, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(0)
    observations, _ = envs.reset(seed=0)
    asked = np.zeros(6)
    for _ in range(400):
        kinds, roles, masks = observations["kind"], envs._cluster.view.instances["role"], envs.action_masks()
        asked += kinds.sum(axis=0)
        assert masks.any(axis=1).all()
        assert not (masks[:, :-1] & (roles == ROLE_DECODE))[kinds[:, KIND_PREFILL] == 1].any()
        assert not (masks[:, :-1] & (roles == ROLE_PREFILL))[kinds[:, KIND_DECODE] == 1].any()
        assert same(observations, features(envs._cluster.view, envs._kinds))
        assert all(envs.observation_space[key].contains(array) for key, array in observations.items())
        observations, rewards, *_ = envs.step(legal_actions(envs, rng))
        assert np.isfinite(rewards).all()
    assert {int(kind) for kind in np.flatnonzero(asked)} == set(envs._kinds) - {KIND_DISPATCH}


def test_an_observation_of_a_decode_says_where_the_prefill_is() -> None:
    names = [feature.name for feature in features_for((KIND_PREFILL, KIND_DECODE))["instances"]]
    place = {name: names.index(name) for name in ("prefill_only", "decode_only", "origin")}
    env = FleetEnv(**{**ENVIRONMENTS[DISAGGREGATED], **SMALL, "pools": POOLS})
    observation, _ = env.reset(seed=0)
    while observation["kind"][KIND_PREFILL] != 1 or observation["action_mask"][0] == 0:
        observation, *_ = env.step(3)
    assert observation["instances"][:, place["prefill_only"]].tolist() == [1, 0, 0, 0]
    assert observation["instances"][:, place["decode_only"]].tolist() == [0, 1, 1, 0]
    assert not observation["instances"][:, place["origin"]].any()
    observation, *_ = env.step(0)
    assert observation["kind"][KIND_DECODE] == 1
    assert observation["action_mask"].tolist() == [0, 1, 1, 1, 1]
    assert observation["instances"][:, place["origin"]].tolist() == [1, 0, 0, 0]


def test_roles_are_those_of_the_slots_again_and_again() -> None:
    envs = FleetVectorEnv(1, **{**SMALL, "instances": 7, "fleet_size": (2, 7)})
    for fleet_size in (2, 5, 7):
        envs.reset(seed=0, options={"fleet_size": fleet_size})
        roles = envs._cluster.view.instances["role"][0].tolist()
        expected = ([ROLE_PREFILL, ROLE_DECODE, ROLE_DECODE] * 3)[:fleet_size]
        assert roles == expected + [ROLE_MIXED] * (7 - fleet_size)
    with pytest.raises(ValueError, match="fleet_size = 1: expected 2 at least, for prefill and decode"):
        envs.reset(seed=0, options={"fleet_size": 1})


# --- who answers ------------------------------------------------------------------------------------------------------


def played(kinds: list[str], others: str | None) -> dict[str, float]:
    """One episode that `join-shortest-queue` plays, decisions of these kinds from outside."""
    env = FleetEnv(kinds=kinds, others=others, **SMALL)
    policy = load_policy("join-shortest-queue")
    env.reset(seed=2)
    terminated = False
    while not terminated:
        choice = int(policy.decide(env._batch._cluster.view).choice[0])
        _, _, terminated, _, info = env.step(4 if choice == NONE else choice)
    metrics = {name: float(value) for name, value in info["episode_metrics"].items()}
    metrics["end_s"] = float(env._batch._episodes["costs"][0][6])
    return metrics


def test_who_dispatches_answers_for_both_pools() -> None:
    both = played(["prefill", "decode"], None)
    twice = played(["dispatch"], None)
    one = played(["prefill"], "join-shortest-queue")
    assert both == twice
    assert one["end_s"] == both["end_s"]
    assert one["decisions"] < both["decisions"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"kinds": ["prefill"]},
            ValueError,
            r"kinds = \['prefill'\], others = None: expected one of them to answer dec",
        ),
        ({"kinds": ["decode"]}, ValueError, "expected one of them to answer prefill"),
        ({"pools": "2P+4D"}, TypeError, "pools = '2P\\+4D': expected Pools, or None"),
        ({"instances": 1}, ValueError, "fleet_size = 1: expected 2 at least, for prefill and decode"),
        ({"profile": "a10-llama-7b"}, ValueError, "pools with a10-llama-7b: expected engines with chunked prefill"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FleetVectorEnv(**{**ENVIRONMENTS[DISAGGREGATED], **SMALL, **arguments}).reset(seed=0)
