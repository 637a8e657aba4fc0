"""The tree of shared prompt prefixes, built from content blocks, and what a cache could gain from it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.table import NO_NODE, RequestTable

Nodes = NDArray[np.int32]


def prefix_tree(
    block_offsets: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    block_tokens: int,
    prompt_tokens: NDArray[np.int64],
) -> tuple[Nodes, NDArray[np.int64], Nodes, Nodes]:
    """The compressed tree of all prefixes that two or more requests share.

    Two prompts share a block if they share all blocks before it and the block has the same id in both. A last block
    that the prompt fills only in part is shared only with prompts that fill it equally far: an id stands for the
    content of its block, and in Mooncake's conversation trace the id of a partial block never comes back as that of a
    full one, nor at another length. Where a longer prompt does contain it, less than one block is missed.

    The tree splits where shared prefixes part or a prompt ends, and nowhere else.

    Args:
        block_offsets: (n + 1,) the ids of request r are ``block_ids[block_offsets[r]:block_offsets[r + 1]]``. None of
            them: nothing is known of its content, and it shares nothing.
        block_ids: content ids, in the order of the prompt.
        block_tokens: tokens per block.
        prompt_tokens: (n,) lengths of the prompts. There may be fewer blocks than the prompt has (what follows is not
            shared), but not more than ``ceil(prompt / block_tokens)``.

    Returns:
        ``node_parent`` (m,), ``node_end_tokens`` (m,), ``prefix_node`` (n,) and ``own_node`` (n,) of `RequestTable`.
        Nodes are numbered by the first request that runs through them, parents first. ``own_node`` is -1 throughout:
        block ids are those of prompts and tell nothing about what was generated.

    Raises:
        ValueError: if a request has more blocks than its prompt.
    """
    n = len(prompt_tokens)
    counts = np.diff(block_offsets)
    most = -(-prompt_tokens // block_tokens)
    if np.any(counts > most):
        row = int(np.argmax(counts > most))
        raise ValueError(
            f"request {row}: {counts[row]} blocks of {block_tokens} tokens: "
            f"expected at most {most[row]} for its {prompt_tokens[row]} prompt tokens"
        )
    symbols = _distinguish_partial_blocks(block_offsets, block_ids, block_tokens, prompt_tokens)
    lists = [symbols[start:end] for start, end in pairwise(block_offsets)]
    # Big-endian bytes compare like the lists themselves, and in C.
    keys = [part.astype(">i8").tobytes() for part in lists]
    order = sorted((row for row in range(n) if len(lists[row])), key=keys.__getitem__)

    shared = [0] + [_common_length(lists[a], lists[b]) for a, b in pairwise(order)] + [0]
    depth, parent, node_of_row, first_row = _nodes_of_sorted(order, shared, n)

    # Canonical numbers: they depend on what is shared, not on the ids that say so.
    numbering = np.lexsort((depth, first_row))
    new_number = np.empty(len(numbering) + 1, np.int64)
    new_number[numbering] = np.arange(len(numbering))
    new_number[-1] = NO_NODE
    end_tokens = np.minimum(
        depth * block_tokens, prompt_tokens[first_row]
    )  # equal for all, if the last block is partial
    return (
        new_number[parent][numbering].astype(np.int32),
        end_tokens[numbering],
        new_number[node_of_row].astype(np.int32),
        np.full(n, NO_NODE, np.int32),
    )


def _distinguish_partial_blocks(
    block_offsets: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    block_tokens: int,
    prompt_tokens: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Symbols from 0 that are equal exactly where the ids and the tokens covered of the block are equal."""
    covered = np.full(len(block_ids), block_tokens, np.int64)
    partial = np.diff(block_offsets) * block_tokens > prompt_tokens
    covered[block_offsets[1:][partial] - 1] = prompt_tokens[partial] % block_tokens
    by_id = np.unique(block_ids, return_inverse=True)[1].astype(np.int64)
    return by_id * (block_tokens + 1) + covered


