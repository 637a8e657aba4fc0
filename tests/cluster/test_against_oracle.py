"""The kernel against the second model of tests/oracle.py, and leaps against single steps."""

import strategies
from comparison import assert_bitwise_equal, assert_same, assert_same_gaps, run_kernel, run_oracle
from hypothesis import given


@given(strategies.clusters())
def test_completions_preemptions_and_blocks_equal_the_oracle(cluster: strategies.Cluster) -> None:
    expected = run_oracle(cluster)
    log = run_kernel(cluster, leap=True)
    assert_same(log, expected)
    assert_same_gaps(log, expected)


@given(strategies.clusters())
def test_leaps_equal_single_steps_bitwise(cluster: strategies.Cluster) -> None:
    assert_bitwise_equal(run_kernel(cluster, leap=True), run_kernel(cluster, leap=False))


@given(strategies.clusters())
def test_nothing_is_lost_and_nothing_is_there_twice(cluster: strategies.Cluster) -> None:
    run_kernel(cluster, leap=True, check=True)
