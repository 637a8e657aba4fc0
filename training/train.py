"""A whole training run in a folder of its own: `train`, and `resume`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import set_random_seed
from torch.distributions import Distribution

from fleetpilot.agents import load_policy
from fleetpilot.agents.export import export_policy
from fleetpilot.agents.sb3_policy import SetPolicy
from fleetpilot.envs import ENVIRONMENTS
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.policy import CompiledPolicy, kinds_of
from fleetpilot.fleet.view import KIND_DECODE, KIND_DISPATCH, KIND_PREFILL
from fleetpilot.training.callbacks import CURVE, Checkpoints, Progress, Validator
from fleetpilot.training.checkpoint import read_checkpoint, restore
from fleetpilot.training.config import TrainConfig, config_to_toml, load_config
from fleetpilot.training.environments import TrainingEnvs
from fleetpilot.training.imitation import imitate
from fleetpilot.training.ppo import FleetPPO
from fleetpilot.training.validation import Validated, validate

CONFIG, COMMAND, EXPORT = "config.toml", "command.txt", "export"
_FIRST_SEED = 1_000_000  # below are those of validation
_STAGE_SEEDS = 100_000

Say = Callable[[str], None]


def train(config: TrainConfig, out: Path, *, command: str | None = None, say: Say = print, tick: Say = print) -> Path:
    """Train a policy.

    Args:
        config: of the run.
        out: folder of runs; this one's is ``out/ppo/<environment>_<n>``.
        command: the command line for the record; this process's by default.
        say: called with every line worth keeping.
        tick: called with lines of progress.

    Returns:
        The run's folder, laid out as by RL-Zoo3: ``best_model.zip``, ``evaluations.npz``, ``<environment>.zip`` at the
        end, and in ``<environment>/`` ``config.toml`` (resolved) and ``command.txt``; besides ``export/``,
        ``tensorboard/``, ``videos/`` and ``checkpoint.pt.gz``.
    """
    return begin(config, _new_folder(config, out), command=command, say=say, tick=tick)


def begin(
    config: TrainConfig, folder: Path, *, command: str | None = None, say: Say = print, tick: Say = print
) -> Path:
    """`train` in a folder of one's own choice, which must not exist."""
    inner = folder / _short(config.environment)
    inner.mkdir(parents=True)
    (inner / CONFIG).write_text(config_to_toml(config), "utf-8")
    (inner / COMMAND).write_text((shlex.join(sys.argv) if command is None else command) + "\n", "utf-8")
    say(f"run folder {folder}")
    with _settings():
        return _Run(config, folder, say, tick).go()


def resume(folder: Path, *, say: Say = print, tick: Say = print) -> Path:
    """Go on with a run from its last checkpoint, exactly as it would have gone on.

    Raises:
        ValueError: there is no checkpoint.
    """
    state = read_checkpoint(folder)
    config = run_config(folder)
    with _settings():
        return _Run(config, folder, say, tick).go(state)


def run_config(folder: Path) -> TrainConfig:
    """The configuration of a run.

    Raises:
        ValueError: it is no run's folder.
    """
    found = sorted(folder.glob(f"*/{CONFIG}"))
    if len(found) != 1:
        raise ValueError(f"{folder}: expected the folder of a training run, with one */{CONFIG}")
    return load_config(str(found[0]))


def kinds_of_config(config: TrainConfig) -> tuple[int, ...]:
    """The kinds of decision that its agent answers."""
    names = {"kinds": ["dispatch"], **ENVIRONMENTS[config.environment], **config.changes}["kinds"]
    return tuple(kind for kind, name in enumerate(KINDS) if name in names)


def export_run(
    folder: Path,
    out: Path | None = None,
    mode: str | None = None,
    fallback: str | None = None,
    admission: Mapping[str, float] | None = None,
) -> Path:
    """Export the best policy of a run, its configuration and its curve.

    Args:
        folder: of the run.
        out: folder of the export, ``export`` in that of the run by default.
        mode: see `export_policy`; as all others the run's by default.
        fallback: likewise.
        admission: fields of its `Admission`.

    Raises:
        ValueError: it is no run's folder, there is no model yet, or an argument is wrong.
    """
    config = run_config(folder)
    model = folder / "best_model.zip"
    if not model.is_file():
        raise ValueError(f"{model}: no such file; expected a run that was validated once at least")
    return _export(
        FleetPPO.load(model, device="cpu"), config, folder, out or folder / EXPORT, mode, fallback, admission
    )


