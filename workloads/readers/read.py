"""From any known trace file to the canonical table: one path for all formats, and a report of what happened on it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.readers.columns import loop_heads, prefix_columns, session_columns
from fleetpilot.workloads.readers.detect import READERS, detect_format
from fleetpilot.workloads.readers.source import TraceFile, TraceRows
from fleetpilot.workloads.readers.ticks import spread_ticks
from fleetpilot.workloads.table import RequestTable, make_table

OverLength = Literal["error", "drop", "truncate_prompt", "truncate_output"]

_CREDIBLE_RPS = (0.01, 2000.0)
_ROWS_FOR_A_RATE = 100

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def read_trace(
    path: str | Path,
    format: str | None = None,
    *,
    rebase: bool = True,
    max_total_tokens: int | None = None,
    over_length: OverLength = "error",
    window_s: tuple[float, float] | None = None,
    limit: int | None = None,
    load_factor: float = 1.0,
    **options: object,
) -> RequestTable:
    """Read a public request trace, plain or gzip.

    Rows are sorted by time (stable). Every row read is in the table or counted under the reason for which it is not;
    ``meta["read"]`` holds the report, `read_summary` prints it. Requests without prompt or output tokens are dropped.

    Args:
        path: the file.
        format: a key of `READERS`; None detects it.
        rebase: whether the earliest row of the file (dropped rows included) becomes time 0. False keeps the file's own
            zero, which suits formats that count from the start of the trace or from midnight.
        max_total_tokens: longest prompt + output that the model takes; None for no bound.
        over_length: what to do with a longer request. "error" refuses the file, "drop" leaves the request out,
            "truncate_prompt" keeps the beginning of the prompt (so that prefixes stay shared) and "truncate_output"
            the beginning of the output. A request that cannot be made to fit that way, because the part that stays
            leaves no token for the other, is dropped and counted apart.
        window_s: (start, end) of the source trace to keep, in seconds after its time 0; times then count from the
            start. The calls of a closed loop go with their session.
        limit: keep this many requests, the earliest; asking for more than there are is an error, none is used twice.
        load_factor: how much more load than the source: 2.0 divides all arrival and think times by two, so twice as
            many requests per second arrive (others call this a speed-up, or give its inverse as a time scale).
        **options: options of the format: ``ticks`` (mooncake, burstgpt), ``chunk_tokens``, ``seconds_per_unit`` and
            ``labels`` (timed_trace), ``session_gap_s`` (weka, weka_requests).

    Raises:
        ValueError: naming file, line, field, value and expectation.
    """
    _check_options(max_total_tokens, over_length, window_s, limit, load_factor)
    file = TraceFile(path)
    name = detect_format(path) if format is None else format
    if name not in READERS:
        raise ValueError(f"format = {name!r}: expected one of {', '.join(sorted(READERS))}")
    rows = READERS[name](file, **options)

    prompt = np.array(rows.prompt_tokens, np.int64)
    output = np.array(rows.output_tokens, np.int64)
    think_s = np.array(rows.think_s)
    parent = np.array(rows.parent, np.int64)
    open_loop = np.isnan(think_s)

    file_time = np.array(rows.time)
    if not rebase and file_time.dtype == np.int64:
        raise ValueError(f"rebase = False: {name} files have dates: expected True, they have no time 0 of their own")
    origin = file_time.min() if rebase and len(rows) else file_time.dtype.type(0)
    time_s = (file_time - origin) / rows.units_per_s
    inversions = rows.inversions + int(np.sum(np.diff(time_s[open_loop]) < 0))
    notes = dict(rows.notes)
    if warning := _unit_warning(file, rows, time_s[open_loop]):
        warnings.warn(warning, stacklevel=2)
        notes["warning"] = warning
    if rows.tick_s is not None:
        time_s[open_loop] = spread_ticks(time_s[open_loop], rows.tick_s)
    time_s = time_s[loop_heads(parent, open_loop)]

    drops = _Drops(rows)
    drops.drop("zero_prompt_tokens", (prompt == 0) & (output > 0))
    drops.drop(rows.zero_output_reason, output == 0)
    if window_s is not None:
        drops.drop("outside_window", (time_s < window_s[0]) | (time_s >= window_s[1]))
        time_s -= window_s[0]
    if max_total_tokens is not None:
        notes.update(_bound_lengths(file, rows, drops, prompt, output, max_total_tokens, over_length))
    order = np.argsort(time_s, kind="stable")
    order = order[drops.keep[order]]
    if limit is not None:
        if limit > len(order):
            raise ValueError(
                f"{file.path.name}: limit = {limit}: expected at most {len(order)}, the requests there are"
            )
        drops.drop("beyond_limit", _all_but(order[:limit], len(rows)))
        order = order[:limit]

    sessions, links_cut = session_columns(rows, order, parent, think_s)
    if links_cut:
        notes["links_to_later_rows_cut"] = links_cut
    arrival_s = np.where(np.isnan(sessions["think_s"]), time_s[order] / load_factor, np.nan)
    sessions["think_s"] /= load_factor
    report: dict[str, object] = {
        "file": file.path.name,
        "format": rows.format,
        "time_unit": rows.time_unit,
        "rows_read": len(rows) + sum(rows.dropped.values()),
        "rows_emitted": len(order),
        "dropped": drops.counts,
        "inversions": inversions,
        "origin": origin.item(),
        "window_s": window_s,
        "load_factor": load_factor,
        "ticks_spread_s": rows.tick_s,
        "block_tokens": rows.block_tokens,
        **notes,
    }
    return make_table(
        file.path.name.removesuffix(".gz").rsplit(".", 1)[0],
        arrival_s,
        prompt[order],
        output[order],
        source_row=np.array(rows.source_row, np.int64)[order],
        meta={"read": report},
        **sessions,
        **prefix_columns(rows, order, sessions["parent"], prompt[order], output[order]),
    )


def read_summary(table: RequestTable) -> str:
    """The report of a table that `read_trace` made, in one line.

    Raises:
        ValueError: if the table was not read from a file.
    """
    if "read" not in table.meta:
        raise ValueError(f"table {table.name!r}: expected one that read_trace made")
    report = cast(dict[str, object], table.meta["read"])
    return (
        f"{report['file']} ({report['format']}, times in {report['time_unit']}): {rows_summary(report)}; "
        f"{report['inversions']} out of time order; span {table.span_s:.1f} s"
    )


def rows_summary(report: dict[str, object]) -> str:
    """What became of the rows of a file, from a table's ``meta["read"]``."""
    dropped = cast(dict[str, int], report["dropped"])
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "none"
    return f"{report['rows_read']} rows read, {report['rows_emitted']} emitted, dropped: {reasons}"


