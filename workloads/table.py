"""The canonical table of requests: what every reader and generator emits and every simulation consumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_NODE = -1
NO_PARENT = -1
NO_SESSION = -1

MAX_TOKENS = 2**31 - 1
MAX_REQUESTS = 20_000_000
"""Requests of a generated table, at most: what draws and simulates them takes some gigabytes of memory."""

_ROW_DTYPES: dict[str, type] = {
    "arrival_s": np.float64,
    "prompt_tokens": np.int32,
    "output_tokens": np.int32,
    "predicted_output_tokens": np.float32,
    "priority": np.int32,
    "slo_class": np.int32,
    "session": np.int64,
    "turn": np.int32,
    "parent": np.int64,
    "think_s": np.float64,
    "prefix_node": np.int32,
    "own_node": np.int32,
    "source_row": np.int64,
}


@dataclass(frozen=True)
class RequestTable:
    """Requests as columns of equal length ``n``, and the tree of prompt prefixes that they share.

    Rows are sorted by ``arrival_s`` (stable), except that rows of a closed loop follow their parent.

    Attributes:
        name: what the table is called in results.
        arrival_s: (n,) seconds from the start of the trace; NaN for a row that is released by its parent.
        prompt_tokens: (n,) tokens of the prompt, >= 1.
        output_tokens: (n,) tokens the request will generate, >= 1. Never shown to a policy.
        predicted_output_tokens: (n,) what a length predictor says, > 0.
        priority: (n,) lower is earlier, as in vLLM.
        slo_class: (n,) index into the run's SLO classes.
        session: (n,) session or client identity, -1 for none.
        turn: (n,) turn within the session, from 0.
        parent: (n,) row of the turn before, always a smaller row; -1 for none.
        think_s: (n,) closed loop: seconds between the parent's last token and this arrival; NaN for an open-loop row.
        prefix_node: (n,) deepest node of the prefix tree that the prompt runs through completely, -1 for none.
        own_node: (n,) the node that holds the rest of this request's sequence (prompt and generated tokens), if a later
            request continues it; -1 otherwise.
        source_row: (n,) row (0-based) in the file it came from.
        node_parent: (m,) parent of each prefix-tree node, always a smaller index; -1 at a root.
        node_end_tokens: (m,) tokens from the start of the sequence to the end of the node. KV blocks of size ``b`` that
            belong to the node are those whose last token lies in it: ``end // b - parent_end // b`` of them.
        meta: provenance (format, file, time unit, seed, dropped rows by reason, ...), JSON-serialisable.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    predicted_output_tokens: NDArray[np.float32]
    priority: NDArray[np.int32]
    slo_class: NDArray[np.int32]
    session: NDArray[np.int64]
    turn: NDArray[np.int32]
    parent: NDArray[np.int64]
    think_s: NDArray[np.float64]
    prefix_node: NDArray[np.int32]
    own_node: NDArray[np.int32]
    source_row: NDArray[np.int64]
    node_parent: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    node_end_tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    meta: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from 0 to the last open-loop arrival (0.0 for an empty table)."""
        known = self.arrival_s[~np.isnan(self.arrival_s)]
        return float(known[-1]) if len(known) else 0.0

    def replace(self, **changes: object) -> RequestTable:
        """A copy with some columns or the name changed, validated again."""
        return validated(replace(self, **changes))  # type: ignore[arg-type]


def make_table(
    name: str,
    arrival_s: object,
    prompt_tokens: object,
    output_tokens: object,
    *,
    meta: dict[str, object] | None = None,
    node_parent: object | None = None,
    node_end_tokens: object | None = None,
    **columns: object,
) -> RequestTable:
    """Build a table from the columns that are known; the others get their defaults. Validates.

    Without a prediction every request is predicted the mean output length of the table (what a dispatcher learns from
    history).

    Raises:
        ValueError: naming column, row, value and expectation.
    """
    arrival = np.asarray(arrival_s, np.float64)
    n = len(arrival)
    output = _as_int("output_tokens", output_tokens, np.int32)
    mean_output = float(output.mean()) if n else 1.0
    defaults: dict[str, object] = {
        "predicted_output_tokens": np.full(n, mean_output),
        "priority": np.zeros(n),
        "slo_class": np.zeros(n),
        "session": np.full(n, NO_SESSION),
        "turn": np.zeros(n),
        "parent": np.full(n, NO_PARENT),
        "think_s": np.full(n, np.nan),
        "prefix_node": np.full(n, NO_NODE),
        "own_node": np.full(n, NO_NODE),
        "source_row": np.arange(n),
    }
    unknown = set(columns) - set(defaults)
    if unknown:
        raise ValueError(f"unknown column {sorted(unknown)[0]!r}; expected one of {sorted(defaults)}")
    values = {**defaults, **columns}
    typed = {
        key: np.asarray(value, _ROW_DTYPES[key])
        if np.issubdtype(_ROW_DTYPES[key], np.floating)
        else _as_int(key, value, _ROW_DTYPES[key])
        for key, value in values.items()
    }
    return validated(
        RequestTable(
            name=name,
            arrival_s=arrival,
            prompt_tokens=_as_int("prompt_tokens", prompt_tokens, np.int32),
            output_tokens=output,
            node_parent=np.empty(0, np.int32) if node_parent is None else _as_int("node_parent", node_parent, np.int32),
            node_end_tokens=(
                np.empty(0, np.int64)
                if node_end_tokens is None
                else _as_int("node_end_tokens", node_end_tokens, np.int64)
            ),
            meta=meta or {},
            **typed,  # type: ignore[arg-type]
        )
    )


def _as_int(column: str, values: object, dtype: type) -> NDArray[Any]:
    """Convert to an integer type, refusing what would be rounded, wrapped or is not a number."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{column}: expected integers, got dtype {array.dtype}")
    converted = array.astype(np.float64) if array.dtype.kind == "f" else array
    info = np.iinfo(dtype)
    if array.dtype.kind == "f":
        bad = ~np.isfinite(converted) | (converted != np.floor(converted))
    else:
        bad = np.zeros(len(array), bool)
    bad |= (converted < info.min) | (converted > info.max)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{column}[{row}] = {array[row].item()!r}: expected an integer in [{info.min}, {info.max}]")
    return array.astype(dtype)


