"""Which blocks of content an instance holds: matching, pinning, filling, and the free list in the order of eviction.

Content is named by the prefix tree (docs/model.md). Since the tail of a sequence is always evicted before its head,
what is resident of a node is a count of its first blocks, and the free list need not hold single blocks: it is a list
of *extents* - the resident blocks of an unpinned node, or the private tail of a preempted request - each followed by
a number of dead blocks that nobody can match. Dead blocks in front of the first extent are simply free.

An extent is named by its node's index, or by ``-2 - slot`` for a private tail; `NIL` is no extent.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.cluster.memory import node_at, residency_at, slot_at
from fleetpilot.cluster.state import NIL
from fleetpilot.fleet.jit import inlined, kernel


@inlined
def start_block(s: Any, inst: Any, node: int, block_size: int) -> int:
    """The first block of a sequence that belongs to the node (0-based): where its parent ends."""
    parent = node_at(s, inst.node0 + node).parent
    return 0 if parent < 0 else node_at(s, inst.node0 + parent).end_tokens // block_size


@inlined
def leaf(slot: Any) -> int:
    """The deepest node of the request's sequence, or NIL."""
    return slot.own_node if slot.own_node >= 0 else slot.prefix_node


@inlined
def shared_blocks(s: Any, inst: Any, slot: Any, block_size: int) -> int:
    """How many of the sequence's first blocks belong to nodes; the rest is its private tail."""
    node = leaf(slot)
    return 0 if node < 0 else node_at(s, inst.node0 + node).end_tokens // block_size


@kernel
def match(s: Any, inst: Any, slot: Any, block_size: int, cap: int) -> tuple[int, int]:
    """Blocks of the sequence that are resident from its start, at most `cap`.

    Also how many of them pinning would take out of the free list.
    """
    node = leaf(slot)
    matched = shared_blocks(s, inst, slot, block_size)
    complete = True
    while node >= 0:
        first = start_block(s, inst, node, block_size)
        here = residency_at(s, inst.residency0 + node)
        if here.blocks < node_at(s, inst.node0 + node).end_tokens // block_size - first:
            matched = first + here.blocks
            complete = False
        node = node_at(s, inst.node0 + node).parent
    private = slot.resident_blocks if complete else 0
    matched = min(matched + private, cap)
    unpinned = private
    node = leaf(slot)
    while node >= 0:
        here = residency_at(s, inst.residency0 + node)
        if here.pins == 0:
            unpinned += max(0, min(here.blocks, matched - start_block(s, inst, node, block_size)))
        node = node_at(s, inst.node0 + node).parent
    return matched, unpinned


