"""Open-loop workloads: independent streams, parts, mixes of clients and the real clients of ServeGen."""

from __future__ import annotations

import csv
import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads.arrivals import MMPP, Diurnal, Gamma, PiecewiseRate, Poisson, Weibull
from fleetpilot.workloads.clients import read_servegen
from fleetpilot.workloads.lengths import (
    Empirical,
    Fixed,
    Geometric,
    Independent,
    LlumnixZipf,
    LogNormal,
    Quantiles,
    Uniform,
)
from fleetpilot.workloads.library import stream
from fleetpilot.workloads.openloop import BLOCK_ROWS, Client, OpenLoop
from fleetpilot.workloads.table import RequestTable

CHAT = Client(Gamma(3.0, 2.0), Independent(LogNormal(200, 1.0), Geometric(150)))
CODE = Client(Weibull(1.0, 0.5), Independent(Uniform(1000, 3000), Fixed(20)), priority=2, slo_class=1)
LATE = Client(PiecewiseRate((0.0, 1.0), (10.0, 10.0)), CHAT.lengths)
MIX = OpenLoop((CHAT, CODE))
COLUMNS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "predicted_output_tokens",
    "priority",
    "slo_class",
    "session",
    "source_row",
)


def joined(parts: list[RequestTable], column: str) -> np.ndarray:
    return np.concatenate([getattr(part, column) for part in parts])


@pytest.mark.parametrize("generator", [OpenLoop((CHAT,)), MIX], ids=["one client", "two clients"])
@pytest.mark.parametrize("rows_per_part", [1, 777, BLOCK_ROWS, 100_000])
def test_parts_are_the_whole_cut_anywhere(generator: OpenLoop, rows_per_part: int) -> None:
    n = BLOCK_ROWS + 5_000 if rows_per_part > 1 else 300
    whole = generator.table(n, seed=11)
    parts = list(stream(generator, n, rows_per_part, seed=11))
    assert [len(part) for part in parts[:-1]] == [rows_per_part] * (len(parts) - 1)
    for column in COLUMNS:
        assert np.array_equal(joined(parts, column), getattr(whole, column)), column
    assert np.array_equal(joined(parts, "source_row"), np.arange(n))


@given(st.integers(1, 400), st.integers(1, 500), st.integers(0, 2**64))
def test_any_cut_of_any_size(n: int, rows_per_part: int, seed: int) -> None:
    whole = MIX.table(n, seed)
    parts = list(MIX.parts(n, rows_per_part, seed))
    assert sum(len(part) for part in parts) == n
    for column in COLUMNS:
        assert np.array_equal(joined(parts, column), getattr(whole, column)), column


def test_parts_do_not_hold_the_whole() -> None:
    """A million requests as a table are over 80 bytes a row; in parts only the arrival times and one block are held."""
    n = 1_000_000
    tracemalloc.start()
    assert sum(len(part) for part in stream(OpenLoop((CHAT,)), n, 20_000, seed=0)) == n
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 60 * n


def test_same_seed_same_table() -> None:
    first, second, other = MIX.table(2000, 5), MIX.table(2000, 5), MIX.table(2000, 6)
    for column in COLUMNS:
        assert np.array_equal(getattr(first, column), getattr(second, column))
    assert not np.array_equal(first.arrival_s, other.arrival_s)


def test_arrivals_and_lengths_do_not_influence_each_other() -> None:
    """Changing one leaves the draws of the other alone; intended times know nothing of what is served."""
    base = OpenLoop((Client(Poisson(2.0), CHAT.lengths),)).table(5000, 3)
    other_lengths = OpenLoop((Client(Poisson(2.0), CODE.lengths),)).table(5000, 3)
    other_arrivals = OpenLoop((Client(MMPP.on_off(9.0, 1.0, 9.0), CHAT.lengths),)).table(5000, 3)
    assert np.array_equal(base.arrival_s, other_lengths.arrival_s)
    assert np.array_equal(base.prompt_tokens, other_arrivals.prompt_tokens)
    assert np.array_equal(base.output_tokens, other_arrivals.output_tokens)
    assert not np.array_equal(base.arrival_s, other_arrivals.arrival_s)


def test_scaling_the_rate_scales_the_times() -> None:
    slow = OpenLoop((CHAT,), rate_rps=1.0).table(1000, 3)
    fast = OpenLoop((CHAT,), rate_rps=8.0).table(1000, 3)
    assert slow.arrival_s == pytest.approx(8.0 * fast.arrival_s)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)


def test_mix_gives_each_client_its_share_lengths_and_class() -> None:
    table = MIX.table(100_000, 1)
    code = table.session == 1
    assert code.mean() == pytest.approx(0.25, rel=0.03)
    assert table.arrival_s[-1] == pytest.approx(100_000 / 4.0, rel=0.01)
    assert set(table.priority[code]) == {2}
    assert set(table.slo_class[code]) == {1}
    assert set(table.output_tokens[code]) == {20}
    assert table.prompt_tokens[code].min() >= 1000
    assert np.median(table.prompt_tokens[~code]) == pytest.approx(200, rel=0.05)
    gaps = np.diff(table.arrival_s[~code])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.05)


