"""Length distributions: the published quantiles, and the Llumnix artifact's very draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads.arrivals import Poisson
from fleetpilot.workloads.lengths import (
    Distribution,
    Empirical,
    Fixed,
    Geometric,
    Independent,
    LlumnixZipf,
    LogNormal,
    Quantiles,
    Uniform,
    Zipf,
    draw_tokens,
    published_quantiles,
    table_1,
)
from fleetpilot.workloads.llumnix import LlumnixPaper, llumnix_workload
from fleetpilot.workloads.openloop import Client, OpenLoop
from fleetpilot.workloads.table import make_table

PERCENTILES = (50, 80, 95, 99)
TABLE_1 = {  # name: (mean, P50, P80, P95, P99)
    "ShareGPT prompt": (306, 74, 348, 1484, 3388),
    "ShareGPT output": (500, 487, 781, 988, 1234),
    "BurstGPT prompt": (830, 582, 1427, 2345, 3549),
    "BurstGPT output": (271, 243, 434, 669, 964),
    "S prompt": (128, 38, 113, 413, 1464),
    "M prompt": (256, 32, 173, 1288, 4208),
    "L prompt": (512, 55, 582, 3113, 5166),
}
SECOND_DRAW = {  # outputs of the artifact, P50, P80, P95, P99
    "S": (35, 103, 411, 1540),
    "M": (30, 175, 1350, 4295),
    "L": (52, 615, 3153, 5054),
}


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("row", TABLE_1)
@pytest.mark.parametrize("n", [1_000, 100_000])
def test_quantile_mode_reproduces_table_1(row: str, n: int) -> None:
    name, side = row.split()
    tokens = draw_tokens(published_quantiles("llumnix_table_1")[name][side], n, rng())
    mean, *percentiles = TABLE_1[row]
    tolerance = 0.02 if n == 100_000 else 0.06
    assert tokens.mean() == pytest.approx(mean, rel=0.02)
    assert np.percentile(tokens, PERCENTILES) == pytest.approx(percentiles, rel=tolerance, abs=1)


@pytest.mark.parametrize(("prompt", "output"), [("S", "S"), ("M", "M"), ("L", "L"), ("S", "L"), ("L", "S")])
def test_paper_mode_reproduces_the_artifact_exactly(prompt: str, output: str) -> None:
    """Seed 0xCADE, 10,000 requests: all percentiles of Table 1 for prompts, those of the second draw for outputs."""
    table = LlumnixPaper(prompt, output, 5.0).table()
    assert np.floor(np.percentile(table.prompt_tokens, PERCENTILES)).tolist() == list(TABLE_1[f"{prompt} prompt"][1:])
    if prompt == output:
        got = np.floor(np.percentile(table.output_tokens, PERCENTILES)).tolist()
        assert got == list(SECOND_DRAW[output])
    assert table.prompt_tokens.max() <= 6144
    assert table.output_tokens.max() <= 6144


def test_paper_mode_draws_all_from_one_legacy_stream() -> None:
    """Written a second time from the published recipe: prompts, then outputs, then gaps."""
    stream = np.random.RandomState(0xCADE)
    expected = []
    for mean, exponent in ((256, 1.5), (512, 1.15)):
        ranks = np.arange(1, 2 * mean)
        weights = 1.0 / ranks**exponent
        drawn = stream.choice(ranks, size=10_000, p=weights / weights.sum())
        expected.append(np.minimum(np.ceil(drawn * (mean / drawn.mean())), 6144))
    gaps = stream.gamma(1 / 2.0**2, 2.0**2 / 7.5, 10_000)
    table = LlumnixPaper("M", "L", 7.5, cv=2.0).table()
    assert np.array_equal(table.prompt_tokens, expected[0])
    assert np.array_equal(table.output_tokens, expected[1])
    assert np.array_equal(table.arrival_s, np.cumsum(gaps))


def test_paper_mode_fits_the_testbed() -> None:
    """No request of the five workloads exceeds the 12,672 tokens of KV memory that an instance of the paper had."""
    for name in ("S-S", "M-M", "L-L", "S-L", "L-S"):
        table = llumnix_workload(name, 5.0).table(10_000, 0xCADE, name)
        assert (table.prompt_tokens + table.output_tokens).max() <= 12_672


@pytest.mark.parametrize("mean", [128, 256, 512])
def test_zipf_mode_has_the_artifacts_law(mean: int) -> None:
    """Another stream, the same law: the sample's mean is stretched to the target, the median near the paper's."""
    name = {128: "S", 256: "M", 512: "L"}[mean]
    tokens = draw_tokens(LlumnixZipf(mean), 10_000, rng())
    assert tokens.mean() == pytest.approx(mean, rel=0.02)
    assert np.median(tokens) == pytest.approx(TABLE_1[f"{name} prompt"][1], rel=0.2)
    assert tokens.max() <= 6144


@st.composite
def quantile_tables(draw: st.DrawFn) -> Quantiles:
    inner = sorted(draw(st.sets(st.integers(1, 99), min_size=1, max_size=6)))
    probabilities = (0.0, *(p / 100 for p in inner), 1.0)
    steps = draw(st.lists(st.integers(0, 500), min_size=len(probabilities) - 1, max_size=len(probabilities) - 1))
    values = tuple(float(v) for v in np.cumsum([draw(st.integers(1, 50)), *steps]))
    low, high = Quantiles(probabilities, values).mean_range
    where = draw(st.floats(0.1, 0.9))
    return Quantiles(probabilities, values, low + where * (high - low) if high > low else None)


@given(quantile_tables())
def test_quantiles_go_through_their_table(table: Quantiles) -> None:
    assert table.at(np.array(table.probabilities)) == pytest.approx(np.array(table.values))
    grid = table.at(np.linspace(0, 1, 5001))
    assert np.all(np.diff(grid) >= -1e-9 * table.values[-1])
    if table.mean is not None:
        fine = table.at((np.arange(100_000) + 0.5) / 100_000)
        assert fine.mean() == pytest.approx(table.mean, rel=0.01)


@pytest.mark.parametrize("twin", sorted(published_quantiles("twins")))
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_published_tables_are_met(twin: str, side: str) -> None:
    distribution = published_quantiles("twins")[twin][side]
    tokens = draw_tokens(distribution, 100_000, rng())
    assert distribution.mean is not None
    assert tokens.mean() == pytest.approx(distribution.mean, rel=0.01)
    got = np.quantile(tokens, distribution.probabilities[1:-1])
    assert got == pytest.approx(distribution.values[1:-1], rel=0.02)
    assert tokens.min() >= distribution.values[0]
    assert tokens.max() <= distribution.values[-1]


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        (Fixed(17), 17.0),
        (Uniform(10, 30), 20.0),
        (Geometric(40.0), 40.0),
        (LogNormal(100.0, 0.5), 100.0 * np.exp(0.125)),
        (LogNormal.from_mean(100.0, 1.0), 100.0),
        (Zipf(2.59, 43), Zipf(2.59, 43).mean),
    ],
)
def test_means(distribution: Distribution, mean: float) -> None:
    tokens = draw_tokens(distribution, 200_000, rng())
    assert tokens.mean() == pytest.approx(mean, rel=0.02)
    assert tokens.min() >= 1


def test_uniform_includes_both_ends() -> None:
    assert set(draw_tokens(Uniform(3, 5), 1000, rng())) == {3, 4, 5}


def test_clipping() -> None:
    tokens = draw_tokens(LogNormal(100.0, 2.0, low=50.0, high=200.0), 10_000, rng())
    assert (tokens.min(), tokens.max()) == (50, 200)


def test_prompts_do_not_depend_on_the_output_distribution() -> None:
    first, _ = Independent(Geometric(50), Fixed(10)).draw(1000, rng())
    second, _ = Independent(Geometric(50), LogNormal(10, 1)).draw(1000, rng())
    assert np.array_equal(first, second)


def test_empirical_keeps_pairs_together_and_rows_unique() -> None:
    """More requests than rows: lengths repeat, in the pairs they had, requests do not."""
    prompt = np.array([10, 200, 3000])
    source = make_table("source", [0.0, 1.0, 2.0], prompt, prompt // 10)
    table = OpenLoop((Client(Poisson(1.0), Empirical.of(source)),)).table(1000, seed=4)
    assert len(table) == 1000
    assert len(np.unique(table.source_row)) == 1000
    assert np.array_equal(table.output_tokens, table.prompt_tokens // 10)
    assert np.unique(table.prompt_tokens, return_counts=True)[1] == pytest.approx(333, rel=0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0, 5), "Uniform: low = 0: expected >= 1"),
        (lambda: Uniform(5, 4), "Uniform: high = 4: expected >= low = 5"),
        (lambda: Geometric(0.5), r"Geometric: mean = 0\.5: expected a finite number >= 1"),
        (lambda: LogNormal(1.0, -1.0), r"LogNormal: sigma = -1\.0"),
        (lambda: LlumnixZipf(100), "LlumnixZipf: mean_tokens = 100: expected 128, 256, 512 or 1024"),
        (
            lambda: Quantiles((0.0, 0.5), (1.0, 2.0)),
            r"Quantiles: probabilities = .* expected ascending numbers from 0",
        ),
        (lambda: Quantiles((0.0, 1.0), (2.0, 1.0)), r"Quantiles: values = .* expected finite ascending numbers > 0"),
        (lambda: Quantiles((0.0, 0.5, 1.0), (1.0, 2.0, 3.0), 9.0), r"mean = 9\.0: expected between 1\.75 and 2\.25"),
        (lambda: table_1("S-X"), "name = 'S-X': expected ShareGPT, BurstGPT, or two of S, M and L"),
        (lambda: llumnix_workload("S-X", 1.0), "llumnix: name = 'S-X': expected"),
        (
            lambda: llumnix_workload("ShareGPT", 1.0, mode="paper"),
            "llumnix/ShareGPT: mode = 'paper': expected quantile",
        ),
        (lambda: LlumnixPaper("S", "S", -1.0), r"LlumnixPaper: rate_rps = -1\.0: expected a finite number > 0"),
        (lambda: LlumnixPaper("S", "S", 1.0).table(10, 2**32), "seed = 4294967296: expected an integer from 0"),
    ],
)
def test_errors_name_parameter_value_and_expectation(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
