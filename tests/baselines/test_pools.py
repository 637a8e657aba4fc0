"""Policies of prefill and decode pools against numbers worked by hand from their sources' rules, and on such fleets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from views import choice, one_fleet

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, Pools, Rebalancing, simulate
from fleetpilot.cluster.state import FINISHED, REJECTED
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import LOOSE, TIGHT
from fleetpilot.fleet.view import (
    KIND_DECODE,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SOURCE,
    NONE,
    REJECT,
    ROLE_DECODE,
    ROLE_MIXED,
    ROLE_PREFILL,
    STATE_DRAINING,
    STATE_READY,
    FleetView,
)
from fleetpilot.workloads import workload

CONSTANTS: dict[str, Any] = {"prefill_s_per_token": 0.001, "decode_step_s": 0.02, "decode_s_per_seq": 0.002}
MEMORY: dict[str, Any] = {"block_size": 16, "kv_capacity_blocks": 1000, "free_blocks": 1000}
PREFILL, DECODE, MIXED = ROLE_PREFILL, ROLE_DECODE, ROLE_MIXED


def asked(kind: int, instances: int, request: dict[str, Any] | None = None, **fields: Any) -> FleetView:
    return one_fleet(instances, request, {"kind": kind}, **{**CONSTANTS, **MEMORY, **fields})


# --- Splitwise ------------------------------------------------------------------------------------------------------


def test_splitwise_joins_the_shortest_queue_of_prompts() -> None:
    pools = {"role": [PREFILL, PREFILL, MIXED], "unstarted_prompt_tokens": [8192, 9000, 0]}
    assert choice("splitwise", asked(KIND_PREFILL, 3, **pools)) == 0
    # More than 8,192 pending: the mixed pool, if it is shorter.
    pools["unstarted_prompt_tokens"] = [8193, 9000, 8000]
    assert choice("splitwise", asked(KIND_PREFILL, 3, **pools)) == 2
    pools["unstarted_prompt_tokens"] = [8193, 9000, 8193]
    assert choice("splitwise", asked(KIND_PREFILL, 3, **pools)) == 0
    assert (
        choice(
            "splitwise?prompt=100", asked(KIND_PREFILL, 3, role=pools["role"], unstarted_prompt_tokens=[101, 102, 9])
        )
        == 2
    )


def test_splitwise_joins_the_shortest_queue_of_decodes() -> None:
    pools = {"role": [DECODE, DECODE, MIXED], "in_flight": [2049, 2048, 0]}
    assert choice("splitwise", asked(KIND_DECODE, 3, **pools)) == 1
    assert choice("splitwise?token=2047", asked(KIND_DECODE, 3, **pools)) == 2


def test_splitwise_without_pools_is_token_jsq() -> None:
    # 1000 + 200 = 1200, 0 + 1190.
    fields = {
        "unstarted_prompt_tokens": [1000, 0],
        "predicted_output_tokens": [300, 1500],
        "streamed_tokens": [100, 310],
    }
    assert choice("splitwise", asked(KIND_DISPATCH, 2, **fields)) == 1


# --- Mooncake -------------------------------------------------------------------------------------------------------

SLO = {"prompt_tokens": 1000.0, "ttft_target_s": 2.0, "tpot_target_s": 0.1}


def test_mooncake_prefills_where_the_first_token_comes_first() -> None:
    # 0.9 + 1 - 0.5 + 0.02, 0.3 + 1 + 0.02, 0.5 + 1 + 0.02; with 700 cached the first is ahead in spite of its queue.
    fields = {"unstarted_uncached_tokens": [900, 300, 500], "matched_tokens": [500, 0, 0]}
    assert choice("mooncake", asked(KIND_PREFILL, 3, SLO, **fields)) == 1
    fields["matched_tokens"] = [700, 0, 0]
    assert choice("mooncake", asked(KIND_PREFILL, 3, SLO, **fields)) == 0


def test_mooncake_rejects_what_would_be_late() -> None:
    # 1 + 1 + 0.02 s for a target of 2 s.
    late = asked(KIND_PREFILL, 1, SLO, unstarted_uncached_tokens=1000)
    assert choice("mooncake", late) == REJECT
    assert choice("mooncake?reject=0", late) == 0
    assert choice("mooncake?margin=1.02", late) == 0
    in_time = {**SLO, "waited_s": 0.3}
    assert choice("mooncake", asked(KIND_PREFILL, 1, in_time, unstarted_uncached_tokens=600)) == 0
    assert choice("mooncake", asked(KIND_PREFILL, 1, {**SLO, "waited_s": 0.4}, unstarted_uncached_tokens=600)) == REJECT
    # One whose answer has begun is kept.
    assert (
        choice("mooncake", asked(KIND_PREFILL, 1, {**SLO, "streamed_tokens": 5}, unstarted_uncached_tokens=1000)) == 0
    )


def test_mooncake_decodes_where_tokens_come_fastest_and_rejects_what_would_be_slow() -> None:
    assert choice("mooncake", asked(KIND_DECODE, 3, SLO, in_flight=[12, 10, 11])) == 1
    # 0.02 + 0.002 x 40 = 0.1; one more is too slow.
    assert choice("mooncake", asked(KIND_DECODE, 2, SLO, in_flight=[40, 41])) == 0
    slow = asked(KIND_DECODE, 2, SLO, in_flight=[41, 41])
    slow.fleet["may_hold"] = 1
    assert choice("mooncake", slow) == REJECT
    # Once the prefill is done, it goes where it is fastest.
    slow.fleet["may_hold"] = 0
    assert choice("mooncake", slow) == 0
    # The prefill asks for the first target alone, a fleet without pools for both.
    assert choice("mooncake", asked(KIND_PREFILL, 1, SLO, in_flight=41)) == 0
    assert choice("mooncake", asked(KIND_DISPATCH, 1, SLO, in_flight=41)) == REJECT


# --- Llumnix v1 -----------------------------------------------------------------------------------------------------


def test_llumnix_v1_prefills_first_where_nothing_decodes() -> None:
    fields = {"batched": [1, 0, 0], "unstarted_uncached_tokens": [0, 900, 500]}
    assert choice("llumnix-v1", asked(KIND_PREFILL, 3, SLO, **fields)) == 2
    fields["batched"] = [1, 2, 3]
    assert choice("llumnix-v1", asked(KIND_PREFILL, 3, SLO, **fields)) == 0


def test_llumnix_v1_packs_decodes_below_its_share_of_the_slo() -> None:
    # Up to 0.85 x 50 = 42.5 ms: 20 + 2 x 11 = 42 fits, 20 + 2 x 12 = 44 does not.
    assert choice("llumnix-v1", asked(KIND_DECODE, 3, in_flight=[5, 11, 12])) == 1
    assert choice("llumnix-v1?fill=0.9", asked(KIND_DECODE, 3, in_flight=[5, 11, 12])) == 2
    # Nowhere below it: the lightest.
    assert choice("llumnix-v1", asked(KIND_DECODE, 3, in_flight=[20, 18, 19])) == 1
    # Memory for what is queued has to be there.
    assert (
        choice("llumnix-v1", asked(KIND_DECODE, 2, in_flight=[5, 11], free_blocks=[1000, 9], queued_demand_blocks=9))
        == 0
    )


def moving(kind: int, batched: list[float], **fields: Any) -> FleetView:
    roles = {"role": DECODE, "state": STATE_READY, "batched": batched, "in_flight": batched}
    return asked(kind, len(batched), **{**roles, **fields})


def test_llumnix_v1_moves_from_what_is_too_slow_to_the_fullest_with_room() -> None:
    # Steps of 20 + 2 x 14 = 48 ms, more than 0.95 x 50 = 47.5, and 46; the others 34 and 38 ms, below 0.85 x 50.
    batches = [15.0, 14.0, 8.0, 10.0]
    assert choice("llumnix-v1", moving(KIND_SOURCE, batches)) == 0
    assert choice("llumnix-v1", moving(KIND_DESTINATION, batches, candidate=[0, 1, 1, 1])) == 3
    assert choice("llumnix-v1?mitigate=1", moving(KIND_SOURCE, batches)) == NONE
    # Nobody could take one: 20 + 2 x 12 is above 42.5.
    assert choice("llumnix-v1", moving(KIND_SOURCE, [15.0, 12.0])) == NONE
    assert choice("llumnix-v1", moving(KIND_DESTINATION, [15.0, 12.0], candidate=[0, 1])) == NONE
    # A prefill instance does not count.
    assert choice("llumnix-v1", moving(KIND_SOURCE, [15.0, 1.0], role=[DECODE, PREFILL])) == NONE


def test_llumnix_v1_empties_what_is_nearly_empty_into_fuller_ones() -> None:
    # 20 + 2 x 3 = 26 ms and 24 ms, below 0.6 x 50 = 30: the one with fewer, as the third is fuller and has room.
    assert choice("llumnix-v1", moving(KIND_SOURCE, [4.0, 3.0, 9.0])) == 1
    assert choice("llumnix-v1?consolidate=0.4", moving(KIND_SOURCE, [4.0, 3.0, 9.0])) == NONE
    # Nobody is fuller.
    assert choice("llumnix-v1", moving(KIND_SOURCE, [3.0, 3.0])) == NONE
    assert choice("llumnix-v1", moving(KIND_SOURCE, [0.0, 9.0])) == NONE


def test_llumnix_v1_empties_what_drains() -> None:
    draining = [STATE_DRAINING, STATE_READY]
    assert choice("llumnix-v1", moving(KIND_SOURCE, [9.0, 9.0], state=draining)) == 0


# --- the calibrated router ------------------------------------------------------------------------------------------


CALIBRATED = "calibrated?backlog=1&queue=0.05&pressure=4&full=0.8"


def test_calibrated_prices_prompts_and_answers_apart() -> None:
    # Prefill: 0.4 s against 0.1 s of prompts; decode: 100 x 3.125 ms against 200 x 3.125 ms to come, prompts aside.
    fields = {"unstarted_prompt_tokens": [400, 100], "predicted_output_tokens": [100, 200]}
    request = {"prompt_tokens": 10, "predicted_output_tokens": 10}
    assert choice(CALIBRATED, asked(KIND_PREFILL, 2, request, **fields)) == 1
    assert choice(CALIBRATED, asked(KIND_DECODE, 2, request, **fields)) == 0
    # 0.4 + 0.3125 s against 0.1 + 0.625 s.
    assert choice(CALIBRATED, asked(KIND_DISPATCH, 2, request, **fields)) == 0


def test_calibrated_counts_answers_as_pressure_where_they_are_decoded() -> None:
    # 160 + 8000 tokens are 510 blocks. Use 0.5 and 0: with the answer 1.01 and 0.51 after, without 0.51 and 0.01.
    request = {"prompt_tokens": 160, "predicted_output_tokens": 8000}
    fields = {"free_blocks": [500, 1000], "queued": [0, 1]}
    assert choice(CALIBRATED, asked(KIND_PREFILL, 2, request, **fields)) == 0
    assert choice(CALIBRATED, asked(KIND_DECODE, 2, request, **fields)) == 1


# --- on fleets ------------------------------------------------------------------------------------------------------

A40 = load_profile("a40-qwen2.5-3b")


@pytest.mark.parametrize("decode_choice", ["at_admission", "after_prefill"])
@pytest.mark.parametrize("name", ["splitwise", "llumnix-v1", "calibrated", "mooncake?reject=0", "lmetric"])
def test_every_request_is_served_by_both_pools(name: str, decode_choice: str) -> None:
    table = workload("twin/azure-conv?n=400&rate=12")
    pools = Pools.of(prefill=2, decode=4, mixed=1, decode_choice=decode_choice)
    fleet = FleetConfig.of(A40, 7, pools=pools, rebalancing=Rebalancing(), slo_classes=(TIGHT, LOOSE))
    log = simulate(table, fleet, load_policy(name), check=True, sample_interval_s=None)
    assert (log.requests["status"] == FINISHED).all()
    assert (log.invalid, log.forced) == (0, 0)
    handed_over = log.requests["prefill_instance"] >= 0
    assert handed_over.mean() > 0.5
    assert (log.requests["instance"][handed_over] >= 2).all()


@pytest.mark.parametrize("decode_choice", ["at_admission", "after_prefill"])
def test_an_overloaded_fleet_rejects_at_once_what_it_could_not_serve_in_time(decode_choice: str) -> None:
    table = workload("twin/azure-conv?n=600&rate=60")
    pools = Pools.of(prefill=2, decode=4, decode_choice=decode_choice)
    fleet = FleetConfig.of(A40, 6, pools=pools, slo_classes=(LOOSE,))
    log = simulate(table, fleet, load_policy("mooncake"), check=True, sample_interval_s=None)
    rejected = log.requests["status"] == REJECTED
    assert 0.05 < rejected.mean() < 0.95
    assert (log.requests["status"][~rejected] == FINISHED).all()
    assert np.isnan(log.requests["finish_s"][rejected]).all()
    assert (log.requests["instance"][rejected] == -1).all()
    compiled = simulate(table, fleet, load_policy("mooncake"), sample_interval_s=None)
    assert np.array_equal(compiled.requests["status"], log.requests["status"])
    served = simulate(table, fleet, load_policy("mooncake?reject=0"), sample_interval_s=None)

    def in_time(requests: Any) -> int:
        ttft_s = requests["first_token_s"] - requests["arrival_s"]
        return int(np.count_nonzero(ttft_s <= LOOSE.ttft_s))

    assert in_time(log.requests) > in_time(served.requests)
