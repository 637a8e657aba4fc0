"""Calibrate, Then Route (arXiv 2609.16206): a router with measured constants, on prefill and decode pools.

Two prefill and four decode A40s serve Qwen2.5-3B under bursts of chat, documents and reasoning. The paper's router
prices what a request would add to each instance with constants measured on the engines, and beats round robin, join
the shortest queue and a threshold on the predicted length by 1.7 to 2.9 points of goodput. Its authors' own simulator,
fitted to their measurements, tells the four apart by no more than a point, and does not name the measured winner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, Pools, Telemetry
from fleetpilot.evaluation.comparison import interval_text
from fleetpilot.evaluation.experiments.llumnix_runs import Bound, bounds_table, table
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.runs import run_one
from fleetpilot.evaluation.statistics import paired_bootstrap
from fleetpilot.evaluation.tables import Table, number
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import LOOSE, TIGHT
from fleetpilot.workloads import Client, Gamma, Independent, LogNormal, OpenLoop
from fleetpilot.workloads.predictors import GlobalMean, LogNormalError, Predictor, with_predictions
from fleetpilot.workloads.table import RequestTable

# --- what the paper does not state, and why it is as it is here ------------------------------------------------------

CHAT = Independent(LogNormal(200, 0.8, 8, 2_000), LogNormal(150, 0.7, 8, 1_000))
DOCUMENTS = Independent(LogNormal(1_800, 0.5, 8, 4_000), LogNormal(100, 0.7, 8, 500))
REASONING = Independent(LogNormal(250, 0.8, 8, 2_000), LogNormal(700, 0.6, 8, 2_000))
"""The paper says short and short, prompts up to 4,000 tokens with short answers, short and long; no distribution. It
says too that the KV memory never filled. With answers of reasoning of a median of 1,200 tokens, tried first, it did
here, and the router lost 8 points to round robin; with 500 and 700 it does not, and comes out the same."""
LONG_REASONING = Independent(LogNormal(250, 0.8, 8, 2_000), LogNormal(1_400, 0.6, 8, 4_000))
"""Twice as long: the same where memory fills, beside the others, since that choice decides the sign."""
SHARE = 1.0
"""Of each of the three, and of the tight and the loose class in each: equal, as nothing says otherwise."""
CV = 2.0
"""Of the Gamma gaps of each of the six streams. 1.5, 2 and 3 were tried: the burstier, the closer the routers."""
MID_COLLAPSE = 0.836
"""The paper drives each load where round robin is "mid-collapse", and gives no rate. Its round robin meets 0.836 on the
mixed bursty load: each load has the rate at which ours does, on traces of their own (`DEVELOPMENT_SEEDS`)."""
STARVED = 0.680
"""The same of one prefill and two decode instances, where the paper's round robin meets 0.680."""
ERROR_SIGMA = 0.3
"""Of the predictor, which the paper calls coarse: lengths are off by a third now and then."""
WEIGHTS = {"backlog": 1.0, "work": 1.0, "queue": 0.05, "slo": 0.35, "pressure": 4.0, "full": 0.8}
"""None is published. Seconds count as seconds; a queued request as 0.05 s, the prefill of a mean prompt; a tight class
three times as much as none; KV memory from 80 % on, as the paper finds that the term has no effect below."""
TRACES = 10
"""The paper has three; ten make differences of a point visible."""
REQUESTS = 3_000
DEVELOPMENT_SEEDS = range(101, 111)

# --- what it does ----------------------------------------------------------------------------------------------------

FINDINGS = (
    "Differences in points of goodput, with intervals of 95 % over the traces. The loads are ours, chosen among a few "
    "with their results in view, and one choice turns signs: how long answers of reasoning are. With long ones KV "
    "memory fills, which the paper did not see, and the router falls behind round robin, on 2P+4D as on starved pools. "
    "Without its pressure term it does not, nor guarded, nor where it may choose between two drawn of more than two; "
    "we did not find out how the term brings it about. While memory lasts the prefill pool decides: three to six "
    "decode instances do the same, one prefill instance leaves no choice, and "
    "lengths and constants of decoding hardly matter."
)
"""What the note of the signs says."""
POLL_INTERVAL_S = 0.05
SIMULATOR_FACTORS = (7.4, 13.0)
"""By how much the constants of the paper's simulator were too small: the decode rate, and the worst of all."""
SIGMAS = (0.0, 0.3, 0.7, 1.0, 1.5)


def calibrated(**changes: float) -> str:
    """The router with `WEIGHTS` and changes to them."""
    return "calibrated?" + "&".join(f"{name}={value:g}" for name, value in {**WEIGHTS, **changes}.items())


