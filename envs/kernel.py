"""One step of many environments in one call: carry out answers, run to the next decisions, write what is seen and paid.

A row is one environment. Rows do not touch each other, so any split of them over threads computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import kernel as cluster
from fleetpilot.cluster.memory import env_at, view_fleet_at, view_instance_at
from fleetpilot.cluster.state import ENDED, NEED_DECISION, NIL
from fleetpilot.envs.rewards import BILLED_S, COMPONENTS, COSTS, MIGRATIONS, billed_s, write_components
from fleetpilot.fleet.admission import admitted
from fleetpilot.fleet.features import feature_arrays, write_features
from fleetpilot.fleet.jit import inlined, kernel, part
from fleetpilot.fleet.policy import answers, choose_at, knows
from fleetpilot.fleet.view import KIND_DISPATCH

EPISODE = np.dtype(
    [
        ("warmup_s", "f8"),  # until then the warm-up policy decides
        ("max_steps", "i8"),  # the episode is truncated after so many
        ("steps", "i8"),
        ("at_risk", "i8"),  # requests in the system at the first observation that had not missed a target
        ("total_reward", "f8"),
        ("moved", "i8"),  # migrations completed before the first observation
        ("start", "f8", (COSTS,)),  # costs at the first observation
        ("costs", "f8", (COSTS,)),  # costs at the last one
    ],
    align=True,
)
"""What a row's episode is and has come to."""

METRICS = (
    "return",
    "decisions",
    "duration_s",
    "requests",
    "finished",
    "misses",
    "slo_attainment",
    "waiting_s",
    "preemption_loss_s",
    "generated_tokens",
    "invalid_actions",
    "migrations",
    "instance_s",
)
"""What is known of an episode at its end, in the order in which `_write_metrics` writes it."""


class Outputs(NamedTuple):
    """What a step returns, in fresh arrays. `E` rows, `N` instances."""

    instances: NDArray[np.float32]  # (E, N, F)
    request: NDArray[np.float32]  # (E, R)
    fleet: NDArray[np.float32]  # (E, G)
    kind: NDArray[np.float32]  # (E, K)
    action_mask: NDArray[np.float32]  # (E, N + 1)
    rewards: NDArray[np.float64]  # (E,)
    terminated: NDArray[np.bool_]  # (E,)
    truncated: NDArray[np.bool_]  # (E,)
    dt_s: NDArray[np.float64]  # (E,) since the previous decision
    invalid_actions: NDArray[np.int64]  # (E,) so far in the episode
    components: NDArray[np.float64]  # (E, components)


def outputs(environments: int, instances: int, kinds: Collection[int]) -> Callable[[], Outputs]:
    """Makes room for one step of an agent that answers these kinds of decision."""
    arrays: list[NDArray[Any]] = [
        *feature_arrays(environments, instances, kinds),
        np.empty(environments),
        np.empty(environments, np.bool_),
        np.empty(environments, np.bool_),
        np.empty(environments),
        np.empty(environments, np.int64),
        np.empty((environments, len(COMPONENTS))),
    ]
    forms = [(array.shape, array.dtype) for array in arrays]
    return lambda: Outputs._make([np.empty(shape, dtype) for shape, dtype in forms])


@inlined
def _has_choice(s: Any, e: int) -> bool:
    """Whether any answer to the pending decision is legal; none is where all instances are gone."""
    if view_fleet_at(s, e).may_hold != 0:
        return True
    env = env_at(s, e)
    candidates = 0
    for g in range(env.instance0, env.instance0 + env.instances):
        candidates += view_instance_at(s, g).candidate
    return candidates > 0  # type: ignore[no-any-return]


@inlined
def _is_for(s: Any, e: int, kinds: int) -> bool:
    """Whether the pending decision is of these kinds, and leaves a choice."""
    return answers(kinds, env_at(s, e).decision_kind) and _has_choice(s, e)


