"""A dispatcher in front of real engines, raw requests to both, engines' counters, and streams compared."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import numpy as np
from engines import MODEL_NAME, Engine
from prometheus_client.parser import text_string_to_metric_families

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.migration import Migration
from fleetpilot.dispatcher.relay import Relay
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.view import KIND_DISPATCH, Decision, FleetView

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
WAIT_S = 180.0
"""For anything that must happen: the machine may be busy."""
NIXL = ("vllm:prompt_tokens_by_source_total", "external_kv_transfer")
COMPUTED = ("vllm:prompt_tokens_by_source_total", "local_compute")


class Steered:
    """A policy that sends every request where the test says, and moves nothing by itself."""

    name = "steered"
    kinds = (KIND_DISPATCH,)

    def __init__(self, slot: int = 0):
        self.slot = slot

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        return Decision(np.array([self.slot]))


def run(test: Callable[[], Awaitable[None]], limit_s: float = 900.0) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(limit_s):
                await test()
        except BaseException:  # the streams that it left break, too, and what they say would bury the reason
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            raise

    asyncio.run(bounded())


@asynccontextmanager
async def serving(
    engines: Sequence[Engine], policy: Any = None, **settings: Any
) -> AsyncIterator[tuple[Dispatcher, httpx.AsyncClient]]:
    """A dispatcher in front of these engines, ready, and a client of it. Deadlines are generous, below NIXL's lease."""
    defaults: dict[str, Any] = {
        "port": 0,
        "profile": "tiny-cpu",
        "poll_interval_s": 0.25,
        "probe_deadline_s": 20.0,
        "stalled_s": 300.0,
        "decision_deadline_s": 30.0,  # the policies of the tests are asked in a thread
    }
    config = ServeConfig(engines=tuple(engine.url for engine in engines), **defaults | settings)
    dispatcher = Dispatcher(config, policy or Steered())
    await dispatcher.start()
    try:
        await dispatcher.ready(sum(engine.alive for engine in engines), WAIT_S)
        async with http_client(f"http://127.0.0.1:{dispatcher.port}") as client:
            yield dispatcher, client
    finally:
        await dispatcher.stop()


def http_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None))


async def until(condition: Callable[[], Any], limit_s: float = WAIT_S) -> None:
    """Wait for it."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


# requests and streams


def token_ids(generator: random.Random, count: int) -> list[int]:
    """A prompt that shares nothing with any other: printable bytes and pairs of letters."""
    return [generator.choice((generator.randrange(32, 127), generator.randrange(256, 508))) for _ in range(count)]


def a_body(**fields: Any) -> dict[str, Any]:
    """A greedy request that does not end by itself."""
    return {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "max_tokens": 40} | fields


@dataclass
class Stream:
    """The body of a streamed answer, as the events' data."""

    events: list[bytes] = field(default_factory=list)
    status: int = 0

    @property
    def whole(self) -> bool:
        return bool(self.events) and self.events[-1] == b"[DONE]"

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def only(self, index: int) -> Stream:
        """One of several answers, and what concerns all of them."""

        def concerns(event: bytes) -> bool:
            found = re.search(rb'"index":(\d)', event)
            return not found or int(found[1]) == index

        return Stream([event for event in self.events if concerns(event)], self.status)

    @property
    def text(self) -> str:
        return "".join(_text(choice) for choice in self.choices)

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids") or ()]

    @property
    def usage(self) -> dict[str, Any] | None:
        return self.chunks[-1].get("usage")

    @property
    def finish_reason(self) -> str | None:
        return next((c["finish_reason"] for c in reversed(self.choices) if c["finish_reason"]), None)


