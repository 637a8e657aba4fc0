"""A store of KV blocks behind the caches of all instances: what it holds, and what is dropped (docs/model.md).

It knows the nodes of the prefix tree, as the instances' own caches do: of each the first blocks. A node's blocks were
stored or loaded last at a time; the list runs from the longest unused node to the one used last.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.cluster.memory import node_at, residency_at, shared_at, update_at
from fleetpilot.cluster.prefix_cache import leaf, shared_blocks, start_block
from fleetpilot.cluster.state import NIL
from fleetpilot.fleet.jit import inlined, kernel


@inlined
def _leave_list(s: Any, env: Any, node: int) -> None:
    here = shared_at(s, env.node0 + node)
    if here.previous == NIL:
        env.shared_head = here.next
    else:
        shared_at(s, env.node0 + here.previous).next = here.next
    if here.next == NIL:
        env.shared_tail = here.previous
    else:
        shared_at(s, env.node0 + here.next).previous = here.previous


@inlined
def _join_list(s: Any, env: Any, node: int) -> None:
    here = shared_at(s, env.node0 + node)
    here.previous = env.shared_tail
    here.next = NIL
    if env.shared_tail == NIL:
        env.shared_head = node
    else:
        shared_at(s, env.node0 + env.shared_tail).next = node
    env.shared_tail = node


@kernel
def _drop(s: Any, env: Any, blocks: int) -> None:
    """Drop so many of the last blocks of the node that is unused for longest."""
    node = env.shared_head
    here = shared_at(s, env.node0 + node)
    here.blocks -= blocks
    env.shared_held_blocks -= blocks
    if here.blocks == 0:
        _leave_list(s, env, node)


@kernel
def _expire(s: Any, env: Any, time_s: float) -> None:
    """Forget what a model update has made worthless by now, and what nobody has used for too long."""
    updated = False
    while env.next_update < env.updates and update_at(s, env.update0 + env.next_update).time_s <= time_s:
        env.next_update += 1
        updated = True
    while env.shared_head != NIL:
        head = shared_at(s, env.node0 + env.shared_head)
        if not updated and head.used_s + env.shared_ttl_s > time_s:
            break
        _drop(s, env, head.blocks)


@inlined
def _use(s: Any, env: Any, node: int, time_s: float) -> None:
    """The node's blocks are the last that are dropped."""
    _leave_list(s, env, node)
    _join_list(s, env, node)
    shared_at(s, env.node0 + node).used_s = time_s


@kernel
def store(s: Any, env: Any, inst: Any, slot: Any, tokens: int, block_size: int, time_s: float) -> None:
    """The first `tokens` tokens of the request's sequence are computed: keep their full blocks, those of nodes."""
    _expire(s, env, time_s)
    node = leaf(slot)
    while node >= 0:  # from the deepest up, so that the beginning is dropped last
        here = shared_at(s, env.node0 + node)
        first = start_block(s, inst, node, block_size)
        full = min(tokens, node_at(s, inst.node0 + node).end_tokens) // block_size - first
        if full > 0:
            if here.blocks == 0:
                _join_list(s, env, node)
            env.shared_held_blocks += max(0, full - here.blocks)
            here.blocks = max(here.blocks, full)
            _use(s, env, node, time_s)
        node = node_at(s, inst.node0 + node).parent
    while env.shared_held_blocks > env.shared_capacity_blocks:
        most = shared_at(s, env.node0 + env.shared_head).blocks
        _drop(s, env, min(most, env.shared_held_blocks - env.shared_capacity_blocks))


@kernel
def reach(s: Any, env: Any, inst: Any, slot: Any, block_size: int, cap: int, time_s: float) -> int:
    """So many of the sequence's first blocks, at most `cap`, are there once what the instance lacks is loaded."""
    _expire(s, env, time_s)
    blocks = shared_blocks(s, inst, slot, block_size)
    node = leaf(slot)
    while node >= 0:
        first = start_block(s, inst, node, block_size)
        span = node_at(s, inst.node0 + node).end_tokens // block_size - first
        held = max(shared_at(s, env.node0 + node).blocks, residency_at(s, inst.residency0 + node).blocks)
        if held < span:
            blocks = first + held
        node = node_at(s, inst.node0 + node).parent
    return min(blocks, cap)


@kernel
def load(s: Any, env: Any, inst: Any, slot: Any, block_size: int, matched: int, blocks: int, time_s: float) -> None:
    """The blocks between `matched` and `blocks` are loaded: they are used now."""
    node = leaf(slot)
    while node >= 0:
        first = start_block(s, inst, node, block_size)
        span = node_at(s, inst.node0 + node).end_tokens // block_size - first
        if first < blocks and first + span > matched and shared_at(s, env.node0 + node).blocks > 0:
            _use(s, env, node, time_s)
        node = node_at(s, inst.node0 + node).parent
