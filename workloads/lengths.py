"""Distributions of prompt and output lengths (and of think times), and how the two lengths of a request go together."""

from __future__ import annotations

import math
import tomllib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetpilot.workloads.checks import require, require_positive
from fleetpilot.workloads.table import MAX_TOKENS, RequestTable

Tokens = NDArray[np.int64]


class Distribution(ABC):
    """A distribution of positive numbers: tokens or seconds."""

    @abstractmethod
    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw (n,) independent values, not rounded."""


def draw_tokens(distribution: Distribution, n: int, rng: np.random.Generator) -> Tokens:
    """(n,) values rounded to the nearest whole token, at least 1.

    Raises:
        ValueError: a value is beyond what a table holds.
    """
    values = distribution.draw(n, rng)
    most = values.max(initial=0.0)
    if not most <= MAX_TOKENS:
        raise ValueError(f"{distribution}: drew {most:g}: expected lengths of at most {MAX_TOKENS:,}")
    return np.maximum(np.rint(values), 1).astype(np.int64)


def stratified(n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(n,) numbers uniform on [0, 1), one in each n-th of it, in random order."""
    numbers = rng.permutation(n).astype(np.float64)
    numbers += rng.random(n)
    numbers /= n
    return numbers


@dataclass(frozen=True)
class Fixed(Distribution):
    """Always the same.

    Attributes:
        value: > 0.
    """

    value: float

    def __post_init__(self) -> None:
        require_positive(self, "value", self.value)

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n,) times the value."""
        return np.full(n, float(self.value))


@dataclass(frozen=True)
class Uniform(Distribution):
    """Every whole number from ``low`` to ``high``, both included, equally often.

    Attributes:
        low: >= 1.
        high: >= low.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        require(self.low >= 1, self, "low", self.low, ">= 1")
        require(self.high >= self.low, self, "high", self.high, f">= low = {self.low}")

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n,) whole numbers."""
        return rng.integers(self.low, self.high, n, endpoint=True).astype(np.float64)


@dataclass(frozen=True)
class Geometric(Distribution):
    """Whole numbers from 1, each next one less likely by the same factor (the discrete memoryless distribution).

    Attributes:
        mean: >= 1.
    """

    mean: float

    def __post_init__(self) -> None:
        require(1 <= self.mean < math.inf, self, "mean", self.mean, "a finite number >= 1")

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n,) whole numbers."""
        return rng.geometric(1 / self.mean, n).astype(np.float64)


@dataclass(frozen=True)
class LogNormal(Distribution):
    """Log-normal, clipped.

    Attributes:
        median: > 0.
        sigma: standard deviation of the logarithm, >= 0.
        low: values below become this.
        high: values above become this.
    """

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        require_positive(self, "median", self.median)
        require(0 <= self.sigma < math.inf, self, "sigma", self.sigma, "a finite number >= 0")
        require(0 <= self.low <= self.high, self, "low, high", (self.low, self.high), "0 <= low <= high")

    @classmethod
    def from_mean(cls, mean: float, sigma: float, low: float = 0.0, high: float = math.inf) -> LogNormal:
        """The distribution with this mean before clipping: its median is ``mean / exp(sigma**2 / 2)``."""
        return cls(mean / math.exp(sigma**2 / 2), sigma, low, high)

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n,) clipped values."""
        with np.errstate(over="ignore"):  # beyond all numbers is beyond `high`, or the caller's to refuse
            return np.clip(self.median * np.exp(self.sigma * rng.standard_normal(n)), self.low, self.high)


@dataclass(frozen=True)
class Zipf(Distribution):
    """The ranks ``1 .. maximum`` with probability proportional to ``rank ** -exponent``.

    Attributes:
        exponent: >= 0; 0 makes all ranks equally likely.
        maximum: largest rank, >= 1.
    """

    exponent: float
    maximum: int

    def __post_init__(self) -> None:
        require(0 <= self.exponent < math.inf, self, "exponent", self.exponent, "a finite number >= 0")
        require(self.maximum >= 1, self, "maximum", self.maximum, ">= 1")

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """(maximum,) probability of each rank."""
        weights = np.arange(1, self.maximum + 1) ** -float(self.exponent)
        return weights / weights.sum()

    @property
    def mean(self) -> float:
        """The mean rank."""
        return float(np.arange(1, self.maximum + 1) @ self.probabilities)

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n,) ranks, stratified: in a sample of any size each rank has its share."""
        below = np.searchsorted(np.cumsum(self.probabilities)[:-1], stratified(n, rng), side="right")
        return 1.0 + below.astype(np.float64)


