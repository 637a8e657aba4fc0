"""Running requests move between real engines, and their clients see nothing of it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from driver import (
    CHAT,
    COMPLETIONS,
    COMPUTED,
    NIXL,
    Steered,
    Stream,
    a_body,
    assert_same,
    direct_stream,
    gauges,
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
from engines import BLOCK_TOKENS, Engine

from fleetpilot.dispatcher import migration as migration_module
from fleetpilot.dispatcher.migration import Migration
from fleetpilot.dispatcher.relay import Relay
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.view import KIND_DESTINATION, KIND_DISPATCH, KIND_SOURCE, Decision, FleetView

pytestmark = pytest.mark.vllm

Engines = tuple[Engine, Engine]
Counters = dict[tuple[str, str], float]

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.ABCDEFGHIJ"
ANSWER_TOKENS = 400
"""Far more than come while a request is copied, on a busy machine too."""
LEAST_LEFT_TOKENS = 20
"""Still to come behind the last seam."""
LEAST_SHARE_BY_NIXL = 0.95
"""Of the contexts when they stop. What comes while a copy is made is computed: of a short context that may be more."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"logprobs": 1, "return_token_ids": True},
    {"priority": -2, "min_tokens": 3},
    {"stop": ["never to be met"]},
    {"repetition_penalty": 1.05, "logit_bias": {"300": 1.0}},
]


