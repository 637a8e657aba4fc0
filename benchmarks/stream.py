"""Ten million generated requests through `simulate_stream`: CPU seconds, and the memory that it takes at most.

The requests have the lengths of the common job (benchmarks/common_job.py) and come at 64 requests/s to 8 instances;
they are drawn, simulated and counted part by part.

Usage: python benchmarks/stream.py [--quick]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator

import numpy as np
from _report import in_fresh_process, machine
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, simulate_stream
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import stream
from fleetpilot.workloads.table import RequestTable, make_table

WORKLOAD = "poisson?rate=64&prompt=lognormal:584.7:0.6:3500&output=lognormal:167.1:0.6:1000"
ROWS_PER_PART = 100_000
MOST_BYTES = 1 << 30


def measure(n: int) -> dict[str, float]:
    """Run `n` requests; figures of this process."""
    fleet = FleetConfig.of(load_profile("h100-llama-3.1-8b"), 8)
    policy = load_policy("join-shortest-queue")
    ended = 0
    drawing_s = 0.0

    def count(requests: NDArray[np.void]) -> None:
        nonlocal ended
        ended += len(requests)

    def drawn() -> Iterator[RequestTable]:
        nonlocal drawing_s
        parts = stream(WORKLOAD, n, ROWS_PER_PART, seed=0)
        while True:
            before_s = time.process_time()
            part = next(parts, None)
            drawing_s += time.process_time() - before_s
            if part is None:
                return
            yield part

    simulate_stream([make_table("compiles", [0.0], [1], [1])], fleet, policy, on_ended=lambda requests: None)
    before_s = time.process_time()
    log = simulate_stream(drawn(), fleet, policy, on_ended=count)
    return {
        "ended": ended,
        "cpu_s": time.process_time() - before_s,
        "drawing_s": drawing_s,
        "simulated_s": log.end_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    n = 1_000_000 if parser.parse_args().quick else 10_000_000
    found = in_fresh_process("stream", "measure", n)
    print(__doc__.partition("\n")[0])
    print(machine())
    print(
        f"{found['ended']:,.0f} requests, {found['simulated_s'] / 3600:.1f} simulated hours: "
        f"{found['cpu_s']:.1f} CPU-seconds, {found['drawing_s']:.1f} of them to draw the requests"
    )
    rates = found["ended"] / found["cpu_s"], found["ended"] / (found["cpu_s"] - found["drawing_s"])
    print(f"requests per CPU-second: {rates[0]:,.0f}, {rates[1]:,.0f} without drawing them")
    print(f"peak memory of the process: {found['peak_bytes'] / 2**20:.0f} MiB (bound: {MOST_BYTES / 2**20:.0f} MiB)")
    if found["peak_bytes"] > MOST_BYTES or found["ended"] != n:
        raise SystemExit(f"expected {n:,} requests to end within {MOST_BYTES / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
