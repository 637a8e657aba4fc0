"""Does the kernel do what the oracle does? Exit status 0: yes, on all cases; 3: no; others: it did not run.

test_planted_faults.py runs this with the kernels uncompiled, on copies of the package in which a fault was planted. The
argument says which cases: `clusters`, `fleets` in which requests move, and instances come and go, or `pools`.
"""

from __future__ import annotations

import random
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial

from comparison import assert_bitwise_equal, assert_same, assert_same_gaps, fleet_of_oracle, run_kernel, run_oracle
from expected_views import Recorder, assert_same_views, expected_views
from fleet_comparison import FleetCase, assert_same_run
from strategies import (
    Cluster,
    fixed_cluster,
    fixed_cluster_on_grid,
    fixed_fleet,
    fixed_fleet_of_fast_and_slow,
    fixed_pools,
    fixed_shared_cache,
    fixed_speculating,
)

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import Telemetry, simulate

SEEDS = (11, 230, 19, 4, 561, 7, 192, 14, 3, 21)
"""Chosen so that also what is rare happens: requests that sit iterations out, that are preempted again before their
prefill is done again, or in the pass that has just given them a block."""

SEEDS_ON_GRID = (5315,)
"""A turn released by one instance goes to another that ends an iteration at the same time."""

FLEET_SEEDS_ON_GRID = (36, 10, 110, 12, 78, 97, 1410, 55, 18, 84, 113, 202)
"""Chosen so that few find every fault, the first of them most."""

FLEET_SEEDS = (40, 44, 60)

FLEET_SEEDS_FAST_AND_SLOW = (219,)
"""A source's boundary, at which a request stops, ties with one in a leap of the destination, which goes first."""

POOL_SEEDS_ON_GRID = (2, 28, 12, 58)

POOL_SEEDS = (13, 15, 3)

SHARED_CACHE_SEEDS = (6, 14, 13, 10, 15, 41)

SPECULATION_SEEDS = (0, 6, 185)

DIFFERENT = 3
"""Not 1, Python's status for errors, at import for instance."""

PATIENCE_S = 60
"""Of the processor, for a kernel that a fault sends round in circles; an honest one takes a tenth."""


def compare(draw: Callable[[int], Cluster], seed: int) -> None:
    cluster = draw(seed)
    leaping = run_kernel(cluster, leap=True)
    expected = run_oracle(cluster)
    assert_same(leaping, expected)
    assert_same_gaps(leaping, expected)
    assert_bitwise_equal(leaping, run_kernel(cluster, leap=False))
    pick = random.Random(seed).choice
    telemetry = Telemetry(pick([0.0103, 0.0503]), pick([0.0, 0.0117, 0.3511]), pick([False, True]))
    recorder = Recorder(load_policy("round-robin"))
    table, instances = cluster
    simulate(table, fleet_of_oracle(instances, telemetry=telemetry), recorder, sample_interval_s=None)
    assert_same_views(recorder.views, expected_views(cluster, telemetry))


CLUSTERS = [partial(compare, fixed_cluster, seed) for seed in SEEDS]
CLUSTERS += [partial(compare, fixed_cluster_on_grid, seed) for seed in SEEDS_ON_GRID]


def compare_fleet(draw: Callable[[int], FleetCase], seed: int) -> None:
    assert_same_run(draw(seed))


FLEETS = [partial(compare_fleet, partial(fixed_fleet, exact=True), seed) for seed in FLEET_SEEDS_ON_GRID]
FLEETS += [partial(compare_fleet, fixed_fleet, seed) for seed in FLEET_SEEDS]
FLEETS += [partial(compare_fleet, fixed_fleet_of_fast_and_slow, seed) for seed in FLEET_SEEDS_FAST_AND_SLOW]


POOLS = [partial(compare_fleet, partial(fixed_pools, exact=True), seed) for seed in POOL_SEEDS_ON_GRID]
POOLS += [partial(compare_fleet, fixed_pools, seed) for seed in POOL_SEEDS]


SHARED_CACHES = [partial(compare_fleet, partial(fixed_shared_cache, exact=True), seed) for seed in SHARED_CACHE_SEEDS]


SPECULATION = [partial(compare_fleet, partial(fixed_speculating, exact=True), seed) for seed in SPECULATION_SEEDS]


def give_up(signum: int, frame: object) -> None:
    raise TimeoutError(f"not done after {PATIENCE_S} s")


CASES = {
    "clusters": CLUSTERS,
    "fleets": FLEETS,
    "pools": POOLS,
    "shared_cache": SHARED_CACHES,
    "speculation": SPECULATION,
}


def main(kind: str) -> int:
    warnings.simplefilter("ignore", RuntimeWarning)  # uncompiled, draws of random bits wrap around with a warning
    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    for comparison in CASES[kind]:
        try:
            comparison()
        except (AssertionError, ArithmeticError, IndexError, RuntimeError, TimeoutError) as difference:
            print(f"{comparison.args}: {type(difference).__name__}: {difference}")
            return DIFFERENT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
