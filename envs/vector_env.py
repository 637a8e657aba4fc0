"""Many environments in one: `FleetVectorEnv` steps all of them in one call of the kernel."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from fleetpilot.agents import load_policy
from fleetpilot.cluster.batch import ClusterBatch
from fleetpilot.cluster.state import State
from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.kernel import EPISODE, METRICS, Outputs, begin_rows, outputs
from fleetpilot.envs.parameters import MAX_INSTANCES, checked_count, checked_type
from fleetpilot.envs.rendering import RENDER_MODES, render_row
from fleetpilot.envs.rewards import COMPONENTS
from fleetpilot.envs.scenarios import load_scenario
from fleetpilot.envs.threads import Stepper
from fleetpilot.fleet.admission import admission_array
from fleetpilot.fleet.features import KINDS, Feature, feature_arrays, feature_scratch, features, features_for
from fleetpilot.fleet.jit import UNCOMPILED
from fleetpilot.fleet.policy import CompiledPolicy, kind_bits, require_compiled
from fleetpilot.fleet.view import (
    KIND_DECODE,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SCALE,
    KIND_SOURCE,
    FleetView,
)

Observations = dict[str, NDArray[np.float32]]
Infos = dict[str, Any]


_MOST_ENVS, _MOST_THREADS = 65_536, 1024
_MOST_STEPS = int(np.iinfo(np.int64).max)
_TRIES = 100
_REWARDS = [(f"reward_{name}", f"_reward_{name}") for name in COMPONENTS]
_DECIDED = (KIND_DISPATCH, KIND_PREFILL, KIND_DECODE, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE)


def observation_space(instances: int, kinds: Collection[int] = (KIND_DISPATCH,)) -> Dict:
    """Of one environment with so many slots for instances, for an agent that answers these kinds of decision.

    docs/features.md names what the numbers are.
    """
    tables = features_for(kinds)
    return Dict(
        {
            "instances": _box(tables["instances"], instances),
            "request": _box(tables["request"]),
            "fleet": _box(tables["fleet"]),
            "kind": Box(0.0, 1.0, (len(KINDS),), np.float32),
            "action_mask": Box(0.0, 1.0, (instances + 1,), np.float32),
        }
    )


def _box(table: tuple[Feature, ...], *shape: int) -> Box:
    low, high = (np.array([getattr(feature, end) for feature in table], np.float32) for end in ("low", "high"))
    return Box(
        np.broadcast_to(low, (*shape, len(table))), np.broadcast_to(high, (*shape, len(table))), dtype=np.float32
    )


def _kinds(names: object) -> tuple[int, ...]:
    """Kinds of decision by their names.

    Raises:
        TypeError: it is no sequence.
        ValueError: a name is not known, or there is none.
    """
    known = [KINDS[kind] for kind in _DECIDED]
    expected = f"some of {', '.join(known)}"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"kinds = {names!r}: expected a list of {expected}")
    if not names or any(name not in known for name in names):
        raise ValueError(f"kinds = {names!r}: expected {expected}")
    return tuple(kind for kind in _DECIDED if KINDS[kind] in names)


def _deciders(kinds: tuple[int, ...], others: CompiledPolicy | None, *, pools: bool) -> set[int]:
    """The kinds of decision that someone answers: the agent those of `kinds`, `others` what it can of the rest.

    Who dispatches chooses in pools as well.

    Raises:
        ValueError: nobody dispatches, or sources have no destinations.
    """
    answered = {*kinds, *(others.kinds if others else ())}
    said = f"kinds = {[KINDS[kind] for kind in kinds]}, others = {others.name if others else None!r}"
    needed = (KIND_PREFILL, KIND_DECODE) if pools else (KIND_DISPATCH,)
    for kind in () if KIND_DISPATCH in answered else needed:
        if kind not in answered:
            raise ValueError(f"{said}: expected one of them to answer {KINDS[kind]}")
    if (KIND_SOURCE in answered) != (KIND_DESTINATION in answered):
        raise ValueError(f"{said}: expected them to answer source and destination, or neither")
    if KIND_DISPATCH in kinds:
        answered -= {KIND_PREFILL, KIND_DECODE} - set(kinds)
    return answered


@dataclass(frozen=True)
class SavedState:
    """A `FleetVectorEnv` at one moment, for `FleetVectorEnv.restore_state`."""

    clusters: State
    episodes: NDArray[np.void]
    loaded: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    generators: list[dict[str, Any]]


class FleetVectorEnv(VectorEnv[Observations, NDArray[np.int64], NDArray[Any]]):
    """A batch of fleets; what one of them is, `fleetpilot.envs.fleet_env.FleetEnv` describes.

    Row `i` is, bit for bit, the single environment that is reset with ``seed + i``, in every autoreset mode and with
    any number of threads. All arrays that `reset` and `step` return are fresh. Infos are arrays with a mask ``_key``
    for every ``key``. In mode SAME_STEP
    ``final_obs`` and ``final_info`` are dense: arrays of all rows, of which ``_final_obs`` says which count.

    Args:
        num_envs: rows, at most 65,536.
        max_episode_steps: truncate episodes after so many steps.
        render_mode: ``ansi`` or ``rgb_array``.
        autoreset_mode: who resets a row whose episode ended, and when. With DISABLED it is the caller, with
            ``reset(options={"reset_mask": rows})``.
        scenario: name of a scenario (`fleetpilot.envs.scenarios`), of a workload or of a trace file, or a `Scenario`.
        instances: slots for instances, the N of the spaces, at most 4,096; a fleet may be smaller (`fleet_size`).
        threads: that step the rows, at most: a step too short to be shared is not (`fleetpilot.envs.threads`); the
            attribute of this name says how many do.
        kinds: of decision that the agent answers: some of ``dispatch``, ``prefill``, ``decode``, ``source``,
            ``destination``, ``scale``. With pools, dispatch stands for prefill and decode.
        others: a baseline without state (`fleetpilot.baselines`), or the folder of an exported policy, that answers
            what it can of the other kinds. What nobody answers is not asked.
        **changes: of the scenario: parameters as a number or a range, `profile`, `reward`, `max_hold_s`, `admission`,
            `rebalancing`, `scaling`, `pools` (`Scenario.with_changes`).
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES, "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        scenario: str | os.PathLike[str] | Scenario = "steady",
        instances: int = 16,
        threads: int = 1,
        kinds: Sequence[str] = ("dispatch",),
        others: str | None = None,
        **changes: Any,
    ):
        num_envs = checked_count("num_envs", num_envs, _MOST_ENVS)
        instances = checked_count("instances", instances, MAX_INSTANCES)
        threads = checked_count("threads", threads, _MOST_THREADS)
        if max_episode_steps is not None:
            max_episode_steps = checked_count("max_episode_steps", max_episode_steps, _MOST_STEPS)
        checked_type("others", others, (str, type(None)), "the name of a baseline, or None")
        self._kinds = _kinds(kinds)
        other_policy = None if others is None else require_compiled("others", load_policy(others))
        if isinstance(scenario, os.PathLike):
            scenario = os.fspath(scenario)
        checked_type("scenario", scenario, (str, Scenario), "the name of a scenario, a trace file, or a Scenario")
        if autoreset_mode not in [*AutoresetMode, *(mode.value for mode in AutoresetMode)]:
            modes = ", ".join(mode.value for mode in AutoresetMode)
            raise ValueError(f"autoreset_mode = {autoreset_mode!r}: expected an AutoresetMode, one of {modes}")
        if render_mode not in (None, *RENDER_MODES):
            raise ValueError(f"render_mode = {render_mode!r}: expected one of {', '.join(RENDER_MODES)}, or None")
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        chosen = (load_scenario(scenario) if isinstance(scenario, str) else scenario).with_changes(**changes)
        self._answered = _deciders(self._kinds, other_policy, pools=chosen.pools is not None)
        self.scenario = replace(
            chosen,
            rebalancing=chosen.rebalancing if KIND_SOURCE in self._answered else None,
            scaling=chosen.scaling if KIND_SCALE in self._answered else None,
        )
        self.single_observation_space = observation_space(instances, self._kinds)
        self.single_action_space = Discrete(instances + 1)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._shape = num_envs, instances
        self._limits = self.scenario.limits(instances)
        warm_up = require_compiled("warm_up", load_policy(self.scenario.warm_up))
        self._policies = warm_up, other_policy or warm_up  # they must live
        second = self._policies[1]
        self._deciders: tuple[int, Any, int] = kind_bits(self._kinds), second.address, kind_bits(second.kinds)
        self._warm_up: tuple[Any, int] = warm_up.address, kind_bits(warm_up.kinds)
        self._cluster = ClusterBatch(self.scenario.size(num_envs, instances))
        self._episodes: NDArray[np.void] = np.zeros(num_envs, EPISODE)
        if UNCOMPILED:
            self._episodes = self._episodes.view(np.recarray)
        self._episodes["max_steps"] = max_episode_steps or _MOST_STEPS
        self._loaded = np.zeros(num_envs, np.bool_)
        self._ended = np.ones(num_envs, np.bool_)
        self._any_ended = True
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._seeds = [-1] * num_envs
        self._chosen: NDArray[Any] = np.full(num_envs, instances)  # last actions, for pictures
        self._metrics = np.zeros((num_envs, len(METRICS)))
        weights = self.scenario.reward.array()
        self._outputs = outputs(num_envs, instances, self._kinds)
        admission = admission_array(self.scenario.admission)
        self._stepper = Stepper(
            self._cluster, self._episodes, self._metrics, weights, admission, self._deciders, threads
        )
        self.threads = self._stepper.threads

    # --- Gymnasium ---------------------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observations, Infos]:
        """Begin an episode in every row, or in those of ``options["reset_mask"]``.

        Args:
            seed: of row i ``seed + i``; or one for each row, None to go on with its generator.
            options: ``reset_mask``, (num_envs,) bool; all others pin parameters of these episodes: see
                `Scenario.parameters`.

        Returns:
            The observations of all rows; infos of the rows that were reset.

        Raises:
            ValueError: naming the seed or option, its value and what was expected.
        """
        checked_type("options", options, (dict, type(None)), "a dict of parameters to pin, or None")
        pins = dict(options or {})
        mask = self._reset_mask(pins.pop("reset_mask", None))
        pinned = self.scenario.pins(pins, self._limits)
        for row, row_seed in enumerate(self._row_seeds(seed)):
            if row_seed is not None and mask[row]:
                self._generators[row], self._seeds[row] = seeding.np_random(row_seed)
        if not (mask | self._loaded).all():
            raise ResetNeeded("a reset_mask leaves out rows that were never reset: reset all rows first")
        observations = (
            feature_arrays(*self._shape, self._kinds)._asdict()
            if mask.all()
            else features(self._cluster.view, self._kinds)
        )
        infos: Infos = {}
        self._begin(np.flatnonzero(mask), pinned, observations, infos)
        return observations, infos

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observations, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Infos]:
        """Answer the pending decision of every row.

        Args:
            actions: (num_envs,) an instance's slot, or `instances` for none. An illegal one counts as none.

        Raises:
            ResetNeeded: before the first reset, or in mode DISABLED with a row whose episode ended.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions: got {actions.dtype} of shape {actions.shape}, expected integers of ({self.num_envs},)"
            )
        starting = self._ended
        any_starting = self._any_ended
        if any_starting and (self.autoreset_mode is not AutoresetMode.NEXT_STEP or not self._loaded.all()):
            raise ResetNeeded(f"rows {np.flatnonzero(starting).tolist()} have no episode to step: reset them first")
        self._chosen = actions
        out = self._outputs()
        ended = self._stepper.step(actions.astype(np.int64, copy=False), starting, out)
        observations = _observations(out)
        stepped = ~starting
        infos = _step_infos(out, stepped)
        if any_starting:
            rows = np.flatnonzero(starting)
            for array in (out.rewards, out.terminated, out.truncated, out.dt_s, out.invalid_actions, out.components):
                array[rows] = 0
            self._begin(rows, {}, observations, infos)
        if ended:
            self._end(out, observations, infos)
        return observations, out.rewards, out.terminated, out.truncated, infos

    def _end(self, out: Outputs, observations: Observations, infos: Infos) -> None:
        """Episodes ended: their metrics, and the next episodes in mode SAME_STEP."""
        ended = out.terminated | out.truncated
        metrics = np.where(ended[:, None], self._metrics, 0.0)
        infos["episode_metrics"] = {name: metrics[:, k].copy() for k, name in enumerate(METRICS)}
        infos["episode_metrics"] |= {f"_{name}": ended.copy() for name in METRICS}
        infos["_episode_metrics"] = ended.copy()
        self._ended, self._any_ended = ended, True
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return
        final_info = dict(infos)
        infos.clear()
        for name, values in final_info.items():
            if not isinstance(values, dict):
                infos[name] = values & ~ended if name.startswith("_") else values.copy()
        del infos["_episode_metrics"]
        infos["final_obs"] = {name: values.copy() for name, values in observations.items()}
        infos["final_info"] = final_info
        infos["_final_obs"], infos["_final_info"] = ended.copy(), ended.copy()
        self._begin(np.flatnonzero(ended), {}, observations, infos)

    def render(self) -> tuple[Any, ...] | None:
        """One frame per row: text, or an (H, W, 3) uint8 picture."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() without a render_mode; give one to the constructor")
            return None
        chosen = [int(slot) if 0 <= slot < self._shape[1] else None for slot in self._chosen]
        return tuple(
            render_row(self._cluster, row, self.render_mode, chosen=chosen[row]) for row in range(self.num_envs)
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads."""
        self._stepper.close()

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """One generator per row."""
        return tuple(self._generator(row) for row in range(self.num_envs))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """One seed per row."""
        return tuple(self._seeds[row] for row in range(self.num_envs) if self._generator(row))

    # --- more ---------------------------------------------------------------------------------------------------------

    @property
    def view(self) -> FleetView:
        """What a policy is asked that answers the pending decisions, live: copy what is kept."""
        return self._cluster.view

    def action_masks(self) -> NDArray[np.bool_]:
        """(num_envs, instances + 1) which actions are legal now; always one at least."""
        view = self._cluster.view
        return np.concatenate([view.candidates, view.may_hold[:, None]], axis=1)

    def save_state(self) -> SavedState:
        """Everything that the future depends on."""
        generators = [dict(self._generator(row).bit_generator.state) for row in range(self.num_envs)]
        return SavedState(
            self._cluster.save(), self._episodes.copy(), self._loaded.copy(), self._ended.copy(), generators
        )

    def restore_state(self, saved: SavedState) -> Observations:
        """Go on from a saved state of this environment or one that was made alike.

        Returns:
            The observations at that moment.

        Raises:
            TypeError: it is no saved state.
            ValueError: it is of an environment of another size.
        """
        checked_type("saved", saved, SavedState, "what save_state returned")
        self._cluster.restore(saved.clusters)
        self._episodes[...] = saved.episodes
        self._loaded, self._ended = saved.loaded.copy(), saved.ended.copy()
        self._any_ended = bool(self._ended.any())
        for row, state in enumerate(saved.generators):
            self._generator(row).bit_generator.state = state
        return features(self._cluster.view, self._kinds)

    def set_generator(self, row: int, generator: np.random.Generator) -> None:
        """Draw the row's next episodes from this generator."""
        self._generators[row], self._seeds[row] = generator, -1

    def _generator(self, row: int) -> np.random.Generator:
        generator = self._generators[row]
        if generator is None:
            generator, self._seeds[row] = seeding.np_random()
            self._generators[row] = generator
        return generator

    def _reset_mask(self, mask: object) -> NDArray[np.bool_]:
        if mask is None:
            return np.ones(self.num_envs, np.bool_)
        if not (
            isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self.num_envs,) and mask.any()
        ):
            raise ValueError(
                f"reset_mask = {mask!r}: expected a bool array of shape ({self.num_envs},), one at least True"
            )
        return mask.copy()

    def _row_seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + row for row in range(self.num_envs)]
        seeds = list(seed) if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str) else []
        whole = all(row_seed is None or isinstance(row_seed, int | np.integer) for row_seed in seeds)
        if len(seeds) != self.num_envs or not whole:
            raise ValueError(
                f"seed = {seed!r}: expected a whole number, or one or None for each of {self.num_envs} rows"
            )
        return [None if row_seed is None else int(row_seed) for row_seed in seeds]

    def _begin(
        self, rows: NDArray[np.int64], pinned: dict[str, float], observations: Observations, infos: Infos
    ) -> None:
        """Begin episodes in these rows: write their first observations, and their parameters into the infos.

        Raises:
            RuntimeError: all of many episodes of a row are over before the agent has anything to decide.
        """
        parameters = {row: self._load(row, pinned) for row in rows.tolist()}
        tries, over = 1, rows
        while self._run_to_first_decision(over, observations):
            over = over[self._episodes["steps"][over] < 0]
            if tries == _TRIES:
                raise RuntimeError(
                    f"row {over[0]}: {_TRIES} episodes were over before a decision of the agent's: expected longer "
                    "ones (scored_requests, and the trace if they are parts of one)"
                )
            tries += 1
            parameters.update({row: self._load(row, pinned) for row in over.tolist()})
        begun = np.zeros(self.num_envs, np.bool_)
        begun[rows] = True
        self._ended = self._ended & ~begun
        self._any_ended = bool(self._ended.any())
        infos["parameters"] = {}
        infos["_parameters"] = begun
        for name in parameters[int(rows[0])]:
            values = np.zeros(self.num_envs)
            values[rows] = [parameters[row][name] for row in rows.tolist()]
            infos["parameters"][name] = values
            infos["parameters"][f"_{name}"] = begun.copy()

    def _run_to_first_decision(self, rows: NDArray[np.int64], observations: Observations) -> int:
        """See `begin_rows`."""
        view = self._cluster.view
        return int(
            begin_rows(
                self._cluster.handle,
                rows,
                self._episodes,
                self._deciders[0],
                *self._warm_up,
                *self._deciders[1:],
                view.instances,
                view.request,
                view.fleet,
                feature_scratch(self._shape[1]),
                *observations.values(),
            )
        )

    def _load(self, row: int, pinned: dict[str, float]) -> dict[str, float]:
        """Load an episode of the row's own; returns its parameters."""
        episode = self.scenario.draw(self._generator(row), self._limits, pinned)
        self._cluster.load(
            row,
            episode.fleet,
            episode.table,
            seed=episode.seed,
            stop_s=np.inf,
            engines=episode.engines,
            kinds=self._answered,
        )
        self._episodes["warmup_s"][row] = episode.warmup_s
        self._loaded[row] = True
        return episode.parameters


def _observations(out: Outputs) -> Observations:
    return {
        "instances": out.instances,
        "request": out.request,
        "fleet": out.fleet,
        "kind": out.kind,
        "action_mask": out.action_mask,
    }


def _step_infos(out: Outputs, stepped: NDArray[np.bool_]) -> Infos:
    """What every step tells, of the rows that were stepped."""
    infos: Infos = {
        "dt_s": out.dt_s,
        "_dt_s": stepped,
        "invalid_actions": out.invalid_actions,
        "_invalid_actions": stepped,
    }
    for (name, mask), component in zip(_REWARDS, out.components.T, strict=True):
        infos[name] = component
        infos[mask] = stepped
    return infos
