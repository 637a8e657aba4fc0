"""Whatever bytes come, they are answered in HTTP or not at all, nothing fails inside, and the next client is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import WAIT_S, ScriptedEngine, ask, expected_text, text_of

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.service import Dispatcher

EXAMPLES = 20_000 if os.environ.get("FLEETPILOT_FUZZ") == "1" else 60
"""The long run takes about 10 minutes."""
QUIET_S = 0.02
"""A connection that says nothing more for so long waits for the rest of a request."""

methods = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI"])
paths = st.sampled_from(
    [
        *(b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/health", b"/ready", b"/metrics"),
        *(b"/dashboard", b"/dashboard/state", b"*", b"/", b"http://x/v1/models", b"/v1/completions?a=b#c"),
    ]
)
tokens = st.sampled_from(
    [
        *(b"content-length", b"transfer-encoding", b"connection", b"expect", b"host", b"x-request-id", b"upgrade"),
        *(b"x-vllm-priority", b"authorization", b"content-type"),
    ]
)
values = st.sampled_from(
    [b"chunked", b"gzip, chunked", b"close", b"keep-alive", b"100-continue", b"0", b"5", b"-1", b"99999999999", b"h2c"]
)
headers = st.tuples(tokens | st.binary(max_size=8), values | st.binary(max_size=12))
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
fields = st.sampled_from(
    [
        *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n"),
        *("min_tokens", "priority", "stop", "seed", "temperature", "logprobs", "session_id", "cache_salt", "echo"),
        *("kv_transfer_params", "return_token_ids", "tools", "response_format", "include_stop_str_in_output"),
    ]
)
plausible = {
    "model": st.just("tiny"),
    "prompt": st.lists(st.integers(0, 500), min_size=1, max_size=5) | st.text(max_size=9),
    "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=5)}), max_size=2),
    "stream": st.booleans(),
    "max_tokens": st.integers(0, 5),
}


@st.composite
def bodies(draw: Any) -> bytes:
    if draw(st.integers(0, 9)) == 0:
        return bytes(draw(st.binary(max_size=60)))
    content = {name: draw(each) for name, each in plausible.items() if draw(st.integers(0, 9)) > 0}
    content |= draw(st.dictionaries(fields, anything, max_size=3))
    try:
        return orjson.dumps(content)
    except TypeError:  # whole numbers beyond 64 bits
        return repr(content).replace("'", '"').encode("utf-8", "surrogatepass")


@st.composite
def requests(draw: Any) -> bytes:
    """Mostly HTTP."""
    if draw(st.integers(0, 9)) == 0:
        return bytes(draw(st.binary(max_size=100)))
    body = draw(bodies())
    lines = [b"%b %b HTTP/1.%d" % (draw(methods), draw(paths), draw(st.integers(0, 2)))]
    lines += [b"%b: %b" % header for header in draw(st.lists(headers, max_size=3))]
    if draw(st.integers(0, 9)) > 0:
        lines[0] = b"POST %b HTTP/1.1" % draw(st.sampled_from([b"/v1/completions", b"/v1/chat/completions"]))
        lines.append(b"content-length: %d" % len(body))
    whole = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if draw(st.integers(0, 4)) == 0:  # damaged
        at = draw(st.integers(0, len(whole) - 1))
        whole = whole[:at] + draw(st.binary(max_size=3)) + whole[at + draw(st.integers(0, 3)) :]
    return whole


@st.composite
def connections(draw: Any) -> tuple[list[bytes], bool]:
    """What is sent, cut into pieces, and whether the client leaves at once."""
    sent = b"".join(draw(st.lists(requests(), min_size=1, max_size=3)))
    cuts = sorted(draw(st.lists(st.integers(0, len(sent)), max_size=4)))
    return [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)], draw(st.booleans())


async def talk(port: int, pieces: list[bytes], *, leaves: bool) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        while not leaves:
            try:
                data = await asyncio.wait_for(reader.read(65536), QUIET_S)
            except TimeoutError:
                break
            if not data:
                break
            said += data
    writer.close()
    return said


class World:
    """A dispatcher and an engine that live as long as the test, on a loop of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.failures: list[Any] = []
        self.loop.set_exception_handler(lambda loop, context: self.failures.append(context))
        self.engine = ScriptedEngine()
        self.engine.token_s = 0.0
        self.loop.run_until_complete(self.engine.start())
        config = ServeConfig(engines=(self.engine.url,), policy="join-shortest-queue", profile="tiny-cpu", port=0)
        self.dispatcher = Dispatcher(config)
        self.loop.run_until_complete(self.dispatcher.start())
        self.loop.run_until_complete(self.dispatcher.ready(1, WAIT_S))

    def close(self) -> None:
        self.loop.run_until_complete(self.dispatcher.stop())
        self.loop.run_until_complete(self.engine.kill())
        self.loop.close()


@pytest.fixture(scope="module")
def world() -> Any:
    there = World()
    yield there
    there.close()


@settings(max_examples=EXAMPLES)
@given(talks=st.lists(connections(), min_size=1, max_size=4))
def test_any_bytes(world: World, talks: list[tuple[list[bytes], bool]]) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("fleetpilot.dispatcher").addHandler(handler)
    dispatcher = world.dispatcher

    async def test() -> None:
        said = await asyncio.gather(*(talk(dispatcher.port, pieces, leaves=leaves) for pieces, leaves in talks))
        for answer in said:
            if answer:
                assert answer.startswith(b"HTTP/1.1 "), answer
        client = HttpClient(f"http://127.0.0.1:{dispatcher.port}")
        assert text_of(await ask(client, max_tokens=3)) == expected_text([1, 2, 3, 4], 3)
        client.close()
        assert dispatcher._server is not None
        async with asyncio.timeout(WAIT_S):
            while dispatcher._server.connections or any(dispatcher.at) or dispatcher.fleet.held:
                await asyncio.sleep(0.001)

    try:
        world.loop.run_until_complete(test())
    finally:
        logging.getLogger("fleetpilot.dispatcher").removeHandler(handler)
    assert not [record.getMessage() for record in logged]
    assert not world.failures
    assert not dispatcher.fleet.view.instances["in_flight"].any()