def test_burstiness_evens_out_in_a_mix() -> None:
    """A hundred bursty clients are nearly Poisson together: one global cv is the wrong knob for a shared service."""
    client = Client(Gamma(0.1, 2.0), CHAT.lengths)
    alone = np.diff(OpenLoop((client,)).table(50_000, 2).arrival_s)
    together = np.diff(OpenLoop((client,) * 100).table(50_000, 2).arrival_s)
    assert alone.std() / alone.mean() == pytest.approx(2.0, rel=0.05)
    assert together.std() / together.mean() < 1.35


def test_mix_of_courses_keeps_each_course() -> None:
    """Two clients with opposite days: the shares follow the time of day, and n requests take what both expect."""
    early = Client(Diurnal(4.0, 9.0, 1000.0, trough_s=500.0), CHAT.lengths)
    late = Client(Diurnal(4.0, 9.0, 1000.0, trough_s=0.0), CHAT.lengths)
    table = OpenLoop((early, late)).table(80_000, 2)
    assert table.arrival_s[-1] == pytest.approx(10_000.0, rel=0.01)
    phase = table.arrival_s % 1000
    assert np.mean(table.session[(phase < 100) | (phase > 900)]) == pytest.approx(0.1, abs=0.03)
    assert np.mean(table.session[(phase > 400) & (phase < 600)]) == pytest.approx(0.9, abs=0.03)


def test_prediction_is_the_mean_of_the_first_block() -> None:
    table = OpenLoop((CHAT,)).table(1000, 3)
    assert table.predicted_output_tokens == pytest.approx(table.output_tokens.mean())