def _export(
    model: Any,
    config: TrainConfig,
    folder: Path,
    out: Path,
    mode: str | None = None,
    fallback: str | None = None,
    admission: Mapping[str, float] | None = None,
) -> Path:
    from fleetpilot.evaluation.provenance import provenance

    export_policy(
        model.policy.scorer,
        kinds_of_config(config),
        out,
        fallback=fallback or config.fallback,
        mode=mode or config.mode,
        admission=replace(config.admission() or Admission(), **admission) if admission else config.admission(),
        provenance={
            **provenance(),
            "config": config.name,
            "environment": config.environment,
            "scenarios": list(config.scenarios),
            "seed": config.seed,
            "decisions": int(model.num_timesteps),
            "command": (folder / _short(config.environment) / COMMAND).read_text("utf-8").strip(),
        },
    )
    shutil.copy(folder / _short(config.environment) / CONFIG, out / "training.toml")
    shutil.copy(folder / CURVE, out)
    return out


def _short(environment: str) -> str:
    return environment.rpartition("/")[2]


def _new_folder(config: TrainConfig, out: Path) -> Path:
    """``<out>/ppo/<environment>_<n>``, n one more than the last."""
    base = out / "ppo"
    name = _short(config.environment)
    numbers = [path.name.rpartition("_")[2] for path in base.glob(f"{name}_*")]
    return base / f"{name}_{max([int(n) for n in numbers if n.isdecimal()], default=0) + 1}"


class _settings:
    """One thread, for small networks and the same result everywhere, and no checks of every distribution."""

    def __enter__(self) -> None:
        self.threads, self.checks = torch.get_num_threads(), Distribution._validate_args
        torch.set_num_threads(1)
        Distribution.set_default_validate_args(False)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.threads)
        Distribution.set_default_validate_args(self.checks)


