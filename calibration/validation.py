"""One trace, some policies: on live engines and in the simulator, side by side."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.calibration.compare import Compared, Pair, compared, goodput_share, pairs
from fleetpilot.calibration.link import Link
from fleetpilot.calibration.live import LiveEngine, MeasureError
from fleetpilot.calibration.replay import Replay, replay
from fleetpilot.cluster import FleetConfig, Rebalancing, RunLog, Telemetry, simulate
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.evaluation.metrics import fragmented_blocks, samples_by_time
from fleetpilot.fleet.policy import Policy, kinds_of
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.fleet.slo import CHAT, SLOClass
from fleetpilot.fleet.view import KIND_SOURCE
from fleetpilot.workloads.table import RequestTable

Progress = Callable[[str], None]


SIMULATED_RUNS = 20
"""Of each policy, with other phases of the polls and other draws of the policy: one costs less than a second."""


class ValidationError(Exception):
    """The replay could not be made."""


@dataclass(frozen=True)
class Setup:
    """What is compared.

    Attributes:
        table: the requests, open loop.
        urls: of the engines.
        profiles: paths or names, one for all engines or one per engine. Beside a path, the record that `calibrate` left
            (``.json``) tells the link and a request's way to the engine and back.
        policies: that are compared, each with a name of its own.
        repeats: of every policy.
        seed: of prompts and tie breaks; each repeat has its own.
        slo: that goodput is measured by.
        api_key: of the engines.
        dispatcher: settings of the dispatcher.
    """

    table: RequestTable
    urls: tuple[str, ...]
    profiles: tuple[str, ...]
    policies: tuple[Policy, ...]
    repeats: int = 3
    seed: int = 0
    slo: SLOClass = CHAT
    api_key: str = ""
    dispatcher: ServeConfig = field(default_factory=ServeConfig)


@dataclass(frozen=True)
class Fleet:
    """How the fleet was used under a policy, on the engines or in the simulator: means over its repeats.

    Attributes:
        kv_use: mean share of KV blocks in use.
        preemptions_per_request: how often requests lost their KV blocks.
        fragmentation: Llumnix's: memory that would hold blocked heads of line were it in one place, of all.
        goodput: share of requests within the SLO.
        migrations: completed ones per request.
        downtime_s: mean of the migrated requests; None without.
    """

    kv_use: float
    preemptions_per_request: float
    fragmentation: float
    goodput: float
    migrations: float
    downtime_s: float | None


@dataclass(frozen=True)
class Validation:
    """What came of it.

    Attributes:
        rows: distributions.
        pairs: rankings.
        engines: by policy.
        simulator: by policy.
        setup: what was compared, as JSON.
        request_s: a request's way to the engine and back, added to the simulator's latencies.
        link: None if it is not known.
        kv_bytes_per_token: of the engines.
        failed: requests without a whole answer, by policy.
        late_p99_s: how much later than intended requests were sent.
        fallbacks: decisions that the dispatcher's fallback made.
        load: average of the machine before and after.
        seconds: that all took.
    """

    rows: tuple[Compared, ...]
    pairs: tuple[Pair, ...]
    engines: dict[str, Fleet]
    simulator: dict[str, Fleet]
    setup: dict[str, Any]
    request_s: float
    link: Link | None
    kv_bytes_per_token: int
    failed: dict[str, int]
    late_p99_s: float
    fallbacks: int
    load: tuple[float, float]
    seconds: float


def validate(setup: Setup, progress: Progress = lambda text: None) -> Validation:
    """Replay a table on engines and in the simulator.

    Raises:
        ValidationError: an engine does not answer, or requests did not end.
        ValueError: the table, the profiles or the policies do not fit.
    """
    _check_open_loop(setup.table)
    policies = {policy.name: policy for policy in setup.policies}
    if len(policies) < len(setup.policies):
        raise ValueError(f"policies = {[policy.name for policy in setup.policies]}: expected different names")
    known = _known(setup.profiles[0])
    begun_s, load = time.perf_counter(), os.getloadavg()[0]
    try:
        profiles, replays = asyncio.run(_replays(setup, policies, progress))
    except MeasureError as error:
        raise ValidationError(str(error)) from None
    except TimeoutError:
        raise ValidationError("requests did not end, or an engine did not become ready, in time") from None
    runs: dict[str, list[RunLog]] = {}
    for name, policy in policies.items():
        progress(f"simulating {name}")
        runs[name] = [
            simulate(
                _as_the_dispatcher_sees(setup.table, setup.dispatcher.poll_interval_s, setup.seed + run),
                _fleet(setup, profiles, policy, known),
                policy,
                setup.seed + run,
                sample_interval_s=0.5,
            )
            for run in range(SIMULATED_RUNS)
        ]
    simulated = {name: [_outside(log.requests, known.request_s) for log in logs] for name, logs in runs.items()}
    real = {name: [found.requests for found in logs] for name, logs in replays.items()}
    every = [found for logs in replays.values() for found in logs]
    return Validation(
        rows=tuple(compared(real, simulated)),
        pairs=tuple(pairs(real, simulated, setup.seed)),
        engines={name: _used_engines(logs, setup) for name, logs in replays.items()},
        simulator={name: _used_simulator(logs, simulated[name], setup) for name, logs in runs.items()},
        setup=_setup_json(setup, profiles),
        request_s=known.request_s,
        link=known.link,
        kv_bytes_per_token=profiles[0].kv_bytes_per_token,
        failed={
            name: int(sum(np.sum(log["generated"] < log["output_tokens"]) for log in logs))
            for name, logs in real.items()
        },
        late_p99_s=float(np.percentile(np.concatenate([found.late_s for found in every]), 99)),
        fallbacks=sum(found.fallbacks for found in every),
        load=(load, os.getloadavg()[0]),
        seconds=time.perf_counter() - begun_s,
    )


def _check_open_loop(table: RequestTable) -> None:
    closed = np.flatnonzero(~np.isnan(table.think_s))
    if len(closed):
        raise ValueError(f"{table.name}: row {closed[0]} follows its parent; expected an open loop, arrivals alone")


async def _replays(
    setup: Setup, policies: dict[str, Policy], progress: Progress
) -> tuple[list[HardwareProfile], dict[str, list[Replay]]]:
    engines = [LiveEngine(url, slot, setup.api_key) for slot, url in enumerate(setup.urls)]
    try:
        profiles = await _profiles(setup, engines)
        config = dataclasses.replace(
            setup.dispatcher,
            engines=setup.urls,
            port=0,
            profile=setup.profiles[0],
            engine_api_key=setup.api_key,
        )
        found: dict[str, list[Replay]] = {name: [] for name in policies}
        # Policy by policy within a repeat: what changes on the machine meanwhile meets all of them.
        for repeat in range(setup.repeats):
            for name, policy in policies.items():
                progress(f"repeat {repeat + 1}/{setup.repeats}: {name}")
                found[name].append(
                    await replay(
                        setup.table,
                        engines,
                        policy,
                        dataclasses.replace(config, seed=setup.seed + repeat),
                        prompt_seed=setup.seed + repeat,
                        salt=f"{time.time_ns()}",
                    )
                )
        return profiles, found
    finally:
        for engine in engines:
            engine.close()


async def _profiles(setup: Setup, engines: Sequence[LiveEngine]) -> list[HardwareProfile]:
    """One profile per engine, with the KV blocks that it has."""
    names = setup.profiles * len(engines) if len(setup.profiles) == 1 else setup.profiles
    if len(names) != len(engines):
        raise ValueError(f"{len(names)} profiles for {len(engines)} engines: expected one for all, or one each")
    longest = int((setup.table.prompt_tokens + setup.table.output_tokens).max())
    profiles = []
    for engine, name in zip(engines, names, strict=True):
        capabilities = await engine.ask()
        metrics = await engine.metrics()
        profile = load_profile(name)
        limit = min(capabilities.max_model_len or longest, int((metrics.kv_capacity_blocks or 0) * profile.block_size))
        if longest > limit:
            raise ValueError(
                f"{setup.table.name}: a request of {longest} tokens; expected at most {limit}, {engine.url}"
            )
        profiles.append(
            profile.replace(
                kv_blocks=int(metrics.kv_capacity_blocks or profile.kv_blocks),
                block_size=int(metrics.block_size or profile.block_size),
                max_model_len=limit,
                priority_order=capabilities.priority is True,
            )
        )
    return profiles


@dataclass(frozen=True)
class _Known:
    """What the record beside a calibrated profile knows beyond it; nothing of a profile that has none."""

    request_s: float = 0.0
    poll_s: float = 0.0
    link: Link | None = None


def _known(profile: str) -> _Known:
    path = Path(profile)
    candidates = [path.with_suffix(".json"), path.with_name(f"{path.stem.rpartition('-')[0]}.json")]
    record = next((each for each in candidates if path.suffix == ".toml" and each.is_file()), None)
    if record is None:
        return _Known()
    found = json.loads(record.read_text(encoding="utf-8"))
    if "poll_s" not in found:
        raise ValueError(f"{record}: poll_s is missing, expected what this version's calibrate writes: calibrate again")
    link = Link(**found["link"]) if found["link"] else None
    return _Known(float(found["fit"]["request_s"]), float(found["poll_s"]), link)


def _as_the_dispatcher_sees(table: RequestTable, poll_interval_s: float, seed: int) -> RequestTable:
    """Lengths as the dispatcher predicts them, and arrivals at any moment between two polls.

    It predicts what answers have had on the mean, at most what the client allows. Simulated polls are at multiples of
    their interval, the dispatcher's are not: what arrives just before one or just after it may fare differently.
    """
    predicted = np.minimum(table.output_tokens.mean(), table.output_tokens)
    shift_s = np.random.default_rng(seed).uniform(0.0, poll_interval_s)
    return table.replace(predicted_output_tokens=predicted.astype(np.float32), arrival_s=table.arrival_s + shift_s)


def _fleet(setup: Setup, profiles: Sequence[HardwareProfile], policy: Policy, known: _Known) -> FleetConfig:
    config, link = setup.dispatcher, known.link
    rebalancing = None
    if config.migration and KIND_SOURCE in kinds_of(policy) and link is not None:
        rebalancing = Rebalancing(
            interval_s=config.rebalance_interval_s,
            max_pairs=config.max_migrations,
            protocol="vllm",
            round_trip_s=link.round_trip_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            max_stages=max(2, config.max_stages),
            last_stage_blocks=max(1, config.last_stage_tokens // profiles[0].block_size),
        )
    return FleetConfig(
        tuple(profiles),
        telemetry=Telemetry(config.poll_interval_s, known.poll_s),
        hold_interval_s=config.hold_interval_s,
        max_hold_s=config.max_hold_s,
        slo_classes=(setup.slo,),
        rebalancing=rebalancing,
    )


def _outside(requests: NDArray[np.void], request_s: float) -> NDArray[np.void]:
    """Simulated requests as a client sees them, at the other end of the way to the engine and back."""
    seen = requests.copy()
    for name in ("first_token_s", "finish_s"):
        seen[name] += request_s
    return seen


def _used_engines(replays: Sequence[Replay], setup: Setup) -> Fleet:
    n = len(setup.table) * len(replays)
    downtimes_s = [seconds for found in replays for seconds in found.downtimes_s]
    fragmented = []
    kv_use = []
    for found in replays:
        kv_blocks = found.kv_blocks.sum()
        free, demand = np.floor(found.free_blocks).astype(np.int64), found.head_demand_blocks.astype(np.int64)
        fragmented.append(fragmented_blocks(free, demand).mean() / kv_blocks)
        kv_use.append(1 - found.free_blocks.sum(axis=1).mean() / kv_blocks)
    return Fleet(
        kv_use=float(np.mean(kv_use)),
        preemptions_per_request=sum(sum(found.preemptions) for found in replays) / n,
        fragmentation=float(np.mean(fragmented)),
        goodput=goodput_share([found.requests for found in replays], setup.slo),
        migrations=sum(found.outcomes.get("completed", 0) for found in replays) / n,
        downtime_s=float(np.mean(downtimes_s)) if downtimes_s else None,
    )


def _used_simulator(runs: Sequence[RunLog], seen: Sequence[NDArray[np.void]], setup: Setup) -> Fleet:
    n = len(setup.table) * len(runs)
    fragmented = []
    kv_use = []
    for log in runs:
        samples = samples_by_time(log.samples, len(log.instances))
        kv_blocks = log.instances["kv_blocks"].sum()
        fragmented.append(fragmented_blocks(samples["free_blocks"], samples["head_demand_blocks"]).mean() / kv_blocks)
        kv_use.append(samples["used_blocks"].sum(axis=1).mean() / kv_blocks)
    moved = [log.requests[log.requests["migrations"] > 0] for log in runs]
    count = sum(int(requests["migrations"].sum()) for requests in moved)
    downtime_s = sum(float(requests["downtime_s"].sum()) for requests in moved)
    return Fleet(
        kv_use=float(np.mean(kv_use)),
        preemptions_per_request=sum(int(log.instances["preemptions"].sum()) for log in runs) / n,
        fragmentation=float(np.mean(fragmented)),
        goodput=goodput_share(seen, setup.slo),
        migrations=count / n,
        downtime_s=downtime_s / count if count else None,
    )


def _setup_json(setup: Setup, profiles: Sequence[HardwareProfile]) -> dict[str, Any]:
    table = setup.table
    return {
        "workload": table.name,
        "requests": len(table),
        "span_s": table.span_s,
        "mean_prompt_tokens": float(table.prompt_tokens.mean()),
        "mean_output_tokens": float(table.output_tokens.mean()),
        "repeats": setup.repeats,
        "simulated_runs": SIMULATED_RUNS,
        "seed": setup.seed,
        "slo": setup.slo,
        "policies": [policy.name for policy in setup.policies],
        "engines": list(setup.urls),
        "profiles": list(setup.profiles),
        "kv_blocks": [profile.kv_blocks for profile in profiles],
        "max_num_seqs": [profile.max_num_seqs for profile in profiles],
        "poll_interval_s": setup.dispatcher.poll_interval_s,
    }