def validated(table: RequestTable) -> RequestTable:
    """Return the table if it holds what its docstring promises.

    Raises:
        ValueError: naming column, row, value and expectation.
    """
    n = len(table)
    for column in fields(table):
        value = getattr(table, column.name)
        if column.name in _ROW_DTYPES and len(value) != n:
            raise ValueError(f"{column.name} has {len(value)} rows, arrival_s has {n}")
    closed = ~np.isnan(table.think_s)
    _require(table, "arrival_s", closed | (np.isfinite(table.arrival_s) & (table.arrival_s >= 0)), "a finite time >= 0")
    _require(table, "arrival_s", ~closed | np.isnan(table.arrival_s), "NaN where think_s is given (a closed loop)")
    _require(table, "think_s", ~closed | (np.isfinite(table.think_s) & (table.think_s >= 0)), "a finite time >= 0")
    _require(table, "prompt_tokens", table.prompt_tokens >= 1, ">= 1")
    _require(table, "output_tokens", table.output_tokens >= 1, ">= 1")
    predicted = table.predicted_output_tokens
    _require(table, "predicted_output_tokens", np.isfinite(predicted) & (predicted > 0), "a finite number > 0")
    _require(table, "slo_class", table.slo_class >= 0, ">= 0")
    _require(table, "parent", (table.parent >= NO_PARENT) & (table.parent < np.arange(n)), "-1 or a smaller row")
    _require(table, "parent", ~closed | (table.parent >= 0), "a row, where think_s is given")
    known = table.arrival_s[~closed]
    if np.any(np.diff(known) < 0):
        row = int(np.flatnonzero(~closed)[int(np.argmax(np.diff(known) < 0)) + 1])
        raise ValueError(f"arrival_s[{row}] = {table.arrival_s[row]}: expected rows sorted by arrival")
    _validate_nodes(table)
    return table


def _validate_nodes(table: RequestTable) -> None:
    m = len(table.node_end_tokens)
    if len(table.node_parent) != m:
        raise ValueError(f"node_parent has {len(table.node_parent)} rows, node_end_tokens has {m}")
    ends = np.concatenate([table.node_end_tokens, [0]])  # index -1 is the empty prefix
    parent = table.node_parent
    _require(table, "node_parent", (parent >= -1) & (parent < np.arange(m)), "-1 or a smaller node")
    _require(table, "node_end_tokens", table.node_end_tokens > ends[parent], "more than the parent node's end")
    for column in ("prefix_node", "own_node"):
        nodes = getattr(table, column)
        _require(table, column, (nodes >= NO_NODE) & (nodes < m), f"-1 or a node below {m}")
    _require(table, "prefix_node", ends[table.prefix_node] <= table.prompt_tokens, "a node no longer than the prompt")
    own = table.own_node >= 0
    parents = np.concatenate([table.node_parent, [-2]])[table.own_node]
    _require(table, "own_node", ~own | (parents == table.prefix_node), "a child of prefix_node")
    total = table.prompt_tokens.astype(np.int64) + table.output_tokens
    _require(table, "own_node", ~own | (ends[table.own_node] <= total), "a node no longer than prompt + output")


def _require(table: RequestTable, column: str, ok: NDArray[np.bool_], expected: str) -> None:
    if not ok.all():
        row = int(np.argmin(ok))
        raise ValueError(f"{column}[{row}] = {getattr(table, column)[row]}: expected {expected}")


def split(table: RequestTable, rows_per_part: int) -> Iterator[RequestTable]:
    """Cut an open-loop table without shared prefixes into consecutive parts (for streaming)."""
    if len(table.node_parent) or np.any(table.parent >= 0):
        raise ValueError("split: expected a table without sessions and shared prefixes")
    for start in range(0, len(table), rows_per_part):
        part = slice(start, start + rows_per_part)
        yield replace(table, **{key: getattr(table, key)[part] for key in _ROW_DTYPES})
