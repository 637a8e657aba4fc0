"""Each baseline against numbers worked by hand from its source's rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from views import choice, drawn, one_fleet

from fleetpilot.baselines import load_policy
from fleetpilot.fleet.policy import random_unit
from fleetpilot.fleet.view import empty_view


def test_random_draws_the_candidates_evenly() -> None:
    counts = Counter(load_policy("random").decide(drawn(one_fleet(4, candidate=[1, 0, 1, 1]), 3000)).choice.tolist())
    assert set(counts) == {0, 2, 3}
    # 1,000 each is expected, with a standard deviation of 26.
    assert all(abs(count - 1000) < 130 for count in counts.values())


def test_random_repeats_for_the_same_key() -> None:
    view = drawn(one_fleet(5), 50)
    assert np.array_equal(load_policy("random").decide(view).choice, load_policy("random").decide(view).choice)


def test_round_robin_takes_the_candidates_in_turn() -> None:
    def turns(**fields: Any) -> list[int]:
        return [choice("round-robin", one_fleet(4, fleet={"decisions": n}, **fields)) for n in range(6)]

    assert turns() == [0, 1, 2, 3, 0, 1]
    assert turns(candidate=[0, 1, 0, 1]) == [1, 3, 1, 3, 1, 3]


def test_join_shortest_queue() -> None:
    assert choice("join-shortest-queue", one_fleet(4, in_flight=[7, 3, 9, 3])) == 1
    # What was polled does not count: the ledger is ahead of it.
    assert choice("join-shortest-queue", one_fleet(2, in_flight=[2, 1], running=[0, 6], waiting=[0, 9])) == 1


def test_power_of_two_takes_the_less_loaded_of_its_two_draws() -> None:
    loads = [5.0, 1.0, 4.0, 3.0]
    view = drawn(one_fleet(4, in_flight=loads), 2000)
    counts: Counter[int] = Counter()
    for key, slot in zip(view.fleet["random_key"], load_policy("power-of-two").decide(view).choice, strict=True):
        first = int(random_unit(key, 0) * 4)
        second = (first + 1 + int(random_unit(key, 1) * 3)) % 4
        assert first != second
        assert slot == min(first, second, key=loads.__getitem__)
        counts[int(slot)] += 1
    # Of the 6 pairs the least loaded wins 3, the next 2, the next 1; the most loaded never.
    assert counts[0] == 0
    assert [round(counts[slot] / 2000 * 6, 1) for slot in (1, 3, 2)] == pytest.approx([3, 2, 1], abs=0.2)


def test_power_of_two_gives_a_tie_to_the_first_draw() -> None:
    view = drawn(one_fleet(3), 200)
    first = [int(random_unit(key, 0) * 3) for key in view.fleet["random_key"]]
    assert load_policy("power-of-two").decide(view).choice.tolist() == first


def test_least_kv() -> None:
    assert choice("least-kv", one_fleet(3, kv_usage=[0.42, 0.40, 0.41])) == 1
    # Only the poll counts.
    assert choice("least-kv", one_fleet(2, kv_usage=[0.5, 0.6], in_flight=[90, 0])) == 0


def test_least_kv_breaks_ties_at_random() -> None:
    counts = Counter(
        load_policy("least-kv").decide(drawn(one_fleet(3, kv_usage=[0.2, 0.5, 0.2]), 1000)).choice.tolist()
    )
    assert set(counts) == {0, 2}
    assert abs(counts[0] - 500) < 80  # 5 standard deviations


def test_token_jsq_counts_prompts_to_prefill_and_predicted_tokens_to_come() -> None:
    # Pending: 1000 + (300 - 100) = 1200, 0 + (1500 - 310) = 1190, 400 + 850 = 1250.
    view = one_fleet(
        3,
        unstarted_prompt_tokens=[1000, 0, 400],
        predicted_output_tokens=[300, 1500, 850],
        streamed_tokens=[100, 310, 0],
    )
    assert choice("token-jsq", view) == 1


def test_token_jsq_does_not_count_answers_longer_than_predicted_as_less_than_none() -> None:
    # Pending: 60 + max(0, 100 - 900) = 60 and 50 + 0 = 50; without the floor the first would look lighter.
    view = one_fleet(2, unstarted_prompt_tokens=[60, 50], predicted_output_tokens=[100, 0], streamed_tokens=[900, 0])
    assert choice("token-jsq", view) == 1
    assert choice("token-jsq", one_fleet(3, unstarted_prompt_tokens=[9, 5, 5])) == 1


def test_length_heuristic_sends_long_requests_by_tokens_and_others_by_queue() -> None:
    loads = {"in_flight": [1, 4], "unstarted_prompt_tokens": [5000, 40]}
    assert choice("length-heuristic", one_fleet(2, {"predicted_output_tokens": 256.0}, **loads)) == 0
    assert choice("length-heuristic", one_fleet(2, {"predicted_output_tokens": 256.5}, **loads)) == 1
    raised = load_policy("length-heuristic?threshold=1000")
    assert choice(raised, one_fleet(2, {"predicted_output_tokens": 256.5}, **loads)) == 0


def test_vllm_dp_weighs_waiting_by_four() -> None:
    # 4 x 2 + 1 = 9, 4 x 1 + 4 = 8, 4 x 0 + 9 = 9.
    view = one_fleet(3, waiting=[2, 1, 0], running=[1, 4, 9], in_flight=[3, 5, 9])
    assert choice("vllm-dp", view) == 1
    assert choice("vllm-dp", one_fleet(3, waiting=[1, 1, 1], running=[4, 3, 3], in_flight=[5, 4, 4])) == 1


def test_vllm_dp_counts_what_it_sent_since_the_poll_as_waiting() -> None:
    # The source raises its copy of the waiting count with each request it sends: 4 x 0 + 3 = 3 at first, then 7 and 11,
    # against 4 x 1 + 4 = 8 of the other.
    choices = [
        choice("vllm-dp", one_fleet(2, waiting=[0, 1], running=[3, 4], in_flight=[3 + sent, 5])) for sent in range(3)
    ]
    assert choices == [0, 0, 1]
    # Fewer in flight than were polled: some have ended since, nothing was sent.
    assert choice("vllm-dp", one_fleet(2, waiting=[0, 0], running=[5, 4], in_flight=[1, 4])) == 1


def nginx_least_conn(connections: list[int], weights: list[int]) -> int:
    """NGINX's choice with all weights 1; `weights` are its current weights, updated in place."""
    tied = [peer for peer, count in enumerate(connections) if count == min(connections)]
    if len(tied) > 1:
        for peer in tied:
            weights[peer] += 1
    best = max(tied, key=lambda peer: weights[peer])
    if len(tied) > 1:
        weights[best] -= len(tied)
    return best


