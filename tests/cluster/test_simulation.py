"""Runs as a whole: they repeat, hold, stop, conserve, grow, stream, and say what is wrong with their input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparison import assert_bitwise_equal, fleet_of_oracle, profile_of, run_oracle
from expected_views import Recorder
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import OracleInstance
from strategies import Cluster, clusters, clusters_on_grid, fixed_cluster

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import (
    ClusterBatch,
    Failures,
    FleetConfig,
    Rebalancing,
    RunLog,
    Scaling,
    Telemetry,
    fleet_of,
    kernel,
    loading,
    simulate,
    simulate_stream,
    simulation,
)
from fleetpilot.cluster.state import CUT, ENDED, FAILED, FINISHED, NEED_DECISION, NEVER_ARRIVED
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import NONE, Decision, FleetView
from fleetpilot.workloads.table import RequestTable, make_table, split

ENGINE = OracleInstance(
    "chunked", kv_blocks=200, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, a_s=0.01, b_s=0.0001
)
PROFILE = profile_of(ENGINE, "engine")
JITTERED = PROFILE.replace(jitter_sigma=0.3)
ROUND_ROBIN = load_policy("round-robin")


class Scripted:
    """Answers with the given choices, then with the last one for ever."""

    name = "scripted"

    def __init__(self, *choices: int):
        self.choices = list(choices)

    def reset(self, batch: int, seed: int) -> None:
        self.left = list(self.choices)

    def decide(self, view: FleetView) -> Decision:
        return Decision(np.array([self.left.pop(0) if len(self.left) > 1 else self.left[0]]))


def random_table(requests: int = 300, rate: float = 20.0) -> RequestTable:
    rng = np.random.default_rng(5)
    return make_table(
        "random",
        np.cumsum(rng.exponential(1 / rate, requests)),
        rng.integers(1, 200, requests),
        rng.integers(1, 200, requests),
    )


def assert_same_run(one: RunLog, other: RunLog) -> None:
    assert_bitwise_equal(one, other)
    assert one.instances.tobytes() == other.instances.tobytes()
    for name in ("end_s", "decisions", "forced", "invalid", "held_s", "meta"):
        assert getattr(one, name) == getattr(other, name)


def assert_same_records(some: NDArray[np.void], others: NDArray[np.void]) -> None:
    """Field by field: bytes between fields are lost where records are picked."""
    for name in some.dtype.names or ():
        np.testing.assert_array_equal(some[name], others[name], name)


# --- determinism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [PROFILE, JITTERED], ids=["exact", "jitter"])
def test_the_same_seed_repeats_a_run_bit_by_bit(profile: Any) -> None:
    fleet = FleetConfig.of(profile, 3)
    one, other = (simulate(random_table(), fleet, load_policy("random"), seed=4) for _ in range(2))
    assert_same_run(one, other)


def test_the_seed_decides_random_choices_and_nothing_else() -> None:
    table, fleet = random_table(), FleetConfig.of(PROFILE, 3)
    chosen = [simulate(table, fleet, load_policy("random"), seed).requests["instance"] for seed in (0, 1)]
    assert np.any(chosen[0] != chosen[1])
    one, other = (simulate(table, fleet, ROUND_ROBIN, seed) for seed in (0, 1))
    assert one.requests.tobytes() == other.requests.tobytes()


def test_jitter_has_mean_one_and_its_own_draws_on_each_instance() -> None:
    steps, sigma = 20_000, JITTERED.jitter_sigma
    profile = JITTERED.replace(b_s=0.0, max_model_len=100_000, kv_blocks=10_000)
    table = make_table("long", [0.0, 0.0], [1, 1], [steps, steps])
    log = simulate(table, FleetConfig.of(profile, 2), ROUND_ROBIN, sample_interval_s=None)
    factors = log.requests["finish_s"] / (steps * profile.a_s)
    error = math.sqrt((math.exp(sigma**2) - 1) / steps)
    assert np.all(np.abs(factors - 1) < 4 * error)
    assert factors[0] != factors[1]
    reseeded = simulate(table, FleetConfig.of(profile, 2), ROUND_ROBIN, seed=1, sample_interval_s=None)
    assert np.all(reseeded.requests["finish_s"] != log.requests["finish_s"])


def test_jitter_does_not_depend_on_leaps() -> None:
    fleet = FleetConfig.of(JITTERED, 2)
    leaping, stepping = (simulate(random_table(), fleet, ROUND_ROBIN, leap=leap) for leap in (True, False))
    assert_bitwise_equal(leaping, stepping)


# --- hold -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.floats(0, 10), st.sampled_from([0.1, 3.0, 1e6]))
def test_a_held_request_is_dispatched_when_it_may_be_held_no_longer(
    arrival_s: list[float], max_hold_s: float, hold_interval_s: float
) -> None:
    ones = [1] * len(arrival_s)
    table = make_table("held", sorted(arrival_s), ones, ones)
    fleet = FleetConfig.of(PROFILE, 2, hold_interval_s=hold_interval_s, max_hold_s=max_hold_s)
    log = simulate(table, fleet, Scripted(NONE), check=True)
    np.testing.assert_array_equal(log.requests["dispatch_s"], log.requests["arrival_s"] + max_hold_s)
    assert log.forced == log.decisions == len(table)
    assert log.held_s == pytest.approx(len(table) * max_hold_s)


def test_the_held_head_is_asked_again_after_the_interval_and_at_completions() -> None:
    """One token each, iterations of 10 ms: the first request runs from 0.00 to 0.01 s."""
    profile = PROFILE.replace(b_s=0.0)
    table = make_table("held", [0.0, 0.005, 0.006], [1, 1, 1], [1, 1, 1])
    policy = Recorder(Scripted(0, NONE, NONE, NONE, 0, NONE, 0))
    log = simulate(table, FleetConfig.of(profile, 1, hold_interval_s=0.5), policy, check=True)
    asked_s = [float(view.fleet["time_s"][0]) for view in policy.views]
    # arrivals; the completion at 0.01 s; the interval; at once for the next head; its completion at 0.52 s
    assert asked_s == pytest.approx([0.0, 0.005, 0.006, 0.01, 0.51, 0.51, 0.52])
    assert [int(view.fleet["held"][0]) for view in policy.views] == [0, 0, 1, 2, 2, 1, 1]
    assert [float(view.request["waited_s"][0]) for view in policy.views[3:]] == pytest.approx(
        [0.005, 0.505, 0.504, 0.514]
    )
    assert log.requests["dispatch_s"] == pytest.approx([0.0, 0.51, 0.52])
    assert (log.decisions, log.forced, log.invalid) == (3, 0, 0)
    assert log.held_s == pytest.approx(0.505 + 0.514)


def test_illegal_choices_are_counted_and_hold_the_request() -> None:
    table = make_table("held", [0.0, 1.0], [1, 1], [1, 1])
    fleet = FleetConfig.of(PROFILE, 2, hold_interval_s=0.25, max_hold_s=0.75)
    log = simulate(table, fleet, Scripted(2, 1, 99, -7, 5), check=True)
    # 2 is illegal, so the first waits 0.25 s for the answer 1; the second is asked about four times, then forced
    assert log.requests["dispatch_s"] == pytest.approx([0.25, 1.75])
    assert log.requests["instance"].tolist() == [1, 0]
    assert (log.decisions, log.forced, log.invalid) == (2, 1, 5)


def test_a_request_that_may_not_be_held_goes_where_fewest_are_in_flight() -> None:
    table = make_table("forced", np.zeros(6), np.ones(6, int), np.full(6, 50))
    log = simulate(table, FleetConfig.of(PROFILE, 3, max_hold_s=0.0), Scripted(NONE), check=True)
    assert log.requests["instance"].tolist() == [0, 1, 2, 0, 1, 2]
    assert (log.forced, log.invalid) == (6, 6)


class HoldWhenBusy:
    """The instance with the fewest requests in flight, or hold if that has two."""

    name = "hold-when-busy"

    def reset(self, batch: int, seed: int) -> None:
        pass

    def decide(self, view: FleetView) -> Decision:
        in_flight = view.instances["in_flight"][0]
        return Decision(np.array([NONE if in_flight.min() >= 2 else in_flight.argmin()]))


@given(clusters() | clusters_on_grid(), st.sampled_from([0.25, 10.0]))
def test_holding_does_not_depend_on_leaps(cluster: Cluster, hold_interval_s: float) -> None:
    table, instances = cluster
    logs, views = [], []
    for leap in (True, False):
        policy = Recorder(HoldWhenBusy())
        fleet = fleet_of_oracle(instances, hold_interval_s=hold_interval_s, max_hold_s=1.0)
        logs.append(simulate(table, fleet, policy, leap=leap, check=True))
        views.append(
            [(view.instances.tobytes(), view.request.tobytes(), view.fleet.tobytes()) for view in policy.views]
        )
    assert_bitwise_equal(*logs)
    assert logs[0].held_s == logs[1].held_s
    assert views[0] == views[1]


# --- closed loop, stop ------------------------------------------------------------------------------------------------


def chain(turns: int, think_s: float) -> RequestTable:
    """A session whose turns follow each other's last token."""
    return make_table(
        "chain",
        [0.5] + [math.nan] * (turns - 1),
        [10] * turns,
        [20] * turns,
        parent=np.arange(turns) - 1,
        think_s=[math.nan] + [think_s] * (turns - 1),
        session=[3] * turns,
        turn=np.arange(turns),
    )


