"""A random walk, as a single environment and as a native vector one that keeps all conventions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

LEFT, NONE, RIGHT = range(3)
EDGE = 3.0
MAX_STEPS = 12

Observation = dict[str, NDArray[np.float32]]


class Walk(gymnasium.Env[Observation, np.int64]):
    """Walk left or right with noise; ends beyond an edge, is truncated after `MAX_STEPS`, sometimes both at once."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = Dict({"place": Box(-np.inf, np.inf, (2,)), "action_mask": Box(0, 1, (3,))})
    action_space = Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = float((options or {}).get("place", self.np_random.normal()))
        self.steps = 0
        return self._observation(), {"steps": 0}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.place += float(action - NONE) + float(self.np_random.normal())
        self.steps += 1
        terminated, truncated = abs(self.place) > EDGE, self.steps == MAX_STEPS
        info: dict[str, Any] = {"steps": self.steps}
        if terminated or truncated:
            info["episode_metrics"] = {"length": self.steps, "last_place": self.place}
        return self._observation(), -abs(self.place), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """One may not walk off on purpose."""
        return np.array([self.place > 1 - EDGE, True, self.place < EDGE - 1])

    def render(self) -> NDArray[np.uint8]:
        return np.full((2, 2, 3), self.steps, np.uint8)

    def _observation(self) -> Observation:
        place = np.array([self.place, self.steps], np.float32)
        return {"place": place, "action_mask": self.action_masks().astype(np.float32)}


class VectorWalk(VectorEnv[dict[str, NDArray[np.float32]], NDArray[np.int64], NDArray[Any]]):
    """Rows of `Walk`, with dense `final_obs` and `final_info`."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode, render_mode: str | None = None) -> None:
        self.num_envs = num_envs
        self.autoreset_mode = autoreset_mode
        self.render_mode = render_mode
        self.metadata = {**type(self).metadata, "autoreset_mode": autoreset_mode}
        self.single_observation_space = Walk.observation_space
        self.single_action_space = Walk.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.rows = [Walk() for _ in range(num_envs)]
        self.ended = np.zeros(num_envs, np.bool_)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        seeds = (
            [None if seed is None else seed + i for i in range(self.num_envs)] if not isinstance(seed, list) else seed
        )
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for row in np.flatnonzero(mask):
            self.rows[row].reset(seed=seeds[row], options=options)
        self.ended &= ~mask
        return self._observations(), self._infos(mask)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        for row, env in enumerate(self.rows):
            if self.autoreset_mode is AutoresetMode.NEXT_STEP and self.ended[row]:
                env.reset()
            else:
                _, rewards[row], terminated[row], truncated[row], _ = env.step(actions[row])
        self.ended = terminated | truncated
        everywhere = np.ones(self.num_envs, np.bool_)
        infos = self._infos(everywhere)
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self.ended.any():
            final: dict[str, Any] = {"final_obs": self._observations(), "final_info": infos}
            for row in np.flatnonzero(self.ended):
                self.rows[row].reset()
            ended, self.ended = self.ended, np.zeros(self.num_envs, np.bool_)
            infos = {**self._infos(everywhere), **final, "_final_obs": ended, "_final_info": ended}
        return self._observations(), rewards, terminated, truncated, infos

    def action_masks(self) -> NDArray[np.bool_]:
        return np.stack([env.action_masks() for env in self.rows])

    def render(self) -> tuple[NDArray[np.uint8], ...]:
        return tuple(env.render() for env in self.rows)

    def _observations(self) -> Observation:
        rows = [env._observation() for env in self.rows]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def _infos(self, mask: NDArray[np.bool_]) -> dict[str, Any]:
        infos: dict[str, Any] = {"steps": np.array([env.steps for env in self.rows]), "_steps": mask}
        if self.ended.any():
            metrics = {"length": infos["steps"].copy(), "last_place": np.array([env.place for env in self.rows])}
            infos |= {"episode_metrics": metrics, "_episode_metrics": self.ended.copy()}
        return infos
