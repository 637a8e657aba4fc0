"""What a training run is: `TrainConfig`, read from a short TOML file."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from fleetpilot.agents import load_policy
from fleetpilot.cluster.config import Rebalancing, Scaling
from fleetpilot.envs import ENVIRONMENTS, FleetVectorEnv, RewardWeights, load_scenario
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.policy import require_compiled

Changes = Mapping[str, Any]
"""Of a scenario: numbers or ranges of its parameters, and tables ``reward``, ``admission``, ``rebalancing`` and
``scaling``."""

_TABLES: dict[str, Any] = {
    "reward": RewardWeights,
    "admission": Admission,
    "rebalancing": Rebalancing,
    "scaling": Scaling,
}


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """The warm start.

    Attributes:
        policies: baselines, or exports, to choose among: the one with the best validation return of each scenario is
            imitated.
        decisions: to learn from.
    """

    policies: tuple[str, ...]
    decisions: int


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Settings of PPO.

    Attributes:
        learning_rate: at the start; falls linearly to a tenth.
        tau_s: of the discount by time: two lifetimes of a request at least.
        trace_s: how far ahead an advantage looks before it trusts the critic.
        steps: decisions of every row between two updates.
        batch_size: decisions in one gradient.
        epochs: passes over the decisions of an update, at most.
        entropy: weight of the entropy, which is 1 where all legal choices are equally likely.
        clip: range of the probability ratio.
        target_kl: an update ends early beyond 1.5 of this.
        critic_decisions: after imitation, decisions in which the critic alone learns.
    """

    learning_rate: float = 3e-4
    tau_s: float = 20.0
    trace_s: float = 2.0
    steps: int = 64
    batch_size: int = 2048
    epochs: int = 4
    entropy: float = 0.001
    clip: float = 0.2
    target_kl: float = 0.02
    critic_decisions: int = 100_000


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How progress is judged.

    Attributes:
        every: decisions between two validations.
        episodes: of each scenario, always the same.
        patience: validations without a better one after which training stops.
        seed: of the episodes; none of training is below a million.
        render_every: validations between two rendered episodes; 0 for none.
    """

    every: int = 500_000
    episodes: int = 16
    patience: int = 10
    seed: int = 1_000
    render_every: int = 5


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the curriculum.

    Attributes:
        share: of the run's decisions.
        changes: to all scenarios, after their own.
    """

    share: float
    changes: Changes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        name: of the configuration.
        summary: one line.
        environment: id of `fleetpilot.envs`.
        decisions: of PPO, in all rows together.
        scenarios: name -> what is changed in it; rows are dealt out evenly. What follows a ``#`` in a name tells
            entries of the same scenario apart: ``chat_and_batch#overload``.
        instances: slots of the environments.
        rows: environments stepped at once.
        group: rows that meet the same requests; their mean is the baseline of the workload.
        hidden: width of the network.
        seed: of everything.
        fallback: baseline that decides where an export is not at home.
        mode: of the export: ``greedy`` or ``sample``; validation uses the same.
        checkpoint_every: decisions between two checkpoints.
        changes: to all scenarios, before their own.
        stages: the curriculum; one stage without changes by default.
        imitation: the warm start, or None.
        ppo: settings of PPO.
        validation: how progress is judged.
        time_factors: scenario -> factor on `Learning.tau_s` and `trace_s`, where requests live longer than elsewhere.
    """

    name: str
    environment: str
    decisions: int
    scenarios: Mapping[str, Changes]
    summary: str = ""
    instances: int = 16
    rows: int = 128
    group: int = 4
    hidden: int = 32
    seed: int = 0
    fallback: str = "lmetric"
    mode: str = "greedy"
    checkpoint_every: int = 2_000_000
    changes: Changes = field(default_factory=dict)
    stages: tuple[Stage, ...] = (Stage(share=1.0),)
    imitation: Imitation | None = None
    ppo: Learning = field(default_factory=Learning)
    validation: Validation = field(default_factory=Validation)
    time_factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.environment not in ENVIRONMENTS:
            raise ValueError(f"environment = {self.environment!r}: expected one of {', '.join(ENVIRONMENTS)}")
        if not self.scenarios:
            raise ValueError("scenarios: expected one at least")
        self._check_scenarios()
        for name, factor in self.time_factors.items():
            if name not in self.scenarios:
                known = ", ".join(self.scenarios)
                raise ValueError(f"time_factors: {name} is no scenario here; expected one of {known}")
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
                raise ValueError(f"time_factors: {name} = {factor!r}: expected a finite number > 0")
        for owner in (self, self.ppo, self.validation, *([self.imitation] if self.imitation else [])):
            _check_numbers(owner)
        require_compiled("fallback", load_policy(self.fallback))
        for name in self.imitation.policies if self.imitation else ():
            require_compiled("imitation.policies", load_policy(name))
        shares = [stage.share for stage in self.stages]
        if not shares or min(shares) <= 0 or abs(sum(shares) - 1.0) > 1e-6:
            raise ValueError(f"stages: shares are {shares}; expected numbers > 0 whose sum is 1")

    def _check_scenarios(self) -> None:
        of_environments = inspect.signature(FleetVectorEnv).parameters
        for stage in range(len(self.stages)):
            for name, arguments in self.environments(stage).items():
                changes = {key: value for key, value in arguments.items() if key not in of_environments}
                try:
                    load_scenario(arguments["scenario"]).with_changes(**changes)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"scenarios: {name}: {error}") from None

    def admission(self) -> Admission | None:
        """What is turned away in all scenarios."""
        given = self.changes.get("admission")
        return None if given is None else Admission(**given)

    def environments(self, stage: int = -1) -> dict[str, dict[str, Any]]:
        """Scenario -> arguments of its environments, in a stage of the curriculum; the last one by default."""
        return {
            name: {
                "scenario": name.partition("#")[0],
                "instances": self.instances,
                **_arguments({**self.changes, **changes, **self.stages[stage].changes}),
            }
            for name, changes in self.scenarios.items()
        }


def _check_numbers(owner: Any) -> None:
    """Counts are whole numbers from 1, all other numbers finite and not negative."""
    for f in dataclasses.fields(owner):
        value = getattr(owner, f.name)
        zero_is_fine = f.name in ("seed", "entropy", "critic_decisions", "render_every")
        if f.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < (not zero_is_fine)):
            raise ValueError(f"{f.name} = {value!r}: expected a whole number from {int(not zero_is_fine)}")
        if f.type == "float":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (0 <= value < float("inf")) or (value == 0 and not zero_is_fine):
                raise ValueError(f"{f.name} = {value!r}: expected a finite number > 0")
        if f.type == "str" and not isinstance(value, str):
            raise ValueError(f"{f.name} = {value!r}: expected a text")


def _arguments(changes: Changes) -> dict[str, Any]:
    """As `FleetVectorEnv` wants them: ranges as tuples, tables as what they describe."""
    arguments = {}
    for name, value in changes.items():
        if name in _TABLES:
            fields = [each.name for each in dataclasses.fields(_TABLES[name])]
            if not isinstance(value, Mapping) or set(value) - set(fields):
                raise ValueError(f"{name} = {value!r}: expected a table with some of {', '.join(fields)}")
            arguments[name] = _TABLES[name](**value)
        else:
            arguments[name] = tuple(value) if isinstance(value, list) and name != "kinds" else value
    return arguments


# --- files -----------------------------------------------------------------------------------------------------------


def configurations() -> dict[str, str]:
    """Name -> summary of the configurations that come with fleetpilot."""
    folder = resources.files("fleetpilot.training.configs")
    names = sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))
    return {name: load_config(name).summary for name in names}


def load_config(name: str) -> TrainConfig:
    """A configuration that comes with fleetpilot, by name, or any other by its file, which ends in ``.toml``.

    Raises:
        ValueError: it is not known, or something in it is not: naming it and what was expected.
    """
    if name.endswith(".toml"):
        text, stem = Path(name).read_text("utf-8"), Path(name).stem
    else:
        file = resources.files("fleetpilot.training.configs") / f"{name}.toml"
        if not file.is_file():
            known = ", ".join(configurations())
            raise ValueError(f"config {name!r} is not known; expected one of {known}, or a .toml file")
        text, stem = file.read_text("utf-8"), name
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: not TOML ({error})") from None
    try:
        return _config({"name": stem, **table})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """The configuration with some settings changed.

    Args:
        config: is left as it is.
        settings: as they would stand in the file, by their place in it: ``{"ppo.learning_rate": 3e-4}``.

    Raises:
        ValueError: a setting is not known or its value is wrong; naming it.
    """
    table = tomllib.loads(config_to_toml(config))
    for place, value in settings.items():
        *tables, key = place.split(".")
        inner = table
        for name in tables:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{place} is not known: {name} is no table")
        inner[key] = value
    return _config(table)


def _config(table: dict[str, Any]) -> TrainConfig:
    parts: dict[str, Any] = dict(table)
    for key, kind in {"ppo": Learning, "validation": Validation, "imitation": Imitation}.items():
        if key in parts:
            parts[key] = _made(kind, key, _tuples(parts[key]))
    if "stages" in parts:
        parts["stages"] = tuple(_made(Stage, "stages", stage) for stage in parts["stages"])
    return _made(TrainConfig, "", parts)  # type: ignore[no-any-return]


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _made(kind: Any, where: str, table: Any) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r}: expected a table of {', '.join(known)}")
    for name in table:
        if name not in known:
            raise ValueError(f"{f'{where}.' if where else ''}{name} is not known; expected one of {', '.join(known)}")
    missing = [
        name
        for name, f in known.items()
        if name not in table and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{f'{where}.' if where else ''}{missing[0]}: expected it to be given")
    return kind(**table)


def config_to_toml(config: TrainConfig) -> str:
    """The resolved configuration, as `load_config` reads it."""
    lines: list[str] = []
    tables: list[tuple[str, Any]] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            tables.append((f"[{f.name}]", dataclasses.asdict(value)))
        elif f.name == "stages":
            tables += [("[[stages]]", dataclasses.asdict(stage)) for stage in value]
        elif f.name == "scenarios":
            tables += [(f"[scenarios.{json.dumps(name)}]", changes) for name, changes in value.items()]
        elif f.name == "changes":
            tables.append(("[changes]", value))
        elif value is not None:
            lines.append(f"{f.name} = {_toml(value)}")
    for head, table in tables:
        lines += ["", head, *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_toml(inner)}" for key, inner in value.items())
        return f"{{ {inner} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
