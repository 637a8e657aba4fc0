"""Scenarios that are parts of a trace, and fleets of several profiles."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from fleetpilot.envs import FleetVectorEnv, load_scenario
from fleetpilot.envs.episodes import Episode, Scenario
from fleetpilot.envs.requests import TraceRequests
from fleetpilot.envs.testing import check_vector_env
from fleetpilot.evaluation import capacity_rps
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.training.config import TrainConfig, config_to_toml, load_config
from fleetpilot.workloads import read_trace, workload
from fleetpilot.workloads.table import make_table, validated

SMALL = {"fleet_size": 4, "warmup_requests": 10, "scored_requests": 20}
TWO = ("h100-llama-3.1-8b", "l40s-llama-3.1-8b")


@pytest.fixture
def conversations(traces: Path) -> Path:
    return traces / "azure_2023" / "AzureLLMInferenceTrace_conv.csv"


def draw(scenario: Scenario, seed: int, **pinned: float) -> Episode:
    return scenario.draw(np.random.default_rng(seed), scenario.limits(4), pinned)


def test_an_episode_is_a_part_of_the_trace_at_another_rate(conversations: Path) -> None:
    table = read_trace(conversations)
    scenario = load_scenario(str(conversations)).with_changes(**SMALL)
    firsts = set()
    for seed in range(10):
        part = validated(draw(scenario, seed).table)
        rows = part.source_row - part.source_row[0] + np.searchsorted(table.source_row, part.source_row[0])
        firsts.add(int(rows[0]))
        np.testing.assert_array_equal(part.prompt_tokens, table.prompt_tokens[rows])
        np.testing.assert_array_equal(part.output_tokens, table.output_tokens[rows])
        gaps_s, original_s = np.diff(part.arrival_s), np.diff(table.arrival_s[rows])
        np.testing.assert_allclose(gaps_s * original_s.sum(), original_s * gaps_s.sum(), atol=1e-6)
    assert len(firsts) == 10


def test_its_rate_is_that_of_the_load(conversations: Path) -> None:
    scenario = load_scenario(str(conversations)).with_changes(**{**SMALL, "scored_requests": 200})
    for load in (0.4, 1.1):
        episode = draw(scenario, 0, load=load)
        rate_rps = len(episode.table) / episode.table.span_s
        assert rate_rps == pytest.approx(episode.parameters["rate_rps"], rel=0.01)


def test_shared_prefixes_stay_shared_and_there_is_room_for_them(traces: Path) -> None:
    (path,) = (traces / "mooncake").glob("conversation*")
    scenario = load_scenario(f"{path}?load_factor=1").with_changes(**SMALL)
    source = scenario.requests
    assert isinstance(source, TraceRequests)
    for seed in range(5):
        part = validated(draw(scenario, seed).table)
        assert (part.prefix_node >= 0).any()
        assert len(part.node_parent) <= source.most_nodes(len(part)) < len(source.table.node_parent)


@pytest.mark.parametrize("name", ["gamma?rate=3&cv=4&n=600", "twin/azure-conv?n=600"])
def test_a_workload_is_a_scenario_too(name: str) -> None:
    id = "fleetpilot.envs:fleetpilot/Dispatch-v0"
    settings = {"scenario": name, "instances": 4, "profile": TWO, **SMALL}
    vector, single = (functools.partial(make, id, **settings) for make in (gymnasium.make_vec, gymnasium.make))
    check_vector_env(vector, single, num_envs=3, steps=400)


@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "mooncake-conv"])
def test_a_twin_s_episodes_are_served_at_their_load(name: str) -> None:
    """Below capacity what is waiting does not grow, and what the formula of the capacity says is what is measured."""
    scenario = load_scenario(name).with_changes(scored_requests=200, hardware_error=0.0)
    parts = [draw(scenario, seed, load=1.0) for seed in (0, 1, 2)]
    assert len({part.table.arrival_s[:10].tobytes() for part in parts}) == 3
    longest = max(int((part.table.prompt_tokens + part.table.output_tokens).max()) for part in parts)
    assert longest <= scenario.hardware[0].max_model_len
    measured = [capacity_rps(part.table, part.fleet) for part in parts]
    assert np.mean([part.parameters["rate_rps"] for part in parts]) == pytest.approx(np.mean(measured), rel=0.1)


def test_instances_have_the_profiles_in_turn() -> None:
    profiles = tuple(load_profile(name) for name in TWO)
    scenario = load_scenario("bursty").with_changes(profile=TWO, **{**SMALL, "fleet_size": 3})
    episode = draw(scenario, 0)
    assert episode.fleet.profiles == (*profiles, profiles[0])
    assert episode.engines["kv_blocks"].tolist() == [profiles[k].kv_blocks for k in (0, 1, 0)]
    factors = episode.engines["cost"]["b_s"] / [profiles[k].b_s for k in (0, 1, 0)]
    assert np.ptp(factors) < 1e-12
    assert factors[0] != 1.0


def test_the_load_of_several_profiles_is_of_what_they_get_through_together() -> None:
    def rate_rps(*profiles: str) -> float:
        scenario = load_scenario("llumnix/M-M").with_changes(profile=profiles, fleet_size=2)
        return draw(scenario, 0).parameters["rate_rps"]

    assert rate_rps(*TWO) == pytest.approx((rate_rps(TWO[0]) + rate_rps(TWO[1])) / 2)


def test_a_training_on_a_trace_and_several_profiles(conversations: Path, tmp_path: Path) -> None:
    scenarios = {str(conversations): {"profile": list(TWO), "load": [0.5, 0.9], **SMALL}}
    config = TrainConfig(
        name="mine", environment="fleetpilot/Dispatch-v0", decisions=1, instances=4, scenarios=scenarios
    )
    path = tmp_path / "mine.toml"
    path.write_text(config_to_toml(config), "utf-8")
    (arguments,) = load_config(str(path)).environments().values()
    envs = FleetVectorEnv(2, **arguments)
    assert [profile.name for profile in envs.scenario.hardware] == list(TWO)
    envs.close()


def test_what_cannot_be_a_scenario_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scenario 'mine\.csv' is not known; .* a trace file or a workload"):
        load_scenario("mine.csv")
    with pytest.raises(ValueError, match="rate"):
        load_scenario("gamma?rate=none")
    with pytest.raises(ValueError, match="requests that wait for the answers of others"):
        load_scenario("sessions/chat?n=50")
    with pytest.raises(ValueError, match="profile: got none"):
        load_scenario("steady").with_changes(profile=())
    scenario = load_scenario("gamma?rate=1&n=100").with_changes(**SMALL)
    needed = "100 requests for episodes of up to 200; expected a longer trace, or less of fleet_size"
    with pytest.raises(ValueError, match=re.escape(needed)):
        scenario.size(1, 4)
    together = TraceRequests(make_table("burst", np.zeros(50), np.full(50, 10), np.full(50, 10)))
    with pytest.raises(ValueError, match="burst: rows 0 to 49 arrive at once"):
        together.draw(50, {}, np.random.default_rng(0))


def test_one_request_is_a_part(conversations: Path) -> None:
    assert len(TraceRequests(read_trace(conversations)).draw(1, {}, np.random.default_rng(0))) == 1


def test_a_trace_is_read_once() -> None:
    name = "gamma?rate=1&n=400"
    assert load_scenario(name) is load_scenario(name)
    assert len(workload(name)) == 400
