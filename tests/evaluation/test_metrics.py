"""Metrics against logs worked out by hand, and the ways in which public benchmark tools got them wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.cluster.state import CUT, FAILED, NEVER_ARRIVED, REJECTED
from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.metrics import Window
from fleetpilot.evaluation.provenance import to_json
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.workloads.selection import offered_s
from fleetpilot.workloads.table import make_table

TWO_SECONDS = SLOClass("two seconds", ttft_s=2.0, tpot_s=0.1)
BY_LENGTH = SLOClass("by length", ttft_s=1.0, tpot_s=np.inf, ttft_s_per_prompt_token=0.001)
ALL = Window(0.0, 100.0)

# Arrived at 10 s, dispatched after 0.5 s, admitted after 1 s, first token after 1.5 s, 10 more tokens in 0.8 s.
GOOD: dict[str, Any] = {
    "arrival_s": 10.0,
    "dispatch_s": 10.5,
    "admitted_s": 11.0,
    "first_token_s": 11.5,
    "finish_s": 12.3,
    "prompt_tokens": 100,
    "output_tokens": 11,
    "generated": 11,
}


def summarise(log: Any, window: Window = ALL, classes: tuple[SLOClass, ...] = (TWO_SECONDS,)) -> dict[str, Any]:
    return metrics.summary(log, window.contains(log.requests["arrival_s"]), window, classes)


def bench(log: Any, window: Window = ALL) -> dict[str, Any]:
    return metrics.vllm_bench_result(log, window.contains(log.requests["arrival_s"]), window, (TWO_SECONDS,))


def test_the_latencies_of_a_request_worked_by_hand(requests) -> None:
    found = metrics.request_metrics(requests({**GOOD, "preemption_loss_s": 0.25}))
    assert {name: values.tolist() for name, values in found.items()} == {
        "ttft_s": [1.5],
        "tpot_s": pytest.approx([0.08]),
        "e2e_s": pytest.approx([2.3]),
        "queueing_s": [1.0],
        "dispatch_delay_s": [0.5],
        "normalised_latency_s": pytest.approx([2.3 / 11]),
        "preemption_loss_s": [0.25],
    }


def test_percentiles_are_numpys_linear_ones() -> None:
    found = metrics.distribution(np.array([4.0, 1.0, 3.0, 2.0, np.nan]))
    assert found == {
        "count": 4,
        "undefined": 1,
        "mean": 2.5,
        "std": pytest.approx(np.sqrt(1.25)),
        "p50": 2.5,
        "p90": pytest.approx(3.7),
        "p95": pytest.approx(3.85),
        "p99": pytest.approx(3.97),
    }


# --- the window --------------------------------------------------------------------------------------------------


def test_the_warmup_is_left_out_by_arrival(requests, make_log) -> None:
    table = make_table("t", [0.0, 5.0, 10.0, 50.0, 100.0], [1] * 5, [1] * 5)
    window = metrics.window_after_warmup(table, 0.1)
    assert window == Window(10.0, 100.0)
    assert window.contains(offered_s(table)).tolist() == [False, False, True, True, True]
    # one that arrives in the warm-up is out even if it finishes in the window
    log = make_log(requests({**GOOD, "arrival_s": 9.0}, {**GOOD, "arrival_s": 10.0}))
    assert summarise(log, window)["requests"]["offered"] == 1


def test_turns_count_with_the_chain_that_they_belong_to() -> None:
    """A closed-loop turn is scored if its session started in the window, whenever (and whether) it arrived itself."""
    nan = np.nan
    table = make_table(
        "sessions",
        [0.0, 20.0, nan, nan, 30.0],
        [1] * 5,
        [1] * 5,
        parent=[-1, -1, 0, 2, 1],
        think_s=[nan, nan, 50.0, 50.0, nan],
    )
    assert offered_s(table).tolist() == [0.0, 20.0, 0.0, 0.0, 30.0]


@pytest.mark.parametrize("edges", [(-1.0, 2.0), (2.0, 1.0), (0.0, np.inf), (np.nan, 1.0)])
def test_a_window_is_finite_and_ordered(edges: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= start_s <= end_s"):
        Window(*edges)


# --- goodput -----------------------------------------------------------------------------------------------------


def test_goodput_counts_every_request_that_was_offered(requests) -> None:
    log = requests(
        GOOD,
        {**GOOD, "status": FAILED},
        {**GOOD, "status": REJECTED},
        {**GOOD, "status": CUT, "finish_s": np.nan},
        {"status": NEVER_ARRIVED, "arrival_s": np.nan},
    )
    found = metrics.goodput(log, [TWO_SECONDS])
    assert found["share"] == pytest.approx(1 / 5)
    assert found["met"] == 1


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"first_token_s": 12.0, "finish_s": 12.5}, True),  # TTFT exactly on target
        ({"first_token_s": 12.001, "finish_s": 12.5}, False),
        ({"finish_s": 12.51}, False),  # TPOT 0.101
        ({"generated": 1, "finish_s": 11.5}, True),  # no TPOT: TTFT decides alone
        ({"generated": 1, "finish_s": 12.001, "first_token_s": 12.001}, False),
    ],
)
def test_both_targets_have_to_be_met(requests, change: dict[str, float], met: bool) -> None:
    assert metrics.met_slo(requests({**GOOD, **change}), [TWO_SECONDS]).tolist() == [met]


def test_each_class_has_its_own_targets_and_share(requests) -> None:
    log = requests(
        {**GOOD, "slo_class": 0},
        {**GOOD, "slo_class": 1, "prompt_tokens": 400},  # target 1.4 s, TTFT 1.5 s
        {**GOOD, "slo_class": 1, "prompt_tokens": 600},  # target 1.6 s
    )
    found = metrics.goodput(log, [TWO_SECONDS, BY_LENGTH])
    assert found["by_class"] == {"two seconds": 1.0, "by length": 0.5}
    assert found["share"] == pytest.approx(2 / 3)


def test_a_class_that_was_not_offered_has_no_share(requests) -> None:
    assert metrics.goodput(requests(GOOD), [TWO_SECONDS, BY_LENGTH])["by_class"] == {"two seconds": 1.0}


def test_rescoring_multiplies_both_targets(requests) -> None:
    # TTFT 1.5 s of 2 s (0.75), TPOT 0.08 of 0.1 s (0.8); the other TTFT 3 s (1.5), TPOT 0.25 s (2.5)
    slow = {**GOOD, "first_token_s": 13.0, "finish_s": 15.5}
    found = metrics.goodput(requests(GOOD, slow), [TWO_SECONDS])["by_scale"]
    assert found == {"0.5": 0.0, "0.75": 0.0, "1": 0.5, "1.5": 0.5, "2": 0.5, "3": 1.0}


# --- faults of public tools: what went wrong there must not go wrong here ----------------------------------------


def test_latency_counts_from_the_intended_arrival(requests, make_log) -> None:
    """vllm#45502: a client that sends late must not hide the wait. A hold is in the TTFT, and reported."""
    log = make_log(requests({**GOOD, "dispatch_s": 11.4, "admitted_s": 11.45}))
    latency = summarise(log)["latency"]
    assert latency["ttft_s"]["mean"] == pytest.approx(1.5)
    assert latency["dispatch_delay_s"]["mean"] == pytest.approx(1.4)


