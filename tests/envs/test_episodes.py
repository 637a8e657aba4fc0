"""What episodes are drawn to be: parameters, pins, load, length, requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fleetpilot.cluster import FleetConfig
from fleetpilot.cluster.loading import engine_record, node_records, row_records
from fleetpilot.envs import SCENARIOS, load_scenario, scenario_rows
from fleetpilot.envs.capacity import mean_capacity_rps
from fleetpilot.envs.episodes import Episode, Scenario
from fleetpilot.envs.requests import LlumnixRequests, RequestMix, SessionRequests
from fleetpilot.evaluation.segments import capacity_rps as measured_capacity_rps
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads.table import RequestTable, validated

SLOTS = 16


def draw(scenario: Scenario, seed: int, **pinned: float) -> Episode:
    return scenario.draw(np.random.default_rng(seed), scenario.limits(SLOTS), pinned)


def table_of(scenario: Scenario, n: int, seed: int = 0) -> RequestTable:
    """Requests with every parameter in the middle of its range."""
    values = {name: float(np.mean(limit)) for name, limit in scenario.limits(SLOTS).items()}
    return scenario.requests.draw(n, values, np.random.default_rng(seed))


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_parameters_fill_their_ranges_and_stay_in_them(name: str) -> None:
    scenario = load_scenario(name).with_changes(
        load=(0.5, 1.0), fleet_size=(2, 4), scored_requests=3, warmup_requests=2, poll_delay_s=(0.0, 0.5)
    )
    limits = scenario.limits(SLOTS)
    drawn = [draw(scenario, seed).parameters for seed in range(60)]
    assert {p["fleet_size"] for p in drawn} == {2, 3, 4}
    for key, (low, high) in limits.items():
        values = np.array([p[key] for p in drawn])
        assert low <= values.min() <= values.max() <= high
        if scenario.parameters[key].whole is False and high > low:
            assert np.ptp(values) > 0.8 * (high - low)


@pytest.mark.parametrize("name", SCENARIOS)
def test_pinning_one_parameter_leaves_the_other_draws_alone(name: str) -> None:
    scenario = load_scenario(name).with_changes(scored_requests=5, warmup_requests=5)
    free = draw(scenario, 1)
    pinned = draw(scenario, 1, load=0.31)
    assert pinned.parameters["load"] == 0.31
    assert {k: v for k, v in pinned.parameters.items() if k not in ("load", "rate_rps")} == {
        k: v for k, v in free.parameters.items() if k not in ("load", "rate_rps")
    }
    np.testing.assert_array_equal(pinned.table.output_tokens, free.table.output_tokens)
    np.testing.assert_allclose(
        pinned.table.arrival_s * pinned.parameters["rate_rps"], free.table.arrival_s * free.parameters["rate_rps"]
    )
    assert pinned.engines.tobytes() == free.engines.tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lod": 0.5}, "option of scenario 'steady' 'lod' is not known; expected one of cv, failures_per_hour, "),
        ({"load": "high"}, "load = 'high': expected a number from 0.01 to 3"),
        ({"load": True}, "load = True"),
        ({"load": float("nan")}, "load = nan"),
        ({"cv": 0.0}, "cv = 0.0: expected a number from 0.1 to 10"),
        ({"fleet_size": 2.5}, "fleet_size = 2.5: expected a whole number"),
        ({"fleet_size": 17}, "fleet_size = 17: expected at most 16, which it was made for"),
        ({"scored_requests": 5_000}, "scored_requests = 5000: expected at most 1000"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    scenario = load_scenario("steady")
    with pytest.raises(ValueError, match=message):
        scenario.pins(options, scenario.limits(SLOTS))


def test_requests_that_no_engine_can_hold_are_refused() -> None:
    scenario = load_scenario("long_prefix").with_changes(profile="a10-llama-7b", scored_requests=5, warmup_requests=5)
    with pytest.raises(ValueError, match=r"prompt_tokens \+ output_tokens = .* of a10-llama-7b"):
        draw(scenario, 0)


def test_episodes_are_functions_of_their_seed() -> None:
    scenario = load_scenario("bursty").with_changes(scored_requests=10)
    episodes = [draw(scenario, seed) for seed in (3, 3, 4)]
    assert episodes[0].engines.tobytes() == episodes[1].engines.tobytes()
    for records in (row_records, node_records):
        first, again, other = (records(episode.table).tobytes() for episode in episodes)
        assert first == again != other


def test_the_hardware_is_off_by_what_it_may_be_and_the_dispatcher_is_not_told() -> None:
    scenario = load_scenario("steady").with_changes(scored_requests=2, warmup_requests=1)
    (profile,) = scenario.hardware
    factors = np.array([draw(scenario, seed).engines["cost"]["b_s"].min() / profile.b_s for seed in range(60)])
    assert 0.8 <= factors.min() < 0.85
    assert 1.15 < factors.max() <= 1.2
    episode = draw(scenario, 0)
    assert episode.fleet.profiles == (profile,) * SLOTS
    exact = draw(scenario, 0, hardware_error=0.0)
    assert exact.engines["cost"]["b_s"].max() == profile.b_s


# --- length and load -------------------------------------------------------------------------------------------------


def test_the_end_cannot_be_foreseen() -> None:
    """A quarter of the mean, then at any time as likely as at any other, up to twice the mean."""
    scenario = load_scenario("steady").with_changes(warmup_requests=10, scored_requests=20)
    scored = np.array([len(draw(scenario, seed).table) - 10 * SLOTS for seed in range(1500)]) / (20 * SLOTS)
    assert scored.min() >= 0.249
    assert scored.max() <= 2.001
    alive = [np.mean(scored > x) for x in (0.25, 0.75, 1.25, 1.75)]
    hazards = -np.diff(np.log(alive)) / 0.5
    np.testing.assert_allclose(hazards, 1 / 0.75, rtol=0.2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_warm_up_leaves_requests_to_score(name: str) -> None:
    for warmup, scored in ((1, 1), (50, 1), (20, 10)):
        scenario = load_scenario(name).with_changes(warmup_requests=warmup, scored_requests=scored)
        for seed in range(5):
            episode = draw(scenario, seed, fleet_size=1 if scenario.pools is None else 2)
            assert episode.warmup_s <= episode.table.span_s


@pytest.mark.parametrize("name", ["steady", "bursty", "morning_peak"])
@pytest.mark.parametrize("load", [0.4, 1.1])
def test_arrivals_come_at_the_rate_of_the_load(name: str, load: float) -> None:
    scenario = load_scenario(name).with_changes(scored_requests=100, warmup_requests=10)
    episode = draw(scenario, 0, load=load, hardware_error=0.0)
    rate_rps = len(episode.table) / episode.table.span_s
    assert rate_rps == pytest.approx(episode.parameters["rate_rps"], rel=0.05)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "agents"])  # a closed loop has no backlog
def test_capacity_is_what_the_simulator_gets_through(name: str) -> None:
    scenario = load_scenario(name)
    source = scenario.requests
    if isinstance(source, RequestMix):  # the share of one of 16 instances
        prefixes = dataclasses.replace(source.prefixes, count=source.prefixes.count // SLOTS or 1)
        scenario = dataclasses.replace(scenario, requests=dataclasses.replace(source, prefixes=prefixes))
    hardware = scenario.hardware[0].replace(priority_order=False)  # or the backlog is served by kind
    tables = [table_of(scenario, 10_000, seed) for seed in range(3)]
    instances = 1 if scenario.pools is None else len(scenario.pools.roles)
    fleet = FleetConfig((hardware,) * instances, pools=scenario.pools)
    measured_rps = [measured_capacity_rps(table, fleet) for table in tables]
    formula_rps = [
        scenario.capacity_factor
        * instances
        * mean_capacity_rps(engine_record(hardware).reshape(1), table, instances, scenario.pools)
        for table in tables
    ]
    assert np.mean(formula_rps) == pytest.approx(np.mean(measured_rps), rel=0.10)


def test_the_rate_of_slo_1000rps_is_what_its_name_says() -> None:
    rates = [draw(load_scenario("slo_1000rps"), seed, hardware_error=0.0).parameters["rate_rps"] for seed in range(5)]
    assert np.mean(rates) == pytest.approx(1000, rel=0.05)


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_tables_hold_what_tables_promise(name: str) -> None:
    source = load_scenario(name).requests
    table = table_of(load_scenario(name), 700)
    assert validated(table) is table
    assert len(table) == 700
    assert len(table.node_end_tokens) <= source.most_nodes(700)
    assert table.slo_class.max() < len(source.slo_classes)
    assert row_records(table)["closed"].any() == source.closed_loop()
    for column in dataclasses.fields(table):
        value = getattr(table, column.name)
        if isinstance(value, np.ndarray) and len(value) == 700:
            assert value.dtype == getattr(table.replace(), column.name).dtype


def mix(name: str) -> RequestMix:
    source = load_scenario(name).requests
    assert isinstance(source, RequestMix)
    return source


def test_a_mix_has_the_shares_and_lengths_asked_for() -> None:
    source = mix("chat_and_batch")
    values = {"cv": 1.0, "prompt_scale": 1.0, "output_scale": 2.0, "prefix_share": 0.7, "mix": 0.25}
    table = source.draw(20_000, values, np.random.default_rng(0))
    batch = table.slo_class == 1
    assert np.mean(batch) == pytest.approx(0.25, abs=0.01)
    assert np.mean(table.prefix_node >= 0) == pytest.approx(0.7, abs=0.01)
    for k, kind in enumerate(source.kinds):
        assert np.median(table.output_tokens[table.slo_class == k]) == pytest.approx(2 * kind.output.median, rel=0.05)
        assert set(table.priority[table.slo_class == k]) == {kind.priority}
        mean = table.output_tokens[table.slo_class == k].mean()
        np.testing.assert_allclose(table.predicted_output_tokens[table.slo_class == k], mean, rtol=1e-5)
    own = table.prompt_tokens - np.append(table.node_end_tokens, 0)[table.prefix_node]
    assert own.min() >= 1


def test_prefixes_are_as_popular_as_their_ranks_say() -> None:
    source = mix("long_prefix")
    values = {"cv": 1.0, "prompt_scale": 1.0, "output_scale": 1.0, "prefix_share": 0.6}
    nodes = source.draw(40_000, values, np.random.default_rng(0)).prefix_node
    popularity = np.arange(1, source.prefixes.count + 1) ** -source.prefixes.popularity
    counts = np.bincount(nodes[nodes >= 0], minlength=source.prefixes.count)
    np.testing.assert_allclose(counts / len(nodes), 0.6 * popularity / popularity.sum(), atol=0.005)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_bursts_are_as_bursty_as_asked_for(cv: float) -> None:
    values = {"cv": cv, "prompt_scale": 1.0, "output_scale": 1.0, "prefix_share": 0.0, "mix": 0.0}
    gaps = np.diff(mix("bursty").draw(40_000, values, np.random.default_rng(0)).arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_the_morning_peak_peaks() -> None:
    source = mix("morning_peak")
    values = {"cv": 1.0, "prompt_scale": 1.0, "output_scale": 1.0, "prefix_share": 0.5}
    table = source.draw(6_000, values, np.random.default_rng(0))
    counts, _ = np.histogram(table.arrival_s, np.linspace(0, 6_000, len(source.course) + 1))
    np.testing.assert_allclose(counts / 1_000, source.course, rtol=0.15)


def test_llumnix_lengths_are_those_of_table_1() -> None:
    table = LlumnixRequests("M-M").draw(5_000, {"cv": 1.0}, np.random.default_rng(0))
    assert table.prompt_tokens.mean() == pytest.approx(256, rel=0.02)
    assert np.median(table.output_tokens) == pytest.approx(32, rel=0.1)


def test_sessions_come_at_one_request_per_second() -> None:
    source = load_scenario("agents").requests
    assert isinstance(source, SessionRequests)
    table = source.draw(3_000, {"cv": 1.0}, np.random.default_rng(0))
    assert np.nanmax(table.arrival_s) == pytest.approx(3_000, rel=0.1)
    assert np.isnan(table.arrival_s).mean() > 0.7


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_every_scenario_is_listed_under_its_name() -> None:
    assert [name for name, _ in scenario_rows()] == list(SCENARIOS)
    assert all(scenario.name == name and scenario.summary for name, scenario in SCENARIOS.items())


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(ValueError, match="scenario 'llumnix/X' is not known; expected one of steady"):
        load_scenario("llumnix/X")


def test_changes_keep_the_rest() -> None:
    scenario = load_scenario("steady").with_changes(load=0.9).with_changes(cv=2.0, profile=load_profile("tiny-cpu"))
    limits = scenario.limits(4)
    assert (limits["load"], limits["cv"]) == ((0.9, 0.9), (2.0, 2.0))
    assert [profile.name for profile in scenario.hardware] == ["tiny-cpu"]
