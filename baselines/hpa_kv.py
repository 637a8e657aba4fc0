"""Instances are scaled by Kubernetes' HPA on KV usage; dispatch is another policy's.

Source: Kubernetes HorizontalPodAutoscaler, as `hpa-queue`. The metric is `vllm:kv_cache_usage_perc`, its target ours.
Reads: fleet.kind, fleet.time_s, instance.state, instance.kv_usage, instance.poll_age_s, instance.in_flight
Notes: As `hpa-queue`.
"""

from __future__ import annotations

from fleetpilot.baselines import join_shortest_queue
from fleetpilot.baselines.hpa import DEFAULT_STABILIZATION_S, STABILIZATION_RANGE, PodMetricAutoscaler
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import KIND_SCALE

RANGES = {
    "target": Range(0.2, 0.95, kind=KIND_SCALE),
    "stabilization_s": STABILIZATION_RANGE,
}


def make(
    target: float = 0.7,
    stabilization_s: float = DEFAULT_STABILIZATION_S,
    dispatch: CompiledPolicy = join_shortest_queue.POLICY,
) -> PodMetricAutoscaler:
    """The policy with other parameters.

    Args:
        target: KV usage, as a fraction.
        stabilization_s: of scaling in.
        dispatch: answers all other decisions.
    """
    return PodMetricAutoscaler("hpa-kv", "kv_usage", target, stabilization_s, dispatch)


POLICY = make()
