"""Calibrate, Then Route (arXiv 2609.16206): a router with measured constants, on prefill and decode pools.

Two prefill and four decode A40s serve Qwen2.5-3B under bursts of chat, documents and reasoning. The paper's router
prices what a request would add to each instance with constants measured on the engines, and beats round robin, join
the shortest queue and a threshold on the predicted length by 1.7 to 2.9 points of goodput. Its authors' own simulator,
fitted to their measurements, tells the four apart by no more than a point, and does not name the measured winner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy, policy_parameters, policy_ranges, read_name
from fleetpilot.baselines.calibrated import use_after
from fleetpilot.cluster import FleetConfig, Pools, Telemetry, simulate
from fleetpilot.evaluation.comparison import interval_text
from fleetpilot.evaluation.experiments.llumnix_runs import table
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.runs import run_one
from fleetpilot.evaluation.statistics import Interval, paired_bootstrap
from fleetpilot.evaluation.tables import Table, number
from fleetpilot.evaluation.tuned import OURS, tuned_names
from fleetpilot.evaluation.tuning import with_parameters
from fleetpilot.fleet.policy import kinds_of
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import LOOSE, TIGHT
from fleetpilot.fleet.view import KIND_DECODE, Decision, FleetView
from fleetpilot.workloads import Client, Gamma, Independent, LogNormal, OpenLoop
from fleetpilot.workloads.predictors import GlobalMean, LogNormalError, Predictor, with_predictions
from fleetpilot.workloads.table import RequestTable

# --- what the paper does not state, and why it is as it is here ------------------------------------------------------

CHAT = Independent(LogNormal(200, 0.8, 8, 2_000), LogNormal(150, 0.7, 8, 1_000))
DOCUMENTS = Independent(LogNormal(1_800, 0.5, 8, 4_000), LogNormal(100, 0.7, 8, 500))
REASONING_PROMPT = LogNormal(250, 0.8, 8, 2_000)
REASONING = Independent(REASONING_PROMPT, LogNormal(700, 0.6, 8, 2_000))
"""The paper says short and short, prompts up to 4,000 tokens with short answers, short and long; no distribution. It
says too that the KV memory never filled. With answers of reasoning of a median of 1,200 tokens, tried first, it did
here, and the router lost 8 points to round robin; with 500 and 700 it does not, and comes out the same."""
LONG_REASONING = Independent(REASONING_PROMPT, LogNormal(1_400, 0.6, 8, 4_000))
"""Twice as long: the same where memory fills, beside the others, since that choice decides the sign."""
BETWEEN_TOKENS = (850, 900, 950, 1_000, 1_200)
"""Median answers of reasoning between the two, to see where it turns."""
SHARE = 1.0
"""Of each of the three, and of the tight and the loose class in each: equal, as nothing says otherwise."""
CV = 2.0
"""Of the Gamma gaps of each of the six streams. 1.5, 2 and 3 were tried: the burstier, the closer the routers."""
OTHER_CVS = (1.0, 1.5, 3.0)
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

FAMILY = "calibrate-then-route"
"""Of the weights in `fleetpilot.evaluation.tuned.OURS` that were looked for on the mixed loads (`tuning_scenarios`)."""
TUNABLE = ("calibrated?sampled=0&guard=0", "length-heuristic")
"""The paper's own terms alone, without the cures that it suggests; and the threshold."""
TUNING_SEEDS = range(201, 206)
DRAWN = 20
"""Sets of weights drawn at random, for which findings hang on the weights."""
DRAWN_TERMS = ("backlog", "queue", "pressure", "full", "slo", "concurrency")

# --- what it does ----------------------------------------------------------------------------------------------------

