"""The real slices as the package reads them, against figures that a separate script (csv, json, plain Python) found."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetpilot.workloads import RequestTable, infinite_cache_hit, read_trace

QUANTILES = (50, 90, 95, 99)

# file: rows emitted, span, CV of gaps, IDC at 1 s and 60 s, quantiles and sum of prompt and output tokens
PINNED = {
    "azure_2023/AzureLLMInferenceTrace_code.csv": (
        6621,
        2080.768972,
        12.79829294740725,
        13.24459645646341,
        161.6442418836635,
        (1463.0, 5009.0, 7328.0, 7436.0),
        13463044,
        (13.0, 55.0, 87.0, 251.4),
        182049,
    ),
    "azure_2023/AzureLLMInferenceTrace_conv.csv": (
        12337,
        2099.954711,
        1.0807919245732929,
        1.3489616972589,
        15.579673937730202,
        (1024.0, 4076.0, 4086.0, 4123.0),
        15375199,
        (115.0, 423.0, 451.0, 601.64),
        2514643,
    ),
    "burstgpt/BurstGPT_1_days.csv": (
        9842,
        345496.0,
        5.640835810464717,
        1.0241532399282118,
        2.665963127728445,
        (488.0, 1615.0, 1826.95, 2199.54),
        6576387,
        (234.0, 536.0, 635.95, 935.59),
        2593858,
    ),
    "mooncake/conversation_trace.jsonl.gz": (
        6758,
        2097.0,
        2.943920368634607,
        7.534713510278824,
        2.554456559908518,
        (7406.0, 28190.5, 41102.15, 90252.13),
        85097411,
        (356.0, 606.3, 711.0, 1130.73),
        2344538,
    ),
}
COARSE_CLOCKS = ("burstgpt", "mooncake")


def gap_cv(arrival_s: NDArray[np.float64]) -> float:
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean())


def dispersion(arrival_s: NDArray[np.float64], bin_s: float) -> float:
    bins = int(arrival_s[-1] // bin_s)
    counts = np.bincount((arrival_s // bin_s).astype(int), minlength=bins)[:bins]
    return float(counts.var() / counts.mean())


def read_as_it_stands(traces: Path, file: str) -> RequestTable:
    options = {"ticks": "raw"} if file.startswith(COARSE_CLOCKS) else {}
    return read_trace(traces / file, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", PINNED)
def test_arrivals_and_lengths_are_those_of_the_slice(traces: Path, file: str) -> None:
    rows, span_s, cv, idc_1s, idc_60s, prompt_quantiles, prompt_sum, output_quantiles, output_sum = PINNED[file]
    table = read_as_it_stands(traces, file)
    assert len(table) == rows
    assert table.span_s == pytest.approx(span_s, abs=1e-7)
    assert gap_cv(table.arrival_s) == pytest.approx(cv, rel=1e-9)
    assert dispersion(table.arrival_s, 1.0) == pytest.approx(idc_1s, rel=1e-9)
    assert dispersion(table.arrival_s, 60.0) == pytest.approx(idc_60s, rel=1e-9)
    assert np.percentile(table.prompt_tokens, QUANTILES) == pytest.approx(prompt_quantiles)
    assert np.percentile(table.output_tokens, QUANTILES) == pytest.approx(output_quantiles)
    assert table.prompt_tokens.sum(dtype=np.int64) == prompt_sum
    assert table.output_tokens.sum(dtype=np.int64) == output_sum


@pytest.mark.parametrize(
    "file",
    [*PINNED, "vidur/splitwise_code.csv", "vidur/splitwise_conv.csv", "burstgpt/BurstGPT_1_span30s_120.csv"],
)
def test_every_row_of_the_slice_is_accounted_for(traces: Path, file: str) -> None:
    entry = next(entry for entry in json.loads((traces / "MANIFEST.json").read_text()) if entry["file"] == file)
    assert hashlib.sha256((traces / file).read_bytes()).hexdigest() == entry["sha256"], (
        "another slice than the pinned one"
    )
    report = read_trace(traces / file).meta["read"]
    assert isinstance(report, dict)
    assert report["rows_read"] == entry["rows"]
    assert report["rows_emitted"] + sum(report["dropped"].values()) == entry["rows"]
    assert report["inversions"] == 0


@pytest.mark.parametrize("name", ["code", "conv"])
def test_every_digit_of_azure_times_is_kept(traces: Path, name: str) -> None:
    path = traces / "azure_2023" / f"AzureLLMInferenceTrace_{name}.csv"
    with path.open(newline="") as text:
        stamps = [row["TIMESTAMP"] for row in csv.DictReader(text)]

    def ticks(stamp: str) -> int:  # of 100 ns since midnight; the slice is of one day
        day, clock = stamp.split()
        assert day == "2023-11-16"
        hours, minutes, seconds = clock.split(":")
        whole, fraction = seconds.split(".")
        return (int(hours) * 3600 + int(minutes) * 60 + int(whole)) * 10**7 + int(fraction)

    table = read_trace(path)
    expected = [ticks(stamp) - ticks(stamps[0]) for stamp in stamps]
    assert np.round(table.arrival_s * 1e7).astype(int).tolist() == expected
    assert np.abs(table.arrival_s * 1e7 - expected).max() < 1e-2


@pytest.mark.parametrize("name", ["code", "conv"])
def test_azure_and_vidur_have_the_same_requests(traces: Path, name: str) -> None:
    azure = read_trace(traces / "azure_2023" / f"AzureLLMInferenceTrace_{name}.csv")
    vidur = read_trace(traces / "vidur" / f"splitwise_{name}.csv")
    assert np.array_equal(azure.prompt_tokens, vidur.prompt_tokens)
    assert np.array_equal(azure.output_tokens, vidur.output_tokens)
    assert np.abs(azure.arrival_s - vidur.arrival_s).max() <= 1e-6


def test_failed_burstgpt_requests_are_dropped_and_counted(traces: Path) -> None:
    report = read_trace(traces / "burstgpt" / "BurstGPT_1_days.csv").meta["read"]
    assert isinstance(report, dict)
    assert report["dropped"] == {"failed": 954}
    assert report["origin"] == 5.0


def test_mooncake_prefixes_are_those_of_the_slice(traces: Path) -> None:
    table = read_trace(traces / "mooncake" / "conversation_trace.jsonl.gz")
    assert len(table.node_parent) == 2125
    assert infinite_cache_hit(table, block_tokens=512) == pytest.approx(58563 / 169404, rel=1e-12)
    assert infinite_cache_hit(table) == pytest.approx(29974325 / 85097411, rel=1e-12)


def test_spreading_mooncake_ticks_removes_the_artefact_and_nothing_else(traces: Path) -> None:
    path = traces / "mooncake" / "conversation_trace.jsonl.gz"
    raw, spread = read_trace(path, ticks="raw"), read_trace(path)
    assert np.array_equal(raw.source_row, spread.source_row)
    assert np.all(spread.arrival_s >= raw.arrival_s)
    assert np.all(spread.arrival_s < raw.arrival_s + 3.0)
    assert dispersion(spread.arrival_s, 1.0) == pytest.approx(1.0, abs=0.15)  # Poisson within the ticks
    assert gap_cv(spread.arrival_s) == pytest.approx(1.0, abs=0.1)
    assert dispersion(spread.arrival_s, 60.0) == pytest.approx(2.554, rel=0.1)
    assert np.array_equal(read_trace(path).arrival_s, spread.arrival_s)


def test_sessions_of_the_weka_sample(traces: Path) -> None:
    path = traces / "agentic_cc_weka" / "cc_traces_weka_sample5000.jsonl.gz"
    table = read_trace(path, session_gap_s=100.0)
    with gzip.open(path, "rt") as text:
        calls = [json.loads(line) for line in text]
    assert np.bincount(table.session).tolist() == [27, 60, 24, 205, 35, 196, 72, 86, 1157, 139, 68]
    closed = table.parent >= 0
    assert np.array_equal(table.parent[closed], np.flatnonzero(closed) - 1)  # each session is one chain
    assert table.turn.tolist() == [call["turn_index"] for call in calls]
    assert table.arrival_s[~closed].tolist() == [100.0 * session for session in range(11)]
    assert table.think_s[closed].sum() == pytest.approx(1175018.01)
    assert np.percentile(table.think_s[closed], (50, 90, 99)) == pytest.approx((1.4955, 41.7959, 1255.7699))
    assert np.percentile(table.prompt_tokens, QUANTILES) == pytest.approx((132818.0, 306211.8, 338221.0, 386670.52))
    assert table.output_tokens.sum(dtype=np.int64) == 1648704
    assert len(table.node_parent) == 0  # nothing in the file tells what the prompts share
