"""The distribution of episodes: a `Scenario` draws an `Episode` from a generator of random numbers.

An episode begins with a warm-up: its first requests meet an empty fleet and are dispatched by a hand-written policy,
all before the first observation. The scored part that follows has a random number of requests: a quarter of the
scenario's mean, and an exponential rest, at most twice the mean in all. So its end cannot be foreseen. Requests that
are in the system at the end are served to their last token.

Everything is drawn in an order that does not depend on what is pinned: pinning a parameter leaves all other draws
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import FleetConfig, Telemetry
from fleetpilot.cluster.config import Failures, Pools, Rebalancing, Scaling
from fleetpilot.cluster.loading import check_fits, engine_record
from fleetpilot.cluster.state import Capacity
from fleetpilot.envs.capacity import mean_capacity_rps
from fleetpilot.envs.parameters import MAX_INSTANCES, Parameter, Range, checked_names, checked_type
from fleetpilot.envs.requests import RequestSource
from fleetpilot.envs.rewards import RewardWeights
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.workloads.predictors import LogNormalError
from fleetpilot.workloads.table import RequestTable

_LEAST_POLL_INTERVAL_S = 0.05
_MOST_POLL_DELAY_S = 1.0
CHANGES = ("profile", "reward", "max_hold_s", "admission", "rebalancing", "scaling", "pools")
"""Attributes that `Scenario.with_changes` takes beside parameters."""

_SIZES = ("fleet_size", "warmup_requests", "scored_requests", "losses")
"""Parameters that memory is set aside for: no more than the scenario's range may be asked of a reset."""

FLEET_PARAMETERS: Mapping[str, Parameter] = {
    "load": Parameter(
        "share", 0.01, 3.0, "requests offered over what the fleet gets through when it never runs out of them"
    ),
    "fleet_size": Parameter("instances", 1, MAX_INSTANCES, "instances of the fleet", whole=True),
    "hardware_error": Parameter(
        "share", 0.0, 0.5, "each coefficient of the hardware is off its profile, which policies see, by up to this"
    ),
    "poll_interval_s": Parameter("s", _LEAST_POLL_INTERVAL_S, 10.0, "time between polls of an engine's metrics"),
    "poll_delay_s": Parameter("s", 0.0, _MOST_POLL_DELAY_S, "time until a poll is visible"),
    "warmup_requests": Parameter("requests/instance", 0, 100_000, "requests before the first observation", whole=True),
    "scored_requests": Parameter("requests/instance", 1, 100_000, "mean number of scored requests", whole=True),
}
"""What every scenario's episodes have; `RequestSource.parameters` come on top."""

LIFE_PARAMETERS: Mapping[str, tuple[Parameter, Range]] = {
    "ready_share": (
        Parameter("share", 0.0, 1.0, "instances that are ready at the start, one at least; if it scales"),
        1.0,
    ),
    "start_up_s": (
        Parameter("s", 0.0, 3600.0, "from the decision to start an instance until it is ready"),
        (10.0, 40.0),
    ),
    "failures_per_hour": (Parameter("1/h", 0.0, 3600.0, "failures of each instance"), 0.0),
    "losses": (
        Parameter("instances", 0, 64, "of the instances, so many fail at random times of the scored part", whole=True),
        0.0,
    ),
    "repair_s": (Parameter("s", 0.001, 1e6, "until a failed instance is ready again"), 60.0),
    "notice_s": (Parameter("s", 0.0, 3600.0, "before a loss, from when on the instance drains"), 0.0),
}
"""What becomes of instances, with the default range of each: drawn apart, after all others."""

PREDICTION_PARAMETERS: Mapping[str, tuple[Parameter, Range]] = {
    "predicted_share": (
        Parameter("share", 0.0, 1.0, "requests whose output a predictor knows; all others get the mean of their kind"),
        0.0,
    ),
    "predictor_error": (
        Parameter("", 0.0, 3.0, "of these, standard deviation of the logarithm of predicted over true output"),
        0.5,
    ),
}
"""What is known of the answers' lengths: drawn apart too."""

MAX_HOLD = Parameter("s", 0.0, 1e6, "time that a request may be held at the dispatcher")

_LIFE, _PREDICTIONS = 1, 2  # keys of the draws of `LIFE_PARAMETERS` and `PREDICTION_PARAMETERS`
_SHORTEST, _LONGEST = 0.25, 2.0  # scored part of an episode, over the mean
_COEFFICIENTS = ("a_s", "w_s", "b_s", "w_e_s", "c_s", "d_s", "e_s", "host_step_s", "host_per_seq_s")


