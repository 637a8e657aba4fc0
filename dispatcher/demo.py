"""The end of the demonstration: a policy in front of emulated engines, under a short load, to be watched."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable

import orjson

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.emulator.fleet import EmulatedFleet
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.profiles import load_profile

PROFILE = "h100-llama-3.1-8b"
SLO = "loose"
"""As `train --config quick` knows it: a policy leaves what it was not trained on to its fallback."""
ENGINES = 4
RATE_RPS = 12.0
PROMPT_TOKENS, ANSWER_TOKENS = 600, 150
"""Means; lengths are exponential, up to four times as much."""
_ANSWER_S = 120.0


async def serve_for_a_while(policy: str, span_s: float = 20.0, say: Callable[[str], None] = print) -> int:
    """Serve requests that come for `span_s`, and say how it went.

    Args:
        policy: name, or folder of an export.
        span_s: until the last request comes.
        say: is told where the live page is, and what came of the requests.

    Returns:
        How many requests were answered.
    """
    fleet = EmulatedFleet([load_profile(PROFILE)] * ENGINES)
    await fleet.start()
    dispatcher = Dispatcher(ServeConfig(engines=tuple(fleet.urls), port=0, policy=policy, profile=PROFILE, slo=SLO))
    try:
        await dispatcher.start()
        await dispatcher.ready(ENGINES, _ANSWER_S)
        origin = f"http://127.0.0.1:{dispatcher.port}"
        say(f"serving {ENGINES} emulated engines with {policy} for {span_s:g} s; watch it at {origin}/dashboard")
        answered = await _load(origin, span_s, random.Random(0))
        _sum_up(dispatcher, answered, say)
        say(f"go on with: fleetpilot serve --emulate {ENGINES} --policy {policy} --slo {SLO}")
        return len(answered)
    finally:
        await dispatcher.stop()
        await fleet.stop()


async def _load(origin: str, span_s: float, draw: random.Random) -> list[tuple[float, float]]:
    """Seconds to the first token and between tokens, of every request."""
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Task[tuple[float, float]]] = []
    until_s, due_s = loop.time() + span_s, loop.time()
    http = HttpClient(origin)
    while (due_s := due_s + draw.expovariate(RATE_RPS)) < until_s:
        await asyncio.sleep(due_s - loop.time())
        asked.append(loop.create_task(_Reader(http, _a_request(draw)).read()))
    return await asyncio.gather(*asked)


def _a_request(draw: random.Random) -> bytes:
    prompt_tokens, answer_tokens = (
        1 + int(min(draw.expovariate(1 / mean), 4 * mean)) for mean in (PROMPT_TOKENS, ANSWER_TOKENS)
    )
    prompt = [draw.randrange(256, 400) for _ in range(prompt_tokens)]
    body = {"model": "emulated", "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True, "stream": True}
    return orjson.dumps(body)


class _Reader:
    """Takes the times of a stream's events."""

    def __init__(self, http: HttpClient, body: bytes):
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._times_s: list[float] = []
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._call = http.call("POST", "/v1/completions", [(b"content-type", b"application/json")], body, self)

    def on_start(self, status: int, headers: object) -> None:
        """The head of the answer."""

    def on_data(self, data: bytes) -> None:
        """Events came."""
        self._times_s += [self._loop.time()] * data.count(b'"text"')

    def on_end(self) -> None:
        """The answer is complete."""
        self._done.set_result(None)

    def on_error(self, error: Exception) -> None:
        """It will not be."""
        self._done.set_exception(error)

    async def read(self) -> tuple[float, float]:
        """Seconds to the first token, and between two."""
        async with asyncio.timeout(_ANSWER_S):
            await self._done
        first_s, last_s = self._times_s[0], self._times_s[-1]
        return first_s - self._sent_s, (last_s - first_s) / max(1, len(self._times_s) - 1)


def _sum_up(dispatcher: Dispatcher, answered: list[tuple[float, float]], say: Callable[[str], None]) -> None:
    first_s, between_s = zip(*answered, strict=True)
    fallbacks = sum(dispatcher.fleet.host.fallback_counts.values())
    say(
        f"{len(answered)} requests answered; medians: {statistics.median(first_s) * 1e3:.0f} ms to the first token, "
        f"{statistics.median(between_s) * 1e3:.1f} ms between tokens; "
        f"{dispatcher.counts['migrations completed']} migrations; {fallbacks} of "
        f"{dispatcher.fleet.host.number} decisions by the fallback"
    )
