"""Kernel and oracle (tests/oracle_fleet.py) on the same fleet in which requests move, and instances come and go."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
from comparison import assert_same_gaps, profile_of
from keyed_choice import KeyedChoice
from oracle_fleet import OUTCOMES, FleetResult, OracleFleet, Question, simulate_fleet

from fleetpilot.cluster import FleetConfig, RunLog, simulate
from fleetpilot.cluster.state import FAILED, FINISHED, MIGRATION_OUTCOMES, NEVER_ARRIVED, REJECTED
from fleetpilot.workloads.table import RequestTable

SAMPLE_INTERVAL_S = 1 / 16

FleetCase = tuple[RequestTable, OracleFleet]


def fleet_config(fleet: OracleFleet) -> FleetConfig:
    """Equal engines have one profile."""
    profiles = tuple(profile_of(c, f"drawn-{fleet.instances.index(c)}") for c in fleet.instances)
    return FleetConfig(
        profiles,
        hold_interval_s=fleet.hold_interval_s,
        max_hold_s=fleet.max_hold_s,
        rebalancing=fleet.rebalancing,
        scaling=fleet.scaling,
        failures=fleet.failures,
        pools=fleet.pools,
        shared_cache=fleet.shared_cache,
    )


def run_kernel_fleet(
    case: FleetCase, *, leap: bool, check: bool = False, reject_share: float = 0.0
) -> tuple[RunLog, KeyedChoice]:
    table, fleet = case
    policy = KeyedChoice(reject_share=reject_share)
    log = simulate(table, fleet_config(fleet), policy, leap=leap, check=check, sample_interval_s=SAMPLE_INTERVAL_S)
    return log, policy


def run_oracle_fleet(case: FleetCase, reject_share: float = 0.0) -> tuple[FleetResult, KeyedChoice]:
    table, fleet = case
    policy = KeyedChoice(reject_share=reject_share)
    return simulate_fleet(table, fleet, policy.choose, SAMPLE_INTERVAL_S), policy


def assert_same_questions(ours: KeyedChoice, theirs: KeyedChoice) -> None:
    """All that was asked, to the first difference."""
    for n, (a, b) in enumerate(zip(ours.questions, theirs.questions, strict=False)):
        for name in (f.name for f in fields(Question)):
            x, y = getattr(a, name), getattr(b, name)
            same = math.isclose(x, y, rel_tol=1e-9) if name == "time_s" else x == y
            assert same, f"question {n}, {name}: {x}, expected {y}\nours: {a}\ntheirs: {b}"
        assert ours.answers[n] == theirs.answers[n]
    assert len(ours.questions) == len(theirs.questions)


def assert_same_fleet(log: RunLog, expected: FleetResult) -> None:
    """What happened to each request and each migration; counters, bill and memory of each instance."""
    requests = expected.requests
    never = [math.isnan(r.arrival_s) for r in requests]
    status = [
        NEVER_ARRIVED if n else FAILED if r.failed else REJECTED if r.rejected else FINISHED
        for n, r in zip(never, requests, strict=True)
    ]
    np.testing.assert_array_equal(log.requests["status"], status, "status")
    arrived = ~np.array(never)
    finished = np.array(status) == FINISHED
    for name, rows in (
        ("arrival_s", arrived),
        ("dispatch_s", arrived),
        ("admitted_s", arrived),
        ("first_token_s", arrived),
        ("finish_s", finished),
        ("downtime_s", arrived),
        ("handover_s", arrived),
    ):
        theirs = np.array([getattr(r, name) for r in requests])
        np.testing.assert_allclose(log.requests[name][rows], theirs[rows], rtol=1e-9, atol=1e-12, err_msg=name)
    for name, rows in (
        ("instance", finished),
        ("preemptions", arrived),
        ("cached_tokens", arrived),
        ("generated", arrived),
        ("migrations", arrived),
        ("restarts", arrived),
        ("prefill_instance", arrived),
        ("loaded_tokens", arrived),
    ):
        theirs = np.array([getattr(r, name) for r in requests])
        np.testing.assert_array_equal(log.requests[name][rows], theirs[rows], name)
    losses = np.array([r.preempted_loss_s for r in requests])
    np.testing.assert_allclose(log.requests["preemption_loss_s"][arrived], losses[arrived], rtol=1e-6, atol=1e-9)
    assert_same_migrations(log, expected)
    np.testing.assert_array_equal(log.instances["preemptions"], expected.preemptions)
    np.testing.assert_array_equal(log.instances["iterations"], expected.iterations)
    np.testing.assert_allclose(log.instances["alive_s"], expected.alive_s, rtol=1e-9, atol=1e-12)
    assert math.isclose(log.end_s, expected.end_s, rel_tol=1e-9)
    used = {(time_s, instance): blocks for time_s, instance, blocks in expected.samples}
    for sample in log.samples:
        where = (float(sample["time_s"]), int(sample["instance"]))
        assert sample["used_blocks"] == used.get(where, sample["used_blocks"]), where


def assert_same_migrations(log: RunLog, expected: FleetResult) -> None:
    assert MIGRATION_OUTCOMES == OUTCOMES
    ours = np.sort(log.migrations, order=["row", "start_s"], kind="stable")
    theirs = sorted(expected.migrations, key=lambda m: (m.row, m.start_s))
    for name in ("row", "source", "destination", "stages", "blocks"):
        np.testing.assert_array_equal(ours[name], [getattr(m, name) for m in theirs], name)
    assert [OUTCOMES[outcome] for outcome in ours["outcome"]] == [m.outcome for m in theirs]
    for name in ("start_s", "stop_s", "end_s"):
        np.testing.assert_allclose(ours[name], [getattr(m, name) for m in theirs], rtol=1e-9, err_msg=name)


def assert_same_run(case: FleetCase, *, leap: bool = True, reject_share: float = 0.0) -> None:
    log, asked = run_kernel_fleet(case, leap=leap, reject_share=reject_share)
    expected, expected_asked = run_oracle_fleet(case, reject_share)
    assert_same_questions(asked, expected_asked)
    assert_same_fleet(log, expected)
    assert_same_gaps(log, expected)
