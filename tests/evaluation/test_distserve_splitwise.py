"""The experiment on pools against mixed fleets: its engines, its rates, its fleets of equal cost, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation.experiments import distserve_splitwise as experiment
from fleetpilot.evaluation.experiments.distserve_splitwise import (
    A100,
    BEFORE,
    CLAIMS,
    H100,
    MIXED,
    OPT_13B,
    OPT_66B,
    POOLS,
    PRICE,
    Job,
    Load,
    Size,
    highest_rps,
    jobs_of,
    machines_of,
    mixed,
    tightest,
)
from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.workloads import Fixed, Independent

SMALL = Size(
    requests=200,
    span_s=1,
    ttft_targets=1,
    traces=1,
    claims=CLAIMS[:1],
    scales=(1.0,),
    prompts=(200,),
    answers=(20,),
    machines=2,
    instances=2,
)


@pytest.mark.parametrize(
    ("engine", "prefill_ms", "decode_ms"),
    [
        (OPT_13B, 18.10 + 0.10191 * 512 + 7.12e-6 * 512**2, 19.93 + 6.27e-4 * 512),
        (OPT_66B, 29.44 + 0.15135 * 512 + 8.32e-6 * 512**2, 30.76 + 4.52e-4 * 512),
        (H100, 22.39 + 0.0648 * 512 + 7.414e-6 * 512**2, 29.89 + 0.199 + 1.785e-4 * 512),
        (A100, 21.54 + 0.1508 * 512 + 4.145e-6 * 512**2, 44.07 + 0.19 + 3.354e-4 * 512),
    ],
    ids=lambda value: value.name if isinstance(value, HardwareProfile) else "",
)
def test_engines_take_as_long_as_published(engine: HardwareProfile, prefill_ms: float, decode_ms: float) -> None:
    assert 1e3 * engine.prefill_s(512) == pytest.approx(prefill_ms, rel=1e-3)
    assert 1e3 * engine.decode_s(1, 512) == pytest.approx(decode_ms, rel=1e-3)


def fixed(prompt: int, answer: int, slo: SLOClass, fleet: FleetConfig) -> Job:
    """Requests of one length."""
    return Job(Load("fixed", Independent(Fixed(prompt), Fixed(answer)), slo), "any", fleet, Size(400, 1, 5.0))


def test_a_rate_is_where_so_many_meet_both_targets() -> None:
    job = fixed(500, 50, SLOClass("x", 0.3, 0.06), mixed(OPT_13B, 2, BEFORE))
    rate_rps = highest_rps(job)
    assert tightest(job, rate_rps) <= 1 < tightest(job, 1.03 * rate_rps)
    assert rate_rps < 2 / OPT_13B.prefill_s(500)  # prefills alone would fill it


@pytest.mark.parametrize("slow", [SLOClass("x", 0.01, 1.0), SLOClass("x", 1.0, 0.01)])
def test_what_one_request_misses_has_no_rate(slow: SLOClass) -> None:
    assert highest_rps(fixed(500, 50, slow, mixed(OPT_13B, 1, BEFORE))) == 0.0


def test_twice_the_targets_need_half_the_factor() -> None:
    fleet = mixed(OPT_13B, 1, BEFORE)
    one, two = (tightest(fixed(500, 50, SLOClass("x", 0.1 * k, 0.02 * k), fleet), 2.0) for k in (1, 2))
    assert two == pytest.approx(one / 2)


def test_pools_are_all_splits_of_the_mixed_fleet() -> None:
    jobs = jobs_of(CLAIMS[0].load, OPT_13B, SMALL._replace(instances=4))
    assert [job.system for job in jobs] == [*MIXED, *[POOLS] * 3]
    assert [job.roles for job in jobs if job.system == POOLS] == ["1P+3D", "2P+2D", "3P+1D"]
    assert {len(job.fleet.profiles) for job in jobs} == {4}


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_no_fleet_costs_more_nor_could_have_another_machine(share: float) -> None:
    budget = share * 8 * PRICE[H100.name]
    jobs = machines_of(CLAIMS[0].load, share, Size())
    for job in jobs:
        left = budget - sum(PRICE[profile.name] for profile in job.fleet.profiles)
        assert left > -1e-6
        assert left < PRICE[job.fleet.profiles[-1].name]
    assert {job.roles for job in jobs if job.system == "H100 prefill, H100 decode"} == (
        {f"{p}P+{8 - p}D" for p in range(1, 8)} if share == 1 else {f"{p}P+{6 - p}D" for p in range(1, 6)}
    )


def test_it_runs(tmp_path: Path) -> None:
    tables = experiment.run(tmp_path, workers=1, size=SMALL)
    claims = tables[0]
    assert claims.header[-1] == "within"
    assert [row[1].text for row in claims.rows] == ["7.4", "-", "-", "12.6", "-", "2.35", "1.4"]
    assert {row[-1].text for row in claims.rows} <= {"yes", "no", "-"}
    rates = json.loads((tmp_path / "rates.json").read_text(encoding="utf-8"))
    assert {of["fleet"] for of in rates} == {"1", "2", "1P+1D", "1P+2D", "2P+1D"}
    best = {of["system"]: of["rate_rps"] for of in rates if of["load"] == CLAIMS[0].load.name}
    shown = {row[1].text: float(row[3].text) for row in tables[1].rows}
    assert shown == pytest.approx({system: best[system] / 2 for system in (*MIXED, POOLS)}, rel=0.01)
