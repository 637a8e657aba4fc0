"""DistServe (OSDI'24) and Splitwise (ISCA'24): pools that prefill and pools that decode against mixed fleets.

DistServe reports up to 7.4 times the request rate of vLLM, or targets 12.6 times as tight, with 90 % of the requests
within both targets; Splitwise up to 1.4 times the throughput of H100s that batch prompts with decodes at 20 % less
cost, or 2.35 times at the same cost and power. Both compared with engines of their time, which compute a prompt in one
piece, before the decodes or beside them. Here every fleet runs the same engine, and one that computes prompts in chunks
is among the mixed ones. A rate is the highest at which 90 % of the requests meet both targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, Pools, simulate
from fleetpilot.cluster.state import FINISHED
from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.experiments.llumnix_runs import Bound, bounds_table, table
from fleetpilot.evaluation.provenance import to_json
from fleetpilot.evaluation.runner import stderr_line
from fleetpilot.evaluation.tables import Table, number
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.workloads import Client, Independent, LogNormal, OpenLoop, Poisson
from fleetpilot.workloads.lengths import Lengths, published_quantiles
from fleetpilot.workloads.table import RequestTable

# --- engines ---------------------------------------------------------------------------------------------------------


def opt(model: str, tp: int, kv_tokens: int, kv_bytes_per_token: int, **cost_ms: float) -> HardwareProfile:
    """An A100 with one of DistServe's models, timed by the constants of its simulator."""
    return load_profile("a100-llama-2-7b").replace(
        name=f"a100-{model.lower()}-tp{tp}",
        model=model,
        tp=tp,
        kv_blocks=kv_tokens // 16,
        kv_bytes_per_token=kv_bytes_per_token,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        **_seconds(cost_ms),
    )


def llama(gpu: str, **cost_ms: float) -> HardwareProfile:
    """Eight GPUs with Llama-2-70B, timed by fits to SplitwiseSim's measurements."""
    return load_profile(f"{gpu}-llama-3.1-70b-tp8").replace(
        name=f"{gpu}-llama-2-70b-tp8",
        model="Llama-2-70B",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=16384,
        **_seconds(cost_ms),
    )


def _seconds(cost_ms: Mapping[str, float]) -> dict[str, float]:
    """Coefficients by name, those that are not given 0: host overheads are in what was measured."""
    names = ("a", "w", "b", "c", "d", "e", "host_step", "host_per_seq")
    return {f"{name}_s": cost_ms.get(name, 0.0) / 1e3 for name in names}


OPT_13B = opt("OPT-13B", 1, 66_144, 40 * 2 * 5120 * 2, a=18.10, w=1.83, b=0.10191, c=1.424e-5, e=6.27e-4)
OPT_66B = opt("OPT-66B", 4, 78_496, 64 * 2 * 9216 * 2, a=29.44, w=1.32, b=0.15135, c=1.664e-5, e=4.52e-4)
"""``simdistserve``'s prefill is a + b n + c n^2, its decode a' + e K + d B: w is a' - a, and c twice theirs, as Q is
n^2 / 2. Their slope d of small batches is below b, which the form has at its least."""
VLLM_13B = opt("OPT-13B", 1, 66_144, 40 * 2 * 5120 * 2, a=22.05, w=1.43, b=0.14051, c=1.616e-5, e=5.93e-4)
"""As its constants for vLLM have it."""
H100 = llama("h100", a=22.39, w=7.50, b=0.0648, c=1.483e-5, d=0.199, e=1.785e-4)
A100 = llama("a100", a=21.54, w=22.53, b=0.1508, c=8.29e-6, d=0.190, e=3.354e-4)
PRICE = {H100.name: 2.16, A100.name: 1.0}
"""Of a machine per hour over an A100's, as Splitwise has it; an H100 draws 1.75 times its power."""
POWER = {H100.name: 1.75, A100.name: 1.0}

MIXED: Mapping[str, Callable[[HardwareProfile], HardwareProfile]] = {
    "whole prompts, before decodes": lambda engine: engine.replace(
        scheduler="prefill_first", max_num_batched_tokens=engine.max_model_len
    ),
    "whole prompts, beside decodes": lambda engine: engine.replace(max_num_batched_tokens=engine.max_model_len),
    "chunks of 512, beside decodes": lambda engine: engine.replace(max_num_batched_tokens=512),
}
"""How mixed engines schedule prompts: as DistServe's baseline, as Splitwise's, and as today's with a tight budget."""
BEFORE, BESIDE, CHUNKS = MIXED
MIXED_H100 = f"H100, mixed, {BESIDE}"
"""Splitwise's baseline."""
POLICY = "splitwise"
"""Least pending tokens, of the pool where there is one."""