class _Run:
    """One run: environments, model and callbacks, stage by stage."""

    def __init__(self, config: TrainConfig, folder: Path, say: Say, tick: Say):
        self.config, self.folder, self.say, self.tick = config, folder, say, tick
        self.kinds = kinds_of_config(config)
        self.state: dict[str, Any] = {"stage": 0, "next_checkpoint": 0}
        self.validation: dict[str, Any] = {"best": np.inf, "stale": 0, "next": 0, "history": []}
        if config.imitation is None:  # an untrained policy is not at home anywhere: its fallback would be judged
            self.validation["next"] = config.validation.every

    def go(self, checkpoint: dict[str, Any] | None = None) -> Path:
        """Train to the end; from a checkpoint if there is one."""
        config = self.config
        set_random_seed(config.seed)
        if checkpoint:
            self.state.update(checkpoint["more"]["run"])
            self.validation.update(checkpoint["more"]["validation"])
        if checkpoint:
            self.references = self.state["references"]
        else:
            experts, self.references = self._references()
            self.state["references"] = self.references
        model = self._model(self._envs(self.state["stage"]))
        model.set_logger(configure(str(self.folder / "tensorboard"), ["tensorboard"]))
        if checkpoint:
            restore(model, checkpoint)
        elif config.imitation:
            self._imitate(model, experts)
        validator = Validator(config, self.kinds, self.folder, self.references, self.validation, self.say)
        checkpoints = Checkpoints(config, self.folder, self.state, self.validation, self.say)
        callbacks = CallbackList([validator, checkpoints, Progress(config, self.tick)])
        callbacks.init_callback(model)  # a run that goes on may be at its end
        with checkpoints.interruptible():
            self._learn(model, callbacks)
        validator.judge()
        model.save(self.folder / f"{_short(config.environment)}.zip")
        export_run(self.folder)
        self.say(f"exported to {self.folder / EXPORT}")
        return self.folder

    def _learn(self, model: FleetPPO, callbacks: CallbackList) -> None:
        """The stages that are left."""
        config, first = self.config, self.state["stage"]
        ends = np.cumsum([part.share for part in config.stages]) * config.decisions
        for stage in range(first, len(config.stages)):
            if stage > first:
                self.state["stage"] = stage
                self._change_environments(model, self._envs(stage))
            left = round(float(ends[stage])) - model.num_timesteps
            if left > 0 and self.validation["stale"] < config.validation.patience:
                fresh = model.num_timesteps == 0 and model._last_obs is None
                model.learn(left, callbacks, reset_num_timesteps=fresh)

    def _envs(self, stage: int) -> TrainingEnvs:
        envs = TrainingEnvs(
            self.config.environment, self.config.environments(stage), self.config.rows, self.config.group
        )
        envs.seed(_FIRST_SEED * (1 + self.config.seed) + _STAGE_SEEDS * stage)
        return envs

    def _change_environments(self, model: FleetPPO, envs: TrainingEnvs) -> None:
        model.env.close()  # type: ignore[union-attr]
        model.set_env(envs)
        model.rollout_buffer.envs = envs  # type: ignore[attr-defined]

    def _model(self, envs: TrainingEnvs) -> FleetPPO:
        settings = self.config.ppo
        model = FleetPPO(
            SetPolicy,
            envs,
            decisions=self.config.decisions,
            critic_decisions=settings.critic_decisions if self.config.imitation else 0,
            learning_rate=settings.learning_rate,
            n_steps=settings.steps,
            batch_size=settings.batch_size,
            n_epochs=settings.epochs,
            ent_coef=settings.entropy,
            clip_range=settings.clip,
            target_kl=settings.target_kl,
            rollout_buffer_kwargs={
                "tau_s": self._per_row(settings.tau_s * self._time_factors()),
                "trace_s": self._per_row(settings.trace_s * self._time_factors()),
                "scale": self._per_row(1.0 / self._units()),
            },
            policy_kwargs={"hidden": self.config.hidden},
            device="cpu",
        )
        model.rollout_buffer.envs = envs  # type: ignore[attr-defined]
        return model

    def _time_factors(self) -> NDArray[np.float64]:
        return np.array([self.config.time_factors.get(name, 1.0) for name in self.config.scenarios])

    def _units(self) -> NDArray[np.float64]:
        """Of each scenario, what the reference costs in `Learning.tau_s`: the critic's values are around -1."""
        tau_s = self.config.ppo.tau_s * self._time_factors()
        metrics = [self.references[name].metrics for name in self.config.scenarios]
        cost_per_s = np.array([-m["return"].sum() / m["duration_s"].sum() for m in metrics])
        return np.maximum(cost_per_s * tau_s, 1e-3)

    def _per_row(self, of_scenarios: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.repeat(of_scenarios, self.config.rows // len(of_scenarios))

    def _references(self) -> tuple[list[CompiledPolicy], dict[str, Validated]]:
        """The best baseline of each scenario, and what it comes to on the episodes of validation."""
        config = self.config
        names = config.imitation.policies if config.imitation else (config.fallback,)
        experts, references = [], {}
        for scenario, arguments in config.environments().items():
            found = {}
            for name in names:
                policy: Any = load_policy(name)
                known = set(kinds_of(policy))
                known |= {KIND_PREFILL, KIND_DECODE} if KIND_DISPATCH in known else set()
                if missing := set(self.kinds) - known:
                    words = ", ".join(KINDS[kind] for kind in sorted(missing))
                    raise ValueError(f"imitation.policies: {name} does not answer {words}; expected one that does")
                settings = config.validation
                found[name] = validate(
                    policy, config.environment, {scenario: arguments}, settings.episodes, settings.seed
                )[scenario]
            best = min(found, key=lambda name: found[name].cost)
            self.say(f"{scenario}: best baseline {best}, goodput {found[best].means()['goodput']:.2%}")
            experts.append(load_policy(best))
            references[scenario] = found[best]
        return experts, references  # type: ignore[return-value]

    def _imitate(self, model: FleetPPO, experts: list[CompiledPolicy]) -> None:
        assert self.config.imitation is not None
        envs: Any = model.env
        seeds = list(envs._seeds)
        rng = np.random.default_rng(self.config.seed)
        imitate(model.policy, envs, experts, self.config.imitation.decisions, rng, self.tick)
        envs.seed(seeds[0] + _STAGE_SEEDS // 2)