def test_default_block_law_of_the_llumnix_lengths() -> None:
    """Blocks are stretched to the mean one by one, so a long stream has it too."""
    lengths = Independent(LlumnixZipf(128), LlumnixZipf(512))
    prompts = np.concatenate(
        [part.prompt_tokens for part in stream(OpenLoop((Client(Poisson(1.0), lengths),)), 200_000, 9_999, 0)]
    )
    assert prompts.mean() == pytest.approx(128, rel=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OpenLoop(()), r"OpenLoop: clients = \(\): expected at least one"),
        (lambda: OpenLoop((CHAT,), rate_rps=0.0), r"OpenLoop: rate_rps = 0\.0: expected a finite number > 0"),
        (lambda: MIX.table(0, 1), "OpenLoop: n = 0: expected >= 1"),
        (
            lambda: OpenLoop((LATE,), rate_rps=1.0).table(5, 1),
            r"OpenLoop: n = 5: expected a client with a rate > 0 in the 5 s",
        ),
        (lambda: MIX.table(1, -1), "seed = -1: expected an integer >= 0"),
        (lambda: list(MIX.parts(5, 0, 1)), "OpenLoop: rows_per_part = 0: expected >= 1"),
        (
            lambda: Empirical(np.array([1]), np.array([1, 2])),
            r"Empirical: len.* = \(1, 2\): expected two equal",
        ),
    ],
)
def test_errors_name_parameter_value_and_expectation(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


class TestServeGen:
    """The condensed public files of real services."""

    @pytest.fixture
    def reasoning(self, traces: Path) -> Path:
        return traces / "servegen" / "deepseek-r1_d0"

    @pytest.fixture
    def small(self, traces: Path) -> Path:
        return traces / "servegen" / "m-small_d0-3"

    @staticmethod
    def windows(folder: Path, start_s: float, end_s: float) -> list[dict[str, str]]:
        with gzip.open(folder / "client_windows.csv.gz", "rt") as file:
            return [row for row in csv.DictReader(file) if start_s <= float(row["t_s"]) < end_s]

    def test_rate_and_shares_are_those_of_the_files(self, reasoning: Path) -> None:
        rows = self.windows(reasoning, 0, 36_000)
        requests = sum(float(row["rate_rps"]) * 600 for row in rows)
        mix = read_servegen(reasoning, start_s=0, duration_s=36_000)
        table = mix.table(round(requests), 0)
        assert table.span_s == pytest.approx(36_000, rel=0.01)
        of_client: dict[int, float] = {}
        for row in rows:
            of_client[int(row["client_id"])] = of_client.get(int(row["client_id"]), 0.0) + float(row["rate_rps"]) * 600
        names = dict(mix.meta)["clients"]
        got = dict(zip(names, np.bincount(table.session, minlength=len(names)), strict=True))  # type: ignore[call-overload]
        for client, expected in of_client.items():
            assert got[client] == pytest.approx(expected, rel=0.05, abs=5 * np.sqrt(expected))

    def test_busiest_client_keeps_its_windows(self, reasoning: Path) -> None:
        """Requests in each of its windows are as many as the file's rate says."""
        rows = self.windows(reasoning, 0, 36_000)
        requests = round(sum(float(row["rate_rps"]) * 600 for row in rows))
        mix = read_servegen(reasoning, start_s=0, duration_s=36_000)
        table = mix.table(requests, 0)
        top = str(dict(mix.meta)["clients"][np.bincount(table.session).argmax()])  # type: ignore[index]
        which = list(dict(mix.meta)["clients"]).index(int(top))  # type: ignore[call-overload]
        counts = np.bincount((table.arrival_s[table.session == which] / 600).astype(int), minlength=60)[:60]
        for row in (row for row in rows if row["client_id"] == top):
            expected = float(row["rate_rps"]) * 600
            assert counts[int(float(row["t_s"])) // 600] == pytest.approx(expected, abs=6 * np.sqrt(expected))

    def test_lengths_are_the_clients_own(self, reasoning: Path) -> None:
        mix = read_servegen(reasoning, start_s=0, duration_s=3_600)
        table = mix.table(40_000, 0)
        compared = np.flatnonzero(np.bincount(table.session) > 1_000)
        assert len(compared) >= 3
        for client in compared:
            lengths = mix.clients[client].lengths
            assert isinstance(lengths, Independent)
            assert isinstance(lengths.prompt, Quantiles)
            median = np.median(table.prompt_tokens[table.session == client])
            assert median == pytest.approx(float(lengths.prompt.at(0.5)), rel=0.02, abs=1)

    def test_bringing_the_service_to_a_rate(self, reasoning: Path) -> None:
        table = read_servegen(reasoning, start_s=0, duration_s=3_600, rate_rps=50.0).table(20_000, 0)
        assert 20_000 / table.span_s == pytest.approx(50.0, rel=0.01)

    def test_clients_without_lengths_are_reported_or_given_some(self, small: Path) -> None:
        left_out = read_servegen(small, start_s=36_000, duration_s=3_600)
        report = dict(left_out.meta)
        assert report["clients_without_lengths"] == [5, 8, 11, 38]
        assert 0.5 < report["clients_without_lengths_rate_share"] < 0.65  # type: ignore[operator]
        assert not set(report["clients"]) & {5, 8, 11, 38}  # type: ignore[call-overload]
        given_some = read_servegen(small, start_s=36_000, duration_s=3_600, missing_lengths=CHAT.lengths)
        assert len(given_some.clients) == len(left_out.clients) + 4

    def test_lengths_have_the_means_of_the_files(self, small: Path) -> None:
        """Where a mean can be met by the quantiles given, it is."""
        mix = read_servegen(small, start_s=36_000, duration_s=3_600)
        sides = [side for client in mix.clients for side in (client.lengths.prompt, client.lengths.output)]  # type: ignore[attr-defined]
        with_mean = [side for side in sides if side.mean is not None]
        assert len(with_mean) > 0.8 * len(sides)
        for side in with_mean:
            assert isinstance(side, Quantiles)
            assert side.at((np.arange(20_000) + 0.5) / 20_000).mean() == pytest.approx(side.mean, rel=0.02)

    @pytest.mark.parametrize(
        ("start_s", "duration_s", "message"),
        [
            (100, 600, "start_s = 100: expected a multiple of 600 >= 0"),
            (0, -600, "duration_s = -600: expected a multiple of 600"),
            (6 * 10**8, 600, "expected a period in which a client with lengths is active"),
        ],
    )
    def test_errors(self, reasoning: Path, start_s: float, duration_s: float, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_servegen(reasoning, start_s=start_s, duration_s=duration_s)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"junk", r"client_windows.csv.gz: expected gzipped CSV \(Not a gzipped file"),
        (gzip.compress(b"client_id,t_s\n1,2\n", mtime=0)[:-9], "client_windows.csv.gz: expected gzipped CSV"),
        (gzip.compress(b"client_id,t_s\n1,2\n", mtime=0), "client_windows.csv.gz: expected a column 'rate_rps'"),
        (
            gzip.compress(b"client_id,t_s,rate_rps,pattern\n1,x,1,Gamma\n", mtime=0),
            "t_s = 'x': expected a finite number",
        ),
        (
            gzip.compress(b"client_id,t_s,rate_rps,pattern\n1,0,1,Gamma\n", mtime=0),
            "cv = None: expected a finite number",
        ),
        (gzip.compress(b"client_id,t_s,rate_rps,pattern\n1,0\n", mtime=0), "rate_rps = None: expected a finite number"),
    ],
)
def test_a_damaged_servegen_folder_is_refused_by_file_and_field(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "client_windows.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_servegen(tmp_path, start_s=0, duration_s=3_600)
