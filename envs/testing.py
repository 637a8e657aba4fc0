"""A conformance check for vector environments: `check_vector_env`.

Gymnasium's `check_env` looks at single environments alone; this is its counterpart for native vector ones. The
contract: row `i` of a vector environment that was reset with `seed` behaves, bit for bit and in each autoreset mode,
like a single environment that was reset with `seed + i`::

    make_single = functools.partial(gymnasium.make, "fleetpilot.envs:fleetpilot/Fleet-v0")
    make_vector = functools.partial(gymnasium.make_vec, "fleetpilot.envs:fleetpilot/Fleet-v0")
    check_vector_env(make_vector, make_single)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NoReturn, Protocol

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from fleetpilot.envs.rows import info_row, observation_row

_RESETS = 3  # of all rows in mid-episode, about, and in mode DISABLED of each row by itself
_STEPS_KEPT = 3  # for so many steps, returned arrays are watched


class MakeVector(Protocol):
    """Makes the vector environment; `functools.partial(gymnasium.make_vec, id)` is one."""

    def __call__(self, *, num_envs: int, autoreset_mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
        """A new vector environment."""


def check_vector_env(
    make_vector: MakeVector,
    make_single: Callable[[], gymnasium.Env[Any, Any]],
    *,
    num_envs: int = 4,
    steps: int = 2_000,
    seed: int = 0,
) -> None:
    """Compare a vector environment with single ones, under random legal actions, in all three autoreset modes.

    Where the vector environment has a method `action_masks`, actions are drawn from the legal ones that it names.

    Args:
        make_vector: makes the vector environment.
        make_single: makes the single environment that each row must equal.
        num_envs: rows.
        steps: of each mode; many episodes should end in them.
        seed: of the environments, of the actions and of the resets in between.

    Raises:
        AssertionError: naming the mode, the step, the row, what differs, and what to do.
    """
    vectors = {mode: make_vector(num_envs=num_envs, autoreset_mode=mode) for mode in AutoresetMode}
    for mode, vector in vectors.items():
        singles = [make_single() for _ in range(num_envs)]
        _check_declarations(vector, singles[0], num_envs, mode)
        _check_reset(vector, mode, seed)
        _Comparison(vector, singles, mode, seed).run(steps)
        _check_reset(vector, mode, seed)
        vector.close()
        for single in singles:
            single.close()


def _check_declarations(
    vector: VectorEnv[Any, Any, Any], single: gymnasium.Env[Any, Any], num_envs: int, mode: AutoresetMode
) -> None:
    """What the environment says of itself."""
    declared = {
        "num_envs": num_envs,
        "single_observation_space": single.observation_space,
        "single_action_space": single.action_space,
        "observation_space": batch_space(single.observation_space, num_envs),
        "action_space": batch_space(single.action_space, num_envs),
        "autoreset_mode": mode,
    }
    for name, expected in declared.items():
        got = getattr(vector, name, None)
        if got != expected:
            _fail(mode.name, f"attribute {name} = {got}, expected {expected}", "set it in the constructor")
    if vector.metadata.get("autoreset_mode") is not mode:
        _fail(
            mode.name,
            f"metadata['autoreset_mode'] = {vector.metadata.get('autoreset_mode')}, expected {mode}",
            "set it on a copy of the metadata, not on the class's dict, which all environments share",
        )


def _check_reset(vector: VectorEnv[Any, Any, Any], mode: AutoresetMode, seed: int) -> None:
    """The same seeds give the same observations, whatever happened before."""
    first = deepcopy(vector.reset(seed=seed)[0])
    _check_in_space(f"{mode.name}, reset(seed={seed})", vector, first)
    vector.reset(seed=seed + vector.num_envs)
    again: Any = [seed + row for row in range(vector.num_envs)]
    for name, same_seeds in {f"reset(seed={seed}) again": seed, f"reset(seed={again})": again}.items():
        _require_same(
            f"{mode.name}, {name}",
            "observation",
            vector.reset(seed=same_seeds)[0],
            first,
            "draw from generators made of the seeds alone, that of row i of seed + i or of the i-th seed of a list",
        )


def _check_in_space(where: str, vector: VectorEnv[Any, Any, Any], observations: Any) -> None:
    if not vector.observation_space.contains(observations):
        _fail(
            where,
            "the observations are not in observation_space",
            "return the batched space's shapes and dtypes, within its bounds",
        )


class _Comparison:
    """A vector environment and as many single ones that do the same."""

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        singles: list[gymnasium.Env[Any, Any]],
        mode: AutoresetMode,
        seed: int,
    ) -> None:
        self.vector = vector
        self.singles = singles
        self.mode = mode
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.action_space = deepcopy(vector.single_action_space)
        self.action_space.seed(seed)
        self.observations: list[Any] = [None] * vector.num_envs  # the single environments' last ones
        self.ended = np.zeros(vector.num_envs, np.bool_)  # rows whose episode ended in the last step
        self.returned = _ReturnedArrays()
        self.where = mode.name

    def run(self, steps: int) -> None:
        episodes = 0
        reset_share = _RESETS / steps
        self.where = f"{self.mode.name}, first reset"
        self._reset_rows(np.ones(len(self.singles), np.bool_), self.seed, None)
        for step in range(1, steps + 1):
            self.where = f"{self.mode.name}, step {step}"
            self._step()
            episodes += int(self.ended.sum())
            if self.rng.random() < reset_share:
                self.where = f"{self.mode.name}, reset after step {step}"
                self._reset_rows(np.ones(len(self.singles), np.bool_), None, None)
            elif self.mode is AutoresetMode.DISABLED:
                self.where = f"{self.mode.name}, partial reset after step {step}"
                self._reset_some_rows(reset_share)
        if episodes == 0:
            _fail(self.mode.name, f"no episode ended in {steps} steps", "check with more steps or shorter episodes")

    def _reset_some_rows(self, share: float) -> None:
        """Those whose episode ended, and now and then others, with a new seed or going on with their generator."""
        mask = self.ended | (self.rng.random(len(self.singles)) < share)
        if not mask.any():
            return
        seed = int(self.rng.integers(2**31)) if self.rng.random() < 0.5 else None
        options = {"reset_mask": mask.copy()}
        self._reset_rows(mask, seed, options)
        if list(options) != ["reset_mask"] or not np.array_equal(options["reset_mask"], mask):
            _fail(
                self.where,
                "reset changed the caller's options",
                "read options.get('reset_mask'): wrappers read it after the environment, so it must not be popped",
            )

    def _reset_rows(self, mask: NDArray[np.bool_], seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset the rows in `mask` of both; the others must stay as they are."""
        observations, infos = self.vector.reset(seed=seed, options=options)
        for row in range(len(self.singles)):
            if mask[row]:
                row_seed = None if seed is None else seed + row
                expected, info = self.singles[row].reset(seed=row_seed)
                self.observations[row] = deepcopy(expected)
                advice = (
                    "go on with the row's own generator"
                    if seed is None
                    else f"seed row i with seed + i, here {row_seed}"
                )
                self._compare_infos(row, info_row(infos, row), info)
            else:
                advice = "a row that reset_mask leaves out must keep its state and repeat its observation"
            self._compare(row, "observation", observation_row(observations, row), self.observations[row], advice)
        self._check_returned(observations, infos)
        self.ended &= ~mask
        self.returned.watch(self.where, {"observation": observations, "info": infos})

    def _step(self) -> None:
        actions = self._legal_actions()
        room: Any = create_empty_array(self.action_space, len(actions))
        batch = concatenate(self.action_space, actions, room)
        observations, rewards, terminations, truncations, infos = self.vector.step(batch)
        outcomes = {"reward": rewards, "termination": terminations, "truncation": truncations}
        self._check_returned(observations, infos)
        self._check_outcomes(outcomes)
        for row, action in enumerate(actions):
            expected, *expected_outcomes, info = self._step_single(row, action, infos)
            self.observations[row] = deepcopy(expected)
            for (name, array), value in zip(outcomes.items(), expected_outcomes, strict=True):
                self._compare(row, name, array[row], array.dtype.type(value), self._advice(row))
            self._compare(
                row, "observation", observation_row(observations, row), self.observations[row], self._advice(row)
            )
            self._compare_infos(row, info_row(infos, row), info)
        self.ended = terminations | truncations
        self._check_final_masks(infos)
        self.returned.watch(self.where, {"observation": observations, **outcomes, "info": infos})

    def _step_single(self, row: int, action: Any, infos: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a step of the row must return: a step of the single environment, or its reset."""
        single = self.singles[row]
        if self.mode is AutoresetMode.NEXT_STEP and self.ended[row]:
            observation, info = single.reset()
            return observation, 0.0, False, False, info
        observation, reward, terminated, truncated, info = single.step(action)
        if self.mode is AutoresetMode.SAME_STEP and (terminated or truncated):
            self._compare_final(row, infos, observation, info)
            observation, info = single.reset()
        return observation, reward, terminated, truncated, info

    def _advice(self, row: int) -> str:
        if self.mode is AutoresetMode.NEXT_STEP and self.ended[row]:
            return "the step after an episode's end must ignore the action, reset the row and return reward 0"
        return "step each row as a single environment does, from its own state and generator alone"

    def _legal_actions(self) -> list[Any]:
        """One random action per row; of those that `action_masks` names, if there is such a method."""
        if not (hasattr(self.vector, "action_masks") and isinstance(self.action_space, Discrete)):
            return [self.action_space.sample() for _ in self.singles]
        masks = self.vector.action_masks()
        shape = (len(self.singles), int(self.action_space.n))
        if not (isinstance(masks, np.ndarray) and masks.dtype == np.bool_ and masks.shape == shape):
            _fail(self.where, f"action_masks() = {masks!r}", f"return a bool array of shape {shape}")
        for row in np.flatnonzero(~masks.any(axis=1)).tolist():
            _fail(f"{self.where}, row {row}", "no action is legal", "always leave one, such as none")
        for row in np.flatnonzero(~self.ended).tolist():
            single: NDArray[np.bool_] = self.singles[row].get_wrapper_attr("action_masks")()
            self._compare(row, "action_masks()", masks[row], single, "mask what is legal in the row's present state")
        return [self.action_space.sample(mask=mask.astype(np.int8)) for mask in masks]

    def _check_returned(self, observations: Any, infos: Mapping[str, Any]) -> None:
        _check_in_space(self.where, self.vector, observations)
        for key in infos:
            if key.startswith("_") and key[1:] in infos:
                continue
            mask = infos.get(f"_{key}")
            if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == self.ended.shape):
                _fail(
                    self.where,
                    f"infos[{key!r}] comes with the mask {mask!r}",
                    f"add infos['_{key}'], a bool array of shape {self.ended.shape}: which rows have it",
                )

    def _check_outcomes(self, outcomes: Mapping[str, Any]) -> None:
        for name, array in outcomes.items():
            dtype = np.dtype(np.float64 if name == "reward" else np.bool_)
            if not (isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == self.ended.shape):
                _fail(self.where, f"{name}s = {array!r}", f"return a {dtype} array of shape {self.ended.shape}")

    def _check_final_masks(self, infos: Mapping[str, Any]) -> None:
        """final_obs and final_info: of the rows that ended in this step, in mode SAME_STEP alone."""
        expected = self.ended & (self.mode is AutoresetMode.SAME_STEP)
        for key in ("final_obs", "final_info"):
            mask = infos.get(f"_{key}", np.zeros_like(expected))
            if not np.array_equal(mask, expected):
                _fail(
                    self.where,
                    f"infos['_{key}'] = {mask}, expected {expected}",
                    "give both for the rows whose episode ended in the step, in mode SAME_STEP and no other",
                )

    def _compare_final(self, row: int, infos: Mapping[str, Any], observation: Any, info: Mapping[str, Any]) -> None:
        for key in ("final_obs", "final_info"):
            if key not in infos:
                _fail(self.where, f"infos[{key!r}] is missing", "add it: it is all that is left of the last step")
        advice = "keep the episode's last observation before the row is reset"
        self._compare(row, "final_obs", observation_row(infos["final_obs"], row), observation, advice)
        self._compare_infos(row, info_row(infos["final_info"], row), info, "final_info")

    def _compare_infos(self, row: int, got: Mapping[str, Any], expected: Mapping[str, Any], name: str = "info") -> None:
        """Compare what both know."""
        for key in expected:
            if key in got:
                what = f"{name}[{key!r}]"
                if isinstance(expected[key], Mapping):
                    self._compare_infos(row, got[key], expected[key], what)
                else:
                    self._compare(row, what, got[key], expected[key], self._advice(row))

    def _compare(self, row: int, what: str, got: Any, expected: Any, advice: str) -> None:
        _require_same(f"{self.where}, row {row}", what, got, expected, advice)


class _ReturnedArrays:
    """Arrays that were returned are the caller's: they are written over at once, and watched for some steps more."""

    def __init__(self) -> None:
        self.kept: deque[list[tuple[str, NDArray[Any], NDArray[Any]]]] = deque(maxlen=_STEPS_KEPT)

    def watch(self, where: str, returned: Mapping[str, Any]) -> None:
        for name, array, content in (entry for step in self.kept for entry in step):
            if not _same(array, content):
                _fail(where, f"the {name} returned earlier has changed", "return fresh arrays at each step and reset")
        arrays = dict(_arrays("", returned))
        for name, array in arrays.items():
            if not array.flags.writeable:
                _fail(where, f"the {name} returned is read-only", "return fresh arrays, which a caller may write to")
            _write_over(array)
        self.kept.append([(name, array, array.copy()) for name, array in arrays.items()])


def _arrays(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays in what was returned, with their names; of infos not the masks, which may be shared."""
    if isinstance(value, Mapping):
        for key in value:
            if not (key.startswith("_") and key[1:] in value):
                yield from _arrays(f"{name}[{key!r}]" if name else key, value[key])
    elif isinstance(value, tuple) or (isinstance(value, np.ndarray) and value.dtype == np.object_):
        for index, part in enumerate(value):
            yield from _arrays(f"{name}[{index}]", part)
    elif isinstance(value, np.ndarray):
        yield name, value


def _write_over(array: NDArray[Any]) -> None:
    """Change every number."""
    if array.dtype.kind in "biu":
        np.invert(array, out=array)
    elif array.dtype.kind == "f":
        array[...] = np.nan


def _same(got: Any, expected: Any) -> bool:
    """Equal bit for bit, in type and shape."""
    if isinstance(expected, (Mapping, tuple)):
        keys = list(expected) if isinstance(expected, Mapping) else range(len(expected))
        return len(got) == len(expected) and all(_same(got[key], expected[key]) for key in keys)
    a, b = np.asarray(got), np.asarray(expected)
    if a.dtype == np.object_:
        return bool(got == expected)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _require_same(where: str, what: str, got: Any, expected: Any, advice: str) -> None:
    if isinstance(expected, Mapping) and isinstance(got, Mapping) and set(got) == set(expected):
        for key in expected:
            _require_same(where, f"{what}[{key!r}]", got[key], expected[key], advice)
    elif not _same(got, expected):
        _fail(where, f"{what} = {got!r}, expected {expected!r}", advice)


def _fail(where: str, found: str, advice: str) -> NoReturn:
    raise AssertionError(f"{where}: {found}: {advice}")
