"""A policy that scales when a test says so."""

from __future__ import annotations

from typing import Any

import numpy as np
from scripted import until

from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    STATE_DRAINING,
    Decision,
    FleetView,
)

PROMPT = [1, 2, 3, 4]
TOKENS = 300
QUICK: dict[str, Any] = {
    "port": 0,
    "profile": "tiny-cpu",
    "poll_interval_s": 0.02,
    "rebalance_interval_s": 0.05,
    "decision_deadline_s": 30.0,
    "scale_interval_s": 0.02,
    "scale_out_cooldown_s": 0.0,
    "scale_in_cooldown_s": 0.0,
    "scale_in_load": 1.0,
}
"""Settings of a dispatcher that asks often, and knows no cooldown."""


class Told:
    """A policy that scales on cue, once; moves what drains; sends a request where the fewest are, the last of those.

    Attributes:
        next: state of the instance that the next decision on SCALE chooses, the last such candidate; None for none.
        first: whether it is the first such candidate instead.
        every: whether it chooses such a one for good.
        offered: states of the candidates of the last decision on SCALE.
        seen: states of all instances then.
    """

    name = "told"

    def __init__(self, *, moves: bool = True):
        self.kinds = (KIND_DISPATCH, KIND_SCALE, *((KIND_SOURCE, KIND_DESTINATION) if moves else ()))
        self.next: int | None = None
        self.first = False
        self.every = False
        self.offered: list[int] = []
        self.seen: list[int] = []

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        instances = view.instances[0]
        candidates = instances[instances["candidate"] != 0]
        kind = view.fleet["kind"][0]
        if kind == KIND_DISPATCH:
            choice = candidates["slot"][::-1][np.argmin(candidates["in_flight"][::-1])]
        elif kind == KIND_DESTINATION:
            choice = candidates["slot"][0]
        else:
            if kind == KIND_SCALE:
                self.offered, self.seen = candidates["state"].tolist(), instances["state"].tolist()
            wanted = STATE_DRAINING if kind == KIND_SOURCE else self.next
            slots = candidates["slot"][candidates["state"] == wanted] if wanted is not None else []
            choice = slots[0 if self.first else -1] if len(slots) else NONE
            if kind == KIND_SCALE and len(slots) and not self.every:
                self.next = None
        return Decision(np.array([choice]))


def states(dispatcher: Dispatcher) -> list[int]:
    return [int(engine.state) for engine in dispatcher.fleet.engines]


async def become(dispatcher: Dispatcher, policy: Told, wanted: int, *expected: int) -> None:
    """Have the policy choose an instance in this state, and wait until the fleet is in these."""
    policy.next = wanted
    await until(lambda: states(dispatcher) == list(expected))


async def on(dispatcher: Dispatcher, slot: int, tokens: int = 5, count: int = 1) -> None:
    """Wait until requests of so many tokens run there."""
    await until(lambda: sum(relay.tokens >= tokens for relay in dispatcher.at[slot].values()) >= count)