@dataclass(frozen=True)
class Episode:
    """What is loaded into a cluster.

    Attributes:
        parameters: values of the scenario's parameters, and ``rate_rps``.
        fleet: as the dispatcher knows it.
        table: the requests.
        engines: (instances,) `ENGINE` records of the hardware as it is.
        seed: of tie breaks and jitter.
        warmup_s: the first decision after this is the agent's.
    """

    parameters: dict[str, float]
    fleet: FleetConfig
    table: RequestTable
    engines: NDArray[np.void]
    seed: int
    warmup_s: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A distribution of episodes.

    Attributes:
        name: as given to the environments.
        summary: one line.
        requests: where the requests come from.
        profile: hardware of the instances: a `HardwareProfile`, the name or file of one, or several, which the fleet's
            instances have in turn from its first to its last.
        capacity_factor: what the formula of the capacity must be multiplied by to be right for these requests.
        priority_order: engines serve by priority.
        max_hold_s: a request may be held at the dispatcher for so long.
        warm_up: compiled policy of `fleetpilot.baselines` that decides before the first observation; kinds of decision
            that it does not know are answered with none.
        admission: which requests are turned away that the agent dispatches; None: none.
        rebalancing: how requests move where someone decides that; None: they never do.
        scaling: how instances are started and drained where someone decides that, but for `ready` and `start_up_s`,
            which are parameters of the episode; None: they never are.
        pools: the roles of a fleet's instances, again and again from its first to its last, and how requests go from
            prefill to decode; None: all instances are mixed.
        ranges: of `FLEET_PARAMETERS`, `requests.parameters`, `LIFE_PARAMETERS` and `PREDICTION_PARAMETERS`, where they
            differ from the defaults; `fleet_size` is the number of slots of the environment unless given.
        reward: weights of the reward's components.
    """

    name: str
    summary: str
    requests: RequestSource
    profile: HardwareProfile | str | tuple[HardwareProfile | str, ...] = "h100-llama-3.1-8b"
    capacity_factor: float = 1.0
    priority_order: bool = False
    max_hold_s: float = 2.0
    warm_up: str = "join-shortest-queue"
    admission: Admission | None = None
    rebalancing: Rebalancing | None = field(default_factory=Rebalancing)
    scaling: Scaling | None = field(default_factory=Scaling)
    pools: Pools | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    reward: RewardWeights = field(default_factory=RewardWeights)

    def __post_init__(self) -> None:
        if not self._profiles:
            raise ValueError("profile: got none, expected one at least")
        for profile in self._profiles:
            checked_type("profile", profile, (str, HardwareProfile), "a HardwareProfile, or the name or file of one")
        checked_type("reward", self.reward, RewardWeights, "RewardWeights")
        checked_type("admission", self.admission, (Admission, type(None)), "an Admission, or None")
        checked_type("rebalancing", self.rebalancing, (Rebalancing, type(None)), "a Rebalancing, or None")
        checked_type("scaling", self.scaling, (Scaling, type(None)), "a Scaling, or None")
        checked_type("pools", self.pools, (Pools, type(None)), "Pools, or None")
        MAX_HOLD.checked("max_hold_s", self.max_hold_s)
        checked_names(self.ranges, self.parameters, f"parameter of scenario {self.name!r}")
        for name, value in self.ranges.items():
            self.parameters[name].checked_range(name, value)

    @property
    def _profiles(self) -> tuple[HardwareProfile | str, ...]:
        return self.profile if isinstance(self.profile, tuple) else (self.profile,)

    @cached_property
    def hardware(self) -> tuple[HardwareProfile, ...]:
        """The profiles themselves, which instances have in turn."""
        profiles = (load_profile(each) if isinstance(each, str) else each for each in self._profiles)
        return tuple(each.replace(priority_order=True) if self.priority_order else each for each in profiles)

    @cached_property
    def _engines(self) -> NDArray[np.void]:
        return np.stack([engine_record(profile) for profile in self.hardware])

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All numbers that its episodes have."""
        own = {name: parameter for name, (parameter, _) in self.requests.parameters.items()}
        apart = {name: parameter for name, (parameter, _) in {**LIFE_PARAMETERS, **PREDICTION_PARAMETERS}.items()}
        return {**FLEET_PARAMETERS, **own, **apart}

    def limits(self, slots: int) -> dict[str, tuple[float, float]]:
        """The range of each parameter in an environment with so many slots for instances."""
        defaults: dict[str, Range] = {
            "load": 0.8,
            "fleet_size": slots,
            "hardware_error": 0.2,
            "poll_interval_s": (0.05, 0.2),
            "poll_delay_s": (0.0, 0.2),
            "warmup_requests": 100,
            "scored_requests": 1000,
        }
        own = {name: default for name, (_, default) in self.requests.parameters.items()}
        apart = {name: default for name, (_, default) in {**LIFE_PARAMETERS, **PREDICTION_PARAMETERS}.items()}
        given = {**defaults, **own, **apart, **self.ranges}
        limits = {name: parameter.checked_range(name, given[name]) for name, parameter in self.parameters.items()}
        if limits["fleet_size"][1] > slots:
            raise ValueError(f"fleet_size = {given['fleet_size']!r}: expected at most instances = {slots}")
        if self.pools is not None and limits["fleet_size"][0] < self.pools.least():
            raise ValueError(
                f"fleet_size = {given['fleet_size']!r}: expected {self.pools.least()} at least, for prefill and decode"
            )
        return limits

    def with_changes(self, **changes: Any) -> Scenario:
        """Another scenario: parameters by number or range, and those of `CHANGES`.

        Raises:
            ValueError: naming what is not known or not possible.
        """
        own = {name: changes.pop(name) for name in CHANGES if name in changes}
        checked_names(changes, (*self.parameters, *CHANGES), f"parameter of scenario {self.name!r}")
        ranges = {name: self.parameters[name].checked_range(name, value) for name, value in changes.items()}
        return replace(self, **own, ranges={**self.ranges, **ranges})  # type: ignore[arg-type]

    def size(self, environments: int, slots: int) -> Capacity:
        """Of a cluster state for its episodes."""
        limits = {name: high for name, (_, high) in self.limits(slots).items()}
        per_instance = limits["warmup_requests"] + _LONGEST * limits["scored_requests"]
        rows = math.ceil(limits["fleet_size"] * per_instance)
        return Capacity(
            environments=environments,
            instances=slots,
            rows=rows,
            slots=rows,
            nodes=self.requests.most_nodes(rows),
            max_num_seqs=max(profile.max_num_seqs for profile in self.hardware),
            max_block_size=max(profile.block_size for profile in self.hardware),
            polls=Telemetry(_LEAST_POLL_INTERVAL_S, _MOST_POLL_DELAY_S).polls_in_flight,
            closed_rows=rows if self.requests.closed_loop() else 0,
            classes=len(self.requests.slo_classes),
            track_targets=True,
            failures=int(limits["losses"]),
            transfers=self.pools is not None,
        )

    def draw(
        self,
        rng: np.random.Generator,
        limits: Mapping[str, tuple[float, float]],
        pinned: Mapping[str, float],
        length: float | None = None,
    ) -> Episode:
        """One episode.

        Args:
            rng: all draws are from it, as many whatever is pinned.
            limits: of the parameters (`limits`).
            pinned: parameters that are not drawn (`pins`).
            length: of the scored part, over its mean; drawn by default.
        """
        drawn = [name for name in limits if name not in LIFE_PARAMETERS and name not in PREDICTION_PARAMETERS]
        shares = rng.random(len(drawn))
        drawn_length = _SHORTEST + min((1.0 - _SHORTEST) * rng.standard_exponential(), _LONGEST - _SHORTEST)
        length = drawn_length if length is None else length
        errors = rng.uniform(-1.0, 1.0, len(_COEFFICIENTS))
        seed, requests_seed = rng.integers(2**63, size=2).tolist()
        life = np.random.default_rng((seed, _LIFE))  # apart, so that episodes of old are what they were
        predictions = np.random.default_rng((seed, _PREDICTIONS))
        apart = (*life.random(len(LIFE_PARAMETERS)), *predictions.random(len(PREDICTION_PARAMETERS)))
        values = {
            name: self.parameters[name].at(share, *limits[name])
            for name, share in zip(
                (*drawn, *LIFE_PARAMETERS, *PREDICTION_PARAMETERS), (*shares.tolist(), *map(float, apart)), strict=True
            )
        }
        values.update(pinned)
        instances = int(values["fleet_size"])
        warmup, scored = (instances * values[name] for name in ("warmup_requests", "scored_requests"))
        table = self.requests.draw(
            int(warmup) + max(1, round(scored * length)), values, np.random.default_rng(requests_seed)
        )
        table = _with_predictions(table, values["predicted_share"], values["predictor_error"], predictions)
        engines = self._engines.copy()
        for name, error in zip(_COEFFICIENTS, errors.tolist(), strict=True):
            engines["cost"][name] *= 1.0 + values["hardware_error"] * error
        pools = None if self.pools is None else self.pools.repeated(instances)
        capacity = mean_capacity_rps(engines, table, instances, pools)
        rate_rps = values["load"] * instances * self.capacity_factor * capacity
        table = replace(table, name=self.name, arrival_s=table.arrival_s / rate_rps)
        warmup_s, last_s = _scored_part_s(table.arrival_s, int(warmup))
        kind = np.arange(instances) % len(engines)
        fleet = FleetConfig(
            tuple(self.hardware[k] for k in kind.tolist()),
            telemetry=Telemetry(values["poll_interval_s"], values["poll_delay_s"]),
            max_hold_s=self.max_hold_s,
            slo_classes=self.requests.slo_classes,
            rebalancing=self.rebalancing,
            scaling=self._scaling(values, instances),
            failures=_failures(values, instances, (warmup_s, last_s), life),
            pools=pools,
        )
        check_fits(table, fleet)
        return Episode(
            parameters={**values, "rate_rps": rate_rps},
            fleet=fleet,
            table=table,
            engines=engines[kind],
            seed=seed,
            warmup_s=warmup_s,
        )

    def _scaling(self, values: Mapping[str, float], instances: int) -> Scaling | None:
        if self.scaling is None:
            return None
        least = min(self.scaling.min_instances, instances)
        ready = max(round(values["ready_share"] * instances), least)
        if self.pools is not None:
            ready = max(ready, self.pools.least())
        return replace(self.scaling, ready=ready, min_instances=least, start_up_s=values["start_up_s"])

    def pins(self, options: Mapping[str, object], limits: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """The parameters that options of a reset pin.

        Raises:
            ValueError: naming the option, its value and what was expected.
        """
        checked_names(options, self.parameters, f"option of scenario {self.name!r}")
        pinned = {name: self.parameters[name].checked(name, value) for name, value in options.items()}
        if self.pools is not None and "fleet_size" in pinned and pinned["fleet_size"] < self.pools.least():
            raise ValueError(
                f"fleet_size = {pinned['fleet_size']:g}: expected {self.pools.least()} at least, for prefill and decode"
            )
        for name in _SIZES:
            if name in pinned and pinned[name] > limits[name][1]:
                raise ValueError(
                    f"{name} = {pinned[name]:g}: expected at most {limits[name][1]:g}, which it was made for"
                )
        return pinned


def _with_predictions(table: RequestTable, share: float, error: float, rng: np.random.Generator) -> RequestTable:
    """A share of the requests is predicted its own output, with an error."""
    if share == 0.0:
        return table
    predicted = LogNormalError(error).predict(table, int(rng.integers(2**63)))
    known = rng.random(len(table)) < share
    return replace(table, predicted_output_tokens=np.where(known, predicted, table.predicted_output_tokens))


def _failures(
    values: Mapping[str, float], instances: int, scored_s: tuple[float, float], rng: np.random.Generator
) -> Failures | None:
    """Losses at random times of the scored part, of one instance each."""
    lost = rng.permutation(instances)[: int(values["losses"])].tolist()
    times_s = rng.uniform(*scored_s, len(lost)).tolist()
    per_s = values["failures_per_hour"] / 3600.0
    if not lost and per_s == 0.0:
        return None
    return Failures(
        at=tuple(zip(times_s, lost, strict=True)),
        mtbf_s=1.0 / per_s if per_s > 0.0 else math.inf,
        notice_s=values["notice_s"],
        repair_s=values["repair_s"],
    )


def _scored_part_s(arrival_s: NDArray[np.float64], warmup_requests: int) -> tuple[float, float]:
    """When the warm-up ends, so many requests on but before the last open-loop arrival, and when that is."""
    last = len(arrival_s) - 1
    while math.isnan(arrival_s[last]):
        last -= 1
    first = min(warmup_requests, last)
    while math.isnan(arrival_s[first]):
        first += 1
    return float(arrival_s[first]), float(arrival_s[last])
