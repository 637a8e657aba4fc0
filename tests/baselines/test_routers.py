"""The routers of serving stacks and papers against numbers worked by hand from their sources' rules."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from views import choice, drawn, one_fleet

from fleetpilot.baselines import load_policy
from fleetpilot.baselines.past_future import peak_tokens
from fleetpilot.fleet.policy import Policy
from fleetpilot.fleet.view import NONE, FleetView

# Two instances' worth of constants: 1 ms of prefill a token, a step of 20 ms and 2 ms for each further request.
CONSTANTS = {"prefill_s_per_token": 0.001, "decode_step_s": 0.02, "decode_s_per_seq": 0.002, "block_size": 16}


def at(time_s: float, view: FleetView) -> FleetView:
    view.fleet["time_s"] = time_s
    return view


def answers(policy: Policy, *seen: FleetView) -> list[int]:
    """Of one policy to views one after another."""
    policy.reset(1, 0)
    return [int(policy.decide(view).choice[0]) for view in seen]


# --- Dynamo: the example of its routing concepts, a request of 10 blocks --------------------------------------------

DYNAMO: dict[str, Any] = {"block_size": 16, "matched_tokens": [32, 80, 128], "streamed_tokens": [160, 80, 144]}


def test_dynamo_kv_adds_prefill_and_decode_blocks() -> None:
    # Prefill 8, 5 and 2 blocks, decode 10, 5 and 9: costs 18, 10 and 11; with a weight of 2 26, 15 and 13.
    view = one_fleet(3, {"prompt_tokens": 160}, **DYNAMO)
    assert choice("dynamo-kv", view) == 1
    assert choice("dynamo-kv?weight=2", view) == 2


def test_dynamo_kv_counts_active_prompts_as_prefill_and_as_decode_blocks() -> None:
    # (100 + 20 - 0) / 16 + ceil(100 / 16) = 14.5 against (0 + 20) / 16 + 13 = 14.25, and the request's 2 for both.
    view = one_fleet(
        2,
        {"prompt_tokens": 20},
        block_size=16,
        unstarted_uncached_tokens=[100, 0],
        unstarted_prompt_blocks=[7, 0],
        started_prompt_tokens=[0, 208],
    )
    assert choice("dynamo-kv", view) == 1


def test_dynamo_kv_draws_ties() -> None:
    counts = Counter(load_policy("dynamo-kv").decide(drawn(one_fleet(3, block_size=16), 1500)).choice.tolist())
    assert all(abs(counts[slot] - 500) < 90 for slot in range(3))  # 5 standard deviations


def test_dynamo_kv_draws_from_the_softmax_of_scaled_costs() -> None:
    # exp(-18 / 8), exp(-10 / 8), exp(-11 / 8) over their sum.
    view = drawn(one_fleet(3, {"prompt_tokens": 160}, **DYNAMO), 4000)
    # The costs hold the request's own 10 blocks too, which the softmax does not see.
    weights = np.exp(-np.array([18, 10, 11]) / 8)
    counts = Counter(load_policy("dynamo-kv?temperature=1").decide(view).choice.tolist())
    for slot, expected in enumerate(weights / weights.sum()):
        assert abs(counts[slot] / 4000 - expected) < 5 * math.sqrt(expected * (1 - expected) / 4000)


# --- llm-d ----------------------------------------------------------------------------------------------------------


def test_llm_d_sums_prefix_queue_and_kv() -> None:
    # Prefix 0.5, 0, 1; queue (8 - 4) / 8 = 0.5, 1, 0; kv 0.5, 0.8, 0.1: 2 : 1 : 1 gives 2.0, 1.8, 2.1.
    view = one_fleet(
        3,
        {"prompt_tokens": 320},
        block_size=16,
        matched_tokens=[160, 0, 320],
        waiting=[4, 0, 8],
        kv_usage=[0.5, 0.2, 0.9],
    )
    assert choice("llm-d", view) == 2
    assert choice("llm-d?prefix=1", view) == 1  # 1.5, 1.8, 1.1


def test_llm_d_has_the_scorers_of_load_requests_and_tokens() -> None:
    only = "llm-d?prefix=0&queue=0&kv=0"
    # 0.5 x (1 - 64 / 128) = 0.25, 0.5 x (1 - 20 / 128) = 0.42, 0 from 128 on.
    assert choice(f"{only}&load=1", one_fleet(3, waiting=[64, 20, 500])) == 1
    assert choice(f"{only}&active=1", one_fleet(3, in_flight=[9, 7, 8])) == 1
    view = one_fleet(3, started_prompt_tokens=[9e6, 4e5, 2e6], streamed_tokens=[0, 3e5, 0])
    assert choice(f"{only}&tokens=1", view) == 1
    # The third half of the queue scorer against the whole of the active one: 1 x 0 + 2 x 1 > 1 x 1 + 2 x 0.
    view = one_fleet(2, waiting=[0, 5], in_flight=[6, 5])
    assert choice(f"{only.replace('queue=0', 'queue=1')}&active=2", view) == 1


def test_llm_d_draws_ties() -> None:
    counts = Counter(load_policy("llm-d").decide(drawn(one_fleet(2, block_size=16), 1000)).choice.tolist())
    assert abs(counts[0] - 500) < 80


SLO = {"prompt_tokens": 100.0, "ttft_target_s": 2.0, "tpot_target_s": 0.1}


def test_llm_d_slo_packs_what_still_has_headroom() -> None:
    # TPOT 0.02 + 0.002 x in flight = 0.04, 0.06, 0.12 of 0.1. TTFT 0.5 + 0.1 + 0.038 and 1 + 0.1 + 0.058 of 2.
    view = one_fleet(3, SLO, in_flight=[10, 20, 50], unstarted_uncached_tokens=[500, 1000, 0], **CONSTANTS)
    assert choice("llm-d-slo?explore=0", view) == 1


def test_llm_d_slo_weighs_ttft_by_0_8() -> None:
    # The first has the least headroom of TPOT, the second of TTFT: 0.8 x 1 + 0.2 x 0 against 0.8 x 0 + 0.2 x 1.
    view = one_fleet(2, SLO, in_flight=[30, 10], unstarted_uncached_tokens=[0, 1500], **CONSTANTS)
    assert choice("llm-d-slo?explore=0", view) == 1
    assert choice("llm-d-slo?explore=0&ttft=0.2&tpot=0.8", view) == 0


def test_llm_d_slo_takes_an_idle_instance_where_none_has_headroom() -> None:
    prompt = {**SLO, "prompt_tokens": 5000.0}
    slow = {**CONSTANTS, "prefill_s_per_token": [0.001, 0.002, 0.001]}
    assert choice("llm-d-slo?explore=0", one_fleet(3, prompt, in_flight=[3, 0, 2], **slow)) == 1
    # None is idle: the smallest lack.
    assert choice("llm-d-slo?explore=0", one_fleet(3, prompt, in_flight=[3, 1, 2], **slow)) == 2


def test_llm_d_slo_without_targets_takes_the_lowest_prediction() -> None:
    view = one_fleet(3, {"prompt_tokens": 100}, in_flight=[3, 4, 5], unstarted_uncached_tokens=[900, 0, 0], **CONSTANTS)
    assert choice("llm-d-slo?explore=0", view) == 1


def test_llm_d_slo_explores_the_tier_without_headroom() -> None:
    view = drawn(one_fleet(2, SLO, in_flight=[10, 50], **CONSTANTS), 4000)
    share = load_policy("llm-d-slo?explore=0.1").decide(view).choice.mean()
    assert share == pytest.approx(0.1, abs=0.025)  # 5 standard deviations


# --- SMetric --------------------------------------------------------------------------------------------------------


def test_smetric_sends_first_turns_by_backlog_and_prefill() -> None:
    # 0.3 + 0.2 - 0, 0.1 + 0.2 - 0, 0.2 + 0.2 - 0.15: the cached prefix counts as work saved.
    view = one_fleet(
        3, {"prompt_tokens": 200}, unstarted_uncached_tokens=[300, 100, 200], matched_tokens=[0, 0, 150], **CONSTANTS
    )
    assert choice("smetric", view) == 2


def test_smetric_sends_later_turns_to_the_best_hit_while_it_is_in_time() -> None:
    def at_backlog(tokens: float, policy: str = "smetric") -> int:
        turn = {"prompt_tokens": 1000.0, "turn": 2.0, "ttft_target_s": 1.0}
        hit = {"matched_tokens": [0, 900], "unstarted_uncached_tokens": [0, tokens]}
        return choice(policy, one_fleet(2, turn, **hit, **CONSTANTS))

    # Backlog + 0.1 + a step of 0.02 <= 1.
    assert at_backlog(880.0 - 1e-6) == 1
    assert at_backlog(881.0) == 1  # late there, but it still has the least backlog and prefill
    assert at_backlog(901.0) == 0
    assert at_backlog(890.0, "smetric?slack=0.5") == 1
    assert at_backlog(1500.0, "smetric?slack=2") == 1


# --- Preble ---------------------------------------------------------------------------------------------------------

PREBLE: dict[str, Any] = {**CONSTANTS, "kv_capacity_blocks": 1000}


def prompt(tokens: float, output: float = 0.0) -> dict[str, float]:
    return {"prompt_tokens": tokens, "predicted_output_tokens": output}


def test_preble_exploits_a_prefix_longer_than_the_rest() -> None:
    loaded = [
        at(0, one_fleet(2, prompt(100), candidate=[1, 0], **PREBLE)),
        at(0, one_fleet(2, prompt(50), candidate=[0, 1], **PREBLE)),
    ]
    exploit = at(1, one_fleet(2, prompt(1000), matched_tokens=[501, 0], **PREBLE))
    explore = at(1, one_fleet(2, prompt(1000), matched_tokens=[500, 0], **PREBLE))
    # The first holds 0.1 s of work, the second 0.05 s. 501 of 1000 are more than the rest; 500 are not: 0.1 + 0.5
    # against 0.05 + 1.
    policy = load_policy("preble?imbalance=100")
    assert answers(policy, *loaded, exploit)[2] == 0
    assert answers(policy, *loaded, explore)[2] == 0
    busier = at(0, one_fleet(2, prompt(600), candidate=[1, 0], **PREBLE))  # 0.7 + 0.5 against 0.05 + 1
    assert answers(policy, *loaded, busier, explore)[3] == 1
    assert answers(policy, *loaded, busier, exploit)[3] == 0


def test_preble_forgets_load_after_its_window() -> None:
    sent = at(0, one_fleet(2, prompt(500, 100), candidate=[1, 0], **PREBLE))
    tied = [at(time_s, one_fleet(2, prompt(10), **PREBLE)) for time_s in (179.0, 180.0)]
    assert answers(load_policy("preble"), sent, tied[0]) == [0, 1]
    assert answers(load_policy("preble"), sent, tied[1]) == [0, 0]


def test_preble_counts_decode_work_at_the_batch_that_the_request_joins() -> None:
    # 100 tokens alone are 2 s; in a batch of 10 that steps in 0.038 s they are 0.38 s, less than a prompt of 0.5 s.
    decode = at(0, one_fleet(2, prompt(0, 100), in_flight=[9, 0], candidate=[1, 0], **PREBLE))
    prefill = at(0, one_fleet(2, prompt(500), candidate=[0, 1], **PREBLE))
    tied = at(1, one_fleet(2, prompt(10), **PREBLE))
    assert answers(load_policy("preble"), decode, prefill, tied) == [0, 1, 0]


def test_preble_pays_for_what_it_evicts() -> None:
    # 100 blocks of 16: 1500 tokens are indexed and 200 come, 100 too many; at a hit ratio of 0.5 worth 0.05 s, more
    # than the other's load of 0.04 s.
    full = {**PREBLE, "kv_capacity_blocks": 100, "prefix_queries_tokens": 1000, "prefix_hits_tokens": 500}
    sent = at(0, one_fleet(2, prompt(40), candidate=[0, 1], **full))
    assert answers(load_policy("preble"), sent, at(1, one_fleet(2, prompt(200), indexed_tokens=[1500, 0], **full))) == [
        1,
        1,
    ]
    assert answers(load_policy("preble"), sent, at(1, one_fleet(2, prompt(200), indexed_tokens=[1400, 0], **full))) == [
        1,
        0,
    ]


def test_preble_rebalances_once_in_ten_seconds() -> None:
    sent = [
        at(0, one_fleet(2, prompt(tokens), candidate=only, **PREBLE)) for tokens, only in ((900, [1, 0]), (500, [0, 1]))
    ]
    exploit = [at(t, one_fleet(2, prompt(20), matched_tokens=[19, 0], **PREBLE)) for t in (1, 2, 10.9, 11)]
    # 0.9 s is more than 1.5 x 0.5 s: to the lighter one, then not before 10 s are over.
    assert answers(load_policy("preble"), *sent, *exploit) == [0, 1, 1, 0, 0, 1]
    assert answers(load_policy("preble?imbalance=2"), *sent, *exploit) == [0, 1, 0, 0, 0, 0]


# --- BalanceRoute ---------------------------------------------------------------------------------------------------


def test_balance_route_takes_the_highest_f_score() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        loads = rng.integers(0, 500, 4)
        tokens = int(rng.integers(1, 400))
        view = one_fleet(
            4, {"prompt_tokens": tokens}, started_prompt_tokens=loads - loads // 3, streamed_tokens=loads // 3
        )
        chosen = choice("balance-route", view)

        def gaps(slot: int, loads: Any = loads, tokens: int = tokens) -> int:
            after = loads.copy()
            after[slot] += tokens
            return int((after.max() - after).sum())

        assert gaps(chosen) == min(map(gaps, range(4)))


# --- Past-Future ----------------------------------------------------------------------------------------------------


def test_past_future_estimates_the_peak_as_its_source_does() -> None:
    def peak(held: list[float], remaining: list[float]) -> float:
        """Requests in the order of what they lack; k of them are there when the k-th ends."""
        order = np.argsort(remaining)[::-1]
        return max(sum(held[i] for i in order[:k]) + k * remaining[order[k - 1]] for k in range(1, len(held) + 1))

    # Two that hold 100 and lack 150 and 50: 100 + 150 = 250, then 200 + 2 x 50 = 300.
    assert peak([100, 100], [150, 50]) == peak_tokens(200.0, 200.0, 2.0) == 300
    for n, held, longest in ((1, 50, 70), (5, 300, 400), (8, 1000, 10), (40, 4000, 900), (7, 0, 300)):
        remaining = [longest * (1 - (k + 0.5) / n) for k in range(n)]
        assert peak_tokens(float(held), sum(remaining), float(n)) == pytest.approx(peak([held / n] * n, remaining))
    assert peak_tokens(500.0, 0.0, 3.0) == 500
    assert peak_tokens(0.0, 0.0, 0.0) == 0


def test_past_future_joins_the_shortest_queue_of_those_with_room() -> None:
    request = {"prompt_tokens": 100.0, "predicted_output_tokens": 50.0}
    held = {"started_prompt_tokens": [1500, 600, 100], "predicted_output_tokens": [100, 100, 100]}
    view = one_fleet(3, request, in_flight=[1, 4, 5], kv_capacity_blocks=100, block_size=16, **held)
    assert choice("past-future", view) == 1
    assert choice("past-future?reserve=0.6", view) == 2


def test_past_future_holds_where_no_peak_fits() -> None:
    request = {"prompt_tokens": 100.0, "predicted_output_tokens": 50.0}
    full: dict[str, Any] = {"in_flight": [2, 1], "kv_capacity_blocks": 100, "block_size": 16}
    held = {"started_prompt_tokens": [1500, 1550]}
    assert choice("past-future", one_fleet(2, request, {"may_hold": 1}, **full, **held)) == NONE
    assert choice("past-future", one_fleet(2, request, **full, **held)) == 0
    # What is too long for an empty instance is not held for ever.
    long = {"prompt_tokens": 1590.0, "predicted_output_tokens": 500.0}
    assert choice("past-future", one_fleet(2, long, {"may_hold": 1}, **{**full, "in_flight": [1, 0]})) == 1


# --- PolyServe ------------------------------------------------------------------------------------------------------

POLY: dict[str, Any] = {**CONSTANTS, "kv_capacity_blocks": 1000, "free_blocks": 1000}


def of_class(tpot_s: float, prompt_tokens: float = 100.0) -> dict[str, float]:
    return {"prompt_tokens": prompt_tokens, "ttft_target_s": 2.0, "tpot_target_s": tpot_s}


def test_polyserve_fills_the_fullest_that_meets_the_target() -> None:
    first = one_fleet(3, of_class(0.1), in_flight=[0, 0, 0], **POLY)
    more = one_fleet(3, of_class(0.1), in_flight=[1, 0, 0], **POLY)
    # 0.02 + 0.002 x 40 = 0.1 still meets it, one more does not: an idle instance is taken in.
    brim = one_fleet(3, of_class(0.1), in_flight=[40, 0, 0], **POLY)
    over = one_fleet(3, of_class(0.1), in_flight=[41, 0, 0], **POLY)
    assert answers(load_policy("polyserve"), first, more, brim, over) == [0, 0, 0, 1]
    assert answers(load_policy("polyserve?margin=0.9"), first, more, brim) == [0, 0, 1]


def test_polyserve_keeps_classes_apart_while_it_can() -> None:
    tight = one_fleet(2, of_class(0.04), in_flight=[0, 0], **POLY)
    loose = one_fleet(2, of_class(0.1), in_flight=[1, 0], **POLY)
    tight_again = one_fleet(2, of_class(0.04), in_flight=[1, 5], **POLY)
    assert answers(load_policy("polyserve"), tight, loose, tight_again) == [0, 1, 0]


def test_polyserve_lets_loose_requests_use_tight_instances_within_the_tight_target() -> None:
    tight = one_fleet(2, of_class(0.04), in_flight=[0, 0], **POLY)
    loose = one_fleet(2, of_class(0.1), in_flight=[1, 0], **POLY)
    # The loose one is full at 41. The tight one steps in 0.02 + 0.002 x 10 = 0.04 with one more, then no longer.
    shared = one_fleet(2, of_class(0.1), in_flight=[10, 41], **POLY)
    not_shared = one_fleet(2, of_class(0.1), in_flight=[11, 41], **POLY)
    assert answers(load_policy("polyserve"), tight, loose, shared) == [0, 1, 0]
    assert answers(load_policy("polyserve"), tight, loose, not_shared) == [0, 1, 1]


def test_polyserve_asks_for_memory_and_for_the_first_token_in_time() -> None:
    first = one_fleet(2, of_class(0.1), in_flight=[0, 0], **POLY)
    full = one_fleet(2, of_class(0.1), in_flight=[1, 0], **{**POLY, "free_blocks": [6, 1000]})
    late = one_fleet(2, of_class(0.1), in_flight=[1, 0], unstarted_uncached_tokens=[1900, 0], **POLY)
    assert answers(load_policy("polyserve"), first, full) == [0, 1]
    assert answers(load_policy("polyserve"), first, late) == [0, 1]


def test_polyserve_frees_an_idle_instance_of_its_class() -> None:
    tight = one_fleet(1, of_class(0.04), in_flight=[0], **POLY)
    idle = one_fleet(1, of_class(0.1), in_flight=[0], **POLY)
    policy = load_policy("polyserve")
    assert answers(policy, tight, idle) == [0, 0]
    # 0.02 + 0.002 x 20 = 0.06: fits its class of 0.1, not the former one of 0.04.
    two = one_fleet(2, of_class(0.1), in_flight=[20, 0], **POLY)
    tight_two, loose_two = (one_fleet(2, of_class(t), in_flight=0, candidate=[1, 0], **POLY) for t in (0.04, 0.1))
    assert answers(policy, tight_two, loose_two, two) == [0, 0, 0]


# --- the calibrated router ------------------------------------------------------------------------------------------

# A step of 16 takes 0.02 + 0.002 x 15 = 0.05 s: 3.125 ms a token.
CALIBRATED: dict[str, Any] = {**CONSTANTS, "kv_capacity_blocks": 1000, "free_blocks": 1000}


def calibrated(**values: float) -> str:
    """The router with simple weights."""
    weights = {"backlog": 1, "queue": 0.05, "pressure": 4, "full": 0.8, **values}
    return "calibrated?" + "&".join(f"{name}={value:g}" for name, value in weights.items())


def test_calibrated_weighs_backlog_in_seconds_against_queues() -> None:
    # 0.4 s of prompts; 160 tokens to come at 3.125 ms, 0.5 s; 0.1 s and 8 x 0.05 s for the queue.
    view = one_fleet(
        3,
        {"prompt_tokens": 10, "predicted_output_tokens": 10},
        unstarted_prompt_tokens=[400, 0, 100],
        predicted_output_tokens=[0, 200, 0],
        streamed_tokens=[0, 40, 0],
        queued=[0, 0, 8],
        **CALIBRATED,
    )
    assert choice(calibrated(slo=0), view) == 0
    assert choice(calibrated(slo=0, queue=0), view) == 2
    assert choice(calibrated(slo=0, concurrency=64), view) == 1  # 0.146 s in 64 tokens: 160 of them are 0.365 s


def test_calibrated_adds_the_requests_own_work_where_instances_differ() -> None:
    # Nothing waits: 0.1 + 100 x 3.125 ms = 0.41 s against twice the prefill and half the step, 0.2 + 0.156 = 0.36 s.
    fast = {**CALIBRATED, "prefill_s_per_token": [0.001, 0.002], "decode_step_s": [0.02, 0.01]}
    fast["decode_s_per_seq"] = [0.002, 0.001]
    view = one_fleet(2, {"prompt_tokens": 100, "predicted_output_tokens": 100}, **fast)
    assert choice(calibrated(), view) == 1
    assert choice(calibrated(), one_fleet(2, {"prompt_tokens": 200, "predicted_output_tokens": 100}, **fast)) == 0


def test_calibrated_prices_pressure_after_admission() -> None:
    # 160 + 160 tokens are 20 blocks. Use after: 0.87 and 0.52; 0.66 s x 4 x 0.07 = 0.18 s against a backlog of 0.1 s.
    work = {"prompt_tokens": 160, "predicted_output_tokens": 160}
    use = {**CALIBRATED, "free_blocks": [200, 550], "queued_demand_blocks": [50, 50]}
    view = one_fleet(2, work, unstarted_prompt_tokens=[0, 100], **use)
    assert choice(calibrated(slo=0), view) == 1
    assert choice(calibrated(slo=0, pressure=0), view) == 0
    assert choice(calibrated(slo=0, full=0.86), view) == 0


def test_calibrated_makes_time_dearer_for_tight_classes() -> None:
    # 0.3 s of backlog against a queue of 8 x 0.05 = 0.4 s. Tight: x (1 + 0.35 / 0.175) = 3 makes it 0.9 s.
    view = one_fleet(2, {"ttft_target_s": 0.175}, unstarted_prompt_tokens=[300, 0], queued=[0, 8], **CALIBRATED)
    assert choice(calibrated(), view) == 1
    assert choice(calibrated(slo=0), view) == 0
    view.request["ttft_target_s"] = math.inf
    assert choice(calibrated(), view) == 0


def test_calibrated_samples_two() -> None:
    view = drawn(one_fleet(4, unstarted_prompt_tokens=[400, 100, 300, 200], **CALIBRATED), 1200)
    counts = Counter(load_policy(calibrated(sampled=1)).decide(view).choice.tolist())
    assert counts[0] == 0
    assert [round(counts[slot] / 200) for slot in (1, 3, 2)] == [3, 2, 1]


def test_calibrated_is_guarded() -> None:
    work = {"prompt_tokens": 160, "predicted_output_tokens": 160}
    use = {**CALIBRATED, "free_blocks": [100, 150]}  # 0.92 and 0.87 after
    loads = {"unstarted_prompt_tokens": [0, 5000]}
    assert choice(calibrated(), one_fleet(2, work, {"may_hold": 1}, **loads, **use)) == 0
    assert choice(calibrated(guard=0.9), one_fleet(2, work, {"may_hold": 1}, **loads, **use)) == 1
    assert choice(calibrated(guard=0.8), one_fleet(2, work, {"may_hold": 1}, **loads, **use)) == NONE
    assert choice(calibrated(guard=0.8), one_fleet(2, work, **loads, **use)) == 0
