"""What happens beside the updates of a run: validation, early stop, checkpoints, curves, pictures, progress."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import HParam, Image

from fleetpilot.agents.export import network_of
from fleetpilot.agents.runtime import LearnedPolicy
from fleetpilot.envs import ENVIRONMENTS, FleetVectorEnv
from fleetpilot.fleet.view import KIND_DISPATCH
from fleetpilot.training.checkpoint import save_checkpoint
from fleetpilot.training.config import TrainConfig
from fleetpilot.training.latencies import latencies
from fleetpilot.training.validation import Validated, relative_cost, validate

CURVE = "validation.csv"
_FRAMES, _DECISIONS_PER_FRAME = 40, 20
_KINDS_OF_METRIC = ("validation/cost", "validation/best_cost")
"""Metrics of hparams: a fixed set, TensorBoard shows no others than those of a folder's first run."""


def runtime_policy(model: Any, config: TrainConfig, kinds: tuple[int, ...]) -> LearnedPolicy:
    """The policy as it would be deployed."""
    return LearnedPolicy("learned", network_of(model.policy.scorer, kinds), config.fallback, config.mode)


class Validator(BaseCallback):
    """Judges the policy every so many decisions, keeps the best, and ends training when it gets no better.

    Args:
        config: of the run.
        kinds: of decision.
        folder: of the run.
        reference: what a baseline comes to on the same episodes.
        state: ``best`` cost, ``stale`` validations since, ``next`` decisions; the checkpoint keeps it.
        say: called with a line per validation.
    """

    def __init__(
        self,
        config: TrainConfig,
        kinds: tuple[int, ...],
        folder: Path,
        reference: Mapping[str, Validated],
        state: dict[str, Any],
        say: Callable[[str], None],
    ):
        super().__init__()
        self.config, self.kinds, self.folder, self.reference = config, kinds, folder, reference
        self.state, self.say = state, say

    def _on_training_start(self) -> None:
        values = {key: value for key, value in vars(self.config.ppo).items()}
        hparams = {**values, "rows": self.config.rows, "group": self.config.group, "hidden": self.config.hidden}
        self.logger.record(
            "hparams",
            HParam({**hparams, "seed": self.config.seed}, dict.fromkeys(_KINDS_OF_METRIC, 0.0)),
            exclude=("stdout", "log", "json", "csv"),
        )

    def _on_step(self) -> bool:
        return self.state["stale"] < self.config.validation.patience

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.state["next"]:
            self.state["next"] = self.num_timesteps + self.config.validation.every
            self.judge()

    def judge(self) -> None:
        """Validate now."""
        settings = self.config.validation
        policy = runtime_policy(self.model, self.config, self.kinds)
        scenarios = self.config.environments()
        found = validate(policy, self.config.environment, scenarios, settings.episodes, settings.seed)
        cost = relative_cost(found, self.reference)
        better = cost < self.state["best"]
        self.state["best"] = min(cost, self.state["best"])
        self.state["stale"] = 0 if better else self.state["stale"] + 1
        self.state["history"].append(
            {
                "decisions": self.num_timesteps,
                "cost": cost,
                "returns": {name: one.metrics["return"].tolist() for name, one in found.items()},
                "goodput": {name: one.means()["goodput"] for name, one in found.items()},
            }
        )
        self._record(found, policy, cost)
        if better:
            self.model.save(self.folder / "best_model.zip")
        self._write()
        goodput = ", ".join(f"{name} {one.means()['goodput']:.2%}" for name, one in found.items())
        self.say(
            f"{self.num_timesteps:,} decisions: cost {cost:.3f} of the baselines'{' (best)' if better else ''}; "
            f"goodput {goodput}"
        )

    def _record(self, found: Mapping[str, Validated], policy: LearnedPolicy, cost: float) -> None:
        self.logger.record("validation/cost", cost)
        self.logger.record("validation/best_cost", self.state["best"])
        scenarios = self.config.environments()
        for name, one in found.items():
            values = one.means()
            if KIND_DISPATCH in self.kinds:
                values |= latencies(policy, self.config.environment, name, scenarios[name])
            for key, value in values.items():
                self.logger.record(f"validation-{name}/{key}", value)
        every = self.config.validation.render_every
        if every and len(self.state["history"]) % every == 1 % every:
            frames = self._episode(policy)
            self.logger.record("validation/frame", Image(frames[-1], "HWC"), exclude=("stdout", "log", "json", "csv"))
            write_gif(frames, self.folder / "videos" / f"decisions-{self.num_timesteps:09d}.gif")
        self.logger.dump(self.num_timesteps)

    def _episode(self, policy: LearnedPolicy) -> list[Any]:
        """Pictures from an episode of the first scenario."""
        name, arguments = next(iter(self.config.environments().items()))
        settings = {**ENVIRONMENTS[self.config.environment], "scenario": name, **arguments}
        envs = FleetVectorEnv(1, render_mode="rgb_array", **settings)
        envs.reset(seed=self.config.validation.seed)
        none = envs.single_action_space.n - 1  # type: ignore[attr-defined]
        frames = []
        for step in range(_FRAMES * _DECISIONS_PER_FRAME):
            choice = policy.decide(envs.view).choice
            _, _, terminated, *_ = envs.step(np.where(choice < 0, none, choice))
            if step % _DECISIONS_PER_FRAME == 0:
                frames.append(envs.render()[0])  # type: ignore[index]
            if terminated[0]:
                break
        envs.close()
        return frames

    def _write(self) -> None:
        """``evaluations.npz`` with the names that Stable-Baselines3's tools read, and the curve for people."""
        history = self.state["history"]
        results = [np.concatenate([np.array(values) for values in entry["returns"].values()]) for entry in history]
        np.savez(
            self.folder / "evaluations.npz",
            timesteps=[entry["decisions"] for entry in history],
            results=results,
            costs=[entry["cost"] for entry in history],
        )
        lines = [["decisions", "cost", *self.config.scenarios]]
        for entry in history:
            shares = (f"{entry['goodput'][name]:.4f}" for name in self.config.scenarios)
            lines.append([str(entry["decisions"]), f"{entry['cost']:.4f}", *shares])
        (self.folder / CURVE).write_text("".join(f"{','.join(line)}\n" for line in lines), "utf-8")


