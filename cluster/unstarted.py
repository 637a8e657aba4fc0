"""An instance's requests without a token since they were dispatched to it, oldest first: the dispatcher's own list."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster.memory import slot_at
from fleetpilot.cluster.state import NIL
from fleetpilot.fleet import ledger
from fleetpilot.fleet.jit import inlined


@inlined
def enter_unstarted(s: Any, inst: Any, view: Any, index: int) -> None:
    """The request was dispatched."""
    slot = slot_at(s, index)
    slot.unstarted_next = NIL
    slot.unstarted_previous = inst.unstarted_tail
    if inst.unstarted_tail == NIL:
        inst.unstarted_head = index
    else:
        slot_at(s, inst.unstarted_tail).unstarted_next = index
    inst.unstarted_tail = index
    slot.unstarted = 1
    _update_head(s, inst, view)


@inlined
def leave_unstarted(s: Any, inst: Any, view: Any, slot: Any) -> None:
    """Its first token came, or it left."""
    if slot.unstarted_previous == NIL:
        inst.unstarted_head = slot.unstarted_next
    else:
        slot_at(s, slot.unstarted_previous).unstarted_next = slot.unstarted_next
    if slot.unstarted_next == NIL:
        inst.unstarted_tail = slot.unstarted_previous
    else:
        slot_at(s, slot.unstarted_next).unstarted_previous = slot.unstarted_previous
    slot.unstarted = 0
    _update_head(s, inst, view)


@inlined
def _update_head(s: Any, inst: Any, view: Any) -> None:
    if inst.unstarted_head == NIL:
        view.head_prompt_blocks = 0.0
    else:
        head = slot_at(s, inst.unstarted_head)
        view.head_prompt_blocks = np.ceil((head.prompt_tokens + head.restart_tokens) / view.block_size)
    ledger.stock_load(view)
