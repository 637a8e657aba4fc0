"""Warm start: a network learns what baselines would do, on states that it gets into itself.

In half of the rows the baseline acts, in the other half the network; the baseline says everywhere what it would have
done (a simple form of DAgger, Ross et al., AISTATS 2011). Learning only from states that the baseline gets into would
leave the network alone with its first mistake.

Every kind of decision counts the same. An instance starts or drains once in hundreds of requests, and a network that
learned from decisions as they come would learn to dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetpilot.agents.schema import ARRAYS
from fleetpilot.fleet.policy import Policy
from fleetpilot.training.environments import TrainingEnvs
from fleetpilot.training.ppo import widen_ranges

ROUND_STEPS = 64
"""Steps of all rows between two passes over what they saw."""
BATCH = 1024
EPOCHS = 3
LEARNING_RATE = 2e-3
_LABEL = "label"


def imitate(
    policy: Any,
    envs: TrainingEnvs,
    experts: Sequence[Policy],
    decisions: int,
    rng: np.random.Generator,
    say: Callable[[str], None],
) -> float:
    """Train a `SetPolicy` to choose as the experts do.

    Args:
        policy: is changed.
        envs: reset or not; left in the middle of episodes.
        experts: one for each scenario of the environments.
        decisions: to look at.
        rng: of the batches' order.
        say: called with a line per round.

    Returns:
        The share of the decisions it learned from last in which the network's likeliest choice was the expert's.
    """
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    observations: Any = envs.reset()
    for expert, part in zip(experts, envs.parts, strict=True):
        expert.reset(part.num_envs, 0)
    own = np.arange(envs.num_envs) % 2 == 1
    agreement = 0.0
    per_round = ROUND_STEPS * envs.num_envs
    rounds = max(1, decisions // per_round)
    data: dict[str, NDArray[Any]] = {}
    for done in range(1, rounds + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1.0 - (done - 1) / rounds)
        seen = [data] if data else []
        for _ in range(ROUND_STEPS):
            choice = envs.decide(experts)
            seen.append({**{key: observations[key] for key in ARRAYS}, _LABEL: choice})
            with torch.no_grad():
                inputs = {key: torch.as_tensor(observations[key]) for key in ARRAYS}
                action = policy._predict(inputs).numpy() if done > 1 else choice
            observations = envs.step(np.where(own, action, choice))[0]
        data = {key: np.concatenate([part[key] for part in seen]) for key in seen[0]}
        widen_ranges(policy.scorer, data)
        data = newest_of_each_kind(data, per_round)
        agreement = _fit(policy, optimizer, data, rng)
        say(f"imitation {done / rounds:.0%}: agrees in {agreement:.1%} of decisions")
    return agreement


def newest_of_each_kind(data: Mapping[str, NDArray[Any]], size: int) -> dict[str, NDArray[Any]]:
    """At most `size` decisions, as many of every kind that there is: the newest, of rare ones from many rounds.

    Args:
        data: (decisions, ...) of everything, oldest first; under ``kind`` one-hot what they are about.
        size: of what is kept.
    """
    kind_of = data["kind"].argmax(axis=1)
    kinds = np.unique(kind_of)
    rows = np.concatenate([np.flatnonzero(kind_of == kind)[-(size // len(kinds)) :] for kind in kinds])
    return {key: values[rows] for key, values in data.items()}


def _fit(
    policy: Any, optimizer: torch.optim.Optimizer, data: Mapping[str, NDArray[Any]], rng: np.random.Generator
) -> float:
    """A few epochs of cross-entropy; the agreement in the last one."""
    hits, labels = 0, data[_LABEL]
    for _ in range(EPOCHS):
        hits = 0
        order = rng.permutation(len(labels))
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            logits = policy.scorer(*(torch.as_tensor(data[key][rows]) for key in ARRAYS)).logits
            wanted = torch.as_tensor(labels[rows])
            loss = torch.nn.functional.cross_entropy(logits, wanted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            hits += int((logits.argmax(dim=1) == wanted).sum())
    return hits / len(labels)
