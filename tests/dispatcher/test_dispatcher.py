"""The dispatcher over real HTTP, in front of engines that fail on cue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from scripted import WAIT_S, ScriptedEngine, a_fleet, ask, expected_text, run, text_of, until

from fleetpilot.dispatcher import telemetry
from fleetpilot.dispatcher.config import ServeConfig, load_config
from fleetpilot.dispatcher.engine import EngineState
from fleetpilot.dispatcher.http.client import CallError, HttpClient
from fleetpilot.dispatcher.relay import Relay
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.view import KIND_DISPATCH, KIND_SOURCE, NONE, REJECT, STATE_DRAINING, Decision, FleetView

PROMPT = [1, 2, 3, 4]
LEDGER = ("in_flight", "urgent", "unstarted", "unstarted_prompt_tokens", "started_prompt_tokens", "streamed_tokens",
          "predicted_output_tokens", "unstarted_prompt_blocks", "head_prompt_blocks")  # fmt: skip


def is_empty(dispatcher: Dispatcher) -> bool:
    """Whether the ledger holds nothing."""
    instances = dispatcher.fleet.view.instances[0]
    return not any(dispatcher.at) and all(np.abs(instances[name]).max() < 1e-6 for name in LEDGER)


def the_relay(dispatcher: Dispatcher) -> Relay:
    (relay,) = (relay for at in dispatcher.at for relay in at.values())
    return relay


class Always:
    """A policy of fixed choices."""

    name = "always"
    kinds = (KIND_DISPATCH, KIND_SOURCE)

    def __init__(self, slot: int):
        self.slot = slot

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        choice = self.slot if view.fleet["kind"][0] == KIND_DISPATCH else NONE
        return Decision(np.array([choice]))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("tracks", [True, False])
def test_answers_equal_the_engines_own(route: str, tracks: bool) -> None:
    async def test() -> None:
        async with a_fleet(1, migration=tracks, failover=tracks) as (dispatcher, client, (engine,)):
            content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in route else {}
            name = [(b"x-request-id", b"mine")]
            for stream in (True, False):
                fields = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
                direct = await ask(HttpClient(engine.url), name, route, **content, **fields)
                ours = await ask(client, name, route, **content, **fields)
                assert (ours.status, ours.body) == (direct.status, direct.body)
            await until(lambda: is_empty(dispatcher))
            if not tracks:
                assert engine.seen[-1][0] == engine.seen[-2][0]

    run(test)


def test_an_engine_that_does_not_come_up_is_warned_of_until_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(telemetry, "_RETRY_S", 0.01)

    async def test() -> None:
        engine = ScriptedEngine("late")
        await engine.start()
        port = engine.server.port
        await engine.kill()
        dispatcher = Dispatcher(ServeConfig(engines=(engine.url,), port=0, profile="tiny-cpu"))
        await dispatcher.start()
        await until(lambda: "is not up, still asking: " in caplog.text)
        assert engine.url in caplog.text
        await engine.start(port)
        await dispatcher.ready(1, WAIT_S)
        await dispatcher.stop()
        await engine.kill()

    run(test)
    assert caplog.text.count("still asking") == 1


def test_requests_are_spread_and_forgotten() -> None:
    async def test() -> None:
        async with a_fleet(3) as (dispatcher, client, engines):
            clients = [HttpClient(client.origin) for _ in range(30)]
            answers = await asyncio.gather(*(ask(c, prompt=[n, 5, 6]) for n, c in enumerate(clients)))
            assert [text_of(a) for a in answers] == [expected_text([n, 5, 6], 40) for n in range(30)]
            assert sorted(len(engine.seen) - 1 for engine in engines) == [10, 10, 10]
            assert is_empty(dispatcher)
            assert dispatcher.fleet.index.tokens == [0.0, 0.0, 0.0]  # no full block

    run(test)


@pytest.mark.parametrize("fault", ["kill", "cut", "error", "garbage", "stall"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_survives_its_engine(fault: str, route: str) -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0), stalled_s=1.0) as (dispatcher, client, (first, second)):
            setattr(first, f"{fault}_after", 10)
            first.token_s = 0.01
            content: dict[str, Any] = {"prompt": PROMPT}
            prompt = PROMPT
            if "chat" in route:
                content, prompt = {"messages": [{"role": "user", "content": "hi"}]}, [9, ord("h"), ord("i")]
            options = {"include_usage": True}
            task = asyncio.create_task(ask(client, route=route, stream_options=options, **content))
            if fault == "kill":
                await until(lambda: any(r.tokens > 5 for at in dispatcher.at for r in at.values()))
                await first.kill()
            answer = await task
            assert text_of(answer) == expected_text(prompt, 40)
            last = orjson.loads(answer.body.split(b"\n\n")[-3][6:])
            assert last["usage"]["completion_tokens"] == 40
            assert last["usage"]["prompt_tokens"] == len(prompt)
            assert len({orjson.loads(line[6:])["id"] for line in answer.body.split(b"\n\n")[:-2]}) == 1
            resumed, _ = second.seen[-1]
            assert resumed["max_tokens"] + len(resumed["prompt"]) == len(prompt) + 40
            assert dispatcher.counts["failovers"] == 1
            await until(lambda: is_empty(dispatcher))

    run(test)


def test_a_request_without_an_answer_yet_is_sent_elsewhere_once() -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0)) as (dispatcher, client, (first, second)):
            first.refuse = (500, {})
            for stream in (True, False):
                answer = await ask(client, stream=stream, prompt=PROMPT)
                assert answer.status == 200
            assert dispatcher.counts["retries"] == 2
            second.refuse = (500, {})
            answer = await ask(client)
            assert answer.status == 500
            assert len(first.seen) == 1 + 3
            assert is_empty(dispatcher)

    run(test)


@pytest.mark.parametrize("status", [429, 503])
def test_a_storm_of_refusals_is_not_amplified_and_opens_no_breaker(status: int) -> None:
    async def test() -> None:
        async with a_fleet(2, retry_share=0.1) as (dispatcher, client, engines):
            for engine in engines:
                engine.refuse = (status, {b"retry-after": b"0"})
            clients = [HttpClient(client.origin) for _ in range(100)]
            answers = await asyncio.gather(*(ask(c) for c in clients))
            assert {answer.status for answer in answers} == {status}
            sent = sum(len(engine.seen) - 1 for engine in engines)
            assert sent <= (100 if status == 429 else 100 + 10 + 10)
            assert dispatcher.counts["breaker_openings"] == 0
            for engine in engines:
                engine.refuse = None
            assert (await ask(client)).status == 200

    run(test)


def test_an_engine_that_admits_no_more_is_left_alone_for_as_long_as_it_says() -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0)) as (dispatcher, client, (first, _second)):
            first.refuse = (503, {b"retry-after": b"20"})
            for _ in range(3):
                assert (await ask(client)).status == 200
            assert len(first.seen) == 1 + 1
            assert dispatcher.fleet.host.fallbacks["illegal choice"] >= 2
            assert dispatcher.fleet.engines[0].state == EngineState.READY

    run(test)


def test_bad_requests_of_clients_harm_no_engine() -> None:
    async def test() -> None:
        async with a_fleet(1) as (dispatcher, client, (_engine,)):
            for _ in range(20):
                assert (await ask(client, model="other")).status == 404
            assert (await ask(client)).status == 200
            assert dispatcher.counts["breaker_openings"] == 0
            assert is_empty(dispatcher)

    run(test)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", b"JSON"),
        (b"{", b"JSON"),
        (b"[1]", b"expected an object"),
        (b'{"model":1}', b"model = 1"),
        (b'{"model":"tiny","stream":"yes"}', b"stream = 'yes'"),
        (b'{"model":"tiny","max_tokens":"5"}', b"max_tokens = '5'"),
        (b'{"model":"tiny","max_tokens":1.5}', b"max_tokens = 1.5"),
        (b'{"model":"tiny","priority":true}', b"priority = True"),
        (b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]}}', b"remote_engine_id"),
        (b'{"model":"tiny","prompt":"' + b"\xff" + b'"}', b"JSON"),
        (b'{"model":"tiny","kv_transfer_params":{"do_remote_prefill":true}}', b"kv_transfer_params"),
    ],
)
def test_a_malformed_request_gets_an_error_that_names_the_field(body: bytes, words: bytes) -> None:
    async def test() -> None:
        async with a_fleet(1) as (_dispatcher, client, (engine,)):
            answer = await client.fetch("POST", "/v1/completions", body, timeout_s=WAIT_S)
            assert answer.status == 400
            assert words in answer.body
            assert len(engine.seen) == 1

    run(test)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/chat/completions", {"messages": 5}),
        ("/v1/chat/completions", {"messages": "text"}),
        ("/v1/chat/completions", {"messages": [5]}),
        ("/v1/completions", {"stream_options": "all"}),
        ("/v1/completions", {"prompt": {"a": 1}}),
    ],
)
def test_what_the_dispatcher_does_not_understand_is_for_the_engine_to_judge(route: str, fields: Any) -> None:
    async def test() -> None:
        async with a_fleet(1) as (dispatcher, client, (engine,)):
            engine.refuse = (400, {})
            assert (await ask(client, route=route, **fields)).status == 400
            assert len(engine.seen) == 2
            assert is_empty(dispatcher)

    run(test)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_a_client_that_leaves_aborts_its_request(stream: bool, tracks: bool) -> None:
    async def test() -> None:
        async with a_fleet(1, failover=tracks, migration=tracks) as (dispatcher, client, (engine,)):
            engine.token_s = 0.05
            task = asyncio.create_task(ask(client, stream=stream, max_tokens=1000))
            await until(lambda: engine.running == 1)
            task.cancel()
            await until(lambda: engine.aborted == 1 and engine.running == 0)
            await until(lambda: is_empty(dispatcher))
            assert dispatcher.outcomes["client left"] == 1

    run(test)


async def running_request(dispatcher: Dispatcher, client: HttpClient, **fields: Any) -> asyncio.Task[Any]:
    """A stream that has begun."""
    task = asyncio.create_task(ask(client, prompt=PROMPT, **fields))
    await until(lambda: any(relay.movable for at in dispatcher.at for relay in at.values()))
    return task


def test_a_running_request_moves_twice_and_the_client_sees_one_stream() -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0)) as (dispatcher, client, (first, second)):
            for engine in (first, second):
                engine.token_s = 0.02
            direct = await ask(HttpClient(second.url), [(b"x-request-id", b"mine")], prompt=PROMPT, max_tokens=100)
            task = asyncio.create_task(ask(client, [(b"x-request-id", b"mine")], prompt=PROMPT, max_tokens=100))
            for destination in (1, 0):
                await until(lambda: any(relay.movable for at in dispatcher.at for relay in at.values()))
                relay = the_relay(dispatcher)
                migration = dispatcher.move(relay, destination)
                await until(lambda m=migration: m.outcome and m.resumed_s)
                assert migration.outcome == "completed"
                assert relay.slot == destination
            assert (await task).body == direct.body
            assert second.copied == [("engine0-1", second.copied[0][1])]
            assert [body.get("priority") for body, _ in first.seen if body.get("stream")] == [None, -1]
            await until(lambda: is_empty(dispatcher))
            assert not dispatcher.fleet.view.instances[0]["migrating"].any()

    run(test)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"probe_hangs": True}, "probe late"),
        ({"kv": False}, "nothing pinned"),
        ({"refuse": (503, {})}, "probe refused"),
    ],
)
def test_trouble_at_the_source_leaves_the_request_where_it_is(fault: dict[str, Any], outcome: str) -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0), probe_deadline_s=0.2) as (dispatcher, client, (first, _)):
            first.token_s = 0.02
            task = await running_request(dispatcher, client, max_tokens=60)
            vars(first).update(fault)
            migration = dispatcher.move(the_relay(dispatcher), 1)
            await until(lambda: migration.outcome)
            assert migration.outcome == outcome
            assert text_of(await task) == expected_text(PROMPT, 60)
            assert dispatcher.counts["failovers"] == 0

    run(test)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [({"copy_hangs": True}, "copy late"), ({"refuse": (503, {})}, "copy refused"), ("dead", "copy failed")],
)
def test_trouble_at_the_destination_leaves_the_request_where_it_is(fault: Any, outcome: str) -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0), copy_deadline_s=0.2) as (dispatcher, client, (first, second)):
            first.token_s = 0.02
            task = await running_request(dispatcher, client, max_tokens=60)
            if fault == "dead":
                await second.kill()
            else:
                vars(second).update(fault)
            migration = dispatcher.move(the_relay(dispatcher), 1)
            await until(lambda: migration.outcome)
            assert migration.outcome == outcome
            assert text_of(await task) == expected_text(PROMPT, 60)
            assert first.aborted == 0

    run(test)


def test_a_destination_that_copies_but_does_not_take_the_request_up_costs_nothing_but_time() -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0)) as (dispatcher, client, (first, second)):
            first.token_s = 0.02
            second.refuse, second.refuse_if = (500, {}), lambda body: body.get("stream")
            task = await running_request(dispatcher, client, max_tokens=60)
            migration = dispatcher.move(the_relay(dispatcher), 1)
            await until(lambda: migration.outcome)
            assert text_of(await task) == expected_text(PROMPT, 60)
            assert dispatcher.counts["migrations not taken up"] == 1
            await until(lambda: is_empty(dispatcher))

    run(test)


@pytest.mark.parametrize("stage", ["probe_hangs", "copy_hangs"])
@pytest.mark.parametrize("who", ["client", "source"])
def test_whoever_dies_during_a_migration(stage: str, who: str) -> None:
    async def test() -> None:
        async with a_fleet(3, Always(0)) as (dispatcher, client, (first, second, _third)):
            first.token_s = 0.02
            task = await running_request(dispatcher, client, max_tokens=60)
            first.probe_hangs = second.copy_hangs = False
            setattr(first if stage == "probe_hangs" else second, stage, True)
            dispatcher.move(the_relay(dispatcher), 1)
            await until(lambda: first.pinned - {"engine0-0"} or stage == "probe_hangs")
            await asyncio.sleep(0.05)
            if who == "client":
                task.cancel()
                await until(lambda: first.aborted >= 1)
            else:
                await first.kill()
                assert text_of(await task) == expected_text(PROMPT, 60)
                assert dispatcher.counts["failovers"] == 1
            second.copy_hangs = False
            await until(lambda: is_empty(dispatcher))

    run(test)


def test_what_cannot_be_rebuilt_is_not_moved() -> None:
    async def test() -> None:
        async with a_fleet(1) as (dispatcher, client, (engine,)):
            engine.token_s = 0.02
            task = asyncio.create_task(ask(client, presence_penalty=0.5, max_tokens=30))
            await until(lambda: any(relay.tokens for at in dispatcher.at for relay in at.values()))
            assert not the_relay(dispatcher).movable
            assert (await task).status == 200

    run(test)


class Rejecting:
    """Rejects the requests of so many prompt tokens or more; places the others, at first on the first engine."""

    name = "rejecting"

    def __init__(self, tokens: int):
        self.tokens = tokens

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        rejected = view.request["prompt_tokens"][0] >= self.tokens
        return Decision(np.array([REJECT if rejected else np.flatnonzero(view.candidates[0])[0]]))


def test_what_a_policy_rejects_is_answered_at_once() -> None:
    async def test() -> None:
        async with a_fleet(2, Rejecting(5)) as (dispatcher, client, _):
            await client.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)
            assert (await ask(client, prompt=[1, 2, 3, 4])).status == 200
            answer = await ask(client, prompt=[1, 2, 3, 4, 5])
            assert answer.status == 429
            assert dict(answer.headers)[b"retry-after"] == b"1"
            assert orjson.loads(answer.body)["error"]["code"] == 429
            page = await client.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)
            newest = orjson.loads(page.body)["decisions"][0]
            assert (newest["choice"], newest["read"]) == ("reject", [])
            assert dispatcher.outcomes == {"finished": 1, "rejected": 1}
            assert dispatcher.fleet.host.fallbacks == {}
            assert is_empty(dispatcher)

    run(test)


def test_a_stream_that_has_begun_is_never_rejected() -> None:
    async def test() -> None:
        policy = Rejecting(1000)
        async with a_fleet(2, policy, failover=True) as (dispatcher, client, engines):
            task = asyncio.create_task(ask(client, max_tokens=200))
            await until(lambda: any(relay.tokens > 3 for relay in dispatcher.at[0].values()))
            policy.tokens = 0
            await engines[0].kill()
            answer = await task
            assert answer.status == 200
            assert text_of(answer) == expected_text([1, 2, 3, 4], 200)
            assert dispatcher.fleet.host.fallbacks == {"illegal choice": 1}

    run(test)


def test_all_engines_down_is_waited_for_then_said() -> None:
    async def test() -> None:
        async with a_fleet(1, max_hold_s=0.3) as (dispatcher, client, (engine,)):
            port = engine.server.port
            await engine.kill()
            await until(lambda: dispatcher.fleet.engines[0].state == EngineState.FAILED)
            answer = await ask(client)
            assert answer.status == 503
            assert dict(answer.headers)[b"retry-after"] == b"1"
            assert (await client.fetch("GET", "/ready", timeout_s=WAIT_S)).status == 503
            await engine.start(port)
            await until(lambda: dispatcher.fleet.engines[0].state == EngineState.READY)
            assert (await ask(client)).status == 200
            assert is_empty(dispatcher)

    run(test)


def test_requests_that_come_before_an_engine_is_ready_wait_for_it() -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        await engine.start()
        port = engine.server.port
        await engine.kill()
        config = ServeConfig(engines=(f"http://127.0.0.1:{port}",), port=0, policy="round-robin", profile="tiny-cpu")
        dispatcher = Dispatcher(config)
        await dispatcher.start()
        client = HttpClient(f"http://127.0.0.1:{dispatcher.port}")
        tasks = [asyncio.create_task(ask(HttpClient(client.origin))) for _ in range(3)]
        await until(lambda: dispatcher.fleet.held == 3)
        await engine.start(port)
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200, 200, 200]
        await dispatcher.stop()
        await engine.kill()

    run(test)


@pytest.mark.parametrize(
    "text", [b"", b"nonsense", b"\nvllm:num_requests_running NaN\n", b"\nvllm:kv_cache_usage_perc 7\n", b"\xff\xff"]
)
def test_an_engine_that_lies_in_its_metrics_still_serves(text: bytes) -> None:
    async def test() -> None:
        async with a_fleet(2) as (dispatcher, client, (first, _)):
            first.metrics = text
            await until(lambda: dispatcher.counts["unreadable_polls"] > 2)
            assert {(await ask(client)).status for _ in range(4)} == {200}
            assert all(engine.state == EngineState.READY for engine in dispatcher.fleet.engines)

    run(test)


class Sulky:
    """A policy that misbehaves."""

    name = "sulky"

    def __init__(self, how: str):
        self.how = how

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        if self.how == "raises":
            raise RuntimeError("no idea")
        if self.how == "sleeps":
            import time

            time.sleep(0.3)
        return Decision(np.array([{"nan": -7, "beyond": 99}.get(self.how, 0)]))


@pytest.mark.parametrize(
    ("how", "reason"),
    [("raises", "RuntimeError"), ("nan", "illegal choice"), ("beyond", "illegal choice"), ("sleeps", "timeout")],
)
def test_the_fallback_decides_where_the_policy_cannot(how: str, reason: str) -> None:
    async def test() -> None:
        async with a_fleet(2, Sulky(how)) as (dispatcher, client, _):
            assert (await ask(client)).status == 200
            assert dispatcher.fleet.host.fallbacks[reason] == 1

    run(test)


@pytest.mark.parametrize("text", ["", " ", ",", "a,,b"])
def test_an_empty_key_opens_nothing(text: str) -> None:
    engines, name = {"engines": ("http://127.0.0.1:1",)}, "FLEETPILOT_SERVE_API_KEYS"
    with pytest.raises(ValueError, match=f"{name}: expected texts with commas between them, none of them empty"):
        load_config(engines, None, {name: text})
    assert load_config(engines, None, {name: "a, b"}).api_keys == ("a", "b")
    with pytest.raises(ValueError, match="api_keys: one is empty"):
        ServeConfig(**engines, api_keys=("",))


def test_keys_are_asked_for_and_kept_from_engines() -> None:
    async def test() -> None:
        async with a_fleet(1, api_keys=("secret", "other"), engine_api_key="inner") as (_dispatcher, client, (engine,)):
            assert (await ask(client)).status == 401
            assert (await ask(client, [(b"authorization", b"Bearer secre")])).status == 401
            assert (await ask(client, [(b"authorization", b"Bearer other")])).status == 200
            assert engine.seen[-1][1][b"authorization"] == b"Bearer inner"
            assert (await client.fetch("GET", "/health", timeout_s=WAIT_S)).status == 200

    run(test)


def test_priorities_leave_room_for_moved_requests() -> None:
    async def test() -> None:
        async with a_fleet(1) as (_dispatcher, client, (engine,)):
            await ask(client, priority=3)
            await ask(client, [(b"x-vllm-priority", b"-2")])
            assert [body.get("priority") for body, _ in engine.seen[1:]] == [6, -4]
            assert b"x-vllm-priority" not in engine.seen[-1][1]
            assert (await ask(client, [(b"x-vllm-priority", b"high")])).status == 400

    run(test)


def test_engines_come_and_go_with_their_file(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [ScriptedEngine(f"engine{n}") for n in range(3)]
        for engine in engines:
            await engine.start()
            engine.token_s = 0.01
        file = tmp_path / "engines"
        file.write_text(f"# the fleet\n{engines[0].url}\n")
        config = ServeConfig(
            engines_file=str(file), port=0, policy="join-shortest-queue", profile="tiny-cpu", max_hold_s=60
        )
        dispatcher = Dispatcher(config)
        await dispatcher.start()
        client = HttpClient(f"http://127.0.0.1:{dispatcher.port}")
        await dispatcher.ready(1, WAIT_S)
        task = await running_request(dispatcher, client, max_tokens=300)
        file.write_text(f"{engines[1].url}/\n{engines[2].url}\n")
        await until(lambda: dispatcher.fleet.engines[0].state == EngineState.DRAINING)
        assert dispatcher.fleet.view.instances[0]["state"][0] == STATE_DRAINING
        await dispatcher.ready(2, WAIT_S)
        assert {(await ask(client)).status for _ in range(4)} == {200}
        assert text_of(await task) == expected_text(PROMPT, 300)
        await until(lambda: dispatcher.fleet.engines[0].state == EngineState.ABSENT)
        assert len(engines[0].seen) == 2
        file.write_text("not an url\n")  # changes nothing
        await until(lambda: dispatcher.counts["unreadable_engine_files"] > 0)
        assert (await ask(client)).status == 200
        file.write_text("\n".join(engine.url for engine in engines))
        await dispatcher.ready(3, WAIT_S)
        assert [engine.url for engine in dispatcher.fleet.engines] == [engine.url for engine in engines]
        await dispatcher.stop()
        for engine in engines:
            await engine.kill()

    run(test)


def test_what_is_not_served_is_not_passed_on() -> None:
    async def test() -> None:
        async with a_fleet(1) as (_dispatcher, client, _):
            for method, path, status in (
                ("GET", "/v1/completions", 405),
                ("POST", "/reset_prefix_cache", 404),
                ("POST", "/sleep", 404),
                ("GET", "/", 404),
            ):
                assert (await client.fetch(method, path, timeout_s=WAIT_S)).status == status
            listing = orjson.loads((await client.fetch("GET", "/v1/models", timeout_s=WAIT_S)).body)
            assert [model["id"] for model in listing["data"]] == ["tiny"]
            text = (await client.fetch("GET", "/metrics", timeout_s=WAIT_S)).body.decode()
            assert 'fleetpilot_instance_state{instance="' in text

    run(test)


def test_a_stream_that_cannot_go_on_is_cut_and_never_looks_whole() -> None:
    async def test() -> None:
        async with a_fleet(1, failover=False, migration=False) as (dispatcher, client, (engine,)):
            engine.cut_after = 5
            with pytest.raises(CallError):
                await ask(client)
            assert is_empty(dispatcher)
            assert dispatcher.outcomes["failed"] == 1

    run(test)


@pytest.mark.parametrize("at_home", [True, False])
def test_a_learned_policy_serves_and_what_it_leaves_to_its_baseline_is_counted(at_home: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from fleetpilot.agents import load_policy
    from fleetpilot.agents.export import export_policy
    from fleetpilot.agents.schema import sizes_for
    from fleetpilot.agents.scorer import SetScorer

    scorer = SetScorer(sizes_for((KIND_DISPATCH,)))
    for name in ("instances", "request", "fleet"):
        getattr(scorer, f"low_{name}").fill_(-10.0)
        getattr(scorer, f"high_{name}").fill_(10.0 if at_home else -9.0)
    folder = tmp_path / "policy"
    export_policy(scorer, (KIND_DISPATCH,), folder, fallback="lmetric", mode="sample", provenance={})

    async def test() -> None:
        async with a_fleet(2, load_policy(str(folder))) as (dispatcher, client, _):
            answers = await asyncio.gather(*(ask(HttpClient(client.origin)) for _ in range(8)))
            assert all(answer.status == 200 for answer in answers)
            fallbacks = dispatcher.fleet.host.fallback_counts
            assert fallbacks == ({} if at_home else {"out of range": 8})
            shown = (await client.fetch("GET", "/metrics", timeout_s=WAIT_S)).body.decode()
            assert ('reason="out of range"' in shown) == (not at_home)

    run(test)