FINDINGS = (
    "Differences in points of goodput, with intervals of 95 % over the traces. Judged are weights set by hand; beside "
    "them are weights tuned on traces of their own, with answers of reasoning of either length. The loads are ours, "
    "chosen among a few with their results in view. Why findings are missed: (1) While memory lasts, the prefill pool "
    "decides. Three to six decode instances do the same, one prefill instance leaves no choice, lengths and constants "
    "of decoding hardly matter. So no weights that were drawn bring parity on 2P+6D, a loss on starved pools of more "
    "than a tenth of a point, or more than 0.3 points between the router and the length heuristic. How far both are "
    "from round robin is a matter of bursts: 3.7 points where gaps have a CV of 1, 0.5 at 3. (2) Wrong constants make "
    "the queue dearer, and nothing else. A hundred times too small they still leave the router 1.4 points above round "
    "robin, which a count of the queue beats, too. (3) Where memory fills, the pressure term concentrates. It "
    "multiplies a request's own time: long answers avoid the full instance, whose backlog in seconds is then the "
    "smallest, so short answers go there, with long prompts that fill it further (last table). That turns the sign "
    "with long reasoning, and brings the losses that the paper saw: on starved pools, and on chat for weights that "
    "press hard from a low KV use on, up to 10 points. Without the term none of the drawn weights lose there. The "
    "loss begins sooner on starved pools: with answers of reasoning of 900 tokens, found by looking for it, the "
    "router gains 1.5 points on 2P+4D and loses 1.1 on 1P+2D. Tuned weights press next to nothing; they never lose to "
    "round robin, and so miss that finding."
)
"""What the note of the signs says."""
POLL_INTERVAL_S = 0.05
SIMULATOR_FACTORS = (7.4, 13.0)
"""By how much the constants of the paper's simulator were too small: the decode rate, and the worst of all."""
SIGMAS = (0.0, 0.3, 0.7, 1.0, 1.5)


def with_weights(router: str, **changes: float) -> str:
    """A router with other weights."""
    policy, weights = read_name(router)
    weights |= {name: f"{value:g}" for name, value in changes.items()}
    return f"{policy}?" + "&".join(f"{name}={value}" for name, value in weights.items())


def calibrated(**changes: float) -> str:
    """The router with `WEIGHTS` and changes to them."""
    return with_weights("calibrated", **{**WEIGHTS, **changes})


def miscalibrated(factor: float, router: str = calibrated()) -> str:
    """With times per token so many times too small: all but the queue weighs that much less, so the queue more."""
    policy, weights = read_name(router)
    return with_weights(router, queue=factor * float(weights.get("queue", policy_parameters(policy)["queue"])))


ROUND_ROBIN, JSQ, HEURISTIC, CALIBRATED = "round-robin", "join-shortest-queue", "length-heuristic", calibrated()
SYSTEMS = {
    "round robin": ROUND_ROBIN,
    "join the shortest queue": JSQ,
    "length heuristic": HEURISTIC,
    "calibrated": CALIBRATED,
    **{f"constants {factor:g} times too small": miscalibrated(factor) for factor in (*SIMULATOR_FACTORS, 100.0)},
    "least KV use as polled": "least-kv",
}
FOUR = (ROUND_ROBIN, JSQ, HEURISTIC, CALIBRATED)
WRONG, NO_PRESSURE = miscalibrated(SIMULATOR_FACTORS[0]), calibrated(pressure=0.0)
NAMES = {policy: name for name, policy in SYSTEMS.items()}


def tuned() -> list[str]:
    """The router and the length heuristic with the weights that were looked for."""
    return tuned_names(OURS, FAMILY, TUNABLE)


def in_place_of(router: str, heuristic: str = HEURISTIC) -> dict[str, str]:
    """Hand-set policy -> what stands for it with other weights."""
    return {
        CALIBRATED: router,
        WRONG: miscalibrated(SIMULATOR_FACTORS[0], router),
        NO_PRESSURE: with_weights(router, pressure=0.0),
        HEURISTIC: heuristic,
    }


def drawn(count: int) -> list[str]:
    """The router with weights drawn at random, between the bounds of a search."""
    rng, ranges = np.random.default_rng(0), policy_ranges("calibrated")

    def draw(name: str) -> float:
        low, high, log, *_ = ranges[name]
        return float(np.exp(rng.uniform(np.log(low), np.log(high))) if log else rng.uniform(low, high))

    return [with_parameters("calibrated", {name: draw(name) for name in DRAWN_TERMS}) for _ in range(count)]


