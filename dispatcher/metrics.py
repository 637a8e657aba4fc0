"""What the dispatcher says of itself, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from fleetpilot.dispatcher.engine import EngineState

if TYPE_CHECKING:
    from fleetpilot.dispatcher.service import Dispatcher
    from fleetpilot.dispatcher.tally import Tally

_DOWNTIME_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class _Collected(Collector):
    def __init__(self, dispatcher: Dispatcher, tally: Tally):
        self._dispatcher = dispatcher
        self._tally = tally

    def collect(self) -> Iterable[Metric]:
        dispatcher, tally = self._dispatcher, self._tally
        engines = [engine for engine in dispatcher.fleet.engines if engine.state != EngineState.ABSENT]
        states = Counter(engine.state for engine in engines)
        engines = [engine for engine in engines if engine.has_address]
        for name, label, counts in (
            ("fleetpilot_requests", "outcome", tally.outcomes),
            ("fleetpilot_events", "event", tally.events),
            ("fleetpilot_policy_fallbacks", "reason", tally.fallbacks),
        ):
            yield _counter(name, label, counts)
        decisions = CounterMetricFamily("fleetpilot_decisions", "by kind and who decided", labels=["kind", "by"])
        for (kind, by), value in sorted(tally.decided.items()):
            decisions.add_metric([kind, by], value)
        yield decisions
        if dispatcher.log is not None:
            records = {result: tally.records[result] for result in ("written", "dropped", "failed")}
            yield _counter("fleetpilot_decision_log_records", "result", records)
            if dispatcher.shadow is not None:
                yield _counter("fleetpilot_shadow_decisions", "result", dispatcher.shadow.counts)
        yield GaugeMetricFamily("fleetpilot_held", "requests held at the dispatcher", value=dispatcher.fleet.held)
        yield GaugeMetricFamily("fleetpilot_migrations_running", "migrations", value=dispatcher.fleet.migrations)
        age = GaugeMetricFamily("fleetpilot_instance_poll_age_s", "age of the last poll", labels=["instance"])
        for engine in engines:
            age.add_metric([engine.url], dispatcher.fleet.poll_age_s(engine.slot))
        yield age
        instances = dispatcher.fleet.view.instances[0]
        for name in ("in_flight", "unstarted", "streamed_tokens", "running", "waiting", "kv_usage"):
            gauge = GaugeMetricFamily(f"fleetpilot_instance_{name}", f"{name} of the view", labels=["instance"])
            for engine in engines:
                gauge.add_metric([engine.url], float(instances[name][engine.slot]))
            yield gauge
        state = GaugeMetricFamily("fleetpilot_instance_state", "1 for the state it is in", labels=["instance", "state"])
        for engine in engines:
            state.add_metric([engine.url, engine.state.name.lower()], 1.0)
        yield state
        count = GaugeMetricFamily("fleetpilot_instances", "with those that have no address yet", labels=["state"])
        for each in EngineState:
            if each != EngineState.ABSENT:
                count.add_metric([each.name.lower()], states[each])
        yield count
        yield _downtimes(tally.downtimes_s)


def _counter(name: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, name.replace("_", " "), labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _downtimes(times_s: list[float]) -> HistogramMetricFamily:
    buckets = [(str(bound), float(sum(t <= bound for t in times_s))) for bound in _DOWNTIME_BUCKETS_S]
    family = HistogramMetricFamily("fleetpilot_migration_downtime_seconds", "of the latest 10,000 migrations")
    family.add_metric([], [*buckets, ("+Inf", float(len(times_s)))], sum_value=sum(times_s))
    return family


def exposition(dispatcher: Dispatcher, tally: Tally) -> bytes:
    """The text of ``/metrics``: of the fleet, and what all processes counted."""
    registry = CollectorRegistry()
    registry.register(_Collected(dispatcher, tally))
    return generate_latest(registry)
