"""Arrival processes: when requests come, as absolute times computed up front.

Every process places ``n`` arrivals on exactly the seconds that they take at its mean rate, so a run offers the load it
was asked for: gaps neither drift nor accumulate an error, and a heavy tail of gaps cannot change the mean. Burstiness
and the course of the rate are separate: a renewal process (`Poisson`, `Gamma`, `Weibull`) gives the first, and
`PiecewiseRate` or `Diurnal` bend the time axis of any other process to give the second.

"Burstiness" has three meanings in the field. Here ``cv`` is always the coefficient of variation of the gaps (1 for
Poisson, above 1 burstier). vLLM's ``burstiness`` is the shape of a Gamma, ``1 / cv**2`` (lower is burstier); others
mean the index of dispersion, variance / mean of the counts in a bin.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.checks import require, require_non_negative, require_positive

Times = NDArray[np.float64]


class ArrivalProcess(ABC):
    """Something that draws arrival times. Mean counts are exact; how they spread is what the subclasses say."""

    @property
    @abstractmethod
    def mean_rps(self) -> float:
        """Requests per second in the long run."""

    @abstractmethod
    def draw_in(self, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """Exactly ``n`` arrivals within ``[0, horizon_s]``, whatever the mean rate says.

        Returns:
            (n,) sorted times in seconds.
        """

    def expected(self, horizon_s: float) -> float:
        """Mean number of requests in the first ``horizon_s`` seconds."""
        return self.mean_rps * horizon_s

    def span_s(self, n: int) -> float:
        """Seconds in which ``n`` requests are expected."""
        return n / self.mean_rps

    def draw(self, n: int, rng: np.random.Generator) -> Times:
        """The arrivals of ``n`` requests, in the seconds that they take at this process's rate.

        Returns:
            (n,) sorted times in seconds.
        """
        return self.draw_in(n, self.span_s(n), rng)


@dataclass(frozen=True)
class _Renewal(ArrivalProcess):
    """Independent gaps of one distribution, closed to a circle that is cut at a uniform point.

    On the circle the n gaps add up to the horizon exactly, and the cut makes the process stationary from 0 on: a client
        with
    rare arrivals is as likely to be seen at the start as at the end.

    Attributes:
        rate_rps: mean requests per second, > 0.
    """

    rate_rps: float

    def __post_init__(self) -> None:
        require_positive(self, "rate_rps", self.rate_rps)

    @property
    def mean_rps(self) -> float:
        """Requests per second."""
        return self.rate_rps

    @property
    @abstractmethod
    def cv(self) -> float:
        """Coefficient of variation of the gaps."""

    @abstractmethod
    def _gaps(self, n: int, rng: np.random.Generator) -> Times:
        """(n,) gaps in any unit."""

    def draw_in(self, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """``n`` arrivals whose gaps, around the circle, add up to ``horizon_s``."""
        if n == 0:
            return np.empty(0)
        ends = self._gaps(n, rng)
        np.cumsum(ends, out=ends)
        around = ends[-1]
        cut = rng.random()
        if around == 0.0:  # a shape so small that all gaps underflow: one burst
            return np.full(n, cut * horizon_s)
        cut *= around
        first = int(np.searchsorted(ends, cut, side="right"))
        times = np.empty(n)
        np.subtract(ends[first:], cut, out=times[: n - first])
        np.add(ends[:first], around - cut, out=times[n - first :])
        times *= horizon_s / around
        return np.minimum(times, horizon_s, out=times)


@dataclass(frozen=True)
class Poisson(_Renewal):
    """Poisson arrivals: exponential gaps, ``cv`` 1."""

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps."""
        return 1.0

    def _gaps(self, n: int, rng: np.random.Generator) -> Times:
        return rng.standard_exponential(n)


@dataclass(frozen=True)
class Gamma(_Renewal):
    """Gamma-distributed gaps of shape ``1 / cv**2``.

    Attributes:
        rate_rps: mean requests per second, > 0.
        cv: coefficient of variation of the gaps, > 0; 1 is Poisson, above 1 is burstier.
    """

    cv: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "cv", self.cv)

    def _gaps(self, n: int, rng: np.random.Generator) -> Times:
        return rng.standard_gamma(burstiness_from_cv(self.cv), n)