def test_no_output_is_no_division_by_zero(requests, make_log) -> None:
    """vllm#3400: latency / output_len with output_len 0."""
    found = summarise(make_log(requests({**GOOD, "generated": 0, "first_token_s": np.nan})))
    assert found["latency"]["normalised_latency_s"]["count"] == 0
    assert found["latency"]["normalised_latency_s"]["mean"] is None
    assert found["latency"]["tpot_s"]["undefined"] == 1


def test_tpot_divides_by_what_was_generated_not_by_what_was_asked(requests) -> None:
    """sglang#10746: an answer that stopped early."""
    found = metrics.request_metrics(requests({**GOOD, "output_tokens": 1000, "generated": 5}))
    assert found["tpot_s"].tolist() == pytest.approx([0.2])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"first_token_s": 9.0}, "ttft_s"),
        ({"finish_s": 11.4}, "tpot_s"),  # the first token after the last: TTFT > E2E
        ({"finish_s": 9.0, "generated": 1}, "e2e_s"),
        ({"dispatch_s": 9.9}, "dispatch_delay_s"),
    ],
)
def test_a_negative_duration_is_an_error(requests, change: dict[str, float], name: str) -> None:
    """vllm-omni#6693: TPOT 0.0 or negative passes every upper bound."""
    with pytest.raises(ValueError, match=f"{name} of request 0 = -.*: expected >= 0"):
        metrics.request_metrics(requests({**GOOD, **change}))


