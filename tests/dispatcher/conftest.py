"""The helper modules of this folder can be imported (importlib mode leaves it out); emulated engines for its tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated import FAST, Emulated

from fleetpilot.dispatcher.emulator import Options
from fleetpilot.dispatcher.emulator.engine import warm_up
from fleetpilot.fleet.profiles import HardwareProfile


@pytest.fixture(scope="session")
def compiled() -> None:
    """What engines run is compiled, which can take longer than a client waits."""
    warm_up([FAST])


@pytest.fixture
def emulate(compiled: None) -> Iterator[Callable[..., Emulated]]:
    """Starts emulated engines; they are stopped at the end of the test."""
    started = []

    def start(engines: int = 1, profile: HardwareProfile = FAST, **options: object) -> Emulated:
        started.append(Emulated([profile] * engines, Options(**options)))
        return started[-1]

    yield start
    for fleet in started:
        fleet.close()
