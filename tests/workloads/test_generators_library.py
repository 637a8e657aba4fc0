"""Workloads by name: every listed name works, parameters reach the generators, mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads.library import HIGH_PRIORITY, list_workloads, parse_workload, stream, workload
from fleetpilot.workloads.llumnix import LlumnixPaper
from fleetpilot.workloads.table import RequestTable
from fleetpilot.workloads.twins import twin

GENERATED = [info.name for info in list_workloads() if not info.name.endswith("PATH")]
COLUMNS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "predicted_output_tokens",
    "priority",
    "session",
    "source_row",
)


def same(first: RequestTable, second: RequestTable) -> bool:
    return all(np.array_equal(getattr(first, c), getattr(second, c), equal_nan=True) for c in COLUMNS)


@pytest.mark.parametrize("name", GENERATED)
def test_every_listed_name_works_with_its_defaults(name: str) -> None:
    table = workload(f"{name}?n=500")
    assert len(table) == 500
    assert table.name == f"{name}?n=500"
    json.dumps(table.meta)
    assert same(table, workload(f"{name}?n=500"))
    assert not same(table, workload(f"{name}?n=500&seed=1"))


def test_listing_shows_parameters_and_defaults() -> None:
    listed = {info.name: info for info in list_workloads()}
    assert {"poisson", "llumnix/M-M", "twin/azure-conv", "sessions/chat", "servegen:PATH", "file:PATH"} <= set(listed)
    assert listed["llumnix/M-M"].parameters["seed"] == "0xcade"
    assert all(info.summary for info in listed.values())


def test_llumnix_by_name_is_the_papers() -> None:
    named = workload("llumnix/M-M?rate=7.5&n=10000&seed=0xCADE")
    assert same(named, LlumnixPaper("M", "M", 7.5).table())
    bursty = workload("llumnix/S-S?rate=26&cv=4&mode=zipf&n=100000")
    gaps = np.diff(bursty.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(4.0, rel=0.05)
    assert bursty.span_s == pytest.approx(100_000 / 26, rel=0.01)


def test_twin_by_name() -> None:
    assert same(workload("twin/azure-conv?n=1000&rate=8&seed=2"), twin("azure-conv", 1000, 2, 8.0))


def test_lengths_by_name_and_by_form() -> None:
    table = workload("poisson?n=20000&lengths=BurstGPT&output=64")
    assert set(table.output_tokens) == {64}
    assert np.median(table.prompt_tokens) == pytest.approx(582, rel=0.02)
    table = workload("poisson?n=20000&prompt=uniform:10:20&output=L-S:output")
    assert (table.prompt_tokens.min(), table.prompt_tokens.max()) == (10, 20)
    assert table.output_tokens.mean() == pytest.approx(128, rel=0.02)
    table = workload("poisson?n=20000&prompt=lognormal:300:1:2000&output=geometric:50")
    assert table.prompt_tokens.max() == 2000
    assert table.output_tokens.mean() == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize(
    ("uri", "rate_rps"),
    [
        ("poisson?rate=8", 8.0),
        ("gamma?rate=8&cv=3", 8.0),
        ("weibull?rate=8&cv=3", 8.0),
        ("onoff?rate=8&on_s=2&off_s=6", 8.0),
        ("piecewise?rates=4,12&durations_s=100,100", 8.0),
        ("diurnal?rate=8&period_s=500&peak_to_trough=5&cv=2", 8.0),
    ],
)
def test_rates(uri: str, rate_rps: float) -> None:
    table = workload(f"{uri}&n=80000")
    assert 80_000 / table.span_s == pytest.approx(rate_rps, rel=0.01)


def test_sessions_by_name() -> None:
    table = workload(
        "sessions/chat?n=2000&rate=2&turns=5&user=10&output=20&think_s=3&system_prompts=1&system_tokens=100"
    )
    assert set(table.turn) == set(range(5))
    assert set(table.prompt_tokens[table.turn == 2]) == {100 + 2 * 30 + 10}
    assert set(table.think_s[table.turn > 0]) == {3.0}
    opened = workload("sessions/chat?n=200&loop=open&system_prompts=0&max_context=4000")
    assert np.all(np.isnan(opened.think_s))
    assert (opened.prompt_tokens + opened.output_tokens).max() <= 4000


def test_predictors_and_priorities() -> None:
    base = workload("gamma?n=20000&seed=4")
    table = workload("gamma?n=20000&seed=4&predict=error:0.3&high_priority=0.1")
    assert np.array_equal(table.prompt_tokens, base.prompt_tokens)
    assert np.array_equal(table.arrival_s, base.arrival_s)
    assert np.log(table.predicted_output_tokens / table.output_tokens).std() == pytest.approx(0.3, rel=0.05)
    assert set(table.priority) == {HIGH_PRIORITY, 0}
    assert np.mean(table.priority == HIGH_PRIORITY) == pytest.approx(0.1, abs=0.01)
    assert set(workload("gamma?n=10&predict=constant:77").predicted_output_tokens) == {77.0}
    assert len(set(workload("sessions/chat?n=50&predict=class:session").predicted_output_tokens)) > 1


def test_streaming_by_name() -> None:
    uri = "gamma?rate=9&predict=error:0.5&high_priority=0.2"
    whole = workload(f"{uri}&n=3000&seed=5")
    parts = list(stream(uri, 3000, 700, 5))
    for column in COLUMNS:
        assert np.array_equal(np.concatenate([getattr(part, column) for part in parts]), getattr(whole, column))


@pytest.mark.parametrize("uri", ["sessions/chat", "twin/mooncake-conv", "llumnix/S-S", "poisson?predict=mean"])
def test_what_cannot_be_streamed_says_so(uri: str) -> None:
    with pytest.raises(ValueError, match="to draw it in parts"):
        list(stream(uri, 100, 10, 0))


def test_file_by_name(traces: Path) -> None:
    path = traces / "azure_2023" / "AzureLLMInferenceTrace_conv.csv"
    whole = workload(f"file:{path}")
    assert len(whole) == 12_337
    some = workload(f"file:{path}?n=100&load_factor=2&predict=error:0")
    assert some.arrival_s == pytest.approx(whole.arrival_s[:100] / 2)
    assert np.array_equal(some.predicted_output_tokens, some.output_tokens)
    bounded = workload(f"file:{path}?max_total_tokens=4000&over_length=drop")
    assert (bounded.prompt_tokens + bounded.output_tokens).max() <= 4000
    with pytest.raises(ValueError, match="over_length"):
        workload(f"file:{path}?over_length=drop")


def test_servegen_by_name(traces: Path) -> None:
    table = workload(f"servegen:{traces / 'servegen' / 'deepseek-r1_d0'}?rate=20&n=5000&duration_s=36000")
    assert table.span_s == pytest.approx(250.0, rel=0.02)
    assert len(np.unique(table.session)) > 10


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("poison", "workload 'poison': expected one of poisson, gamma"),
        ("poisson?rat=1", "workload 'poisson': unknown parameter 'rat': expected one of rate, lengths"),
        ("poisson?rate", "workload 'poisson': parameters 'rate': expected name=value pairs"),
        ("poisson?rate=1&rate=2", "workload 'poisson': rate = '1' and '2': expected one value"),
        ("poisson?rate=abc", "workload 'poisson': rate = 'abc': expected a number from 1e-09 to"),
        ("poisson?rate=0", "workload 'poisson': rate = '0': expected a number from 1e-09 to"),
        ("poisson?rate=inf", "workload 'poisson': rate = 'inf': expected a number from 1e-09 to"),
        ("poisson?n=1.5", r"workload 'poisson': n = '1\.5': expected a whole number from 1 to 20,000,000"),
        ("poisson?seed=-1", "workload 'poisson': seed = '-1': expected a whole number from 0 to"),
        ("poisson?high_priority=2", "workload 'poisson': high_priority = '2': expected a number from 0 to 1"),
        ("poisson?lengths=none", "workload 'poisson': lengths = 'none': expected azure-conv"),
        ("poisson?prompt=uniform:5", "workload 'poisson': prompt = 'uniform:5': expected NUMBER, uniform:LOW:HIGH"),
        ("poisson?prompt=uniform:1.5:3", "prompt = 'uniform:1.5:3': expected .*1.5 is not a whole number"),
        ("poisson?prompt=x", "workload 'poisson': prompt = 'x': expected NUMBER"),
        ("poisson?predict=oracle", "workload 'poisson': predict = 'oracle': expected mean, class:session"),
        ("poisson?predict=error:-1", "workload 'poisson': predict = 'error:-1': expected mean"),
        ("piecewise?rates=1,x", "workload 'piecewise': rates = '1,x': expected numbers from 0 to .* joined by commas"),
        ("diurnal?peak_to_trough=0.5", r"workload 'diurnal': peak_to_trough = '0\.5': expected a number from 1 to"),
        ("llumnix/M-M?mode=exact", "llumnix/M-M: mode = 'exact': expected paper or zipf or quantile"),
        ("piecewise?rates=1,2,3", "rates = '1,2,3': expected as many numbers as durations_s = '600,600' has"),
        ("poisson?prompt=1e300", "prompt = '1e300': expected NUMBER, .*'1e300' is not a number <= 1e"),
        ("poisson?prompt=uniform:1:inf", "prompt = 'uniform:1:inf': expected .*'inf' is not a number <="),
        ("poisson?predict=error:1e9", "predict = 'error:1e9': expected .*error:SIGMA"),
        ("sessions/chat?system_prompts=1000000000", "system_prompts = '1000000000': expected a whole number from 0 to"),
        ("sessions/chat?loop=half", "workload 'sessions/chat': loop = 'half': expected closed or open"),
    ],
)
def test_errors_name_parameter_value_and_expectation(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_workload(uri)


EXTREMES = (
    *("0", "-1", "1e-300", "1e-9", "1e9", "1e23", "1e300", "nan", "inf", "9" * 30, "1" * 5000, "x", ""),
    *("geometric:1e9", "geometric:1e300", "uniform:1:1e9", "uniform:0:0", "uniform:2:1", "uniform:1:2:3:4"),
    *("lognormal:1e9:1e9", "lognormal:1e300:0", "lognormal:nan:1", "llumnix:1e300", "error:10", "constant:1e9"),
)


@pytest.mark.filterwarnings("error")
@given(st.sampled_from([(i.name, key) for i in list_workloads() for key in i.parameters]), st.sampled_from(EXTREMES))
def test_extreme_values_give_a_table_or_an_error_that_names_them(parameter: tuple[str, str], value: str) -> None:
    name, key = parameter
    uri = f"{name}?{key}={value}" + ("" if key == "n" else "&n=50")
    said = refusal(uri)
    if said is not None and not said.endswith("No such file or directory"):
        assert "expected" in said
        assert f"{key} = {value!r}" in said or f"workload {uri!r}: " in said


def refusal(uri: str) -> str | None:
    """What is said against a workload, None if it has requests."""
    try:
        assert len(workload(uri)) > 0
    except ValueError as error:
        return str(error)
    except FileNotFoundError as error:
        return error.strerror
    return None
