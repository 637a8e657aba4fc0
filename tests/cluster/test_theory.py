"""Where queueing theory has an answer, the simulator gives it; and it always comes to an end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparison import profile_of
from numpy.typing import NDArray
from oracle import OracleInstance

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, RunLog, simulate
from fleetpilot.cluster.state import FINISHED
from fleetpilot.fleet.policy import CompiledPolicy, Policy
from fleetpilot.fleet.view import NONE
from fleetpilot.workloads.table import RequestTable, make_table

UTILISATIONS = (0.3, 0.7, 0.9)
SEEDS = range(16)

# One request at a time, 1 ms an iteration: a request of n output tokens is served for n ms.
ONE_AT_A_TIME = OracleInstance(
    "chunked", kv_blocks=10_000, block_size=16, max_num_seqs=1, max_num_batched_tokens=64, a_s=0.001
)
# All at once, and an iteration takes 1 ms for each decode: the instance's time is shared equally.
ALL_AT_ONCE = replace(
    ONE_AT_A_TIME, kv_blocks=1_000_000, max_num_seqs=1_000, max_num_batched_tokens=2_000, a_s=0, d_s=0.001
)


def choose_idle(instances: Any, requests: Any, fleets: Any) -> int:
    """An instance without requests, or hold: one central queue."""
    for slot in range(len(instances)):
        if instances[slot].in_flight == 0:
            return slot
    return NONE


CENTRAL_QUEUE = CompiledPolicy("central-queue", choose_idle)


def poisson_table(rate: float, output_tokens: NDArray[np.int64], rng: np.random.Generator) -> RequestTable:
    """Poisson arrivals of requests with a prompt of one token."""
    requests = len(output_tokens)
    return make_table(
        "poisson", np.cumsum(rng.exponential(1 / rate, requests)), np.ones(requests, np.int64), output_tokens
    )


def mean_and_error(
    measure: Callable[[RunLog], NDArray[np.float64]],
    table_of: Callable[[np.random.Generator], RequestTable],
    fleet: FleetConfig,
    policy: Policy,
) -> tuple[float, float]:
    """Mean over independent runs of the mean over their requests (less the first tenth), and its standard error."""
    means = []
    for seed in SEEDS:
        log = simulate(table_of(np.random.default_rng(seed)), fleet, policy, sample_interval_s=None)
        assert np.all(log.requests["status"] == FINISHED)
        means.append(measure(log)[len(log.requests) // 10 :].mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / math.sqrt(len(means)))


def waits_s(log: RunLog) -> NDArray[np.float64]:
    return log.requests["admitted_s"] - log.requests["arrival_s"]


def sojourns_s(log: RunLog) -> NDArray[np.float64]:
    return log.requests["finish_s"] - log.requests["arrival_s"]


def assert_agrees(measured: tuple[float, float], expected: float, bias: float = 0.0) -> None:
    """Within 3.5 standard errors, which are small enough to mean something, and a known bias."""
    mean, error = measured
    assert error < 0.03 * expected
    assert abs(mean - expected) < 3.5 * error + bias


@pytest.mark.parametrize("utilisation", UTILISATIONS)
def test_constant_service_one_at_a_time_waits_as_in_m_d_1(utilisation: float) -> None:
    """Pollaczek and Khinchine: E[W] = rho S / (2 (1 - rho))."""
    service_s = 0.1

    def table(rng: np.random.Generator) -> RequestTable:
        return poisson_table(utilisation / service_s, np.full(80_000, 100), rng)

    fleet = FleetConfig.of(profile_of(ONE_AT_A_TIME, "one"), 1)
    measured = mean_and_error(waits_s, table, fleet, load_policy("round-robin"))
    assert_agrees(measured, utilisation * service_s / (2 * (1 - utilisation)))


@pytest.mark.parametrize("utilisation", UTILISATIONS)
def test_geometric_service_from_one_queue_waits_as_in_m_m_k(utilisation: float) -> None:
    """Erlang C, with the factor (1 + c^2) / 2 of service times that are geometric rather than exponential."""
    instances, mean_tokens = 4, 100
    service_s = mean_tokens * 0.001

    def table(rng: np.random.Generator) -> RequestTable:
        return poisson_table(utilisation * instances / service_s, rng.geometric(1 / mean_tokens, 80_000), rng)

    fleet = FleetConfig.of(profile_of(ONE_AT_A_TIME, "one"), instances, hold_interval_s=1e6, max_hold_s=1e9)
    load = utilisation * instances
    idle_terms = sum(load**n / math.factorial(n) for n in range(instances))
    busy_term = load**instances / math.factorial(instances) / (1 - utilisation)
    erlang_c = busy_term / (idle_terms + busy_term)
    squared_variation = 1 - 1 / mean_tokens
    expected_s = erlang_c * service_s / (instances * (1 - utilisation)) * (1 + squared_variation) / 2
    measured = mean_and_error(waits_s, table, fleet, CENTRAL_QUEUE)
    assert_agrees(measured, expected_s)


@pytest.mark.parametrize("output", ["constant", "geometric"])
@pytest.mark.parametrize("utilisation", UTILISATIONS)
def test_decodes_alone_share_the_processor(utilisation: float, output: str) -> None:
    """E[T] = E[S] / (1 - rho), whatever the distribution of S: each decode step takes d times the batch."""
    mean_tokens = 2_000
    service_s = mean_tokens * ALL_AT_ONCE.d_s

    def table(rng: np.random.Generator) -> RequestTable:
        decodes = np.full(60_000, mean_tokens) if output == "constant" else rng.geometric(1 / mean_tokens, 60_000)
        return poisson_table(utilisation / service_s, 1 + decodes, rng)  # the prefill's own token takes no time

    fleet = FleetConfig.of(profile_of(ALL_AT_ONCE, "all"), 1)
    measured = mean_and_error(sojourns_s, table, fleet, load_policy("round-robin"))
    # A request waits for the end of a step of the others before it joins, and its prefill rides on another.
    mean_batch = utilisation / (1 - utilisation)
    assert_agrees(measured, service_s / (1 - utilisation), bias=2 * mean_batch * ALL_AT_ONCE.d_s)


# --- KV capacity ----------------------------------------------------------------------------------------------------


def uniform_table(requests: int = 400) -> RequestTable:
    rng = np.random.default_rng(7)
    return make_table(
        "uniform",
        np.sort(rng.uniform(0, 60, requests)),
        rng.integers(50, 400, requests),
        rng.integers(50, 400, requests),
    )


def run_with_kv_blocks(kv_blocks: int) -> RunLog:
    instance = OracleInstance(
        "chunked",
        kv_blocks=kv_blocks,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        a_s=0.005,
        b_s=0.00005,
        e_s=1e-7,
    )
    return simulate(uniform_table(), FleetConfig.of(profile_of(instance, "kv"), 1), load_policy("round-robin"))


def test_less_kv_memory_preempts_more_and_takes_longer() -> None:
    logs = [run_with_kv_blocks(blocks) for blocks in (1_000, 400, 350, 300, 250, 200, 150)]
    preemptions = [int(log.instances["preemptions"][0]) for log in logs]
    latency_s = [float(sojourns_s(log).mean()) for log in logs]
    assert preemptions[0] == 0
    assert np.all(np.diff(preemptions) > 0)
    assert np.all(np.diff(latency_s) > 0)
    assert latency_s[-1] > 10 * latency_s[0]


# --- every run ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["chunked", "prefill_first"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_run_ends_where_only_one_request_fits(scheduler: str, prefix_cache: bool) -> None:
    """Everything arrives at once, and the longest request needs all of the KV memory."""
    requests = 300
    rng = np.random.default_rng(3)
    table = make_table(
        "tiny",
        np.zeros(requests),
        prompt_tokens=rng.integers(21, 41, requests),
        output_tokens=rng.integers(1, 41, requests),
        prefix_node=np.zeros(requests, int),
        node_parent=[-1],
        node_end_tokens=[21],
    )
    instance = OracleInstance(
        scheduler,
        kv_blocks=20,
        block_size=4,
        max_num_seqs=32,
        max_num_batched_tokens=80,
        prefix_cache=prefix_cache,
        a_s=0.01,
    )
    log = simulate(table, FleetConfig.of(profile_of(instance, "tiny"), 2), load_policy("random"))
    assert np.all(log.requests["status"] == FINISHED)
    assert np.all(log.requests["generated"] == table.output_tokens)
    assert log.instances["preemptions"].sum() > 0


def test_a_run_ends_under_ten_times_the_load_it_can_bear() -> None:
    table = uniform_table()
    table = table.replace(arrival_s=table.arrival_s / 100)
    log = simulate(table, FleetConfig.of(profile_of(ONE_AT_A_TIME, "one"), 1), load_policy("round-robin"))
    served_s = table.output_tokens.sum() * ONE_AT_A_TIME.a_s
    assert np.all(log.requests["status"] == FINISHED)
    assert log.end_s > 10 * table.span_s
    assert log.end_s == pytest.approx(served_s, rel=0.2)
