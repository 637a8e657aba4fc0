"""A live engine as a calibration sees it: completions whose tokens are timed, and its counters."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from fleetpilot.dispatcher.engine import PROBE_PRIORITY, Capabilities, Engine, ask_capabilities
from fleetpilot.dispatcher.http.client import Call, CallError
from fleetpilot.dispatcher.http.server import Headers
from fleetpilot.dispatcher.http.sse import DONE, EventReader
from fleetpilot.dispatcher.requests import COMPLETIONS
from fleetpilot.fleet.vllm_metrics import VllmMetrics, read_metrics

LONGEST_ANSWER_S = 120.0
"""For one request. What takes longer is no point that a calibration of minutes could repeat."""
_TOKEN_IDS = re.compile(rb'"token_ids":\[([^\]]*)\]')
_LOWEST_TOKEN, _HIGHEST_TOKEN = 10, 250
"""Token ids that every vocabulary has and that are no special tokens in most."""


class MeasureError(Exception):
    """An engine did not answer, or not as a vLLM server does."""


def random_prompt(random: np.random.Generator, tokens: int) -> list[int]:
    """A prompt that no prefix cache holds."""
    return random.integers(_LOWEST_TOKEN, _HIGHEST_TOKEN, tokens).tolist()  # type: ignore[no-any-return]


class TokenStream:
    """A streamed completion; `times_s` are its tokens' times by the performance counter.

    Attributes:
        sent_s: when it was sent.
        times_s: one per token that came.
    """

    def __init__(self, origin: str) -> None:
        self.sent_s = time.perf_counter()
        self.times_s: list[float] = []
        self.call: Call | None = None
        self._origin = origin
        self._status = 0
        self._events = EventReader()
        self._refusal = b""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._ended = False
        self._error: MeasureError | None = None

    async def reached(self, tokens: int) -> None:
        """Wait until so many tokens came, or the answer is complete.

        Raises:
            MeasureError: the engine failed, or `LONGEST_ANSWER_S` passed.
        """
        if self._error is None and not self._ended and len(self.times_s) < tokens:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((tokens, future))
            try:
                async with asyncio.timeout(LONGEST_ANSWER_S):
                    await future
            except TimeoutError:
                raise MeasureError(f"{self._origin}: no {tokens} tokens within {LONGEST_ANSWER_S:g} s") from None
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Abort it at the engine."""
        if self.call is not None:
            self.call.cancel()

    def on_start(self, status: int, headers: Headers) -> None:
        """See `Receiver`."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """See `Receiver`."""
        now_s = time.perf_counter()
        if self._status != 200:
            self._refusal += data
            return
        for event in self._events.feed(data):
            if event != DONE:
                self.times_s += [now_s] * _tokens(event)
        self._wake()

    def on_end(self) -> None:
        """See `Receiver`."""
        self._ended = True
        if self._status != 200:
            refusal = self._refusal[:300].decode(errors="replace")
            self._error = MeasureError(f"{self._origin}: POST {COMPLETIONS} was answered {self._status}: {refusal}")
        self._wake()

    def on_error(self, error: CallError) -> None:
        """See `Receiver`."""
        self._error = MeasureError(str(error))
        self._wake()

    def _wake(self) -> None:
        over = self._ended or self._error is not None
        for tokens, future in self._waiting:
            if (over or len(self.times_s) >= tokens) and not future.done():
                future.set_result(None)
        self._waiting = [(tokens, future) for tokens, future in self._waiting if not future.done()]


def _tokens(event: bytes) -> int:
    """Tokens in an event's data. The name of the prompt's ids ends alike but for the quotation mark."""
    ids = _TOKEN_IDS.search(event)
    return ids[1].count(b",") + 1 if ids and ids[1] else 0


class LiveEngine:
    """An engine to measure.

    Args:
        url: of its HTTP server.
        slot: its place among the engines that are calibrated together.
        api_key: presented to it; empty for none.

    Raises:
        ValueError: the URL is malformed.

    Attributes:
        capabilities: known after `ask`.
    """

    def __init__(self, url: str, slot: int = 0, api_key: str = ""):
        self.engine = Engine(slot, url)
        self.slot = slot
        self.url = self.engine.url
        self.headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self.capabilities: Capabilities | None = None

    async def ask(self) -> Capabilities:
        """Ask what it can do.

        Raises:
            MeasureError: it does not answer as a vLLM server does.
        """
        try:
            self.capabilities = await ask_capabilities(self.engine, self.headers)
        except (CallError, TimeoutError, ValueError) as error:
            raise MeasureError(str(error) or f"{self.url}: no answer in time") from None
        return self.capabilities

    def start(self, prompt: Sequence[int], max_tokens: int) -> TokenStream:
        """Send a completion, as the dispatcher would: streamed, with token ids."""
        stream = TokenStream(self.url)
        body = self._body(prompt, max_tokens) | {"stream": True, "return_token_ids": True}
        stream.call = self.engine.client.call("POST", COMPLETIONS, self._json_headers(), orjson.dumps(body), stream)
        return stream

    async def one_token(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """A completion of one token, before all others where the engine knows priorities.

        Raises:
            MeasureError: it was not answered, or refused.
        """
        body = self._body(prompt, 1) | fields
        if self.capabilities is not None and self.capabilities.priority is not False:
            body["priority"] = PROBE_PRIORITY
        answer = orjson.loads(await self.fetch("POST", COMPLETIONS, orjson.dumps(body)))
        return answer if isinstance(answer, dict) else {}

    async def fetch(self, method: str, target: str, body: bytes = b"") -> bytes:
        """The body of an answer.

        Raises:
            MeasureError: it is not 200, or does not come.
        """
        try:
            answer = await self.engine.client.fetch(method, target, body, self.headers, timeout_s=LONGEST_ANSWER_S)
        except (CallError, TimeoutError) as error:
            raise MeasureError(str(error) or f"{self.url}: {method} {target} was not answered in time") from None
        if answer.status != 200:
            text = answer.body[:300].decode(errors="replace")
            raise MeasureError(f"{self.url}: {method} {target} was answered {answer.status}: {text}")
        return answer.body

    async def metrics_text(self) -> str:
        """Its ``/metrics``."""
        return (await self.fetch("GET", "/metrics")).decode()

    async def metrics(self) -> VllmMetrics:
        """The counters of its ``/metrics``.

        Raises:
            MeasureError: they cannot be read.
        """
        try:
            return read_metrics(await self.metrics_text())
        except ValueError as error:
            raise MeasureError(f"{self.url}: {error}") from None

    async def idle(self) -> None:
        """Wait until it has no requests.

        Raises:
            MeasureError: it still has some after `LONGEST_ANSWER_S`.
        """
        deadline_s = time.monotonic() + LONGEST_ANSWER_S
        while (metrics := await self.metrics()).running or metrics.waiting:
            if time.monotonic() > deadline_s:
                raise MeasureError(
                    f"{self.url}: {metrics.running:.0f} requests run and {metrics.waiting:.0f} wait; expected an "
                    "engine "
                    "that serves nobody else"
                )
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Close its connections."""
        self.engine.client.close()

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        assert self.capabilities is not None
        return {
            "model": self.capabilities.models[0],
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def _json_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", b"application/json"), *self.headers]


async def time_to_first_token(engine: LiveEngine, prompt: Sequence[int]) -> float:
    """Seconds from sending a lone request to its first token."""
    stream = engine.start(prompt, 1)
    await stream.reached(1)
    return stream.times_s[0] - stream.sent_s


async def decoding(
    engine: LiveEngine, prompts: Sequence[Sequence[int]], steps: int, added: Sequence[int] = ()
) -> tuple[float, float, float]:
    """Let a batch decode.

    Args:
        engine: idle.
        prompts: one per request of the batch.
        steps: to measure once all of them decode.
        added: a prompt that comes then; empty for none.

    Returns:
        The time of a decode step; the KV tokens that the batch read in it, on average; and the time of the
        iteration that computed `added` (NaN for none), the longest between the tokens around its first.

    Raises:
        MeasureError: a request ended before the steps were measured.
    """
    assert engine.capabilities is not None
    longest = engine.capabilities.max_model_len or 2048
    most = min(longest - len(prompts[0]) - 1, 1024 + steps)
    streams = [engine.start(prompt, most) for prompt in prompts]
    try:
        for stream in streams:
            await stream.reached(2)
        first = [len(stream.times_s) for stream in streams]
        for stream, begun in zip(streams, first, strict=True):
            await stream.reached(begun + steps)
        if any(len(stream.times_s) < begun + steps for stream, begun in zip(streams, first, strict=True)):
            raise MeasureError(f"{engine.url}: an answer ended within {most} tokens, before the batch was measured")
        spans_s = [s.times_s[b + steps - 1] - s.times_s[b] for s, b in zip(streams, first, strict=True)]
        step_s = float(np.mean(spans_s)) / (steps - 1)
        middle = sum(len(prompt) + begun + steps / 2 for prompt, begun in zip(prompts, first, strict=True))
        mixed_s = await _longest_gap(engine, streams, added) if len(added) else float("nan")
    finally:
        for stream in streams:
            stream.cancel()
    return step_s, middle, mixed_s


async def _longest_gap(engine: LiveEngine, streams: Sequence[TokenStream], added: Sequence[int]) -> float:
    stream = engine.start(added, 1)
    await stream.reached(1)
    for other in streams:
        await other.reached(len(other.times_s) + 1)
    gaps_s = []
    for other in streams:
        times: NDArray[np.float64] = np.asarray(other.times_s)
        ended = (times[1:] > stream.sent_s) & (times[:-1] < stream.times_s[0])
        gaps_s.append(np.diff(times)[ended].max(initial=0.0))
    return float(np.median(gaps_s))
