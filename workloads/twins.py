"""Statistical twins: synthetic workloads with the published statistics of real traces.

A twin is not the trace and contains none of its rows: lengths follow the trace's quantiles and mean, arrivals its rate,
the course of the rate and the burstiness, and, for the Mooncake twin, prompts share prefixes as often. What no
statistic here speaks of - the dependence of output on prompt, rare events, regularities finer than a second - is not in
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fleetpilot.workloads.arrivals import MMPP, ArrivalProcess, Gamma, PiecewiseRate
from fleetpilot.workloads.checks import require, require_positive
from fleetpilot.workloads.lengths import (
    Distribution,
    Independent,
    LogNormal,
    Tokens,
    Zipf,
    draw_tokens,
    published_quantiles,
)
from fleetpilot.workloads.openloop import Client, OpenLoop
from fleetpilot.workloads.seeding import Purpose, random_stream
from fleetpilot.workloads.sessions import Chain, running_sum
from fleetpilot.workloads.table import RequestTable


@dataclass(frozen=True)
class SharedContexts:
    """Open-loop requests of given lengths, some of which extend the context of an earlier one.

    Lengths are drawn first, so their distributions are met whatever is shared. A session's turns are the shortest
    prompt first; how similar in length they are decides how much of a prompt its predecessor covers.

    Attributes:
        arrivals: when requests come.
        prompt: tokens of all prompts.
        output: tokens of all answers.
        turns: turns of a session.
        similarity: correlation, in [0, 1], of the (normal scores of the) prompt lengths within a session.
        gap_s: seconds between turns. The arrival process decides the actual times; this their order.
        shared_tokens: length of the one root that all prompts start with, shorter than any prompt.
        rate_rps: mean rate; ``n`` requests take ``n / rate_rps`` seconds.
        meta: provenance that goes into the table's ``meta``, JSON-serialisable pairs.
    """

    arrivals: ArrivalProcess
    prompt: Distribution
    output: Distribution
    turns: Zipf
    similarity: float
    gap_s: Distribution
    shared_tokens: int
    rate_rps: float
    meta: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.similarity <= 1, self, "similarity", self.similarity, "a number in [0, 1]")
        require(self.shared_tokens >= 1, self, "shared_tokens", self.shared_tokens, ">= 1")
        require_positive(self, "rate_rps", self.rate_rps)

    def table(self, n: int, seed: int, name: str = "shared-contexts") -> RequestTable:
        """All ``n`` requests (n >= 1), the last session cut to fit."""
        require(n >= 1, self, "n", n, ">= 1")
        turns = draw_tokens(self.turns, round(n / self.turns.mean), random_stream(seed, Purpose.TURNS))
        session = np.repeat(np.arange(len(turns)), turns)[:n]
        # If too few turns were drawn, sessions of one turn make up for them.
        session = np.append(session, len(turns) + np.arange(n - len(session)))
        prompt = self._prompts(session, random_stream(seed, Purpose.USER_TOKENS))
        output = draw_tokens(self.output, n, random_stream(seed, Purpose.OUTPUT_TOKENS))
        # A prompt as long as the one before cannot extend it: it starts a session of its own.
        first = (np.diff(session, prepend=-1) > 0) | (np.diff(prompt, prepend=0) == 0)
        session = np.cumsum(first) - 1
        turn = np.arange(n) - np.flatnonzero(first)[session]

        horizon_s = n / self.rate_rps
        rng = random_stream(seed, Purpose.THINK_TIMES)
        gap_s = np.where(first, 0.0, self.gap_s.draw(n, rng))
        since_start_s = running_sum(gap_s, turn)
        span_s = since_start_s[np.append(first[1:], True)]
        start_s = rng.random(len(span_s)) * np.maximum(horizon_s - span_s, 0.0)
        wanted_s = start_s[session] + since_start_s
        arrival_s = np.empty(n)
        arrival_s[np.argsort(wanted_s, kind="stable")] = self.arrivals.draw_in(
            n, horizon_s, random_stream(seed, Purpose.ARRIVALS)
        )
        return Chain(session, turn, prompt, output, gap_s, np.zeros(n, np.int64)).table(
            name,
            arrival_s,
            closed_loop=False,
            system_end_tokens=np.array([self.shared_tokens]),
            meta={
                "format": "generated",
                "generator": type(self).__name__,
                "requests": n,
                "seed": seed,
                **dict(self.meta),
            },
        )

    def _prompts(self, session: Tokens, rng: np.random.Generator) -> Tokens:
        """Independent draws of the prompt length, dealt out so that those of a session are similar and ascending."""
        n = len(session)
        score = np.sqrt(self.similarity) * rng.standard_normal(n)[session]
        score += np.sqrt(1 - self.similarity) * rng.standard_normal(n)
        prompt = np.empty(n, np.int64)
        prompt[np.argsort(score, kind="stable")] = np.sort(draw_tokens(self.prompt, n, rng))
        return prompt[np.lexsort((prompt, session))]


@dataclass(frozen=True)
class TwinSource:
    """What a twin is a twin of.

    Attributes:
        summary: one line, with the source.
        rows: requests in the source.
        rate_rps: mean rate of the source.
        arrivals: a process with its burstiness and its course in time.
    """

    summary: str
    rows: int
    rate_rps: float
    arrivals: ArrivalProcess


def _hourly_rates(low_hour: int, high_hour: int, high_to_low: float) -> tuple[float, ...]:
    """24 relative rates that rise and fall by a constant factor per hour between the two hours named."""
    hour = np.arange(24)
    up = (hour - low_hour) % 24
    rise = (high_hour - low_hour) % 24
    height = np.where(up <= rise, up / rise, (24 - up) / (24 - rise))
    return tuple((high_to_low**height).tolist())


TWINS: Mapping[str, TwinSource] = MappingProxyType(
    {
        "azure-conv": TwinSource(
            "Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset, CC-BY 4.0): an hour, rising rate",
            rows=19_366,
            rate_rps=5.53,
            # From 4.7/s to 7.8/s in mid-hour and 3.9/s at its end; gap CV 1.09, IDC 1.39 (1 s) and 16.1 (60 s).
            arrivals=PiecewiseRate(
                (4.7, 5.1, 6.2, 7.6, 7.8, 6.0, 5.1, 4.4, 3.7),
                (600.0, 600.0, 300.0, 300.0, 300.0, 400.0, 500.0, 250.0, 252.0),
                Gamma(1.0, 1.06),
            ),
        ),
        "azure-code": TwinSource(
            "Azure LLM inference trace 2023, code (Azure/AzurePublicDataset, CC-BY 4.0): short answers, bursts",
            rows=8_819,
            rate_rps=2.57,
            # Gap CV 13.2, IDC 13.2 (1 s) and 164 (60 s), solved for with the closed forms of an on-off Poisson process.
            arrivals=MMPP.on_off(on_rps=15.3, on_s=8.3, off_s=41.1),
        ),
        "burstgpt-gpt4": TwinSource(
            "BurstGPT days 0 to 6, GPT-4 conversations (HPMLL/BurstGPT, CC-BY 4.0): a week of nights and days",
            rows=5_904,
            rate_rps=5_904 / (7 * 86_400),
            # Of all rows of the week: 19 between 6 and 7 h, 1,917 between 15 and 16 h.
            arrivals=PiecewiseRate(_hourly_rates(6, 15, 100.0), (3600.0,) * 24, Gamma(1.0, 1.5)),
        ),
        "mooncake-conv": TwinSource(
            "Mooncake conversation trace (kvcache-ai/Mooncake, Apache-2.0): long prompts, 36.6 % of them cacheable",
            rows=12_031,
            rate_rps=3.40,
            # A slow rise from 2.9/s to 3.8/s; the source's 3 s ticks are an artefact and left out.
            arrivals=PiecewiseRate((2.9, 3.1, 3.3, 3.5, 3.7, 3.8), (590.0,) * 6),
        ),
    }
)


def twin_generator(name: str, rate_rps: float | None = None) -> OpenLoop | SharedContexts:
    """The generator behind `twin`.

    Raises:
        ValueError: if there is no twin of that name.
    """
    if name not in TWINS:
        raise ValueError(f"twin {name!r}: expected one of {', '.join(TWINS)}")
    source = TWINS[name]
    lengths = published_quantiles("twins")[name]
    rate = source.rate_rps if rate_rps is None else rate_rps
    meta = (("statistical_twin_of", source.summary),)
    if name == "mooncake-conv":
        # 38.7 % of the requests extend an earlier one, in chains of up to 43, after 114 s (P50) and 519 s (P90); block
        # 0 (512 tokens) is in every prompt. The similarity is what then gives the hit rate of 36.6 %.
        return SharedContexts(
            source.arrivals,
            lengths["prompt"],
            lengths["output"],
            turns=Zipf(2.59, 43),
            similarity=0.89,
            gap_s=LogNormal(127.0, 1.12),
            shared_tokens=512,
            rate_rps=rate,
            meta=meta,
        )
    return OpenLoop((Client(source.arrivals, Independent(lengths["prompt"], lengths["output"])),), rate, meta)


def twin(name: str, n: int | None = None, seed: int = 0, rate_rps: float | None = None) -> RequestTable:
    """The statistical twin of a real trace.

    Args:
        name: one of `TWINS`.
        n: number of requests; as many as the source has if None.
        seed: >= 0.
        rate_rps: mean rate over the run, the source's if None. Another rate makes requests denser, not time faster: the
            course of the rate and the time between turns keep their seconds.

    Raises:
        ValueError: naming the parameter, its value and what was expected.
    """
    generator = twin_generator(name, rate_rps)
    return generator.table(TWINS[name].rows if n is None else n, seed, f"twin/{name}")