@dataclass(frozen=True)
class Weibull(_Renewal):
    """Weibull-distributed gaps.

    Attributes:
        rate_rps: mean requests per second, > 0.
        shape: shape of the Weibull, > 0; 1 is Poisson, below 1 is burstier.
    """

    shape: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "shape", self.shape)

    @classmethod
    def from_cv(cls, rate_rps: float, cv: float) -> Weibull:
        """The process whose gaps have this coefficient of variation (between 0.01 and 1000)."""
        if not 0.01 <= cv <= 1000:
            raise ValueError(f"Weibull: cv = {cv}: expected a number in [0.01, 1000]")
        low, high = 0.05, 200.0  # the shapes of cv 1.4e5 and 0.006
        while high - low > 1e-12 * low:
            middle = (low + high) / 2
            low, high = (middle, high) if _weibull_cv(middle) > cv else (low, middle)
        return cls(rate_rps, low)

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps."""
        return _weibull_cv(self.shape)

    def _gaps(self, n: int, rng: np.random.Generator) -> Times:
        return rng.weibull(self.shape, n)


@dataclass(frozen=True)
class MMPP(ArrivalProcess):
    """Markov-modulated Poisson arrivals: states visited in turn, each for an exponential time.

    Sojourns are drawn as they are; the rates of all states are then scaled by one factor, so that the mean rate is
    exact.

    Attributes:
        rates_rps: requests per second in each state, >= 0; at least one > 0.
        sojourns_s: mean seconds in each state, > 0.
    """

    rates_rps: tuple[float, ...]
    sojourns_s: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = (len(self.rates_rps), len(self.sojourns_s))
        require(counts[0] == counts[1] >= 2, self, "len(rates_rps), len(sojourns_s)", counts, "two equal numbers >= 2")
        _require_rates(self, self.rates_rps)
        for sojourn_s in self.sojourns_s:
            require_positive(self, "sojourns_s", sojourn_s)

    @classmethod
    def on_off(cls, on_rps: float, on_s: float, off_s: float, off_rps: float = 0.0) -> MMPP:
        """Bursts of ``on_s`` seconds on average, ``off_s`` seconds apart on average."""
        return cls((on_rps, off_rps), (on_s, off_s))

    @property
    def mean_rps(self) -> float:
        """Requests per second over all states."""
        return float(np.dot(self.rates_rps, self.sojourns_s)) / math.fsum(self.sojourns_s)

    def draw_in(self, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """``n`` arrivals spread over the states by their rates and the sojourns drawn."""
        busiest = int(np.argmax(self.rates_rps))  # comes first, so that some arrival is always possible
        rates = np.roll(self.rates_rps, -busiest)
        means_s = np.roll(self.sojourns_s, -busiest)
        _require_steps(self, "sojourns_s", self.sojourns_s, horizon_s, horizon_s / float(means_s.sum()))
        cycles = round(1.1 * horizon_s / means_s.sum()) + 10
        sojourns: Times = np.empty(0)
        while sojourns.sum() < horizon_s:
            sojourns = np.append(sojourns, rng.exponential(means_s, (cycles, len(means_s))))
        ends = np.minimum(np.cumsum(sojourns), horizon_s)
        curve = _Curve(ends, np.resize(rates, len(ends)))
        times = curve.time_of(Poisson(1.0).draw_in(n, curve.total, rng))
        # A random start on the circle of the horizon: the process has no privileged beginning.
        return np.sort((times + rng.random() * horizon_s) % horizon_s, kind="stable") if n else times


class _Curve:
    """A step function of the rate that repeats, its integral and the inverse of that.

    Args:
        ends_s: (k,) end of each step in seconds, ascending; the last is the period.
        rates_rps: (k,) requests per second in each step.
    """

    def __init__(self, ends_s: Times, rates_rps: Times) -> None:
        self.period_s = float(ends_s[-1])
        self._knots_s = np.append(0.0, ends_s)
        self._counts = np.append(0.0, np.cumsum(np.diff(self._knots_s) * rates_rps))
        self.total = float(self._counts[-1])

    def expected(self, time_s: float) -> float:
        """Requests from 0 to a time."""
        periods, rest_s = divmod(time_s, self.period_s)
        return float(periods * self.total + np.interp(rest_s, self._knots_s, self._counts))

    def time_of(self, count: Times) -> Times:
        """The times at which these numbers of requests are reached, seconds."""
        periods = np.floor(count / self.total)
        return periods * self.period_s + np.interp(count - periods * self.total, self._counts, self._knots_s)


class _Curved(ArrivalProcess):
    """A process whose mean rate changes with time."""

    @property
    @abstractmethod
    def _curve(self) -> _Curve:
        """The course of the rate."""

    @property
    def mean_rps(self) -> float:
        """Requests per second over a period."""
        return self._curve.total / self._curve.period_s

    def expected(self, horizon_s: float) -> float:
        """Mean number of requests in the first ``horizon_s`` seconds."""
        return self._curve.expected(horizon_s)

    def span_s(self, n: int) -> float:
        """Seconds in which ``n`` requests are expected, from the start of the curve."""
        return float(self._curve.time_of(np.array([n], np.float64))[0])

    def _bend(self, base: ArrivalProcess, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """``n`` arrivals of a process whose clock goes as fast as the rate is high."""
        expected = self.expected(horizon_s)
        require(n == 0 or expected > 0, self, "horizon_s", horizon_s, "a time with a rate > 0 before it")
        clock = base.draw_in(n, expected / base.mean_rps, rng)
        return self._curve.time_of(clock * base.mean_rps)


@dataclass(frozen=True)
class PiecewiseRate(_Curved):
    """A rate that changes by steps and repeats, on top of the burstiness of another process.

    The base process runs on a clock that goes as fast as the rate is high, so its burstiness is kept at every rate.

    Attributes:
        rates_rps: requests per second in each step, >= 0; at least one > 0.
        durations_s: seconds of each step, > 0; after the last the first follows again.
        base: the process whose clock is bent; only its burstiness matters, not its rate.
    """

    rates_rps: tuple[float, ...]
    durations_s: tuple[float, ...]
    base: ArrivalProcess = Poisson(1.0)

    def __post_init__(self) -> None:
        counts = (len(self.rates_rps), len(self.durations_s))
        require(counts[0] == counts[1] >= 1, self, "len(rates_rps), len(durations_s)", counts, "two equal numbers >= 1")
        _require_rates(self, self.rates_rps)
        for duration_s in self.durations_s:
            require_positive(self, "durations_s", duration_s)

    @cached_property
    def _curve(self) -> _Curve:
        return _Curve(np.cumsum(self.durations_s), np.asarray(self.rates_rps, np.float64))

    def draw_in(self, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """``n`` arrivals of the base process on the bent clock."""
        return self._bend(self.base, n, horizon_s, rng)


_MOST_STEPS = 10_000_000
_STEPS_PER_PERIOD = 288  # steps of 5 minutes in a day; each has the exact mean of the sine


@dataclass(frozen=True)
class Diurnal(_Curved):
    """A rate that follows a sine, on top of the burstiness of another process.

    Attributes:
        rate_rps: mean requests per second over a period, > 0.
        peak_to_trough: highest rate / lowest rate, >= 1. Azure 2024: about 2 for conversation, 6 to 10 for code.
        period_s: seconds, > 0.
        trough_s: when the rate is lowest, seconds; the peak follows half a period later.
        base: the process whose clock is bent; only its burstiness matters, not its rate.
    """

    rate_rps: float
    peak_to_trough: float = 2.0
    period_s: float = 86_400.0
    trough_s: float = 0.0
    base: ArrivalProcess = Poisson(1.0)

    def __post_init__(self) -> None:
        require_positive(self, "rate_rps", self.rate_rps)
        require(
            1 <= self.peak_to_trough < math.inf, self, "peak_to_trough", self.peak_to_trough, "a finite number >= 1"
        )
        require_positive(self, "period_s", self.period_s)
        require_non_negative(self, "trough_s", self.trough_s)

    @cached_property
    def _curve(self) -> _Curve:
        swing = (self.peak_to_trough - 1) / (self.peak_to_trough + 1)
        edges = np.linspace(0.0, 1.0, _STEPS_PER_PERIOD + 1)
        sine = np.sin(2 * np.pi * (edges - self.trough_s / self.period_s))
        mean_cosine = np.diff(sine) * _STEPS_PER_PERIOD / (2 * np.pi)
        return _Curve(edges[1:] * self.period_s, self.rate_rps * (1 - swing * mean_cosine))

    def draw_in(self, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """``n`` arrivals of the base process on the bent clock."""
        return self._bend(self.base, n, horizon_s, rng)


@dataclass(frozen=True)
class Windows(_Curved):
    """A process of its own in each of equal windows of time, again from the first after the last (ServeGen's form).

    Attributes:
        window_s: seconds of a window, > 0.
        processes: the process of each window; None where nothing arrives.
    """

    window_s: float
    processes: tuple[ArrivalProcess | None, ...]

    def __post_init__(self) -> None:
        require_positive(self, "window_s", self.window_s)
        _require_rates(self, self._rates_rps)

    @property
    def _rates_rps(self) -> tuple[float, ...]:
        return tuple(process.mean_rps if process else 0.0 for process in self.processes)

    @cached_property
    def _curve(self) -> _Curve:
        return _Curve(self.window_s * np.arange(1.0, len(self.processes) + 1), np.asarray(self._rates_rps))

    def draw_in(self, n: int, horizon_s: float, rng: np.random.Generator) -> Times:
        """``n`` arrivals, dealt out to the windows by what each is expected to have."""
        _require_steps(self, "window_s", self.window_s, horizon_s, horizon_s / self.window_s)
        starts_s = np.arange(0.0, horizon_s, self.window_s)
        lengths_s = np.minimum(self.window_s, horizon_s - starts_s)
        expected = lengths_s * np.resize(self._rates_rps, len(starts_s))
        if n == 0:
            return np.empty(0)
        require(expected.sum() > 0, self, "horizon_s", horizon_s, "a time with a rate > 0 before it")
        counts = rng.multinomial(n, expected / expected.sum())
        parts = []
        for index in np.flatnonzero(counts):
            process = self.processes[index % len(self.processes)]
            assert process is not None
            parts.append(starts_s[index] + process.draw_in(int(counts[index]), float(lengths_s[index]), rng))
        return np.concatenate(parts)


def cv_from_burstiness(burstiness: float) -> float:
    """Coefficient of variation of gaps from vLLM's ``burstiness``, the shape of a Gamma: ``1 / sqrt(burstiness)``."""
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness = {burstiness}: expected a finite number > 0")
    return 1 / math.sqrt(burstiness)


def burstiness_from_cv(cv: float) -> float:
    """The shape of a Gamma (vLLM's ``burstiness``) from the coefficient of variation of gaps: ``1 / cv**2``."""
    if not 0 < cv < math.inf:
        raise ValueError(f"cv = {cv}: expected a finite number > 0")
    return 1 / cv**2


def rate_sweep(low_rps: float, high_rps: float, n: int) -> tuple[float, ...]:
    """``n`` different rates from the lowest to the highest, both included, in equal steps.

    Raises:
        ValueError: unless ``0 < low_rps < high_rps`` and ``n >= 2``.
    """
    if not 0 < low_rps < high_rps < math.inf:
        raise ValueError(f"low_rps, high_rps = {low_rps}, {high_rps}: expected 0 < low_rps < high_rps")
    if n < 2:
        raise ValueError(f"n = {n}: expected at least the two ends of the sweep")
    return tuple(np.linspace(low_rps, high_rps, n).tolist())


def _weibull_cv(shape: float) -> float:
    # var / mean**2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)**2 - 1
    return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))


def _require_steps(owner: object, field: str, value: object, horizon_s: float, steps: float) -> None:
    """Refuse a rate that changes more often than memory holds."""
    expected = f"at most {_MOST_STEPS:,} changes of the rate in the {horizon_s:g} s that the requests take"
    require(steps <= _MOST_STEPS, owner, field, value, expected)


def _require_rates(owner: object, rates_rps: tuple[float, ...]) -> None:
    for rate_rps in rates_rps:
        require_non_negative(owner, "rates_rps", rate_rps)
    require(any(rate_rps > 0 for rate_rps in rates_rps), owner, "rates_rps", rates_rps, "at least one > 0")
