"""Networks that were never trained, but say something, and environments where they are asked everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetpilot.agents.schema import ARRAYS, sizes_for
from fleetpilot.agents.scorer import SetScorer
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.fleet.view import KIND_DESTINATION, KIND_DISPATCH, KIND_SCALE, KIND_SOURCE

ALL_KINDS = (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE)
KIND_NAMES = ["dispatch", "source", "destination", "scale"]

Observations = dict[str, NDArray[np.float32]]


def some_scorer(kinds: tuple[int, ...] = (KIND_DISPATCH,), hidden: int = 32) -> SetScorer:
    """Random weights, and ranges wide enough for everything."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        scorer = SetScorer(sizes_for(kinds), hidden)
        with torch.no_grad():
            for parameter in scorer.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    for name in ("instances", "request", "fleet"):
        getattr(scorer, f"low_{name}").fill_(-10.0)
        getattr(scorer, f"high_{name}").fill_(10.0)
    return scorer


def logits_of(scorer: SetScorer, observations: Observations) -> NDArray[np.float32]:
    with torch.no_grad():
        logits: NDArray[np.float32] = scorer(*(torch.as_tensor(observations[key]) for key in ARRAYS)).logits.numpy()
    return logits


def fleet_envs(rows: int, instances: int = 8, **changes: Any) -> FleetVectorEnv:
    """Where every kind of decision comes up."""
    settings = {
        "scenario": "tides",
        "kinds": KIND_NAMES,
        "scored_requests": 30,
        "warmup_requests": 10,
        "fleet_size": (max(1, instances // 2), instances),
        **changes,
    }
    return FleetVectorEnv(rows, instances=instances, **settings)
