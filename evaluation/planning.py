"""How many instances meet a target at a load: bisection over simulated runs, and what stands in the way of fewer.

A count is an answer when a simulated fleet of that many meets the target on the given requests and one instance less
does not; of prefill and decode pools, one less of either. Before that, every request is run alone on an instance that
forgets nothing: if that misses the target, no count meets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.agents import load_policy
from fleetpilot.cluster import FleetConfig, Pools, Rebalancing, RunLog, SharedCache, simulate
from fleetpilot.cluster.state import FINISHED
from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.segments import capacity_rps, rate_rps
from fleetpilot.evaluation.tables import Table, Text, number
from fleetpilot.fleet.policy import kinds_of
from fleetpilot.fleet.view import KIND_SOURCE

if TYPE_CHECKING:
    from fleetpilot.fleet.profiles import HardwareProfile
    from fleetpilot.workloads import RequestTable

WARMUP_SHARE = 0.1
FULL = 0.95
"""Share of its KV blocks in use from which an instance's memory is full."""
OFTEN = 0.1
"""Share of the samples in which memory or batches are full, from which that is what binds."""
USED_UP = 0.7
"""Share of a shared cache's bandwidth from which it is what binds."""
_ALONE_BLOCKS = 2**26
_ALONE_GAP_S = 1e4
"""Between two requests that are to be alone: longer than any takes."""


@dataclass(frozen=True)
class Target:
    """What is to be met: latencies at a percentile of all offered requests; those that did not finish count as inf.

    Attributes:
        percentile: as 99.
        ttft_s: most time to the first token; inf for none.
        tpot_s: most mean time per token after the first; inf for none.
    """

    percentile: float = 99.0
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 100:
            raise ValueError(f"percentile = {self.percentile}: expected 0 < percentile < 100")
        if not (self.ttft_s > 0 and self.tpot_s > 0 and min(self.ttft_s, self.tpot_s) < math.inf):
            raise ValueError(
                f"target (ttft_s = {self.ttft_s}, tpot_s = {self.tpot_s}): expected times > 0, one of them finite"
            )


class Size(NamedTuple):
    """How many instances, and how many of them only prefill while the others only decode: 0 without pools."""

    instances: int
    prefill: int = 0

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.instances - self.prefill}D" if self.prefill else f"{self.instances:,}"


@dataclass(frozen=True)
class Question:
    """Instances of one kind under one policy.

    Attributes:
        table: the requests, an open loop at the rate that is to be served.
        profile: of every instance.
        policy: its name.
        target: what is to be met.
        settings: what was changed in the profile, and what the fleet has besides, for the record.
        max_instances: most that are tried.
        shared_cache: behind the instances' own, if any.
        pools: whether some instances only prefill and the others only decode.
    """

    table: RequestTable
    profile: HardwareProfile
    policy: str
    target: Target
    settings: str = ""
    max_instances: int = 4096
    shared_cache: SharedCache | None = None
    pools: bool = False

    def __post_init__(self) -> None:
        """Refuse what no fleet can be.

        Raises:
            ValueError: pools or a shared cache with engines that have no use for it; pools of fewer than two instances.
        """
        if self.pools and self.max_instances < 2:
            raise ValueError(f"max_instances = {self.max_instances}: expected at least 2 with pools")
        self.fleet(Size(2, 1) if self.pools else Size(1))

    def fleet(self, size: Size, rebalancing: Rebalancing | None = None) -> FleetConfig:
        """So many of these instances."""
        return FleetConfig.of(
            self.profile,
            size.instances,
            rebalancing=rebalancing,
            shared_cache=self.shared_cache,
            pools=Pools.of(prefill=size.prefill, decode=size.instances - size.prefill) if size.prefill else None,
        )


def configured(
    table: RequestTable,
    profile: HardwareProfile,
    policy: str,
    target: Target,
    settings: Mapping[str, bool | int | float],
    max_instances: int = 4096,
) -> Question:
    """The question of a fleet with changes.

    Args:
        table: see `Question`, as all others.
        profile: as it is without them.
        policy: its name.
        target: what is to be met.
        settings: fields of the profile (times as ``draft_ms`` in milliseconds); ``chunked_prefill``: without it, whole
            prompts come before all decodes, as in vLLM before it had chunks; ``shared_cache_gb``: capacity of a cache
            that all instances share; ``pools``: whether there are pools.
        max_instances: most that are tried.

    Raises:
        ValueError: no fleet can be so; named are a field, its value and what was expected.
    """
    changes: dict[str, Any] = dict(settings)
    shared_gb, pools = changes.pop("shared_cache_gb", None), bool(changes.pop("pools", False))
    chunked = changes.pop("chunked_prefill", None)
    for name in [name for name in changes if name.endswith("_ms")]:
        changes[name.removesuffix("_ms") + "_s"] = changes.pop(name) / 1e3
    if chunked is not None:
        changes |= _chunking(profile, chunked)
    return Question(
        table,
        profile.replace(**changes),
        policy,
        target,
        ", ".join(f"{name}={str(value).lower()}" for name, value in settings.items()),
        max_instances,
        None if shared_gb is None else SharedCache(capacity_bytes=1e9 * shared_gb),
        pools,
    )


