"""The fit gives back the coefficients that made the times, and says how far off it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fleetpilot.calibration.fit import Measurement, fit, prefill_iterations
from fleetpilot.calibration.plan import STEPS, Limits, Point, plan
from fleetpilot.fleet.profiles import HardwareProfile, load_profile

REQUEST_S = 0.004


def limits_of(profile: HardwareProfile) -> Limits:
    return Limits(
        profile.kv_capacity_tokens, profile.max_model_len, profile.max_num_seqs, profile.max_num_batched_tokens
    )


def time_s(profile: HardwareProfile, measurement: Measurement) -> float:
    iterations = (profile.iteration_s(int(p), q, int(b), k) for p, q, b, k in measurement.iterations)
    return sum(iterations) + REQUEST_S * measurement.is_request


def measured(profile: HardwareProfile, noise: float = 0.0) -> list[Measurement]:
    random = np.random.default_rng(0)
    limits = limits_of(profile)
    measurements = []
    for point in plan(limits):
        measurement = point.measurement(1.0, point.batch * (point.context_tokens + STEPS / 2), limits)
        factor = np.exp(noise * random.standard_normal())
        measurements.append(dataclasses.replace(measurement, time_s=factor * time_s(profile, measurement)))
    return measurements


@pytest.mark.parametrize("name", ["tiny-cpu", "h100-llama-3.1-8b", "l40s-qwen3-8b"])
def test_a_profile_comes_back_from_its_own_times(name: str) -> None:
    profile = load_profile(name)
    measurements = measured(profile)
    found = fit(measurements)
    assert found.held_out is not None
    assert found.held_out.worst < 0.04
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.3)
    fitted = profile.replace(**found.cost, host_step_s=0.0, host_per_seq_s=0.0)
    for prompt in (64, 500, 2000, 6000):
        assert fitted.prefill_s(prompt) == pytest.approx(profile.prefill_s(prompt), rel=0.04)
    for batch, context in ((1, 100), (5, 700), (20, 300)):
        assert fitted.decode_s(batch, context) == pytest.approx(profile.decode_s(batch, context), rel=0.04)


def test_noise_and_outliers_are_borne() -> None:
    profile = load_profile("tiny-cpu")
    measurements = measured(profile, noise=0.1)
    for row in (3, 11, 20):
        measurements[row] = dataclasses.replace(measurements[row], time_s=4 * measurements[row].time_s)
    found = fit(measurements)
    fitted = profile.replace(**found.cost)
    for batch, context in ((1, 100), (5, 700), (20, 300)):
        assert fitted.decode_s(batch, context) == pytest.approx(profile.decode_s(batch, context), rel=0.2)
    assert found.fitted.worst > 0.5


def test_times_that_no_coefficients_give_show_in_what_was_held_out() -> None:
    random = np.random.default_rng(0)
    measurements = [
        dataclasses.replace(measurement, time_s=float(np.exp(random.normal(0, 2))))
        for measurement in measured(load_profile("tiny-cpu"))
    ]
    found = fit(measurements)
    assert found.held_out is not None
    assert found.held_out.median > 0.3


def test_what_is_held_out_does_not_change_the_fit() -> None:
    measurements = measured(load_profile("tiny-cpu"), noise=0.1)
    other = [
        dataclasses.replace(measurement, time_s=9 * measurement.time_s) if measurement.held_out else measurement
        for measurement in measurements
    ]
    assert fit(measurements).cost == fit(other).cost


def test_a_prompt_is_cut_into_chunks_whose_attention_adds_up() -> None:
    iterations = prefill_iterations(5000, 2048)
    assert iterations[:, 0].tolist() == [2048, 2048, 904]
    assert iterations[:, 1].sum() == pytest.approx(5000**2 / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m[:3], "3 measured points: expected at least 6"),
        (lambda m: [dataclasses.replace(m[0], time_s=0.0), *m[1:]], "time_s = 0.0: expected a time > 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit(change(measured(load_profile("tiny-cpu"))))


def test_a_plan_stays_within_the_engine() -> None:
    limits = Limits(kv_tokens=2048, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=512)
    points = plan(limits)
    assert {point.kind for point in points} == {"prefill", "decode", "mixed"}
    for point in points:
        assert point.batch <= 8
        assert point.prompt_tokens <= 1022
        assert point.batch * (point.context_tokens + 2 * STEPS) <= 2048
    assert len({point.key for point in points}) == len(points)


def test_large_batches_come_first_so_that_the_others_find_their_prompts_cached() -> None:
    points = [p for p in plan(limits_of(load_profile("tiny-cpu"))) if p.kind == "decode" and p.context_tokens == 64]
    assert [point.batch for point in points] == sorted((point.batch for point in points), reverse=True)
    assert Point("decode", 0, 1, 64) in points