@inlined
def _choice(s: Any, e: int, policy: Any, kinds: int, instances: Any, request: Any, fleet: Any) -> int:
    """The answer of the compiled policy at an address, which knows these kinds of decision; NIL if it has none."""
    kind = env_at(s, e).decision_kind
    if not answers(kinds, kind):
        return NIL
    if not knows(kinds, kind):
        fleet[e].kind = KIND_DISPATCH
    return choose_at(policy, instances[e], request[e : e + 1], fleet[e : e + 1])


@part
def _answer_others(
    s: Any, e: int, kinds: int, others: Any, other_kinds: int, instances: Any, request: Any, fleet: Any
) -> int:
    """Answer decisions until one is for the agent; returns what `advance` did last."""
    env = env_at(s, e)
    invalid = env.invalid
    status = NEED_DECISION
    while status == NEED_DECISION and not _is_for(s, e, kinds):
        choice = NIL
        if not answers(kinds, env.decision_kind):
            choice = _choice(s, e, others, other_kinds, instances, request, fleet)
        cluster.apply(s, e, choice)
        status = cluster.advance(s, e)
    env.invalid = invalid  # the agent's
    return status


@kernel
def begin_rows(
    s: Any,
    rows: Any,
    episodes: Any,
    kinds: int,
    warm_up: Any,
    warm_up_kinds: int,
    others: Any,
    other_kinds: int,
    instances: Any,
    request: Any,
    fleet: Any,
    scratch: Any,
    out_instances: Any,
    out_request: Any,
    out_fleet: Any,
    out_kind: Any,
    out_mask: Any,
) -> int:
    """Run freshly loaded rows, these of all, to the first decision after the warm-up that is the agent's.

    `s` is the handle of the clusters, `instances`, `request` and `fleet` are their live view, `scratch` is for
    `write_features`. The compiled policy at the address `warm_up` decides in the warm-up, as far as it answers the kind
    of decision (`warm_up_kinds`, a bit for each), that at `others` decides after it what is not of the agent's `kinds`
    (and of `other_kinds`).
    The first observations are written to the `Outputs` at these rows.

    Returns:
        Number of rows whose requests are over before that: their `steps` are -1.
    """
    over = 0
    for e in rows:
        episode = episodes[e]
        env = env_at(s, e)
        status = cluster.advance(s, e)
        while status == NEED_DECISION:
            choice = NIL
            if env.time_s < episode.warmup_s:
                choice = _choice(s, e, warm_up, warm_up_kinds, instances, request, fleet)
            elif not answers(kinds, env.decision_kind):
                choice = _choice(s, e, others, other_kinds, instances, request, fleet)
            elif _has_choice(s, e):
                break
            cluster.apply(s, e, choice)
            status = cluster.advance(s, e)
        if status != NEED_DECISION:
            episode.steps = -1
            over += 1
            continue
        env.invalid = 0
        cluster.costs(s, e, episode.start)
        episode.start[BILLED_S] = billed_s(s, e, env.time_s)
        episode.start[MIGRATIONS] = env.migrations_ended
        episode.costs[:] = episode.start
        episode.moved = env.migrations_completed
        episode.at_risk = cluster.unmissed(s, e)
        episode.steps = 0
        episode.total_reward = 0.0
        write_features(
            instances, request, fleet, e, e + 1, out_instances, out_request, out_fleet, out_kind, out_mask, scratch
        )
    return over


