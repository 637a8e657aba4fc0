"""Engines that die: their streams go on elsewhere. Last of the folder, since every test here costs a start."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest
from driver import (
    CHAT,
    COMPLETIONS,
    Steered,
    Stream,
    a_body,
    assert_same,
    direct_stream,
    metrics,
    move,
    relay_of,
    run,
    serving,
    settled,
    stream,
    token_ids,
    until,
)
from engines import Engine

from fleetpilot.dispatcher import migration as migration_module
from fleetpilot.dispatcher.engine import EngineState
from fleetpilot.dispatcher.service import Dispatcher

pytestmark = pytest.mark.vllm

Engines = tuple[Engine, Engine]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"return_token_ids": True},
    {"logprobs": 1},
]


def eight_requests() -> list[tuple[str, dict[str, Any]]]:
    generator = random.Random(77)
    requests: list[tuple[str, dict[str, Any]]] = []
    for number in range(8):
        prompt = token_ids(generator, 40 * (number + 1))
        content: dict[str, Any] = {"prompt": prompt}
        route = COMPLETIONS
        if number % 4 == 0:
            route, content = CHAT, {"messages": [{"role": "user", "content": "Tell me. " * (10 + number)}]}
        requests.append((route, a_body(max_tokens=200) | content | OPTIONS[number % 4]))
    return requests


async def streams_survive(engines: Engines, survivor: int, end: Callable[[], None]) -> None:
    """Eight streams are on the other engine when it ends: their clients see nothing of it."""
    requests = eight_requests()
    victim = 1 - survivor
    async with serving(engines, Steered(victim)) as (dispatcher, client):
        names = [f"eight-{number}" for number in range(8)]
        tasks = [
            asyncio.create_task(stream(client, body, route, name))
            for (route, body), name in zip(requests, names, strict=True)
        ]
        relays = [await relay_of(dispatcher, name) for name in names]
        await until(lambda: all(relay.tokens >= 8 for relay in relays))
        early = [asyncio.create_task(without_a_token(client, streamed)) for streamed in (True, False)]
        await until(lambda: dispatcher.counts["dispatched"] == len(tasks) + len(early))
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        end()
        answers = await asyncio.gather(*tasks)
        assert [relay.slot for relay in relays] == [survivor] * 8
        assert dispatcher.counts["failovers"] + dispatcher.counts["retries"] == len(tasks) + len(early)
        assert dispatcher.counts["failovers"] >= 8
        await asyncio.gather(*early)
        assert dispatcher.outcomes == {"finished": len(tasks) + len(early)}
        await lost(dispatcher, victim)
    direct = await asyncio.gather(*(direct_stream(engines[survivor], body, route) for route, body in requests))
    for ours, expected in zip(answers, direct, strict=True):
        assert_same(ours, expected)
        assert ours.finish_reason == "length"
    await settled(engines[survivor])


async def without_a_token(client: httpx.AsyncClient, streamed: bool) -> None:
    """A request that is in its prefill when the engine ends."""
    body = a_body(prompt=token_ids(random.Random(streamed), 2500), max_tokens=3)
    answer = await client.post(COMPLETIONS, json=body | {"stream": streamed})
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") if streamed else answer.json()["usage"]["completion_tokens"] == 3


async def lost(dispatcher: Dispatcher, slot: int) -> None:
    await until(lambda: dispatcher.fleet.engines[slot].state == EngineState.FAILED)


def test_streams_survive_a_killed_engine_and_nothing_moves_to_a_dead_one(engines: Engines) -> None:
    async def test() -> None:
        await streams_survive(engines, 0, engines[1].kill)
        alive, dead = engines
        body = a_body(prompt=token_ids(random.Random(5), 600), max_tokens=120)
        async with serving(engines, Steered(0)) as (dispatcher, client):
            task = asyncio.create_task(stream(client, body, name="stays"))
            relay = await relay_of(dispatcher, "stays")
            migration = await move(dispatcher, relay, 1)
            assert migration.outcome == "copy failed"
            ours = await task
            assert relay.answer is not None
            assert relay.answer.seams == 0
        assert not dead.alive
        assert_same(ours, await direct_stream(alive, body))
        await settled(alive)

    run(test)


def test_a_source_killed_during_a_copy(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination is stopped while the source is killed, so that the copy is under way for certain."""
    source, destination = engines
    copy = migration_module._copy

    async def copy_from_a_dying_source(*arguments: Any) -> None:
        destination.signal(signal.SIGSTOP)
        copying = asyncio.create_task(copy(*arguments))
        await asyncio.sleep(0.5)
        source.kill()
        await asyncio.sleep(0.5)
        destination.signal(signal.SIGCONT)
        await copying

    monkeypatch.setattr(migration_module, "_copy", copy_from_a_dying_source)

    async def test() -> None:
        body = a_body(prompt=token_ids(random.Random(6), 1000), max_tokens=600)
        async with serving(engines) as (dispatcher, client):
            task = asyncio.create_task(stream(client, body, name="moving"))
            relay = await relay_of(dispatcher, "moving")
            migration = await move(dispatcher, relay, 1, at_tokens=20)
            assert migration.outcome in ("left", "copy refused", "copy late")
            ours = await task
            assert dispatcher.counts["failovers"] == 1
            assert relay.slot == 1
            await lost(dispatcher, 0)
            assert_same(ours, await direct_stream(destination, body))
            await settled(destination)
            await asyncio.to_thread(source.start)  # the dispatcher takes it back by itself
            await until(lambda: dispatcher.fleet.engines[0].state == EngineState.READY)
            before = (await metrics(source))["vllm:generation_tokens_total", ""]
            again: Stream = await stream(client, body)
            assert_same(again, ours)
            assert (await metrics(source))["vllm:generation_tokens_total", ""] > before

    run(test)


def test_streams_survive_an_engine_that_is_shut_down(engines: Engines) -> None:
    """vLLM ends all its streams with `finish_reason` "abort" then."""

    async def test() -> None:
        await streams_survive(engines, 0, engines[1].terminate)

    run(test)
