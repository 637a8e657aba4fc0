"""Cutting traces into segments, and loads relative to a measured capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, simulate
from fleetpilot.evaluation import at_load, capacity_rps, cut
from fleetpilot.evaluation.segments import (
    BACKLOG,
    _backlog,
    instances_for_load,
    rate_rps,
)
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.workloads.selection import select, superpose, within_length
from fleetpilot.workloads.table import RequestTable, make_table

A10 = load_profile("a10-llama-7b")
H100 = load_profile("h100-llama-3.1-8b")
NAN = np.nan


def steady(n: int = 400, rate: float = 2.0) -> RequestTable:
    rng = np.random.default_rng(1)
    return make_table("steady", np.arange(n) / rate, rng.integers(50, 500, n), rng.integers(20, 200, n))


SESSIONS = make_table(
    "sessions",
    [0.0, 4.0, NAN, 6.0, NAN, 10.0],
    [100, 200, 300, 100, 400, 150],
    [10, 10, 10, 10, 10, 10],
    parent=[-1, -1, 0, 1, 2, 3],
    think_s=[NAN, NAN, 5.0, NAN, 5.0, NAN],
    turn=[0, 0, 1, 1, 2, 2],
    node_parent=[-1, 0, -1, 2],
    node_end_tokens=[50, 110, 90, 150],
    prefix_node=[0, -1, 1, 2, 0, 2],
    own_node=[1, 2, -1, -1, -1, 3],
)
"""Row 0 has turns 2 and 4 released by its answers; rows 1, 3, 5 are a session of the open loop."""


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_every_request_is_in_exactly_one_segment(times: list[float], k: int) -> None:
    times = [*np.linspace(0, 1000, 2 * k).tolist(), *times]  # no window is empty
    table = make_table("t", sorted(times), np.arange(1, len(times) + 1), [1] * len(times))
    segments = cut(table, k)
    assert np.concatenate([s.source_row for s in segments]).tolist() == list(range(len(times)))
    for i, segment in enumerate(segments):
        assert segment.arrival_s.min() >= 0
        assert segment.span_s <= table.span_s / k * (1 + 1e-9)
        start_s = i * table.span_s / k
        assert segment.arrival_s + start_s == pytest.approx(table.arrival_s[segment.source_row])


def test_a_table_without_requests_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing: no requests; expected at least one"):
        cut(make_table("nothing", [], [], []), 10)


def test_a_window_without_requests_is_an_error() -> None:
    with pytest.raises(ValueError, match="window 1 of 3 has no request; expected fewer segments"):
        cut(make_table("gap", [0.0, 1.0, 30.0], [1] * 3, [1] * 3), 3)


def test_a_closed_loop_chain_stays_whole_and_an_open_one_is_parted() -> None:
    first, second = cut(SESSIONS, 2)
    assert first.source_row.tolist() == [0, 1, 2, 4]
    assert first.parent.tolist() == [-1, -1, 0, 2]
    assert second.source_row.tolist() == [3, 5]
    assert second.parent.tolist() == [-1, 0]
    assert second.arrival_s.tolist() == [1.0, 5.0]


def test_shared_prefixes_stay_shared_inside_a_segment() -> None:
    first, second = cut(SESSIONS, 2)
    assert (first.node_parent.tolist(), first.node_end_tokens.tolist()) == ([-1, 0, -1], [50, 110, 90])
    assert (second.node_parent.tolist(), second.node_end_tokens.tolist()) == ([-1, 0], [90, 150])
    assert second.prefix_node.tolist() == [0, 0]
    assert second.own_node.tolist() == [-1, 1]


def test_a_selection_is_a_valid_table() -> None:
    for rows in ([0, 2], [1, 3, 5], [5], [0, 1, 2, 3, 4, 5]):
        mask = np.isin(np.arange(6), rows)
        part = select(SESSIONS, mask)
        assert part.replace(name="valid").prompt_tokens.tolist() == SESSIONS.prompt_tokens[rows].tolist()


@pytest.mark.parametrize("k", [0, -1])
def test_there_is_at_least_one_segment(k: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        cut(steady(), k)


def test_superposed_windows_keep_their_requests_and_their_own_time() -> None:
    table = steady(400, rate=2.0)
    double = superpose(table, 2)
    assert rate_rps(double) == pytest.approx(2 * rate_rps(table), rel=0.02)
    assert sorted(double.source_row) == list(range(400))
    windows = (double.source_row >= 200).astype(int)
    assert double.arrival_s + windows * table.span_s / 2 == pytest.approx(table.arrival_s[double.source_row])


def test_superposed_turns_keep_their_chain_and_their_prefixes() -> None:
    double = superpose(SESSIONS, 2)
    assert double.source_row.tolist() == [0, 2, 4, 3, 1, 5]  # times 0, 0, 0, 1, 4, 5 in their windows
    assert double.parent.tolist() == [-1, 0, 1, -1, -1, 3]
    assert double.prefix_node.tolist() == SESSIONS.prefix_node[double.source_row].tolist()


def test_requests_that_are_too_long_go_with_what_they_would_release() -> None:
    kept = within_length(SESSIONS, 309)  # row 2 (310 tokens) and row 4 (410 tokens, released by it) go
    assert kept.source_row.tolist() == [0, 1, 3, 5]
    released_too = within_length(SESSIONS.replace(prompt_tokens=np.array([100, 200, 300, 100, 60, 150], np.int32)), 309)
    assert released_too.source_row.tolist() == [0, 1, 3, 5]
    assert within_length(SESSIONS, 410) is SESSIONS


def test_capacity_adds_up_over_instances_and_kinds() -> None:
    table = steady()
    one = capacity_rps(table, FleetConfig((A10,)))
    fast = capacity_rps(table, FleetConfig((H100,)))
    assert fast > 2 * one
    assert capacity_rps(table, FleetConfig((A10, A10, H100))) == pytest.approx(2 * one + fast)


@pytest.mark.parametrize(("profile", "n"), [(A10, 3_000), (H100, 60_000)], ids=["A10", "H100"])
def test_waiting_grows_above_capacity_and_not_below(profile: HardwareProfile, n: int) -> None:
    """A capacity is what it says: in a long run the second half waits longer than the first only above it."""
    rng = np.random.default_rng(2)
    table = make_table("long", np.sort(rng.uniform(0, 1500, n)), rng.integers(50, 1500, n), rng.integers(20, 300, n))
    fleet = FleetConfig((profile,) * instances_for_load(table, profile, 1.0))
    growth = {}
    for load in (0.85, 1.15):
        requests = simulate(at_load(table, fleet, load), fleet, load_policy("join-shortest-queue")).requests
        waited = requests["first_token_s"] - requests["arrival_s"]
        growth[load] = waited[n // 2 :].mean() / waited[: n // 2].mean()
    assert growth[0.85] < 1.6
    assert growth[1.15] > 2.0


def test_copies_of_a_backlog_share_nothing() -> None:
    backlog = _backlog(SESSIONS)
    assert len(backlog) == BACKLOG
    assert backlog.prompt_tokens[:12].tolist() == SESSIONS.prompt_tokens.tolist() * 2
    assert backlog.prefix_node[:12].tolist() == [0, -1, 1, 2, 0, 2, 4, -1, 5, 6, 4, 6]
    assert backlog.node_parent[:8].tolist() == [-1, 0, -1, 2, -1, 4, -1, 6]


def test_a_load_is_met_by_the_clock_of_the_arrivals_alone() -> None:
    table, fleet = steady(), FleetConfig((A10,))
    loaded = at_load(table, fleet, 0.5)
    assert rate_rps(loaded) == pytest.approx(0.5 * capacity_rps(table, fleet))
    assert loaded.prompt_tokens.tolist() == table.prompt_tokens.tolist()
    assert at_load(loaded, fleet, 0.5).arrival_s == pytest.approx(loaded.arrival_s)


def test_a_real_trace_is_not_squeezed_beyond_twice_its_speed() -> None:
    table = steady(rate=0.01)
    with pytest.raises(ValueError, match=r"would have to run .* times as fast .* expected at most 2 times"):
        at_load(table, FleetConfig((A10,)), 0.9)


def test_the_fleet_size_for_a_load() -> None:
    table = steady(rate=20.0)
    n = instances_for_load(table, A10, 0.8)
    capacity = capacity_rps(table, FleetConfig((A10,)))
    assert abs(20.0 / (n * capacity) - 0.8) <= min(abs(20.0 / (m * capacity) - 0.8) for m in (n - 1, n + 1) if m) + 0.1


@pytest.mark.parametrize("load", [0.0, -1.0, np.nan, np.inf])
def test_a_load_is_positive(load: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number > 0"):
        at_load(steady(), FleetConfig((A10,)), load)


def test_a_rate_needs_a_span_and_a_capacity_requests() -> None:
    with pytest.raises(ValueError, match="empty: no requests; expected at least one"):
        capacity_rps(make_table("empty", [], [], []), FleetConfig((A10,)))
    with pytest.raises(ValueError, match="a closed loop has no rate of its own"):
        at_load(SESSIONS, FleetConfig((A10,)), 0.5)
    with pytest.raises(ValueError, match="expected a span to take a rate over"):
        rate_rps(make_table("burst", [0.0, 0.0], [1, 1], [1, 1]))
