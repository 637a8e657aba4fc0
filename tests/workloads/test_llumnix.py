"""The lengths of BurstGPT go together as in its data, and each is as the paper states it."""

from __future__ import annotations

import numpy as np
import pytest

from fleetpilot.workloads import workload
from fleetpilot.workloads.lengths import published_quantiles
from fleetpilot.workloads.llumnix import BURSTGPT_CORRELATION, GaussianCopula

SIDES = published_quantiles("llumnix_table_1")["BurstGPT"]


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(np.argsort(np.argsort(first)), np.argsort(np.argsort(second)))[0, 1])


def test_burstgpt_is_correlated_and_keeps_its_quantiles() -> None:
    table = workload("llumnix/BurstGPT?rate=8&n=20000")
    assert rank_correlation(table.prompt_tokens, table.output_tokens) == pytest.approx(0.30, abs=0.02)
    for tokens, side in ((table.prompt_tokens, SIDES["prompt"]), (table.output_tokens, SIDES["output"])):
        assert np.quantile(tokens, (0.5, 0.8, 0.95, 0.99)) == pytest.approx(side.values[1:5], rel=0.01)
        assert tokens.mean() == pytest.approx(side.mean, rel=0.01)


def test_sharegpt_is_not() -> None:
    table = workload("llumnix/ShareGPT?rate=8&n=20000")
    assert abs(rank_correlation(table.prompt_tokens, table.output_tokens)) < 0.03


@pytest.mark.parametrize(("correlation", "expected"), [(1.0, 1.0), (-1.0, -1.0), (0.0, 0.0)])
def test_the_copula_at_its_ends(correlation: float, expected: float) -> None:
    prompt, output = GaussianCopula(**SIDES, correlation=correlation).draw(5000, np.random.default_rng(0))
    assert rank_correlation(prompt, output) == pytest.approx(expected, abs=0.04)


def test_the_correlation_is_that_of_the_rank_correlation() -> None:
    assert pytest.approx(2 * np.sin(np.pi / 6 * 0.30), abs=0.005) == BURSTGPT_CORRELATION
    with pytest.raises(ValueError, match=r"correlation = 1\.1: expected -1 to 1"):
        GaussianCopula(**SIDES, correlation=1.1)