def _chunking(profile: HardwareProfile, chunked: bool) -> dict[str, Any]:
    """What is other in an engine with or without chunked prefill; without, a batch holds the longest prompt."""
    if chunked:
        return {"scheduler": "chunked", "watermark": 0.0}
    budget = max(profile.max_num_batched_tokens, profile.max_model_len)
    return {"scheduler": "prefill_first", "max_num_batched_tokens": budget}


@dataclass(frozen=True)
class Measured:
    """A simulated fleet.

    Attributes:
        size: of the fleet.
        ttft_s: at the target's percentile.
        tpot_s: likewise.
        waiting_share: of the TTFT of the requests above that percentile, the share before they were first in a batch.
        memory_full_share: of the samples of instances while requests arrive, those with more than `FULL` of the blocks
            in use.
        batch_full_share: of the same, those with ``max_num_seqs`` requests in the batch.
        running_max: requests in a batch at any sample.
        prefix_hit_ratio: tokens found in the prefix caches, the shared one too, over tokens looked up; None where
            nothing was.
        busy_share: time in iterations.
        loads_share: of the bandwidth of the shared cache, what loads from it took; 0 without one.
    """

    size: Size
    ttft_s: float
    tpot_s: float
    waiting_share: float
    memory_full_share: float
    batch_full_share: float
    running_max: int
    prefix_hit_ratio: float | None
    busy_share: float
    loads_share: float

    def missed(self, target: Target) -> tuple[str, ...]:
        """Which of the target's latencies are not met."""
        return tuple(
            name
            for name, value, most in (
                ("TTFT", self.ttft_s, target.ttft_s),
                ("TPOT", self.tpot_s, target.tpot_s),
            )
            if not value <= most
        )


@dataclass(frozen=True)
class Answer:
    """What came of a question.

    Attributes:
        question: what was asked.
        rate_rps: requests per second that the table offers.
        enough: the smallest fleet that meets the target, None if none does.
        too_few: what does not: the same with one less, of either pool where there are two; empty where one instance
            is enough or none ever is.
        alone: every request by itself.
        binds: what stands in the way of fewer instances, or of any count.
    """

    question: Question
    rate_rps: float
    enough: Measured | None
    too_few: tuple[Measured, ...]
    alone: Measured
    binds: str

    @property
    def gpus(self) -> int | None:
        """Of the smallest fleet."""
        return None if self.enough is None else self.enough.size.instances * self.question.profile.tp

    def record(self) -> dict[str, Any]:
        """For a file: the question by names, the answer in full."""
        question = self.question
        return {
            "workload": question.table.name,
            "rate_rps": self.rate_rps,
            "profile": question.profile.name,
            "settings": question.settings,
            "policy": question.policy,
            "target": question.target,
            "instances": None if self.enough is None else self.enough.size.instances,
            "prefill": None if self.enough is None else self.enough.size.prefill,
            "gpus": self.gpus,
            "enough": self.enough,
            "too_few": self.too_few,
            "alone": self.alone,
            "binds": self.binds,
        }


def answer(question: Question) -> Answer:
    """Find the smallest fleet that meets the target.

    Raises:
        ValueError: the table is empty, or has no rate of its own.
    """
    target = question.target
    rate = rate_rps(question.table)
    alone = _alone(question)
    missed = alone.missed(target)
    if missed:
        return Answer(question, rate, None, (), alone, f"infeasible at any count: {_alone_text(alone, missed)}")
    known: dict[Size, Measured] = {}

    def meets(size: Size) -> bool:
        if size not in known:
            known[size] = measure(question, size)
        return not known[size].missed(target)

    start = math.ceil(rate / capacity_rps(question.table, FleetConfig((question.profile,))))
    search = _fewest_in_pools if question.pools else _fewest_of_one_kind
    size = search(meets, start, question.max_instances)
    if size is None:
        most = max(known.values(), key=lambda measured: measured.size.instances)
        return Answer(question, rate, None, (most,), alone, f"not with {most.size}: {_binds(most, question)}")
    too_few = tuple(known[less] for less in _one_less(size) if less in known)
    enough = "one instance of each is enough" if question.pools else "one instance is enough"
    binds = "; ".join(_binds(of, question) for of in too_few) or enough
    return Answer(question, rate, known[size], too_few, alone, binds)


