"""Scaling by sleep: engines that say and do what vLLM 0.32 does on its routes for it, read in its source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from scripted import WAIT_S, ScriptedEngine, ask, expected_text, run, text_of, until
from told import PROMPT, QUICK, TOKENS, Told, become, on, states

from fleetpilot.dispatcher.check import check
from fleetpilot.dispatcher.config import ServeConfig, load_config
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.http.server import Exchange
from fleetpilot.dispatcher.scaling.sleep import CannotSleep, SleepActuator
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.view import STATE_ABSENT, STATE_READY


class SleepyEngine(ScriptedEngine):
    """An engine with a sleep mode.

    Attributes:
        asleep: it takes requests and does nothing on them.
        mode: ``on``; ``off``: it runs without --enable-sleep-mode, and its routes act as if; ``none``: no such routes.
        calls: of its routes, with their queries.
        status: with which it answers the next call to fall asleep or wake up, without doing it; 0: not.
        insomniac: it says that it sleeps and does not.
    """

    def __init__(self, name: str = "engine", *, asleep: bool = False, mode: str = "on"):
        super().__init__(name)
        self.token_s = 0.005
        self.asleep = asleep
        self.mode = mode
        self.calls: list[str] = []
        self.status = 0
        self.insomniac = False

    async def _answer(self, exchange: Exchange) -> None:
        dev = self.mode != "none"
        if exchange.path in ("/sleep", "/wake_up", "/is_sleeping") and dev:
            self._sleep_mode(exchange)
        elif exchange.path == "/server_info" and dev:
            config = {"model_config": {"enable_sleep_mode": self.mode == "on"}}
            exchange.respond(200, orjson.dumps({"vllm_config": config | {"scheduler_config": {"policy": "priority"}}}))
        elif exchange.path == "/server_info":
            exchange.respond(404, b'{"detail":"Not Found"}')
        else:
            if exchange.method == "POST" and exchange.path == "/v1/completions" and self.asleep:
                await asyncio.sleep(WAIT_S)
            await super()._answer(exchange)

    def _sleep_mode(self, exchange: Exchange) -> None:
        if exchange.path == "/is_sleeping":
            exchange.respond(200, orjson.dumps({"is_sleeping": self.asleep}))
            return
        self.calls.append(f"{exchange.path}?{exchange.query}")
        status, self.status = self.status, 0
        if status:
            exchange.respond(status, b"{}")
            return
        if not self.insomniac:
            self.asleep = exchange.path == "/sleep"
        exchange.respond(200, orjson.dumps({"status": "sleeping" if self.asleep else "awake", "tags": None}))


@asynccontextmanager
async def sleepy(
    policy: Any, *engines: SleepyEngine, ready: int | None = None, **config: Any
) -> AsyncIterator[tuple[Dispatcher, HttpClient]]:
    for engine in engines:
        await engine.start()
    urls = tuple(engine.url for engine in engines)
    settings: dict[str, Any] = (
        QUICK
        | {
            "engines": urls,
            "scaler": "sleep",
            "max_instances": len(engines),
        }
        | config
    )
    dispatcher = Dispatcher(ServeConfig(**settings), policy, SleepActuator(urls, ask_s=0.1))
    try:
        await dispatcher.start()
        await dispatcher.ready(sum(not engine.asleep for engine in engines) if ready is None else ready, WAIT_S)
        yield dispatcher, HttpClient(f"http://127.0.0.1:{dispatcher.port}")
    finally:
        await dispatcher.stop()
        for engine in engines:
            await engine.kill()


def test_an_engine_is_woken_up_serves_and_sleeps_when_its_requests_have_moved() -> None:
    async def test() -> None:
        policy, engines = Told(), (SleepyEngine(), SleepyEngine(asleep=True))
        async with sleepy(policy, *engines) as (dispatcher, client):
            assert states(dispatcher) == [STATE_READY, STATE_ABSENT]
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY)
            task = asyncio.create_task(ask(client, prompt=PROMPT, max_tokens=TOKENS))
            await on(dispatcher, 1)
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_ABSENT)
            assert text_of(await task) == expected_text(PROMPT, TOKENS)
            await until(lambda: engines[1].asleep)
            assert engines[1].calls == ["/wake_up?", "/sleep?level=1&mode=wait"]
            assert not engines[0].calls
            assert dispatcher.counts["migrations completed"] == 1
            assert dispatcher.counts["failovers"] == dispatcher.counts["engines_lost"] == 0
            assert (await ask(client)).status == 200
        assert [engine.asleep for engine in engines] == [False, True]  # they stay as they are

    run(test)


def test_where_all_sleep_the_least_are_woken_up() -> None:
    async def test() -> None:
        engines = [SleepyEngine(asleep=True) for _ in range(3)]
        async with sleepy(Told(), *engines, min_instances=2, ready=2) as (_, client):
            assert [engine.asleep for engine in engines] == [False, False, True]
            assert (await ask(client)).status == 200

    run(test)


@pytest.mark.parametrize("fault", ["refused", "not awake", "dead"])
def test_where_one_does_not_wake_up_another_does(fault: str) -> None:
    async def test() -> None:
        policy, engines = Told(), (SleepyEngine(), SleepyEngine(asleep=True), SleepyEngine(asleep=True))
        async with sleepy(policy, *engines) as (dispatcher, _):
            if fault == "refused":
                engines[1].status = 500
            elif fault == "not awake":
                engines[1].insomniac = True
            else:
                await engines[1].kill()
            policy.next = STATE_ABSENT
            await dispatcher.ready(2, WAIT_S)
            assert not engines[2].asleep
            assert dispatcher.counts["starts_given_up"] == 0

    run(test)


@pytest.mark.parametrize("fault", ["refused", "awake all the same"])
def test_an_engine_that_does_not_fall_asleep_serves_on(fault: str) -> None:
    async def test() -> None:
        policy, engines = Told(), (SleepyEngine(), SleepyEngine())
        async with sleepy(policy, *engines) as (dispatcher, client):
            for engine in engines:
                engine.status = 500 if fault == "refused" else 0
                engine.insomniac = fault != "refused"
            policy.next = STATE_READY
            await until(lambda: dispatcher.counts["scale_refusals"] == 1)
            await dispatcher.ready(2, WAIT_S)
            assert (await ask(client)).status == 200

    run(test)


def test_what_somebody_else_wakes_up_or_puts_to_sleep_is_seen() -> None:
    async def test() -> None:
        engines = (SleepyEngine(), SleepyEngine(asleep=True))
        async with sleepy(Told(), *engines) as (dispatcher, _):
            engines[1].asleep = False
            await dispatcher.ready(2, WAIT_S)
            engines[0].asleep = True
            await until(lambda: states(dispatcher) == [STATE_ABSENT, STATE_READY])

    run(test)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("off", "it has no sleep mode: .* --enable-sleep-mode"),
        ("none", "server_info was answered 404.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_engines_without_a_sleep_mode_are_refused(mode: str, words: str) -> None:
    async def test() -> None:
        engines = (SleepyEngine(), SleepyEngine(mode=mode))
        with pytest.raises(CannotSleep, match=f"engine http://.*{words}"):
            async with sleepy(Told(), *engines):
                pass
        assert not any(engine.calls for engine in engines)

    run(test)


def test_one_that_comes_later_without_a_sleep_mode_stays_awake() -> None:
    async def test() -> None:
        policy, first, second = Told(), SleepyEngine(), SleepyEngine(mode="off")
        await second.start()
        port = second.server.port
        await second.kill()
        second.start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        async with sleepy(policy, first, second, ready=1) as (dispatcher, client):
            await ScriptedEngine.start(second, port)
            await dispatcher.ready(2, WAIT_S)
            policy.next = STATE_READY
            await until(lambda: first.asleep)
            assert not second.calls
            assert (await ask(client)).status == 200

    run(test)


def test_check_says_who_cannot_sleep_and_asks_nothing_of_those_that_do() -> None:
    async def test() -> None:
        engines = (SleepyEngine(), SleepyEngine(asleep=True), SleepyEngine(mode="off"), SleepyEngine(mode="none"))
        for engine in engines:
            await engine.start()
        urls = tuple(engine.url for engine in engines)
        config = ServeConfig(engines=urls, policy="llumnix", profile="tiny-cpu", scaler="sleep", max_instances=4)
        findings = await check(config, timeout_s=5.0)
        failed = {finding.engine: finding.text for finding in findings if not finding.works}
        assert set(failed) == set(urls[2:])
        assert "--enable-sleep-mode" in failed[urls[2]]
        assert "VLLM_SERVER_DEV_MODE=1" in failed[urls[3]]
        assert [f.text for f in findings if f.engine == urls[1]] == ["sleeps: what else it can do is not known"]
        assert len(engines[1].seen) == 0
        for engine in engines:
            await engine.kill()

    run(test)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "max_instances = 3: expected from min_instances, 1, to the number of engines, 0, with scaler"),
        ({"engines": ("http://a", "http://b")}, "max_instances = 3: .* to the number of engines, 2, with scaler"),
        ({"engines": ("http://a",), "max_instances": 1, "min_instances": 2}, "expected from min_instances, 2, to"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    base = {"policy": "llumnix", "scaler": "sleep", "max_instances": 3}
    with pytest.raises(ValueError, match=words):
        load_config(base | settings, None, {})