def test_a_preemption_may_cost_less_than_a_decode_step(requests) -> None:
    found = metrics.request_metrics(requests({**GOOD, "preemptions": 1, "preemption_loss_s": -0.01}))
    assert found["preemption_loss_s"].tolist() == [-0.01]


def test_one_token_has_no_tpot_rather_than_one_of_zero(requests, make_log) -> None:
    found = summarise(make_log(requests({**GOOD, "generated": 1}, GOOD)))["latency"]["tpot_s"]
    assert (found["count"], found["undefined"]) == (1, 1)
    assert found["p50"] == pytest.approx(0.08)


def test_tokens_are_those_that_were_produced(requests, make_log) -> None:
    """flexible-inference-bench#66: output counted by other means than the stream."""
    found = bench(
        make_log(requests({**GOOD, "output_tokens": 1000, "generated": 5}, GOOD), gaps_s=(0.2,) * 4 + (0.08,) * 10)
    )
    assert found["total_output_tokens"] == 5 + 11
    assert found["total_input_tokens"] == 200


def test_tpot_is_averaged_over_requests_and_leaves_out_the_first_token(requests, make_log) -> None:
    """guidellm#1144: neither with the first token in it nor weighted by tokens."""
    short = {**GOOD, "generated": 2, "finish_s": 11.9}  # one gap of 0.4 s
    found = bench(make_log(requests(GOOD, short)))
    assert found["mean_tpot_ms"] == pytest.approx((80 + 400) / 2)


def test_a_stall_shows_in_the_pooled_gaps(requests, make_log) -> None:
    """guidellm#1145: the mean gap of a request hides that all of it was one stall."""
    gaps = (0.02,) * 197 + (2.0,) * 3
    found = summarise(make_log(requests(GOOD), gaps_s=gaps))["latency"]["itl_s"]
    assert found["count"] == 200
    assert found["p50"] == pytest.approx(0.02, rel=0.01)
    assert found["p99"] == pytest.approx(2.0, rel=0.01)
    assert found["mean"] == pytest.approx(np.mean(gaps), rel=0.01)


def test_failed_requests_are_in_no_latency_and_no_throughput(requests, make_log) -> None:
    """guidellm#444: statistics are by status; what failed is counted apart."""
    slow = {**GOOD, "status": FAILED, "first_token_s": 80.0, "finish_s": 90.0}
    log = make_log(requests(GOOD, slow, {**GOOD, "status": CUT, "finish_s": np.nan}, {**slow, "status": REJECTED}))
    found = summarise(log)
    assert found["latency"]["ttft_s"]["count"] == 1
    assert found["latency"]["e2e_s"]["p99"] == pytest.approx(2.3)
    assert {name: found["requests"][name] for name in ("offered", "finished", "failed", "cut", "rejected")} == {
        "offered": 4,
        "finished": 1,
        "failed": 1,
        "cut": 1,
        "rejected": 1,
    }
    assert found["goodput"]["share"] == pytest.approx(0.25)
    result = bench(log)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (1, 3, 11)
    assert result["request_throughput"] == pytest.approx(1 / 12.3)


def test_a_missing_first_token_is_missing_not_zero(requests, make_log) -> None:
    """guidellm#216: a mean TTFT of -1.7e12 ms."""
    found = summarise(make_log(requests(GOOD, {**GOOD, "first_token_s": np.nan})))
    assert found["latency"]["ttft_s"]["undefined"] == 1
    assert found["latency"]["ttft_s"]["mean"] == pytest.approx(1.5)
    assert found["goodput"]["met"] == 1


@pytest.mark.parametrize("status", [FAILED, REJECTED, CUT, None])
def test_nothing_finished_gives_nulls_and_valid_json(requests, make_log, status: int | None) -> None:
    """vllm#4987, sglang#4533, llmperf#55: index errors, NaN and divisions by zero when every request failed."""
    log = make_log(requests() if status is None else requests({"status": status}, {"status": status}))
    text = to_json({**bench(log), "metrics": summarise(log)})
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert found["completed"] == 0
    for name in ("mean_ttft_ms", "p99_tpot_ms", "median_itl_ms", "request_throughput", "request_goodput", "duration"):
        assert found[name] is None
    assert found["metrics"]["latency"]["ttft_s"] == {
        "count": 0,
        "undefined": 0,
        **dict.fromkeys(("mean", "std", "p50", "p90", "p95", "p99")),
    }
    assert found["metrics"]["goodput"]["share"] == (None if status is None else 0.0)
    assert found["metrics"]["fleet"]["kv_use"] is None


