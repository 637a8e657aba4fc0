"""Columns that link rows to each other: sessions, and the prefixes that prompts share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.prefix_tree import prefix_tree
from fleetpilot.workloads.readers.source import TraceRows
from fleetpilot.workloads.table import NO_NODE, NO_PARENT

Ints = NDArray[np.int64]


def loop_heads(parent: Ints, open_loop: NDArray[np.bool_]) -> Ints:
    """(n,) the row whose arrival starts the closed loop that a row is in: itself, if it has one of its own."""
    heads = np.where(open_loop, np.arange(len(parent)), parent)
    while not np.array_equal(nextloop_heads := heads[heads], heads):
        heads = nextloop_heads
    return heads


def session_columns(
    rows: TraceRows, order: Ints, parent: Ints, think_s: NDArray[np.float64]
) -> tuple[dict[str, NDArray[Any]], int]:
    """Session columns of the rows in ``order``, with links to the nearest ancestor that is among them.

    A closed-loop row whose ancestors are all gone arrives when its session starts; the think times of closed-loop rows
    between it and the ancestor that is left are kept.

    Returns:
        The columns, and how many links were cut because they led to a row that comes later.
    """
    place = np.full(len(rows) + 1, NO_PARENT)  # the last entry is that of "no parent"
    place[order] = np.arange(len(order))
    ancestor, waits = parent[order], think_s[order]
    while np.any(gone := (ancestor >= 0) & (place[ancestor] < 0)):
        closed = gone & ~np.isnan(waits)
        waits[closed] += think_s[ancestor[closed]]  # NaN, an arrival of its own, if the head of the loop is gone
        ancestor[gone] = parent[ancestor[gone]]
    links = place[ancestor]
    late = links >= np.arange(len(order))
    links[late] = NO_PARENT
    columns = {
        "session": np.array(rows.session, np.int64)[order],
        "turn": np.array(rows.turn, np.int64)[order],
        "parent": links,
        "think_s": waits,
    }
    return columns, int(late.sum())


def prefix_columns(rows: TraceRows, order: Ints, parent: Ints, prompt: Ints, output: Ints) -> dict[str, NDArray[Any]]:
    """The prefix tree of the rows in ``order`` and their places in it."""
    n = len(order)
    node_parent, node_end_tokens = np.empty(0, np.int32), np.empty(0, np.int64)
    prefix_node = own_node = np.full(n, NO_NODE, np.int32)
    if rows.block_tokens is not None:
        offsets, ids = _blocks_in_order(rows, order, prompt, rows.block_tokens)
        node_parent, node_end_tokens, prefix_node, own_node = prefix_tree(offsets, ids, rows.block_tokens, prompt)
    if rows.grows:
        node_parent, node_end_tokens, prefix_node, own_node = _grow(
            node_parent, node_end_tokens, prefix_node, parent, prompt, output
        )
    return {
        "node_parent": node_parent,
        "node_end_tokens": node_end_tokens,
        "prefix_node": prefix_node,
        "own_node": own_node,
    }


def _blocks_in_order(rows: TraceRows, order: Ints, prompt: Ints, block_tokens: int) -> tuple[Ints, Ints]:
    """Offsets and content ids of the rows in ``order``, without the blocks that truncation has cut off."""
    offsets, ids = np.array(rows.block_offsets, np.int64), np.array(rows.block_ids, np.int64)
    counts = np.minimum(np.diff(offsets)[order], -(-prompt // block_tokens))
    new_offsets = np.concatenate([[0], np.cumsum(counts)])
    return new_offsets, ids[np.repeat(offsets[order] - new_offsets[:-1], counts) + np.arange(new_offsets[-1])]


def _grow(
    node_parent: NDArray[np.int32],
    node_end_tokens: Ints,
    prefix_node: NDArray[np.int32],
    parent: Ints,
    prompt: Ints,
    output: Ints,
) -> tuple[NDArray[np.int32], Ints, NDArray[np.int32], NDArray[np.int32]]:
    """Let every row that has a parent start with the parent's prompt and output, as far as its prompt reaches."""
    parents, ends = node_parent.tolist(), node_end_tokens.tolist()
    prefix, own = prefix_node.copy(), np.full(len(prefix_node), NO_NODE, np.int32)
    continued = set(parent[parent >= 0].tolist())
    for row in range(len(prefix)):
        if parent[row] >= 0:
            node = int(own[parent[row]])
            while node >= 0 and ends[node] > prompt[row]:
                node = parents[node]
            prefix[row] = node
        if row in continued:
            own[row] = len(ends)
            parents.append(int(prefix[row]))
            ends.append(int(prompt[row] + output[row]))
    return np.array(parents, np.int32), np.array(ends, np.int64), prefix, own
