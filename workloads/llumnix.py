"""The workloads of the Llumnix paper (OSDI'24, arXiv 2406.03243), as its artifact draws them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fleetpilot.workloads.arrivals import ArrivalProcess, Gamma, Poisson
from fleetpilot.workloads.checks import require, require_positive
from fleetpilot.workloads.lengths import (
    Independent,
    Lengths,
    LlumnixZipf,
    Quantiles,
    Tokens,
    published_quantiles,
    table_1,
)
from fleetpilot.workloads.openloop import Client, OpenLoop
from fleetpilot.workloads.table import RequestTable, make_table

PAPER_SEED = 0xCADE
PAPER_REQUESTS = 10_000
_MEAN_TOKENS = {"S": 128, "M": 256, "L": 512}
_REAL = ("ShareGPT", "BurstGPT")
BURSTGPT_CORRELATION = 0.31
"""Of the normal scores of prompt and answer: ``2 sin(pi r / 6)`` of the rank correlation r = 0.30 (Spearman) that the
3,220 answered GPT-4 conversations of the first week of HPMLL/BurstGPT have. Table 1 states the two lengths apart."""


@dataclass(frozen=True)
class GaussianCopula(Lengths):
    """Prompt and output lengths whose ranks go together as those of two correlated normal variables.

    Stratified, as `Quantiles` itself: a sample of any size has the quantiles of both.

    Attributes:
        prompt: by its quantiles.
        output: by its quantiles.
        correlation: of the normal variables, -1 to 1.
    """

    prompt: Quantiles
    output: Quantiles
    correlation: float

    def __post_init__(self) -> None:
        require(-1 <= self.correlation <= 1, self, "correlation", self.correlation, "-1 to 1")

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """(n,) prompt and (n,) output tokens."""
        first, second = rng.standard_normal((2, n))
        second = self.correlation * first + np.sqrt(1 - self.correlation**2) * second
        prompt, output = (
            side.at((np.argsort(np.argsort(scores)) + rng.random(n)) / n)
            for side, scores in ((self.prompt, first), (self.output, second))
        )
        return np.maximum(np.rint(prompt), 1).astype(np.int64), np.maximum(np.rint(output), 1).astype(np.int64)


@dataclass(frozen=True)
class LlumnixPaper:
    """The artifact's own draws (AlibabaPAI/llumnix, branch osdi24ae): one legacy NumPy stream for everything.

    Prompt lengths come first, then output lengths, then the gaps between arrivals, all from
    ``np.random.RandomState(seed)``. With seed 0xCADE and 10,000 requests the prompt lengths are those of the paper's
    Table 1; outputs are the second draw and differ a little from it. Gaps are as drawn, so the mean rate is met within
    the error of sampling only.

    Attributes:
        prompt: S, M or L (mean 128, 256 or 512 tokens).
        output: S, M or L.
        rate_rps: requests per second, > 0.
        cv: coefficient of variation of Gamma gaps; None for Poisson arrivals.
    """

    prompt: str
    output: str
    rate_rps: float
    cv: float | None = None

    def __post_init__(self) -> None:
        for field in ("prompt", "output"):
            require(getattr(self, field) in _MEAN_TOKENS, self, field, getattr(self, field), "S, M or L")
        require_positive(self, "rate_rps", self.rate_rps)
        if self.cv is not None:
            require_positive(self, "cv", self.cv)

    def table(self, n: int = PAPER_REQUESTS, seed: int = PAPER_SEED, name: str | None = None) -> RequestTable:
        """All ``n`` requests; ``seed`` is one of the legacy stream, 0 to 2**32 - 1."""
        require(n >= 1, self, "n", n, ">= 1")
        require(0 <= seed < 2**32, self, "seed", seed, "an integer from 0 to 2**32 - 1")
        stream = np.random.RandomState(seed)
        prompt = LlumnixZipf(_MEAN_TOKENS[self.prompt]).draw(n, stream)
        output = LlumnixZipf(_MEAN_TOKENS[self.output]).draw(n, stream)
        if self.cv is None:
            gaps_s = stream.exponential(1 / self.rate_rps, n)
        else:
            gaps_s = stream.gamma(1 / self.cv**2, self.cv**2 / self.rate_rps, n)
        return make_table(
            name or f"llumnix/{self.prompt}-{self.output}",
            np.cumsum(gaps_s),
            prompt,
            output,
            meta={"format": "generated", "generator": type(self).__name__, "requests": n, "seed": seed},
        )


def llumnix_workload(
    name: str, rate_rps: float, cv: float | None = None, mode: str | None = None
) -> LlumnixPaper | OpenLoop:
    """A workload of the paper's evaluation.

    Args:
        name: ``S-S``, ``M-M``, ``L-L``, ``S-L``, ``L-S`` (prompt-output; other pairs of the three work too),
            ``ShareGPT`` or ``BurstGPT``.
        rate_rps: requests per second over the whole cluster.
        cv: coefficient of variation of Gamma gaps; None for Poisson arrivals.
        mode: how lengths are drawn. ``paper``: the artifact's very draws (the default of the generated lengths).
            ``zipf``: its distribution, this package's random streams. ``quantile``: by the quantiles and means of Table
            1 (the default and only mode of ShareGPT and BurstGPT); the two lengths of a request of BurstGPT are
            correlated as in its data (`BURSTGPT_CORRELATION`), all others are independent.

    Raises:
        ValueError: naming the parameter, its value and what was expected.
    """
    prompt, _, output = name.partition("-")
    generated = prompt in _MEAN_TOKENS and output in _MEAN_TOKENS
    if not generated and name not in _REAL:
        raise ValueError(f"llumnix: name = {name!r}: expected {', '.join(_REAL)}, or two of S, M and L such as 'S-L'")
    modes = ("paper", "zipf", "quantile") if generated else ("quantile",)
    mode = mode or modes[0]
    if mode not in modes:
        raise ValueError(f"llumnix/{name}: mode = {mode!r}: expected {' or '.join(modes)}")
    if mode == "paper":
        return LlumnixPaper(prompt, output, rate_rps, cv)
    arrivals: ArrivalProcess = Poisson(rate_rps) if cv is None else Gamma(rate_rps, cv)
    lengths: Lengths
    if mode == "zipf":
        lengths = Independent(LlumnixZipf(_MEAN_TOKENS[prompt]), LlumnixZipf(_MEAN_TOKENS[output]))
    elif name == "BurstGPT":
        lengths = GaussianCopula(**published_quantiles("llumnix_table_1")[name], correlation=BURSTGPT_CORRELATION)
    else:
        lengths = table_1(name)
    return OpenLoop((Client(arrivals, lengths),), meta=(("lengths", f"{name} ({mode})"),))
