"""What must hold of a cluster at any time: nothing is lost, nothing is there twice. Checked outside the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from fleetpilot.cluster.state import HANDING_OVER, IDLE, NEVER, NIL, PROTOCOL_VLLM, State, as_records


def check(state: State, e: int = 0) -> None:
    """Check environment `e` between two events.

    Every request in the system is at exactly one place; on every instance the blocks that are free, unpinned, pinned by
    nodes and held privately are all of its blocks; no request has more tokens than it asked for.

    Raises:
        AssertionError: naming what is wrong.
    """
    s = as_records(state)
    env = s.env[e]
    places = Counter(_held(s, e))
    places.update(_list(s, env.returned_head))
    places.update(_list(s, env.prefilled_head))
    for g in range(env.instance0, env.instance0 + env.instances):
        places.update(_list(s, s.instance[g].head))
        places.update(_batch(s, g))
        places.update(_between(s, g))
        places.update(_pulls(s, g))
        _check_transfers(s, g)
        _check_blocks(s, g)
        _check_decodes(s, g)
    _check_shared_cache(s, e)
    if env.decision_slot != NIL and s.slot[env.decision_slot].instance == NIL:
        places[int(env.decision_slot)] = 1  # asked about now; held if it is asked again
    active = {int(i) for i in range(env.slot0, env.slot0 + env.used_slots) if s.slot[i].row != NIL}
    twice = [slot for slot, times in places.items() if times != 1]
    assert not twice, f"slot {twice[0]} is at {places[twice[0]]} places"
    assert set(places) == active, f"slots at no place or without a request: {sorted(set(places) ^ active)}"
    assert len(active) == env.active, f"{len(active)} requests in the system, counted {env.active}"


def _held(s: State, e: int) -> Iterator[int]:
    return _list(s, s.env[e].held_head if s.env[e].held > 0 else NIL)


def _check_shared_cache(s: State, e: int) -> None:
    env = s.env[e]
    if env.shared_cache == 0:
        return
    held = int(s.shared["blocks"][env.node0 : env.node0 + env.nodes].sum())
    assert held == env.shared_held_blocks, f"the shared cache holds {held} blocks, counted {env.shared_held_blocks}"
    assert held <= env.shared_capacity_blocks, f"the shared cache holds {held} of {env.shared_capacity_blocks} blocks"
    listed, node = set(), int(env.shared_head)
    while node != NIL:
        listed.add(node)
        node = int(s.shared[env.node0 + node].next)
    assert listed == set(np.flatnonzero(s.shared["blocks"][env.node0 : env.node0 + env.nodes]).tolist())


def _list(s: State, index: int) -> Iterator[int]:
    while index != NIL:
        yield int(index)
        index = s.slot[index].next


def _between(s: State, g: int) -> list[int]:
    """Requests that hold blocks on the instance and are not in its batch: stopped for a migration, or about to join."""
    inst = s.instance[g]
    stopped = inst.migration == g and s.migration[g].phase == HANDING_OVER
    return [*([int(s.migration[g].slot)] if stopped else []), *_list(s, inst.incoming)]


def _pulls(s: State, g: int) -> list[int]:
    """Requests whose KV the instance pulls, or has pulled and that are not in its batch."""
    slot0 = s.env[s.instance[g].env].slot0
    pulled = []
    index = int(s.instance[g].transfers)
    while index != NIL:
        pulled += [index] if index >= slot0 else []
        index = int(s.transfer[index].next)
    return [*pulled, *_list(s, s.instance[g].pulled)]


def _exports(s: State, g: int) -> list[int]:
    """Requests whose KV the instance holds until another one has pulled it."""
    env = s.env[s.instance[g].env]
    if env.transfers == 0:
        return []
    slots = range(env.slot0, env.slot0 + env.used_slots)
    return [i for i in slots if s.slot[i].row != NIL and s.transfer[i].source == g]


def _check_transfers(s: State, g: int) -> None:
    inst = s.instance[g]
    assert len(_pulls(s, g)) == inst.pulls, f"instance {g}: pulls {_pulls(s, g)}, counted {inst.pulls}"
    assert len(_exports(s, g)) == inst.exports, f"instance {g}: exports {_exports(s, g)}, counted {inst.exports}"
    if s.env[inst.env].pools != 0:
        remote = sum(s.transfer[index].source != NIL for index in _list(s, inst.head))
        assert remote == inst.remote, (
            f"instance {g}: {remote} waiting requests with KV elsewhere, counted {inst.remote}"
        )


def _copied_blocks(s: State, g: int) -> int:
    """Blocks that a copy in progress to the instance holds for itself (protocol `vllm`)."""
    source = s.instance[g].migration
    if source in (NIL, g) or s.migration[source].shadow == NIL:
        return 0
    shadow = s.slot[s.migration[source].shadow]
    return int(shadow.held_blocks - shadow.node_blocks)


def _batch(s: State, g: int) -> list[int]:
    inst = s.instance[g]
    return [int(s.batch[inst.batch0 + position].slot) for position in range(inst.in_batch)]


def _extents(s: State, g: int) -> Iterator[int]:
    """The free list of an instance: nodes, or ``-2 - slot`` for private tails."""
    inst = s.instance[g]
    extent = int(inst.lru_head)
    while extent != NIL:
        yield extent
        extent = int(s.residency[inst.residency0 + extent].next if extent >= 0 else s.slot[-2 - extent].lru_next)


def _check_blocks(s: State, g: int) -> None:
    inst, engine = s.instance[g], s.engine[g]
    unpinned = 0
    for extent in _extents(s, g):
        if extent >= 0:
            node = s.residency[inst.residency0 + extent]
            assert node.pins == 0, f"instance {g}: node {extent} is pinned and in the free list"
            assert node.blocks > 0, f"instance {g}: node {extent} is in the free list with no block"
            unpinned += int(node.blocks + node.dead_blocks)
        else:
            slot = s.slot[-2 - extent]
            assert slot.resident_blocks > 0, f"instance {g}: an empty private tail is in the free list"
            unpinned += int(slot.resident_blocks + slot.dead_blocks)
    assert unpinned == inst.lru_blocks, f"instance {g}: {unpinned} unpinned blocks, counted {inst.lru_blocks}"
    nodes = s.env[inst.env].nodes
    residency = s.residency[inst.residency0 : inst.residency0 + nodes]
    assert (residency["pins"] >= 0).all(), f"instance {g}: a node is pinned by less than nobody"
    pinned = int(residency["blocks"][residency["pins"] > 0].sum())
    private = sum(_held_blocks(s, g, position) for position in range(inst.in_batch))
    for index in _between(s, g):
        slot = s.slot[index]
        if s.env[inst.env].protocol == PROTOCOL_VLLM:
            continue  # it holds nothing any more
        private += -(-(int(slot.prompt_tokens + slot.generated) - 1) // int(engine.block_size)) - int(slot.node_blocks)
    private += int(inst.reserved_blocks) + _copied_blocks(s, g)
    private += sum(int(s.slot[index].held_blocks - s.slot[index].node_blocks) for index in _pulls(s, g))
    private += sum(int(s.transfer[index].held_blocks - s.transfer[index].node_blocks) for index in _exports(s, g))
    total = int(inst.free_blocks) + unpinned + pinned + private
    assert inst.free_blocks >= 0, f"instance {g}: {inst.free_blocks} free blocks"
    assert total == engine.kv_blocks, (
        f"instance {g}: {inst.free_blocks} free + {unpinned} unpinned + {pinned} pinned + {private} held "
        f"= {total} blocks, expected {engine.kv_blocks}"
    )


def _held_blocks(s: State, g: int, position: int) -> int:
    """Blocks that the request at this position of the batch holds for itself."""
    inst, size = s.instance[g], int(s.engine[g].block_size)
    entry = s.batch[inst.batch0 + position]
    slot = s.slot[entry.slot]
    if entry.finish_step == NEVER:
        return int(slot.held_blocks - slot.node_blocks)
    computed = int(slot.prompt_tokens + slot.generated + inst.steps_done) - 1
    stepping = inst.doing != IDLE and inst.decodes_in_leap > 0 and position < inst.sitting_out
    return -(-(computed + stepping) // size) - int(slot.node_blocks)


def _check_decodes(s: State, g: int) -> None:
    inst = s.instance[g]
    decodes = tokens = 0
    for position, index in enumerate(_batch(s, g)):
        slot = s.slot[index]
        if s.batch[inst.batch0 + position].finish_step != NEVER:
            generated = int(slot.generated + inst.steps_done)
            assert 0 < generated <= slot.output_tokens, f"row {slot.row}: {generated} tokens of {slot.output_tokens}"
            decodes += 1
            tokens += int(slot.prompt_tokens) + generated
    assert decodes == inst.decodes, f"instance {g}: {decodes} decodes, counted {inst.decodes}"
    assert tokens == inst.decode_tokens, f"instance {g}: {tokens} decode tokens, counted {inst.decode_tokens}"