def a_request(number: int) -> tuple[str, dict[str, Any], random.Random]:
    """Request `number` of a mixture: ids, text and chats of 500 to 3,000 tokens with all that may move."""
    generator = random.Random(1000 + number)
    length = generator.randrange(500, 3000 - ANSWER_TOKENS)
    options = dict(OPTIONS[number % len(OPTIONS)])
    body = a_body(max_tokens=ANSWER_TOKENS) | options
    kind = number % 3
    if kind == 0:
        return COMPLETIONS, body | {"prompt": token_ids(generator, length)}, generator
    text = "".join(generator.choices(LETTERS, k=length + length // 20))
    if kind == 1:
        return COMPLETIONS, body | {"prompt": text}, generator
    body.pop("logprobs", None)
    return CHAT, body | {"messages": [{"role": "user", "content": text}]}, generator


def context_tokens(relay: Relay) -> int:
    assert relay.answer is not None
    return len(relay.answer.prompt_ids) + len(relay.answer.output_ids)


@dataclass(frozen=True)
class Moved:
    """Tokens of a request at its new engine: by NIXL, computed, in the last copy; and its context when it stopped."""

    by_nixl: float
    computed: float
    copied: int
    context: int

    @property
    def all_copies_are_used(self) -> bool:
        """Nothing is computed but what lies behind the last whole block of the last copy, or at least a token."""
        found = min(self.copied, self.context - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return self.computed <= self.context - found


async def move_and_count(
    dispatcher: Dispatcher, engines: Engines, relay: Relay, at_tokens: int, before: Counters
) -> Moved:
    """Move a request to the other engine, whose counters stood so before."""
    destination = 1 - relay.slot
    begun_at = relay.tokens
    migration = await move(dispatcher, relay, destination, at_tokens)
    assert migration.outcome == "completed", f"from token {begun_at} ({at_tokens} wanted) to {relay.tokens}"
    context = context_tokens(relay)
    assert ANSWER_TOKENS - relay.tokens > LEAST_LEFT_TOKENS
    await until(lambda: relay.ended or migration.resumed_s)
    after = await metrics(engines[destination])
    by_nixl, computed = (after[source] - before[source] for source in (NIXL, COMPUTED))
    return Moved(by_nixl, computed, migration.copied_tokens, context)


def share_by_nixl(moved: list[Moved]) -> float:
    return sum(each.by_nixl for each in moved) / sum(each.context for each in moved)


def test_moved_streams_are_those_of_unmoved_requests(engines: Engines) -> None:
    """Sixteen requests at random moments. One moves at a time, so that the counters are its own, while others end."""

    async def test() -> None:
        turns, slots = asyncio.Lock(), asyncio.Semaphore(3)
        async with serving(engines) as (dispatcher, client):

            async def one(number: int) -> Moved:
                route, body, generator = a_request(number)
                name = f"moved-{number}"
                async with slots:
                    async with turns:
                        before = await metrics(engines[1])
                        task = asyncio.create_task(stream(client, body, route, name))
                        relay = await relay_of(dispatcher, name)
                        moment = generator.randrange(1, 40)
                        moved = await move_and_count(dispatcher, engines, relay, moment, before)
                    await compare(engines, await task, route, body)
                return moved

            moved = await asyncio.gather(*(one(number) for number in range(16)))
            print(*moved, sep="\n")
            assert all(each.by_nixl >= each.copied and each.all_copies_are_used for each in moved)
            assert share_by_nixl(moved) >= LEAST_SHARE_BY_NIXL
            assert_moved(dispatcher, 16)
        await settled(*engines)

    run(test)


def test_streams_moved_there_and_back(engines: Engines) -> None:
    """Eight requests, one after another. To the first engine, which has most of them, only what is new is copied."""

    async def test() -> None:
        there: list[Moved] = []
        back: list[Moved] = []
        async with serving(engines) as (dispatcher, client):
            for number in range(16, 24):
                route, body, generator = a_request(number)
                before = await metrics(engines[1])
                task = asyncio.create_task(stream(client, body, route, f"twice-{number}"))
                relay = await relay_of(dispatcher, f"twice-{number}")
                moment = generator.randrange(1, 25)
                there.append(await move_and_count(dispatcher, engines, relay, moment, before))
                before = await metrics(engines[0])
                moment = relay.tokens + generator.randrange(1, 6)
                back.append(await move_and_count(dispatcher, engines, relay, moment, before))
                assert relay.answer is not None
                assert relay.answer.seams == 2
                await compare(engines, await task, route, body)
            assert_moved(dispatcher, 16)
        print(*there, *back, sep="\n")
        assert all(each.by_nixl >= each.copied for each in there)
        assert all(each.all_copies_are_used for each in there + back)
        assert share_by_nixl(there) >= LEAST_SHARE_BY_NIXL
        assert sum(each.computed for each in back) < (1 - LEAST_SHARE_BY_NIXL) * sum(each.context for each in back)
        await settled(*engines)

    run(test)


async def compare(engines: Engines, ours: Stream, route: str, body: dict[str, Any]) -> None:
    """The stream is that of the same request, unmoved."""
    assert_same(ours, await direct_stream(engines[0], body, route))
    assert ours.finish_reason == "length"
    if usage := ours.usage:
        assert usage["completion_tokens"] == ANSWER_TOKENS


def assert_moved(dispatcher: Dispatcher, migrations: int) -> None:
    counts = dispatcher.counts
    assert counts["migrations completed"] == len(dispatcher.downtimes_s) == migrations
    assert counts["failovers"] == counts["migrations not taken up"] == 0


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_stop_string_across_the_seam_ends_the_answer(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, route: str, include: bool
) -> None:
    seam_tokens = 30
    wait_for_a_whole_character = migration_module._whole_character

    async def wait_for_the_seam(migration: Migration) -> None:
        await until(lambda: migration.relay.ended or migration.relay.tokens >= seam_tokens)
        await wait_for_a_whole_character(migration)

    monkeypatch.setattr(migration_module, "_whole_character", wait_for_the_seam)

    async def test() -> None:
        prompt = "".join(random.Random(3).choices(LETTERS, k=600))
        content = {"prompt": prompt} if route == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        body = a_body(max_tokens=70, stream_options={"include_usage": True}, include_stop_str_in_output=include)
        body |= content
        unstopped = await direct_stream(engines[0], body | {"return_token_ids": True}, route)
        stop = text_around(unstopped, seam_tokens, 8)
        body["stop"] = [stop, "never to be met"]
        async with serving(engines) as (dispatcher, client):
            task = asyncio.create_task(stream(client, body, route, "stopped"))
            relay = await relay_of(dispatcher, "stopped")
            assert (await move(dispatcher, relay, 1)).outcome == "completed"
            ours = await task
        direct = await direct_stream(engines[0], body, route)
        assert_same(ours, direct)
        assert ours.finish_reason == "stop"
        assert ours.usage is not None
        assert seam_tokens < ours.usage["completion_tokens"] < 70
        assert ours.text.endswith(stop) == include
        await settled(*engines)

    run(test)


def text_around(answer: Stream, token: int, reach: int) -> str:
    """The text of the tokens from `reach` before to `reach` behind this one."""
    text, count = "", 0
    for choice in answer.choices:
        count += len(choice.get("token_ids") or ())
        if token - reach < count <= token + reach:
            text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


def test_from_a_full_engine_with_a_waiting_line(engines: Engines) -> None:
    """What leaves it are requests whose KV cache is there: neither they nor those that stay are disturbed."""

    async def test() -> None:
        generator = random.Random(5)
        running = [a_body(prompt=token_ids(generator, 1700), max_tokens=250) for _ in range(4)]
        waiting = [a_body(prompt=token_ids(generator, 1500), max_tokens=30) for _ in range(3)]
        async with serving(engines) as (dispatcher, client):
            tasks = []
            for number, body in enumerate(running + waiting):
                tasks.append(asyncio.create_task(stream(client, body, name=f"full-{number}")))
                if number < len(running):
                    relay = await relay_of(dispatcher, f"full-{number}")
                    await until(lambda relay=relay: relay.movable)
            while True:
                _, line, kv_use = await gauges(engines[0])
                if line and kv_use > 0.8:
                    break
                assert not any(task.done() for task in tasks), "the engine did not fill up"
            before = await metrics(engines[1])
            moved = [await relay_of(dispatcher, f"full-{number}") for number in (3, 2)]
            contexts = []
            for relay in moved:
                assert (await gauges(engines[0]))[1] > 0 or relay is not moved[0]
                migration = await move(dispatcher, relay, 1)
                assert migration.outcome == "completed"
                assert running[0]["max_tokens"] - relay.tokens > LEAST_LEFT_TOKENS
                contexts.append(context_tokens(relay))
            answers = await asyncio.gather(*tasks)
            by_nixl = (await metrics(engines[1]))[NIXL] - before[NIXL]
            print("KV use", kv_use, "waiting", line, "by NIXL", by_nixl, "of", contexts)
            assert by_nixl >= LEAST_SHARE_BY_NIXL * sum(contexts)
        for body, ours in zip(running + waiting, answers, strict=True):
            assert_same(ours, await direct_stream(engines[1], body))
        await settled(*engines)

    run(test)


class Restless:
    """A policy that always wants to move something from the first engine to the second."""

    name = "restless"
    kinds = (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION)

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        return Decision(np.array([int(view.fleet["kind"][0] == KIND_DESTINATION)]))


FIXED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"n": 2, "temperature": 0.8, "seed": 3}),
    (COMPLETIONS, {"presence_penalty": 0.4}),
    (COMPLETIONS, {"temperature": 0.8, "seed": 3}),
    (COMPLETIONS, {"structured_outputs": {"regex": "[a-z]{80}"}}),
    (COMPLETIONS, {"thinking_token_budget": 5}),
    (CHAT, {"logprobs": True, "top_logprobs": 1}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}),
]


