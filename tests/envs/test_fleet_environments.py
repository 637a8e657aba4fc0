"""The environments in which requests move and instances come and go: Fleet-v0, Rebalance-v0, Scale-v0."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from equality import same
from gymnasium.utils import seeding
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from subprocesses import printed_compiled_and_uncompiled

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import RunLog, simulate
from fleetpilot.cluster.config import Rebalancing, Scaling
from fleetpilot.cluster.loading import row_records
from fleetpilot.cluster.state import FAILED, FINISHED, NIL
from fleetpilot.envs import ENVIRONMENTS, FleetEnv, FleetVectorEnv, RewardWeights
from fleetpilot.envs.testing import check_vector_env
from fleetpilot.fleet.features import features, features_for
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    STATE_DRAINING,
    STATE_STARTING,
    Decision,
    FleetView,
)

FLEET, REBALANCE, SCALE = (f"fleetpilot/{name}-v0" for name in ("Fleet", "Rebalance", "Scale"))
IDS = pytest.mark.parametrize("id", [FLEET, REBALANCE, SCALE])
SMALL: dict[str, Any] = {
    "scenario": "llumnix/M-M",
    "instances": 4,
    "warmup_requests": 10,
    "scored_requests": 10,
    "load": 0.7,
    "ready_share": 0.75,
    "start_up_s": (1.0, 5.0),
    "failures_per_hour": 30.0,
    "repair_s": (2.0, 10.0),
    "scaling": Scaling(interval_s=2.0, first_s=2.0, drain_deadline_s=8.0),
}
ALL_KINDS = (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE)


def made(id: str, rows: int = 3, **changes: Any) -> FleetVectorEnv:
    return FleetVectorEnv(rows, **{**SMALL, **ENVIRONMENTS[id], **SMALL, **changes})


def legal_actions(envs: FleetVectorEnv, rng: np.random.Generator) -> NDArray[np.int64]:
    """Random ones; each source has its destination, three scale ticks in four change nothing."""
    masks = envs.action_masks()
    kinds = envs._cluster.view.fleet["kind"]
    quiet = (kinds == KIND_SCALE) & (rng.random(len(kinds)) < 0.75)
    masks[quiet, :-1] = False
    masks[(kinds == KIND_DESTINATION) & masks[:, :-1].any(axis=1), -1] = False
    return np.argmax(masks * rng.random(masks.shape), axis=1)


# --- conventions ------------------------------------------------------------------------------------------------------


@IDS
@pytest.mark.filterwarnings("error")
def test_gymnasiums_checker_is_content(id: str) -> None:
    check_env(gymnasium.make(id, render_mode="rgb_array", **SMALL).unwrapped)


@IDS
@pytest.mark.filterwarnings("error", "ignore:Your observation instances has an unconventional shape")
def test_stable_baselines_checker_is_content(id: str) -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    sb3.check_env(gymnasium.make(id, **SMALL).unwrapped)


@IDS
def test_the_registered_id_serialises(id: str) -> None:
    spec = gymnasium.spec(id)
    assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()) == spec


@IDS
def test_each_row_is_a_single_environment_in_all_modes(id: str) -> None:
    settings = {**SMALL, "scored_requests": 5, "rebalancing": Rebalancing(interval_s=2.0)}
    make = functools.partial(gymnasium.make, id, **settings)
    check_vector_env(functools.partial(gymnasium.make_vec, id, **settings), make, num_envs=3, steps=800)


def test_the_documented_shapes_are_right() -> None:
    for key, table in features_for(ALL_KINDS).items():
        shape = f"(N, {len(table)})" if key == "instances" else f"({len(table)},)"
        line = next(line for line in (FleetEnv.__doc__ or "").splitlines() if f"| `{key}`" in line)
        assert line.split("|")[3].strip() == shape


@IDS
def test_threads_change_nothing(id: str, shared_steps: None) -> None:
    runs = []
    for threads in (1, 3):
        envs = made(id, 6, threads=threads, autoreset_mode=AutoresetMode.SAME_STEP)
        assert envs.threads == threads
        rng = np.random.default_rng(0)
        envs.reset(seed=7)
        runs.append([envs.step(legal_actions(envs, rng)) for _ in range(300)])
        envs.close()
    assert same(*runs)


def test_the_uncompiled_kernels_compute_the_same() -> None:
    code = """