class Size(NamedTuple):
    """How much to run: all, or less in tests."""

    requests: int = REQUESTS
    traces: int = TRACES
    drawn: int = DRAWN


Load = Callable[[float, int, int], RequestTable]
"""(requests/s, seed, requests) -> a trace."""


def mixed(
    rate_rps: float, seed: int, requests: int, *, reasoning: Independent = REASONING, cv: float = CV
) -> RequestTable:
    """A trace of all three loads in bursts."""
    return _trace((CHAT, DOCUMENTS, reasoning), rate_rps, seed, requests, cv)


long_mixed: Load = partial(mixed, reasoning=LONG_REASONING)


def chat(rate_rps: float, seed: int, requests: int) -> RequestTable:
    """A trace of chat alone."""
    return _trace((CHAT,), rate_rps, seed, requests, CV)


def _trace(kinds: Sequence[Independent], rate_rps: float, seed: int, requests: int, cv: float) -> RequestTable:
    clients = tuple(Client(Gamma(SHARE, cv=cv), lengths, slo_class=slo) for lengths in kinds for slo in (0, 1))
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


def rate_where(goodput: float, make: Load, fleet: FleetConfig, size: Size) -> float:
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


def tuning_scenarios(size: Size = Size()) -> list[Scenario]:  # noqa: B008 (immutable)
    """What the weights are looked for on: traces that nothing else has, with answers of reasoning of either length."""

    def scenario(name: str, make: Load) -> Scenario:
        rate_rps = rate_where(MID_COLLAPSE, make, pools(2, 4), size)
        traces = tuple(make(rate_rps, seed, size.requests) for seed in TUNING_SEEDS)
        return Scenario(f"{name}, for tuning", traces, pools(2, 4), sample_interval_s=5.0)

    return [scenario(MAIN, mixed), scenario(LONG, long_mixed)]


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it and lay the figures side by side.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: requests and traces of each case.

    Returns:
        Whether the paper's signs come out, the cases, then why some do not.
    """
    rates = _rates(size)
    cells: dict[tuple[str, str], Cell] = {}
    for case, chosen in _cases(rates, size):
        policies = [*dict.fromkeys(chosen)]
        stored = evaluate([case], policies, out, seeds=(0,), workers=workers)
        for place, policy in enumerate(policies):
            metrics = [run.summary["metrics"] for run in stored[place :: len(policies)]]
            cells[case.name, policy] = Cell(
                np.array([run["goodput"]["share"] for run in metrics]),
                float(np.mean([run["latency"]["ttft_s"]["p99"] for run in metrics])),
                float(np.mean([run["latency"]["tpot_s"]["p99"] for run in metrics])),
            )
    return [
        signs(cells),
        main_table(cells, rates[MAIN]),
        *_other_tables(cells, rates),
        of_weights(cells, drawn(size.drawn)),
        turning_points(cells, rates),
        concentration(rates[LONG], size),
    ]


def between(median_tokens: int) -> Load:
    """The mixed load with answers of reasoning of another median."""
    return partial(mixed, reasoning=Independent(REASONING_PROMPT, LogNormal(median_tokens, 0.6, 8, 4_000)))


def _rates(size: Size) -> dict[str, float]:
    """Requests per second of every case that has its own."""
    wide, narrow = pools(2, 4), pools(1, 2)
    return {
        MAIN: rate_where(MID_COLLAPSE, mixed, wide, size),
        "chat": rate_where(MID_COLLAPSE, chat, wide, size),
        STARVED_POOLS: rate_where(STARVED, mixed, narrow, size),
        LONG: rate_where(MID_COLLAPSE, long_mixed, wide, size),
        FULL: rate_where(STARVED, long_mixed, narrow, size),
        **{bursts(cv): rate_where(MID_COLLAPSE, partial(mixed, cv=cv), wide, size) for cv in OTHER_CVS},
        **{
            of_length(pool, tokens): rate_where(goodput, between(tokens), fleet, size)
            for tokens in BETWEEN_TOKENS
            for pool, goodput, fleet in ((MAIN, MID_COLLAPSE, wide), (STARVED_POOLS, STARVED, narrow))
        },
    }


def _cases(rates: Mapping[str, float], size: Size) -> list[tuple[Scenario, list[str]]]:
    """Every case with the policies that it is run with."""

    def traces(make: Load, case: str) -> tuple[RequestTable, ...]:
        return tuple(make(rates[case], seed, size.requests) for seed in range(1, size.traces + 1))

    def predicted(predictor: Predictor) -> tuple[RequestTable, ...]:
        return tuple(with_predictions(trace, predictor, seed) for seed, trace in enumerate(busy, 1))

    scenario = partial(Scenario, sample_interval_s=5.0)
    wide, narrow = pools(2, 4), pools(1, 2)
    busy, starved = traces(mixed, MAIN), traces(mixed, STARVED_POOLS)
    widths = [(2, 3), (2, 5), (2, 6), (3, 4)]
    others = drawn(size.drawn)
    wrong, unpressed = ([in_place_of(router)[of] for router in others] for of in (WRONG, NO_PRESSURE))
    every = [*FOUR, *tuned(), *others]
    return [
        (
            scenario(MAIN, busy, wide),
            [*SYSTEMS.values(), *ABLATIONS.values(), *in_place_of(*tuned()).values(), *others, *wrong],
        ),
        *[(scenario(f"{p}P+{d}D", busy, pools(p, d)), every if (p, d) == (2, 6) else [*FOUR]) for p, d in widths],
        (scenario(STARVED_POOLS, starved, narrow), every),
        (scenario(LONG, traces(long_mixed, LONG), wide), [*every, *CURES.values(), *unpressed]),
        (scenario(FULL, traces(long_mixed, FULL), narrow), [*every, *CURES.values(), *unpressed]),
        (scenario("chat", traces(chat, "chat"), wide), [*every, NO_PRESSURE, *unpressed]),
        (scenario("no length", predicted(GlobalMean()), wide), [HEURISTIC, CALIBRATED]),
        *[
            (scenario(f"error {sigma:g}", predicted(LogNormalError(sigma)), wide), [HEURISTIC, CALIBRATED])
            for sigma in SIGMAS
        ],
        *[(scenario(bursts(cv), traces(partial(mixed, cv=cv), bursts(cv)), wide), [*FOUR, WRONG]) for cv in OTHER_CVS],
        *[
            (scenario(of_length(pool, tokens), traces(between(tokens), of_length(pool, tokens)), fleet), [*FOUR])
            for tokens in BETWEEN_TOKENS
            for pool, fleet in ((MAIN, wide), (STARVED_POOLS, narrow))
        ],
    ]


MAIN = "2P+4D"
STARVED_POOLS = "starved 1P+2D"
ABLATIONS = {"without KV pressure": NO_PRESSURE, "without SLO classes": calibrated(slo=0.0)}
LONG = f"{MAIN}, long reasoning"
FULL = f"{STARVED_POOLS}, long reasoning"
CURES = {
    "calibrated, without KV pressure": NO_PRESSURE,
    "calibrated, the better of two drawn": calibrated(sampled=1.0),
    "calibrated, guarded at 90 % KV use": calibrated(guard=0.9),
}
"""Of concentration; the last two are what the paper suggests."""


def bursts(cv: float) -> str:
    """The main case with gaps of another coefficient of variation."""
    return f"{MAIN}, CV {cv:g}"


def of_length(pool: str, tokens: int) -> str:
    """A case with other answers of reasoning."""
    return f"{pool}, reasoning of {tokens:,}"


# --- tables ----------------------------------------------------------------------------------------------------------

PAPER_MAIN: dict[str, tuple[float, float | None]] = {
    ROUND_ROBIN: (0.836, 0.337),
    JSQ: (0.835, 0.346),
    HEURISTIC: (0.847, 0.318),
    CALIBRATED: (0.864, 0.321),
    WRONG: (0.819, None),
}
"""Goodput and P99 TTFT in s of mixed bursty. All figures of the paper are taken from readers' notes of it."""
PAPER = {
    ("2P+3D", JSQ): 0.822,
    ("2P+3D", CALIBRATED): 0.816,
    ("2P+6D", ROUND_ROBIN): 0.860,
    ("2P+6D", CALIBRATED): 0.858,
    (STARVED_POOLS, ROUND_ROBIN): 0.680,
    (STARVED_POOLS, CALIBRATED): 0.292,
    ("chat", HEURISTIC): 0.855,
    ("chat", CALIBRATED): 0.760,
    ("no length", CALIBRATED): 0.864 - 0.032,
}
PARITY = 0.01
"""Goodputs that differ by less count as equal, in the paper's figures and in ours."""


