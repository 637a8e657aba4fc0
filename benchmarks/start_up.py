"""What a user waits for: imports, the first use of the kernels, which compiles them, and the second, from the cache.

Usage: python benchmarks/start_up.py
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable

from _report import in_fresh_process, machine, print_table

IMPORTS = ("fleetpilot.cluster", "fleetpilot.envs")
IMPORT_REPEATS = 5


def timed(action: Callable[[], object]) -> dict[str, float]:
    """CPU and wall seconds of one action."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    action()
    return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}


def importing(package: str) -> dict[str, float]:
    """Import a package."""
    return timed(lambda: importlib.import_module(package))


def simulating() -> dict[str, float]:
    """Simulate one request."""
    from fleetpilot.baselines import load_policy
    from fleetpilot.cluster import FleetConfig, simulate
    from fleetpilot.fleet.profiles import load_profile
    from fleetpilot.workloads.table import make_table

    fleet = FleetConfig.of(load_profile("h100-llama-3.1-8b"), 8)
    request = make_table("one request", [0.0], [100], [10])
    return timed(lambda: simulate(request, fleet, load_policy("join-shortest-queue")))


def stepping() -> dict[str, float]:
    """Make an environment, reset it and take a step."""
    import gymnasium

    import fleetpilot.envs  # noqa: F401

    def step() -> None:
        env = gymnasium.make("fleetpilot/Dispatch-v0")
        env.reset(seed=0)
        env.step(0)

    return timed(step)


def main() -> None:
    found = {}
    for package in IMPORTS:
        runs = [in_fresh_process("start_up", "importing", package) for _ in range(IMPORT_REPEATS)]
        found[f"import {package} (median of {IMPORT_REPEATS})"] = {
            key: statistics.median(run[key] for run in runs) for key in runs[0]
        }
    for function, what in (("simulating", "simulate"), ("stepping", "environment: make, reset, step")):
        with tempfile.TemporaryDirectory() as cache:
            for start in ("first", "second"):
                run = in_fresh_process("start_up", function, NUMBA_CACHE_DIR=cache)
                found[f"{what}, {start} time (imports left out)"] = run
    print(__doc__.partition("\n")[0])
    print(machine())
    rows = [[what, f"{run['cpu_s']:.2f}", f"{run['wall_s']:.2f}"] for what, run in found.items()]
    print_table(["", "CPU seconds", "wall seconds"], rows)
    print("goals: import below 1 s, first use below 60 s on 2 cores")


if __name__ == "__main__":
    main()
