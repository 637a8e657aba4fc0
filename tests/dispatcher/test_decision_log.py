"""The decision log: what is in it, that it is all there, and what never is."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from emulated import FAST, eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scripted import WAIT_S, a_fleet, ask, run, until

from fleetpilot.baselines import load_policy
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.decision_log import FILES, DecisionLog, log_files, read_log
from fleetpilot.dispatcher.decisions import BY_POLICY, Decided, view_fields, view_of
from fleetpilot.dispatcher.emulator import EmulatedFleet
from fleetpilot.dispatcher.http.client import CallError, HttpClient
from fleetpilot.dispatcher.policy_host import PolicyHost
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.policy import require_compiled
from fleetpilot.fleet.view import (
    FLEET_VIEW,
    INSTANCE_VIEW,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SOURCE,
    NONE,
    REQUEST_VIEW,
    Decision,
    FleetView,
    empty_view,
)


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_log(path) if record["record"] == kind]


def test_every_request_has_its_decision_and_its_outcome(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(2, decision_log=str(path)) as (_, client, _engines):
            clients = [HttpClient(client.origin) for _ in range(8)]
            named = [[(b"x-request-id", b"mine")], *[()] * 7]
            await asyncio.gather(*(ask(c, headers) for c, headers in zip(clients, named, strict=True)))
            await ask(client, stream=False)

    run(test)
    decisions = {record["request"]: record for record in records(path, "decision")}
    outcomes = {record["request"]: record for record in records(path, "outcome")}
    assert len(decisions) == len(outcomes) == 9
    assert decisions.keys() == outcomes.keys()
    assert [record["decision"] for record in decisions.values()] == list(range(1, 10))
    for request, outcome in outcomes.items():
        decision = decisions[request]
        assert decision["kind"] == "dispatch"
        assert (decision["policy"], decision["by"], decision["reason"]) == ("join-shortest-queue", "policy", None)
        assert decision["choice"] == decision["preferred"] == outcome["instance"]
        assert decision["propensity"] == 1.0
        assert outcome["outcome"] == "finished"
        assert outcome["prompt_tokens"] == decision["view"]["request"]["prompt_tokens"] == 4
    *streamed, whole = outcomes.values()
    assert {(o["output_tokens"], o["finish_reason"], o["failovers"]) for o in streamed} == {(40, "length", 0)}
    assert all(0 < o["ttft_s"] < o["duration_s"] and o["tpot_s"] > 0 for o in streamed)
    assert [whole[name] for name in ("ttft_s", "tpot_s", "output_tokens", "finish_reason")] == [None] * 4
    assert "mine" in {outcome["request_id"] for outcome in streamed}


def test_an_engine_that_dies_and_a_client_that_leaves_are_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(2, decision_log=str(path)) as (dispatcher, client, (first, second)):
            first.cut_after = second.cut_after = 5
            moved = asyncio.create_task(ask(client))
            await until(lambda: dispatcher.counts["failovers"] == 1)
            first.cut_after = second.cut_after = None
            await moved
            first.stall_after = second.stall_after = 5
            leaves = asyncio.create_task(ask(HttpClient(client.origin)))
            await until(lambda: any(relay.tokens == 5 for at in dispatcher.at for relay in at.values()))
            leaves.cancel()
            await until(lambda: dispatcher.outcomes["client left"] == 1)

    run(test)
    survivor, left = records(path, "outcome")
    assert (survivor["outcome"], survivor["failovers"], survivor["output_tokens"]) == ("finished", 1, 40)
    assert [r["request"] for r in records(path, "decision")] == [survivor["request"]] * 2 + [left["request"]]
    assert (left["outcome"], left["output_tokens"], left["finish_reason"]) == ("client left", 5, None)


def test_a_stream_that_a_stop_cuts_has_failed_and_its_client_has_not_left(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(1, decision_log=str(path)) as (dispatcher, client, (engine,)):
            engine.stall_after = 5
            cut = asyncio.create_task(ask(client))
            await until(lambda: any(relay.tokens == 5 for at in dispatcher.at for relay in at.values()))
            await dispatcher.stop()
            with pytest.raises(CallError):
                await cut

    run(test)
    (record,) = records(path, "outcome")
    assert record["outcome"] == "failed"


class Leveller:
    """Sends everything to the first of two instances, then moves it until they are level."""

    name = "leveller"
    kinds = (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION)

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        first, second = view.instances["in_flight"][0]
        choice = {KIND_DISPATCH: 0, KIND_SOURCE: 0 if first > second + 1 else NONE, KIND_DESTINATION: 1}
        return Decision(np.array([choice[int(view.fleet["kind"][0])]]))


def test_a_migration_is_joined_to_its_decision_and_its_request(tmp_path: Path, compiled: None) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        emulated = EmulatedFleet([FAST.replace(a_s=0.01)] * 2)
        await emulated.start()
        config = ServeConfig(
            engines=tuple(emulated.urls),
            port=0,
            profile="tiny-cpu",
            decision_log=str(path),
            rebalance_interval_s=0.05,
        )
        dispatcher = Dispatcher(config, Leveller())
        await dispatcher.start()
        await dispatcher.ready(2, WAIT_S)
        clients = [HttpClient(f"http://127.0.0.1:{dispatcher.port}") for _ in range(6)]
        model = dispatcher.fleet.engines[0].capabilities.models[0]  # type: ignore[union-attr]
        prompts = [list(range(5 + n, 105 + n)) for n in range(6)]
        await asyncio.gather(
            *(ask(c, model=model, prompt=p, max_tokens=150) for c, p in zip(clients, prompts, strict=True))
        )
        await dispatcher.stop()
        await emulated.stop()

    run(test)
    decisions = {record["decision"]: record for record in records(path, "decision")}
    outcomes = {record["request"]: record for record in records(path, "outcome")}
    completed = [record for record in records(path, "migration") if record["outcome"] == "completed"]
    assert completed
    for migration in completed:
        decision = decisions[migration["decision"]]
        assert decision["kind"] == "destination"
        assert decision["request"] == migration["request"]
        assert decision["choice"] == migration["destination"] != migration["source"]
        assert decisions[migration["decision"] - 1]["kind"] == "source"
        assert decisions[migration["decision"] - 1]["choice"] == migration["source"]
        seen, before = decision["view"]["request"], decisions[migration["decision"] - 1]["view"]["request"]
        assert seen["prompt_tokens"] == 100  # the request that moves, as in simulation
        assert 0 < seen["streamed_tokens"] < 150
        assert before["prompt_tokens"] == 0  # none has been chosen yet
        assert before["ttft_target_s"] is None
    taken_up = Counter(migration["request"] for migration in completed)
    assert {r: o["migrations"] for r, o in outcomes.items() if o["migrations"]} == dict(taken_up)
    assert all((o["downtime_s"] > 0) == (o["migrations"] > 0) for o in outcomes.values())


def test_prompts_and_answers_are_never_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(1, decision_log=str(path), api_keys=("the-key",)) as (_, client, _engines):
            headers = [(b"authorization", b"Bearer the-key")]
            await ask(client, headers, prompt="my-secret-prompt", user="my-name", session_id="my-session")
            messages = [{"role": "user", "content": "my-secret-message"}]
            await ask(client, headers, route="/v1/chat/completions", messages=messages)

    run(test)
    text = path.read_text()
    assert text.count('"finished"') == 2
    for secret in ("secret", "my-", "the-key", "Bearer", "<", "scripted"):
        assert secret not in text


FLOATS = st.floats(allow_nan=False, allow_infinity=True).filter(lambda value: value != -np.inf)


def filled(dtype: np.dtype[np.void], count: int) -> st.SearchStrategy[Any]:
    of = {"f": FLOATS, "i": st.integers(-(2**63), 2**63 - 1), "u": st.integers(0, 2**64 - 1)}
    row = st.tuples(*(of[dtype[name].kind] for name in dtype.names or ()))
    return hnp.arrays(object, count, elements=row).map(lambda rows: np.array(rows.tolist(), dtype))


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: filled(INSTANCE_VIEW, n)), filled(REQUEST_VIEW, 1), filled(FLEET_VIEW, 1))
def test_a_view_comes_back_bit_for_bit(instances: Any, request: Any, fleet: Any) -> None:
    again = view_of(orjson.loads(orjson.dumps(view_fields(FleetView(instances[None], request, fleet)))))
    for ours, theirs in ((instances, again.instances[0]), (request, again.request), (fleet, again.fleet)):
        for name in ours.dtype.names:
            assert ours[name].tobytes() == theirs[name].tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda view: view["request"].pop("turn"), "request with other fields.*turn"),
        (lambda view: view["instances"].update(colour=[1]), "instances with other fields.*colour"),
        (lambda view: view["instances"].update(running=[1, 2]), "running has 2 values, expected 1"),
        (lambda view: view["fleet"].update(kind="dispatch"), r"fleet\.kind = 'dispatch': expected a number or null"),
        (lambda view: view.pop("fleet"), "KeyError: 'fleet'"),
    ],
)
def test_a_view_of_another_version_is_refused(change: Callable[[Any], Any], words: str) -> None:
    fields = view_fields(empty_view(1, 1))
    change(fields)
    with pytest.raises(ValueError, match=words):
        view_of(fields)


def decided(number: int) -> Decided:
    return Decided(number, "7", KIND_DISPATCH, "lmetric", BY_POLICY, "", 0, 0, 1.0, empty_view(1, 4))


def test_the_disk_is_bounded_and_the_latest_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = DecisionLog(str(path), 100_000)
    for number in range(1, 301):
        log.decision(decided(number))
    log.close()
    assert log.counts == {"written": 300}
    files = log_files(path)
    assert len(files) == FILES
    assert sum(file.stat().st_size for file in files) <= 100_000
    numbers = [record["decision"] for record in read_log(path)]
    assert numbers == list(range(301 - len(numbers), 301))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in files)


def test_a_disk_that_hangs_costs_records_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hangs = tmp_path / "log.jsonl", threading.Event()
    write = DecisionLog._write_all
    monkeypatch.setattr(DecisionLog, "_write_all", lambda log: (hangs.wait(WAIT_S), write(log)))
    monkeypatch.setattr("fleetpilot.dispatcher.decision_log._MOST_WAITING", 5)

    async def test() -> None:
        async with a_fleet(1, decision_log=str(path)) as (dispatcher, client, _):
            for _ in range(4):
                assert (await ask(client)).status == 200
            text = (await client.fetch("GET", "/metrics", timeout_s=WAIT_S)).body.decode()
            assert 'fleetpilot_decision_log_records_total{result="dropped"} 3.0' in text
            assert 'fleetpilot_decisions_total{by="policy",kind="dispatch"} 4.0' in text
            hangs.set()
            log = dispatcher.log
            assert log is not None
            await until(lambda: log.counts["written"] == 5)

    run(test)
    assert len(list(read_log(path))) == 5
    views = [record["view"] for record in records(path, "decision")]
    assert [view["fleet"]["decisions"] for view in views] == list(range(len(views)))  # as they were, not as they are


def test_a_full_disk_is_counted_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    log = DecisionLog(str(path), 100_000)
    real = log._file.stream

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log._file.stream = Full()  # type: ignore[assignment]
    log.decision(decided(1))
    eventually(lambda: bool(log.counts), "the disk was found full")
    log._file.stream = real
    log.decision(decided(2))
    log.close()
    assert log.counts == {"failed": 1, "written": 1}
    assert [record["decision"] for record in read_log(path)] == [2]


def test_a_log_is_continued_and_a_line_that_a_crash_cut_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for number in (1, 2):
        log = DecisionLog(str(path), 100_000)
        log.decision(decided(number))
        log.close()
    path.write_bytes(path.read_bytes() + b'{"record":"decisi\n[1]\n')
    unreadable: Counter[str] = Counter()
    found = list(read_log(path, unreadable))
    assert [record["decision"] for record in found] == [1, 2]
    assert len({record["run"] for record in found}) == 2
    assert unreadable == {str(path): 2}


def test_a_log_goes_on_behind_a_line_that_a_crash_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"record":"decisi')
    log = DecisionLog(str(path), 100_000)
    log.decision(decided(1))
    log.close()
    assert [record["decision"] for record in read_log(path)] == [1]


def test_a_decision_that_a_policy_leaves_to_its_own_fallback_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Outside:
        name = "outside"

        def __init__(self) -> None:
            self.counts = {"out_of_range": 0}

        def reset(self, batch: int, seed: int) -> None: ...

        def decide(self, view: FleetView) -> Decision:
            self.counts["out_of_range"] += int(view.request["prompt_tokens"][0] > 100)
            return Decision(np.zeros(1, np.int64))

    host = PolicyHost(Outside(), require_compiled("fallback", load_policy("round-robin")), deadline_s=WAIT_S)
    host.watched_until_s = np.inf
    view = empty_view(1, 2)
    view.instances["candidate"] = 1
    for prompt_tokens in (10, 200, 300):
        view.request["prompt_tokens"] = prompt_tokens
        host.choose(view)
    assert [(each.by, each.reason) for each in host.recent] == [
        ("policy", ""),
        ("fallback", "out of range"),
        ("fallback", "out of range"),
    ]
    assert host.fallback_counts == {"out of range": 2}
    assert len(caplog.records) == 1


def test_a_log_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(OSError, match="nowhere"):
            async with a_fleet(1, decision_log=str(tmp_path / "nowhere" / "log")):
                pass

    run(test)