Key = tuple[str, str]
"""(case, policy)."""


class Difference(NamedTuple):
    """A finding of the paper: how many points of goodput lie between two cells."""

    title: str
    one: Key
    other: Key
    published: float

    def with_policies(self, others: Mapping[str, str]) -> Difference:
        """The same between other policies."""
        (case, one), (of, other) = self.one, self.other
        return self._replace(one=(case, others.get(one, one)), other=(of, others.get(other, other)))

    def interval(self, cells: Cells) -> Interval | None:
        """Ours; None where either did not run."""
        if not {self.one, self.other} <= cells.keys():
            return None
        return paired_bootstrap(100 * (cells[self.one].goodput - cells[self.other].goodput))

    @property
    def accepted(self) -> str:
        """What counts as the same finding."""
        if abs(self.published) < 100 * PARITY:
            return f"within {100 * PARITY:g}"
        return "above 0" if self.published > 0 else "below 0"

    def is_met(self, ours: Interval | None) -> bool:
        """An interval on the published side of zero, or a mean about zero."""
        if ours is None:
            return False
        if abs(self.published) < 100 * PARITY:
            return abs(ours.estimate) < 100 * PARITY
        return ours.excludes_zero and (ours.estimate > 0) == (self.published > 0)


DIFFERENCES = (
    Difference("calibrated - round robin", (MAIN, CALIBRATED), (MAIN, ROUND_ROBIN), 2.8),
    Difference("long reasoning: calibrated - round robin", (LONG, CALIBRATED), (LONG, ROUND_ROBIN), 2.8),
    Difference("calibrated - shortest queue", (MAIN, CALIBRATED), (MAIN, JSQ), 2.9),
    Difference("calibrated - length heuristic", (MAIN, CALIBRATED), (MAIN, HEURISTIC), 1.7),
    Difference("length heuristic - round robin", (MAIN, HEURISTIC), (MAIN, ROUND_ROBIN), 1.1),
    Difference("shortest queue - round robin", (MAIN, JSQ), (MAIN, ROUND_ROBIN), -0.1),
    Difference("wrong constants - round robin", (MAIN, WRONG), (MAIN, ROUND_ROBIN), -1.7),
    Difference("wrong constants - calibrated", (MAIN, WRONG), (MAIN, CALIBRATED), -4.5),
    Difference("without lengths - with them", ("no length", CALIBRATED), (MAIN, CALIBRATED), -3.2),
    Difference("without KV pressure - with it", (MAIN, NO_PRESSURE), (MAIN, CALIBRATED), 0.0),
    Difference("errors of sigma 1 - none", ("error 1", CALIBRATED), ("error 0", CALIBRATED), 0.0),
    Difference("2P+6D: calibrated - round robin", ("2P+6D", CALIBRATED), ("2P+6D", ROUND_ROBIN), -0.2),
    Difference("2P+3D: calibrated - shortest queue", ("2P+3D", CALIBRATED), ("2P+3D", JSQ), -0.6),
    Difference("calibrated on 6 - round robin on 7 (2P+5D)", (MAIN, CALIBRATED), ("2P+5D", ROUND_ROBIN), 0.0),
    Difference(
        f"{STARVED_POOLS}: calibrated - round robin", (STARVED_POOLS, CALIBRATED), (STARVED_POOLS, ROUND_ROBIN), -38.8
    ),
    Difference("starved, long reasoning: calibrated - round robin", (FULL, CALIBRATED), (FULL, ROUND_ROBIN), -38.8),
    Difference("chat: calibrated - length heuristic", ("chat", CALIBRATED), ("chat", HEURISTIC), -9.5),
)
"""The paper's findings."""
WITHOUT_PRESSURE = tuple(
    of._replace(title=f"{of.title}, without KV pressure", one=(of.one[0], NO_PRESSURE))
    for of in DIFFERENCES
    if of.one[0] in (LONG, FULL, "chat")
)
"""The same without the term that makes them."""


