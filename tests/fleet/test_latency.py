"""What a router expects of a request's latency, worked by hand."""

from __future__ import annotations

import pytest
from views import one_fleet

from fleetpilot.fleet import latency

CONSTANTS = {"prefill_s_per_token": 0.001, "decode_step_s": 0.02, "decode_s_per_seq": 0.002, "block_size": 16}
LOAD = {"in_flight": 10, "batched": 8, "predicted_output_tokens": 3000, "streamed_tokens": 1000}


def test_a_step_grows_with_the_batch_and_a_token_takes_its_share() -> None:
    instance = one_fleet(1, **CONSTANTS).instances[0, 0]
    assert latency.step_s(instance, 0.0) == latency.step_s(instance, 1.0) == 0.02
    assert latency.step_s(instance, 11.0) == pytest.approx(0.04)
    assert latency.decode_s_per_token(instance, 16.0) == pytest.approx(0.05 / 16)


def test_the_first_token_waits_for_prefills_and_the_step_that_goes_on() -> None:
    view = one_fleet(1, {"prompt_tokens": 500}, unstarted_uncached_tokens=300, matched_tokens=100, **LOAD, **CONSTANTS)
    # 0.3 + 0.4 + 0.02 + 0.002 x 9; of a prompt that is cached as a whole, nothing is computed.
    assert latency.ttft_s(view.instances[0, 0], view.request[0]) == pytest.approx(0.738)
    view.instances["matched_tokens"] = 600
    assert latency.ttft_s(view.instances[0, 0], view.request[0]) == pytest.approx(0.338)
    assert latency.tpot_s(view.instances[0, 0]) == pytest.approx(0.04)


def test_a_request_waits_for_memory_that_is_not_free() -> None:
    memory = {"kv_capacity_blocks": 100, "free_blocks": 20, "queued_demand_blocks": 14}
    view = one_fleet(1, {"prompt_tokens": 96}, **memory, **LOAD, **CONSTANTS)
    assert latency.memory_wait_s(view.instances[0, 0], view.request[0]) == 0
    # 2 of 80 blocks are lacking. The 10 requests have 200 tokens each to come at 0.034 s, so all 80 come free in twice
    # 6.8 s, and 2 in a fortieth of that.
    view.request["prompt_tokens"] = 128
    assert latency.memory_wait_s(view.instances[0, 0], view.request[0]) == pytest.approx(0.34)
    view.instances["batched"] = 0
    assert latency.memory_wait_s(view.instances[0, 0], view.request[0]) == 0


def test_what_is_held_now_and_in_the_end() -> None:
    held = {"started_prompt_tokens": 400, "unstarted_prompt_tokens": 50}
    view = one_fleet(1, {"prompt_tokens": 70, "predicted_output_tokens": 30}, **held, **LOAD)
    assert latency.held_tokens(view.instances[0, 0]) == 1450
    assert latency.remaining_tokens(view.instances[0, 0]) == 2000
    assert latency.final_tokens(view.instances[0, 0], view.request[0]) == 3550
    view.instances["streamed_tokens"] = 4000
    assert latency.remaining_tokens(view.instances[0, 0]) == 0