# --- loads -----------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What is asked of a fleet.

    Attributes:
        name: of the load.
        lengths: of its requests, which come as a Poisson process.
        slo: its targets.
    """

    name: str
    lengths: Lengths
    slo: SLOClass


class Claim(NamedTuple):
    """A comparison of DistServe's: a load, the engine, and the rate per GPU at which it tightens the targets."""

    load: Load
    engine: HardwareProfile
    rate_rps: float


SHARE = 0.9
"""Of the requests, which are to meet both targets."""
CHAT = Independent(LogNormal(350, 1.0, 4, 1500), LogNormal(150, 0.8, 4, 500))
CODE = Independent(LogNormal(150, 0.4, 16, 500), LogNormal(80, 0.6, 4, 400))
SUMMARIES = Independent(LogNormal(1700, 0.15, 500, 1850), LogNormal(80, 0.5, 4, 190))
"""In place of ShareGPT, HumanEval and LongBench, of whose requests the paper keeps what fits OPT's 2,048 tokens."""
INSTANCES = 6
"""Of every fleet on DistServe's loads: pools of one to five and five to one."""
CLAIMS = (
    Claim(Load("chat, OPT-13B", CHAT, SLOClass("chat 13B", 0.25, 0.1)), OPT_13B, 1.5),
    Claim(Load("chat, OPT-66B", CHAT, SLOClass("chat 66B", 0.4, 0.1)), OPT_66B, 0.25),
    Claim(Load("code, OPT-66B", CODE, SLOClass("code", 0.125, 0.2)), OPT_66B, 0.875),
    Claim(Load("summaries, OPT-66B", SUMMARIES, SLOClass("summaries", 15.0, 0.15)), OPT_66B, 0.375),
)
"""Targets and rates are those of the artifact's plots."""
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Of the targets of the first of `CLAIMS`."""
PROMPTS, ANSWERS = (500, 2000, 8000), (20, 100, 500)
"""Medians of the lengths between which today's engine is compared."""
TODAY = load_profile("h100-llama-3.1-8b").replace(max_num_seqs=256)
TODAY_SLO = SLOClass("today", 0.5, 0.02, ttft_s_per_prompt_token=1e-4)
ALONE = SLOClass("Splitwise", 3 * A100.a_s, 1.5 * (A100.a_s + A100.w_s), ttft_s_per_prompt_token=3 * A100.b_s)
"""Three times the TTFT and one and a half times the TPOT of a request alone on A100s."""
AZURE = ("azure-conv", "azure-code")
"""Splitwise's traces: their lengths."""
MACHINES = 8
"""H100 machines whose cost the others have, or 80 % of it."""


class Size(NamedTuple):
    """How much to run: all, or less in tests.

    A trace has `requests`, or more where these come within `span_s` or within so many `ttft_targets`: too short a trace
    is over before a queue is long.
    """

    requests: int = 1_500
    traces: int = 2
    span_s: float = 30.0
    ttft_targets: float = 20.0
    claims: Sequence[Claim] = CLAIMS
    scales: Sequence[float] = SCALES
    prompts: Sequence[int] = PROMPTS
    answers: Sequence[int] = ANSWERS
    machines: int = MACHINES
    instances: int = INSTANCES


