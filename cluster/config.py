"""How a cluster is set up: instances, telemetry, hold rules, SLO classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.slo import CHAT, SLOClass

REQUEST_CHOICES = ("last", "shortest", "longest", "lowest_priority")
"""Which of a source's decoding requests leaves: the last of the running list, that with the fewest or the most tokens,
or the one of the largest priority value, the shortest of those."""


LEAST_INTERVAL_S = 0.001
"""Between two questions about the fleet, or a failure and its repair."""
_LONGEST_S = 1e9
_MOST = 2**31 - 1

PROTOCOLS = ("llumnix", "vllm")
"""How a running request moves (docs/model.md)."""


@dataclass(frozen=True)
class Telemetry:
    """How old the dispatcher's knowledge of an engine is.

    Attributes:
        poll_interval_s: an engine's counters are read at multiples of this.
        poll_delay_s: how long a reading takes to arrive.
        engine_reported: the engine reports its load at the end of every iteration, as Llumnix's llumlets do; only for
            the papers' experiments, no stock engine does.
    """

    poll_interval_s: float = 0.1
    poll_delay_s: float = 0.0
    engine_reported: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.poll_interval_s) and self.poll_interval_s > 0):
            raise ValueError(f"poll_interval_s = {self.poll_interval_s!r}: expected a finite time > 0")
        if not (math.isfinite(self.poll_delay_s) and self.poll_delay_s >= 0):
            raise ValueError(f"poll_delay_s = {self.poll_delay_s!r}: expected a finite time >= 0")

    @property
    def polls_in_flight(self) -> int:
        """Readings that may be needed again: those not yet visible, and the last visible one."""
        return math.ceil(self.poll_delay_s / self.poll_interval_s) + 2


@dataclass(frozen=True)
class Rebalancing:
    """When running requests may move to another instance, and how (docs/model.md).

    Attributes:
        interval_s: the policy is asked at multiples of this.
        max_pairs: most migrations that one tick may begin; None for no limit.
        choice: which request leaves a source: one of `REQUEST_CHOICES`.
        protocol: ``llumnix``, or ``vllm``, what stock engines can do (chunked prefill and a prefix cache are needed).
        round_trip_s: added to the copy of each stage.
        bandwidth_bytes_per_s: of the link between two instances.
        slowdown: factor on the iterations of both ends while copying goes on.
        max_stages: of a migration, the last one included.
        last_stage_blocks: the request stops when no more than so many blocks are left to copy.

    The defaults are what Llumnix's Fig. 10 asks for: 2.6 GB/s and 12 ms of round trips, steps 1 % slower.
    """

    interval_s: float = 0.2
    max_pairs: int | None = None
    choice: str = "last"
    protocol: str = "llumnix"
    round_trip_s: float = 0.012
    bandwidth_bytes_per_s: float = 2.6e9
    slowdown: float = 1.01
    max_stages: int = 3
    last_stage_blocks: int = 16

    def __post_init__(self) -> None:
        _expect(self, "interval_s", _number(LEAST_INTERVAL_S, _LONGEST_S))
        _expect(self, "bandwidth_bytes_per_s", _number(1.0, 1e15))
        _expect(self, "round_trip_s", _number(0.0, _LONGEST_S))
        _expect(self, "slowdown", _number(1.0, 1000.0))
        _expect(self, "max_pairs", _whole(1, _MOST, none=True))
        _expect(self, "choice", _one_of(*REQUEST_CHOICES))
        _expect(self, "protocol", _one_of(*PROTOCOLS))
        _expect(self, "max_stages", _whole(2, _MOST))
        _expect(self, "last_stage_blocks", _whole(1, _MOST))


@dataclass(frozen=True)
class Scaling:
    """When instances are started and drained, and how long that takes (docs/model.md).

    Attributes:
        interval_s: the policy is asked this often,
        first_s: from this time on.
        ready: so many instances, those of the lowest slots, are ready at the start; the others are absent.
        min_instances: no more are drained.
        max_instances: no more are started; None for all slots.
        start_up_s: from the decision to start an instance until it is ready.
        drain_deadline_s: from the decision to drain an instance until the rest of its requests is taken from it.
    """

    interval_s: float = 10.0
    first_s: float = 10.0
    ready: int = 1
    min_instances: int = 1
    max_instances: int | None = None
    start_up_s: float = 30.0
    drain_deadline_s: float = math.inf

    def __post_init__(self) -> None:
        _expect(self, "interval_s", _number(LEAST_INTERVAL_S, _LONGEST_S))
        _expect(self, "first_s", _number(0.0, _LONGEST_S))
        _expect(self, "start_up_s", _number(0.0, _LONGEST_S))
        _expect(self, "drain_deadline_s", _number(0.0, math.inf))
        _expect(self, "max_instances", _whole(1, _MOST, none=True))
        most = _MOST if self.max_instances is None else self.max_instances
        _expect(self, "min_instances", _whole(1, most))
        _expect(self, "ready", _whole(1, _MOST))


@dataclass(frozen=True)
class Failures:
    """Which instances fail when, and what becomes of their requests (docs/model.md).

    Attributes:
        at: (time in s, instance) of failures.
        notice_s: these are announced so long before; the instance drains until then.
        mtbf_s: mean time between further failures of each instance, exponential; inf for none.
        repair_s: until a failed instance is ready again; inf for never.
        requests: ``restart`` brings them back to the dispatcher, ``fail`` ends them.
        max_restarts: a request that loses its instance more often, by a failure or at a deadline of a drain, fails.
    """

    at: tuple[tuple[float, int], ...] = ()
    notice_s: float = 0.0
    mtbf_s: float = math.inf
    repair_s: float = 60.0
    requests: str = "restart"
    max_restarts: int = 100

    def __post_init__(self) -> None:
        _expect(self, "notice_s", _number(0.0, _LONGEST_S))
        _expect(self, "mtbf_s", _number(1.0, math.inf))
        _expect(self, "repair_s", _number(LEAST_INTERVAL_S, math.inf))
        _expect(self, "requests", _one_of("restart", "fail"))
        _expect(self, "max_restarts", _whole(0, _MOST))
        pairs = isinstance(self.at, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.at)
        if not pairs:
            raise ValueError(f"at = {self.at!r}: expected a tuple of pairs (time in s, instance)")
        for time_s, instance in self.at:
            if not (_number(0.0, _LONGEST_S)[1](time_s) and _whole(0, _MOST)[1](instance)):
                raise ValueError(f"at = ({time_s!r}, {instance!r}): expected a time >= 0 and an instance >= 0")


Expectation = tuple[str, Callable[[Any], bool]]
"""In words, and as a test."""


def _expect(config: object, name: str, expectation: Expectation) -> None:
    value = getattr(config, name)
    words, holds = expectation
    if not holds(value):
        raise ValueError(f"{name} = {value!r}: expected {words}")


def _number(low: float, high: float) -> Expectation:
    words = f"a number >= {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    return words, lambda value: isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high


def _whole(low: int, high: int, *, none: bool = False) -> Expectation:
    def holds(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return (none and value is None) or (whole and low <= value <= high)

    return f"a whole number from {low:,} to {high:,}" + (", or None" if none else ""), holds


def _one_of(*names: str) -> Expectation:
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


@dataclass(frozen=True)
class FleetConfig:
    """A fleet and its dispatcher.

    Attributes:
        profiles: one hardware profile per instance.
        telemetry: see `Telemetry`.
        hold_interval_s: the head of the held queue is asked again after this time at the latest.
        max_hold_s: a request may be held this long after its arrival; then it must be dispatched.
        slo_classes: indexed by a request's `slo_class` (the last one stands for larger indices).
        rebalancing: see `Rebalancing`; None: no request moves.
        scaling: see `Scaling`; None: all instances are ready from start to end.
        failures: see `Failures`; None: no instance fails.
    """

    profiles: tuple[HardwareProfile, ...]
    telemetry: Telemetry = field(default_factory=Telemetry)
    hold_interval_s: float = 0.1
    max_hold_s: float = 10.0
    slo_classes: tuple[SLOClass, ...] = (CHAT,)
    rebalancing: Rebalancing | None = None
    scaling: Scaling | None = None
    failures: Failures | None = None

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("profiles: got no instance, expected at least one")
        if not self.slo_classes:
            raise ValueError("slo_classes: got none, expected at least one")
        for name, kind in (("rebalancing", Rebalancing), ("scaling", Scaling), ("failures", Failures)):
            expectation = (
                f"a {kind.__name__}, or None",
                lambda value, kind=kind: value is None or isinstance(value, kind),
            )
            _expect(self, name, expectation)
        for name in ("hold_interval_s", "max_hold_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "hold_interval_s" and value == 0):
                raise ValueError(f"{name} = {value!r}: expected a finite time {'>' if name[0] == 'h' else '>='} 0")
        for name, most in (
            (("ready", self.scaling.ready), ("min_instances", self.scaling.min_instances)) if self.scaling else ()
        ):
            if most > len(self.profiles):
                raise ValueError(f"{name} = {most}: expected at most {len(self.profiles)}, the instances")
        for profile in self.profiles if self.rebalancing and self.rebalancing.protocol == "vllm" else ():
            if profile.scheduler != "chunked" or not profile.prefix_cache:
                raise ValueError(
                    f"protocol = 'vllm' with {profile.name}: expected engines with chunked prefill and a prefix cache"
                )
        for _, instance in self.failures.at if self.failures else ():
            if instance >= len(self.profiles):
                raise ValueError(f"a failure of instance {instance}: expected 0 to {len(self.profiles) - 1}")

    @classmethod
    def of(cls, profile: HardwareProfile, instances: int, **options: object) -> FleetConfig:
        """A fleet of equal instances.

        Raises:
            ValueError: if `instances` is less than one.
        """
        if instances < 1:
            raise ValueError(f"instances = {instances}: expected at least 1")
        return cls((profile,) * instances, **options)  # type: ignore[arg-type]


def fleet_of(parts: Sequence[tuple[HardwareProfile, int]], **options: object) -> FleetConfig:
    """A fleet of several profiles, so many instances of each.

    Raises:
        ValueError: if a count is less than one.
    """
    for profile, count in parts:
        if count < 1:
            raise ValueError(f"instances of {profile.name} = {count}: expected at least 1")
    return FleetConfig(tuple(p for p, count in parts for _ in range(count)), **options)  # type: ignore[arg-type]
