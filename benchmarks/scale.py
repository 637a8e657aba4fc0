"""A large fleet on one core: CPU seconds per second of arrivals, by policy, and what its decisions cost.

1,000 instances get 10,000 requests/s. At every decision a policy is shown every instance: telemetry, the dispatcher's
book and, with sessions, how much of the prompt each has cached. ``llumnix`` is also asked, every 0.2 s, which running
requests move. What a policy's own choosing costs is the difference to the same run in which it chooses twice.

Usage: python benchmarks/scale.py [--instances N]
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import NamedTuple

from _report import in_fresh_process, machine, print_table

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, Rebalancing, simulate
from fleetpilot.fleet.policy import CompiledPolicy, choose_at, kinds_of
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import KIND_SOURCE
from fleetpilot.workloads import workload

PROFILE = "h100-llama-3.1-70b-tp2"  # little KV memory: requests have reasons to move
RPS_PER_INSTANCE = 10
TURNS = 5
INDEPENDENT = "poisson?rate={rate}&n={n}&prompt=lognormal:584.7:0.6:3500&output=lognormal:167.1:0.6:1000"
SESSIONS = (
    "sessions/chat?rate={sessions}&n={n}&turns={turns}&loop=open&think_s=2&user=lognormal:200:0.6:1000"
    "&output=lognormal:167.1:0.6:1000"
)


class Cell(NamedTuple):
    """A policy on requests that arrive for so long."""

    policy: str
    workload: str
    span_s: float


CELLS = (
    Cell("join-shortest-queue", INDEPENDENT, 20.0),
    Cell("llumnix", INDEPENDENT, 20.0),
    Cell("lmetric", INDEPENDENT, 20.0),
    Cell("lmetric", SESSIONS, 5.0),  # what is kept of each prefix for each instance takes gigabytes
)


def chooses_twice(policy: CompiledPolicy) -> CompiledPolicy:
    """The same choices for twice the work."""
    address = policy.address

    def choose(instances, requests, fleets):  # type: ignore[no-untyped-def]
        choose_at(address, instances, requests, fleets)
        return choose_at(address, instances, requests, fleets)

    return CompiledPolicy(policy.name, choose, policy.kinds)


def measure(name: str, form: str, instances: int, span_s: float) -> dict[str, float]:
    """CPU seconds of this process for a run, then for the same with a policy that chooses twice, and once again."""
    rate = RPS_PER_INSTANCE * instances
    table = workload(form.format(rate=rate, sessions=rate / TURNS, turns=TURNS, n=int(rate * span_s)))
    policy = load_policy(name)
    rebalancing = Rebalancing() if KIND_SOURCE in kinds_of(policy) else None
    profile = load_profile(PROFILE)
    cpu_s = []
    for tried in (policy, chooses_twice(policy), policy):
        simulate(workload("poisson?n=10"), FleetConfig.of(profile, 2, rebalancing=rebalancing), tried)  # compiles
        fleet = FleetConfig.of(profile, instances, rebalancing=rebalancing)
        before_s = time.process_time()
        log = simulate(table, fleet, tried, sample_interval_s=None)
        cpu_s.append(time.process_time() - before_s)
    return {
        "cpu_s": cpu_s[0],
        "choosing_s": cpu_s[1] - cpu_s[2],
        "requests": len(table),
        "migrations": len(log.migrations),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    instances = parser.parse_args().instances
    print(__doc__.partition("\n")[0])
    print(machine())
    rows = []
    for cell in CELLS:
        found = in_fresh_process("scale", "measure", cell.policy, cell.workload, instances, cell.span_s)
        rows.append(
            [
                f"{cell.policy}, {'sessions' if cell.workload == SESSIONS else 'independent requests'}",
                f"{found['requests']:,.0f}",
                f"{found['cpu_s']:.1f}",
                f"{cell.span_s / found['cpu_s']:.1f}x",
                f"{1e6 * found['cpu_s'] / found['requests']:.1f}",
                f"{1e6 * found['choosing_s'] / found['requests']:.1f}",
                f"{found['migrations']:,.0f}",
                f"{found['peak_bytes'] / 2**20:,.0f}",
            ]
        )
    columns = ("policy", "requests", "CPU s", "real time", "us per request", "of it choosing", "migrations", "peak MiB")
    print_table(columns, rows)


if __name__ == "__main__":
    main()
