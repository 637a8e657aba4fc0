"""Measures live engines for some minutes and writes their hardware profile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleetpilot.calibration.facts import Facts, Given, learn
from fleetpilot.calibration.fit import Errors, Fit, Measurement, fit
from fleetpilot.calibration.link import SHARES, Copy, Link, copy, fit_link
from fleetpilot.calibration.live import (
    LiveEngine,
    MeasureError,
    decoding,
    random_prompt,
    time_to_first_token,
)
from fleetpilot.calibration.plan import LONGEST_PROMPT, STEPS, Limits, Point, plan
from fleetpilot.calibration.points import PointsFile
from fleetpilot.calibration.start_up import StartedEngine, start_engine
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.evaluation.provenance import to_json
from fleetpilot.fleet.profiles import HardwareProfile, profile_to_toml

ROUNDS = 7
LINK_REPEATS = 5
LIMIT_S = 270.0
"""Measuring ends then; with facts, link and start of the command it stays within five minutes."""
MAX_ERROR = 0.15
"""Median relative error on the points held out, at which a fit is refused; P90 may be `P90_FACTOR` times it."""
P90_FACTOR = 2.0

Progress = Callable[[str], None]


class CalibrationError(Exception):
    """No profile was written. What was measured is kept: the same command goes on."""


@dataclass(frozen=True)
class Request:
    """What is to be calibrated.

    Attributes:
        urls: of the engines; those that share a machine are measured at the same time.
        out: the profile, a ``.toml`` file; points and record lie beside it.
        given: limits that the engines do not say.
        hardware: what the engines run on, in words.
        start_command: starts the first engine; empty: it runs.
        api_key: of the engines.
        limit_s: for the points.
        longest_prompt: tokens; longer ones are not measured.
        rounds: repeats of each point, at most.
        poll_interval_s: between two readings of an engine's metrics meanwhile, as a dispatcher reads them: they take
            time of the engine's host.
        max_error: see `MAX_ERROR`.
    """

    urls: tuple[str, ...]
    out: Path
    given: Given = field(default_factory=Given)
    hardware: str = "not stated"
    start_command: str = ""
    api_key: str = ""
    limit_s: float = LIMIT_S
    longest_prompt: int = LONGEST_PROMPT
    rounds: int = ROUNDS
    poll_interval_s: float = ServeConfig.poll_interval_s
    max_error: float = MAX_ERROR

    @property
    def points_path(self) -> Path:
        """Where measured points are kept."""
        return self.out.with_suffix(".points.jsonl")

    @property
    def record_path(self) -> Path:
        """Where all results are written as JSON."""
        return self.out.with_suffix(".json")


@dataclass(frozen=True)
class Calibration:
    """What a calibration found.

    Attributes:
        profiles: one per engine, in the order of the URLs.
        paths: of the files written.
        facts: one per engine.
        fit: of all engines together.
        link: None if it was not measured.
        not_measured: what, and why.
        start_up_s: None if it was not measured.
        poll_s: median time to read an engine's metrics while points were measured.
        repeats: fewest repeats of a point.
        points: different points per engine.
        spread: median over the points of the relative standard deviation of their repeats.
        load: average of the machine before and after.
        seconds: that all took.
    """

    profiles: tuple[HardwareProfile, ...]
    paths: tuple[Path, ...]
    facts: tuple[Facts, ...]
    fit: Fit
    link: Link | None
    not_measured: tuple[str, ...]
    start_up_s: float | None
    poll_s: float
    repeats: int
    points: int
    spread: float
    load: tuple[float, float]
    seconds: float


def calibrate(request: Request, progress: Progress = lambda text: None) -> Calibration:
    """Measure engines, fit their profile and write it.

    Raises:
        CalibrationError: an engine did not answer, time ran out, or the fit is bad. Points are kept.
        ValueError: a URL or the points file is malformed.
        KeyboardInterrupt: points are kept.
    """
    try:
        return asyncio.run(_Run(request, progress).run())
    except MeasureError as error:
        raise CalibrationError(str(error)) from None


class _Run:
    def __init__(self, request: Request, progress: Progress):
        self._request = request
        self._progress = progress
        self._engines = [LiveEngine(url, slot, request.api_key) for slot, url in enumerate(request.urls)]
        self._begun_s = time.perf_counter()
        self._load = os.getloadavg()[0]
        self._polls_s: defaultdict[int, list[float]] = defaultdict(list)

    async def run(self) -> Calibration:
        started = None
        try:
            if self._request.start_command:
                self._progress("starting the engine")
                started = await start_engine(self._engines[0], self._request.start_command)
            return await self._measure(started)
        finally:
            for engine in self._engines:
                engine.close()
            if started is not None:
                started.stop()

    async def _measure(self, started: StartedEngine | None) -> Calibration:
        self._progress("asking the engines")
        facts = await self._learn()
        points = self._points
        if started is not None:
            points.add(kind="start_up", engine=0, key="start-up", time_s=started.start_up_s)
        plans = [plan(self._limits(fact)) for fact in facts]
        known = len(points)
        polls = [asyncio.create_task(self._poll(engine)) for engine in self._engines]
        try:
            warm_ups = (self._warm_up(engine, fact) for engine, fact in zip(self._engines, facts, strict=True))
            await asyncio.gather(*warm_ups)
            complete = await self._rounds(facts, plans, time.perf_counter() + self._request.limit_s)
        finally:
            for poll in polls:
                poll.cancel()
            if len(points) > known or not points.of(kind="poll"):
                self._keep_polls()
        if not complete:
            raise CalibrationError(
                f"{len(points)} points were measured in {self._request.limit_s:g} s, not every one of them once; they "
                f"are kept in {points.path}: the same command goes on from there"
            )
        return self._result(facts, plans, complete)

    async def _poll(self, engine: LiveEngine) -> None:
        while True:
            begun_s = time.perf_counter()
            with contextlib.suppress(MeasureError):  # the point that is measured fails, too, and says so
                await engine.metrics_text()
                self._polls_s[engine.slot].append(time.perf_counter() - begun_s)
            await asyncio.sleep(self._request.poll_interval_s)

    def _keep_polls(self) -> None:
        for slot, times_s in self._polls_s.items():
            self._points.add(kind="poll", engine=slot, key="poll", time_s=float(np.median(times_s)))

    async def _rounds(self, facts: Sequence[Facts], plans: Sequence[Sequence[Point]], deadline_s: float) -> int:
        """Measure until the deadline; how many rounds are complete."""
        for round_number in range(1, self._request.rounds + 1):
            if not await self._round(plans, round_number, deadline_s):
                return round_number - 1
            if round_number == 1:
                await self._measure_link(facts)
        return self._request.rounds

    async def _learn(self) -> list[Facts]:
        for engine in self._engines:
            await engine.ask()
        metrics = [await engine.metrics() for engine in self._engines]
        stated = [
            {
                "version": engine.capabilities.version,
                "model": engine.capabilities.models[0],
                "max_model_len": engine.capabilities.max_model_len,
                "kv_blocks": metric.kv_capacity_blocks,
                "block_size": metric.block_size,
                **dataclasses.asdict(self._request.given),
            }
            for engine, metric in zip(self._engines, metrics, strict=True)
            if engine.capabilities is not None
        ]
        self._points = PointsFile(self._request.points_path, stated)
        facts = []
        for engine in self._engines:
            known = self._points.of(kind="facts", engine=engine.slot)
            if not known:
                fact = await learn(engine, self._request.given)
                self._points.add(kind="facts", engine=engine.slot, key="facts", **{"facts": dataclasses.asdict(fact)})
                known = self._points.of(kind="facts", engine=engine.slot)
            facts.append(Facts(**known[-1]["facts"]))
        return facts

    def _limits(self, facts: Facts) -> Limits:
        return facts.limits(self._request.longest_prompt)

    async def _warm_up(self, engine: LiveEngine, facts: Facts) -> None:
        """What an engine does for the first time it compiles or allocates."""
        random = np.random.default_rng()
        for tokens in (16, min(1024, self._limits(facts).longest_prompt)):
            await time_to_first_token(engine, random_prompt(random, tokens))

    async def _round(self, plans: Sequence[Sequence[Point]], round_number: int, deadline_s: float) -> bool:
        """Measure every point that was measured less often than this; whether all were."""
        every = list(dict.fromkeys(point for points in plans for point in points))
        for number, point in enumerate(every, 1):
            due = [
                engine
                for engine, points in zip(self._engines, plans, strict=True)
                if point in points and len(self._points.of(engine=engine.slot, key=point.key)) < round_number
            ]
            if not due:
                continue
            if time.perf_counter() > deadline_s:
                return False
            self._progress(f"round {round_number}, {number}/{len(every)}: {point.key}")
            await asyncio.gather(*(engine.idle() for engine in self._engines))
            measured = await asyncio.gather(*(_measure(engine, point) for engine in due), return_exceptions=True)
            for engine, found in zip(due, measured, strict=True):
                if isinstance(found, BaseException):
                    raise found
                self._points.add(kind=point.kind, engine=engine.slot, key=point.key, **found)
        return True

    async def _measure_link(self, facts: Sequence[Facts]) -> None:
        if len(facts) < 2 or not all(fact.kv_transfer for fact in facts) or self._points.of(kind="link"):
            return
        longest = min(self._limits(fact).longest_prompt for fact in facts)
        for repeat in range(LINK_REPEATS):
            for share in SHARES:
                self._progress(f"link, copy {repeat + 1}/{LINK_REPEATS} of {int(longest * share)} tokens")
                ends = self._engines[:2] if repeat % 2 == 0 else self._engines[1::-1]
                found = await copy(ends[0], ends[1], int(longest * share))
                self._points.add(kind="link", engine=ends[0].slot, key="link", **dataclasses.asdict(found))

    def _result(self, facts: Sequence[Facts], plans: Sequence[Sequence[Point]], complete: int) -> Calibration:
        measurements = self._measurements(facts, plans)
        fitted = fit(measurements)
        self._refuse_bad(fitted)
        link, not_measured = self._link(facts, fitted)
        if link is not None and self._request.given.kv_bytes_per_token is None:
            facts = [_with_counted_bytes(fact, round(link.kv_bytes_per_token)) for fact in facts]
        start_up = self._points.of(kind="start_up")
        if not start_up:
            not_measured.append("start-up time (give --start-command)")
        found = Calibration(
            profiles=(),
            paths=(),
            facts=tuple(facts),
            fit=fitted,
            link=link,
            not_measured=tuple(not_measured),
            start_up_s=float(np.median([point["time_s"] for point in start_up])) if start_up else None,
            poll_s=float(np.median([point["time_s"] for point in self._points.of(kind="poll")])),
            repeats=complete,
            points=max(map(len, plans)),
            spread=self._spread(),
            load=(self._load, os.getloadavg()[0]),
            seconds=time.perf_counter() - self._begun_s,
        )
        return self._written(found)

    def _measurements(self, facts: Sequence[Facts], plans: Sequence[Sequence[Point]]) -> list[Measurement]:
        measurements = []
        for kind in ("prefill", "decode", "mixed"):
            means = self._points.means(kind, "time_s", "kv_tokens")
            for slot, points in enumerate(plans):
                limits = self._limits(facts[slot])
                for point in points:
                    if (values := means.get((slot, point.key))) is not None:
                        measurements.append(point.measurement(values["time_s"], values["kv_tokens"], limits))
        return measurements

    def _refuse_bad(self, fitted: Fit) -> None:
        errors = fitted.held_out or fitted.fitted
        limit = self._request.max_error
        if errors.median > limit or errors.p90 > P90_FACTOR * limit:
            raise CalibrationError(
                f"the fit is bad: on points held out it is {errors.median:.0%} off in the median (P90 "
                f"{errors.p90:.0%}; the worst, {errors.worst:.0%}, is a {errors.worst_of}), expected at most "
                f"{limit:.0%} (P90 "
                f"{P90_FACTOR * limit:.0%}); load average {os.getloadavg()[0]:.1f}, spread of repeats "
                f"{self._spread():.0%}. On a quiet machine the same command adds repeats; remove {self._points.path} "
                "to start anew"
            )

    def _link(self, facts: Sequence[Facts], fitted: Fit) -> tuple[Link | None, list[str]]:
        copies = [
            Copy(**{field.name: point[field.name] for field in dataclasses.fields(Copy)})
            for point in self._points.of(kind="link")
        ]
        if copies:
            step_s = float(fitted.cost["a_s"] + fitted.cost["w_s"])
            try:
                return fit_link(copies, facts[0].kv_bytes_per_token, step_s), []
            except ValueError as error:
                return None, [f"link: {error}"]
        if len(facts) < 2:
            return None, ["link (give two URLs)"]
        return None, ["link (an engine exports no KV blocks: start it with a KV connector)"]

    def _spread(self) -> float:
        """Median over points of the relative standard deviation of their repeats."""
        times: dict[tuple[int, str], list[float]] = {}
        for kind in ("prefill", "decode", "mixed"):
            for point in self._points.of(kind=kind):
                times.setdefault((point["engine"], point["key"]), []).append(point["time_s"])
        spreads = [np.std(each) / np.mean(each) for each in times.values() if len(each) > 1]
        return float(np.median(spreads)) if spreads else float("nan")

    def _written(self, found: Calibration) -> Calibration:
        out = self._request.out
        alike = all(fact == found.facts[0] for fact in found.facts)
        names = [out.stem] if alike else [f"{out.stem}-{slot + 1}" for slot in range(len(found.facts))]
        profiles = [
            profile_of(name.lower(), fact, found, self._request) for name, fact in zip(names, found.facts, strict=False)
        ]
        paths = [out.with_name(f"{name}.toml") for name in names]
        for profile, path in zip(profiles, paths, strict=True):
            path.write_text(profile_to_toml(profile), encoding="utf-8")
        found = dataclasses.replace(
            found, profiles=tuple(profiles * len(found.facts) if alike else profiles), paths=tuple(paths)
        )
        self._request.record_path.write_text(to_json(_record(found)) + "\n", encoding="utf-8")
        return found


def _with_counted_bytes(facts: Facts, kv_bytes_per_token: int) -> Facts:
    sources = {**facts.sources, "kv_bytes_per_token": "counted by the engines while they copied"}
    return dataclasses.replace(facts, kv_bytes_per_token=kv_bytes_per_token, sources=sources)


async def _measure(engine: LiveEngine, point: Point) -> dict[str, Any]:
    fresh = np.random.default_rng()
    if point.kind == "prefill":
        time_s = await time_to_first_token(engine, random_prompt(fresh, point.prompt_tokens))
        return {"time_s": time_s, "kv_tokens": 0.0}
    # The same prompts every time: from the second on they are in the prefix cache, and a step reads the same KV tokens.
    random = np.random.default_rng([point.context_tokens, engine.slot])
    prompts = [random_prompt(random, point.context_tokens) for _ in range(point.batch)]
    steps = STEPS if point.kind == "decode" else 4
    step_s, kv_tokens, mixed_s = await decoding(engine, prompts, steps, random_prompt(fresh, point.prompt_tokens))
    return {"time_s": step_s if point.kind == "decode" else mixed_s, "kv_tokens": kv_tokens}


def profile_of(name: str, facts: Facts, found: Calibration, request: Request) -> HardwareProfile:
    """The profile of an engine."""
    sources = facts.sources
    return HardwareProfile(
        name=name,
        gpu=request.hardware,
        model=facts.model,
        tp=facts.tp,
        engine=f"vLLM {facts.version}",
        scheduler="chunked",
        block_size=facts.block_size,
        kv_blocks=facts.kv_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        prefix_cache=facts.prefix_cache,
        watermark=0.0,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        **found.fit.cost,
        w_e_s=0.0,
        expert_share=0.0,
        host_step_s=0.0,
        host_per_seq_s=0.0,
        priority_order=facts.priority,
        draft_tokens=0,
        provenance={
            "cost": f"Measured over HTTP on {len(found.facts)} engine(s) at once, {found.points} points, at least "
            f"{found.repeats} repeats (spread {found.spread:.0%}), load average {found.load[0]:.1f} before and "
            f"{found.load[1]:.1f} after. Relative error: {_errors_text(found.fit.fitted)} on the points fitted, "
            f"{_errors_text(found.fit.held_out)} on those held out.",
            "fitted_range": f"Prompts of 1 to {facts.limits(request.longest_prompt).longest_prompt} tokens, batches "
            "of 1 to "
            f"{min(facts.max_num_seqs, 64)}, as far as the KV blocks hold them.",
            "host_overhead": "Contained in a and d, which HTTP clients cannot tell apart from it. Not contained: a "
            f"request's way to the engine and back, {found.fit.request_s * 1e3:.3g} ms.",
            "kv_capacity": f"{facts.kv_blocks} usable blocks of {facts.block_size} tokens, as /metrics says; "
            f"kv_bytes_per_token {sources['kv_bytes_per_token']}.",
            "scheduler": f"vLLM V1. max_num_seqs {sources['max_num_seqs']}; max_num_batched_tokens "
            f"{sources['max_num_batched_tokens']}; tp {sources['tp']}.",
            "not_covered": "; ".join((*found.not_measured, "mixtures of experts (no w_e)", "jitter")) + ".",
        },
    )


def _errors_text(errors: Errors | None) -> str:
    if errors is None:
        return "none measured"
    return f"median {errors.median:.1%}, P90 {errors.p90:.1%}, worst {errors.worst:.0%} ({errors.worst_of})"


def _record(found: Calibration) -> dict[str, object]:
    from fleetpilot.evaluation.provenance import provenance

    plain = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    del plain["profiles"]
    return {**plain, "paths": [str(path) for path in found.paths], **provenance()}


def calibration_text(found: Calibration) -> str:
    """What a terminal shows of it."""
    profile = found.profiles[0]
    lines = [
        f"{found.points} points, {found.repeats} repeats or more (spread {found.spread:.0%}), {found.seconds:.0f} s, "
        f"load average {found.load[0]:.1f} to {found.load[1]:.1f}",
        f"fitted:   {_errors_text(found.fit.fitted)}",
        f"held out: {_errors_text(found.fit.held_out)}",
        "cost in ms: "
        + ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.4g}" for name, value in found.fit.cost.items()),
        f"a request's way to the engine and back: {found.fit.request_s * 1e3:.3g} ms; a reading of its metrics: "
        f"{found.poll_s * 1e3:.3g} ms",
        f"prefill of 1,024 tokens {profile.prefill_s(1024) * 1e3:.4g} ms, decode step of 1 x 1,024 tokens "
        f"{profile.decode_s(1, 1024) * 1e3:.4g} ms, of 8 x 1,024 {profile.decode_s(8, 1024) * 1e3:.4g} ms",
    ]
    for slot, fact in enumerate(found.facts):
        lines.append(
            f"engine {slot}: {fact.kv_blocks:,} blocks of {fact.block_size} tokens; max_num_seqs {fact.max_num_seqs} "
            f"({fact.sources['max_num_seqs']}); max_num_batched_tokens {fact.max_num_batched_tokens} "
            f"({fact.sources['max_num_batched_tokens']})"
        )
    if found.link is not None:
        link = found.link
        lines.append(
            f"link: {link.bandwidth_bytes_per_s / 1e6:.4g} MB/s, round trip {link.round_trip_s * 1e3:.3g} ms, pinning "
            f"{link.probe_s * 1e3:.3g} ms (error {link.error:.0%}); {link.kv_bytes_per_token:,.0f} bytes per token"
        )
    if found.start_up_s is not None:
        lines.append(f"start-up: {found.start_up_s:.1f} s")
    lines += [f"not measured: {what}" for what in found.not_measured]
    return "\n".join([*lines, *map(str, found.paths)])
