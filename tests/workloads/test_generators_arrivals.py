"""Arrival processes: exact mean rates, the burstiness that was asked for, and the names that people confuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetpilot.workloads.arrivals import (
    MMPP,
    ArrivalProcess,
    Diurnal,
    Gamma,
    PiecewiseRate,
    Poisson,
    Weibull,
    Windows,
    burstiness_from_cv,
    cv_from_burstiness,
    rate_sweep,
)

PROCESSES = [
    Poisson(5.0),
    Gamma(5.0, 3.0),
    Weibull.from_cv(5.0, 2.0),
    MMPP.on_off(20.0, 3.0, 9.0),
    PiecewiseRate((2.0, 8.0, 5.0), (30.0, 30.0, 60.0), Gamma(1.0, 2.0)),
    Diurnal(5.0, 4.0, 600.0),
    Windows(60.0, (Gamma(8.0, 2.0), None, Weibull(7.0, 0.6))),
]


def draw(process: ArrivalProcess, n: int, seed: int = 1) -> NDArray[np.float64]:
    return process.draw(n, np.random.default_rng(seed))


def gap_cv(times: NDArray[np.float64]) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def dispersion(times: NDArray[np.float64], bin_s: float) -> float:
    """Index of dispersion: variance / mean of the counts in whole bins."""
    counts = np.bincount((times / bin_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
class TestEveryProcess:
    def test_n_requests_take_exactly_n_over_rate(self, process: ArrivalProcess) -> None:
        n = 100_000
        times = draw(process, n)
        assert len(times) == n
        assert np.all(np.diff(times) >= 0)
        assert times[0] >= 0
        assert times[-1] <= process.span_s(n)
        assert n / times[-1] == pytest.approx(process.mean_rps, rel=0.01)

    def test_rate_does_not_drift(self, process: ArrivalProcess) -> None:
        """As many requests in the first half of the run as are expected there (a drifting clock would shift them)."""
        n = 100_000
        times = draw(process, n)
        half_s = process.span_s(n) / 2
        assert np.sum(times < half_s) == pytest.approx(process.expected(half_s), rel=0.05)

    def test_no_rush_at_the_start(self, process: ArrivalProcess) -> None:
        """The first seconds see the expected rate on average: nothing is bunched up at time 0, nothing held back."""
        window_s = 20.0
        early = [np.sum(draw(process, 1_000, seed) < window_s) for seed in range(400)]
        assert np.mean(early) == pytest.approx(process.expected(window_s), rel=0.15)

    def test_same_seed_same_times(self, process: ArrivalProcess) -> None:
        assert np.array_equal(draw(process, 500), draw(process, 500))
        assert not np.array_equal(draw(process, 500), draw(process, 500, seed=2))

    def test_any_horizon(self, process: ArrivalProcess) -> None:
        """`draw_in` brings any number of requests into any time: how a run is brought to a load."""
        times = process.draw_in(1234, 500.0, np.random.default_rng(0))
        assert len(times) == 1234
        assert times[-1] <= 500.0
        assert len(process.draw_in(0, 500.0, np.random.default_rng(0))) == 0


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("make", [Gamma, Weibull.from_cv])
def test_gap_cv_is_the_one_asked_for(make: type[Gamma], cv: float) -> None:
    times = draw(make(7.5, cv), 200_000)
    assert gap_cv(times) == pytest.approx(cv, rel=0.05)


def test_cv_one_is_poisson() -> None:
    """Gamma and Weibull with cv 1 have exponential gaps: the same quantiles as Poisson's."""
    quantiles = [0.1, 0.5, 0.9, 0.99]
    for process in (Poisson(3.0), Gamma(3.0, 1.0), Weibull.from_cv(3.0, 1.0)):
        gaps = np.diff(draw(process, 200_000))
        assert np.quantile(gaps, quantiles) == pytest.approx(-np.log1p(-np.array(quantiles)) / 3.0, rel=0.03)


def test_poisson_counts_are_not_overdispersed() -> None:
    assert dispersion(draw(Poisson(5.0), 100_000), 1.0) == pytest.approx(1.0, rel=0.05)


def test_gamma_dispersion_of_long_bins_is_cv_squared() -> None:
    """The limit of a renewal process; 200 gaps in a bin are close to it."""
    assert dispersion(draw(Gamma(200.0, 2.0), 2_000_000), 1.0) == pytest.approx(4.0, rel=0.05)


def test_on_off_matches_the_closed_forms() -> None:
    """Of an interrupted Poisson process (Heffes and Lucantoni 1986; with off rate 0 the gaps are hyperexponential)."""
    on_rps, on_s, off_s = 15.3, 8.3, 41.1
    process = MMPP.on_off(on_rps, on_s, off_s)
    mean_rps = on_rps * on_s / (on_s + off_s)
    end, start = 1 / on_s, 1 / off_s
    limit = 1 + 2 * on_rps * end / (end + start) ** 2
    turnover = end + start
    one_second = 1 + (limit - 1) * (1 - -np.expm1(-turnover) / turnover)
    times = draw(process, 400_000)
    assert process.mean_rps == pytest.approx(mean_rps)
    assert gap_cv(times) == pytest.approx(np.sqrt(limit), rel=0.05)
    assert dispersion(times, 1.0) == pytest.approx(one_second, rel=0.05)


def test_mmpp_spends_its_sojourns_in_all_states() -> None:
    """Three states of equal sojourn: the rate in half-second bins is near each state's a third of the time."""
    times = draw(MMPP((10.0, 100.0, 400.0), (5.0, 5.0, 5.0)), 1_000_000)
    rates = np.bincount((times / 0.5).astype(int)) / 0.5
    shares = np.histogram(rates, [0, 32, 200, np.inf])[0] / len(rates)
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3], abs=0.05)


