"""Kubernetes' HorizontalPodAutoscaler against numbers worked by hand from its documentation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from views import one_fleet

from fleetpilot.baselines import load_policy
from fleetpilot.baselines.hpa import desired_instances
from fleetpilot.cluster import FleetConfig, Scaling, simulate
from fleetpilot.fleet.policy import Policy
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import (
    KIND_DISPATCH,
    KIND_SCALE,
    NONE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_READY,
    STATE_STARTING,
    FleetView,
)
from fleetpilot.workloads import make_table


@pytest.mark.parametrize(
    ("metrics", "missing", "expected"),
    [
        ([200.0] * 3, 0, 6),  # twice the target of 100: twice as many
        ([50.0] * 4, 0, 2),  # half of it: half as many
        ([109.0] * 5, 0, 5),  # within the tolerance of 0.1
        ([91.0] * 5, 0, 5),
        ([111.0] * 5, 0, 6),  # ceil(5.55)
        ([89.0] * 9, 0, 9),  # ceil(8.01): not fewer after all
        ([0.0] * 3, 0, 0),
        ([], 3, 3),  # no metric at all: nothing changes
        # 3 x 200 over 4 with one that counts as idle: 1.5 x 4 = 6; not 2 x 4.
        ([200.0] * 3, 1, 6),
        # Idle ones turn the direction, or bring the ratio into the tolerance: nothing changes.
        ([150.0] * 2, 2, 4),
        ([150.0] * 2, 1, 3),
        # For fewer the missing one counts as at the target: (3 x 50 + 100) / 4 = 0.625 x 4 = 2.5.
        ([50.0] * 3, 1, 3),
        ([95.0] * 3, 1, 4),
    ],
)
def test_desired_instances(metrics: list[float], missing: int, expected: int) -> None:
    assert desired_instances(len(metrics) + missing, np.array(metrics), missing, 100.0) == expected


def tick(time_s: float, states: list[int], **fields: Any) -> FleetView:
    """A SCALE decision; all instances were polled, and may be chosen unless they start."""
    candidate = [0 if state == STATE_STARTING else 1 for state in states]
    fields = {"poll_age_s": 0.1, "candidate": candidate, **fields}
    fleet = {"kind": KIND_SCALE, "time_s": time_s, "may_hold": 1}
    return one_fleet(len(states), None, fleet, state=states, **fields)


def answers(policy: Policy, *seen: FleetView) -> list[int]:
    policy.reset(1, 0)
    return [int(policy.decide(view).choice[0]) for view in seen]


READY, ABSENT, STARTING, DRAINING = STATE_READY, STATE_ABSENT, STATE_STARTING, STATE_DRAINING


def test_a_tick_starts_as_many_as_are_wanted() -> None:
    # 12 waiting each, target 5: ceil(2 x 2.4) = 5 instances, three more, one a decision.
    asked = [
        tick(15, [READY, READY, ABSENT, ABSENT, ABSENT, ABSENT], waiting=12),
        tick(15, [READY, READY, STARTING, ABSENT, ABSENT, ABSENT], waiting=12),
        tick(15, [READY, READY, STARTING, STARTING, ABSENT, ABSENT], waiting=12),
        tick(15, [READY, READY, STARTING, STARTING, STARTING, ABSENT], waiting=12),
    ]
    assert answers(load_policy("hpa-queue"), *asked) == [2, 3, 4, NONE]


def test_an_instance_is_started_before_one_is_kept() -> None:
    assert answers(load_policy("hpa-queue"), tick(15, [DRAINING, READY, ABSENT], waiting=50)) == [2]
    assert answers(load_policy("hpa-queue"), tick(15, [DRAINING, READY], waiting=50)) == [0]
    assert answers(load_policy("hpa-queue"), tick(15, [READY], waiting=50)) == [NONE]


def test_no_more_than_four_or_twice_as_many_are_started_in_15_s() -> None:
    fleet = [READY, READY] + [ABSENT] * 30
    policy = load_policy("hpa-queue")
    policy.reset(1, 0)

    def started(time_s: float) -> int:
        for count in range(40):
            choice = int(policy.decide(tick(time_s, fleet, waiting=100)).choice[0])
            if choice == NONE:
                return count
            fleet[choice] = READY
        raise AssertionError

    assert [started(time_s) for time_s in (0, 10, 15, 30)] == [4, 0, 6, 12]


def test_the_highest_recommendation_of_five_minutes_holds() -> None:
    four = [READY] * 4

    def kv(time_s: float, usage: float) -> FleetView:
        return tick(time_s, four, kv_usage=usage)

    policy = load_policy("hpa-kv")
    # 0.7 of 0.7 asks for 4 until 300 s later, 0.2 for ceil(4 x 0.286) = 2.
    assert answers(policy, kv(0, 0.7), kv(15, 0.2), kv(285, 0.2), kv(300, 0.2)) == [NONE, NONE, NONE, 3]
    assert answers(load_policy("hpa-kv?stabilization_s=60"), kv(0, 0.7), kv(45, 0.2), kv(60, 0.2)) == [NONE, NONE, 3]
    # One a decision, the highest slot first.
    three = tick(300, [READY, READY, READY, DRAINING], kv_usage=0.2)
    two = tick(300, [READY, READY, DRAINING, DRAINING], kv_usage=0.2)
    assert answers(policy, kv(300, 0.2), three, two) == [3, 2, NONE]


def test_instances_without_a_poll_have_no_metric() -> None:
    # As above: 3 x 50 % of the target and one missing are 2.5 of 4, so one goes; as an idle one it would be 1.5.
    view = tick(0, [READY] * 4, kv_usage=[0.35, 0.35, 0.35, 0.0], poll_age_s=[0.1, 0.1, 0.1, np.inf])
    gone = tick(0, [READY, READY, READY, DRAINING], kv_usage=0.35)
    assert answers(load_policy("hpa-kv"), view, gone) == [3, NONE]
    # Draining ones do not count at all.
    assert answers(load_policy("hpa-kv"), tick(0, [READY, DRAINING], kv_usage=[0.7, 0.0])) == [NONE]


def dispatch(time_s: float, unstarted: list[float], only: int, waited_s: float = 0.0) -> FleetView:
    candidate = [1 if slot == only else 0 for slot in range(len(unstarted))]
    fleet = {"kind": KIND_DISPATCH, "time_s": time_s}
    return one_fleet(len(unstarted), {"waited_s": waited_s}, fleet, unstarted=unstarted, candidate=candidate)


def test_the_p99_of_first_tokens_is_told_from_the_ledger() -> None:
    two = [READY, READY, ABSENT, ABSENT]

    def scale(time_s: float, unstarted: list[float]) -> FleetView:
        return tick(time_s, two, unstarted=unstarted)

    sent = [dispatch(0.0, [0, 0, 0, 0], 0), dispatch(1.0, [1, 0, 0, 0], 1, waited_s=0.5)]
    # None has come at 3 s: nothing is known. Then the first has, after 3 s; the target is 2 s: ceil(2 x 1.5) = 3.
    none = scale(3.0, [1, 1, 0, 0])
    assert answers(load_policy("hpa-latency"), *sent, none, scale(3.1, [0, 1, 0, 0])) == [0, 1, NONE, 2]
    # The second arrived at 0.5 s, so 2 s were just its time: within the tolerance.
    none = scale(2.5, [1, 1, 0, 0])
    assert answers(load_policy("hpa-latency"), *sent, none, scale(2.6, [1, 0, 0, 0])) == [0, 1, NONE, NONE]
    # A minute later the window is empty again.
    seen = [scale(3.0, [1, 1, 0, 0]), scale(3.1, [0, 1, 0, 0]), scale(63.1, [0, 1, 0, 0])]
    assert answers(load_policy("hpa-latency"), *sent, *seen) == [0, 1, NONE, 2, NONE]
    # Both within a tenth of the target: ceil(2 x 2.5 / 25) = 1, so one of the two goes.
    assert answers(load_policy("hpa-latency?target=25&stabilization_s=0"), *sent, none, scale(2.6, [0, 0, 0, 0])) == [
        0,
        1,
        NONE,
        1,
    ]


@pytest.mark.parametrize("name", ["hpa-queue", "hpa-kv", "hpa-latency"])
def test_a_fleet_grows_under_load_and_shrinks_after_it(name: str) -> None:
    """Twenty minutes: nothing to do for 600 s after a burst that a single engine could not serve."""
    rng = np.random.default_rng(1)
    burst = np.sort(rng.uniform(0, 600, 3000))
    calm = np.arange(600.0, 1500.0, 10.0)
    arrival_s = np.concatenate([burst, calm])
    table = make_table("burst", arrival_s, np.full(len(arrival_s), 500), np.full(len(arrival_s), 200))
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 6, scaling=Scaling(interval_s=15.0, start_up_s=30.0))
    log = simulate(table, fleet, load_policy(f"{name}?stabilization_s=120"), sample_interval_s=None)
    alive_s = log.instances["alive_s"]
    assert alive_s[0] > 1400  # the last one that is left
    assert 0 < alive_s[1:].max() < 1200
