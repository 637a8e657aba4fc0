"""How a cluster is set up: instances, telemetry, hold rules, SLO classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.slo import CHAT, SLOClass


@dataclass(frozen=True)
class Telemetry:
    """How old the dispatcher's knowledge of an engine is.

    Attributes:
        poll_interval_s: an engine's counters are read at multiples of this.
        poll_delay_s: how long a reading takes to arrive.
        engine_reported: the engine reports its load at every step without delay, as Llumnix's llumlets do; only for the
            papers' experiments, no stock engine does.
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
class FleetConfig:
    """A fleet and its dispatcher.

    Attributes:
        profiles: one hardware profile per instance.
        telemetry: see `Telemetry`.
        hold_interval_s: the head of the held queue is asked again after this time at the latest.
        max_hold_s: a request may be held this long after its arrival; then it must be dispatched.
        slo_classes: indexed by a request's `slo_class` (the last one stands for larger indices).
    """

    profiles: tuple[HardwareProfile, ...]
    telemetry: Telemetry = field(default_factory=Telemetry)
    hold_interval_s: float = 0.1
    max_hold_s: float = 10.0
    slo_classes: tuple[SLOClass, ...] = (CHAT,)

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("profiles: got no instance, expected at least one")
        if not self.slo_classes:
            raise ValueError("slo_classes: got none, expected at least one")
        for name in ("hold_interval_s", "max_hold_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "hold_interval_s" and value == 0):
                raise ValueError(f"{name} = {value!r}: expected a finite time {'>' if name[0] == 'h' else '>='} 0")

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