@pytest.mark.parametrize("think_s", [0.0, 0.7])
def test_a_turn_arrives_its_think_time_after_the_last_token_of_the_turn_before(think_s: float) -> None:
    log = simulate(chain(5, think_s), FleetConfig.of(PROFILE, 2), ROUND_ROBIN, check=True)
    np.testing.assert_array_equal(log.requests["arrival_s"][1:], log.requests["finish_s"][:-1] + think_s)
    assert log.requests["instance"].tolist() == [0, 1, 0, 1, 0]


def test_a_run_that_stops_says_where_each_request_was() -> None:
    table = chain(5, 0.7)
    whole = simulate(table, FleetConfig.of(PROFILE, 1), ROUND_ROBIN)
    stop_s = float(whole.requests["finish_s"][2]) - 0.015  # two iterations before the third turn's end
    log = simulate(table, FleetConfig.of(PROFILE, 1), ROUND_ROBIN, stop_s=stop_s, check=True)
    assert log.requests["status"].tolist() == [FINISHED, FINISHED, CUT, NEVER_ARRIVED, NEVER_ARRIVED]
    assert log.requests["generated"].tolist() == [20, 20, 18, 0, 0]
    assert log.end_s == stop_s
    for name in ("arrival_s", "dispatch_s", "admitted_s", "first_token_s"):
        np.testing.assert_array_equal(log.requests[name][:3], whole.requests[name][:3])
        assert np.all(np.isnan(log.requests[name][3:]))
    np.testing.assert_array_equal(np.isnan(log.requests["finish_s"]), [False, False, True, True, True])


