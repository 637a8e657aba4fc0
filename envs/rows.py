"""One row of what a vector environment returns, as a single environment would have returned it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def observation_row(observations: Any, row: int) -> Any:
    """Row `row` of batched observations: arrays, or dicts and tuples of them."""
    if isinstance(observations, Mapping):
        return {key: observation_row(value, row) for key, value in observations.items()}
    if isinstance(observations, tuple):
        return tuple(observation_row(value, row) for value in observations)
    return observations[row]


def info_row(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """What `infos` says of row `row`.

    Args:
        infos: by Gymnasium's convention: arrays, or dicts of them, under `key`; whether a row has it under `_key`.
        row: index of the environment.
    """
    info = {}
    for key, value in infos.items():
        is_mask = key.startswith("_") and key[1:] in infos
        if not is_mask and (f"_{key}" not in infos or infos[f"_{key}"][row]):
            info[key] = info_row(value, row) if isinstance(value, Mapping) else observation_row(value, row)
    return info
