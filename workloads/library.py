"""Workloads by name, with parameters: ``llumnix/M-M?rate=7.5&seed=0xCADE``, ``twin/azure-conv``, ``file:trace.csv``.

This is the form in which configurations and the command line name workloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import parse_qsl

import numpy as np

from fleetpilot.workloads.arrivals import MMPP, ArrivalProcess, Diurnal, Gamma, PiecewiseRate, Poisson, Weibull
from fleetpilot.workloads.clients import read_servegen
from fleetpilot.workloads.lengths import (
    Distribution,
    Fixed,
    Geometric,
    Independent,
    LlumnixZipf,
    LogNormal,
    Uniform,
    published_quantiles,
    table_1,
)
from fleetpilot.workloads.llumnix import PAPER_REQUESTS, PAPER_SEED, llumnix_workload
from fleetpilot.workloads.openloop import Client, OpenLoop
from fleetpilot.workloads.predictors import ClassMean, Constant, GlobalMean, LogNormalError, Predictor, with_predictions
from fleetpilot.workloads.seeding import Purpose, uniform_by_row
from fleetpilot.workloads.sessions import Sessions
from fleetpilot.workloads.table import MAX_REQUESTS, MAX_TOKENS, RequestTable
from fleetpilot.workloads.twins import TWINS, twin_generator

HIGH_PRIORITY = -1
"""What ``high_priority=`` marks requests with; all others have 0. Lower is earlier, as in vLLM."""

SMALLEST, LARGEST = 1e-9, 1e9
"""What a parameter that must be above 0 may be, and what any may be at most, where no narrower bounds are stated."""


class Generator(Protocol):
    """What makes the table of a workload."""

    def table(self, n: int, seed: int, name: str) -> RequestTable:
        """All ``n`` requests."""


@dataclass(frozen=True)
class Workload:
    """A workload that has been named and not yet drawn.

    Attributes:
        name: the name it was given, parameters included.
        generator: makes its requests.
        n: number of requests; 0 for all of a trace file.
        seed: of all draws.
        predictor: of output lengths; None leaves what the generator says (a mean).
        high_priority: share of requests, in [0, 1], that get priority `HIGH_PRIORITY`.
    """

    name: str
    generator: Generator
    n: int
    seed: int
    predictor: Predictor | None
    high_priority: float

    def table(self) -> RequestTable:
        """Draw all requests.

        Raises:
            ValueError: the parameters, each possible by itself, do not go together; or what a trace file's reader says.
        """
        if isinstance(self.generator, _TraceFile):
            return self._finished(self.generator.table(self.n, self.seed, self.name))
        try:
            return self._finished(self.generator.table(self.n, self.seed, self.name))
        except ValueError as error:
            raise ValueError(f"workload {self.name!r}: {error}") from None

    def parts(self, rows_per_part: int) -> Iterator[RequestTable]:
        """Draw the same requests in consecutive tables, without holding them all.

        Raises:
            ValueError: if the workload can only be drawn as a whole.
        """
        if not isinstance(self.generator, OpenLoop):
            raise ValueError(f"workload {self.name!r}: expected an open-loop generator to draw it in parts")
        if isinstance(self.predictor, ClassMean | GlobalMean):
            raise ValueError(
                f"workload {self.name!r}: predict: expected error:SIGMA or constant:TOKENS to draw it in parts"
            )
        for part in self.generator.parts(self.n, rows_per_part, self.seed, self.name):
            yield self._finished(part)

    def _finished(self, table: RequestTable) -> RequestTable:
        if self.high_priority:
            high = uniform_by_row(self.seed, Purpose.PRIORITIES, table.source_row) < self.high_priority
            table = table.replace(priority=np.where(high, HIGH_PRIORITY, table.priority).astype(np.int32))
        return with_predictions(table, self.predictor, self.seed) if self.predictor else table


@dataclass(frozen=True)
class WorkloadInfo:
    """A name that `workload` knows.

    Attributes:
        name: what stands before the ``?``; upper-case parts are to be filled in.
        summary: one line.
        parameters: name and default of each parameter; an empty default is explained in the documentation.
    """

    name: str
    summary: str
    parameters: Mapping[str, str]


def workload(uri: str) -> RequestTable:
    """The table of a workload given by name and parameters, e.g. ``gamma?rate=8&cv=3&lengths=azure-conv&n=20000``.

    Raises:
        ValueError: naming the parameter, its value and what was expected.
    """
    return parse_workload(uri).table()


def stream(source: OpenLoop | str, n: int, rows_per_part: int, seed: int) -> Iterator[RequestTable]:
    """An open-loop workload in consecutive tables, the same requests whatever ``rows_per_part`` is.

    Only arrival times are held for all requests (8 bytes each). ``source_row`` numbers the rows through all parts.

    Args:
        source: a generator, or a name as for `workload` (without ``n`` and ``seed``).
        n: number of requests over all parts.
        rows_per_part: rows of each part but the last.
        seed: >= 0.
    """
    if isinstance(source, OpenLoop):
        return source.parts(n, rows_per_part, seed)
    return replace(parse_workload(source), n=n, seed=seed).parts(rows_per_part)


def parse_workload(uri: str) -> Workload:
    """Understand a workload's name and parameters without drawing it.

    Raises:
        ValueError: naming the parameter, its value and what was expected.
    """
    name, _, query = uri.partition("?")
    scheme, colon, path = name.partition(":")
    entry = _ENTRIES.get(scheme + colon)
    if entry is None:
        raise ValueError(f"workload {name!r}: expected one of {', '.join(info.name for info in list_workloads())}")
    values = _Parameters(name, {**entry.parameters, **_given(name, query, entry)}, path)
    return Workload(
        uri,
        entry.build(values),
        values.integer("n", 1, MAX_REQUESTS) if values.text("n") else _WHOLE_FILE,
        values.integer("seed", 0, 2**64 - 1),
        _predictor(values),
        values.number("high_priority", 0.0, 1.0),
    )


def _given(name: str, query: str, entry: _Entry) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ValueError(f"workload {name!r}: parameters {query!r}: expected name=value pairs joined by '&'") from None
    given: dict[str, str] = {}
    for key, value in pairs:
        if key not in entry.parameters:
            known = ", ".join(entry.parameters)
            raise ValueError(f"workload {name!r}: unknown parameter {key!r}: expected one of {known}")
        if key in given:
            raise ValueError(f"workload {name!r}: {key} = {given[key]!r} and {value!r}: expected one value")
        given[key] = value
    return given


def list_workloads() -> tuple[WorkloadInfo, ...]:
    """All names that `workload` knows, with their parameters and defaults."""
    return tuple(
        WorkloadInfo(name + ("PATH" if name.endswith(":") else ""), entry.summary, entry.parameters)
        for name, entry in _ENTRIES.items()
    )


@dataclass(frozen=True)
class _Parameters:
    """The parameters of one workload, as text; reading one checks it."""

    workload: str
    values: Mapping[str, str]
    path: str

    def text(self, key: str) -> str:
        return self.values[key]

    def number(self, key: str, low: float = 0.0, high: float = LARGEST) -> float:
        """A number in [low, high]."""
        value = _number(self.values[key])
        if not low <= value <= high:
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return value

    def positive(self, key: str) -> float:
        return self.number(key, SMALLEST)

    def optional(self, key: str) -> float | None:
        """A number > 0, None if the text is empty."""
        return self.positive(key) if self.values[key] else None

    def integer(self, key: str, low: int, high: int) -> int:
        """A whole number, decimal or, with 0x, hexadecimal."""
        try:
            value = int(self.values[key], 0)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise self.error(key, f"a whole number from {low} to {high:,}")
        return value

    def optional_tokens(self, key: str) -> int | None:
        """Tokens of a request, prompt and answer; None if the text is empty."""
        return self.integer(key, 2, MAX_TOKENS) if self.values[key] else None

    def numbers(self, key: str, low: float) -> tuple[float, ...]:
        """Numbers in [low, LARGEST] joined by commas."""
        numbers = tuple(map(_number, self.values[key].split(",")))
        if not all(low <= number <= LARGEST for number in numbers):
            raise self.error(key, f"numbers from {low:g} to {LARGEST:g} joined by commas")
        return numbers

    def distribution(self, key: str) -> Distribution:
        """A distribution by its short form, see `_DISTRIBUTIONS`."""
        kind, *arguments = self.values[key].split(":")
        try:
            if not arguments:
                return Fixed(_at_most(LARGEST, kind))
            if arguments in (["prompt"], ["output"]):
                return getattr(_named_lengths(kind), arguments[0])  # type: ignore[no-any-return]
            if kind in _DISTRIBUTIONS:
                return _DISTRIBUTIONS[kind](*(_at_most(LARGEST, argument) for argument in arguments))
        except ValueError as error:
            raise self.error(key, f"{_DISTRIBUTION_FORMS} ({error})") from None
        except TypeError:
            raise self.error(key, f"{_DISTRIBUTION_FORMS} ({len(arguments)} numbers after {kind!r})") from None
        raise self.error(key, _DISTRIBUTION_FORMS)

    def lengths(self) -> Independent:
        """``lengths``, with ``prompt`` and ``output`` in place of its two parts where given."""
        try:
            pair = _named_lengths(self.values["lengths"])
        except ValueError as error:
            raise self.error("lengths", str(error)) from None
        given = {side: self.distribution(side) for side in ("prompt", "output") if self.values[side]}
        return replace(pair, **given)

    def error(self, key: str, expected: str) -> ValueError:
        return ValueError(f"workload {self.workload!r}: {key} = {self.values[key]!r}: expected {expected}")


_DISTRIBUTIONS: Mapping[str, Callable[..., Distribution]] = {
    "uniform": lambda low, high: Uniform(_whole(low), _whole(high)),
    "geometric": Geometric,
    "lognormal": lambda median, sigma, high=math.inf: LogNormal(median, sigma, high=high),
    "llumnix": lambda mean_tokens: LlumnixZipf(_whole(mean_tokens)),
}
_DISTRIBUTION_FORMS = (
    "NUMBER, uniform:LOW:HIGH, geometric:MEAN, lognormal:MEDIAN:SIGMA, lognormal:MEDIAN:SIGMA:HIGH, llumnix:MEAN, "
    "LENGTHS:prompt or LENGTHS:output"
)


def _number(text: str) -> float:
    """The number that a text is, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"{number} is not a whole number")
    return int(number)


