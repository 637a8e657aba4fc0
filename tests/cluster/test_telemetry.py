"""What a policy sees: all of it, as old as it says, and nothing that a dispatcher could not know."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
from comparison import assert_bitwise_equal, fleet_of_oracle
from expected_views import Recorder, assert_same_views, expected_views
from hypothesis import given
from hypothesis import strategies as st
from strategies import GRID_S, Cluster, clusters, clusters_on_grid

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import RunLog, Telemetry, simulate
from fleetpilot.fleet.view import FleetView
from fleetpilot.workloads.table import RequestTable, make_table

# Off the grid of arrivals; delays of less than an interval, of some, and of more than most runs take.
telemetries = st.builds(
    Telemetry, st.sampled_from([0.0103, 0.0503, 0.1007]), st.sampled_from([0.0, 0.0117, 0.3511]), st.booleans()
)
telemetries_on_grid = st.builds(
    Telemetry,
    st.sampled_from([GRID_S, 3 * GRID_S, 16 * GRID_S]),
    st.sampled_from([0.0, GRID_S, 11 * GRID_S]),
    st.booleans(),
)

SMALL = oracle.OracleInstance(
    "chunked", kv_blocks=25, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, a_s=0.04
)


def record(
    cluster: Cluster, telemetry: Telemetry, policy: str = "round-robin", *, leap: bool = True
) -> tuple[RunLog, list[FleetView]]:
    table, instances = cluster
    recorder = Recorder(load_policy(policy))
    log = simulate(table, fleet_of_oracle(instances, telemetry=telemetry), recorder, leap=leap)
    return log, recorder.views


def bytes_of(views: list[FleetView]) -> list[tuple[bytes, bytes, bytes]]:
    return [(view.instances.tobytes(), view.request.tobytes(), view.fleet.tobytes()) for view in views]


def instance_field(views: list[FleetView], name: str) -> list[float]:
    """Of the first instance."""
    return [float(view.instances[name][0, 0]) for view in views]


# --- all fields ---------------------------------------------------------------------------------------------------


@given(clusters(), telemetries)
def test_every_field_equals_a_second_account(cluster: Cluster, telemetry: Telemetry) -> None:
    assert_same_views(record(cluster, telemetry)[1], expected_views(cluster, telemetry))


@given(clusters_on_grid(), telemetries_on_grid)
def test_a_poll_sees_what_was_before_events_of_the_same_time(cluster: Cluster, telemetry: Telemetry) -> None:
    assert_same_views(record(cluster, telemetry)[1], expected_views(cluster, telemetry))


@given(clusters() | clusters_on_grid(), telemetries | telemetries_on_grid)
def test_views_do_not_depend_on_leaps(cluster: Cluster, telemetry: Telemetry) -> None:
    leaping, stepping = (record(cluster, telemetry, leap=leap)[1] for leap in (True, False))
    assert bytes_of(leaping) == bytes_of(stepping)


@pytest.mark.parametrize("name", ["random", "join-shortest-queue", "least-kv", "cache-aware"])
@given(clusters(), telemetries)
def test_a_compiled_policy_sees_what_a_python_policy_sees(name: str, cluster: Cluster, telemetry: Telemetry) -> None:
    table, instances = cluster
    compiled = simulate(table, fleet_of_oracle(instances, telemetry=telemetry), load_policy(name))
    assert_bitwise_equal(compiled, record(cluster, telemetry, name)[0])


# --- polls --------------------------------------------------------------------------------------------------------


def poll_views(telemetry: Telemetry) -> list[FleetView]:
    """Six decisions; iterations of 0.04 s: two requests of 40 tokens run from 0.05 s, a third waits from 0.22 s."""
    arrival_s = [0.05, 0.05, 0.22, 0.36, 0.52, 0.91]
    table = make_table("polled", arrival_s, prompt_tokens=[4] * 6, output_tokens=[40] * 6)
    return record((table, [SMALL]), telemetry)[1]


def test_a_poll_is_as_old_as_it_says() -> None:
    views = poll_views(Telemetry(poll_interval_s=0.1))
    assert instance_field(views, "poll_age_s") == pytest.approx([0.05, 0.05, 0.02, 0.06, 0.02, 0.01])
    assert instance_field(views, "running") == [0, 0, 2, 2, 2, 2]
    assert instance_field(views, "waiting") == [0, 0, 0, 1, 2, 3]


def test_a_delayed_poll_shows_only_what_was_then() -> None:
    views = poll_views(Telemetry(poll_interval_s=0.1, poll_delay_s=0.35))
    # visible at 0.36: the poll at 0.0; at 0.52: that at 0.1; at 0.91: that at 0.5
    assert instance_field(views, "poll_age_s") == pytest.approx([math.inf, math.inf, math.inf, 0.36, 0.42, 0.41])
    assert instance_field(views, "running") == [0, 0, 0, 0, 2, 2]
    assert instance_field(views, "waiting") == [0, 0, 0, 0, 0, 2]
    # at 0.1 two requests have 4 + 1 tokens, 2 blocks each; at 0.5 they have 4 + 11 tokens, 4 blocks each
    assert instance_field(views, "kv_usage") == pytest.approx([0, 0, 0, 0, 4 / 25, 8 / 25])
    # the ledger is not delayed
    assert instance_field(views, "in_flight") == [0, 1, 2, 3, 4, 5]
    assert instance_field(views, "unstarted") == [0, 1, 0, 1, 2, 3]


@given(clusters(), telemetries)
def test_no_poll_is_newer_than_its_delay_allows(cluster: Cluster, telemetry: Telemetry) -> None:
    _, views = record(cluster, telemetry)
    for view in views:
        age_s, now_s = view.instances["poll_age_s"][0], view.fleet["time_s"][0]
        seen = np.isfinite(age_s)
        assert np.all(age_s[seen] > telemetry.poll_delay_s - 1e-9)
        assert np.all(age_s[seen] < telemetry.poll_delay_s + telemetry.poll_interval_s + 1e-9)
        assert np.all(seen == (now_s >= telemetry.poll_delay_s))
        for name in ("running", "waiting", "kv_usage", "preemptions", "prefix_queries_tokens", "prefix_hits_tokens"):
            assert np.all(view.instances[name][0][~seen] == 0)


# --- prefix index -------------------------------------------------------------------------------------------------


def test_the_prefix_index_forgets_what_was_unused_longest() -> None:
    """25 blocks of 4 tokens: the index holds 100 tokens, two of the three prefixes."""
    prefix = [0, 0, 1, 0, 2, 0, 1]
    table = make_table(
        "shared",
        np.arange(7.0),
        prompt_tokens=[41] * 7,
        output_tokens=[1] * 7,
        prefix_node=prefix,
        node_parent=[-1, -1, -1],
        node_end_tokens=[40, 40, 40],
    )
    _, views = record((table, [SMALL]), Telemetry())
    assert instance_field(views, "matched_tokens") == [0, 40, 0, 40, 0, 40, 0]
    assert instance_field(views, "indexed_tokens") == [0, 40, 40, 80, 80, 80, 80]


@given(clusters())
def test_matches_are_bounded_by_what_was_shared_and_by_the_index(cluster: Cluster) -> None:
    table, instances = cluster
    log, views = record(cluster, Telemetry())
    order = np.lexsort((log.requests["row"], log.requests["dispatch_s"]))
    capacity_tokens = np.array([instance.kv_blocks * instance.block_size for instance in instances])
    for view, row in zip(views, order, strict=True):
        node = table.prefix_node[row]
        shared = table.node_end_tokens[node] if node >= 0 else 0
        assert np.all(view.instances["matched_tokens"] <= min(shared, table.prompt_tokens[row]))
        assert np.all(view.instances["matched_tokens"] <= view.instances["indexed_tokens"])
        assert np.all(view.instances["indexed_tokens"] <= capacity_tokens)


# --- no privileged information --------------------------------------------------------------------------------------


def with_longer_output(table: RequestTable, row: int, most_tokens: int) -> RequestTable:
    output_tokens = table.output_tokens.copy()
    output_tokens[row] = most_tokens - table.prompt_tokens[row]
    return table.replace(output_tokens=output_tokens)


@given(clusters(), telemetries, st.data())
def test_an_output_length_shows_only_when_the_output_ends(
    cluster: Cluster, telemetry: Telemetry, data: st.DataObject
) -> None:
    table, instances = cluster
    row = data.draw(st.integers(0, len(table) - 1), "row")
    longest = int((table.prompt_tokens + table.output_tokens).max())
    longer = with_longer_output(table, row, longest)
    log, views = record((table, instances), telemetry)
    _, views_of_longer = record((longer, instances), telemetry)
    end_s = log.requests["finish_s"][row]
    before = sum(view.fleet["time_s"][0] < end_s for view in views)
    assert bytes_of(views[:before]) == bytes_of(views_of_longer[:before])