def test_what_cannot_move_is_left_alone(engines: Engines) -> None:
    async def test() -> None:
        prompt = "".join(random.Random(9).choices(LETTERS, k=500))
        async with serving(engines, Restless(), rebalance_interval_s=0.05) as (dispatcher, client):
            before = await metrics(engines[1])

            async def one(route: str, fields: dict[str, Any]) -> Stream:
                content = {"messages": [{"role": "user", "content": prompt}]} if route == CHAT else {"prompt": prompt}
                body = a_body(max_tokens=40) | content | fields
                ours = await stream(client, body, route)
                if fields.get("n") != 2:  # two answers in one stream come in any order
                    assert_same(ours, await direct_stream(engines[0], body, route))
                return ours

            await asyncio.gather(*(one(route, fields) for route, fields in FIXED))
            assert dispatcher.counts["migrations completed"] == 0
            assert (await metrics(engines[1]))[NIXL] == before[NIXL]
            await one(COMPLETIONS, {})
            assert dispatcher.counts["migrations completed"] == 1
        await settled(*engines)

    run(test)


@asynccontextmanager
async def one_running(
    engines: Engines, max_tokens: int = 300, **settings: Any
) -> AsyncIterator[tuple[Dispatcher, httpx.AsyncClient, Relay, asyncio.Task[Stream], dict[str, Any]]]:
    """A request of 1,000 tokens that runs on the first engine."""
    body = a_body(prompt=token_ids(random.Random(21), 1000), max_tokens=max_tokens)
    async with serving(engines, Steered(0), **settings) as (dispatcher, client):
        task = asyncio.create_task(stream(client, body, name="one"))
        relay = await relay_of(dispatcher, "one")
        await until(lambda: relay.movable)
        yield dispatcher, client, relay, task, body


