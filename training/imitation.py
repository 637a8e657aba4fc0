"""Warm start: a network learns what baselines would do, on states that it gets into itself.

In half of the rows the baseline acts, in the other half the network; the baseline says everywhere what it would have
done (a simple form of DAgger, Ross et al., AISTATS 2011). Learning only from states that the baseline gets into would
leave the network alone with its first mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        The share of the last round's decisions in which the network's likeliest choice was the expert's.
    """
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    observations: Any = envs.reset()
    for expert, part in zip(experts, envs.parts, strict=True):
        expert.reset(part.num_envs, 0)
    own = np.arange(envs.num_envs) % 2 == 1
    agreement = 0.0
    rounds = max(1, decisions // (ROUND_STEPS * envs.num_envs))
    for done in range(1, rounds + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1.0 - (done - 1) / rounds)
        seen: dict[str, list[NDArray[np.float32]]] = {key: [] for key in ARRAYS}
        labels = []
        for _ in range(ROUND_STEPS):
            choice = envs.decide(experts)
            for key in ARRAYS:
                seen[key].append(observations[key])
            labels.append(choice)
            with torch.no_grad():
                inputs = {key: torch.as_tensor(observations[key]) for key in ARRAYS}
                action = policy._predict(inputs).numpy() if done > 1 else choice
            observations = envs.step(np.where(own, action, choice))[0]
        data = {key: np.concatenate(arrays) for key, arrays in seen.items()}
        widen_ranges(policy.scorer, data)
        agreement = _fit(policy, optimizer, data, np.concatenate(labels), rng)
        say(f"imitation {done / rounds:.0%}: agrees in {agreement:.1%} of decisions")
    return agreement


def _fit(
    policy: Any,
    optimizer: torch.optim.Optimizer,
    data: dict[str, NDArray[np.float32]],
    labels: NDArray[np.int64],
    rng: np.random.Generator,
) -> float:
    """A few epochs of cross-entropy; the agreement in the last one."""
    hits = 0
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
