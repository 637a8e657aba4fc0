"""How a cluster is set up: instances, telemetry, hold rules, SLO classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.slo import CHAT, SLOClass
from fleetpilot.fleet.view import ROLES

REQUEST_CHOICES = ("last", "shortest", "longest", "lowest_priority")
"""Which of a source's decoding requests leaves: the last of the running list, that with the fewest or the most tokens,
or the one of the largest priority value, the shortest of those."""


LEAST_INTERVAL_S = 0.001
"""Between two questions about the fleet, or a failure and its repair."""
_LONGEST_S = 1e9
_MOST = 2**31 - 1

FIRST_TOKEN_FROM = ("decode", "prefill")
DECODE_CHOICES = ("at_admission", "after_prefill")

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


@dataclass(frozen=True)
class Pools:
    """Instances that only process prompts, and instances that decode what these hand over (docs/model.md).

    Attributes:
        roles: of each instance: ``prefill``, ``decode``, or ``mixed``, which serves requests from prompt to end and may
            decode those of others too.
        first_token_from: ``decode``: the decode instance computes the prompt's last token again and samples, as vLLM's
            hand-over with NIXL has it; ``prefill``: the first token comes from the prefill (DistServe, Splitwise).
        decode_choice: ``at_admission``: the policy chooses both instances together; ``after_prefill``: the one that
            decodes, when the prompt is processed.
        round_trip_s: of each hand-over, before its KV is copied.
        bandwidth_bytes_per_s: of the way in and of the way out of an instance, shared by all that is copied over it.

    The default bandwidth is that of llm-d's simulator, 3 microseconds a token of an 8B model over 400 Gb/s.
    """

    roles: tuple[str, ...]
    first_token_from: str = "decode"
    decode_choice: str = "at_admission"
    round_trip_s: float = 0.001
    bandwidth_bytes_per_s: float = 43.7e9

    def __post_init__(self) -> None:
        if not (isinstance(self.roles, tuple) and all(role in ROLES for role in self.roles)):
            raise ValueError(
                f"roles = {self.roles!r}: expected one of {', '.join(ROLES)} for each instance, in a tuple"
            )
        if "prefill" not in self.roles or not set(self.roles) & {"decode", "mixed"}:
            raise ValueError(f"roles = {self.roles!r}: expected a prefill instance, and one that decodes")
        _expect(self, "first_token_from", _one_of(*FIRST_TOKEN_FROM))
        _expect(self, "decode_choice", _one_of(*DECODE_CHOICES))
        _expect(self, "round_trip_s", _number(0.0, _LONGEST_S))
        _expect(self, "bandwidth_bytes_per_s", _number(1.0, 1e15))

    def repeated(self, instances: int) -> Pools:
        """The same for so many instances: the roles from the first on, again and again.

        Raises:
            ValueError: these are too few for both roles.
        """
        return replace(self, roles=tuple(self.roles[i % len(self.roles)] for i in range(instances)))

    def least(self) -> int:
        """So many of the first instances can prefill and decode."""
        return 1 + max(
            next(i for i, role in enumerate(self.roles) if role != without) for without in ("decode", "prefill")
        )

    @classmethod
    def of(cls, prefill: int, decode: int, mixed: int = 0, **options: Any) -> Pools:
        """So many instances of each role, in this order."""
        for name, count in (("prefill", prefill), ("decode", decode), ("mixed", mixed)):
            if not _whole(0, _MOST)[1](count):
                raise ValueError(f"{name} = {count!r}: expected {_whole(0, _MOST)[0]}")
        return cls(("prefill",) * prefill + ("decode",) * decode + ("mixed",) * mixed, **options)


@dataclass(frozen=True)
class SharedCache:
    """A store of KV blocks behind the prefix caches of all instances, as host memory or Redis (docs/model.md).

    Attributes:
        capacity_bytes: of KV.
        bandwidth_bytes_per_s: of its way out, shared by all loads.
        round_trip_s: of each load, before its bytes come.
        ttl_s: blocks that nobody has stored or loaded for so long are gone.
        updates_s: times at which the model is updated: what it holds then is worthless.

    The default bandwidth is that of a 100 Gb/s network.
    """

    capacity_bytes: float
    bandwidth_bytes_per_s: float = 12.5e9
    round_trip_s: float = 0.001
    ttl_s: float = math.inf
    updates_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _expect(self, "capacity_bytes", _number(1.0, 1e18))
        _expect(self, "bandwidth_bytes_per_s", _number(1.0, 1e15))
        _expect(self, "round_trip_s", _number(0.0, _LONGEST_S))
        _expect(self, "ttl_s", _number(LEAST_INTERVAL_S, math.inf))
        words, holds = _number(0.0, _LONGEST_S)
        if not (isinstance(self.updates_s, tuple) and all(holds(time_s) for time_s in self.updates_s)):
            raise ValueError(f"updates_s = {self.updates_s!r}: expected a tuple of times, each {words}")


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
        pools: see `Pools`; None: all instances are mixed.
        shared_cache: see `SharedCache`; None: each instance has its own cache alone.
    """

    profiles: tuple[HardwareProfile, ...]
    telemetry: Telemetry = field(default_factory=Telemetry)
    hold_interval_s: float = 0.1
    max_hold_s: float = 10.0
    slo_classes: tuple[SLOClass, ...] = (CHAT,)
    rebalancing: Rebalancing | None = None
    scaling: Scaling | None = None
    failures: Failures | None = None
    pools: Pools | None = None
    shared_cache: SharedCache | None = None

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("profiles: got no instance, expected at least one")
        if not self.slo_classes:
            raise ValueError("slo_classes: got none, expected at least one")
        kinds: dict[str, type] = {
            "rebalancing": Rebalancing,
            "scaling": Scaling,
            "failures": Failures,
            "pools": Pools,
            "shared_cache": SharedCache,
        }
        for name, kind in kinds.items():
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

        if self.pools is not None:
            self._check_pools(self.pools)
        if self.shared_cache is not None:
            self._check_exchange("shared_cache")
            for profile in self.profiles:
                if not profile.prefix_cache:
                    raise ValueError(f"shared_cache with {profile.name}: expected engines with a prefix cache")

    def _check_exchange(self, what: str) -> None:
        """Instances exchange KV in whole blocks, and prefill what is left in chunks."""
        first = self.profiles[0]
        for profile in dict.fromkeys(self.profiles):
            if profile.scheduler != "chunked":
                raise ValueError(f"{what} with {profile.name}: expected engines with chunked prefill")
            for name in ("block_size", "kv_bytes_per_token"):
                value, expected = getattr(profile, name), getattr(first, name)
                if value != expected:
                    raise ValueError(
                        f"{what}: {name} of {profile.name} = {value}: expected {expected}, that of {first.name}, as KV "
                        "is exchanged"
                    )

    @property
    def roles(self) -> tuple[str, ...]:
        """What each instance does."""
        return ("mixed",) * len(self.profiles) if self.pools is None else self.pools.roles

    def _check_pools(self, pools: Pools) -> None:
        if len(pools.roles) != len(self.profiles):
            raise ValueError(
                f"pools: got {len(pools.roles)} roles, expected {len(self.profiles)}, one for each instance"
            )
        self._check_exchange("pools")
        if self.scaling is not None and self.scaling.ready < pools.least():
            raise ValueError(
                f"ready = {self.scaling.ready} with pools: expected {pools.least()} at least, or nobody can "
                "prefill, or decode"
            )

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
