"""Bounds: the one door by which true lengths come to a decision, and where it is shut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from views import choice, one_fleet

from fleetpilot.baselines import ORACLE_BOUNDS, load_policy
from fleetpilot.cluster import FleetConfig, Telemetry, simulate, simulate_stream
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.policy_host import PolicyHost
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.fleet.policy import CompiledPolicy, OracleBound
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import make_table, workload


def spy(kind: type[CompiledPolicy], seen: list[tuple[Any, ...]]) -> CompiledPolicy:
    """A policy that notes what it is told of requests and engines, through the Python path of the simulator."""

    class Spy(kind):  # type: ignore[valid-type,misc]
        def decide(self, view: Any) -> Any:
            seen.append((view.request["predicted_output_tokens"][0], view.fleet["engine_reported"][0]))
            return super().decide(view)

    return Spy("spy", load_policy("join-shortest-queue").python_choose)  # type: ignore[attr-defined]


def test_bounds_are_told_true_lengths_and_exact_loads_and_policies_are_not() -> None:
    table = make_table("three", [0.0, 1.0, 2.0], [10, 20, 30], [7, 8, 9]).replace(
        predicted_output_tokens=np.full(3, 100, np.float32)
    )
    fleet = FleetConfig.of(load_profile("tiny-cpu"), 2, telemetry=Telemetry(0.1, 0.2))
    told: list[tuple[Any, ...]] = []
    simulate(table, fleet, spy(OracleBound, told), check=True)
    assert told == [(7, 1), (8, 1), (9, 1)]
    guessed: list[tuple[Any, ...]] = []
    simulate(table, fleet, spy(CompiledPolicy, guessed), check=True)
    assert guessed == [(100, 0)] * 3


def test_a_stream_has_the_same_door() -> None:
    table = workload("twin/azure-conv?n=300&predict=error:0.5")
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 3)
    policy = load_policy("oracle-least-work")
    ended: list[Any] = []
    simulate_stream([table], fleet, policy, on_ended=ended.append)
    streamed = np.sort(np.concatenate(ended), order="row")
    whole = simulate(table, fleet, policy).requests
    assert np.array_equal(streamed["instance"], whole["instance"])
    assert np.array_equal(whole["predicted_output_tokens"], table.output_tokens)


@pytest.mark.parametrize("name", ORACLE_BOUNDS)
def test_predictions_do_not_matter_to_a_bound(name: str) -> None:
    table = workload("twin/azure-conv?n=400")
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 3)
    first = simulate(table, fleet, load_policy(name)).requests
    guesses = np.random.default_rng(1).uniform(1, 500, len(table)).astype(np.float32)
    second = simulate(table.replace(predicted_output_tokens=guesses), fleet, load_policy(name)).requests
    assert np.array_equal(first["finish_s"], second["finish_s"])


@pytest.mark.parametrize("name", ORACLE_BOUNDS)
def test_nothing_but_the_simulator_takes_a_bound(name: str) -> None:
    jsq = load_policy("join-shortest-queue")
    assert isinstance(jsq, CompiledPolicy)
    bound = load_policy(name)
    assert isinstance(bound, CompiledPolicy)
    expected = rf"{name}'?: expected a policy; this bound knows the answers' true lengths"
    with pytest.raises(ValueError, match=expected):
        PolicyHost(bound, jsq)
    with pytest.raises(ValueError, match=expected):
        PolicyHost(jsq, bound)
    with pytest.raises(ValueError, match=expected):
        Dispatcher(ServeConfig(engines=("http://127.0.0.1:1",), policy=name))
    with pytest.raises(ValueError, match=expected):
        FleetVectorEnv(1, kinds=["scale"], others=name)


def test_least_work_counts_what_is_left_to_prefill_and_to_decode() -> None:
    constants = {"prefill_s_per_token": 0.001, "decode_step_s": 0.02, "decode_s_per_seq": 0.002}
    # 0.3 s of prompts; 100 tokens to come at a sixteenth of 0.05 s each, 0.3125 s; 0.2 + 0.125 s.
    view = one_fleet(
        3,
        {"prompt_tokens": 0, "predicted_output_tokens": 0},
        unstarted_uncached_tokens=[300, 0, 200],
        predicted_output_tokens=[0, 150, 50],
        streamed_tokens=[0, 50, 10],
        **constants,
    )
    assert choice("oracle-least-work", view) == 0
    view.instances["unstarted_uncached_tokens"][0, 0] = 320
    assert choice("oracle-least-work", view) == 1
    # What the request finds cached is no work.
    view.request["prompt_tokens"] = 200
    view.instances["matched_tokens"][0, 2] = 50
    assert choice("oracle-least-work", view) == 2


def test_final_memory_adds_memory_batch_and_a_wait() -> None:
    # Final KV 0.5, 0.2, 0.2; batch 0.1, 0.5, 0.1; the last one's free memory is gone: 0.6, 0.7, 1.3.
    view = one_fleet(
        3,
        {"prompt_tokens": 160, "predicted_output_tokens": 0},
        kv_capacity_blocks=1000,
        block_size=16,
        max_num_seqs=100,
        in_flight=[10, 50, 10],
        predicted_output_tokens=[7840, 3040, 3040],
        free_blocks=[500, 500, 9],
    )
    assert choice("oracle-final-memory", view) == 0
    view.instances["in_flight"][0, 1] = 30
    assert choice("oracle-final-memory", view) == 1
    view.instances["queued"][0, 1] = 1
    assert choice("oracle-final-memory", view) == 0
