"""The dispatcher's approximate index of which prefixes each instance holds, fed by its own dispatches.

Content is named by nodes of a prefix tree with dense indices: the simulator has the tree of its workload, a dispatcher
interns the hashes of token blocks. Per instance a set of nodes, least recently used first out, bounded by the tokens
they stand for. It is approximate on purpose: it does not know what the engine evicted, nor when.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel

NIL = -1


@kernel
def _tokens(nodes: Any, node0: int, node: int) -> int:
    parent = nodes[node0 + node].parent
    return nodes[node0 + node].end_tokens - (nodes[node0 + parent].end_tokens if parent >= 0 else 0)


@kernel
def match(indexed: Any, indexed0: int, nodes: Any, node0: int, node: int) -> float:
    """Tokens of the sequence that ends with `node` which the index holds from its start.

    A node is touched whenever a descendant is, so a missing node's descendants are missing too: the deepest present one
    decides.
    """
    while node >= 0 and indexed[indexed0 + node].present == 0:
        node = nodes[node0 + node].parent
    return 0.0 if node < 0 else float(nodes[node0 + node].end_tokens)


@kernel
def _unlink(owner: Any, indexed: Any, indexed0: int, node: int) -> None:
    entry = indexed[indexed0 + node]
    if entry.previous == NIL:
        owner.index_head = entry.next
    else:
        indexed[indexed0 + entry.previous].next = entry.next
    if entry.next == NIL:
        owner.index_tail = entry.previous
    else:
        indexed[indexed0 + entry.next].previous = entry.previous


@kernel
def insert(
    owner: Any, view: Any, indexed: Any, indexed0: int, nodes: Any, node0: int, node: int, most_tokens: int
) -> None:
    """A request whose sequence ends with `node` was dispatched: its nodes become the most recently used.

    The deepest goes first when the index is full.
    `owner` keeps `index_head` and `index_tail` (oldest and newest), `view.indexed_tokens` the sum.
    """
    while node >= 0:
        entry = indexed[indexed0 + node]
        if entry.present != 0:
            _unlink(owner, indexed, indexed0, node)
        else:
            entry.present = 1
            view.indexed_tokens += _tokens(nodes, node0, node)
        entry.previous = owner.index_tail
        entry.next = NIL
        if owner.index_tail == NIL:
            owner.index_head = node
        else:
            indexed[indexed0 + owner.index_tail].next = node
        owner.index_tail = node
        node = nodes[node0 + node].parent
    while view.indexed_tokens > most_tokens and owner.index_head != NIL:
        oldest = owner.index_head
        _unlink(owner, indexed, indexed0, oldest)
        indexed[indexed0 + oldest].present = 0
        view.indexed_tokens -= _tokens(nodes, node0, oldest)