def signs(cells: Cells) -> Table:
    """Whether the paper's findings come out, with the weights set by hand, and with those that were looked for."""
    others = in_place_of(*tuned())
    rows = []
    for of in DIFFERENCES:
        ours, other = of.interval(cells), of.with_policies(others)
        tuned_too = interval_text(other.interval(cells)) if other != of else "-"
        met = "yes" if of.is_met(ours) else "no"
        rows.append([of.title, f"{of.published:+.1f}", tuned_too, interval_text(ours), of.accepted, met])
    header = ["bound", "paper", "tuned weights", "ours", "accepted", "within"]
    return table("Calibrate, Then Route: signs", header, rows, FINDINGS)


def of_weights(cells: Cells, routers: Sequence[str]) -> Table:
    """How findings hang on the weights, none of which is published."""
    rows = []
    for of in (*DIFFERENCES, *WITHOUT_PRESSURE):
        found = [of.with_policies(in_place_of(router)) for router in routers]
        ours = [each.interval(cells) for each in found]
        means = [interval.estimate for interval in ours if interval is not None]
        if found[0] != of and len(means) == len(routers):
            met = sum(map(of.is_met, ours))
            spread = (min(means), float(np.median(means)), max(means))
            rows.append([of.title, f"{of.published:+.1f}", *(f"{mean:+.2f}" for mean in spread), of.accepted, f"{met}"])
    header = ["difference", "paper", "least", "median", "most", "accepted", "so many"]
    note = (
        f"{len(routers)} sets of weights, drawn at random between the bounds of `fleetpilot tune`: points of goodput, "
        "and with how many sets the paper's finding comes out."
    )
    return table("With other weights", header, rows, note)


