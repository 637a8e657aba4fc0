"""Instances are scaled by Kubernetes' HPA on waiting requests per instance; dispatch is another policy's.

Source: Kubernetes HorizontalPodAutoscaler, the algorithm of its documentation with its defaults: tolerance 0.1, 300 s
    before scaling in, at most 4 or 100 % more in 15 s. The metric is `vllm:num_requests_waiting`, its target ours.
Reads: fleet.kind, fleet.time_s, instance.state, instance.waiting, instance.poll_age_s, instance.in_flight
Notes: It remembers its recommendations. Instances that start, or were never polled, have no metric: they count as idle
    when more are wanted and as at the target when fewer are. An instance is started before one that drains is kept; the
    ready one of the highest slot is drained. The interval is the fleet's, in Kubernetes 15 s.
"""

from __future__ import annotations

from fleetpilot.baselines import join_shortest_queue
from fleetpilot.baselines.hpa import DEFAULT_STABILIZATION_S, STABILIZATION_RANGE, PodMetricAutoscaler
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import KIND_SCALE

RANGES = {
    "target": Range(0.5, 50.0, log=True, kind=KIND_SCALE),
    "stabilization_s": STABILIZATION_RANGE,
}


def make(
    target: float = 5.0,
    stabilization_s: float = DEFAULT_STABILIZATION_S,
    dispatch: CompiledPolicy = join_shortest_queue.POLICY,
) -> PodMetricAutoscaler:
    """The policy with other parameters.

    Args:
        target: waiting requests per instance.
        stabilization_s: of scaling in.
        dispatch: answers all other decisions.
    """
    return PodMetricAutoscaler("hpa-queue", "waiting", target, stabilization_s, dispatch)


POLICY = make()