@given(clusters(), st.floats(0.01, 3))
def test_a_stopped_run_is_the_beginning_of_the_whole_run(cluster: Cluster, stop_s: float) -> None:
    table, instances = cluster
    whole = simulate(table, fleet_of_oracle(instances), ROUND_ROBIN).requests
    token_times = [request.token_times for request in run_oracle(cluster).requests]
    for leap in (True, False):
        stopped = simulate(
            table, fleet_of_oracle(instances), ROUND_ROBIN, stop_s=stop_s, leap=leap, check=True
        ).requests
        finished = stopped["status"] == FINISHED
        np.testing.assert_array_equal(finished, whole["finish_s"] < stop_s)
        assert_same_records(stopped[finished], whole[finished])
        assert np.all(
            (stopped["status"] == FINISHED) | (stopped["status"] == CUT) | (stopped["status"] == NEVER_ARRIVED)
        )
        for name in ("dispatch_s", "admitted_s", "first_token_s"):
            happened = whole[name] < stop_s
            np.testing.assert_array_equal(stopped[name], np.where(happened, whole[name], math.nan), name)
        np.testing.assert_array_equal(stopped["generated"], [sum(t < stop_s for t in times) for times in token_times])


def test_a_held_request_is_cut_too() -> None:
    table = make_table("held", [0.0, 0.5], [1, 1], [1, 1])
    late = simulate(table, FleetConfig.of(PROFILE, 1), Scripted(0, NONE), stop_s=float(table.arrival_s[1]))
    assert late.requests["status"][1] == NEVER_ARRIVED
    log = simulate(table, FleetConfig.of(PROFILE, 1), Scripted(0, NONE), stop_s=1.0, check=True)
    assert log.requests["status"].tolist() == [FINISHED, CUT]
    assert math.isnan(log.requests["dispatch_s"][1])
    assert log.requests["instance"].tolist() == [0, -1]


