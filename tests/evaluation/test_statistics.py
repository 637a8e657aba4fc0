"""The statistics against their definitions, spelled out or computed by other means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.evaluation.statistics import (
    Interval,
    hierarchical_bootstrap,
    holm,
    iqm,
    paired_bootstrap,
    performance_profile,
    stratified_bootstrap,
    wilcoxon_p,
    win_share,
)

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


# --- several scenarios -------------------------------------------------------------------------------------------


def test_the_iqm_over_scenarios_is_that_of_all_segments_together() -> None:
    """The lowest and highest two of eight are left out, whichever scenario they are of."""
    found = stratified_bootstrap([np.array([1.0, 2.0, 30.0, 40.0]), np.array([3.0, 4.0, 5.0, 100.0])])
    assert found is not None
    assert found.estimate == (3 + 4 + 5 + 30) / 4


def test_every_resample_has_all_scenarios() -> None:
    """Between scenarios alone there is a difference, so nothing is left to vary."""
    strata = [np.zeros(3), np.full(3, 6.0)]
    assert stratified_bootstrap(strata, np.mean) == Interval(3.0, 3.0, 3.0)
    pooled = paired_bootstrap(np.concatenate(strata))
    assert pooled is not None
    assert pooled.low < 3 < pooled.high


def test_the_stratified_interval_is_that_of_all_resamples() -> None:
    first, second = np.array([0.0, 1.0, 5.3]), np.array([10.1, 12.0, 20.7])
    means = [
        np.mean(ours + theirs)
        for ours in itertools.product(first, repeat=3)
        for theirs in itertools.product(second, repeat=3)
    ]
    found = stratified_bootstrap([first, second], np.mean, resamples=200_000)
    assert found is not None
    assert found.low == pytest.approx(np.percentile(means, 2.5), abs=0.05)
    assert found.high == pytest.approx(np.percentile(means, 97.5), abs=0.05)


def test_a_scenario_with_one_segment_gives_no_interval() -> None:
    assert stratified_bootstrap([DIFFERENCES, np.array([1.0])]) is None


def test_a_profile_is_the_share_above_each_threshold_by_scenario() -> None:
    """By hand: above 0.5 lie 2 of 4 segments of one scenario and 1 of 1 of the other; above 0.9 none and 0 of 1."""
    found = performance_profile([np.array([0.2, 0.5, 0.6, 0.9]), np.array([0.9])], np.array([0.0, 0.5, 0.9]))
    assert found.share.tolist() == [1.0, 0.75, 0.0]


def test_a_profiles_band_is_that_of_the_binomial() -> None:
    scores = np.repeat([0.0, 1.0], 50)
    found = performance_profile([scores], np.array([0.5]), confidence=0.9, resamples=20_000)
    spread = 1.645 * np.sqrt(0.25 / 100)
    assert found.low[0] == pytest.approx(0.5 - spread, abs=0.011)  # shares come in hundredths
    assert found.high[0] == pytest.approx(0.5 + spread, abs=0.011)


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.03 x 3, 0.02 -> between them 0.02 x 3; 0.04 x 1 may not fall below the one before."""
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.5, 0.9])).tolist() == [1.0, 1.0]
    assert holm(np.array([0.2])).tolist() == [0.2]


def test_holm_keeps_false_findings_as_rare_as_it_says() -> None:
    rng = np.random.default_rng(7)
    null = rng.uniform(size=(4000, 6))
    found = np.mean([np.any(holm(row) <= 0.05) for row in null])
    assert found == pytest.approx(0.05, abs=0.012)
    assert np.mean(np.any(null <= 0.05, axis=1)) > 0.2


@pytest.mark.parametrize("bad", [[0.1, 1.2], [-0.1], [np.nan], [[0.1]]])
def test_p_values_are_shares(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="expected a row of numbers from 0 to 1"):
        holm(np.array(bad))


# --- several trainings -------------------------------------------------------------------------------------------


def trained(rng: np.random.Generator, *, training: float, trace: float, noise: float = 0.1) -> np.ndarray:
    """(15 training seeds, 15 segments) around 1, with a spread from each of the two and from their meeting."""
    return (
        1.0 + training * rng.normal(size=(15, 1)) + trace * rng.normal(size=(1, 15)) + noise * rng.normal(size=(15, 15))
    )


def test_the_hierarchical_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Pooling all 225 runs, as if each were a draw of its own, does not."""
    rng = np.random.default_rng(11)
    draws = [trained(rng, training=1.0, trace=1.0) for _ in range(200)]
    both = [hierarchical_bootstrap(values, confidence=0.8, resamples=500) for values in draws]
    pooled = [paired_bootstrap(values.ravel(), confidence=0.8, resamples=500) for values in draws]
    assert np.mean([i.both.low <= 1 <= i.both.high for i in both if i]) == pytest.approx(0.8, abs=0.08)
    assert np.mean([i.low <= 1 <= i.high for i in pooled if i]) < 0.5


@pytest.mark.parametrize(("training", "trace"), [(1.0, 0.0), (0.0, 1.0)])
def test_what_makes_a_result_uncertain_is_told_apart(training: float, trace: float) -> None:
    values = trained(np.random.default_rng(3), training=training, trace=trace, noise=0.0)
    found = hierarchical_bootstrap(values)
    assert found is not None
    widths = [interval.high - interval.low for interval in (found.training, found.traces)]
    uncertain, certain = widths if training else widths[::-1]
    assert certain == pytest.approx(0.0, abs=1e-9)
    assert uncertain == pytest.approx(found.both.high - found.both.low, rel=0.05)
    assert uncertain == pytest.approx(2 * 1.96 * np.std(values) / np.sqrt(15), rel=0.15)


def test_one_training_or_one_segment_gives_no_interval() -> None:
    assert hierarchical_bootstrap(np.ones((1, 5))) is None
    assert hierarchical_bootstrap(np.ones((5, 1))) is None
    with pytest.raises(ValueError, match="a row per training seed"):
        hierarchical_bootstrap(DIFFERENCES)


@pytest.mark.parametrize("bad", [[1.0, np.nan], [np.inf], [[1.0, 2.0]]])
def test_differences_are_a_row_of_finite_numbers(bad: list[float]) -> None:
    for statistic in (paired_bootstrap, wilcoxon_p):
        with pytest.raises(ValueError, match="expected a row of finite numbers"):
            statistic(np.array(bad))


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        paired_bootstrap(DIFFERENCES, confidence=confidence)