def miscalibrated(factor: float) -> str:
    """With times per token so many times too small: all but the queue weighs that much less, so the queue more."""
    return calibrated(queue=WEIGHTS["queue"] * factor)


ROUND_ROBIN, JSQ, HEURISTIC, CALIBRATED = "round-robin", "join-shortest-queue", "length-heuristic", calibrated()
SYSTEMS = {
    "round robin": ROUND_ROBIN,
    "join the shortest queue": JSQ,
    "length heuristic": HEURISTIC,
    "calibrated": CALIBRATED,
    **{f"constants {factor:g} times too small": miscalibrated(factor) for factor in SIMULATOR_FACTORS},
    "least KV use as polled": "least-kv",
}
FOUR = (ROUND_ROBIN, JSQ, HEURISTIC, CALIBRATED)
NAMES = {policy: name for name, policy in SYSTEMS.items()}


class Size(NamedTuple):
    """How much to run: all, or less in tests."""

    requests: int = REQUESTS
    traces: int = TRACES


def mixed(rate_rps: float, seed: int, requests: int) -> RequestTable:
    """A trace of all three loads in bursts."""
    return _trace((CHAT, DOCUMENTS, REASONING), rate_rps, seed, requests)


def long_mixed(rate_rps: float, seed: int, requests: int) -> RequestTable:
    """The same with `LONG_REASONING`."""
    return _trace((CHAT, DOCUMENTS, LONG_REASONING), rate_rps, seed, requests)


def chat(rate_rps: float, seed: int, requests: int) -> RequestTable:
    """A trace of chat alone."""
    return _trace((CHAT,), rate_rps, seed, requests)


def _trace(kinds: Sequence[Independent], rate_rps: float, seed: int, requests: int) -> RequestTable:
    clients = tuple(Client(Gamma(SHARE, cv=CV), lengths, slo_class=slo) for lengths in kinds for slo in (0, 1))
    trace = OpenLoop(clients, rate_rps=rate_rps).table(requests, seed)
    return with_predictions(trace, LogNormalError(ERROR_SIGMA), seed)


def pools(prefill: int, decode: int) -> FleetConfig:
    """So many A40s in either pool."""
    return FleetConfig.of(
        load_profile("a40-qwen2.5-3b"),
        prefill + decode,
        pools=Pools.of(prefill=prefill, decode=decode),
        slo_classes=(TIGHT, LOOSE),
        telemetry=Telemetry(POLL_INTERVAL_S),
    )