class Checkpoints(BaseCallback):
    """Saves everything that the future of the run depends on, between two updates.

    Inside ``with checkpoints.interruptible()`` Ctrl-C ends the run after such a save; a second one ends it at once.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        state: dict[str, Any],
        validation: dict[str, Any],
        say: Callable[[str], None],
    ):
        super().__init__()
        self.config, self.folder, self.state, self.validation = config, folder, state, validation
        self.say = say
        self.interrupted = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """See the class."""
        if threading.current_thread() is not threading.main_thread():  # signals are not ours
            yield
            return
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.say("interrupted: finishing the update (Ctrl-C again ends it)")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        due = self.num_timesteps >= self.state["next_checkpoint"]
        if due:
            self.state["next_checkpoint"] = self.num_timesteps + self.config.checkpoint_every
        if due or self.interrupted:
            save_checkpoint(self.model, self.folder, {"run": self.state, "validation": self.validation})
        if self.interrupted:
            self.say(f"kept; fleetpilot train --resume {self.folder} goes on from there")
            raise KeyboardInterrupt


class Progress(BaseCallback):
    """Says how far the run is and how long it will take."""

    def __init__(self, config: TrainConfig, say: Callable[[str], None]):
        super().__init__()
        self.config, self.say = config, say

    def _on_training_start(self) -> None:
        self.started_s, self.started_at = time.monotonic(), self.num_timesteps

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        done = self.num_timesteps - self.started_at
        rate = done / max(time.monotonic() - self.started_s, 1e-9)
        left_s = (self.config.decisions - self.num_timesteps) / rate
        self.say(
            f"{self.num_timesteps / self.config.decisions:.0%} of {self.config.decisions:,} decisions, "
            f"{rate:,.0f}/s, {left_s / 60:.0f} min left"
        )


def write_gif(frames: list[Any], path: Path) -> None:
    """An animation of (H, W, 3) uint8 pictures."""
    from PIL import Image as Picture

    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = (Picture.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=others, duration=150, loop=0)
