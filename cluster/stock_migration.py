"""Live migration on stock vLLM: probe, copy into the prefix cache, abort, re-admit (docs/model.md, protocol `vllm`).

The copy lies at the destination under a slot of its own, the *shadow*: blocks of nobody that may be evicted, as the
private tail of a preempted request. When the request is re-admitted the shadow's blocks are its own.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.cluster import prefix_cache
from fleetpilot.cluster.kv_cache import available_blocks, release, take
from fleetpilot.cluster.memory import engine_at, instance_at, migration_at, slot_at
from fleetpilot.cluster.state import NIL
from fleetpilot.fleet.jit import inlined, kernel


@kernel
def take_shadow(s: Any, g: int, index: int) -> None:
    """The shadow of the migration from `g`, a slot that is kept for it, is that of this request now."""
    slot, copy = slot_at(s, index), slot_at(s, g)
    copy.prefix_node = slot.prefix_node
    copy.own_node = slot.own_node
    copy.held_blocks = 0
    copy.node_blocks = 0
    copy.resident_blocks = 0
    copy.dead_blocks = 0
    migration_at(s, g).shadow = g


@kernel
def drop_shadow(s: Any, g: int) -> None:
    """The copy of the migration from `g` is wanted no more: the blocks of nodes stay cached, the others are free."""
    migration = migration_at(s, g)
    shadow = migration.shadow
    copy = slot_at(s, shadow)
    other, engine = instance_at(s, migration.destination), engine_at(s, migration.destination)
    if copy.held_blocks > 0:
        have_tokens = migration.copied_blocks * engine.block_size
        release(s, other, engine, shadow, have_tokens, copy.held_blocks, True)
        copy.held_blocks = 0
    if copy.resident_blocks > 0:
        prefix_cache.remove_extent(s, other, -2 - shadow)
        other.free_blocks += copy.resident_blocks
        copy.resident_blocks = 0
    migration.shadow = NIL


@kernel
def begin_copy(s: Any, g: int, blocks: int) -> bool:
    """Take the blocks at the destination that it does not hold of the first `blocks`; False if they are not free."""
    migration = migration_at(s, g)
    shadow = migration.shadow
    copy = slot_at(s, shadow)
    other, engine = instance_at(s, migration.destination), engine_at(s, migration.destination)
    matched, unpinned = prefix_cache.match(s, other, copy, engine.block_size, blocks)
    if blocks - matched + unpinned > available_blocks(other):
        return False
    prefix_cache.pin(s, other, shadow, matched, engine.block_size)
    take(s, other, blocks - matched)
    copy.held_blocks = blocks
    migration.copied_blocks = matched
    return True


@kernel
def end_copy(s: Any, g: int) -> None:
    """The destination has pulled the blocks and computed the one token that it was asked for."""
    migration = migration_at(s, g)
    copy = slot_at(s, migration.shadow)
    other, engine = instance_at(s, migration.destination), engine_at(s, migration.destination)
    tokens = copy.held_blocks * engine.block_size
    release(s, other, engine, migration.shadow, tokens, copy.held_blocks, True)
    copy.held_blocks = 0
    if other.in_batch > 0 or other.waiting > 0 or other.incoming != NIL or other.pulls > 0:
        ask_for_one_token(other, tokens)


@inlined
def ask_for_one_token(inst: Any, context_tokens: int) -> None:
    """The next iteration computes one token more, of a request that ends with it."""
    inst.guest_tokens += 1
    inst.guest_attention += context_tokens + 0.5


@kernel
def hand_shadow_over(s: Any, g: int) -> None:
    """What is left of the copy is the request's own now."""
    migration = migration_at(s, g)
    slot, copy = slot_at(s, migration.slot), slot_at(s, migration.shadow)
    slot.resident_blocks = copy.resident_blocks
    slot.dead_blocks = copy.dead_blocks
    if copy.resident_blocks > 0:
        prefix_cache.rename_extent(s, instance_at(s, migration.destination), migration.shadow, migration.slot)
    migration.shadow = NIL