def test_an_instant_answer_is_no_division_by_zero(requests, make_log) -> None:
    now = dict.fromkeys(("arrival_s", "dispatch_s", "admitted_s", "first_token_s", "finish_s"), 0.0)
    found = bench(make_log(requests({**GOOD, **now})), Window(0.0, 0.0))
    assert found["request_throughput"] is None
    assert found["mean_e2el_ms"] == 0.0


# --- results as vllm bench serve names them ----------------------------------------------------------------------


def test_the_result_names_of_vllm_bench_serve(requests, make_log) -> None:
    late = {name: value + 20.0 if name.endswith("_s") else value for name, value in GOOD.items()}
    found = bench(make_log(requests(GOOD, {**late, "first_token_s": 32.5, "finish_s": 35.5})), Window(10.0, 40.0))
    expected = {
        "num_prompts": 2,
        "completed": 2,
        "failed": 0,
        "duration": 25.5,  # from the window's start to the last finish
        "request_rate": 2 / 30,
        "request_throughput": 2 / 25.5,
        "request_goodput": 1 / 25.5,
        "output_throughput": 22 / 25.5,
        "total_token_throughput": 222 / 25.5,
        "max_concurrent_requests": 1,
        "mean_ttft_ms": 2000.0,
        "median_ttft_ms": 2000.0,
        "std_ttft_ms": 500.0,
        "p50_ttft_ms": 2000.0,
        "p99_ttft_ms": 2490.0,
        "mean_tpot_ms": (80 + 300) / 2,
        "mean_e2el_ms": (2300 + 5500) / 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_most_requests_at_one_time(requests, make_log) -> None:
    spans = [(0.0, 4.0), (1.0, 3.0), (3.0, 5.0), (3.5, 3.6)]  # the second ends as the third arrives
    rows = [
        {**GOOD, "arrival_s": a, "dispatch_s": a, "admitted_s": a, "first_token_s": a, "finish_s": b} for a, b in spans
    ]
    assert bench(make_log(requests(*rows)))["max_concurrent_requests"] == 3


# --- histograms --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-3, 1e2), min_size=1, max_size=300))
def test_percentiles_of_a_histogram_lie_in_the_bin_of_the_true_one(gaps: list[float]) -> None:
    edges = np.geomspace(1e-4, 1e3, 2000)  # 0.8 % wide
    bins = metrics.itl_bins(type("Log", (), {"itl": (edges, np.histogram(gaps, edges)[0])}))
    found = metrics.bins_distribution(bins)
    assert found["count"] == len(gaps)
    for q in metrics.PERCENTILES:
        true = np.percentile(gaps, q, method="inverted_cdf")
        assert found[f"p{q}"] == pytest.approx(true, rel=0.0082)
    assert found["mean"] == pytest.approx(np.mean(gaps), rel=0.0082)


def test_histograms_add_up() -> None:
    one = np.array([(0.1, 0.2, 3), (0.4, 0.8, 1)], metrics.BIN)
    other = np.array([(0.2, 0.4, 5), (0.4, 0.8, 2)], metrics.BIN)
    expected = np.array([(0.1, 0.2, 3), (0.2, 0.4, 5), (0.4, 0.8, 3)], metrics.BIN)
    assert metrics.pooled_bins([one, other]).tolist() == expected.tolist()
    assert len(metrics.pooled_bins([])) == 0


# --- the fleet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "demand", "fragmented"),
    [
        ([8, 0, 0], [0, 0, 0], 0),  # nobody waits
        ([8, 0, 0], [8, 0, 0], 0),  # its own instance has room: not memory that blocks it
        ([2, 3, 3], [3, 3, 3], 0 + 3),  # only the first is blocked; the fleet has 8
        ([3, 3, 2], [4, 4, 4], 8),  # three want 4 each, the fleet's 8 would do for two of them
        ([2, 2, 2], [7, 0, 0], 0),  # not even all free memory would do
        ([4, 4, 0], [5, 6, 1], 1 + 5),  # smallest first: 1 + 5 fit, 6 more do not
    ],
)
def test_fragmentation_worked_by_hand(free: list[int], demand: list[int], fragmented: int) -> None:
    assert metrics.fragmented_blocks(np.array([free]), np.array([demand])).tolist() == [fragmented]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80)), min_size=1, max_size=6))
