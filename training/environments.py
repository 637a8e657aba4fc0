"""The environments of a training run: rows of several scenarios side by side, in groups that meet the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from fleetpilot.envs import ENVIRONMENTS, FleetVectorEnv
from fleetpilot.envs.rewards import COMPONENTS
from fleetpilot.envs.sb3 import SB3VecEnv
from fleetpilot.fleet.policy import Policy


class TrainingEnvs(VecEnv):
    """Rows of several scenarios, all with as many slots and the same kinds of decision.

    Consecutive rows form groups. A group's rows are seeded alike, so they draw the same episodes - requests, hardware,
    delays - and differ by what the policy does: common random numbers.

    Args:
        environment: an id of `fleetpilot.envs.ENVIRONMENTS`.
        scenarios: name -> what is changed in it (`fleetpilot.envs.FleetVectorEnv`); each gets as many rows.
        rows: in all.
        group: rows that meet the same requests.

    Raises:
        ValueError: the rows cannot be dealt out evenly.
    """

    def __init__(self, environment: str, scenarios: Mapping[str, Mapping[str, Any]], rows: int, group: int = 1):
        if rows % (len(scenarios) * group):
            raise ValueError(
                f"rows = {rows}: expected a multiple of {len(scenarios)} scenarios x group = {group}, "
                f"as {len(scenarios) * group}"
            )
        self.group = group
        self.scenarios = tuple(scenarios)
        arguments = ENVIRONMENTS[environment]
        self.parts = [
            SB3VecEnv(
                FleetVectorEnv(
                    rows // len(scenarios),
                    autoreset_mode=AutoresetMode.SAME_STEP,
                    **{**arguments, "scenario": name, **changes},
                )
            )
            for name, changes in scenarios.items()
        ]
        self.edges = np.cumsum([part.num_envs for part in self.parts])
        super().__init__(rows, self.parts[0].observation_space, self.parts[0].action_space)

    # --- what Stable-Baselines3 asks for -------------------------------------------------------------------------

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the groups, each with a number of its own, for the next reset."""
        first = int(np.random.randint(0, 2**31 - 1)) if seed is None else seed
        self._seeds = [first + row // self.group for row in range(self.num_envs)]
        return self._seeds

    def reset(self) -> VecEnvObs:
        """Begin an episode in every row."""
        for part, seeds in zip(self.parts, np.split(np.array(self._seeds), self.edges[:-1]), strict=True):
            part._seeds = seeds.tolist()
        observations = [part.reset() for part in self.parts]
        self._reset_seeds()
        return _joined(observations)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Hand every part its actions."""
        for part, own in zip(self.parts, np.split(actions, self.edges[:-1]), strict=True):
            part.step_async(own)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all parts."""
        observations, rewards, dones, infos = zip(*(part.step_wait() for part in self.parts), strict=True)
        return _joined(observations), np.concatenate(rewards), np.concatenate(dones), [*chain(*infos)]

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """One per row."""
        values = [value for part in self.parts for value in part.get_attr(attr_name)]
        return [values[row] for row in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Of all parts."""
        for part in self.parts:
            part.set_attr(attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """One result per row."""
        results = [r for part in self.parts for r in part.env_method(method_name, *method_args, **method_kwargs)]
        return [results[row] for row in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        """As of the adapter."""
        return self.parts[0].env_is_wrapped(wrapper_class) * len(self.parts)

    # --- what training asks for ----------------------------------------------------------------------------------

    @property
    def dt_s(self) -> NDArray[np.float64]:
        """(rows,) how long each row's last step took in simulated time."""
        return np.concatenate([part.step_infos["dt_s"] for part in self.parts])

    @property
    def components(self) -> NDArray[np.float64]:
        """(rows, components) of the last step's rewards."""
        names = [f"reward_{name}" for name in COMPONENTS]
        return np.concatenate([np.stack([part.step_infos[name] for name in names], axis=1) for part in self.parts])

    def decide(self, policies: Sequence[Policy]) -> NDArray[np.int64]:
        """(rows,) what a policy for each scenario would do now, as actions."""
        choices = [
            policy.decide(part.vector_env.view).choice  # type: ignore[attr-defined]
            for policy, part in zip(policies, self.parts, strict=True)
        ]
        choice = np.concatenate(choices)
        return np.where(choice < 0, self.action_space.n - 1, choice)  # type: ignore[attr-defined]

    def save_state(self) -> list[Any]:
        """Everything that the future of the rows depends on."""
        return [
            (part.vector_env.save_state(), part._returns.copy(), part._lengths.copy())  # type: ignore[attr-defined]
            for part in self.parts
        ]

    def restore_state(self, saved: Sequence[Any]) -> VecEnvObs:
        """Go on from there; the observations at that moment."""
        observations = []
        for part, (state, returns, lengths) in zip(self.parts, saved, strict=True):
            observations.append(part.vector_env.restore_state(state))  # type: ignore[attr-defined]
            part._returns[:], part._lengths[:] = returns, lengths
        return _joined(observations)


def _joined(observations: Sequence[Any]) -> dict[str, NDArray[np.float32]]:
    if len(observations) == 1:
        return observations[0]  # type: ignore[no-any-return]
    return {key: np.concatenate([part[key] for part in observations]) for key in observations[0]}
