"""The helper modules of this folder can be imported (importlib mode leaves it out)."""

import sys
from pathlib import Path

import pytest

from fleetpilot.envs import threads

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def shared_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are used however little there is to do."""
    monkeypatch.setattr(threads, "LEAST_US", 1e-9)
