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
from fleetpilot.evaluation.planning import (
    Answer,
    Question,
    Size,
    Target,
    answer,
    configured,
    fewest,
    measure,
    plan_table,
)
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
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
    assert found.enough.size == Size(instances)
    assert found.enough.ttft_s == pytest.approx(prefill_s, rel=0.01)
    if instances == 1:
        assert found.binds == "one instance is enough"
    else:
        assert [of.size for of in found.too_few] == [Size(instances - 1)]
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
    assert found.enough.size > wide.enough.size


def test_requests_that_do_not_finish_meet_no_target() -> None:
    table = workload("poisson?rate=8&n=300")
    measured = measure(Question(table, A10, "round-robin", Target(50, ttft_s=100.0)), Size(1))
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
    assert [(of["settings"], of["policy"]) for of in found] == [
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
        (["--ttft-ms", "9", "--engine", "tp=4"], "expected FIELD=VALUE,... of prefix_cache, chunked_prefill"),
        (["--ttft-ms", "9", "--engine", "prefix_cache=1"], "expected FIELD=VALUE"),
        (["--ttft-ms", "9", "--engine", "acceptance=high"], "expected FIELD=VALUE"),
        (["--ttft-ms", "9", "--engine", "draft_tokens=70"], "draft_tokens = 70: expected a whole number from 0 to 63"),
        (["--ttft-ms", "9", "--engine", "pools=true,chunked_prefill=false"], "expected engines with chunked prefill"),
        (
            ["--ttft-ms", "9", "--engine", "prefix_cache=false,shared_cache_gb=1", "--profiles", "h100-llama-3.1-8b"],
            "expected engines with a prefix cache",
        ),
        (["--ttft-ms", "9", "--engine", "pools=true", "--max-instances", "1"], "expected at least 2 with pools"),
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


def planned(table: RequestTable, target: Target, profile: HardwareProfile = H100, **settings: float) -> Answer:
    """The answer for a fleet with changes."""
    return answer(configured(table, profile, "join-shortest-queue", target, settings, 64))


def test_of_pools_neither_can_spare_an_instance() -> None:
    """Long prompts with short answers want those that prefill; short ones with long answers those that decode."""
    target = Target(99, ttft_s=0.5, tpot_s=0.03)
    long_prompts = planned(evenly(0.05, 6000, 10, n=600), target, pools=True)
    long_answers = planned(evenly(0.01, 100, 400, n=3000), target, pools=True)
    for found in (long_prompts, long_answers):
        assert found.enough is not None
        assert found.gpus == found.enough.size.instances
        assert not found.enough.missed(target)
        assert found.too_few
        for of in found.too_few:
            assert of.missed(target)
            assert of.size.instances == found.enough.size.instances - 1
            assert str(of.size) in found.binds
    many, few = long_prompts.enough, long_answers.enough
    assert many is not None
    assert few is not None
    assert many.size.prefill > many.size.instances - many.size.prefill
    assert few.size.prefill == 1 < few.size.instances - few.size.prefill


def test_one_instance_is_too_few_for_pools() -> None:
    found = planned(evenly(1.0, 100, 10), Target(99, ttft_s=1.0), pools=True)
    assert found.enough is not None
    assert (str(found.enough.size), found.too_few, found.binds) == ("1P+1D", (), "one instance of each is enough")


def test_a_cache_that_all_share_spares_instances() -> None:
    """Many sessions, and little memory on each instance: what one has prefilled, or dropped, the others load."""
    table = workload("sessions/chat?rate=2&turns=6&think_s=2&loop=open&n=600")
    small = H100.replace(kv_blocks=1500, max_model_len=20_000)
    alone, shared = (planned(table, Target(99, ttft_s=0.4), small, **more) for more in ({}, {"shared_cache_gb": 500.0}))
    assert alone.enough is not None
    assert shared.enough is not None
    assert shared.enough.size < alone.enough.size
    assert (shared.enough.prefix_hit_ratio or 0.0) > (alone.enough.prefix_hit_ratio or 0.0)


def test_the_way_out_of_the_shared_cache_may_be_what_binds() -> None:
    """A hundred long contexts a second, whose turns go to whoever is free: more than a network carries."""
    table = workload("sessions/chat?rate=8&turns=6&think_s=2&loop=open&n=1500")
    small = H100.replace(kv_blocks=1500, max_model_len=20_000)
    found = planned(table, Target(99, ttft_s=0.4), small, shared_cache_gb=500.0)
    assert found.enough is None
    assert "the shared cache's bandwidth is used up" in found.binds


def test_speculation_makes_feasible_what_a_step_per_token_is_too_slow_for() -> None:
    table, target = evenly(0.5, 500, 100), Target(99, tpot_s=0.8 * H100.decode_s(1, 500))
    assert "infeasible at any count" in planned(table, target).binds
    drafting = planned(table, target, max_num_seqs=256, draft_tokens=3, acceptance=0.8, draft_ms=0.5)
    assert drafting.enough is not None


def test_without_chunks_decodes_wait_for_whole_prompts() -> None:
    table = workload("poisson?rate=6&n=600&prompt=6000&output=100")
    chunks: dict[str, float] = {"max_num_seqs": 256, "max_num_batched_tokens": 512}
    questions = [
        configured(table, H100, "join-shortest-queue", Target(99, tpot_s=0.1), settings)
        for settings in (chunks, {"chunked_prefill": False})
    ]
    chunked, whole = (measure(question, Size(3)) for question in questions)
    assert chunked.tpot_s < 0.9 * whole.tpot_s
    assert chunked.ttft_s > whole.ttft_s
