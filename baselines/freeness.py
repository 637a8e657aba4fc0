"""max((free - watermark - queued demand blocks) / requests), an idle instance first; ties go to the lowest slot.

Source: Llumnix, OSDI 2024, the artifact's `load` dispatch (vllm/instance_info.py), which INFaaS++ and Llumnix share.
Reads: instance.kv_capacity_blocks, instance.free_blocks, instance.queued_demand_blocks, instance.queued,
    instance.batched
Notes: Watermark 1 % of the blocks, rounded down; all queued requests count, not the head alone as in the paper. With
    stock telemetry free blocks come from the poll and the queue from the ledger; the artifact's engines report both
    exactly. Priorities and scaling are left out; `infaas++` has them.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.freeness import dispatch_freeness
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate


@kernel
def dispatch_load(instance: Any, request: Any, fleet: Any) -> float:
    """The artifact's load: freeness with the sign turned."""
    return -dispatch_freeness(instance)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(dispatch_load, instances, requests, fleets)


POLICY = CompiledPolicy("freeness", choose)