# --- what a fleet can do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A fleet under a load.

    Attributes:
        load: what it serves.
        system: what kind of fleet it is.
        fleet: of these instances.
        size: how much to run.
    """

    load: Load
    system: str
    fleet: FleetConfig
    size: Size

    @property
    def roles(self) -> str:
        """How many of which kind, as 2P+4D."""
        roles = self.fleet.roles
        prefill = roles.count("prefill")
        return f"{prefill}P+{len(roles) - prefill}D" if prefill else str(len(roles))


def traces(load: Load, rate_rps: float, size: Size) -> list[RequestTable]:
    """Poisson arrivals at a rate."""
    span_s = max(size.span_s, size.ttft_targets * load.slo.ttft_s)
    loop = OpenLoop((Client(Poisson(1.0), load.lengths),), rate_rps=rate_rps)
    return [loop.table(max(size.requests, int(span_s * rate_rps)), seed) for seed in range(1, size.traces + 1)]


def needed_scales(job: Job, rate_rps: float) -> np.ndarray:
    """(requests,) by which factor the targets would have to be multiplied to be met; inf for what did not finish."""
    scales = []
    for trace in traces(job.load, rate_rps, job.size):
        log = simulate(trace, job.fleet, load_policy(POLICY), sample_interval_s=None)
        requests = log.requests[metrics.window_after_warmup(trace, 0.1).contains(trace.arrival_s)]
        values, slo = metrics.request_metrics(requests), job.load.slo
        ttft_target_s = slo.ttft_s + slo.ttft_s_per_prompt_token * requests["prompt_tokens"]
        needed = np.fmax(values["ttft_s"] / ttft_target_s, values["tpot_s"] / slo.tpot_s)
        scales.append(np.where(requests["status"] == FINISHED, needed, math.inf))
    return np.concatenate(scales)


def tightest(job: Job, rate_rps: float) -> float:
    """The smallest factor of the targets with which `SHARE` of the requests meet them."""
    return float(np.quantile(needed_scales(job, rate_rps), SHARE, method="higher"))


def highest_rps(job: Job) -> float:
    """The highest rate at which `SHARE` of the requests meet the targets, to 2 %; 0 if they never do."""
    low, high = 0.0, 1.0
    while tightest(job, high) <= 1:
        low, high = high, 2 * high
    while low == 0 and high > 0.01:
        if tightest(job, high / 2) <= 1:
            low = high / 2
        else:
            high /= 2
    while low > 0 and high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if tightest(job, middle) <= 1 else (low, middle)
    return low


def mixed(engine: HardwareProfile, instances: int, how: str) -> FleetConfig:
    """So many engines, each of which serves requests from prompt to end."""
    return FleetConfig.of(MIXED[how](engine), instances)


def pools(prefill: Sequence[HardwareProfile], decode: Sequence[HardwareProfile]) -> FleetConfig:
    """Two pools; the first token comes from the prefill, as in both papers."""
    roles = Pools.of(prefill=len(prefill), decode=len(decode), first_token_from="prefill")
    return FleetConfig((*prefill, *decode), pools=roles)


POOLS = "pools"
ONE_VLLM, THREE_IN_POOLS = "one with vLLM's times, whole prompts, before decodes", "three in pools"
"""As DistServe's artifact compares them on its first load."""


def jobs_of(load: Load, engine: HardwareProfile, size: Size) -> list[Job]:
    """Mixed fleets of one engine, and pools of the same size."""
    n = size.instances
    return [
        *(Job(load, how, mixed(engine, n, how), size) for how in MIXED),
        *(Job(load, POOLS, pools([engine] * p, [engine] * (n - p)), size) for p in range(1, n)),
    ]


def as_in_the_artifact(load: Load, size: Size) -> list[Job]:
    """One GPU with vLLM against three with DistServe."""
    three = [pools([OPT_13B] * p, [OPT_13B] * (3 - p)) for p in (1, 2)]
    return [
        Job(load, ONE_VLLM, mixed(VLLM_13B, 1, BEFORE), size),
        *(Job(load, THREE_IN_POOLS, fleet, size) for fleet in three),
    ]


def machines_of(load: Load, share: float, size: Size) -> list[Job]:
    """Splitwise's fleets for a share of the cost of `Size.machines` H100 machines."""
    money = share * size.machines * PRICE[H100.name] + 1e-9
    kinds = {"H100": H100, "A100": A100}
    most = {name: int(money / PRICE[engine.name]) for name, engine in kinds.items()}
    jobs = [
        Job(load, f"{name}, mixed, {how}", mixed(engine, most[name], how), size)
        for name, engine in kinds.items()
        for how in (BESIDE, CHUNKS)
    ]
    for first, second in (("H100", "H100"), ("H100", "A100"), ("A100", "A100")):
        for prefill in range(1, most[first]):
            decode = int((money - prefill * PRICE[kinds[first].name]) / PRICE[kinds[second].name])
            if decode > 0:
                fleet = pools([kinds[first]] * prefill, [kinds[second]] * decode)
                jobs.append(Job(load, f"{first} prefill, {second} decode", fleet, size))
    return jobs


# --- the tables ------------------------------------------------------------------------------------------------------


class Best(NamedTuple):
    """Of the fleets of a system the one with the highest rate."""

    job: Job
    rate_rps: float