_LLUMNIX_EXPONENTS = {128: 2.0, 256: 1.5, 512: 1.15, 1024: 1.0005}
_LLUMNIX_MAX_TOKENS = 6144


@dataclass(frozen=True)
class LlumnixZipf(Distribution):
    """The generated lengths of the Llumnix paper, as its artifact draws them (AlibabaPAI/llumnix, branch osdi24ae).

    Zipf ranks below ``2 * mean_tokens``, stretched so that the *sample's* mean is ``mean_tokens``, rounded up, cut at
    6,144. With ``np.random.RandomState(0xCADE)`` and 10,000 draws the short, medium and long lengths of the paper's
    Table 1 result.

    Attributes:
        mean_tokens: 128 (S), 256 (M), 512 (L) or 1024.
    """

    mean_tokens: int

    def __post_init__(self) -> None:
        require(self.mean_tokens in _LLUMNIX_EXPONENTS, self, "mean_tokens", self.mean_tokens, "128, 256, 512 or 1024")

    def draw(self, n: int, rng: np.random.Generator | np.random.RandomState) -> NDArray[np.float64]:
        """(n,) whole numbers, whose mean is ``mean_tokens`` but for the rounding and the cut."""
        if n == 0:
            return np.empty(0)
        zipf = Zipf(_LLUMNIX_EXPONENTS[self.mean_tokens], 2 * self.mean_tokens - 1)
        ranks = rng.choice(np.arange(1, zipf.maximum + 1), n, p=zipf.probabilities)
        return np.minimum(np.ceil(ranks * (self.mean_tokens / ranks.mean())), _LLUMNIX_MAX_TOKENS)