@inlined
def _write_metrics(s: Any, e: int, episode: Any, metrics: Any) -> None:
    """Requests that are still in the system are misses: whoever truncates an episode gets no credit for them."""
    requests = episode.at_risk + episode.costs[5] - episode.start[5]
    misses = episode.costs[1] - episode.start[1] + cluster.unmissed(s, e)
    metrics[0] = episode.total_reward
    metrics[1] = episode.steps
    metrics[2] = episode.costs[6] - episode.start[6]
    metrics[3] = requests
    metrics[4] = episode.costs[3] - episode.start[3]
    metrics[5] = misses
    metrics[6] = 1.0 - misses / requests
    metrics[7] = episode.costs[0] - episode.start[0]
    metrics[8] = episode.costs[2] - episode.start[2]
    metrics[9] = episode.costs[4] - episode.start[4]
    metrics[10] = env_at(s, e).invalid
    metrics[11] = env_at(s, e).migrations_completed - episode.moved
    metrics[12] = episode.costs[BILLED_S] - episode.start[BILLED_S]


@kernel
def step_rows(
    handles: Any,
    first: int,
    last: int,
    actions: Any,
    skip: Any,
    episodes: Any,
    metrics: Any,
    weights: Any,
    admission: Any,
    kinds: int,
    others: Any,
    other_kinds: int,
    instances: Any,
    request: Any,
    fleet: Any,
    scratch: Any,
    out_instances: Any,
    out_request: Any,
    out_fleet: Any,
    out_kind: Any,
    out_mask: Any,
    rewards: Any,
    terminated: Any,
    truncated: Any,
    dt_s: Any,
    invalid_actions: Any,
    components: Any,
) -> int:
    """Step the rows from `first` to before `last`, but for those to skip.

    `handles` holds the handle of the clusters (a record alone takes Numba a microsecond to recognise), `instances`,
    `request` and `fleet` are their live view, `scratch` is this thread's for `write_features`; all arguments after it
    are `Outputs`. `metrics`, (E, METRICS), is written in rows whose episode ends. An action is an instance's slot, or N
    for none; anything else is illegal. The agent answers the decisions of `kinds`, a bit for each, the compiled policy
    at the address `others`, which knows `other_kinds`, the rest.

    Returns:
        Number of rows whose episode ended; -1 - row where a row got into a state that no decision ends.
    """
    s = handles[0]
    ended = 0
    now = np.empty(COSTS)
    none = instances.shape[1]
    rejects = admission[0] < np.inf
    for e in range(first, last):
        if e + 2 < last:
            cluster.prefetch_arrival(s, e + 2)
        if e + 1 < last:
            cluster.prefetch_events(s, e + 1)
        if skip[e]:
            continue
        episode = episodes[e]
        env = env_at(s, e)
        action = actions[e]
        choice = NIL if action == none else (action if 0 <= action < none else none)
        if (
            rejects
            and env.decision_kind == KIND_DISPATCH
            and 0 <= choice < none
            and instances[e, choice].candidate != 0
        ):
            choice = admitted(choice, instances[e], request[e], admission)
        cluster.apply(s, e, choice)
        status = cluster.advance(s, e)
        if status == NEED_DECISION and not _is_for(s, e, kinds):
            status = _answer_others(s, e, kinds, others, other_kinds, instances, request, fleet)
        if status != NEED_DECISION and status != ENDED:
            return -1 - e
        episode.steps += 1
        terminated[e] = status == ENDED
        truncated[e] = episode.steps >= episode.max_steps and status != ENDED
        cluster.costs(s, e, now)
        if status == ENDED:
            now[6] = max(env.time_s, env.last_finish_s)  # when the last request was served
        now[MIGRATIONS] = env.migrations_ended
        now[BILLED_S] = episode.costs[BILLED_S]
        if weights[3] > 0.0 or terminated[e] or truncated[e]:
            now[BILLED_S] = billed_s(s, e, now[6])
        rewards[e] = write_components(episode.costs, now, weights, components[e])
        dt_s[e] = now[6] - episode.costs[6]
        invalid_actions[e] = env.invalid
        episode.costs[:] = now
        episode.total_reward += rewards[e]
        if terminated[e] or truncated[e]:
            _write_metrics(s, e, episode, metrics[e])
            ended += 1
    write_features(
        instances, request, fleet, first, last, out_instances, out_request, out_fleet, out_kind, out_mask, scratch
    )
    return ended