Found = Mapping[tuple[str, str], Best]
"""(load, system) -> the best of its fleets."""


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Find what every fleet can do and lay it beside the papers' claims.

    Args:
        out: folder for the rates.
        workers: processes; the machine's cores by default.
        size: how much to run.

    Returns:
        The claims, then the comparisons.
    """
    scaled = {f"x {scale:g}": _scaled(size.claims[0].load, scale) for scale in size.scales}
    grid = [_between(prompt, answer) for prompt in size.prompts for answer in size.answers]
    azure = [
        Load(name, Independent(lengths["prompt"], lengths["output"]), ALONE)
        for name, lengths in published_quantiles("twins").items()
        if name in AZURE
    ]
    jobs = [job for claim in size.claims for job in jobs_of(claim.load, claim.engine, size)]
    jobs += [job for load in scaled.values() for job in jobs_of(load, size.claims[0].engine, size)]
    jobs += [job for load in grid for job in jobs_of(load, TODAY, size)]
    jobs += as_in_the_artifact(size.claims[0].load, size)
    found = _best(jobs, out / "rates.json", workers)
    by_cost = {
        share: _best(
            [job for load in azure for job in machines_of(load, share, size)], out / f"{share:g}.json", workers
        )
        for share in (1.0, 0.8)
    }
    factors = _factors(size.claims, found, workers)
    return [
        _claims_table(size, found, factors, by_cost, azure),
        _distserve_table(size, found, factors),
        _ratio_table("DistServe's chat on OPT-13B by its targets", "targets", scaled, found),
        _ratio_table("Llama-3.1-8B on H100s by lengths", "prompt + answer", {load.name: load for load in grid}, found),
        *(_splitwise_table(share, of, by_cost[1.0]) for share, of in by_cost.items()),
    ]


def _scaled(load: Load, scale: float) -> Load:
    slo = SLOClass(f"{load.slo.name} x {scale:g}", scale * load.slo.ttft_s, scale * load.slo.tpot_s)
    return Load(f"{load.name}, targets x {scale:g}", load.lengths, slo)


def _between(prompt: int, answer: int) -> Load:
    lengths = Independent(LogNormal(prompt, 0.5, 1, 16_000), LogNormal(answer, 0.5, 1, 8_000))
    return Load(f"{prompt:,} + {answer}", lengths, TODAY_SLO)


def _best(jobs: Sequence[Job], file: Path, workers: int | None) -> Found:
    rates: dict[int, float] = {}

    def keep(place: int, rate_rps: float) -> None:
        rates[place] = rate_rps
        stderr_line(f"{len(rates)}/{len(jobs)} {jobs[place].load.name}, {jobs[place].system}: {rate_rps:.3g}/s")

    map_over_workers(highest_rps, jobs, keep, workers=workers, say=stderr_line)
    stderr_line("")
    found: dict[tuple[str, str], Best] = {}
    for place, job in enumerate(jobs):
        key = (job.load.name, job.system)
        if key not in found or rates[place] > found[key].rate_rps:
            found[key] = Best(job, rates[place])
    file.parent.mkdir(parents=True, exist_ok=True)
    listed = [
        {"load": job.load.name, "system": job.system, "fleet": job.roles, "rate_rps": rates[place]}
        for place, job in enumerate(jobs)
    ]
    file.write_text(to_json(listed), encoding="utf-8")
    return found


class _Tightest(NamedTuple):
    """A fleet and a rate, to be asked side by side."""

    job: Job
    rate_rps: float


def _tightest(asked: _Tightest) -> float:
    return tightest(*asked)


def _factors(claims: Sequence[Claim], found: Found, workers: int | None) -> dict[tuple[str, str], float]:
    """(load, system) -> the tightest targets at the claim's rate, as a factor of the load's."""
    asked = {
        (claim.load.name, system): _Tightest(
            found[claim.load.name, system].job,
            claim.rate_rps * claim.engine.tp * len(found[claim.load.name, system].job.fleet.profiles),
        )
        for claim in claims
        for system in (*MIXED, POOLS)
    }
    factors: dict[int, float] = {}
    map_over_workers(_tightest, [*asked.values()], factors.__setitem__, workers=workers)
    return {key: factors[place] for place, key in enumerate(asked)}


def _claims_table(
    size: Size,
    found: Found,
    factors: Mapping[tuple[str, str], float],
    by_cost: Mapping[float, Found],
    azure: Sequence[Load],
) -> Table:
    names = [claim.load.name for claim in size.claims]

    def gain(system: str) -> float:
        return max(_over(found[name, POOLS].rate_rps, found[name, system].rate_rps) for name in names)

    def tighter(system: str) -> float:
        return max(factors[name, system] / factors[name, POOLS] for name in names)

    same, cheaper = (
        max(
            _over(
                max(best.rate_rps for (name, system), best in of.items() if name == load.name and kind in system),
                by_cost[1.0][load.name, MIXED_H100].rate_rps,
            )
            for load in azure
        )
        for of, kind in ((by_cost[1.0], "H100 prefill, H100"), (by_cost[0.8], "prefill"))
    )
    first = names[0]
    artifact = _over(found[first, THREE_IN_POOLS].rate_rps / 3, found[first, ONE_VLLM].rate_rps)
    rows = [
        _above_one(f"DistServe: most gain in rate over {BEFORE}", 7.4, gain(BEFORE)),
        Bound(f"the same over {CHUNKS}", "-", f"{gain(CHUNKS):.2f}", "-", None),
        Bound(f"{first}: gain per GPU of {THREE_IN_POOLS} over {ONE_VLLM}", "-", f"{artifact:.2f}", "-", None),
        _above_one(f"DistServe: most gain in targets over {BEFORE}", 12.6, tighter(BEFORE)),
        Bound(f"the same over {CHUNKS}", "-", f"{tighter(CHUNKS):.2f}", "-", None),
        _above_one(f"Splitwise: most gain at equal cost and power, over {BESIDE}", 2.35, same),
        _above_one("Splitwise: the same with 80 % of the cost", 1.4, cheaper),
    ]
    note = (
        "Ratios, each the largest over its loads, as the papers give them: pools over mixed fleets of the same number "
        "of GPUs, or of the same cost. The split of the pools is the best of all. Pools win where prompts are "
        "long against answers, the code trace above all, and hold tighter targets at a given rate; with "
        "longer answers or looser targets mixed engines serve as much on the same GPUs, and more. DistServe's "
        "factors do not come out on equal engines: much of the gain is over a single GPU with a slower "
        "engine. Splitwise's do, over engines that compute whole prompts; over chunks of 512 the gain is half "
        "of one on the code trace, and none on the other."
    )
    return bounds_table("Pools over mixed fleets: claims", rows, note)


def _over(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.inf


def _above_one(title: str, published: float, ours: float) -> Bound:
    return Bound(title, f"{published:g}", f"{ours:.2f}", "above 1", ours > 1)


def _distserve_table(size: Size, found: Found, factors: Mapping[tuple[str, str], float]) -> Table:
    rows = []
    for claim in size.claims:
        gpus = claim.engine.tp * size.instances
        for system in (*MIXED, POOLS):
            best = found[claim.load.name, system]
            factor = factors[claim.load.name, system]
            rows.append([claim.load.name, system, best.job.roles, number(best.rate_rps / gpus), number(factor)])
    note = (
        f"Rates per GPU of {size.instances} instances (OPT-66B: four GPUs each). Targets: the tightest at the rates "
        f"per GPU that DistServe's artifact has ({', '.join(f'{c.load.name} {c.rate_rps:g}' for c in size.claims)}), "
        "as a factor of the load's own, with the split that has the highest rate."
    )
    return table("DistServe's loads", ["load", "system", "instances", "requests/s per GPU", "targets"], rows, note)


def _ratio_table(title: str, of: str, loads: Mapping[str, Load], found: Found) -> Table:
    rows = []
    for name, load in loads.items():
        rates = [found[load.name, system].rate_rps for system in MIXED]
        split = found[load.name, POOLS]
        ratio = f"{split.rate_rps / max(rates):.2f}" if max(rates) else "-"
        roles = split.job.roles if split.rate_rps else "-"
        rows.append([name, *map(number, rates), number(split.rate_rps), roles, ratio])
    header = [of, *MIXED, POOLS, "split", "pools / best mixed"]
    return table(title, header, rows, "Requests/s of the fleet, and the split of the pools that serves most.")


def _splitwise_table(share: float, found: Found, full: Found) -> Table:
    rows = []
    for (load, system), best in found.items():
        base = full[load, MIXED_H100].rate_rps
        power = sum(POWER[profile.name] for profile in best.job.fleet.profiles)
        ratio = f"{best.rate_rps / base:.2f}" if base else "-"
        rows.append([load, system, best.job.roles, number(power), number(best.rate_rps), ratio])
    note = (
        f"Fleets of Llama-2-70B for {100 * share:g} % of the cost of the mixed H100s; power as that of so many A100 "
        "machines. Ratio: to the mixed H100s, at full cost, that compute whole prompts beside decodes."
    )
    header = ["load", "system", "machines", "power", "requests/s", "ratio"]
    return table(f"Splitwise's traces, {100 * share:g} % of the cost", header, rows, note)
