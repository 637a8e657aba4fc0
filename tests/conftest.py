"""Set-up shared by all tests: Ctrl-C, hypothesis profiles, the folder of real traces, imports of helper modules."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves it out; tests import `oracle` and `strategies`

# Shells start what they run in the background with SIGINT ignored, and the programs that tests interrupt inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fuzz", max_examples=5000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fuzz" if os.environ.get("FLEETPILOT_FUZZ") == "1" else "ci")


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real traces: FLEETPILOT_TRACES, by default `../shared/traces` beside the checkout."""
    default = Path(__file__).parents[1] / ".." / "shared" / "traces"
    folder = Path(os.environ.get("FLEETPILOT_TRACES", default)).resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder of real traces at {folder}; set FLEETPILOT_TRACES")
    return folder


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Two cores' worth of Ray on this machine."""
    ray = pytest.importorskip("ray", reason="needs Ray (make test-ray)")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()
