"""max((free - watermark - queued demand blocks) / requests), an idle instance first; ties go to the lowest slot.

Source: Llumnix, OSDI 2024, the artifact's `load` dispatch (vllm/instance_info.py), which INFaaS++ and Llumnix share.
Reads: instance.kv_capacity_blocks, instance.free_blocks, instance.queued_demand_blocks, instance.queued,
    instance.batched
Notes: Watermark 1 % of the blocks, rounded down; all queued requests count, not the head alone as in the paper. With
    stock telemetry free blocks come from the poll and the queue from the ledger; the artifact's engines report both
    exactly. Its headroom for high priority is left out: a view does not tell an instance's high-priority requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate

WATERMARK = 0.01
"""Fraction of the blocks that the engine keeps free."""


@kernel
def dispatch_load(instance: Any, request: Any, fleet: Any) -> float:
    """The artifact's load: freeness with the sign turned."""
    requests = instance.queued + instance.batched
    if requests == 0:
        return -np.inf
    watermark_blocks = np.floor(WATERMARK * instance.kv_capacity_blocks)
    available_blocks = instance.free_blocks - watermark_blocks - instance.queued_demand_blocks
    return -float(available_blocks / requests)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(dispatch_load, instances, requests, fleets)


POLICY = CompiledPolicy("freeness", choose)