def _check_options(
    max_total_tokens: int | None,
    over_length: str,
    window_s: tuple[float, float] | None,
    limit: int | None,
    load_factor: float,
) -> None:
    if over_length not in ("error", "drop", "truncate_prompt", "truncate_output"):
        raise ValueError(
            f"over_length = {over_length!r}: expected 'error', 'drop', 'truncate_prompt' or 'truncate_output'"
        )
    if max_total_tokens is None and over_length != "error":
        raise ValueError(f"over_length = {over_length!r}: expected max_total_tokens with it")
    if max_total_tokens is not None and max_total_tokens < 2:
        raise ValueError(f"max_total_tokens = {max_total_tokens}: expected >= 2, one token each for prompt and output")
    if window_s is not None and not 0 <= window_s[0] < window_s[1]:
        raise ValueError(f"window_s = {window_s}: expected 0 <= start < end")
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: expected >= 1")
    if not 0 < load_factor < math.inf:
        raise ValueError(f"load_factor = {load_factor}: expected a finite number > 0")


def _unit_warning(file: TraceFile, rows: TraceRows, time_s: NDArray[np.float64]) -> str | None:
    """A sentence if a unit 1000 times larger or smaller would give a credible request rate and this one does not."""
    low, high = _CREDIBLE_RPS
    span_s = float(np.ptp(time_s)) if len(time_s) else 0.0
    if len(time_s) < _ROWS_FOR_A_RATE or span_s == 0.0:
        return None
    rps = len(time_s) / span_s
    if low <= rps <= high or not (low <= rps * 1000 <= high or low <= rps / 1000 <= high):
        return None
    return (
        f"{file.path.name}: {len(time_s)} requests in {span_s:.6g} s with times read in {rows.time_unit}, as "
        f"{rows.format} has them: {rps:.3g} requests/s looks 1000 times off"
    )


def _all_but(kept: Ints, n: int) -> Mask:
    mask = np.ones(n, bool)
    mask[kept] = False
    return mask


class _Drops:
    """Which rows stay, and how many went for which reason. A row goes for the first reason that applies."""

    def __init__(self, rows: TraceRows) -> None:
        self.keep = np.ones(len(rows), bool)
        self.counts: dict[str, int] = dict(rows.dropped)

    def drop(self, reason: str, mask: Mask) -> None:
        count = int(np.sum(self.keep & mask))
        if count:
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.keep &= ~mask


def _bound_lengths(
    file: TraceFile, rows: TraceRows, drops: _Drops, prompt: Ints, output: Ints, most: int, policy: OverLength
) -> dict[str, object]:
    """Apply the policy to requests that are too long, in place.

    Returns:
        Counts for the report.
    """
    long = drops.keep & (prompt + output > most)
    if policy == "error" and long.any():
        row = int(np.argmax(long))
        raise file.error(
            rows.source_row[row],
            "prompt + output tokens",
            int(prompt[row] + output[row]),
            f"at most max_total_tokens = {most}; choose over_length='drop', 'truncate_prompt' or 'truncate_output'",
        )
    if policy == "drop":
        drops.drop("over_length", long)
        return {}
    if policy == "truncate_prompt":
        drops.drop("over_length_output", long & (output >= most))
        cut, other = prompt, output
    else:
        drops.drop("over_length_prompt", long & (prompt >= most))
        cut, other = output, prompt
    long &= drops.keep
    tokens_before = int(cut[long].sum())
    cut[long] = most - other[long]
    if not long.any():
        return {}
    return {f"{policy}_rows": int(long.sum()), f"{policy}_tokens": tokens_before - int(cut[long].sum())}
