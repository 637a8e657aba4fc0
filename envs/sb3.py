"""Stable-Baselines3 trains on a vector environment: `SB3VecEnv`.

Stable-Baselines3 keeps the older convention: one `done` per row, one dict of infos per row, and the first observation
of the next episode in the step that ends one, the last one in its info. That is SAME_STEP, and the modes cannot be
converted into each other from outside. So the adapter takes a SAME_STEP environment and touches, in Python, only the
rows whose episode ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from fleetpilot.envs.rows import info_row, observation_row


class SB3VecEnv(VecEnv):
    """A Gymnasium vector environment as Stable-Baselines3 wants it.

    Episodes are counted as by its `Monitor`, so neither that nor `VecMonitor` is needed. The info of a row whose
    episode ended holds `terminal_observation`, `TimeLimit.truncated`, `episode` and everything in the row's
    `final_info`; that of any other row is empty.

    Attributes:
        step_infos: what the last step told of all rows, as the vector environment gave it.

    Args:
        vector_env: in mode SAME_STEP, returning fresh arrays at each step: Stable-Baselines3 keeps them until after the
            next one. `fleetpilot.envs.testing.check_vector_env` checks both.

    Raises:
        ValueError: if the mode is another one.
    """

    def __init__(self, vector_env: VectorEnv[Any, Any, Any]) -> None:
        mode = vector_env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode of {vector_env} = {mode}: expected AutoresetMode.SAME_STEP; make it with "
                "gymnasium.make_vec(id, num_envs=..., autoreset_mode=AutoresetMode.SAME_STEP)"
            )
        self.vector_env = vector_env
        self._actions: NDArray[Any]
        self.step_infos: dict[str, Any] = {}
        self._returns = np.zeros(vector_env.num_envs)
        self._lengths = np.zeros(vector_env.num_envs, np.int64)
        self._started_s = time.time()
        super().__init__(vector_env.num_envs, vector_env.single_observation_space, vector_env.single_action_space)

    def reset(self) -> VecEnvObs:
        """Start an episode in every row, with the seeds and options that were set since the last reset."""
        seeds: Any = None if self._seeds[0] is None else list(self._seeds)
        observations, infos = self.vector_env.reset(seed=seeds, options=self._options[0] or None)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [info_row(infos, row) for row in range(self.num_envs)]
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return observations

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Options of the next reset.

        Raises:
            ValueError: for a list whose entries differ: a vector environment takes one dict for all rows.
        """
        if isinstance(options, list):
            if len(options) != self.num_envs or any(entry != options[0] for entry in options):
                raise ValueError(f"options = {options}: expected one dict for all rows, or {self.num_envs} equal ones")
            options = options[0]
        super().set_options(options)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step; float32 rewards, and infos of the rows whose episode ended."""
        observations, rewards, terminations, truncations, infos = self.vector_env.step(self._actions)
        self.step_infos = infos
        self._returns += rewards
        self._lengths += 1
        dones = terminations | truncations
        sb3_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(dones).tolist():
            sb3_infos[row] = {
                **info_row(infos["final_info"], row),
                "terminal_observation": observation_row(infos["final_obs"], row),
                "TimeLimit.truncated": bool(truncations[row] and not terminations[row]),
                "episode": self._end_episode(row),
            }
            self.reset_infos[row] = {k: v for k, v in info_row(infos, row).items() if not k.startswith("final_")}
        return observations, rewards.astype(np.float32), dones, sb3_infos

    def _end_episode(self, row: int) -> dict[str, Any]:
        """Return, length and time since the start, as `Monitor` gives them."""
        episode = {
            "r": round(float(self._returns[row]), 6),
            "l": int(self._lengths[row]),
            "t": round(time.time() - self._started_s, 6),
        }
        self._returns[row] = 0.0
        self._lengths[row] = 0
        return episode

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """One picture per row."""
        frames: Any = self.vector_env.render()
        return frames

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The vector environment's attribute, once for each row: rows have none of their own."""
        value = getattr(self._owner(attr_name), attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set the vector environment's attribute.

        Raises:
            ValueError: for some rows only: rows have no attributes of their own.
        """
        if sorted(self._get_indices(indices)) != list(range(self.num_envs)):
            raise ValueError(f"indices = {indices}: expected None, {attr_name!r} can be set for all rows only")
        setattr(self._owner(attr_name), attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call the vector environment's method, once.

        Returns:
            A result that has one entry per row: those of the rows asked for; any other result: once for each row.
        """
        result = getattr(self._owner(method_name), method_name)(*method_args, **method_kwargs)
        by_row = isinstance(result, (np.ndarray, list, tuple)) and len(result) == self.num_envs
        return [result[row] if by_row else result for row in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        """True for `Monitor`, whose work is done here; no other wrapper can be around a row."""
        return [issubclass(wrapper_class, Monitor) for _ in self._get_indices(indices)]

    def _owner(self, name: str) -> VectorEnv[Any, Any, Any]:
        """The outermost of the vector environment and its wrappers that has the attribute."""
        env = self.vector_env
        while isinstance(env, VectorWrapper) and not hasattr(env, name):
            env = env.env
        return env
