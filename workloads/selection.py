"""Some rows of a table, with what they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.table import RequestTable


def select(
    table: RequestTable,
    rows: NDArray[Any],
    *,
    start_s: float = 0.0,
    name: str | None = None,
) -> RequestTable:
    """Some rows of a table on a clock that starts at `start_s`, with the part of the prefix tree that they use.

    A turn whose parent is left out stands on its own; that needs an arrival of its own.

    Args:
        table: is left as it is.
        rows: a mask, or increasing indices.
        start_s: what becomes 0 s.
        name: of the new table; the old one's by default.
    """
    kept = np.arange(len(table))[rows]
    row_of = np.full(len(table) + 1, -1)  # index -1 is no parent
    row_of[kept] = np.arange(len(kept))
    columns = {name: column[kept] for name, column in row_columns(table).items()}
    nodes = _used_nodes(table, kept)
    node_of = np.full(len(table.node_parent) + 1, -1)
    node_of[nodes] = np.arange(len(nodes))
    columns["arrival_s"] = columns["arrival_s"] - start_s
    columns["parent"] = row_of[columns["parent"]]
    for column in ("prefix_node", "own_node"):
        columns[column] = node_of[columns[column]].astype(np.int32)
    return replace(
        table,
        name=table.name if name is None else name,
        **columns,
        node_parent=node_of[table.node_parent[nodes]].astype(np.int32),
        node_end_tokens=table.node_end_tokens[nodes],
    )


def offered_s(table: RequestTable) -> NDArray[np.float64]:
    """(n,) when each request was offered: its arrival, or in a closed loop that of the turn which started the chain.

    A closed-loop turn's own arrival depends on the policy, its chain's start does not: so all turns of the chains that
    started in the window are scored, reached or not.
    """
    start = table.arrival_s.copy()
    for row in np.flatnonzero(np.isnan(start)):  # a parent is a smaller row, so it is known already
        start[row] = start[table.parent[row]]
    return start


def equal_windows(table: RequestTable, windows: int) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
    """(n,) when each request was offered, (n,) the window that is in, and the length of a window."""
    if windows < 1:
        raise ValueError(f"segments = {windows}: expected at least 1")
    offered = offered_s(table)
    length_s = table.span_s / windows
    if not length_s:
        return offered, np.zeros(len(table), np.int64), 0.0
    return offered, np.minimum((offered / length_s).astype(np.int64), windows - 1), length_s


def superpose(table: RequestTable, windows: int) -> RequestTable:
    """Lay a trace's consecutive windows of equal length over each other: so many times its rate, in its own time.

    Shared prefixes stay shared. A turn with an arrival of its own stands alone if its parent is in another window.
    """
    offered, window, length_s = equal_windows(table, windows)
    shift_s = window * length_s
    order = np.argsort(offered - shift_s, kind="stable")
    row_of = np.full(len(table) + 1, -1)  # index -1 is no parent
    row_of[order] = np.arange(len(table))
    together = window[table.parent] == window
    parent = np.where(together, row_of[table.parent], -1)[order]
    columns = {name: column[order] for name, column in row_columns(table).items()}
    columns |= {"arrival_s": (table.arrival_s - shift_s)[order], "parent": parent}
    return table.replace(name=f"{windows} x {table.name}", **columns)


def within_length(table: RequestTable, max_total_tokens: int) -> RequestTable:
    """The requests of at most so many tokens, prompt and output; what a left-out turn releases goes with it."""
    fits = table.prompt_tokens.astype(np.int64) + table.output_tokens <= max_total_tokens
    for row in np.flatnonzero(np.isnan(table.arrival_s)):  # a parent is a smaller row
        fits[row] &= fits[table.parent[row]]
    return table if fits.all() else select(table, fits)


def row_columns(table: RequestTable) -> dict[str, Any]:
    """The columns with one entry per request, by name."""
    arrays = {name: value for name, value in vars(table).items() if isinstance(value, np.ndarray)}
    return {name: array for name, array in arrays.items() if not name.startswith("node_")}


def _used_nodes(table: RequestTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nodes that rows run through: their own and all above them."""
    used = np.zeros(len(table.node_parent) + 1, bool)
    used[-1] = True  # no node
    level = np.concatenate([table.prefix_node[rows], table.own_node[rows]])
    while len(level := np.unique(level[~used[level]])):
        used[level] = True
        level = table.node_parent[level]
    return np.flatnonzero(used[:-1])
