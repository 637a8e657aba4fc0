"""The statistics against their definitions, spelled out or computed by other means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.evaluation.statistics import Interval, iqm, paired_bootstrap, wilcoxon_p, win_share

DIFFERENCES = np.array([0.3, -0.1, 0.5, 0.2, 0.9, 0.4, -0.2, 0.6, 0.1, 0.8])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_iqm_is_the_mean_of_the_middle_half(values: list[float]) -> None:
    cut = len(values) // 4
    assert float(iqm(np.array(values))) == pytest.approx(
        np.mean(sorted(values)[cut : len(values) - cut]), rel=1e-9, abs=1e-6
    )


def test_the_bootstrap_interval_is_that_of_all_resamples() -> None:
    """Of four values all 256 resamples can be listed."""
    values = np.array([1.0, 2.0, 4.0, 8.0])
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=4)]
    found = paired_bootstrap(values, resamples=200_000)
    assert found is not None
    assert found.estimate == 3.75
    assert found.low == pytest.approx(np.percentile(means, 2.5), abs=0.01)
    assert found.high == pytest.approx(np.percentile(means, 97.5), abs=0.01)


def test_the_bootstrap_interval_agrees_with_scipys() -> None:
    from scipy.stats import bootstrap

    theirs = bootstrap((DIFFERENCES,), np.mean, method="percentile", n_resamples=50_000, rng=1).confidence_interval
    ours = paired_bootstrap(DIFFERENCES, resamples=50_000)
    assert ours is not None
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(5).normal(1.0, 2.0, (300, 40))
    intervals = [paired_bootstrap(row, confidence=0.8, resamples=1000) for row in draws]
    covered = np.mean([i.low <= 1.0 <= i.high for i in intervals if i is not None])
    assert covered == pytest.approx(0.8, abs=0.06)


def test_the_bootstrap_is_seeded_and_takes_any_statistic() -> None:
    assert paired_bootstrap(DIFFERENCES, seed=3) == paired_bootstrap(DIFFERENCES, seed=3)
    assert paired_bootstrap(DIFFERENCES, seed=3) != paired_bootstrap(DIFFERENCES, seed=4)
    found = paired_bootstrap(DIFFERENCES, iqm)
    assert found is not None
    assert found.estimate == pytest.approx(np.mean(np.sort(DIFFERENCES)[2:-2]))


def test_a_constant_difference_has_no_spread() -> None:
    assert paired_bootstrap(np.full(5, 0.25)) == Interval(0.25, 0.25, 0.25)


def test_one_segment_gives_no_interval() -> None:
    assert paired_bootstrap(np.array([1.0])) is None
    assert paired_bootstrap(np.array([])) is None


@pytest.mark.parametrize(
    ("low", "high", "excludes"), [(0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False), (0.0, 1.0, False)]
)
def test_an_interval_excludes_zero(low: float, high: float, excludes: bool) -> None:
    assert Interval(0.0, low, high).excludes_zero is excludes


def test_wilcoxon_is_the_share_of_sign_patterns_at_least_as_extreme() -> None:
    """The definition: under the null each rank is positive or negative with equal probability."""
    differences = np.array([1.0, -2.0, 3.0, 4.0, 5.0, 6.0])
    ranks = np.arange(1, 7)
    observed = abs(np.sum(np.sign(differences) * ranks))
    sums = [abs(np.dot(signs, ranks)) for signs in itertools.product([-1, 1], repeat=6)]
    assert wilcoxon_p(differences) == pytest.approx(np.mean(np.array(sums) >= observed))


def test_wilcoxon_of_no_differences() -> None:
    assert wilcoxon_p(np.zeros(10)) == 1.0
    assert wilcoxon_p(np.array([])) is None


def test_ties_weaken_the_evidence() -> None:
    with_ties = wilcoxon_p(np.concatenate([DIFFERENCES, np.zeros(10)]))
    without = wilcoxon_p(DIFFERENCES)
    assert with_ties is not None
    assert without is not None
    assert with_ties > without


def test_segments_won() -> None:
    differences = np.array([-1.0, -2.0, 0.0, 3.0])
    assert win_share(differences, lower_is_better=True) == 0.625
    assert win_share(differences, lower_is_better=False) == 0.375
    assert win_share(np.array([]), lower_is_better=True) is None


@pytest.mark.parametrize("bad", [[1.0, np.nan], [np.inf], [[1.0, 2.0]]])
def test_differences_are_a_row_of_finite_numbers(bad: list[float]) -> None:
    for statistic in (paired_bootstrap, wilcoxon_p):
        with pytest.raises(ValueError, match="expected a row of finite numbers"):
            statistic(np.array(bad))


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        paired_bootstrap(DIFFERENCES, confidence=confidence)
