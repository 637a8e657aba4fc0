"""Llumnix, by its paper and by its artifact, against numbers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from views import one_fleet

from fleetpilot.baselines import load_policy
from fleetpilot.fleet.freeness import (
    dispatch_freeness,
    dispatch_freeness_for,
    migration_freeness,
    virtual_freeness,
    virtual_usage_blocks,
)
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_FAILED,
    STATE_READY,
    STATE_STARTING,
    FleetView,
)

A10: dict[str, Any] = {"kv_capacity_blocks": 792, "block_size": 16}
"""LLaMA-7B on an A10: a watermark of 7 blocks, a headroom of 792 - 1600 / 16 = 692."""


def instance(**fields: Any) -> Any:
    return one_fleet(1, **A10, **fields).instances[0, 0]


def choice(policy: str, view: FleetView) -> int:
    (slot,) = load_policy(policy).decide(view).choice
    return int(slot)


def ask(policy: str, kind: int, instances: int, **fields: Any) -> int:
    return choice(policy, one_fleet(instances, fleet={"kind": kind, "may_hold": 1}, **(A10 | fields)))


# --- the formulas ------------------------------------------------------------------------------------------------


def test_dispatch_freeness_counts_all_that_is_queued() -> None:
    # (400 - 7 - 93) / (8 + 2)
    loaded = {"free_blocks": 400, "queued_demand_blocks": 93, "head_demand_blocks": 60, "batched": 8, "queued": 2}
    assert dispatch_freeness(instance(**loaded)) == 30.0
    # (400 - 7 - 93) / (8 + 1)
    assert migration_freeness(instance(**loaded), True) == 300 / 9
    # 792 - (792 - 400 + 60) over the batch of 8
    assert virtual_usage_blocks(instance(**loaded)) == 452.0
    assert virtual_freeness(instance(**loaded)) == 340 / 8


def test_freeness_of_an_idle_instance() -> None:
    idle = instance(free_blocks=792)
    assert dispatch_freeness(idle) == np.inf
    assert dispatch_freeness_for(idle, True) == np.inf
    assert migration_freeness(idle, True) == np.inf
    assert virtual_freeness(idle) == 792.0


def test_a_queue_is_one_more_request_for_migration() -> None:
    # No batch, one queued request of 800 blocks: (792 - 7 - 800) / 1.
    assert migration_freeness(instance(free_blocks=792, queued_demand_blocks=800, queued=1), False) == -15.0


def test_an_urgent_request_leaves_an_instance_a_capacity_of_1600_tokens() -> None:
    urgent = instance(free_blocks=742, batched=2, urgent=1)
    # 742 - 7 = 735 of 792, as if 43 of 100
    assert migration_freeness(urgent, True) == (735 - 692) / 2
    assert migration_freeness(urgent, False) == 735 / 2
    assert virtual_freeness(urgent) == (742 - 692) / 2


def test_headroom_counts_where_a_request_would_be_alone_of_its_kind() -> None:
    with_urgent, without = instance(free_blocks=742, batched=2, urgent=1), instance(free_blocks=742, batched=2)
    assert dispatch_freeness_for(with_urgent, True) == dispatch_freeness_for(without, False) == 735 / 2
    assert dispatch_freeness_for(with_urgent, False) == dispatch_freeness_for(without, True) == 43 / 2


# --- dispatch ----------------------------------------------------------------------------------------------------


def test_urgent_requests_gather_and_others_keep_away() -> None:
    # 693 - 7 = 686 blocks over 7 requests, 98 each, or (686 - 692) / 7 with the headroom; 593 / 7 on the second.
    fleet = {"free_blocks": [693, 600], "batched": [7, 7], "urgent": [1, 0]}
    for policy in ("infaas++", "llumnix"):
        assert choice(policy, one_fleet(2, {"priority": -1}, **A10, **fleet)) == 0
        assert choice(policy, one_fleet(2, {"priority": 0}, **A10, **fleet)) == 1
        # urgent, though the other is freer: (600 - 7) / 7 against (780 - 7 - 692) / 7
        swapped = fleet | {"free_blocks": [600, 780]}
        assert choice(policy, one_fleet(2, {"priority": -1}, **A10, **swapped)) == 0
        # an idle instance comes before both
        assert choice(policy, one_fleet(3, {"priority": -1}, **A10, batched=[1, 0, 1], urgent=[1, 0, 1])) == 1
    assert choice("llumnix-base", one_fleet(2, {"priority": 0}, **A10, **fleet)) == 0
    # The paper has one freeness for all requests: (693 - 692) / 7 against 600 / 7.
    for priority in (-1, 0):
        assert choice("llumnix-paper", one_fleet(2, {"priority": priority}, **A10, **fleet)) == 1


def test_the_paper_counts_the_head_of_line_alone() -> None:
    # Artifact: (400 - 7 - 300) / (5 + 5) = 9.3 against (200 - 7) / 10 = 19.3. Paper: (400 - 50) / 5 against 200 / 10.
    queue = {
        "free_blocks": [400, 200],
        "queued_demand_blocks": [300, 0],
        "head_demand_blocks": [50, 0],
        "queued": [5, 0],
        "batched": [5, 10],
    }
    assert choice("llumnix", one_fleet(2, **A10, **queue)) == 1
    assert choice("llumnix-paper", one_fleet(2, **A10, **queue)) == 0


# --- pairs -------------------------------------------------------------------------------------------------------

MIGRATING = ("llumnix", "llumnix-base", "llumnix-paper")


@pytest.mark.parametrize("policy", MIGRATING)
def test_the_most_loaded_goes_to_the_least_loaded(policy: str) -> None:
    # Freeness (free - 7) / 10: 2.3, 1.3, 29.3, 39.3; by the paper 3, 2, 30, 40.
    fleet = {"free_blocks": [30, 20, 300, 400], "batched": 10}
    assert ask(policy, KIND_SOURCE, 4, **fleet) == 1
    assert ask(policy, KIND_DESTINATION, 4, **fleet, candidate=[1, 0, 1, 1]) == 3
    # The pair has begun: the next one.
    begun = fleet | {"migrating": [0, 1, 0, 1]}
    expected = 0 if policy != "llumnix-paper" else NONE  # 3 is not below 3
    assert ask(policy, KIND_SOURCE, 4, **begun, candidate=[1, 0, 1, 0]) == expected
    assert ask(policy, KIND_DESTINATION, 4, **begun, candidate=[0, 0, 1, 0]) == 2


@pytest.mark.parametrize("policy", MIGRATING)
def test_no_source_without_a_destination(policy: str) -> None:
    fleet = {"free_blocks": [20, 20, 400], "batched": 10}
    assert ask(policy, KIND_SOURCE, 3, **fleet) == 0
    assert ask(policy, KIND_SOURCE, 3, **fleet, migrating=[0, 0, 1], candidate=[1, 1, 0]) == NONE
    for state in (STATE_ABSENT, STATE_STARTING, STATE_DRAINING, STATE_FAILED):
        states = {"state": [STATE_READY, STATE_READY, state], "candidate": [1, 1, 0]}
        assert ask(policy, KIND_SOURCE, 3, **fleet, **states) == NONE


def test_one_threshold_parts_sources_from_destinations() -> None:
    # (37 - 7) / 10 = 3 on the dot is neither.
    assert ask("llumnix", KIND_SOURCE, 2, free_blocks=[37, 400], batched=10) == NONE
    assert ask("llumnix", KIND_SOURCE, 2, free_blocks=[36, 400], batched=10) == 0
    assert ask("llumnix", KIND_DESTINATION, 1, free_blocks=37, batched=10) == NONE
    assert ask("llumnix", KIND_DESTINATION, 1, free_blocks=38, batched=10) == 0
    # (106 - 7) / 10 = 9.9
    assert ask("llumnix", KIND_SOURCE, 2, free_blocks=[106, 400], batched=10) == NONE
    assert ask("llumnix?threshold=10", KIND_SOURCE, 2, free_blocks=[106, 400], batched=10) == 0
    assert ask("llumnix?threshold=10", KIND_DESTINATION, 1, free_blocks=106, batched=10) == NONE


def test_two_thresholds_of_the_paper() -> None:
    # Between 3 and 10 blocks per request an instance is neither.
    for free, as_source, as_destination in ((29, 0, NONE), (30, NONE, NONE), (100, NONE, NONE), (101, NONE, 0)):
        assert ask("llumnix-paper", KIND_SOURCE, 2, free_blocks=[free, 400], batched=10, candidate=[1, 0]) == as_source
        assert ask("llumnix-paper", KIND_DESTINATION, 1, free_blocks=free, batched=10) == as_destination
    assert ask("llumnix-paper?above=5", KIND_DESTINATION, 1, free_blocks=60, batched=10) == 0
    assert ask("llumnix-paper?below=5", KIND_SOURCE, 2, free_blocks=[40, 400], batched=10) == 0


@pytest.mark.parametrize("policy", ["llumnix", "llumnix-base"])
def test_preempted_requests_make_a_source_and_no_destination(policy: str) -> None:
    fleet = {"free_blocks": [300, 400, 350], "batched": 10, "preempted": [1, 0, 0]}
    assert ask(policy, KIND_SOURCE, 3, **fleet) == 0
    assert ask(policy, KIND_DESTINATION, 3, **(fleet | {"free_blocks": [500, 400, 350]})) == 1
    # With others below the threshold the order is by load alone.
    assert ask(policy, KIND_SOURCE, 3, **(fleet | {"free_blocks": [300, 400, 20]})) == 2


def test_the_paper_knows_no_preempted_requests() -> None:
    assert ask("llumnix-paper", KIND_SOURCE, 2, free_blocks=[300, 400], batched=10, preempted=[1, 0]) == NONE


@pytest.mark.parametrize("policy", MIGRATING)
def test_a_draining_instance_is_the_first_source(policy: str) -> None:
    fleet = {"free_blocks": [20, 780, 400], "batched": [10, 1, 10]}
    states = {"state": [STATE_READY, STATE_DRAINING, STATE_READY]}
    assert ask(policy, KIND_SOURCE, 3, **fleet, **states) == 1


def test_normal_requests_leave_an_instance_with_an_urgent_one() -> None:
    # (492 - 7 - 692) / 10 < 3, though half of the blocks are free.
    fleet = {"free_blocks": [492, 400], "batched": 10, "in_flight": 10, "urgent": [1, 0]}
    assert ask("llumnix", KIND_SOURCE, 2, **fleet) == 0
    assert ask("llumnix", KIND_SOURCE, 2, **fleet | {"urgent": [10, 0]}) == NONE, "no normal request to move"
    assert ask("llumnix-paper", KIND_SOURCE, 2, **fleet) == 0
    assert ask("llumnix-base", KIND_SOURCE, 2, **fleet) == NONE
    assert ask("llumnix", KIND_DESTINATION, 2, **fleet) == 1
    assert ask("llumnix-base", KIND_DESTINATION, 2, **fleet) == 0


# --- scaling -----------------------------------------------------------------------------------------------------

READY2 = [STATE_READY, STATE_READY, STATE_ABSENT, STATE_ABSENT]
TO_START = {"state": READY2, "candidate": [1, 1, 1, 0]}


@pytest.mark.parametrize("policy", ["infaas++", "llumnix", "llumnix-base"])
def test_instances_are_started_until_the_pooled_freeness_is_in_the_corridor(policy: str) -> None:
    # (207 + 107 - 2 x 7) / (20 + 20) = 7.5; with one more, empty, (300 + 792) / 40 = 27.3.
    load = {"free_blocks": [207, 107, 0, 0], "batched": [20, 20, 0, 0]}
    assert ask(policy, KIND_SCALE, 4, **load, **TO_START) == 2
    one_more = {"state": [STATE_READY, STATE_READY, STATE_STARTING, STATE_ABSENT], "candidate": [1, 1, 0, 1]}
    assert ask(policy, KIND_SCALE, 4, **load, **one_more) == NONE
    # The queue counts, its requests and its blocks: (300 - 1100) / (40 + 10) = -16, then -8 / 50, then 784 / 50.
    queue = load | {"queued_demand_blocks": [1100, 0, 0, 0], "queued": [10, 0, 0, 0]}
    assert ask(policy, KIND_SCALE, 4, **queue, **one_more) == 3
    two_more = {"state": [STATE_READY, STATE_READY, STATE_STARTING, STATE_STARTING], "candidate": [1, 1, 0, 0]}
    assert ask(policy, KIND_SCALE, 4, **queue, **two_more) == NONE
    # (414 - 14) / 40 = 10 on the dot is in the corridor; nothing is left to start; other corridors.
    assert ask(policy, KIND_SCALE, 4, **(load | {"free_blocks": [307, 107, 0, 0]}), **TO_START) == NONE
    assert ask(policy, KIND_SCALE, 4, **load, state=READY2, candidate=[1, 1, 0, 0]) == NONE
    assert ask(f"{policy}?low=7", KIND_SCALE, 4, **load, **TO_START) == NONE


@pytest.mark.parametrize("policy", ["infaas++", "llumnix", "llumnix-base"])
def test_the_last_instance_is_drained_if_the_others_would_be_free_enough(policy: str) -> None:
    # Without the last: 760 + 700 - 792 = 668 free, less 7, over 11 requests: 60.09.
    load = {"free_blocks": [760, 700, 0, 0], "batched": [4, 7, 0, 0]}
    assert ask(policy, KIND_SCALE, 4, **load, **TO_START) == 1
    # 660 / 11 = 60 on the dot is in the corridor.
    assert ask(policy, KIND_SCALE, 4, **(load | {"free_blocks": [759, 700, 0, 0]}), **TO_START) == NONE
    assert ask(f"{policy}?high=59", KIND_SCALE, 4, **(load | {"free_blocks": [759, 700, 0, 0]}), **TO_START) == 1
    # Not the least busy one, and none while another drains or as few as may be are ready.
    assert ask(policy, KIND_SCALE, 4, **(load | {"batched": [0, 11, 0, 0]}), **TO_START) == 1
    draining = {"state": [STATE_READY, STATE_READY, STATE_READY, STATE_DRAINING]}
    idle = {"free_blocks": 792}
    assert ask(policy, KIND_SCALE, 4, **idle, **draining) == NONE
    assert ask(policy, KIND_SCALE, 4, **load, state=READY2, candidate=[0, 0, 1, 0]) == NONE
    assert ask(policy, KIND_SCALE, 4, **idle) == 3


def test_draining_looks_at_the_queue_in_llumnix_alone() -> None:
    # 668 - 7 = 661 over 11 requests; with the queue (661 - 20) / (11 + 1) = 53.4.
    load = {
        "free_blocks": [760, 700, 0, 0],
        "batched": [4, 7, 0, 0],
        "queued_demand_blocks": [20, 0, 0, 0],
        "queued": [2, 0, 0, 0],
    }
    assert ask("infaas++", KIND_SCALE, 4, **load, **TO_START) == 1
    assert ask("llumnix", KIND_SCALE, 4, **load, **TO_START) == NONE


@pytest.mark.parametrize("policy", ["infaas++", "llumnix", "llumnix-paper", "llumnix-surge"])
def test_a_wish_to_start_keeps_a_draining_instance_first(policy: str) -> None:
    states = {"state": [STATE_READY, STATE_READY, STATE_DRAINING, STATE_ABSENT]}
    load = {"free_blocks": [20, 20, 20, 0], "batched": [10, 10, 10, 0]}
    assert ask(policy, KIND_SCALE, 4, **load, **states) == 2
    assert ask(policy, KIND_SCALE, 4, **load, **states, candidate=[1, 1, 0, 1]) == 3


def test_a_surge_starts_instances_until_freeness_is_above_the_corridor() -> None:
    # (307 + 107 - 2 x 7) / 40 = 10 on the dot is in [10, 60]: nothing starts; below it, one does.
    surge = "llumnix-surge?low=10&high=60"
    load = {"free_blocks": [307, 107, 0, 0], "batched": [20, 20, 0, 0]}
    assert ask(surge, KIND_SCALE, 4, **load, **TO_START) == NONE
    assert ask(surge, KIND_SCALE, 4, **(load | {"free_blocks": [306, 107, 0, 0]}), **TO_START) == 2
    # While one starts, empty, (400 + 792) / 40 = 29.8 is not enough for 60, but for 29.
    one_more = {"state": [STATE_READY, STATE_READY, STATE_STARTING, STATE_ABSENT], "candidate": [1, 1, 0, 1]}
    assert ask(surge, KIND_SCALE, 4, **load, **one_more) == 3
    assert ask("llumnix", KIND_SCALE, 4, **load, **one_more) == NONE
    assert ask("llumnix-surge?low=10&high=29", KIND_SCALE, 4, **load, **one_more) == NONE
    # None is drained while one starts.
    idle = {"free_blocks": [780, 780, 0, 0], "batched": [1, 1, 0, 0]}
    assert ask(surge, KIND_SCALE, 4, **idle, **TO_START) == 1
    assert ask(surge, KIND_SCALE, 4, **idle, **one_more) == NONE


def test_the_paper_scales_by_the_mean_freeness_and_drains_the_fewest_running() -> None:
    # 190 / 10 = 19 and 5 / 10 = 0.5: mean 9.75, below 10.
    load = {"free_blocks": [190, 5, 0, 0], "batched": [10, 10, 0, 0]}
    assert ask("llumnix-paper", KIND_SCALE, 4, **load, **TO_START) == 2
    assert ask("llumnix-paper", KIND_SCALE, 4, **(load | {"free_blocks": [195, 5, 0, 0]}), **TO_START) == NONE
    # One that starts counts as empty: (9.75 x 2 + 792) / 3.
    one_more = {"state": [STATE_READY, STATE_READY, STATE_STARTING, STATE_ABSENT]}
    assert ask("llumnix-paper?high=1000", KIND_SCALE, 4, **load, **one_more) == NONE
    # 300 / 4 = 75 and 250 / 5 = 50: mean 62.5, above 60. The smaller batch goes, whatever it holds.
    busy = {"free_blocks": [300, 250, 0, 0], "batched": [4, 5, 0, 0]}
    assert ask("llumnix-paper", KIND_SCALE, 4, **busy, **TO_START) == 0
    assert ask("llumnix-paper?high=63", KIND_SCALE, 4, **busy, **TO_START) == NONE
    draining = {"state": [STATE_READY, STATE_READY, STATE_DRAINING, STATE_ABSENT]}
    assert ask("llumnix-paper", KIND_SCALE, 4, **busy, **draining) == NONE
