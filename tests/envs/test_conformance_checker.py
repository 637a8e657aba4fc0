"""The checker accepts what keeps the conventions, and names each planted defect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import VectorWalk, Walk

from fleetpilot.envs.testing import check_vector_env

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


def test_accepts_a_correct_environment() -> None:
    check_vector_env(VectorWalk, Walk, num_envs=3, steps=1_000)


class PatchedSyncVectorEnv(SyncVectorEnv):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=options and dict(options))


def test_accepts_gymnasiums_own_but_for_the_option_that_it_takes_away() -> None:
    def make(cls: type[SyncVectorEnv], num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
        return cls([Walk] * num_envs, autoreset_mode=mode)

    check_vector_env(lambda num_envs, autoreset_mode: make(PatchedSyncVectorEnv, num_envs, autoreset_mode), Walk)
    with pytest.raises(AssertionError, match=r"DISABLED.*reset changed the caller's options"):
        check_vector_env(lambda num_envs, autoreset_mode: make(SyncVectorEnv, num_envs, autoreset_mode), Walk)


class ReusesItsBuffer(VectorWalk):
    def _observations(self) -> Any:
        fresh = super()._observations()
        buffer = self.__dict__.setdefault("buffer", fresh)
        for key in buffer:
            buffer[key][...] = fresh[key]
        return buffer


class ReusesItsRewards(VectorWalk):
    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        buffer = self.__dict__.setdefault("buffer", rewards)
        buffer[...] = rewards
        return observations, buffer, *rest


class RepeatsTheArrayItReturned(VectorWalk):
    def step(self, actions: Any) -> Any:
        step = super().step(actions)
        self.last = step[0]
        return step

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        observations, infos = super().reset(seed=seed, options=options)
        if options is not None:
            left_out = ~options["reset_mask"]
            observations["place"][left_out] = self.last["place"][left_out]
        return observations, infos


class SeedsRowsTheSame(VectorWalk):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=[seed] * self.num_envs if isinstance(seed, int) else seed, options=options)


class SeedsWithTheFirstOfAList(VectorWalk):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=[2 * s for s in seed] if isinstance(seed, list) else seed, options=options)


class ForgetsItsSeedAtTheEnd(VectorWalk):
    def step(self, actions: Any) -> Any:
        step = super().step(actions)
        for row in np.flatnonzero(step[2] | step[3]):
            self.rows[row].np_random = np.random.default_rng()
        return step


class PopsOptions(VectorWalk):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).pop("reset_mask", None)
        return super().reset(seed=seed, options=None if mask is None else {"reset_mask": mask})


class ResetsAllRows(VectorWalk):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)


class GivesTheWrongFinalObservation(VectorWalk):
    def step(self, actions: Any) -> Any:
        observations, *rest, infos = super().step(actions)
        if "final_obs" in infos:
            infos["final_obs"] = {key: value.copy() for key, value in observations.items()}
        return observations, *rest, infos


class GivesTheWrongFinalInfo(VectorWalk):
    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        if "final_info" in infos:
            infos["final_info"]["episode_metrics"]["length"] += 1
        return *rest, infos


class GivesNoFinalInfo(VectorWalk):
    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        return *rest, {key: value for key, value in infos.items() if not key.endswith("final_info")}


class GivesFinalObservationsOfAllRows(VectorWalk):
    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        if "final_obs" in infos:
            infos["_final_obs"] = np.ones(self.num_envs, np.bool_)
        return *rest, infos


class RewardsTheResetStep(VectorWalk):
    def step(self, actions: Any) -> Any:
        ended = self.ended & (self.autoreset_mode is NEXT_STEP)
        observations, rewards, *rest = super().step(actions)
        return observations, np.where(ended, 1.0, rewards), *rest


class ActsInTheResetStep(VectorWalk):
    def step(self, actions: Any) -> Any:
        ended = self.ended & (self.autoreset_mode is NEXT_STEP)
        step = super().step(actions)
        for row in np.flatnonzero(ended):
            self.rows[row].step(actions[row])
        return step


class ResetsAgainAfterAReset(VectorWalk):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        ended = self.ended.copy()
        result = super().reset(seed=seed, options=options)
        self.ended = ended
        return result


class MixesUpTheTwoEnds(VectorWalk):
    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return observations, rewards, truncated, terminated, infos


class CouplesItsRows(VectorWalk):
    def step(self, actions: Any) -> Any:
        if self.rows[0].steps == 5:
            self.rows[1].np_random.normal()
        return super().step(actions)


class SetsTheClassesMetadata(VectorWalk):
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode) -> None:
        super().__init__(num_envs, autoreset_mode)
        type(self).metadata["autoreset_mode"] = autoreset_mode
        del self.__dict__["metadata"]


class HasNoModeAttribute(VectorWalk):
    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode) -> None:
        super().__init__(num_envs, autoreset_mode)
        self.__dict__["autoreset_mode"] = autoreset_mode.value


class DoesNotBatchItsSpace(VectorWalk):
    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode) -> None:
        super().__init__(num_envs, autoreset_mode)
        self.observation_space = self.single_observation_space


class ObservesInFloat64(VectorWalk):
    def _observations(self) -> Any:
        return {key: value.astype(np.float64) for key, value in super()._observations().items()}


class RewardsInFloat32(VectorWalk):
    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, rewards.astype(np.float32), *rest


class GivesNoMaskForAnInfo(VectorWalk):
    def _infos(self, mask: Any) -> Any:
        infos = super()._infos(mask)
        del infos["_steps"]
        return infos


class LeavesNothingLegal(VectorWalk):
    def action_masks(self) -> Any:
        masks = super().action_masks()
        masks[masks.sum(axis=1) < 3] = False
        return masks


class MasksTheWrongSide(VectorWalk):
    def action_masks(self) -> Any:
        return super().action_masks()[:, ::-1].copy()


class MasksInNumbers(VectorWalk):
    def action_masks(self) -> Any:
        return super().action_masks().astype(np.int8)


DEFECTS = {
    ReusesItsBuffer: "observation.* returned earlier has changed: return fresh arrays",
    ReusesItsRewards: "the reward returned earlier has changed: return fresh arrays",
    RepeatsTheArrayItReturned: "DISABLED, partial reset .*must keep its state and repeat its observation",
    SeedsRowsTheSame: r"reset\(seed=\[0, 1, 2\]\).*that of row i of seed \+ i",
    SeedsWithTheFirstOfAList: r"reset\(seed=\[0, 1, 2\]\).*the i-th seed of a list",
    ForgetsItsSeedAtTheEnd: "NEXT_STEP.* row",
    PopsOptions: "DISABLED, partial reset .*reset changed the caller's options",
    ResetsAllRows: "DISABLED, partial reset .*must keep its state",
    GivesTheWrongFinalObservation: "SAME_STEP.* final_obs.*before the row is reset",
    GivesTheWrongFinalInfo: r"SAME_STEP.* final_info\['episode_metrics'\]\['length'\]",
    GivesNoFinalInfo: r"SAME_STEP.* infos\['final_info'\] is missing",
    GivesFinalObservationsOfAllRows: r"SAME_STEP.* infos\['_final_obs'\] = \[ True  True  True\]",
    RewardsTheResetStep: "NEXT_STEP.* reward = .*1.0.* must ignore the action, reset the row and return reward 0",
    ActsInTheResetStep: "NEXT_STEP.* row",
    ResetsAgainAfterAReset: "NEXT_STEP.* row",
    MixesUpTheTwoEnds: "termination = ",
    CouplesItsRows: "row 1.*from its own state and generator alone",
    SetsTheClassesMetadata: r"metadata\['autoreset_mode'\].*not on the class's dict",
    HasNoModeAttribute: "attribute autoreset_mode",
    DoesNotBatchItsSpace: "attribute observation_space",
    ObservesInFloat64: "not in observation_space",
    RewardsInFloat32: "rewards = .*float64",
    GivesNoMaskForAnInfo: r"add infos\['_steps'\]",
    LeavesNothingLegal: "no action is legal: always leave one",
    MasksTheWrongSide: r"action_masks\(\) = ",
    MasksInNumbers: "return a bool array",
}


@pytest.mark.parametrize("defective", DEFECTS, ids=lambda cls: cls.__name__)
def test_names_a_planted_defect(defective: type[VectorWalk]) -> None:
    with pytest.raises(AssertionError, match=f"(?s){DEFECTS[defective]}"):
        check_vector_env(defective, Walk, num_envs=3, steps=1_000)


def test_wants_to_see_an_episode_end() -> None:
    with pytest.raises(AssertionError, match="no episode ended in 1 steps"):
        check_vector_env(VectorWalk, Walk, num_envs=1, steps=1)
