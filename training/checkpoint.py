"""A run in the middle: everything that its future depends on, in one file that is written whole or not at all."""

from __future__ import annotations

import gzip
import os
import pickle
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

CHECKPOINT = "checkpoint.pt.gz"


def save_checkpoint(model: Any, folder: Path, more: dict[str, Any]) -> None:
    """Write the file of a run between two updates.

    Args:
        model: a `FleetPPO` on `TrainingEnvs`.
        folder: of the run.
        more: picklable; `load_checkpoint` returns it.
    """
    state = {
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "counts": {name: getattr(model, name) for name in ("num_timesteps", "_n_updates", "_episode_num")},
        "last": (model._last_obs, model._last_episode_starts, list(model.ep_info_buffer)),
        "clock_s": model.rollout_buffer.clock_s,
        "envs": model.env.save_state(),
        "random": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
        "more": more,
    }
    part = folder / f"{CHECKPOINT}.part"
    file: Any
    with gzip.open(part, "wb", compresslevel=1) as file:  # most of the environments' room is empty
        pickle.dump(state, file, pickle.HIGHEST_PROTOCOL)  # torch.save would hold all of it in memory several times
    os.replace(part, folder / CHECKPOINT)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote. Only for files of one's own: it is a pickle.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected the folder of a run that was begun")
    try:
        with gzip.open(path) as file:
            state: dict[str, Any] = pickle.load(file)
    except Exception as error:  # of a damaged file pickle raises whatever it stumbles over
        raise ValueError(f"{path}: cannot be read ({error}); expected a checkpoint") from None
    return state


def restore(model: Any, state: dict[str, Any]) -> None:
    """Put a model, made by the same configuration and on environments of the same stage, where the checkpoint was."""
    model.policy.load_state_dict(state["policy"])
    model.policy.optimizer.load_state_dict(state["optimizer"])
    for name, value in state["counts"].items():
        setattr(model, name, value)
    model._last_obs, model._last_episode_starts, episodes = state["last"]
    model.ep_info_buffer = deque(episodes, maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(maxlen=model._stats_window_size)
    model.rollout_buffer.clock_s = state["clock_s"]
    model.env.restore_state(state["envs"])
    torch.set_rng_state(state["random"][0])
    np.random.set_state(state["random"][1])
    random.setstate(state["random"][2])