@kernel
def fill(s: Any, inst: Any, slot: Any, tokens: int, block_size: int) -> None:
    """Blocks of the first `tokens` tokens were computed: those that a node lacks become resident in it."""
    full = tokens // block_size
    node = leaf(slot)
    while node >= 0:
        first = start_block(s, inst, node, block_size)
        if first < full:
            here = residency_at(s, inst.residency0 + node)
            filled = min(full, node_at(s, inst.node0 + node).end_tokens // block_size) - first
            if filled > here.blocks:
                slot.node_blocks += filled - here.blocks
                here.blocks = filled
        node = node_at(s, inst.node0 + node).parent


@inlined
def _get_links(s: Any, inst: Any, extent: int) -> tuple[int, int]:
    if extent >= 0:
        here = residency_at(s, inst.residency0 + extent)
        return here.previous, here.next
    slot = slot_at(s, -2 - extent)
    return slot.lru_previous, slot.lru_next


@inlined
def _set_next(s: Any, inst: Any, extent: int, following: int) -> None:
    if extent == NIL:
        inst.lru_head = following
    elif extent >= 0:
        residency_at(s, inst.residency0 + extent).next = following
    else:
        slot_at(s, -2 - extent).lru_next = following


@inlined
def _set_previous(s: Any, inst: Any, extent: int, preceding: int) -> None:
    if extent == NIL:
        inst.lru_tail = preceding
    elif extent >= 0:
        residency_at(s, inst.residency0 + extent).previous = preceding
    else:
        slot_at(s, -2 - extent).lru_previous = preceding


@inlined
def _add_dead(s: Any, inst: Any, extent: int, blocks: int) -> None:
    """Put dead blocks behind an extent, or (NIL) in front of all."""
    if extent == NIL:
        inst.free_blocks += blocks
        return
    inst.lru_blocks += blocks
    if extent >= 0:
        residency_at(s, inst.residency0 + extent).dead_blocks += blocks
    else:
        slot_at(s, -2 - extent).dead_blocks += blocks


@inlined
def append_dead(s: Any, inst: Any, blocks: int) -> None:
    """Blocks that nobody can match go to the end of the free list."""
    if blocks > 0:
        _add_dead(s, inst, inst.lru_tail, blocks)


@kernel
def append_extent(s: Any, inst: Any, extent: int, blocks: int) -> None:
    """Resident blocks that nobody pins go to the end of the free list."""
    tail = inst.lru_tail
    _set_next(s, inst, tail, extent)
    _set_previous(s, inst, extent, tail)
    _set_next(s, inst, extent, NIL)
    inst.lru_tail = extent
    inst.lru_blocks += blocks


@kernel
def remove_extent(s: Any, inst: Any, extent: int) -> None:
    """Take an extent out of the free list; the dead blocks behind it stay in their place."""
    preceding, following = _get_links(s, inst, extent)
    _set_next(s, inst, preceding, following)
    _set_previous(s, inst, following, preceding)
    if extent >= 0:
        here = residency_at(s, inst.residency0 + extent)
        blocks = here.blocks
        dead = here.dead_blocks
        here.dead_blocks = 0
    else:
        slot = slot_at(s, -2 - extent)
        blocks = slot.resident_blocks
        dead = slot.dead_blocks
        slot.dead_blocks = 0
    inst.lru_blocks -= blocks + dead
    if dead > 0:
        _add_dead(s, inst, preceding, dead)


@kernel
def rename_extent(s: Any, inst: Any, slot_index: int, new_index: int) -> None:
    """The private tail of one slot becomes that of another, at its place in the free list."""
    preceding, following = _get_links(s, inst, -2 - slot_index)
    _set_next(s, inst, preceding, -2 - new_index)
    _set_previous(s, inst, following, -2 - new_index)
    slot_at(s, new_index).lru_previous = preceding
    slot_at(s, new_index).lru_next = following


@kernel
def evict(s: Any, inst: Any, blocks: int) -> None:
    """Turn at least `blocks` blocks from the front of the free list into blocks that hold nothing."""
    while inst.free_blocks < blocks:
        extent = inst.lru_head
        missing = blocks - inst.free_blocks
        if extent >= 0:
            here = residency_at(s, inst.residency0 + extent)
            taken = min(missing, here.blocks)
            here.blocks -= taken
            empty = here.blocks == 0
        else:
            slot = slot_at(s, -2 - extent)
            taken = min(missing, slot.resident_blocks)
            slot.resident_blocks -= taken
            empty = slot.resident_blocks == 0
        inst.lru_blocks -= taken
        inst.free_blocks += taken
        if empty:
            remove_extent(s, inst, extent)


@kernel
def pin(s: Any, inst: Any, slot_index: int, matched: int, block_size: int) -> None:
    """Pin the nodes of the request's sequence, and take back its private tail.

    What lies beyond the match is dropped where nobody else pins it: the request fills it again.
    """
    slot = slot_at(s, slot_index)
    slot.node_blocks = min(matched, shared_blocks(s, inst, slot, block_size))
    node = leaf(slot)
    while node >= 0:
        here = residency_at(s, inst.residency0 + node)
        if here.pins == 0 and here.blocks > 0:
            remove_extent(s, inst, node)
            surplus = here.blocks - max(0, min(here.blocks, matched - start_block(s, inst, node, block_size)))
            here.blocks -= surplus
            inst.free_blocks += surplus
        here.pins += 1
        node = node_at(s, inst.node0 + node).parent
    if slot.resident_blocks > 0:
        remove_extent(s, inst, -2 - slot_index)
        inst.free_blocks += slot.resident_blocks - (matched - slot.node_blocks)
        slot.resident_blocks = 0


@kernel
def unpin(s: Any, inst: Any, slot: Any) -> None:
    """Unpin the nodes of the request's sequence, the deepest first."""
    node = leaf(slot)
    while node >= 0:
        here = residency_at(s, inst.residency0 + node)
        here.pins -= 1
        if here.pins == 0 and here.blocks > 0:
            append_extent(s, inst, node, here.blocks)
        node = node_at(s, inst.node0 + node).parent