@dataclass(frozen=True)
class Quantiles(Distribution):
    """A distribution that has given quantiles, and a given mean if one is known.

    Up to the first quantile above the minimum it is uniform. Between two quantiles after that the density is a power
    law, ``x ** (exponent - 1)``, with one exponent for all of them: the one that makes the mean come out, or 0 (uniform
    on the logarithmic scale) where no mean is given.

    Attributes:
        probabilities: ascending from 0 (the minimum) to 1 (the maximum).
        values: the quantiles, > 0, not descending.
        mean: the mean of the distribution, strictly between what the quantiles allow.
    """

    probabilities: tuple[float, ...]
    values: tuple[float, ...]
    mean: float | None = None

    def __post_init__(self) -> None:
        p, v = self.probabilities, self.values
        require(
            len(p) == len(v) >= 2, self, "len(probabilities), len(values)", (len(p), len(v)), "two equal numbers >= 2"
        )
        rising = all(a < b for a, b in pairwise(p))
        require(p[0] == 0 and p[-1] == 1 and rising, self, "probabilities", p, "ascending numbers from 0 to 1")
        require(
            v[0] > 0 and v[-1] < math.inf and list(v) == sorted(v), self, "values", v, "finite ascending numbers > 0"
        )
        if self.mean is not None:
            low, high = self.mean_range
            require(low < self.mean < high, self, "mean", self.mean, f"between {low:g} and {high:g}, exclusive")

    @cached_property
    def mean_range(self) -> tuple[float, float]:
        """The means that the quantiles allow."""
        shares, values = np.diff(self.probabilities), np.asarray(self.values)
        first = shares[0] * values[:2].mean()
        return float(first + shares[1:] @ values[1:-1]), float(first + shares[1:] @ values[2:])

    @cached_property
    def exponent(self) -> float:
        """The exponent that gives the mean (as near as 50 in either direction comes)."""
        if self.mean is None:
            return 0.0
        low, high = -50.0, 50.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        return low

    def _mean_at(self, exponent: float) -> float:
        values = np.asarray(self.values, np.float64)
        widths = np.diff(np.log(values))
        means = values[:-1].copy()
        wide = widths > 0
        means[wide] *= _integral(exponent + 1, widths[wide]) / _integral(exponent, widths[wide])
        means[0] = values[:2].mean()
        return float(np.diff(self.probabilities) @ means)

    def at(self, probability: ArrayLike) -> NDArray[np.float64]:
        """The quantile function.

        Args:
            probability: (n,) numbers in [0, 1].
        """
        p = np.asarray(probability, np.float64)
        knots, values = np.asarray(self.probabilities), np.asarray(self.values, np.float64)
        step = np.clip(np.searchsorted(knots, p, side="right") - 1, 0, len(knots) - 2)
        part = (p - knots[step]) / np.diff(knots)[step]
        width = np.diff(np.log(values))[step]
        within = part * width
        if abs(self.exponent) > _FLAT:
            within = np.log1p(part * np.expm1(self.exponent * width)) / self.exponent
        bent = values[step] * np.exp(np.clip(within, 0.0, width))
        return np.where(step == 0, values[0] + part * (values[1] - values[0]), bent)

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n,) values, stratified: a sample of any size has the quantiles."""
        return self.at(stratified(n, rng))


_FLAT = 1e-9  # exponents nearer to 0 than this are 0: the logarithm takes the place of the power


def _integral(exponent: float, log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """The integral of ``x ** (exponent - 1)`` from 1 to ``exp(log_ratio)``."""
    return np.expm1(exponent * log_ratio) / exponent if abs(exponent) > _FLAT else log_ratio


class Lengths(ABC):
    """Prompt and output lengths of requests, drawn together."""

    @abstractmethod
    def draw(self, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """(n,) prompt tokens and (n,) output tokens, all >= 1."""


@dataclass(frozen=True)
class Independent(Lengths):
    """Prompt and output lengths that do not depend on each other, from streams of their own."""

    prompt: Distribution
    output: Distribution

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """(n,) prompt and (n,) output tokens."""
        prompt_rng, output_rng = rng.spawn(2)
        return draw_tokens(self.prompt, n, prompt_rng), draw_tokens(self.output, n, output_rng)


@dataclass(frozen=True, eq=False)
class Empirical(Lengths):
    """The pairs of lengths of a table, drawn with replacement: any number of requests, the same joint distribution.

    Attributes:
        prompt_tokens: (m,) >= 1.
        output_tokens: (m,) >= 1, of the same requests.
    """

    prompt_tokens: NDArray[np.integer] = field(repr=False)
    output_tokens: NDArray[np.integer] = field(repr=False)

    def __post_init__(self) -> None:
        counts = (len(self.prompt_tokens), len(self.output_tokens))
        require(
            counts[0] == counts[1] >= 1,
            self,
            "len(prompt_tokens), len(output_tokens)",
            counts,
            "two equal numbers >= 1",
        )

    @classmethod
    def of(cls, table: RequestTable) -> Empirical:
        """The lengths of a table's requests."""
        return cls(table.prompt_tokens, table.output_tokens)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """(n,) prompt and (n,) output tokens of rows drawn with replacement."""
        rows = rng.integers(0, len(self.prompt_tokens), n)
        return self.prompt_tokens[rows].astype(np.int64), self.output_tokens[rows].astype(np.int64)


@cache
def published_quantiles(file: str) -> dict[str, dict[str, Quantiles]]:
    """Quantile tables that come with the package.

    Args:
        file: name in ``workloads/data``, without its suffix.

    Returns:
        ``{workload: {"prompt" | "output": distribution}}``.
    """
    data = tomllib.loads(resources.files("fleetpilot.workloads.data").joinpath(f"{file}.toml").read_text("utf-8"))
    return {
        name: {
            side: Quantiles(tuple(data["probabilities"]), tuple(entry[side]["values"]), entry[side]["mean"])
            for side in ("prompt", "output")
        }
        for name, entry in data["lengths"].items()
    }


def table_1(name: str) -> Independent:
    """Lengths by the Llumnix paper's Table 1: ``ShareGPT``, ``BurstGPT`` or, e.g., ``S-L`` (short in, long out)."""
    tables = published_quantiles("llumnix_table_1")
    prompt, _, output = name.partition("-") if "-" in name else (name, "", name)
    try:
        return Independent(tables[prompt]["prompt"], tables[output]["output"])
    except KeyError:
        raise ValueError(f"name = {name!r}: expected ShareGPT, BurstGPT, or two of S, M and L such as 'S-L'") from None
