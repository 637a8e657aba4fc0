"""The kernel against the second model of tests/oracle.py, and leaps against single steps."""

from comparison import assert_bitwise_equal, assert_same, assert_same_gaps, run_kernel, run_oracle
from hypothesis import given
from strategies import Cluster, clusters, clusters_on_grid


@given(clusters())
def test_completions_preemptions_and_blocks_equal_the_oracle(cluster: Cluster) -> None:
    expected = run_oracle(cluster)
    log = run_kernel(cluster, leap=True)
    assert_same(log, expected)
    assert_same_gaps(log, expected)


@given(clusters_on_grid())
def test_ties_equal_the_oracle(cluster: Cluster) -> None:
    assert_same(run_kernel(cluster, leap=True), run_oracle(cluster))


@given(clusters() | clusters_on_grid())
def test_leaps_equal_single_steps_bitwise(cluster: Cluster) -> None:
    assert_bitwise_equal(run_kernel(cluster, leap=True), run_kernel(cluster, leap=False))
