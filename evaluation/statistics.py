"""Statistics of paired comparisons: small, seeded, vectorised.

A *difference* is one policy's value less another's on the same trace segment. Segments are the independent draws;
several tie-break seeds of one segment belong together and are averaged (or pooled) before they come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Statistic = Callable[..., NDArray[np.float64]]
"""``statistic(values, axis=...)``, such as `numpy.mean` or `iqm`."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def iqm(values: NDArray[np.float64], axis: int | None = None) -> NDArray[np.float64]:
    """Interquartile mean, as in rliable: the mean without the lowest and the highest ``floor(n / 4)`` values."""
    from scipy.stats import trim_mean

    return trim_mean(values, proportiontocut=0.25, axis=axis)  # type: ignore[no-any-return]


def paired_bootstrap(
    differences: NDArray[np.float64],
    statistic: Statistic = np.mean,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of a statistic of paired differences; None for fewer than two of them.

    Args:
        differences: (n,) one per segment.
        statistic: of the differences.
        confidence: of the interval, in (0, 1).
        resamples: drawn with replacement.
        seed: of the draws.
    """
    return stratified_bootstrap([differences], statistic, confidence=confidence, resamples=resamples, seed=seed)


def stratified_bootstrap(
    strata: Sequence[NDArray[np.float64]],
    statistic: Statistic = iqm,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of a statistic of all values, resampled inside each stratum, as in rliable.

    Scenarios are fixed, their segments are drawn: a resample has as many segments of each scenario as there are.

    Args:
        strata: one per scenario, (n,) of its segments.
        statistic: of all values together.
        confidence: of the interval, in (0, 1).
        resamples: drawn with replacement.
        seed: of the draws.

    Returns:
        None where a scenario has fewer than two segments.
    """
    strata = [_finite(values) for values in strata]
    tails = _tails(confidence)
    if min(map(len, strata)) < 2:
        return None
    estimates = statistic(_resampled(strata, resamples, seed), axis=1)
    return _interval(statistic(np.concatenate(strata), axis=0), estimates, tails)


def _resampled(strata: Sequence[NDArray[np.float64]], resamples: int, seed: int) -> NDArray[np.float64]:
    """(resamples, values of all strata)."""
    rng = np.random.default_rng(seed)
    return np.concatenate([of[rng.integers(0, len(of), (resamples, len(of)))] for of in strata], axis=1)


def _tails(confidence: float) -> tuple[float, float]:
    """The percentiles between which an interval lies."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: expected 0 < confidence < 1")
    tail = 50 * (1 - confidence)
    return tail, 100 - tail


def _interval(estimate: NDArray[np.float64], estimates: NDArray[np.float64], tails: tuple[float, float]) -> Interval:
    low, high = np.percentile(estimates, tails)
    return Interval(float(estimate), float(low), float(high))


@dataclass(frozen=True)
class TrainedInterval:
    """An estimate over training seeds and segments, and what each of the two makes uncertain.

    Attributes:
        both: interval of a statement about other training seeds on other segments.
        training: with the segments as they are: how much the result hangs on the seed of the training.
        traces: with the trained policies as they are: how much it hangs on the segments.
    """

    both: Interval
    training: Interval
    traces: Interval


def hierarchical_bootstrap(
    differences: NDArray[np.float64],
    statistic: Statistic = np.mean,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> TrainedInterval | None:
    """Percentile bootstrap of policies trained with several seeds, each run on the same segments.

    Both are drawn with replacement, each by itself (Owen, "The pigeonhole bootstrap", Ann. Appl. Stat. 2007): pooling
    all runs as if they were independent would promise far too much, for a lucky training is lucky on every segment.

    Args:
        differences: (training seeds, segments).
        statistic: of all differences together.
        confidence: of the intervals, in (0, 1).
        resamples: drawn with replacement.
        seed: of the draws.

    Returns:
        None for fewer than two training seeds or segments.
    """
    differences = np.asarray(differences, np.float64)
    if differences.ndim != 2 or not np.all(np.isfinite(differences)):
        raise ValueError(f"differences = {differences}: expected finite numbers, a row per training seed")
    tails = _tails(confidence)
    trainings, segments = differences.shape
    if min(trainings, segments) < 2:
        return None
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, trainings, (resamples, trainings, 1))
    columns = rng.integers(0, segments, (resamples, 1, segments))

    def interval(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Interval:
        drawn = differences[rows, columns].reshape(resamples, -1)
        return _interval(statistic(differences.ravel(), axis=0), statistic(drawn, axis=1), tails)

    all_rows, all_columns = np.arange(trainings)[None, :, None], np.arange(segments)[None, None, :]
    return TrainedInterval(interval(rows, columns), interval(rows, all_columns), interval(all_rows, columns))


@dataclass(frozen=True)
class Profile:
    """A performance profile.

    Attributes:
        share: (t,) of the segments that score above each threshold, mean over scenarios.
        low: (t,) lower end of its pointwise confidence interval.
        high: (t,) upper end.
    """

    share: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def performance_profile(
    strata: Sequence[NDArray[np.float64]],
    thresholds: NDArray[np.float64],
    *,
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> Profile:
    """The score distribution of rliable: the share of runs whose score is *above* each threshold, mean over scenarios.

    Args:
        strata: one per scenario, (n,) scores of its segments.
        thresholds: (t,) scores.
        confidence: of the pointwise intervals, in (0, 1).
        resamples: of the segments of each scenario, with replacement.
        seed: of the draws.
    """
    strata = [_finite(values) for values in strata]
    weights = np.concatenate([np.full(len(values), 1 / (len(strata) * len(values))) for values in strata])

    def profile(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([(scores > threshold) @ weights for threshold in thresholds], axis=-1)

    low, high = np.percentile(profile(_resampled(strata, resamples, seed)), _tails(confidence), axis=0)
    return Profile(profile(np.concatenate(strata)), low, high)


def holm(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) p values of tests that were made together, adjusted so that one false finding among all stays unlikely.

    Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 1979.
    """
    p_values = np.asarray(p_values, np.float64)
    if p_values.ndim != 1 or not np.all((p_values >= 0) & (p_values <= 1)):
        raise ValueError(f"p_values = {p_values}: expected a row of numbers from 0 to 1")
    order = np.argsort(p_values)
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def wilcoxon_p(differences: NDArray[np.float64]) -> float | None:
    """Two-sided p value of the Wilcoxon signed-rank test that the differences are symmetric about zero.

    Zeros are split between both signs (``zsplit``), so that ties weaken the evidence instead of vanishing. 1.0 where
    all are zero, None where there is no difference.
    """
    from scipy.stats import wilcoxon

    differences = _finite(differences)
    if not len(differences):
        return None
    if not np.any(differences):
        return 1.0
    return float(wilcoxon(differences, zero_method="zsplit").pvalue)


def win_share(differences: NDArray[np.float64], lower_is_better: bool) -> float | None:
    """Share of segments won; a tie is half a win. None where there is no difference."""
    differences = _finite(differences)
    if not len(differences):
        return None
    wins = -np.sign(differences) if lower_is_better else np.sign(differences)
    return float(np.mean((wins + 1) / 2))


def _finite(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    differences = np.asarray(differences, np.float64)
    if differences.ndim != 1 or not np.all(np.isfinite(differences)):
        raise ValueError(f"differences = {differences}: expected a row of finite numbers, one per segment")
    return differences
