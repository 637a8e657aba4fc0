"""Replays keep their clock and their prompts; comparisons say who wins, and whether the simulator agrees."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy
from fleetpilot.calibration import validation
from fleetpilot.calibration.compare import compared, goodput_share, pairs
from fleetpilot.calibration.replay import prompts
from fleetpilot.calibration.report import verdict, write_validation
from fleetpilot.calibration.validation import SIMULATED_RUNS, Setup, Validation, validate
from fleetpilot.cluster import FleetConfig, RunLog, Telemetry, simulate
from fleetpilot.cluster.state import FAILED, FINISHED, REQUEST_LOG
from fleetpilot.fleet.profiles import HardwareProfile, profile_to_toml
from fleetpilot.fleet.slo import CHAT
from fleetpilot.workloads import RequestTable, workload
from fleetpilot.workloads.table import make_table


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RequestTable, FleetConfig]]:
    """What was simulated."""
    calls: list[tuple[RequestTable, FleetConfig]] = []

    def simulate_and_note(table: RequestTable, fleet: FleetConfig, *rest: Any, **options: Any) -> RunLog:
        calls.append((table, fleet))
        return simulate(table, fleet, *rest, **options)

    monkeypatch.setattr(validation, "simulate", simulate_and_note)
    return calls


@pytest.fixture
def found(simulated: Any, urls: list[str], profiles: list[HardwareProfile], tmp_path: Path) -> Validation:
    """Two policies on two emulated engines, whose profile has a record beside it."""
    path = tmp_path / "small.toml"
    path.write_text(profile_to_toml(profiles[0]))
    link = {
        "round_trip_s": 0.01,
        "bandwidth_bytes_per_s": 1e9,
        "kv_bytes_per_token": 4096,
        "probe_s": 0.01,
        "error": 0.0,
    }
    (tmp_path / "small.json").write_text(json.dumps({"fit": {"request_s": 0.003}, "poll_s": 0.005, "link": link}))
    table = workload("poisson?rate=40&prompt=uniform:20:200&output=uniform:4:40&n=40")
    policies = tuple(load_policy(name) for name in ("round-robin", "llumnix"))
    return validate(Setup(table, tuple(urls), (str(path),), policies, repeats=2))


def test_a_replay_answers_every_request_and_the_report_says_all(
    found: Validation, simulated: list[tuple[RequestTable, FleetConfig]], tmp_path: Path
) -> None:
    assert found.failed == {"round-robin": 0, "llumnix": 0}
    assert found.setup["kv_blocks"] == [64, 128]
    assert found.request_s == 0.003
    assert {fleet.telemetry for _, fleet in simulated} == {Telemetry(0.1, 0.005)}
    first_s = {float(table.arrival_s[0]) for table, _ in simulated}
    assert len(simulated) == 2 * SIMULATED_RUNS == 2 * len(first_s)  # both policies at the same phases of the polls
    assert max(first_s) - min(first_s) < 0.1
    assert len(found.rows) == 2 * 3 * 3
    assert len(found.pairs) == 3
    assert all(row.engines > 0 and row.simulator > 0 for row in found.rows)
    report = write_validation(found, tmp_path / "out", "fleetpilot validate ...")
    text = report.read_text()
    for part in ("### TTFT", "### TPOT", "### E2E", "### Ranking of policies", "### The fleet", "### Before switching"):
        assert part in text
    assert "Cost of a copy" in text
    record = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert record["command"] == "fleetpilot validate ..."
    assert {"ratio", "allowed", "is_met"} <= set(record["rows"][0])
    assert "ranking by E2E" in verdict(found)


def test_a_record_of_another_version_is_refused_at_once(tmp_path: Path, profiles: list[HardwareProfile]) -> None:
    path = tmp_path / "old.toml"
    path.write_text(profile_to_toml(profiles[0]))
    (tmp_path / "old.json").write_text(json.dumps({"fit": {"request_s": 0.003}, "link": None}))
    table = workload("poisson?rate=40&prompt=uniform:20:200&output=uniform:4:40&n=4")
    with pytest.raises(ValueError, match=r"old\.json: poll_s is missing"):
        validate(Setup(table, ("http://127.0.0.1:1",), (str(path),), (load_policy("round-robin"),)))


def log_of(arrival_s: NDArray[np.float64], ttft_s: NDArray[np.float64], tpot_s: float = 0.05) -> NDArray[np.void]:
    log = np.zeros(len(arrival_s), REQUEST_LOG)
    log["status"] = FINISHED
    log["prompt_tokens"], log["output_tokens"], log["generated"] = 10, 11, 11
    log["arrival_s"] = arrival_s
    log["first_token_s"] = arrival_s + ttft_s
    log["finish_s"] = log["first_token_s"] + 10 * tpot_s
    log["dispatch_s"] = log["admitted_s"] = np.nan
    return log


def test_pairs_that_separate_are_told_from_noise_and_a_wrong_order_is_seen() -> None:
    random = np.random.default_rng(0)
    arrival_s = np.sort(random.uniform(0, 100, 200))

    def runs(mean_s: float) -> list[NDArray[np.void]]:
        return [log_of(arrival_s, random.exponential(mean_s, 200)) for _ in range(3)]

    engines = {"a": runs(1.0), "b": runs(1.0), "c": runs(2.0)}
    simulated = {"a": runs(1.0), "b": runs(1.0), "c": runs(0.5)}
    ttft = {(pair.first, pair.second): pair for pair in pairs(engines, simulated) if pair.metric == "ttft_s"}
    assert not ttft["a", "b"].separates
    assert ttft["a", "c"].separates
    assert not ttft["a", "c"].agrees
    assert ttft["a", "c"].engines.estimate == pytest.approx(1.0, abs=0.3)


def test_targets_follow_the_spread_of_repeats() -> None:
    arrival_s = np.arange(100.0)
    engines = {"a": [log_of(arrival_s, np.full(100, mean_s)) for mean_s in (1.0, 1.5, 2.0)]}
    simulated = {"a": [log_of(arrival_s, np.full(100, 2.3))]}
    mean, _, p95 = (row for row in compared(engines, simulated) if row.metric == "ttft_s")
    assert mean.spread == pytest.approx(1 / 3)
    assert mean.allowed == pytest.approx(2 / 3)
    assert mean.is_met
    assert p95.allowed == 0.25
    steady = {"a": [log_of(arrival_s, np.full(100, 1.5))] * 2}
    assert not compared(steady, simulated)[0].is_met


def test_requests_that_failed_are_no_latencies_but_misses() -> None:
    log = log_of(np.arange(10.0), np.full(10, 0.1))
    log["status"][:5] = FAILED
    log["first_token_s"][:5] = log["finish_s"][:5] = np.nan
    assert goodput_share([log], CHAT) == 0.5
    assert compared({"a": [log]}, {"a": [log]})[0].engines == pytest.approx(0.1)


def test_prompts_share_what_the_table_shares_and_nothing_else() -> None:
    table = make_table(
        "shared",
        [0.0, 1.0, 2.0, 3.0],
        [100, 120, 64, 50],
        [5, 5, 5, 5],
        node_parent=[-1, 0],
        node_end_tokens=[32, 64],
        prefix_node=[1, 0, 1, -1],
    )
    ids = prompts(table, seed=1)
    assert [len(prompt) for prompt in ids] == [100, 120, 64, 50]
    assert ids[0][:64] == ids[2]
    assert ids[0][:32] == ids[1][:32]
    assert ids[0][32:64] != ids[1][32:64]
    assert ids[3][:32] != ids[0][:32]
    assert prompts(table, seed=1) == ids
    assert prompts(table, seed=2)[0] != ids[0]


def test_a_closed_loop_a_table_too_long_and_twins_of_a_policy_are_refused(urls: list[str], tmp_path: Path) -> None:
    policy = load_policy("round-robin")
    loop = make_table("loop", [0.0, np.nan], [10, 10], [5, 5], parent=[-1, 0], think_s=[np.nan, 1.0])
    setup = Setup(loop, tuple(urls), ("tiny-cpu",), (policy,))
    with pytest.raises(ValueError, match="expected an open loop"):
        validate(setup)
    long = make_table("long", [0.0], [500], [500])
    with pytest.raises(ValueError, match="a request of 1000 tokens; expected at most 512"):
        validate(dataclasses.replace(setup, table=long))
    with pytest.raises(ValueError, match="expected different names"):
        validate(dataclasses.replace(setup, table=long, policies=(policy, policy)))