def test_least_conn_goes_through_an_idle_fleet_as_nginx_does() -> None:
    weights = [0, 0, 0, 0]
    expected = [nginx_least_conn([0, 0, 0, 0], weights) for _ in range(9)]
    assert expected == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [choice("least-conn", one_fleet(4, fleet={"decisions": n})) for n in range(9)] == expected


def test_least_conn_prefers_fewer_connections_to_its_turn() -> None:
    assert choice("least-conn", one_fleet(3, fleet={"decisions": 0}, in_flight=[2, 1, 1])) == 1
    assert choice("least-conn", one_fleet(3, fleet={"decisions": 2}, in_flight=[2, 1, 1])) == 2
    assert choice("least-conn", one_fleet(3, fleet={"decisions": 2}, in_flight=[2, 1, 1], candidate=[1, 1, 0])) == 1


def test_freeness_divides_the_available_blocks_by_running_and_queued_requests() -> None:
    # Watermark floor(7.92) = 7. Available: 400 - 7 - 93 = 300 over 10 = 30; 250 - 7 - 0 = 243 over 8 = 30.375;
    # 700 - 7 - 0 = 693 over 40 = 17.3.
    view = one_fleet(
        3,
        kv_capacity_blocks=792,
        free_blocks=[400, 250, 700],
        queued_demand_blocks=[93, 0, 0],
        queued=[2, 0, 0],
        batched=[8, 8, 40],
    )
    assert choice("freeness", view) == 1


def test_freeness_rounds_the_watermark_down() -> None:
    # (13 - 1) / 1 and (25 - 1) / 2 tie at 12; with a watermark of 1.99 the second would win with 11.5 against 11.0.
    assert choice("freeness", one_fleet(2, kv_capacity_blocks=199, free_blocks=[13, 25], batched=[1, 2])) == 0


