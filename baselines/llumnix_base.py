"""As `llumnix`, with no regard for priorities.

Source: Llumnix, OSDI 2024, Llumnix-base: what priorities are compared with (Fig. 13).
Reads: fleet.kind, instance.state, instance.migrating, instance.kv_capacity_blocks, instance.free_blocks,
    instance.queued_demand_blocks, instance.queued, instance.batched, instance.preempted
Notes: No headroom, neither for dispatch nor for migration. An engine's own order of its queue is the profile's
    (`priority_order`).
"""

from __future__ import annotations

from fleetpilot.baselines.infaas import DEFAULT_HIGH, DEFAULT_LOW, check_corridor
from fleetpilot.baselines.llumnix import DEFAULT_THRESHOLD, RANGES, by_artifact
from fleetpilot.fleet.policy import CompiledPolicy

__all__ = ["POLICY", "RANGES", "make"]


def make(threshold: float = DEFAULT_THRESHOLD, low: float = DEFAULT_LOW, high: float = DEFAULT_HIGH) -> CompiledPolicy:
    """The policy with other parameters, those of `llumnix`."""
    check_corridor(low, high)
    return by_artifact("llumnix-base", threshold, low, high, priorities=False)


POLICY = make()
