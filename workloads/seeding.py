"""Random streams: one per purpose, so that changing one part of a workload leaves the draws of the others alone."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a stream of draws is for. Values are part of every seed's meaning: append, never renumber."""

    ARRIVALS = 0
    LENGTHS = 1
    CLIENTS = 2
    TURNS = 3
    USER_TOKENS = 4
    OUTPUT_TOKENS = 5
    THINK_TIMES = 6
    SYSTEM_PROMPTS = 7
    PRIORITIES = 8
    PREDICTION_RADII = 9
    PREDICTION_ANGLES = 10


def random_stream(seed: int, purpose: Purpose, *index: int) -> np.random.Generator:
    """The generator of a purpose (and of a client, a block, ... of it): independent of all others with this seed.

    Raises:
        ValueError: if the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: expected an integer >= 0")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(purpose), *index)))


def uniform_by_row(seed: int, purpose: Purpose, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number uniform on [0, 1) for each row, a function of (seed, purpose, row) alone.

    It does not change when rows are left out, reordered or drawn in parts, as the draws of a stream would.
    """
    key = random_stream(seed, purpose).integers(0, 2**64, dtype=np.uint64)
    # SplitMix64 (Steele, Lea, Flood 2014) of the row, started at the key.
    x = key + rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
