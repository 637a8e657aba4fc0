"""One environment: `FleetEnv`, a batch of one over the kernel that steps many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.rendering import RENDER_MODES
from fleetpilot.envs.rows import info_row, observation_row
from fleetpilot.envs.vector_env import FleetVectorEnv, Observations, SavedState


class FleetEnv(gymnasium.Env[Observations, np.int64]):
    """Run a simulated fleet of LLM inference engines: dispatch, move and scale, or some of that.

    ## Description
    Requests arrive at a dispatcher in front of a fleet of vLLM engines. One step is one decision, always of one shape:
    choose an instance, or none. Engines batch continuously, chunk prefills, share prefixes, run out of KV memory and
    preempt; requests move between them with their KV cache; instances are started, drained and fail: docs/model.md is
    exact. The agent knows what a dispatcher can know: engines' metrics as old as the last poll, and its own book of
    requests in flight.

    | id                 | the agent answers                    | scenario          | all else                  |
    | ------------------ | ------------------------------------ | ----------------- | ------------------------- |
    | `Dispatch-v0`      | dispatch                             | `steady`          | never happens             |
    | `Disaggregated-v0` | prefill, decode                      | `pd_mixed_bursty` | never happens             |
    | `Fleet-v0`         | all of it                            | `tides`           |                           |
    | `Rebalance-v0`     | source, destination                  | `llumnix/M-M`     | by the baseline `llumnix` |
    | `Scale-v0`         | scale                                | `tides`           | by the baseline `llumnix` |

    Where the scenario has pools (`pools=Pools(("prefill", "decode", "decode"))`, roles that the slots have again and
    again), prefill and decode are asked in place of dispatch: where the prompt is processed, and, unless a mixed
    instance was chosen, which serves the request to its end, where it decodes then.

    ## Action Space
    `Discrete(instances + 1)`: an instance's slot, or, last, none.

    | kind of decision | an instance                                                                | none       |
    | ---------------- | -------------------------------------------------------------------------- | ---------- |
    | dispatch         | serves the request                                                         | hold it    |
    | prefill          | processes its prompt; mixed: serves it                                     | hold it    |
    | decode           | pulls the KV cache of the prompt and goes on (asked right after prefill)   | hold it    |
    | source           | a request leaves it (every 0.2 s, asked again until none)                  | no more    |
    | destination      | the request of the source goes there                                       | it stays   |
    | scale            | absent: start it; ready: drain it; draining: keep it (every 10 s, likewise)| no more    |

    A held request is asked about again when a request, or a prefill, finishes and every 0.1 s; after 2 s it must be
    dispatched. With `decode_choice="after_prefill"` decode is asked when the prompt is processed, and must be answered.
    None is always legal for source, destination and scale. An illegal action (an instance that the mask leaves out,
    holding when it is not allowed) counts as none, or, where none is not allowed either, as the instance with the
    fewest requests in flight; it is counted in the infos.

    ## Observation Space
    A `Dict` of float32 boxes. `N` is `instances`; docs/features.md lists every number with its unit, range, age and
    formula. Where not only dispatch is decided, states, roles, migrations and what the request has streamed are in it
    too.

    | key           | shape   | shape, not only dispatch | what                                              |
    | ------------- | ------- | ------------------------ | ------------------------------------------------- |
    | `instances`   | (N, 24) | (N, 35)                  | one row per slot, 0 where there is no instance    |
    | `request`     | (8,)    | (9,)                     | the request to be dispatched or moved, if any     |
    | `fleet`       | (11,)   | (15,)                    | the fleet as a whole                              |
    | `kind`        | (6,)    | (6,)                     | one-hot kind of decision                          |
    | `action_mask` | (N + 1,)| (N + 1,)                 | 1 for the actions that are legal; at least one is |

    Instances may be permuted: nothing in the observation depends on their order but the order of rows and mask.

    ## Rewards
    Minus the growth since the last decision of, weighted, the seconds that requests wait for their first token (0.1 per
    second), the requests that miss a target of their SLO class (1 each, when the target passes) and the seconds lost to
    preemption (0.1 per second). The seconds that instances are billed (starting, ready or draining) and the migrations
    weigh 0 by default: `reward=RewardWeights(instance_cost=0.01)`. `fleetpilot.envs.rewards` has a worked example and
    says why holding, dumping and waiting for the end do not pay. A request that fails, which takes the loss of all
    instances, is a miss.

    Decisions are irregular in time: a step's reward is what accrued until the next one, and `info["dt_s"]` says how
    long that was. To discount by time use `exp(-dt_s / tau)`, tau at least two lifetimes of a request: 10 s and more.

    Infos of a step: `dt_s`, the components `reward_waiting`, `reward_slo_miss`, `reward_preemption`,
    `reward_instance_cost`, `reward_migration`, and `invalid_actions` so far. The last step's also have
    `episode_metrics` (`fleetpilot.envs.kernel.METRICS`). Infos of a reset: `parameters`, what this episode was drawn to
    be.

    ## Starting State
    A fleet in operation: the first requests (100 per instance) were dispatched by join-shortest-queue, without moves or
    scaling. Workload, hardware (coefficients off the profile by up to 20 %), telemetry delay, start-up delay, failures
    and length are drawn for each episode from the scenario's ranges; `reset(options={"load": 0.9})` pins any of them
    for one episode.

    ## Episode End
    Terminated after a random number of requests, 1,000 per instance on average: the last step lasts until all are
    served. Truncated only after `max_episode_steps`, if given; `episode_metrics` then counts the requests that are
    still in the system as misses.

    ## Arguments
    `gymnasium.make("fleetpilot.envs:fleetpilot/Dispatch-v0", scenario="steady", instances=16, **changes)`. `scenario`
    is a name (`fleetpilot.envs.scenarios.SCENARIOS`) or a `Scenario`; `changes` set its parameters to a number or a
    range: `load=0.9`, `cv=(1.0, 4.0)`, `fleet_size=(8, 16)`, `losses=1`, `profile="a100-qwen3-8b"`,
    `rebalancing=Rebalancing(interval_s=1.0)`, `pools=Pools(("prefill", "decode"))`,
    `reward=RewardWeights(slo_miss=2.0)`. `kinds` are the kinds of decision that the agent answers, `others` is the
    baseline that answers what it can of the rest (`llumnix?low=20`); what nobody answers is not asked.
    `render_mode` is `ansi` or `rgb_array` (`human` shows the latter in a window and needs pygame).

    ## Vectorized environment
    `gymnasium.make_vec("fleetpilot.envs:fleetpilot/Dispatch-v0", num_envs=64, autoreset_mode=..., threads=1)` makes a
    native `FleetVectorEnv`; row i is the same as this environment reset with `seed + i`, bit for bit, in all autoreset
    modes.

    ## Version History
    * v0: first version.
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES, "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        scenario: str | os.PathLike[str] | Scenario = "steady",
        instances: int = 16,
        kinds: Sequence[str] = ("dispatch",),
        others: str | None = None,
        **changes: Any,
    ):
        for name, owner in {"num_envs": "make_vec", "autoreset_mode": "make_vec", "max_episode_steps": "make"}.items():
            if name in changes:
                raise TypeError(
                    f"{name} = {changes[name]!r}: expected none here: it is an argument of gymnasium.{owner}"
                )
        self.render_mode = render_mode
        self._batch = FleetVectorEnv(
            1,
            None,
            render_mode,
            AutoresetMode.DISABLED,
            scenario=scenario,
            instances=instances,
            kinds=kinds,
            others=others,
            **changes,
        )
        self.scenario = self._batch.scenario
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: of this and the following episodes.
            options: parameters to pin for this one.

        Raises:
            ValueError: naming the option, its value and what was expected.
        """
        super().reset(seed=seed)
        self._batch.set_generator(0, self.np_random)
        observations, infos = self._batch.reset(options=options)
        return observation_row(observations, 0), info_row(infos, 0)

    def step(self, action: np.int64 | int) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Answer the pending decision."""
        observations, rewards, terminated, truncated, infos = self._batch.step(np.array([action]))
        return (
            observation_row(observations, 0),
            float(rewards[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            info_row(infos, 0),
        )

    def render(self) -> Any:
        """A text, or an (H, W, 3) uint8 picture."""
        frames = self._batch.render()
        return frames[0] if frames else None

    def action_masks(self) -> NDArray[np.bool_]:
        """(instances + 1,) which actions are legal now; always one at least."""
        return self._batch.action_masks()[0]

    def save_state(self) -> SavedState:
        """Everything that the future depends on."""
        return self._batch.save_state()

    def restore_state(self, saved: SavedState) -> Observations:
        """Go on from a saved state of this environment or one that was made alike; the observation at that moment."""
        return observation_row(self._batch.restore_state(saved), 0)

    def close(self) -> None:
        """Nothing is left open."""
        self._batch.close()