def turning_points(cells: Cells, rates: Mapping[str, float]) -> Table:
    """What the paper does not state, varied: how bursty the load is, and how long answers of reasoning are."""
    lengths = [
        case
        for pool, shortest, longest in ((MAIN, MAIN, LONG), (STARVED_POOLS, STARVED_POOLS, FULL))
        for case in (shortest, *(of_length(pool, tokens) for tokens in BETWEEN_TOKENS), longest)
    ]
    rows = []
    for case in [*map(bursts, OTHER_CVS), *lengths]:
        pairs = ((JSQ, ROUND_ROBIN), (HEURISTIC, ROUND_ROBIN), (CALIBRATED, ROUND_ROBIN), (CALIBRATED, HEURISTIC))
        found = [Difference("", (case, one), (case, other), 0.0).interval(cells) for one, other in pairs]
        rows.append([case, number(rates[case]), *map(interval_text, found)])
    header = ["case", "requests/s", "shortest queue - round robin", "length heuristic - it", "calibrated - it"]
    note = (
        f"{MAIN} and {STARVED_POOLS} have answers of reasoning with a median of 700 tokens and gaps with a CV of "
        f"{CV:g}, long reasoning 1,400. Each case has the rate at which round robin meets what it does in the paper."
    )
    return table("Burstiness, and where memory fills", [*header, "calibrated - length heuristic"], rows, note)


class _Watched:
    """A router that keeps count of where it sends what while an instance that decodes is nearly full."""

    def __init__(self, name: str):
        self._router = load_policy(name)
        self.name, self.kinds = name, kinds_of(self._router)
        self.sent: Counter[str] = Counter()
        self.to_fullest: Counter[str] = Counter()

    def reset(self, batch: int, seed: int) -> None:
        """As the router does."""
        self._router.reset(batch, seed)

    def decide(self, view: FleetView) -> Decision:
        """As the router does."""
        decision = self._router.decide(view)
        request, slot = view.request[0], int(decision.choice[0])
        if view.fleet["kind"][0] == KIND_DECODE and slot >= 0:
            candidates = np.flatnonzero(view.instances[0]["candidate"])
            use = [use_after(view.instances[0][each], request, KIND_DECODE) for each in candidates]
            if max(use) > WEIGHTS["full"]:
                kind = _kind(int(request["prompt_tokens"]), float(request["predicted_output_tokens"]))
                self.sent[kind] += 1
                self.to_fullest[kind] += slot == candidates[int(np.argmax(use))]
        return decision