def _named_lengths(name: str) -> Independent:
    twins = published_quantiles("twins")
    if name in twins:
        return Independent(twins[name]["prompt"], twins[name]["output"])
    try:
        return table_1(name)
    except ValueError:
        raise ValueError(f"{', '.join(twins)}, ShareGPT, BurstGPT, or two of S, M and L such as S-L") from None


def _predictor(values: _Parameters) -> Predictor | None:
    text = values.text("predict")
    kind, _, argument = text.partition(":")
    try:
        match kind:
            case "":
                return None
            case "mean" if not argument:
                return GlobalMean()
            case "class":
                return ClassMean(argument)  # type: ignore[arg-type]
            case "error":
                return LogNormalError(_at_most(10, argument))
            case "constant":
                return Constant(_at_most(LARGEST, argument))
    except ValueError:
        pass
    raise values.error(
        "predict",
        "mean, class:session, class:slo_class, class:priority, error:SIGMA (at most 10) or "
        f"constant:TOKENS (at most {LARGEST:g})",
    )


def _at_most(high: float, text: str) -> float:
    number = _number(text)
    if not number <= high:
        raise ValueError(f"{text!r} is not a number <= {high:g}")
    return number


@dataclass(frozen=True)
class _Entry:
    summary: str
    parameters: Mapping[str, str]
    build: Callable[[_Parameters], Generator]