def _fewest_of_one_kind(meets: Callable[[Size], bool], start: int, most: int) -> Size | None:
    count = fewest(lambda count: meets(Size(count)), start, most)
    return None if count is None else Size(count)


def _fewest_in_pools(meets: Callable[[Size], bool], start: int, most: int) -> Size | None:
    """Pools of which neither can spare an instance: equal ones first, then fewer to prefill, then fewer to decode."""
    equal = fewest(lambda count: meets(Size(2 * count, count)), math.ceil(start / 2), most // 2)
    if equal is None:
        return None
    prefill = fewest(lambda count: meets(Size(count + equal, count)), equal, equal)
    assert prefill is not None  # equal pools meet it
    decode = fewest(lambda count: meets(Size(prefill + count, prefill)), equal, equal)
    assert decode is not None  # likewise
    size = Size(prefill + decode, prefill)
    while (less := next(filter(meets, _one_less(size)), None)) is not None:
        size = less
    return size


def _one_less(size: Size) -> list[Size]:
    """The fleets with one instance less, of either pool."""
    if not size.prefill:
        return [Size(size.instances - 1)] if size.instances > 1 else []
    less = [Size(size.instances - 1, size.prefill - 1), Size(size.instances - 1, size.prefill)]
    return [of for of in less if 0 < of.prefill < of.instances]


def fewest(meets: Callable[[int], bool], start: int, most: int) -> int | None:
    """The smallest count from 1 to `most` that meets something, if every larger one does too; None if none does.

    Args:
        meets: asked of the count and of the one below, where there is one.
        start: where to begin; a good guess saves questions.
        most: largest count.
    """
    low = 0  # the largest that is known not to meet it
    high: int | None = None  # the smallest that is known to
    count = min(max(start, 1), most)
    step = max(1, count // 8)
    while high is None or high - low > 1:
        if meets(count):
            high = count
            count = max(low + 1, count - step) if low == 0 else (low + high) // 2
        elif count == most:
            return None
        else:
            low = count
            count = min(count + step, most) if high is None else (low + high) // 2
        step *= 2
    return high


def measure(question: Question, size: Size) -> Measured:
    """Simulate a fleet and look at what the target is about."""
    policy = load_policy(question.policy)
    rebalancing = Rebalancing() if KIND_SOURCE in kinds_of(policy) else None
    log = simulate(question.table, question.fleet(size, rebalancing), policy, sample_interval_s=1.0)
    window = metrics.window_after_warmup(question.table, WARMUP_SHARE)
    return _measured(log, window, size, question)


def _alone(question: Question) -> Measured:
    """Every request by itself on an instance that keeps all prefixes: no fleet is quicker."""
    table = question.table.replace(arrival_s=np.arange(len(question.table)) * _ALONE_GAP_S)
    fleet = FleetConfig((question.profile.replace(kv_blocks=max(_ALONE_BLOCKS, question.profile.kv_blocks)),))
    log = simulate(table, fleet, load_policy("round-robin"), sample_interval_s=None)
    window = metrics.window_after_warmup(question.table, WARMUP_SHARE)
    return _measured(log, window, Size(1), question)


def _measured(log: RunLog, window: metrics.Window, size: Size, question: Question) -> Measured:
    target = question.target
    requests = log.requests[window.contains(question.table.arrival_s)]
    values = metrics.request_metrics(requests)
    finished = requests["status"] == FINISHED
    ttft_s = np.where(finished, values["ttft_s"], math.inf)
    many = finished & (requests["generated"] > 1)
    tpot_s = np.where(many, values["tpot_s"], math.inf)[many | ~finished]
    slowest = finished & (ttft_s >= _percentile(ttft_s, target.percentile))
    waited_s, took_s = values["queueing_s"][slowest].sum(), values["ttft_s"][slowest].sum()
    engines, samples = log.instances, log.samples[window.contains(log.samples["time_s"])]
    memory_full = samples["used_blocks"] > FULL * (samples["used_blocks"] + samples["free_blocks"])
    batch_full = samples["running"] >= question.profile.max_num_seqs
    queried = engines["prefix_queries_tokens"].sum()
    found = engines["prefix_hits_tokens"].sum() + log.requests["loaded_tokens"].sum()
    return Measured(
        size,
        _percentile(ttft_s, target.percentile),
        _percentile(tpot_s, target.percentile),
        float(waited_s / took_s) if took_s else 0.0,
        float(memory_full.mean()) if len(samples) else 0.0,
        float(batch_full.mean()) if len(samples) else 0.0,
        int(samples["running"].max(initial=0)),
        float(found / queried) if queried else None,
        float(engines["busy_s"].sum() / engines["alive_s"].sum()),
        _loads_share(log, question),
    )


def _loads_share(log: RunLog, question: Question) -> float:
    """Over the time in which requests arrive."""
    if question.shared_cache is None or question.table.span_s == 0:
        return 0.0
    loaded_bytes = float(log.requests["loaded_tokens"].sum()) * question.profile.kv_bytes_per_token
    return loaded_bytes / (question.shared_cache.bandwidth_bytes_per_s * question.table.span_s)


def _percentile(values: NDArray[np.float64], percentile: float) -> float:
    """The value that so many per cent do not exceed; inf where the others did not finish, 0 of nothing."""
    return float(np.percentile(values, percentile, method="higher")) if len(values) else 0.0


def _alone_text(alone: Measured, missed: tuple[str, ...]) -> str:
    parts = {
        "TTFT": f"the prefill of a long prompt alone takes {1e3 * alone.ttft_s:.0f} ms",
        "TPOT": f"a decode step of one request alone takes {1e3 * alone.tpot_s:.1f} ms",
    }
    return ", ".join(parts[name] for name in missed)


def _binds(measured: Measured, question: Question) -> str:
    """Why a fleet misses the target: the latency, and what of the engine it comes from."""
    missed = measured.missed(question.target)
    if measured.batch_full_share > OFTEN and "TPOT" not in missed:  # else larger batches would be slower still
        cause = f"batches are full (max_num_seqs {question.profile.max_num_seqs})"
    elif measured.memory_full_share > OFTEN:
        cause = "KV memory is full"
    elif measured.loads_share > USED_UP:
        cause = f"the shared cache's bandwidth is used up ({100 * measured.loads_share:.0f} %)"
    else:
        busy, waiting = 100 * measured.busy_share, 100 * measured.waiting_share
        cause = f"computing takes too long (busy {busy:.0f} %; {waiting:.0f} % of the slowest TTFTs is waiting)"
    values = {"TTFT": f"{1e3 * measured.ttft_s:.0f} ms", "TPOT": f"{1e3 * measured.tpot_s:.1f} ms"}
    latencies = ", ".join(f"{name} {values[name]}" for name in missed)
    return f"{latencies} with {measured.size}: {cause}"


def plan_table(answers: list[Answer]) -> Table:
    """The answers side by side, the fewest GPUs marked."""
    first = answers[0].question
    fewest_gpus = min((of.gpus for of in answers if of.gpus is not None), default=None)
    rows = []
    for of in answers:
        shown = of.enough or (of.too_few[0] if of.too_few else of.alone)
        count = of.gpus
        per_gpu = None if count is None else of.rate_rps / count
        hits = shown.prefix_hit_ratio
        rows.append(
            [
                Text(of.question.profile.name),
                Text(of.question.settings or "-"),
                Text(of.question.policy),
                Text("-" if of.enough is None else str(of.enough.size)),
                Text("-" if count is None else f"{count:,}", best=count is not None and count == fewest_gpus),
                Text(number(per_gpu)),
                Text(_milliseconds(shown.ttft_s)),
                Text(_milliseconds(shown.tpot_s)),
                Text(number(None if hits is None else 100 * hits)),
                Text(number(100 * shown.busy_share)),
                Text(of.binds),
            ]
        )
    target = first.target
    wanted = " and ".join(
        f"{name} at most {1e3 * most:g} ms"
        for name, most in (("TTFT", target.ttft_s), ("TPOT", target.tpot_s))
        if most < math.inf
    )
    percentile = f"P{target.percentile:g}"
    return Table(
        f"{first.table.name}, {number(answers[0].rate_rps)} requests/s: {percentile} of {wanted}",
        [
            *("profile", "settings", "policy", "instances", "GPUs", "req/s per GPU"),
            *(f"TTFT {percentile} ms", f"TPOT {percentile} ms", "prefix hits %", "busy %", "what binds"),
        ],
        rows,
        "The smallest fleet of each kind that meets the target in simulation, what it does, and why one instance less "
        "does not. Where there is none: what requests do alone, or the largest fleet that was tried.",
    )


def _milliseconds(value_s: float) -> str:
    return number(1e3 * value_s) if math.isfinite(value_s) else "never"
