"""The kernel against the second model of tests/oracle.py, and leaps against single steps."""

import math

import pytest
from comparison import assert_bitwise_equal, assert_same, assert_same_gaps, run_kernel, run_oracle
from hypothesis import given
from oracle import OracleInstance
from strategies import Cluster, clusters, clusters_on_grid

from fleetpilot.workloads.table import make_table


@given(clusters())
def test_completions_preemptions_and_blocks_equal_the_oracle(cluster: Cluster) -> None:
    expected = run_oracle(cluster)
    log = run_kernel(cluster, leap=True)
    assert_same(log, expected)
    assert_same_gaps(log, expected)


@given(clusters_on_grid())
def test_ties_equal_the_oracle(cluster: Cluster) -> None:
    assert_same(run_kernel(cluster, leap=True), run_oracle(cluster))


@pytest.mark.parametrize("leap", [True, False])
def test_a_turn_that_is_released_at_a_tie_joins_after_the_boundaries_that_came_before(leap: bool) -> None:
    """Iterations of 1/8 s on both; instance 1 releases the turn at 0.375 s, when instance 0 has begun its next one."""
    instance = OracleInstance(
        "chunked", kv_blocks=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, a_s=1 / 8
    )
    table = make_table(
        "tie", [0.0, 0.0, math.nan], [4, 4, 4], [10, 3, 2], parent=[-1, -1, 1], think_s=[math.nan, math.nan, 0.0]
    )
    log = run_kernel((table, [instance, instance]), leap=leap)
    assert log.requests["instance"].tolist() == [0, 1, 0]
    assert log.requests["dispatch_s"].tolist() == [0.0, 0.0, 0.375]
    assert log.requests["admitted_s"].tolist() == [0.0, 0.0, 0.5]


@given(clusters() | clusters_on_grid())
def test_leaps_equal_single_steps_bitwise(cluster: Cluster) -> None:
    assert_bitwise_equal(run_kernel(cluster, leap=True), run_kernel(cluster, leap=False))