@dataclass(frozen=True)
class _TraceFile:
    """A trace as a generator: ``n`` is the number of requests to read from its start."""

    path: str
    options: Mapping[str, object]

    def table(self, n: int, seed: int, name: str) -> RequestTable:
        # Only here: whoever generates requests needs no readers.
        from fleetpilot.workloads.readers import read_trace

        limit = None if n == _WHOLE_FILE else n
        return read_trace(self.path, limit=limit, **self.options).replace(name=name)  # type: ignore[arg-type]


_WHOLE_FILE = 0


def _open_loop(arrivals: Callable[[_Parameters], ArrivalProcess]) -> Callable[[_Parameters], Generator]:
    return lambda values: OpenLoop((Client(arrivals(values), values.lengths()),))


def _on_off(values: _Parameters) -> ArrivalProcess:
    on_s, off_s = values.positive("on_s"), values.positive("off_s")
    return MMPP.on_off(values.positive("rate") * (on_s + off_s) / on_s, on_s, off_s)


def _piecewise(values: _Parameters) -> ArrivalProcess:
    rates, durations_s = values.numbers("rates", 0.0), values.numbers("durations_s", SMALLEST)
    if len(rates) != len(durations_s):
        raise values.error("rates", f"as many numbers as durations_s = {values.text('durations_s')!r} has")
    if not any(rates):
        raise values.error("rates", "at least one number > 0")
    return PiecewiseRate(rates, durations_s, Gamma(1.0, values.positive("cv")))


