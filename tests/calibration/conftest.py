"""Emulated engines for the calibration's tests: real HTTP, and a profile that is known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dispatcher"))

from emulated import Emulated

from fleetpilot.dispatcher.emulator import Options
from fleetpilot.dispatcher.emulator.engine import warm_up
from fleetpilot.fleet.profiles import HardwareProfile, load_profile

SMALL = load_profile("tiny-cpu").replace(
    name="small",
    block_size=32,
    kv_blocks=64,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    max_model_len=512,
    a_s=0.002,
    b_s=1e-5,
    w_s=1e-4,
    c_s=1e-8,
    d_s=1e-4,
    e_s=1e-7,
)
"""Steps of some milliseconds, and so little memory that a plan has few points."""


@pytest.fixture(scope="session")
def profiles() -> list[HardwareProfile]:
    return [SMALL, SMALL.replace(kv_blocks=128, max_num_seqs=8)]


@pytest.fixture
def urls(profiles: list[HardwareProfile]) -> Iterator[list[str]]:
    """Two emulated engines of different size."""
    warm_up(profiles)
    fleet = Emulated(profiles, Options())
    yield fleet.fleet.urls
    fleet.close()