def test_a_run_ends_with_its_last_request_whatever_the_samples() -> None:
    table = random_table(50)
    logs = [simulate(table, FleetConfig.of(PROFILE, 1), ROUND_ROBIN, sample_interval_s=s) for s in (None, 0.3, 1e6)]
    for log in logs:
        assert log.end_s == log.requests["finish_s"].max()
        assert np.all(log.instances["alive_s"] == log.end_s)
        assert log.instances["busy_s"][0] <= log.end_s


# --- conservation -----------------------------------------------------------------------------------------------------


def cluster_batch(clusters: list[Cluster], *, seed: int = 0) -> ClusterBatch:
    fleets = [fleet_of_oracle(instances) for _, instances in clusters]
    tables = [table for table, _ in clusters]
    rows = max(len(table) for table in tables)
    nodes = max(len(table.node_parent) for table in tables)
    batch = ClusterBatch(loading.capacity_for(fleets, rows, rows, nodes, closed_rows=rows))
    for e, (table, fleet) in enumerate(zip(tables, fleets, strict=True)):
        batch.load(e, fleet, table, seed=seed, stop_s=math.inf)
    return batch


def view_of(batch: ClusterBatch, e: int) -> tuple[bytes, bytes, bytes]:
    instances = int(batch.state.env["instances"][e])
    return (
        batch.view.instances[e, :instances].tobytes(),
        batch.view.request[e].tobytes(),
        batch.view.fleet[e].tobytes(),
    )


def decide_to_the_end(batch: ClusterBatch, e: int) -> list[tuple[bytes, bytes, bytes]]:
    """Dispatch round robin from a pending decision, or the start; returns the views that follow."""
    views = []
    while kernel.advance(batch.handle, e) == NEED_DECISION:
        views.append(view_of(batch, e))
        kernel.apply(batch.handle, e, len(views) % int(batch.state.env["instances"][e]))
    return views


@given(clusters())
def test_nothing_is_left_when_all_have_finished(cluster: Cluster) -> None:
    table, _ = cluster
    batch = cluster_batch([cluster])
    decide_to_the_end(batch, 0)
    env, instance, engine = (getattr(batch.state, name) for name in ("env", "instance", "engine"))
    assert env["active"][0] == env["held"][0] == 0
    assert env["unstarted"][0] == 0
    assert env["finished"][0] == len(table)
    assert env["generated_tokens"][0] == table.output_tokens.sum()
    np.testing.assert_array_equal(instance["free_blocks"] + instance["lru_blocks"], engine["kv_blocks"])
    for name in ("in_batch", "waiting", "decodes", "decode_tokens", "waiting_blocks", "streamed_tokens"):
        assert np.all(instance[name] == 0), name
    assert np.all(batch.state.residency["pins"] == 0)
    ledger = batch.view.instances[0]
    for name in ("in_flight", "unstarted", "unstarted_prompt_tokens", "unstarted_prompt_blocks", "head_prompt_blocks"):
        assert np.all(ledger[name] == 0), name
    for name in ("started_prompt_tokens", "unstarted_uncached_tokens"):
        assert np.all(ledger[name] == 0), name
    assert ledger["predicted_output_tokens"] == pytest.approx(0, abs=1e-6)
    assert np.all(batch.state.slot["row"] == -1)


