"""Plans: the smallest fleet that meets a target, and why no smaller one does."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.cli import main
from fleetpilot.evaluation.planning import Question, Target, answer, fewest, measure, plan_table
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload
from fleetpilot.workloads.table import RequestTable, make_table

H100 = load_profile("h100-llama-3.1-8b")
A10 = load_profile("a10-llama-7b")


def evenly(gap_s: float, prompt_tokens: int, output_tokens: int = 1, n: int = 400) -> RequestTable:
    """The same request over and over again, at equal distances."""
    return make_table("evenly", np.arange(n) * gap_s, np.full(n, prompt_tokens), np.full(n, output_tokens))


@given(threshold=st.integers(1, 300), start=st.integers(-3, 400), most=st.integers(1, 250))
def test_the_fewest_is_found_and_the_one_below_was_asked(threshold: int, start: int, most: int) -> None:
    asked: list[int] = []

    def meets(count: int) -> bool:
        asked.append(count)
        return count >= threshold

    found = fewest(meets, start, most)
    assert found == (threshold if threshold <= most else None)
    assert all(1 <= count <= most for count in asked)
    assert len(asked) == len(set(asked)) <= 2 * math.log2(most) + 3
    if found is not None and found > 1:
        assert {found, found - 1} <= set(asked)


@pytest.mark.parametrize("instances", [1, 2, 5])
def test_with_equal_requests_the_count_is_that_of_their_prefills(instances: int) -> None:
    """Taken in turn, each instance has `instances` gaps for a prefill: with one less the queue grows for ever."""
    prefill_s = H100.prefill_s(2000)
    table = evenly(prefill_s / (instances - 0.5), 2000)
    found = answer(Question(table, H100, "round-robin", Target(99, ttft_s=1.01 * prefill_s)))
    assert found.enough is not None
    assert found.enough.instances == instances
    assert found.enough.ttft_s == pytest.approx(prefill_s, rel=0.01)
    if instances == 1:
        assert found.binds == "one instance is enough"
    else:
        assert found.too_few is not None
        assert found.too_few.instances == instances - 1
        assert "computing takes too long" in found.binds


def test_what_one_request_alone_misses_no_count_meets() -> None:
    table = evenly(1.0, 3000)
    target = Target(99, ttft_s=0.9 * A10.prefill_s(3000))
    found = answer(Question(table, A10, "round-robin", target))
    assert found.enough is None
    assert found.binds == (
        f"infeasible at any count: the prefill of a long prompt alone takes {1e3 * A10.prefill_s(3000):.0f} ms"
    )
    step_s = A10.decode_s(1, 500)
    slow = answer(Question(evenly(1.0, 500, 20), A10, "round-robin", Target(99, tpot_s=0.9 * step_s)))
    assert "a decode step of one request alone takes" in slow.binds


def test_a_long_prompt_makes_it_infeasible_only_from_its_percentile_on() -> None:
    prompts = np.full(200, 500)
    prompts[100:103] = 3500
    table = make_table("three long ones", np.arange(200) * 2.0, prompts, np.full(200, 1))
    target_s = 0.5 * A10.prefill_s(3500)
    by_percentile = {p: answer(Question(table, A10, "round-robin", Target(p, ttft_s=target_s))) for p in (95, 99)}
    assert by_percentile[95].enough is not None
    assert by_percentile[99].enough is None


def test_a_count_that_is_not_enough_is_said_to_be_so() -> None:
    table = workload("poisson?rate=40&n=800")
    found = answer(Question(table, A10, "join-shortest-queue", Target(99, ttft_s=1.5), max_instances=3))
    assert found.enough is None
    assert found.binds.startswith("not with 3: TTFT")


def test_full_batches_are_what_binds() -> None:
    """Each request decodes for long: with four in a batch the others wait, though memory and time are there."""
    table = workload("poisson?rate=20&n=1500&prompt=100&output=200")
    narrow = Question(table, H100.replace(max_num_seqs=4), "join-shortest-queue", Target(99, ttft_s=0.2))
    found, wide = answer(narrow), answer(Question(table, H100, narrow.policy, narrow.target))
    assert "batches are full (max_num_seqs 4)" in found.binds
    assert found.enough is not None
    assert wide.enough is not None
    assert found.enough.instances > wide.enough.instances


def test_requests_that_do_not_finish_meet_no_target() -> None:
    table = workload("poisson?rate=8&n=300")
    measured = measure(Question(table, A10, "round-robin", Target(50, ttft_s=100.0)), 1)
    assert math.isfinite(measured.ttft_s)
    assert measured.missed(Target(50, ttft_s=measured.ttft_s)) == ()
    assert measured.missed(Target(50, ttft_s=0.999 * measured.ttft_s)) == ("TTFT",)


@pytest.mark.parametrize(
    ("bad", "said"),
    [({"percentile": 100.0, "ttft_s": 1.0}, "percentile"), ({}, "one of them finite"), ({"ttft_s": 0.0}, "times > 0")],
)
def test_a_target_is_something_to_meet(bad: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Target(**bad)


def test_the_table_marks_the_fewest_gpus() -> None:
    table = evenly(0.02, 2000)
    answers = [
        answer(Question(table, profile, "round-robin", Target(99, ttft_s=0.5)))
        for profile in (H100, load_profile("l40s-llama-3.1-8b"))
    ]
    rows = plan_table(answers).rows
    assert [row[4].best for row in rows] == [True, False]


def test_the_command_plans(capsys: pytest.CaptureFixture[str]) -> None:
    workload_name = "poisson?rate=30&n=600"
    options = ["--profiles", "h100-llama-3.1-8b", "--policies", "round-robin,lmetric", "--workers", "1"]
    engines = ["--engine", "max_num_seqs=8", "--engine", "max_num_batched_tokens=2048,prefix_cache=false"]
    status = main(["plan", "--workload", workload_name, "--ttft-ms", "300", *options, *engines, "--json"])
    assert status == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(of["engine"], of["policy"]) for of in found] == [
        (engine, policy)
        for engine in ("max_num_seqs=8", "max_num_batched_tokens=2048, prefix_cache=false")
        for policy in ("round-robin", "lmetric")
    ]
    assert all(of["instances"] >= 1 and of["rate_rps"] == pytest.approx(30, rel=0.1) for of in found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "expected --ttft-ms, --tpot-ms or both"),
        (["--ttft-ms", "0"], "expected a number > 0"),
        (["--ttft-ms", "9", "--engine", "tp=4"], "expected FIELD=VALUE,... of prefix_cache, max_num_seqs"),
        (["--ttft-ms", "9", "--engine", "prefix_cache=1"], "expected FIELD=VALUE"),
        (["--ttft-ms", "9", "--percentile", "100"], "expected 0 < percentile < 100"),
    ],
)
def test_bad_plans_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", "--workload", "poisson?n=10", *options])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def test_full_memory_is_what_binds() -> None:
    """Long answers to short prompts: little to compute, much to remember."""
    small = H100.replace(kv_blocks=2500, max_model_len=16_000)
    table = workload("poisson?rate=10&n=1200&prompt=100&output=800")
    found = answer(Question(table, small, "join-shortest-queue", Target(99, ttft_s=0.3)))
    assert "KV memory is full" in found.binds