def test_freeness_takes_an_idle_instance_first_and_works_below_zero() -> None:
    busy = {"kv_capacity_blocks": 500, "free_blocks": [500, 400, 10]}
    assert choice("freeness", one_fleet(3, **busy, batched=[1, 1, 0])) == 2
    # Overloaded: (10 - 5 - 105) / 4 = -25 and (10 - 5 - 105) / 5 = -20: more requests share the same lack.
    overloaded = {"kv_capacity_blocks": 500, "free_blocks": 10, "queued_demand_blocks": 105, "batched": 3}
    assert choice("freeness", one_fleet(2, **overloaded, queued=[1, 2])) == 1


def test_lmetric_multiplies_the_tokens_to_prefill_by_the_batch() -> None:
    # (600 + 1000 - 0) x 3 = 4800, (0 + 1000 - 200) x 7 = 5600, (0 + 1000 - 768) x 20 = 4640.
    view = one_fleet(
        3,
        {"prompt_tokens": 1000},
        unstarted_uncached_tokens=[600, 0, 0],
        matched_tokens=[0, 200, 768],
        in_flight=[3, 7, 20],
    )
    assert choice("lmetric", view) == 2


def test_lmetric_counts_the_queued_prefill_tokens() -> None:
    # (900 + 100) x 4 = 4000 and (0 + 100) x 5 = 500; without the queued term the first would win with 400.
    view = one_fleet(2, {"prompt_tokens": 100}, unstarted_uncached_tokens=[900, 0], in_flight=[4, 5])
    assert choice("lmetric", view) == 1


def test_lmetric_gives_an_idle_instance_a_score_of_zero() -> None:
    # 4096 x 0 = 0 against 1 x 1 = 1.
    assert choice("lmetric", one_fleet(2, {"prompt_tokens": 4096}, matched_tokens=[4095, 0], in_flight=[1, 0])) == 1
    # Among idle ones: fewer tokens to prefill.
    assert choice("lmetric", one_fleet(3, {"prompt_tokens": 100}, matched_tokens=[0, 32, 16])) == 1


def test_cache_aware_goes_to_the_longest_prefix_above_the_threshold() -> None:
    prompt = {"prompt_tokens": 1000}
    held = {"indexed_tokens": [9000, 8000, 10], "in_flight": [9, 9, 0]}
    assert choice("cache-aware", one_fleet(3, prompt, matched_tokens=[200, 304, 0], **held)) == 1
    # The source asks for more than the threshold: 300 of 1000 is not.
    assert choice("cache-aware", one_fleet(3, prompt, matched_tokens=[200, 300, 0], **held)) == 2


def test_cache_aware_goes_to_the_shortest_queue_when_out_of_balance() -> None:
    prompt = {"prompt_tokens": 1000}

    def cached_on_the_busy(in_flight: list[float]) -> int:
        return choice("cache-aware", one_fleet(2, prompt, matched_tokens=[992, 0], in_flight=in_flight))

    assert cached_on_the_busy([65, 0]) == 1
    assert cached_on_the_busy([64, 0]) == 0  # 64 is not more than 64
    assert cached_on_the_busy([195, 130]) == 0  # 65 more, but not more than 1.5 x 130 = 195
    assert cached_on_the_busy([196, 130]) == 1
    # An instance that may not be chosen does not put the others out of balance.
    view = one_fleet(3, prompt, matched_tokens=[992, 0, 0], in_flight=[65, 10, 0], candidate=[1, 1, 0])
    assert choice("cache-aware", view) == 0


def test_cache_aware_breaks_ties_by_requests_in_flight() -> None:
    prompt = {"prompt_tokens": 100}
    assert choice("cache-aware", one_fleet(3, prompt, matched_tokens=64, in_flight=[5, 3, 3])) == 1
    assert choice("cache-aware", one_fleet(3, prompt, indexed_tokens=[7, 4, 4], in_flight=[0, 9, 8])) == 2


@pytest.mark.parametrize(
    "name", ["join-shortest-queue", "token-jsq", "length-heuristic", "vllm-dp", "freeness", "lmetric", "cache-aware"]
)
def test_a_full_tie_goes_to_the_lowest_candidate(name: str) -> None:
    assert load_policy(name).decide(empty_view(2, 5)).choice.tolist() == [0, 0]
    assert choice(name, one_fleet(5, candidate=[0, 0, 1, 1, 1])) == 2
