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