def test_fragmented_memory_is_free_and_wanted(fleet: list[tuple[int, int]]) -> None:
    free, demand = np.array(fleet).T
    (found,) = metrics.fragmented_blocks(free[None], demand[None])
    assert 0 <= found <= min(free.sum(), demand[demand > free].sum())


def test_the_fleet_over_the_window(requests, samples, make_log) -> None:
    log = make_log(
        requests({**GOOD, "instance": 0}, {**GOOD, "instance": 1, "prompt_tokens": 300}, {**GOOD, "instance": -1}),
        samples(
            {"time_s": 1.0, "instance": 0, "running": 9, "used_blocks": 100, "free_blocks": 0},  # before the window
            {"time_s": 1.0, "instance": 1, "running": 9, "used_blocks": 100, "free_blocks": 0},
            {"time_s": 10.0, "instance": 1, "running": 2, "used_blocks": 60, "free_blocks": 40},
            {
                "time_s": 10.0,
                "instance": 0,
                "running": 4,
                "waiting": 3,
                "used_blocks": 80,
                "free_blocks": 20,
                "head_demand_blocks": 30,
            },
            {"time_s": 11.0, "instance": 0, "running": 3, "used_blocks": 40, "free_blocks": 60},
            {"time_s": 11.0, "instance": 1, "running": 0, "used_blocks": 0, "free_blocks": 100},
        ),
        instances=2,
        busy_s=[30.0, 10.0],
        alive_s=[50.0, 50.0],
        preemptions=[1, 2],
        prefix_queries_tokens=[100, 300],
        prefix_hits_tokens=[80, 20],
    )
    found = summarise(log, Window(10.0, 20.0))["fleet"]
    assert found == {
        "kv_use": pytest.approx((140 + 40) / 2 / 200),
        "kv_use_max": 0.7,
        "fragmentation": pytest.approx(30 / 200 / 2),
        "batch_size": pytest.approx((4 + 2 + 3) / 3),
        "waiting_per_instance": pytest.approx(3 / 4),
        "load_max_over_mean": pytest.approx(311 / (422 / 2)),
        "run_busy_share": 0.4,
        "run_prefix_hit_ratio": 0.25,
        "run_preemptions": 3,
        "run_instance_seconds": 100.0,
        "run_instances": 1.0,
        "run_held_s": 0.0,
    }


def test_without_a_prefix_cache_there_is_no_hit_ratio(requests, make_log) -> None:
    assert summarise(make_log(requests(GOOD)))["fleet"]["run_prefix_hit_ratio"] is None


def test_preempted_requests(requests, make_log) -> None:
    found = summarise(make_log(requests(GOOD, {**GOOD, "preemptions": 2, "preemption_loss_s": 3.0})))
    assert (found["requests"]["preempted"], found["requests"]["preempted_share"]) == (1, 0.5)
    assert found["latency"]["preemption_loss_s"]["mean"] == 1.5


def test_migrations(make_log, requests) -> None:
    moved = {**GOOD, "migrations": 2, "downtime_s": 0.5}
    migrations = (
        (0, 0, 1, 10.0, 10.5, 10.75, 2, 9, 0),
        (0, 1, 0, 11.0, 11.5, 12.0, 2, 10, 0),
        (1, 0, 1, 20.0, np.nan, 20.0, 0, 0, 2),
    )
    found = summarise(make_log(requests(moved, GOOD, {**GOOD, "restarts": 1}), migrations=migrations))["migrations"]
    assert {name: count for name, count in found["outcomes"].items() if count} == {"completed": 2, "no_space": 1}
    assert (found["copied_blocks"], found["restarts"]) == (19, 1)
    assert (found["stages"]["mean"], found["duration_s"]["mean"], found["downtime_s"]["mean"]) == (2.0, 0.875, 0.25)