def test_a_fleet_of_several_profiles_runs_each_at_its_own_pace() -> None:
    parts = [(load_profile("h100-llama-3.1-8b"), 2), (load_profile("a10-llama-7b"), 1)]
    requests = 120
    table = make_table("steady", np.arange(requests) * 0.25, np.full(requests, 300), np.full(requests, 100))
    log = simulate(table, fleet_of(parts), ROUND_ROBIN, check=True)
    assert np.all(log.requests["status"] == FINISHED)
    assert log.instances["kv_blocks"].tolist() == [parts[0][0].kv_blocks] * 2 + [parts[1][0].kv_blocks]
    latency_s = log.requests["finish_s"] - log.requests["arrival_s"]
    means = [latency_s[log.requests["instance"] == i].mean() for i in range(3)]
    assert means[0] == pytest.approx(means[1], rel=0.2)
    assert means[2] > 2 * means[0]
    assert log.meta["instances"] == [parts[0][0].name] * 2 + [parts[1][0].name]


# --- growth, streams ------------------------------------------------------------------------------------------------


def test_more_requests_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 at once, more than there are slots at first, give what they give with slots for all."""
    requests = 6_000
    table = make_table("flood", np.zeros(requests), np.full(requests, 8), np.full(requests, 2))
    fleet = FleetConfig.of(PROFILE, 2)
    assert requests > simulation._FIRST_SLOTS
    grown = simulate(table, fleet, ROUND_ROBIN)
    monkeypatch.setattr(simulation, "_FIRST_SLOTS", 10_000)
    assert_same_run(grown, simulate(table, fleet, ROUND_ROBIN))
    assert np.all(grown.requests["status"] == FINISHED)


@given(clusters())
def test_slots_that_grow_from_one_change_nothing(cluster: Cluster) -> None:
    table, instances = cluster
    enough = simulate(table, fleet_of_oracle(instances), ROUND_ROBIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_FIRST_SLOTS", 1)
        assert_same_run(simulate(table, fleet_of_oracle(instances), ROUND_ROBIN), enough)


def streamed(
    table: RequestTable, rows_per_part: int, fleet: FleetConfig, **options: Any
) -> tuple[RunLog, NDArray[np.void]]:
    ended: list[NDArray[np.void]] = []
    log = simulate_stream(split(table, rows_per_part), fleet, load_policy("random"), on_ended=ended.append, **options)
    requests = np.concatenate(ended)
    return log, requests[np.argsort(requests["row"])]


@pytest.mark.parametrize("rows_per_part", [1, 7, 300, 1_000])
@pytest.mark.parametrize("sample_interval_s", [None, 0.5])
def test_a_stream_equals_its_table(rows_per_part: int, sample_interval_s: float | None) -> None:
    table, fleet = random_table(), FleetConfig.of(JITTERED, 2)
    whole = simulate(table, fleet, load_policy("random"), seed=3, sample_interval_s=sample_interval_s)
    log, requests = streamed(table, rows_per_part, fleet, seed=3, sample_interval_s=sample_interval_s)
    assert_same_records(requests, whole.requests)
    assert_same_run(replace(log, requests=whole.requests), whole)


def test_a_stream_of_many_requests_is_flushed_again_and_again() -> None:
    requests = 30_000
    table = make_table("many", np.arange(requests) * 0.02, np.full(requests, 4), np.full(requests, 2))
    ended: list[int] = []
    fleet = FleetConfig.of(PROFILE, 1)
    simulate_stream(split(table, 1_000), fleet, ROUND_ROBIN, on_ended=lambda part: ended.append(len(part)))
    assert sum(ended) == requests
    assert max(ended) < requests / 2


def test_a_stream_refuses_what_it_cannot_do() -> None:
    fleet, table = FleetConfig.of(PROFILE, 1), random_table(10)
    shared = make_table("shared", [0.0], [4], [4], prefix_node=[0], node_parent=[-1], node_end_tokens=[4])
    for parts, message in (
        ([], "parts: got none"),
        ([chain(2, 1.0)], "chain: expected parts without sessions and shared prefixes"),
        ([table, shared], "shared: expected parts without sessions and shared prefixes"),
        ([table, table], r"random: arrival_s\[0\] = .*: expected at least .*, the last arrival of the parts before"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate_stream(parts, fleet, ROUND_ROBIN, on_ended=lambda ended: None)


# --- saved states -----------------------------------------------------------------------------------------------------


@given(clusters(), st.integers(0, 24))
def test_a_restored_state_goes_on_as_before(cluster: Cluster, decisions: int) -> None:
    batch = cluster_batch([cluster])
    for decision in range(decisions):
        if kernel.advance(batch.handle, 0) == ENDED:
            return
        kernel.apply(batch.handle, 0, decision % len(cluster[1]))
    saved = batch.save()
    first = decide_to_the_end(batch, 0)
    end = [array.tobytes() for array in batch.state]
    batch.restore(saved)
    assert decide_to_the_end(batch, 0) == first
    assert [array.tobytes() for array in batch.state] == end


def test_clusters_in_one_batch_do_not_touch_each_other() -> None:
    clusters = [fixed_cluster(seed) for seed in range(6)]
    alone = [decide_to_the_end(cluster_batch([cluster]), 0) for cluster in clusters]
    batch = cluster_batch(clusters)
    together: list[list[tuple[bytes, bytes, bytes]]] = [[] for _ in clusters]
    going = set(range(len(clusters)))
    while going:
        for e in sorted(going):
            if kernel.advance(batch.handle, e) != NEED_DECISION:
                going.remove(e)
                continue
            together[e].append(view_of(batch, e))
            kernel.apply(batch.handle, e, len(together[e]) % len(clusters[e][1]))
    assert together == alone


# --- input ----------------------------------------------------------------------------------------------------------


def test_an_empty_table_is_a_run_of_nothing() -> None:
    log = simulate(make_table("empty", [], [], []), FleetConfig.of(PROFILE, 2), ROUND_ROBIN)
    assert len(log.requests) == log.decisions == log.end_s == 0
    assert log.itl_counts.sum() == 0


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"max_model_len": 100}, "100, the max_model_len"),
        ({"kv_blocks": 5, "max_model_len": 80}, "80, the KV capacity"),
        (
            {"scheduler": "prefill_first", "max_num_batched_tokens": 90, "max_model_len": 90},
            "90, the m",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_named_with_the_limit(changes: dict[str, Any], limit: str) -> None:
    table = make_table("long", [0.0, 1.0, 2.0], [20, 60, 10], [20, 45, 10])
    message = rf"request 1: prompt_tokens \+ output_tokens = 105: expected at most {limit}.* of engine"
    with pytest.raises(ValueError, match=message):
        simulate(table, FleetConfig.of(PROFILE.replace(**changes), 2), ROUND_ROBIN)


def test_a_fleet_that_fails_faster_than_it_serves_comes_to_an_end() -> None:
    table = make_table("long", [0.0, 0.0], [8, 8], [500, 500])
    slow = PROFILE.replace(a_s=1.0, kv_blocks=1000)
    fleet = FleetConfig.of(slow, 2, failures=Failures(mtbf_s=1.0, repair_s=0.5, max_restarts=30))
    log = simulate(table, fleet, ROUND_ROBIN, check=True)
    assert set(log.requests["status"]) == {FAILED}
    assert set(log.requests["restarts"]) == {31}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_s": math.nan}, "stop_s = nan: expected"),
        ({"stop_s": 0.0}, "stop_s = 0.0: expected"),
        ({"sample_interval_s": math.inf}, "sample_interval_s = inf: expected"),
        ({"sample_interval_s": 0.0}, "sample_interval_s = 0.0: expected"),
        ({"seed": -1}, "seed = -1: expected"),
    ],
)
def test_a_parameter_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(random_table(3), FleetConfig.of(PROFILE, 1), ROUND_ROBIN, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FleetConfig(()), "profiles: got no instance"),
        (lambda: FleetConfig.of(PROFILE, 0), "instances = 0: expected at least 1"),
        (lambda: fleet_of([(PROFILE, 1), (JITTERED, 0)]), "instances of engine = 0: expected at least 1"),
        (lambda: FleetConfig.of(PROFILE, 1, slo_classes=()), "slo_classes: got none"),
        (lambda: FleetConfig.of(PROFILE, 1, hold_interval_s=0.0), "hold_interval_s = 0.0: expected a finite time > 0"),
        (lambda: FleetConfig.of(PROFILE, 1, max_hold_s=math.nan), "max_hold_s = nan: expected a finite time >= 0"),
        (lambda: Telemetry(poll_interval_s=math.nan), "poll_interval_s = nan: expected a finite time > 0"),
        (lambda: Telemetry(poll_interval_s=0.0), "poll_interval_s = 0.0: expected a finite time > 0"),
        (lambda: Telemetry(poll_delay_s=-0.1), "poll_delay_s = -0.1: expected a finite time >= 0"),
        (lambda: make_table("nan", [math.nan], [1], [1]), r"arrival_s\[0\] = nan: expected a finite time >= 0"),
    ],
)
def test_a_configuration_out_of_range_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rebalancing(interval_s=1e-12), r"interval_s = 1e-12: expected a number from 0\.001 to 1e\+09"),
        (lambda: Rebalancing(interval_s="x"), "interval_s = 'x': expected a number"),
        (lambda: Rebalancing(max_pairs=1.5), "max_pairs = 1.5: expected a whole number from 1"),
        (lambda: Rebalancing(max_stages=1), "max_stages = 1: expected a whole number from 2"),
        (lambda: Rebalancing(slowdown=1e300), r"slowdown = 1e\+300: expected a number from 1 to 1000"),
        (lambda: Rebalancing(choice="first"), "choice = 'first': expected one of last, shortest"),
        (lambda: Rebalancing(protocol=None), "protocol = None: expected one of llumnix, vllm"),
        (lambda: Scaling(ready=1.5), "ready = 1.5: expected a whole number"),
        (lambda: Scaling(min_instances=3, max_instances=2), "min_instances = 3: expected a whole number from 1 to 2"),
        (lambda: Scaling(drain_deadline_s=None), "drain_deadline_s = None: expected a number >= 0"),
        (lambda: Failures(mtbf_s=1e-9), "mtbf_s = 1e-09: expected a number >= 1"),
        (lambda: Failures(max_restarts=-1), "max_restarts = -1: expected a whole number from 0"),
        (lambda: Failures(notice_s=-1.0), r"notice_s = -1\.0: expected a number from 0 to 1e\+09"),
        (lambda: Failures(notice_s="soon"), "notice_s = 'soon': expected a number"),
        (lambda: Failures(at=(1.0, 0)), r"at = \(1\.0, 0\): expected a tuple of pairs"),
        (lambda: Failures(at=((1.0, 0.5),)), r"at = \(1\.0, 0\.5\): expected a time >= 0 and an instance"),
        (lambda: FleetConfig.of(PROFILE, 2, rebalancing=0.2), "rebalancing = 0.2: expected a Rebalancing, or None"),
        (lambda: FleetConfig.of(PROFILE, 2, scaling=Scaling(ready=3)), "ready = 3: expected at most 2"),
        (
            lambda: FleetConfig.of(PROFILE, 2, failures=Failures(at=((1.0, 2),))),
            "a failure of instance 2: expected 0",
        ),
    ],
)
def test_bad_fleets_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
