"""A dispatcher's ledger against the sums over its requests in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from fleetpilot.fleet.ledger import Ledger, add_up
from fleetpilot.fleet.view import INSTANCE_FIELDS, empty_view

ROWS, SLOTS = 2, 3
BLOCK_SIZE = 16


def records() -> NDArray[np.void]:
    instances = empty_view(1, SLOTS).instances[0]
    instances["block_size"] = BLOCK_SIZE
    instances["kv_capacity_blocks"] = 1000
    instances["kv_usage"] = 0.25
    return instances


@dataclass
class Request:
    row: int
    slot: int
    prompt: int
    predicted: int
    matched: int
    priority: int
    streamed: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """Any order of dispatches, tokens and ends in two ledgers: every field is the sum over the requests in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = np.stack([records() for _ in range(ROWS)])
        self.head_s = np.full((ROWS, SLOTS), np.inf)
        self.ledgers = [Ledger(instances, head_s) for instances, head_s in zip(self.rows, self.head_s, strict=True)]
        self.requests: dict[str, Request] = {}
        self.dispatched = np.zeros((ROWS, SLOTS), int)

    @rule(
        row=st.integers(0, ROWS - 1),
        slot=st.integers(0, SLOTS - 1),
        prompt=st.integers(1, 100),
        predicted=st.integers(0, 50),
        data=st.data(),
    )
    def dispatch(self, row: int, slot: int, prompt: int, predicted: int, data: st.DataObject) -> None:
        matched = data.draw(st.integers(0, prompt))
        priority = data.draw(st.integers(-1, 1))
        number = int(self.dispatched.sum())
        name = f"r{number}"
        self.ledgers[row].dispatch(name, slot, prompt, predicted, matched, priority, float(number))
        self.requests[name] = Request(row, slot, prompt, predicted, matched, priority)
        self.dispatched[row, slot] += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 5))
    def tokens(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.ledgers[self.requests[name].row].tokens(name, count)
        self.requests[name].streamed += count

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        ledger = self.ledgers[self.requests[name].row]
        ledger.end(name)
        del self.requests[name]
        with pytest.raises(ValueError, match=f"request '{name}' is not in flight"):
            ledger.end(name)

    @invariant()
    def every_field_is_the_sum(self) -> None:
        for row, instances in enumerate(self.rows):
            requests = [request for request in self.requests.values() if request.row == row]
            self.check(instances, requests, self.dispatched[row])

    @invariant()
    def together_they_say_what_one_would(self) -> None:
        fleet, together = records(), records()
        add_up(together, fleet, self.rows, self.head_s, 0)
        self.check(together, list(self.requests.values()), self.dispatched.sum(axis=0))

    def check(self, instances: NDArray[np.void], requests: list[Request], dispatched: NDArray[np.int64]) -> None:
        for slot in range(SLOTS):
            here = [request for request in requests if request.slot == slot]
            unstarted = [request for request in here if request.streamed == 0]
            blocks = [math.ceil(request.prompt / BLOCK_SIZE) for request in unstarted]
            expected = {
                "dispatched": dispatched[slot],
                "in_flight": len(here),
                "urgent": sum(request.priority < 0 for request in here),
                "unstarted": len(unstarted),
                "unstarted_prompt_tokens": sum(request.prompt for request in unstarted),
                "unstarted_prompt_blocks": sum(blocks),
                "unstarted_uncached_tokens": sum(request.prompt - request.matched for request in unstarted),
                "head_prompt_blocks": blocks[0] if blocks else 0,
                "started_prompt_tokens": sum(request.prompt for request in here if request.streamed),
                "streamed_tokens": sum(request.streamed for request in here),
                "predicted_output_tokens": sum(request.predicted for request in here),
                "queued_demand_blocks": sum(blocks),
                "head_demand_blocks": blocks[0] if blocks else 0,
                "queued": len(unstarted),
                "batched": len(here) - len(unstarted),
            }
            assert expected.keys() == {field.name for field in INSTANCE_FIELDS if field.source == "ledger"}
            assert {name: instances[slot][name] for name in expected} == expected


TestLedgerMachine = LedgerMachine.TestCase


def test_the_head_is_the_oldest_request_without_a_first_token() -> None:
    instances = records()
    ledger = Ledger(instances)
    for name, prompt in (("a", 160), ("b", 33), ("c", 16)):
        ledger.dispatch(name, 1, prompt, 10.0, 0)
    heads = [instances["head_prompt_blocks"][1]]
    ledger.tokens("b", 1)  # overtakes; the head stays
    heads.append(instances["head_prompt_blocks"][1])
    ledger.end("a")  # cancelled before its first token
    heads.append(instances["head_prompt_blocks"][1])
    ledger.tokens("c", 1)
    heads.append(instances["head_prompt_blocks"][1])
    assert heads == [10, 10, 1, 0]
    assert instances["head_prompt_blocks"][[0, 2]].tolist() == [0, 0]


def test_the_load_follows_at_once() -> None:
    instances = records()
    ledger = Ledger(instances)
    ledger.dispatch("a", 0, 40, 10.0, 0)
    assert (instances["free_blocks"][0], instances["queued_demand_blocks"][0], instances["queued"][0]) == (750, 3, 1)


def test_an_id_may_be_used_again_after_its_end() -> None:
    instances = records()
    ledger = Ledger(instances)
    for _ in range(2):
        ledger.dispatch("a", 0, 5, 1.0, 0)
        ledger.end("a")
    assert (instances["dispatched"][0], instances["in_flight"][0]) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 0, 5, 1.0, 0), "request 'a' is in flight already"),
        (("b", 3, 5, 1.0, 0), "slot of request 'b' is 3; expected 0 to 2"),
        (("b", -1, 5, 1.0, 0), "slot of request 'b' is -1"),
        (("b", 0, 0, 1.0, 0), "prompt_tokens of request 'b' is 0; expected at least 1"),
        (("b", 0, 5, 1.0, 6), "matched_tokens of request 'b' is 6; expected 0 to 5"),
        (("b", 0, 5, math.nan, 0), "predicted_output_tokens of request 'b' is nan"),
        (("b", 0, 5, -1.0, 0), "predicted_output_tokens of request 'b' is -1.0"),
        (("b", 2, 5, 1.0, 0), "block_size of instance 2 is 0.0"),
    ],
)
def test_a_bad_dispatch_is_refused_and_not_counted(arguments: tuple[str, int, int, float, int], message: str) -> None:
    instances = records()
    instances["block_size"][2] = 0
    ledger = Ledger(instances)
    ledger.dispatch("a", 0, 40, 10.0, 0)
    before = instances.copy()
    with pytest.raises(ValueError, match=message):
        ledger.dispatch(*arguments)
    assert np.array_equal(instances, before)


def test_tokens_must_be_positive_and_of_a_request_in_flight() -> None:
    ledger = Ledger(records())
    ledger.dispatch("a", 0, 5, 1.0, 0)
    with pytest.raises(ValueError, match="tokens of request 'a' is 0; expected at least 1"):
        ledger.tokens("a", 0)
    with pytest.raises(ValueError, match="request 'b' is not in flight"):
        ledger.tokens("b", 1)
    with pytest.raises(ValueError, match="request 'b' is not in flight"):
        ledger.end("b")