def test_piecewise_rate_follows_its_steps_and_repeats() -> None:
    process = PiecewiseRate((10.0, 0.0, 40.0), (100.0, 50.0, 50.0))
    times = draw(process, 30_000)
    phase = times % 200.0
    assert times[-1] == pytest.approx(2000.0, rel=0.01)
    shares = np.histogram(phase, [0, 100, 150, 200])[0] / len(times)
    assert shares == pytest.approx([1 / 3, 0.0, 2 / 3], abs=0.01)


def test_bent_clock_keeps_burstiness() -> None:
    """Within one step of the rate the gaps have the cv of the base process, at each rate."""
    times = draw(PiecewiseRate((2.0, 20.0), (1000.0, 1000.0), Gamma(1.0, 3.0)), 200_000)
    fast = (times % 2000.0) >= 1000.0
    for step in (fast, ~fast):
        gaps = np.diff(times)[step[1:] & step[:-1]]
        gaps = gaps[gaps < 900.0]
        assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.08)


def test_diurnal_peak_trough_and_phase() -> None:
    times = draw(Diurnal(2.0, 10.0, 86_400.0, trough_s=5 * 3600.0), 2 * 7 * 86_400)
    hours = np.bincount((times % 86_400 // 3600).astype(int), minlength=24)
    assert hours.argmin() in (4, 5)
    assert hours.argmax() in (16, 17)
    assert hours.max() / hours.min() == pytest.approx(10.0, rel=0.08)
    assert len(times) / 7 / 86_400 == pytest.approx(2.0)


def test_modulating_a_modulated_process() -> None:
    """Any process can be the base: bursts inside a diurnal course."""
    process = Diurnal(5.0, 3.0, 3600.0, base=MMPP.on_off(20.0, 2.0, 6.0))
    times = draw(process, 100_000)
    assert dispersion(times, 1.0) > 5.0
    counts = np.bincount((times % 3600 // 600).astype(int))
    assert counts[[2, 3]].sum() / counts[[0, 5]].sum() == pytest.approx(2.3, rel=0.2)


def test_rare_clients_are_not_bunched_at_the_end() -> None:
    """One request in a window comes anywhere in it (a gap laid from 0 would always end at its end)."""
    single = [Gamma(1.0, 5.0).draw_in(1, 100.0, np.random.default_rng(seed))[0] for seed in range(2000)]
    assert np.quantile(single, [0.1, 0.5, 0.9]) == pytest.approx([10.0, 50.0, 90.0], abs=5.0)


def test_hopeless_shape_is_one_burst() -> None:
    """All gaps can underflow to 0; then the requests come together, still inside the run."""
    for seed in range(50):
        times = Gamma(1.0, 1e6).draw_in(3, 10.0, np.random.default_rng(seed))
        assert np.all((times >= 0) & (times <= 10.0))


@given(st.floats(1e-3, 1e3))
def test_burstiness_and_cv_convert_both_ways(cv: float) -> None:
    """vLLM's burstiness is the shape of the Gamma: lower is burstier."""
    assert cv_from_burstiness(burstiness_from_cv(cv)) == pytest.approx(cv)


def test_burstiness_of_vllm() -> None:
    assert cv_from_burstiness(0.25) == 2.0
    assert burstiness_from_cv(1.0) == 1.0


@given(st.floats(0.01, 1e3), st.floats(1.001, 100.0), st.integers(2, 50))
def test_rate_sweep(low_rps: float, ratio: float, n: int) -> None:
    """Floats, all different, both ends included: ten stages from 1 to 4 are not four values repeated."""
    rates = rate_sweep(low_rps, low_rps * ratio, n)
    assert len(set(rates)) == n
    assert (rates[0], rates[-1]) == (low_rps, low_rps * ratio)
    assert np.all(np.diff(rates) > 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), r"Poisson: rate_rps = 0\.0: expected a finite number > 0"),
        (lambda: Gamma(1.0, -1.0), r"Gamma: cv = -1\.0: expected a finite number > 0"),
        (lambda: Weibull.from_cv(1.0, 1e9), r"Weibull: cv = 1000000000\.0: expected a number in"),
        (lambda: MMPP((1.0,), (1.0,)), "MMPP: len.* expected two equal numbers >= 2"),
        (lambda: MMPP((0.0, 0.0), (1.0, 1.0)), r"MMPP: rates_rps = \(0\.0, 0\.0\): expected at least one > 0"),
        (lambda: PiecewiseRate((1.0,), (0.0,)), r"PiecewiseRate: durations_s = 0\.0"),
        (lambda: Diurnal(1.0, 0.5), r"Diurnal: peak_to_trough = 0\.5: expected a finite number >= 1"),
        (lambda: cv_from_burstiness(0.0), r"burstiness = 0\.0: expected a finite number > 0"),
        (lambda: rate_sweep(2.0, 1.0, 3), r"expected 0 < low_rps < high_rps"),
        (lambda: rate_sweep(1.0, 2.0, 1), "n = 1: expected at least the two ends"),
        (
            lambda: PiecewiseRate((0.0, 1.0), (9.0, 1.0)).draw_in(5, 3.0, np.random.default_rng(0)),
            r"horizon_s = 3\.0: expected a time with a rate > 0 before it",
        ),
    ],
)
def test_errors_name_parameter_value_and_expectation(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