def _text(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


def assert_same(ours: Stream, direct: Stream) -> None:
    """The two bodies are equal, chunk by chunk, but for ids, time and fingerprint.

    An engine whose server falls behind sends several tokens in one chunk: where the two were cut differently, what the
    chunks hold when joined must be equal, and the form of the first, the last and all between.
    """
    assert ours.status == direct.status == 200
    assert ours.whole
    assert direct.whole
    if [_masked(event) for event in ours.events] == [_masked(event) for event in direct.events]:
        return
    assert ours.text == direct.text
    (forms, lists, usage), expected = _joined(ours), _joined(direct)
    assert forms == expected[0]
    assert usage == expected[2]
    numbers: list[float] = []
    expected_numbers: list[float] = []
    assert _numbers_apart(lists, numbers) == _numbers_apart(expected[1], expected_numbers)
    assert np.allclose(numbers, expected_numbers, atol=1e-3)


def _masked(event: bytes) -> bytes:
    return re.sub(rb'"(id|created|system_fingerprint)":("[^"]*"|\d+)', rb'"\1":0', event)


def _joined(stream: Stream) -> tuple[list[str], dict[str, list[Any]], Any]:
    """What the chunks hold on the whole, and the forms that they have, each once in a row."""
    forms: list[str] = []
    lists: dict[str, list[Any]] = {}
    usage = None
    for chunk in stream.chunks:
        if usage := chunk.get("usage"):
            chunk["usage"] = list(usage)
        chunk |= {name: 0 for name in ("id", "created", "system_fingerprint") if name in chunk}
        for choice in chunk["choices"]:
            holder = choice.get("delta", choice)
            holder.update({name: "" for name in ("text", "content") if name in holder})
            for call in holder.get("tool_calls") or ():
                call |= {"id": ""} if "id" in call else {}
                lists.setdefault(f"arguments {call['index']}", []).extend(call["function"].get("arguments") or "")
                call["function"]["arguments"] = ""
            for name in ("token_ids", "logprobs"):
                _gather(lists, name, choice)
        form = json.dumps(chunk)
        if forms[-1:] != [form]:
            forms.append(form)
    return forms, lists, usage


def _gather(lists: dict[str, list[Any]], name: str, choice: dict[str, Any]) -> None:
    value = choice.get(name)
    if isinstance(value, dict):
        for key, items in value.items():
            lists.setdefault(f"{name} {key}", []).extend(items)
        choice[name] = {}
    elif value:
        lists.setdefault(name, []).extend(value)
        choice[name] = []


def _numbers_apart(value: Any, numbers: list[float]) -> Any:
    """The value without fractions, which go to `numbers`: those of log-probabilities depend on the batch."""
    if isinstance(value, float):
        numbers.append(value)
        return 0.0
    if isinstance(value, list):
        return [_numbers_apart(item, numbers) for item in value]
    if isinstance(value, dict):
        return {key: _numbers_apart(value[key], numbers) for key in sorted(value)}
    return value


async def stream(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    route: str = COMPLETIONS,
    name: str = "",
    into: Stream | None = None,
) -> Stream:
    """Ask for a streamed answer and read it to its end, or until the connection breaks."""
    answer = into or Stream()
    headers = {"x-request-id": name} if name else {}
    async with client.stream("POST", route, json=body | {"stream": True}, headers=headers) as response:
        answer.status = response.status_code
        rest = b""
        async for data in response.aiter_bytes():
            *lines, rest = (rest + data).split(b"\n\n")
            answer.events += [line.removeprefix(b"data: ") for line in lines]
    return answer


async def direct_stream(engine: Engine, body: dict[str, Any], route: str = COMPLETIONS, name: str = "") -> Stream:
    """The same from an engine itself."""
    async with http_client(engine.url) as client:
        return await stream(client, body, route, name)


# requests that move


async def relay_of(dispatcher: Dispatcher, name: str) -> Relay:
    """The dispatcher's side of the request with this `X-Request-Id`."""

    def find() -> Relay | None:
        relays = (relay for at in dispatcher.at for relay in at.values())
        return next((relay for relay in relays if relay.request.request_id == name), None)

    await until(find)
    relay = find()
    assert relay is not None
    return relay


async def move(dispatcher: Dispatcher, relay: Relay, destination: int, at_tokens: int = 1) -> Migration:
    """Move a request when it has so many tokens of its answer; returns when that has ended, one way or another."""
    await until(lambda: relay.ended or (relay.movable and relay.tokens >= at_tokens))
    migration = dispatcher.move(relay, destination)
    await until(lambda: migration.outcome)
    return migration


# engines


async def metrics(engine: Engine) -> dict[tuple[str, str], float]:
    """An engine's metrics by name and source (empty for those that have none)."""
    async with http_client(engine.url) as client:
        text = (await client.get("/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(s.name, s.labels.get("source", "")): s.value for s in samples}


async def gauges(engine: Engine) -> tuple[float, float, float]:
    """Requests running and waiting, and the share of KV blocks in use."""
    now = await metrics(engine)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    running, waiting, kv_use = (now[name, ""] for name in names)
    return running, waiting, kv_use


async def settled(*engines: Engine, limit_s: float = 90.0) -> None:
    """Wait until the engines hold nothing: no request, no block in use (a lease of blocks ends after 30 s)."""
    deadline_s = time.monotonic() + limit_s
    for engine in engines:
        while (now := await gauges(engine)) != (0.0, 0.0, 0.0):
            assert time.monotonic() < deadline_s, f"running, waiting, KV use of {engine.url}: {now}"
            await asyncio.sleep(0.2)