async def assert_undisturbed(engines: Engines, relay: Relay, task: asyncio.Task[Stream], body: dict[str, Any]) -> None:
    """It ran to its end where it was."""
    ours = await task
    assert relay.answer is not None
    assert relay.answer.seams == 0
    assert_same(ours, await direct_stream(engines[0], body))


def test_a_full_destination_leaves_the_source_undisturbed(engines: Engines) -> None:
    async def test() -> None:
        generator = random.Random(31)
        # They fit to their ends, and from their first tokens on leave no room for 1,000 more.
        fillers = [a_body(prompt=token_ids(generator, 1800), max_tokens=240) for _ in range(4)]
        async with one_running(engines, max_tokens=1000, copy_deadline_s=1.0) as (dispatcher, _, relay, task, body):
            filling = [asyncio.create_task(direct_stream(engines[1], filler)) for filler in fillers]
            while (await gauges(engines[1]))[2] < 0.88:
                assert not any(each.done() for each in filling)
            migration = await move(dispatcher, relay, 1)
            assert migration.outcome == "copy late"
            await assert_undisturbed(engines, relay, task, body)
            for filler, answer in zip(fillers, await asyncio.gather(*filling), strict=True):
                assert_same(answer, await direct_stream(engines[0], filler))
        await settled(*engines)

    run(test)


def test_a_slow_destination_leaves_the_source_undisturbed(engines: Engines) -> None:
    async def test() -> None:
        async with one_running(engines, max_tokens=1000, copy_deadline_s=2.0, poll_interval_s=30.0) as (
            dispatcher,
            _,
            relay,
            task,
            body,
        ):
            with stopped(engines[1]):
                migration = await move(dispatcher, relay, 1)
                assert migration.outcome == "copy late"
                seen = relay.tokens
                await until(lambda: relay.tokens > seen + 5)
            await assert_undisturbed(engines, relay, task, body)
        await settled(*engines)

    run(test)


class stopped:
    """An engine whose processes stand still."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.signal(signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        self._engine.signal(signal.SIGCONT)


STAGES = ("before the probe", "before the copy", "during the copy", "before the stop", "after the stop", "later")


def test_a_client_that_leaves_during_a_migration_leaves_nothing_behind(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        for stage in STAGES:
            async with one_running(engines, max_tokens=2000) as (dispatcher, _, relay, task, _body):
                with monkeypatch.context() as patch:
                    leave_at(patch, stage, task, relay)
                    migration = await move(dispatcher, relay, 1)
                completed = stage in ("after the stop", "later")
                assert migration.outcome == ("completed" if completed else "left"), stage
                if stage == "later":
                    await until(lambda migration=migration: migration.resumed_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda dispatcher=dispatcher: not any(dispatcher.at))
        await settled(*engines)

    run(test)


def leave_at(monkeypatch: pytest.MonkeyPatch, stage: str, task: asyncio.Task[Any], relay: Relay) -> None:
    """Let the client leave when the migration comes to this stage."""

    async def leave() -> None:
        task.cancel()
        await until(lambda: relay.ended)

    pin, copy, whole = migration_module._pin, migration_module._copy, migration_module._whole_character

    async def _pin(*arguments: Any) -> Any:
        if stage == "before the probe":
            await leave()
        return await pin(*arguments)

    async def _copy(*arguments: Any) -> None:
        if stage == "before the copy":
            await leave()
        elif stage == "during the copy":
            asyncio.get_running_loop().call_later(0.02, task.cancel)
        await copy(*arguments)
        if stage == "during the copy":
            await until(lambda: relay.ended)

    async def _whole_character(migration: Migration) -> None:
        if stage == "before the stop":
            await leave()
        await whole(migration)

    for function in (_pin, _copy, _whole_character):
        monkeypatch.setattr(migration_module, function.__name__, function)
