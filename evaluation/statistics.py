"""Statistics of paired comparisons: small, seeded, vectorised.

A *difference* is one policy's value less another's on the same trace segment. Segments are the independent draws;
several tie-break seeds of one segment belong together and are averaged (or pooled) before they come here.
"""

from __future__ import annotations

from collections.abc import Callable
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
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: expected 0 < confidence < 1")
    differences = _finite(differences)
    n = len(differences)
    if n < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, n, (resamples, n))
    estimates = statistic(differences[drawn], axis=1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(estimates, [tail, 100 - tail])
    return Interval(float(statistic(differences, axis=0)), float(low), float(high))


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