KINDS = ("long answer", "long prompt", "both short")


def _kind(prompt_tokens: int, predicted_output_tokens: float) -> str:
    if predicted_output_tokens > 400:
        return KINDS[0]
    return KINDS[1] if prompt_tokens > 1_000 else KINDS[2]


def concentration(rate_rps: float, size: Size) -> Table:
    """What the pressure term does where memory fills."""
    rows = []
    for title, policy in (("calibrated", CALIBRATED), ("without KV pressure", NO_PRESSURE)):
        router = _Watched(policy)
        for seed in range(1, 1 + max(1, size.traces // 3)):
            trace = long_mixed(rate_rps, seed, size.requests)
            simulate(trace, pools(2, 4), router, sample_interval_s=None)
        shares = [f"{100 * router.to_fullest[kind] / max(1, router.sent[kind]):.0f}" for kind in KINDS]
        rows.append([title, *shares])
    note = (
        f"Of the requests that were sent to decode while some instance was above {WEIGHTS['full']:.0%} of its KV "
        f"memory, so many % went to the fullest of the four ({LONG})."
    )
    return table("Where requests go once memory fills", ["router", *KINDS], rows, note)


def main_table(cells: Cells, rate_rps: float) -> Table:
    """Mixed bursty on 2P+4D, beside the paper."""
    rows = []
    searched = dict(zip(("calibrated, tuned", "length heuristic, tuned"), tuned(), strict=True))
    for name, policy in {**SYSTEMS, **ABLATIONS, **searched}.items():
        cell, (goodput, ttft_p99_s) = cells[MAIN, policy], PAPER_MAIN.get(policy, (None, None))
        spread = f"{100 * cell.goodput.min():.1f} to {100 * cell.goodput.max():.1f}"
        latencies = [number(ttft_p99_s), number(cell.ttft_p99_s), number(cell.tpot_p99_s)]
        rows.append([name, _per_cent(goodput), _per_cent(cell.mean), spread, *latencies])
    header = ["router", "paper: goodput %", "ours", "range", "paper: TTFT P99 s", "ours", "TPOT P99 s"]
    note = f"Means over {_traces(cells)} traces. Tuned: " + ", ".join(f"`{name}`" for name in tuned()) + "."
    return table(f"Mixed bursty on {MAIN}, {rate_rps:g} requests/s", header, rows, note)


def _other_tables(cells: Cells, rates: Mapping[str, float]) -> list[Table]:
    """The other cases, each a row."""
    names = {**NAMES, **{policy: name for name, policy in CURES.items()}}
    names |= dict(zip(tuned(), ("calibrated, tuned", "length heuristic, tuned"), strict=True))
    varied = {MAIN, *map(bursts, OTHER_CVS)}
    varied |= {of_length(pool, tokens) for pool in (MAIN, STARVED_POOLS) for tokens in BETWEEN_TOKENS}
    cases = [case for case in dict.fromkeys(case for case, _ in cells) if case not in varied]
    rows = [
        [case, names[policy], _per_cent(PAPER.get((case, policy))), _per_cent(cell.mean), number(cell.ttft_p99_s)]
        for case in cases
        for (of, policy), cell in cells.items()
        if of == case and policy in names
    ]
    note = (
        f"Chat at {rates['chat']:g} requests/s, the starved pools at {rates[STARVED_POOLS]:g}, with long reasoning at "
        f"{rates[FULL]:g} and, not starved, {rates[LONG]:g}; all others at {rates[MAIN]:g}. An error "
        "is the standard deviation of the logarithm of predicted over true length."
    )
    return [table("Other pools, loads and predictions", ["case", "router", "paper", "ours", "TTFT P99 s"], rows, note)]


def _traces(cells: Cells) -> int:
    return len(next(iter(cells.values())).goodput)


def _per_cent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
