"""Early rejection: a request that would be late where it is sent goes where it is in time, or else is turned away.

Predictions are those of the profile's constants (`fleetpilot.fleet.latency`), which know nothing of the steps that come
between the pieces of a prompt, nor of the prompts to come that each get a piece of the answers' time: the closer the
time per token is to its target, the earlier a first token has to be. What would be late on an empty instance
too, by its own prefill, is served where nobody waits, if it is not hopeless: whoever turns away all prompts that no
cache holds never has one in a cache. But in a cache that is well filled it would take the place of what others find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import memory_wait_s, prefill_backlog_s, prefill_s, tpot_s, ttft_s
from fleetpilot.fleet.view import REJECT

_SLOW = 0.6
"""Share of the target for the time per token, prefills between the tokens left out."""
_WELL_FILLED = 0.5
"""Share of an instance's KV blocks that cached prompts take: much of the rest is needed for what runs."""


@dataclass(frozen=True)
class Admission:
    """What is turned away.

    Attributes:
        late: a request whose predicted time to first token is more than this times its target on all instances,
        cold: but for one that its own prefill makes late, up to this times the target, where nobody waits, and nothing
            runs or the prefix cache is less than half full.
        busy: with a predicted time per token of 0.6 times its target, `late` is this times itself, with less on the
            way there (an ellipse); 1: the same everywhere.
    """

    late: float = 1.0
    cold: float = 2.0
    busy: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                raise ValueError(f"admission {name} = {value!r}: expected a finite number >= 0")
        if self.busy > 1.0:
            raise ValueError(f"admission busy = {self.busy!r}: expected a share of late, 0 to 1")


def admission_array(admission: Admission | None) -> NDArray[np.float64]:
    """(3,) for `is_late`; None turns nothing away."""
    if admission is None:
        return np.array([math.inf, math.inf, 1.0])
    return np.array([admission.late, admission.cold, admission.busy], np.float64)


@kernel
def is_late(instance: Any, request: Any, admission: Any) -> bool:
    """Whether the request has no place on the instance: see `Admission`, of which this takes the array, or a tuple."""
    late, cold, busy = admission[0], admission[1], admission[2]
    slowness = tpot_s(instance) / (_SLOW * request.tpot_target_s)
    limit_s = late * max(busy, math.sqrt(max(0.0, 1.0 - slowness * slowness))) * request.ttft_target_s
    if not request.waited_s + ttft_s(instance, request) > limit_s:
        return False
    alone_s = request.waited_s + prefill_s(instance, request)
    if alone_s <= limit_s or alone_s > cold * request.ttft_target_s:
        return True
    if prefill_backlog_s(instance) + memory_wait_s(instance, request) > 0.0:
        return True
    cached_tokens = instance.indexed_tokens + request.prompt_tokens
    kv_tokens = instance.kv_capacity_blocks * instance.block_size
    return bool(instance.in_flight > 0.0 and cached_tokens > _WELL_FILLED * kv_tokens)


@kernel
def admitted(slot: int, instances: Any, request: Any, admission: Any) -> int:
    """Where a request goes that is sent to a slot: there, or if it is late there where it is served soonest.

    Returns:
        The slot of an instance; `REJECT` where the request is late on all.
    """
    if not is_late(instances[slot], request, admission):
        return slot
    best, least_s = REJECT, np.inf
    for other in range(len(instances)):
        instance = instances[other]
        if instance.candidate != 0 and not is_late(instance, request, admission):
            soon_s = ttft_s(instance, request)
            if soon_s < least_s:
                best, least_s = other, soon_s
    return best