from fleetpilot.envs import FleetEnv
env = FleetEnv(scenario="llumnix/M-M", instances=3, scored_requests=3, warmup_requests=2, kinds=["source"],
               others="llumnix", load=1.0, ready_share=0.7, failures_per_hour=100.0, repair_s=5.0)
observation, _ = env.reset(seed=0)
step, terminated = 0, False
while not terminated:
    observation, reward, terminated, _, info = env.step(step % 3)
    step += 1
print(step, reward, info["episode_metrics"], observation["instances"].tobytes().hex())
"""
    said = printed_compiled_and_uncompiled(code)
    assert said[0] == said[1] != ""


@IDS
def test_only_the_agents_kinds_are_asked_and_all_of_them(id: str) -> None:
    envs = made(id, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(0)
    observations, _ = envs.reset(seed=0)
    asked = np.zeros(6)
    for _ in range(400):
        asked += observations["kind"].sum(axis=0)
        masks = envs.action_masks()
        assert masks.any(axis=1).all()
        assert masks[observations["kind"][:, KIND_DISPATCH] == 0, -1].all()  # none is always legal for these
        np.testing.assert_array_equal(observations["action_mask"] != 0, masks)
        assert same(observations, features(envs._cluster.view, envs._kinds))
        assert all(envs.observation_space[key].contains(array) for key, array in observations.items())
        observations, rewards, *_ = envs.step(legal_actions(envs, rng))
        assert np.isfinite(rewards).all()
    assert {int(kind) for kind in np.flatnonzero(asked)} == set(envs._kinds) & set(ALL_KINDS)  # there are no pools


# --- who answers ------------------------------------------------------------------------------------------------------


def played(kinds: list[str], others: str | None) -> dict[str, float]:
    """One episode of which `llumnix` makes all decisions, those of these kinds from outside."""
    settings = {**SMALL, "scored_requests": 40, "load": 1.0}
    env = FleetEnv(kinds=kinds, others=others, **settings)
    policy = load_policy("llumnix")
    env.reset(seed=2)
    terminated = False
    while not terminated:
        choice = int(policy.decide(env._batch._cluster.view).choice[0])
        _, _, terminated, _, info = env.step(4 if choice == NONE else choice)
    metrics = {name: float(value) for name, value in info["episode_metrics"].items()}
    metrics["end_s"] = float(env._batch._episodes["costs"][0][6])
    return metrics


def test_a_baseline_in_the_kernel_answers_as_an_agent_that_plays_it() -> None:
    kinds = ["dispatch", "source", "destination", "scale"]
    whole = played(kinds, None)
    assert whole["migrations"] > 5
    for some, others in ((kinds[:1], "llumnix"), (kinds[1:2], "llumnix"), (kinds[:3], "infaas++")):
        part = played(some, others)
        if others == "llumnix":
            assert part["end_s"] == whole["end_s"]
        else:
            assert part["migrations"] > 5  # its scaling is another
        assert part["decisions"] < whole["decisions"]


def test_what_nobody_answers_is_not_asked() -> None:
    """Nothing moves, starts or drains where only dispatch is decided."""
    envs = FleetVectorEnv(2, **{**SMALL, "failures_per_hour": 0.0})
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    for _ in range(200):
        envs.step(legal_actions(envs, rng))
    assert envs._cluster.state.env["migrations_ended"].sum() == 0
    assert set(envs._cluster.view.instances["state"].ravel().tolist()) == {2}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kinds": ["scale"]}, ValueError, r"kinds = \['scale'\], others = None: expected one of them to answer disp"),
        ({"kinds": ["dispatch", "source"]}, ValueError, "expected them to answer source and destination, or neither"),
        ({"kinds": ["source"], "others": "round-robin"}, ValueError, "expected them to answer source and destination"),
        ({"kinds": []}, ValueError, r"kinds = \[\]: expected some of dispatch, prefill, decode, source, dest"),
        ({"kinds": ["prefill"]}, ValueError, r"kinds = \['prefill'\], others = None: expected one of them to answer d"),
        ({"kinds": ["admit"]}, ValueError, r"kinds = \['admit'\]: expected some of dispatch"),
        ({"kinds": "dispatch"}, TypeError, "kinds = 'dispatch': expected a list of some of dispatch"),
        ({"kinds": None}, TypeError, "kinds = None: expected a list"),
        ({"others": "lumnix"}, ValueError, "policy 'lumnix' is not known; expected one of"),
        ({"others": 3}, TypeError, "others = 3: expected the name of a baseline, or None"),
        ({"scaling": 3}, TypeError, "scaling = 3: expected a Scaling, or None"),
        ({"rebalancing": "yes"}, TypeError, "rebalancing = 'yes': expected a Rebalancing, or None"),
        ({"start_up_s": -1}, ValueError, "start_up_s = -1: expected a number from 0 to 3600"),
        ({"losses": 0.5}, ValueError, "losses = 0.5: expected a whole number from 0 to 64"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FleetVectorEnv(**{**SMALL, **arguments})


def test_episodes_without_a_decision_of_the_agents_are_drawn_again() -> None:
    """As often as it takes, but not forever."""
    envs = made(SCALE, 4, scaling=Scaling(interval_s=30.0, first_s=30.0))
    _, infos = envs.reset(seed=0)
    assert infos["_parameters"].all()
    assert (envs._cluster.view.fleet["kind"] == KIND_SCALE).all()
    alone = FleetEnv(**{**SMALL, **ENVIRONMENTS[SCALE], **SMALL, "scaling": Scaling(interval_s=30.0, first_s=30.0)})
    for row in range(4):
        _, info = alone.reset(seed=row)
        assert info["parameters"]["rate_rps"] == infos["parameters"]["rate_rps"][row]
    never = made(SCALE, 2, scaling=Scaling(first_s=1e6))
    with pytest.raises(RuntimeError, match="row 0: 100 episodes were over before a decision of the agent's"):
        never.reset(seed=0)


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_state_saved_while_all_is_in_motion_goes_on_as_before() -> None:
    envs = made(FLEET, 6, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(0)
    envs.reset(seed=3)
    for _ in range(3_000):
        last = envs.step(legal_actions(envs, rng))
        instances = envs._cluster.state.instance
        moving = (instances["migration"] != NIL).any() and (instances["reserved_blocks"] > 0).any()
        if moving and {STATE_STARTING, STATE_DRAINING} <= set(instances["life"].tolist()):
            break
    else:
        raise AssertionError("there was no moment with a migration, a start-up and a drain")
    saved = envs.save_state()
    actions = rng.integers(0, 5, (1_500, 6))
    first = [envs.step(row) for row in actions]
    assert any(step[2].any() for step in first)
    for other in (envs, made(FLEET, 6, autoreset_mode=AutoresetMode.SAME_STEP)):
        assert same(other.restore_state(saved), last[0])
        assert same(first, [other.step(row) for row in actions])


# --- rewards ----------------------------------------------------------------------------------------------------------


class Replay:
    """Join-shortest-queue and nothing else through the warm-up, then what was done."""

    name = "replay"
    kinds = ALL_KINDS

    def __init__(self, warmup_s: float, actions: list[int]):
        self.warmup_s = warmup_s
        self.actions = actions[::-1]
        self.warm_up = load_policy("join-shortest-queue")

    def reset(self, batch: int, seed: int) -> None:
        pass

    def decide(self, view: FleetView) -> Decision:
        if view.fleet["time_s"][0] < self.warmup_s:
            dispatch = view.fleet["kind"][0] == KIND_DISPATCH
            return self.warm_up.decide(view) if dispatch else Decision(np.array([NONE]))
        action = self.actions.pop()
        return Decision(np.array([NONE if action == 4 else action]))


def recount(seed: int, **changes: Any) -> tuple[dict[str, float], dict[str, float], RunLog, float]:
    """Components and metrics of an episode of Fleet-v0; the log of the same run, simulated apart; its start."""
    settings = {**SMALL, "hardware_error": 0.0, "scored_requests": 40, **changes}
    envs = FleetVectorEnv(1, kinds=ENVIRONMENTS[FLEET]["kinds"], autoreset_mode=AutoresetMode.DISABLED, **settings)
    rng = np.random.default_rng(seed)
    envs.reset(seed=seed)
    start_s = float(envs._episodes["start"][0][6])
    components: dict[str, float] = {}
    actions: list[int] = []
    ended = False
    while not ended:
        actions.append(int(legal_actions(envs, rng)[0]))
        *_, terminated, _, infos = envs.step(np.array(actions[-1:]))
        ended = bool(terminated[0])
        for name in ("slo_miss", "instance_cost", "migration"):
            components[name] = components.get(name, 0.0) - float(infos[f"reward_{name}"][0])
    episode = envs.scenario.draw(seeding.np_random(seed)[0], envs._limits, {})
    policy = Replay(episode.warmup_s, actions)
    log = simulate(episode.table, episode.fleet, policy, seed=episode.seed)
    assert not policy.actions
    metrics = {name: float(values[0]) for name, values in infos["episode_metrics"].items()}
    return components, metrics, log, start_s


@pytest.mark.parametrize("seed", [0, 1])
def test_components_are_what_a_recount_of_the_log_says(seed: int) -> None:
    weights = RewardWeights(slo_miss=2.0, instance_cost=0.05, migration=0.3)
    components, metrics, log, start_s = recount(seed, reward=weights)
    moves = log.migrations[log.migrations["end_s"] > start_s]
    assert len(moves) > 10
    assert components["migration"] == pytest.approx(0.3 * len(moves))
    assert metrics["migrations"] == np.isin(moves["outcome"], [0, 1]).sum() > 0
    before_s = start_s * 3  # three ready instances through the warm-up, if none failed
    assert components["instance_cost"] == pytest.approx(0.05 * metrics["instance_s"])
    assert metrics["instance_s"] == pytest.approx(log.instances["alive_s"].sum() - before_s, rel=0.02)
    assert metrics["instance_s"] < 4 * metrics["duration_s"]
    assert metrics["duration_s"] == pytest.approx(log.end_s - start_s)


def test_a_request_that_fails_is_a_miss_and_never_finished() -> None:
    """All instances are lost for good: whatever is decided then, there is something to decide, and requests fail."""
    components, metrics, log, start_s = recount(
        3, losses=4, repair_s=1e5, failures_per_hour=0.0, max_hold_s=0.5, scaling=None, reward=RewardWeights()
    )
    requests = log.requests
    failed = requests["status"] == FAILED
    assert 10 < failed.sum() < len(requests)
    finished_s = requests["finish_s"][requests["status"] == FINISHED]
    assert metrics["finished"] == np.sum(finished_s > start_s)
    assert metrics["misses"] >= failed.sum()
    assert components["slo_miss"] == metrics["misses"]
    assert metrics["slo_attainment"] == pytest.approx(1 - metrics["misses"] / metrics["requests"])


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_losses_are_of_different_instances_in_the_scored_part() -> None:
    envs = FleetVectorEnv(1, scenario="node_loss", instances=4, losses=2, scored_requests=20, warmup_requests=5)
    for seed in range(20):
        episode = envs.scenario.draw(np.random.default_rng(seed), envs._limits, {})
        failures = episode.fleet.failures
        assert failures is not None
        times_s = [time_s for time_s, _ in failures.at]
        assert len({instance for _, instance in failures.at}) == 2
        assert episode.warmup_s <= min(times_s) <= max(times_s) <= episode.table.span_s
        assert 20 <= failures.repair_s <= 60
        assert failures.mtbf_s == np.inf
        assert failures.notice_s == 0.0


def test_maintenance_is_announced() -> None:
    envs = FleetVectorEnv(1, scenario="maintenance", instances=4, scored_requests=20, warmup_requests=5)
    failures = envs.scenario.draw(np.random.default_rng(0), envs._limits, {}).fleet.failures
    assert failures is not None
    assert (len(failures.at), failures.notice_s) == (2, 30.0)
    assert 60 <= failures.repair_s <= 180


def test_what_happens_to_instances_is_drawn_apart_from_all_else() -> None:
    def drawn(**changes: Any) -> Any:
        envs = FleetVectorEnv(1, scenario="steady", instances=4, scored_requests=20, warmup_requests=5, **changes)
        return envs.scenario.draw(np.random.default_rng(1), envs._limits, {})

    calm, eventful = drawn(), drawn(losses=2, failures_per_hour=3.0, start_up_s=(1.0, 2.0))
    assert calm.fleet.failures is None
    assert eventful.fleet.failures.mtbf_s == 1200.0
    assert row_records(calm.table).tobytes() == row_records(eventful.table).tobytes()
    assert calm.seed == eventful.seed


def test_a_scenario_says_how_requests_move_and_instances_scale() -> None:
    envs = made(FLEET, rebalancing=Rebalancing(interval_s=1.5))
    episode = envs.scenario.draw(np.random.default_rng(0), envs._limits, {"ready_share": 0.5, "start_up_s": 3.0})
    scaling = episode.fleet.scaling
    assert scaling is not None
    assert (scaling.ready, scaling.start_up_s, scaling.interval_s, scaling.drain_deadline_s) == (2, 3.0, 2.0, 8.0)
    assert episode.fleet.rebalancing == Rebalancing(interval_s=1.5)