def _common_length(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many leading elements two arrays have in common."""
    short = min(len(a), len(b))
    differ = a[:short] != b[:short]
    first = int(differ.argmax()) if short else 0
    return first if short and differ[first] else short


def _nodes_of_sorted(
    order: list[int], shared: list[int], n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The nodes above lists in lexicographic order, from what neighbours share (the LCP-interval tree).

    Args:
        order: rows in lexicographic order of their lists.
        shared: (len(order) + 1,) blocks that neighbours have in common; 0 at both ends.
        n: number of rows.

    Returns:
        ``depth`` (m,) in blocks, ``parent`` (m,), ``node_of_row`` (n,) and ``first_row`` (m,), the smallest row below
        a node.
    """
    depth: list[int] = []
    parent: list[int] = []
    first_row: list[int] = []
    node_of_row = np.full(n, NO_NODE, np.int64)
    open_nodes: list[int] = []  # the path that the neighbours to come may still share
    for row, left, right in zip(order, shared, shared[1:], strict=False):
        if right > left:
            parent.append(open_nodes[-1] if open_nodes else NO_NODE)
            open_nodes.append(len(depth))
            depth.append(right)
            first_row.append(row)
        if open_nodes:
            node_of_row[row] = open_nodes[-1]
            first_row[open_nodes[-1]] = min(first_row[open_nodes[-1]], row)
        while open_nodes and depth[open_nodes[-1]] > right:
            closed = open_nodes.pop()
            above = depth[open_nodes[-1]] if open_nodes else 0
            if above < right:  # the neighbours to come share less than this node, but more than the one above
                parent.append(parent[closed])
                open_nodes.append(len(depth))
                parent[closed] = len(depth)
                depth.append(right)
                first_row.append(first_row[closed])
            elif parent[closed] >= 0:
                first_row[parent[closed]] = min(first_row[parent[closed]], first_row[closed])
    return np.array(depth, np.int64), np.array(parent, np.int64), node_of_row, np.array(first_row, np.int64)


def infinite_cache_hit(table: RequestTable, block_tokens: int = 1) -> float:
    """Share of the prompts' blocks that a cache of infinite size would hold when each request arrives.

    Requests count in the order of the table, and what an earlier one had is in the cache at once, so this is the bound
    that no cache and no routing can beat. A block is hit if all its tokens are; the partial last block of a prompt
    counts as one.

    Args:
        table: the requests.
        block_tokens: size of the blocks to count in; 1 gives the share of prompt tokens.

    Returns:
        A share in [0, 1]; 0.0 for an empty table.
    """
    prompt = table.prompt_tokens.astype(np.int64)
    shared = _seen_before_tokens(table)
    blocks = -(-prompt // block_tokens)
    hits = np.where(shared == prompt, blocks, shared // block_tokens)
    return float(hits.sum() / blocks.sum()) if len(table) else 0.0


def _seen_before_tokens(table: RequestTable) -> NDArray[np.int64]:
    """(n,) leading prompt tokens of each request that some request above it in the table had already."""
    n = len(table)
    rows = np.arange(n)
    parent = np.append(table.node_parent, NO_NODE)
    end_tokens = np.append(table.node_end_tokens, 0)
    first = np.full(len(parent), n)  # the entry behind the last node stands for "no node" (index -1)
    np.minimum.at(first, np.where(table.own_node >= 0, table.own_node, table.prefix_node), rows)
    for node in range(len(table.node_parent) - 1, -1, -1):
        first[parent[node]] = min(first[parent[node]], first[node])
    first[-1] = -1  # the empty prefix is always there
    known = table.prefix_node.astype(np.int64)
    while np.any(unseen := first[known] >= rows):
        known[unseen] = parent[known[unseen]]
    tokens: NDArray[np.int64] = np.minimum(end_tokens[known], table.prompt_tokens)
    return tokens