def _diurnal(values: _Parameters) -> ArrivalProcess:
    return Diurnal(
        values.positive("rate"),
        values.number("peak_to_trough", 1.0),
        values.positive("period_s"),
        values.number("trough_s"),
        Gamma(1.0, values.positive("cv")),
    )


def _sessions(values: _Parameters) -> Generator:
    loop = values.text("loop")
    if loop not in ("closed", "open"):
        raise values.error("loop", "closed or open")
    system_prompts = values.integer("system_prompts", 0, 1_000_000)
    return Sessions(
        arrivals=Poisson(values.positive("rate")),
        turns=values.distribution("turns"),
        user_tokens=values.distribution("user"),
        output_tokens=values.distribution("output"),
        think_s=values.distribution("think_s"),
        system_prompts=system_prompts,
        system_tokens=values.distribution("system_tokens") if system_prompts else None,
        popularity=values.number("popularity"),
        max_context_tokens=values.optional_tokens("max_context"),
        closed_loop=loop == "closed",
    )


def _servegen(values: _Parameters) -> Generator:
    return read_servegen(
        values.path,
        start_s=values.number("start_s"),
        duration_s=values.number("duration_s", SMALLEST, 1e7),
        rate_rps=values.optional("rate"),
        missing_lengths=values.lengths() if values.text("lengths") else None,
    )


def _trace_file(values: _Parameters) -> Generator:
    options: dict[str, object] = {
        "format": values.text("format") or None,
        "load_factor": values.positive("load_factor"),
        "max_total_tokens": values.optional_tokens("max_total_tokens"),
        "over_length": values.text("over_length"),
    }
    return _TraceFile(values.path, options)


def _llumnix(name: str) -> Callable[[_Parameters], Generator]:
    return lambda values: llumnix_workload(
        name, values.positive("rate"), values.optional("cv"), values.text("mode") or None
    )


def _twin(name: str) -> Callable[[_Parameters], Generator]:
    return lambda values: twin_generator(name, values.optional("rate"))


_COMMON = {"predict": "", "high_priority": "0"}
_DRAWN = {"n": "10000", "seed": "0", **_COMMON}
_LENGTHS = {"lengths": "azure-conv", "prompt": "", "output": ""}
_PAPER = {"n": str(PAPER_REQUESTS), "seed": hex(PAPER_SEED), **_COMMON}
_SESSIONS = {"loop": "closed", "popularity": "1", "max_context": ""}
_LLUMNIX_RATES = {  # the middle of the rates of the paper's Fig. 11
    "ShareGPT": "7.5",
    "BurstGPT": "8",
    "S-S": "35",
    "M-M": "7.7",
    "L-L": "2.9",
    "S-L": "4.25",
    "L-S": "16",
}