def rate_where(
    goodput: float, make: Callable[[float, int, int], RequestTable], fleet: FleetConfig, size: Size
) -> float:
    """Requests per second at which round robin meets so much, to a per cent, by bisection on development traces."""
    low, high = 0.5, 200.0
    seeds = DEVELOPMENT_SEEDS[: max(1, size.traces // 3)]
    while high / low > 1.01:
        rate_rps = float(np.sqrt(low * high))
        runs = [run_one(make(rate_rps, seed, size.requests), fleet, load_policy(ROUND_ROBIN)) for seed in seeds]
        met = np.mean([run.summary["metrics"]["goodput"]["share"] for run in runs])
        low, high = (rate_rps, high) if met > goodput else (low, rate_rps)
    return float(f"{low:.3g}")


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What a policy did on the traces of a case.

    Attributes:
        goodput: (traces,) shares.
        ttft_p99_s: mean over the traces.
        tpot_p99_s: likewise.
    """

    goodput: NDArray[np.float64]
    ttft_p99_s: float
    tpot_p99_s: float

    @property
    def mean(self) -> float:
        """Of the goodput."""
        return float(self.goodput.mean())


Cells = Mapping[tuple[str, str], Cell]
"""(case, policy) -> what came out."""


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: requests and traces of each case.

    Returns:
        Whether the paper's signs come out, then the cases.
    """
    rates = {
        "mixed": rate_where(MID_COLLAPSE, mixed, pools(2, 4), size),
        "chat": rate_where(MID_COLLAPSE, chat, pools(2, 4), size),
        "starved": rate_where(STARVED, mixed, pools(1, 2), size),
        "starved, long": rate_where(STARVED, long_mixed, pools(1, 2), size),
        "long": rate_where(MID_COLLAPSE, long_mixed, pools(2, 4), size),
    }
    cells: dict[tuple[str, str], Cell] = {}
    for case, policies in _cases(rates, size):
        stored = evaluate([case], policies, out, seeds=(0,), workers=workers)
        for place, policy in enumerate(policies):
            metrics = [run.summary["metrics"] for run in stored[place :: len(policies)]]
            cells[case.name, policy] = Cell(
                np.array([run["goodput"]["share"] for run in metrics]),
                float(np.mean([run["latency"]["ttft_s"]["p99"] for run in metrics])),
                float(np.mean([run["latency"]["tpot_s"]["p99"] for run in metrics])),
            )
    return [signs(cells), main_table(cells, rates["mixed"]), *_other_tables(cells, rates)]


def _cases(rates: Mapping[str, float], size: Size) -> list[tuple[Scenario, list[str]]]:
    """Every case with the policies that it is run with."""

    def traces(make: Callable[[float, int, int], RequestTable], rate_rps: float) -> tuple[RequestTable, ...]:
        return tuple(make(rate_rps, seed, size.requests) for seed in range(1, size.traces + 1))

    def predicted(predictor: Predictor) -> tuple[RequestTable, ...]:
        return tuple(with_predictions(trace, predictor, seed) for seed, trace in enumerate(busy, 1))

    scenario = partial(Scenario, sample_interval_s=5.0)
    busy, starved = traces(mixed, rates["mixed"]), traces(mixed, rates["starved"])
    widths = [(2, 3), (2, 5), (2, 6), (3, 4)]
    return [
        (scenario(MAIN, busy, pools(2, 4)), [*SYSTEMS.values(), *ABLATIONS.values()]),
        *[(scenario(f"{p}P+{d}D", busy, pools(p, d)), [*FOUR]) for p, d in widths],
        (scenario("starved 1P+2D", starved, pools(1, 2)), [*FOUR]),
        (scenario(LONG, traces(long_mixed, rates["long"]), pools(2, 4)), [*FOUR, *CURES.values()]),
        (scenario(FULL, traces(long_mixed, rates["starved, long"]), pools(1, 2)), [*FOUR, *CURES.values()]),
        (scenario("chat", traces(chat, rates["chat"]), pools(2, 4)), [*FOUR]),
        (scenario("no length", predicted(GlobalMean()), pools(2, 4)), [HEURISTIC, CALIBRATED]),
        *[
            (
                scenario(f"error {sigma:g}", predicted(LogNormalError(sigma)), pools(2, 4)),
                [HEURISTIC, CALIBRATED],
            )
            for sigma in SIGMAS
        ],
    ]


MAIN = "2P+4D"
ABLATIONS = {"without KV pressure": calibrated(pressure=0.0), "without SLO classes": calibrated(slo=0.0)}
LONG = f"{MAIN}, long reasoning"
FULL = "starved 1P+2D, long reasoning"
CURES = {
    "calibrated, without KV pressure": ABLATIONS["without KV pressure"],
    "calibrated, the better of two drawn": calibrated(sampled=1.0),
    "calibrated, guarded at 90 % KV use": calibrated(guard=0.9),
}
"""Of concentration; the last two are what the paper suggests."""


# --- tables ----------------------------------------------------------------------------------------------------------

PAPER_MAIN: dict[str, tuple[float, float | None]] = {
    ROUND_ROBIN: (0.836, 0.337),
    JSQ: (0.835, 0.346),
    HEURISTIC: (0.847, 0.318),
    CALIBRATED: (0.864, 0.321),
    miscalibrated(SIMULATOR_FACTORS[0]): (0.819, None),
}
"""Goodput and P99 TTFT in s of mixed bursty. All figures of the paper are taken from readers' notes of it."""
PAPER = {
    ("2P+3D", JSQ): 0.822,
    ("2P+3D", CALIBRATED): 0.816,
    ("2P+6D", ROUND_ROBIN): 0.860,
    ("2P+6D", CALIBRATED): 0.858,
    ("starved 1P+2D", ROUND_ROBIN): 0.680,
    ("starved 1P+2D", CALIBRATED): 0.292,
    ("chat", HEURISTIC): 0.855,
    ("chat", CALIBRATED): 0.760,
    ("no length", CALIBRATED): 0.864 - 0.032,
}
PARITY = 0.01
"""Goodputs that differ by less count as equal, in the paper's figures and in ours."""


def signs(cells: Cells) -> Table:
    """The paper's findings as signs of differences between cells, in points of goodput."""
    wrong = miscalibrated(SIMULATOR_FACTORS[0])
    rows = [
        _sign(cells, "calibrated - round robin", (MAIN, CALIBRATED), (MAIN, ROUND_ROBIN), 2.8),
        _sign(cells, "the same with long reasoning", (LONG, CALIBRATED), (LONG, ROUND_ROBIN), 2.8),
        _sign(cells, "calibrated - shortest queue", (MAIN, CALIBRATED), (MAIN, JSQ), 2.9),
        _sign(cells, "calibrated - length heuristic", (MAIN, CALIBRATED), (MAIN, HEURISTIC), 1.7),
        _sign(cells, "length heuristic - round robin", (MAIN, HEURISTIC), (MAIN, ROUND_ROBIN), 1.1),
        _sign(cells, "shortest queue - round robin", (MAIN, JSQ), (MAIN, ROUND_ROBIN), -0.1),
        _sign(cells, "wrong constants - round robin", (MAIN, wrong), (MAIN, ROUND_ROBIN), -1.7),
        _sign(cells, "wrong constants - calibrated", (MAIN, wrong), (MAIN, CALIBRATED), -4.5),
        _sign(cells, "without lengths - with them", ("no length", CALIBRATED), (MAIN, CALIBRATED), -3.2),
        _sign(
            cells, "without KV pressure - with it", (MAIN, ABLATIONS["without KV pressure"]), (MAIN, CALIBRATED), 0.0
        ),
        _sign(cells, "errors of sigma 1 - none", ("error 1", CALIBRATED), ("error 0", CALIBRATED), 0.0),
        _sign(cells, "2P+6D: calibrated - round robin", ("2P+6D", CALIBRATED), ("2P+6D", ROUND_ROBIN), -0.2),
        _sign(cells, "2P+3D: calibrated - shortest queue", ("2P+3D", CALIBRATED), ("2P+3D", JSQ), -0.6),
        _sign(cells, "calibrated on 6 - round robin on 7 (2P+5D)", (MAIN, CALIBRATED), ("2P+5D", ROUND_ROBIN), 0.0),
        _sign(
            cells,
            "starved 1P+2D: calibrated - round robin",
            ("starved 1P+2D", CALIBRATED),
            ("starved 1P+2D", ROUND_ROBIN),
            -38.8,
        ),
        _sign(
            cells,
            "starved, long reasoning: calibrated - round robin",
            (FULL, CALIBRATED),
            (FULL, ROUND_ROBIN),
            -38.8,
        ),
        _sign(cells, "chat: calibrated - length heuristic", ("chat", CALIBRATED), ("chat", HEURISTIC), -9.5),
    ]
    return bounds_table("Calibrate, Then Route: signs", rows, FINDINGS)


def _sign(cells: Cells, title: str, one: tuple[str, str], other: tuple[str, str], published: float) -> Bound:
    """Whether a difference has the published sign: an interval on that side of zero, or a mean about zero."""
    interval = paired_bootstrap(100 * (cells[one].goodput - cells[other].goodput))
    if abs(published) < 100 * PARITY:
        accepted, within = f"within {100 * PARITY:g}", interval is not None and abs(interval.estimate) < 100 * PARITY
    else:
        accepted = "above 0" if published > 0 else "below 0"
        within = interval is not None and interval.excludes_zero and (interval.estimate > 0) == (published > 0)
    return Bound(title, f"{published:+.1f}", interval_text(interval), accepted, within)


def main_table(cells: Cells, rate_rps: float) -> Table:
    """Mixed bursty on 2P+4D, beside the paper."""
    rows = []
    for name, policy in {**SYSTEMS, **ABLATIONS}.items():
        cell, (goodput, ttft_p99_s) = cells[MAIN, policy], PAPER_MAIN.get(policy, (None, None))
        spread = f"{100 * cell.goodput.min():.1f} to {100 * cell.goodput.max():.1f}"
        latencies = [number(ttft_p99_s), number(cell.ttft_p99_s), number(cell.tpot_p99_s)]
        rows.append([name, _per_cent(goodput), _per_cent(cell.mean), spread, *latencies])
    header = ["router", "paper: goodput %", "ours", "range", "paper: TTFT P99 s", "ours", "TPOT P99 s"]
    return table(
        f"Mixed bursty on {MAIN}, {rate_rps:g} requests/s", header, rows, f"Means over {_traces(cells)} traces."
    )


def _other_tables(cells: Cells, rates: Mapping[str, float]) -> list[Table]:
    """The other cases, each a row."""
    names = {**NAMES, **{policy: name for name, policy in CURES.items()}}
    cases = [case for case in dict.fromkeys(case for case, _ in cells) if case != MAIN]
    rows = [
        [case, names[policy], _per_cent(PAPER.get((case, policy))), _per_cent(cell.mean), number(cell.ttft_p99_s)]
        for case in cases
        for (of, policy), cell in cells.items()
        if of == case
    ]
    note = (
        f"Chat at {rates['chat']:g} requests/s, the starved pools at {rates['starved']:g}, with long reasoning at "
        f"{rates['starved, long']:g} and, not starved, {rates['long']:g}; all others at {rates['mixed']:g}. An error "
        "is the standard deviation of the logarithm of predicted over true length."
    )
    return [table("Other pools, loads and predictions", ["case", "router", "paper", "ours", "TTFT P99 s"], rows, note)]


def _traces(cells: Cells) -> int:
    return len(next(iter(cells.values())).goodput)


def _per_cent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
