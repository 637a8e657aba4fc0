"""Replaying a decision log: the same decisions again, another policy's, and what these are worth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import a_fleet, ask
from test_decision_log import Leveller, run

from fleetpilot.agents import load_policy
from fleetpilot.cli import main
from fleetpilot.dispatcher.decision_log import read_log
from fleetpilot.dispatcher.decisions import view_fields
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.replay import replay
from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.view import REJECT, Decision, FleetView, empty_view


class Always:
    """A policy of one choice."""

    name = "always"

    def __init__(self, slot: int):
        self.slot = slot

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        return Decision(np.array([self.slot]))


def recorded(path: Path, policy: Any, requests: int = 24, **config: Any) -> None:
    """A log of requests of five tokens at three engines, the first of which is slow."""

    async def test() -> None:
        async with a_fleet(3, policy, decision_log=str(path), **config) as (_, client, engines):
            engines[0].token_s = 0.05
            clients = [HttpClient(client.origin) for _ in range(24)]

            async def some(c: HttpClient, count: int) -> None:
                for _ in range(count):
                    assert (await ask(c, max_tokens=5)).status == 200

            await asyncio.gather(*(some(c, requests // 24) for c in clients))

    run(test)


@pytest.mark.parametrize("name", ["llumnix", "lmetric", "random", "round-robin", "power-of-two"])
def test_the_recorded_policy_decides_as_it_did(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, load_policy(name))
    found = replay(read_log(path), load_policy(name))
    assert sum(found.recorded.values()) == sum(of.decisions for of in found.agreement.values()) >= 24
    assert all(of.agreed == of.decisions for of in found.agreement.values())
    assert "without exploration" in found.refusal
    assert not found.estimates


def test_another_policy_is_compared_with_what_the_recorded_one_preferred(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, Always(0), explore=0.5)
    agreement = replay(read_log(path), Always(0)).agreement["dispatch"]
    assert (agreement.decisions, agreement.agreed) == (24, 24)
    agreement = replay(read_log(path), Always(1)).agreement["dispatch"]
    assert (agreement.decisions, agreement.agreed) == (24, 0)


def test_kinds_that_the_policy_does_not_answer_are_not_asked(tmp_path: Path) -> None:
    def records() -> Iterator[dict[str, Any]]:
        for number, kind in enumerate(("dispatch", "source", "destination")):
            view = empty_view(1, 2)
            view.fleet["kind"] = KINDS.index(kind)
            yield decision(number, view, 0) | {"kind": kind}

    found = replay(records(), Always(0))
    assert dict(found.not_asked) == {"source": 1, "destination": 1}
    assert set(replay(records(), Leveller()).agreement) == {"dispatch", "source", "destination"}


def test_rejections_are_recorded_are_never_explored_and_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(2, Always(REJECT), decision_log=str(path), explore=1.0) as (_, client, _engines):
            assert (await ask(client)).status == 429

    run(test)
    decided, ended = read_log(path)
    assert (decided["preferred"], decided["choice"], decided["propensity"]) == ("reject", "reject", 1.0)
    assert (ended["outcome"], ended["instance"]) == ("rejected", None)
    for policy, agreed, none in ((Always(REJECT), 1, 1), (Always(0), 0, 0)):
        found = replay(read_log(path), policy)
        agreement = found.agreement["dispatch"]
        assert (agreement.decisions, agreement.agreed, agreement.none, agreement.failed) == (1, agreed, none, 0)
        assert found.requests == 0


def test_exploration_is_recorded_with_its_propensities(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, Always(0), 192, explore=0.6)
    decisions = [record for record in read_log(path) if record["record"] == "decision"]
    chosen = np.array([record["choice"] for record in decisions])
    assert {record["preferred"] for record in decisions} == {0}
    for slot, propensity in ((0, 0.6), (1, 0.2), (2, 0.2)):
        there = [record for record in decisions if record["choice"] == slot]
        assert {round(record["propensity"], 9) for record in there} == {propensity}
        assert {record["by"] for record in there} == {"exploration" if slot else "policy"}
        share = np.mean(chosen == slot)
        assert abs(share - propensity) < 5 * np.sqrt(propensity * (1 - propensity) / len(chosen))


def test_the_worth_of_other_choices_is_estimated_where_the_log_explored(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, Always(0), 240, explore=0.6)
    found = replay(read_log(path), Always(1))
    assert not found.refusal
    assert found.requests == 240
    estimates = {estimate.metric: estimate for estimate in found.estimates}
    assert set(estimates) == {"finished", "ttft_s", "tpot_s", "duration_s"}
    assert estimates["finished"].estimate == estimates["finished"].recorded == 1.0
    for metric in ("ttft_s", "tpot_s", "duration_s"):
        of = estimates[metric]
        assert of.low <= of.estimate <= of.high
        assert of.difference == pytest.approx(of.estimate - of.recorded)
        assert of.difference_high < 0  # the first engine takes 25 times as long for a token
    outcomes = [record for record in read_log(path) if record["record"] == "outcome"]
    at_second = [record["tpot_s"] for record in outcomes if record["instance"] == 1]
    assert estimates["tpot_s"].estimate == pytest.approx(np.mean(at_second))  # one propensity, so plainly their mean


# --- logs made up, whose truth is known ------------------------------------------------------------------------------


def decision(number: int, view: FleetView, choice: int, propensity: float = 1.0) -> dict[str, Any]:
    return {
        "record": "decision",
        "run": "a",
        "decision": number,
        "request": str(number),
        "kind": "dispatch",
        "policy": "made-up",
        "preferred": choice,
        "choice": choice,
        "propensity": propensity,
        "view": view_fields(view),
    }


def outcome(number: int, value: float, ended: str = "finished") -> dict[str, Any]:
    names = ("ttft_s", "tpot_s", "duration_s")
    return {"record": "outcome", "run": "a", "request": str(number), "outcome": ended} | dict.fromkeys(names, value)


class ByPrompt:
    """Sends long prompts to the second of two instances."""

    name = "by-prompt"

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        return Decision((view.request["prompt_tokens"] > 100).astype(np.int64))


def made_up(requests: int, seed: int, explore: float = 0.3) -> Iterator[dict[str, Any]]:
    """The recorded policy sends all to the first. Long prompts, half of all, take 3 s there and 1.5 s at the second,
    short ones 0.5 s and 2 s: by prompt the mean is 1 s."""
    rng = np.random.default_rng(seed)
    for number in range(requests):
        long, choice = rng.random() < 0.5, int(rng.random() < explore / 2)
        view = empty_view(1, 2)
        view.request["prompt_tokens"] = 200 if long else 50
        yield decision(number, view, choice, explore / 2 if choice else 1 - explore / 2)
        yield outcome(number, ((3.0, 1.5), (0.5, 2.0))[0 if long else 1][choice] + rng.normal(0, 0.3))


def test_estimates_are_unbiased_and_their_intervals_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpilot.dispatcher.replay._RESAMPLES", 500)
    found = [replay(made_up(400, seed), ByPrompt()) for seed in range(12)]
    estimates = [{e.metric: e for e in of.estimates}["duration_s"] for of in found]
    assert np.mean([e.estimate for e in estimates]) == pytest.approx(1.0, abs=0.08)
    assert np.mean([e.recorded for e in estimates]) == pytest.approx(1.75, abs=0.08)
    assert np.mean([e.low <= 1.0 <= e.high for e in estimates]) >= 0.75
    assert all(e.difference_high < 0 for e in estimates)


def test_requests_without_an_outcome_or_a_number_are_left_out() -> None:
    def records() -> Iterator[dict[str, Any]]:
        for record in made_up(400, 1):
            if record["record"] == "outcome":
                number = int(record["request"])
                if number % 10 == 0:
                    continue
                if number % 10 == 1:
                    record = outcome(number, 1.0, "failed") | {"ttft_s": None, "tpot_s": None}
            yield record

    estimates = {estimate.metric: estimate for estimate in replay(records(), ByPrompt()).estimates}
    assert estimates["finished"].requests == 360
    assert estimates["finished"].recorded == pytest.approx(320 / 360)
    assert estimates["ttft_s"].requests == estimates["duration_s"].requests == 320


def test_only_the_first_placement_of_a_request_counts() -> None:
    view = empty_view(1, 2)

    def records() -> Iterator[dict[str, Any]]:
        for number in range(100):
            first = number % 2
            yield decision(number, view, first, 0.5)
            yield decision(number, view, 1 - first, 0.5)  # a retry
            yield outcome(number, 1.0 + first)

    estimates = {estimate.metric: estimate for estimate in replay(records(), Always(1)).estimates}
    assert estimates["duration_s"].estimate == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("records", "policy", "words"),
    [
        (lambda: made_up(400, 1, explore=0.0), ByPrompt(), "recorded without exploration"),
        (lambda: made_up(40, 1), Always(1), "weigh as much as .* requests, expected 30"),
        (lambda: made_up(400, 1), Always(7), "for 400 of 400 requests .* chose no instance"),
    ],
)
def test_what_the_log_cannot_tell_is_refused_with_the_reason(records: Any, policy: Any, words: str) -> None:
    found = replay(records(), policy)
    assert found.agreement["dispatch"].decisions > 0
    assert found.estimates == []
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found.refusal)


def test_a_policy_that_raises_or_chooses_what_it_may_not_is_counted() -> None:
    assert replay(made_up(10, 1), Always(7)).agreement["dispatch"].failed == 10
    view = empty_view(1, 2)
    view.fleet["may_hold"] = 1
    held = replay([decision(1, view, 0)], Always(-1)).agreement["dispatch"]
    assert (held.none, held.failed, held.agreed) == (1, 0, 0)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, load_policy("round-robin"), 240, explore=0.9)
    assert main(["replay-log", str(path), "--policy", "join-shortest-queue"]) == 0
    said = capsys.readouterr().out
    assert "240 decisions of round-robin" in said
    assert "duration_s" in said
    assert main(["replay-log", str(path), "--policy", "join-shortest-queue", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"]["dispatch"]["decisions"] == 240
    assert found["refusal"] == ""
    assert [estimate["metric"] for estimate in found["estimates"]] == ["finished", "ttft_s", "tpot_s", "duration_s"]
    with path.open("a") as log:
        log.write('{"record":"deci\n')
    assert main(["replay-log", str(path), "--policy", "join-shortest-queue"]) == 0
    assert "1 lines are no records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "no decision in it"),
        ("hello\n", "no decision in it"),
        ('{"record":"decision"}\n', "expected records of a decision log"),
        ('{"record":"decision","policy":"a","kind":"dispatch","view":{}}\n', "expected that of a decision log"),
    ],
)
def test_what_is_no_log_is_said_in_one_line(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["replay-log", str(path), "--policy", "lmetric"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert words in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"propensity": 0.0}, r"propensity = 0; expected a number in \(0, 1\]"),
        ({"kind": "foo"}, "kind = 'foo'; expected one of dispatch"),
        ({"choice": 99}, "choice = 99: expected one that its view allows"),
        ({"choice": "foo"}, "choice = 'foo': expected an instance's slot, null or 'reject'"),
    ],
)
def test_a_damaged_decision_is_named(change: dict[str, Any], words: str) -> None:
    view = empty_view(1, 2)
    view.instances["candidate"] = 1
    with pytest.raises(ValueError, match=words):
        replay([decision(0, view, 0) | change, outcome(0, 1.0)], Always(0))


def test_a_view_with_something_else_than_numbers_is_named() -> None:
    record = decision(0, empty_view(1, 2), 0)
    record["view"]["request"]["prompt_tokens"] = "many"
    with pytest.raises(ValueError, match=r"view: request\.prompt_tokens = 'many': expected a number or null"):
        replay([record], Always(0))