_ENTRIES: Mapping[str, _Entry] = {
    "poisson": _Entry(
        "Poisson arrivals",
        {"rate": "1", **_LENGTHS, **_DRAWN},
        _open_loop(lambda values: Poisson(values.positive("rate"))),
    ),
    "gamma": _Entry(
        "Gamma-distributed gaps; cv is that of the gaps, above 1 is burstier",
        {"rate": "1", "cv": "2", **_LENGTHS, **_DRAWN},
        _open_loop(lambda values: Gamma(values.positive("rate"), values.positive("cv"))),
    ),
    "weibull": _Entry(
        "Weibull-distributed gaps",
        {"rate": "1", "cv": "2", **_LENGTHS, **_DRAWN},
        _open_loop(lambda values: Weibull.from_cv(values.positive("rate"), values.number("cv", 0.01, 1000.0))),
    ),
    "onoff": _Entry(
        "Poisson arrivals in bursts of on_s seconds, off_s apart, on average; rate is the overall mean",
        {"rate": "1", "on_s": "10", "off_s": "30", **_LENGTHS, **_DRAWN},
        _open_loop(_on_off),
    ),
    "piecewise": _Entry(
        "a rate that changes by steps and repeats; cv as in gamma",
        {"rates": "1,2", "durations_s": "600,600", "cv": "1", **_LENGTHS, **_DRAWN},
        _open_loop(_piecewise),
    ),
    "diurnal": _Entry(
        "a rate that follows a sine, lowest at trough_s; cv as in gamma",
        {"rate": "1", "peak_to_trough": "2", "period_s": "86400", "trough_s": "0", "cv": "1", **_LENGTHS, **_DRAWN},
        _open_loop(_diurnal),
    ),
    **{
        f"llumnix/{name}": _Entry(
            f"Llumnix paper (OSDI'24), {name} lengths; mode: paper, zipf or quantile; cv: Gamma, not Poisson",
            {"rate": rate, "cv": "", "mode": "", **_PAPER},
            _llumnix(name),
        )
        for name, rate in _LLUMNIX_RATES.items()
    },
    **{
        f"twin/{name}": _Entry(
            f"statistical twin of: {source.summary}",
            {"rate": "", **_DRAWN, "n": str(source.rows)},
            _twin(name),
        )
        for name, source in TWINS.items()
    },
    "sessions/chat": _Entry(
        "people who chat: a shared system prompt, growing context, about 2 minutes between turns (rate in sessions/s)",
        {
            "rate": "1",
            "turns": "geometric:3",
            "user": "ShareGPT:prompt",
            "output": "ShareGPT:output",
            "think_s": "lognormal:114:1.18",
            "system_prompts": "10",
            "system_tokens": "uniform:200:2000",
            **_SESSIONS,
            **_DRAWN,
        },
        _sessions,
    ),
    "sessions/agent": _Entry(
        "coding agents: long shared system prompts, tens of turns, seconds between them (rate in sessions/s)",
        {
            "rate": "0.1",
            "turns": "lognormal:19:0.75:50",
            "user": "lognormal:150:1.3:8000",
            "output": "lognormal:96:1.05:6322",
            "think_s": "lognormal:1:1.09:131",
            "system_prompts": "4",
            "system_tokens": "uniform:20000:30000",
            **_SESSIONS,
            **_DRAWN,
        },
        _sessions,
    ),
    "servegen:": _Entry(
        "the clients of a ServeGen service from a folder of condensed files; lengths for clients that have none",
        {"rate": "", "start_s": "0", "duration_s": "3600", **_LENGTHS, **_DRAWN, "lengths": ""},
        _servegen,
    ),
    "file:": _Entry(
        "a trace file in any format that can be read; n requests from its start, all if not given",
        {
            "format": "",
            "load_factor": "1",
            "max_total_tokens": "",
            "over_length": "error",
            "n": "",
            "seed": "0",
            **_COMMON,
        },
        _trace_file,
    ),
}
