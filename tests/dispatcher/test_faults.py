"""What a machine does to a server: clocks jump, bytes are no text, readers do not read, there are no more files."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import time
from typing import Any

import httptools
import orjson
import pytest
from scripted import WAIT_S, ScriptedEngine, a_fleet, ask, expected_text, run, text_of, until

from fleetpilot.dispatcher.http.client import CallError, HttpClient
from fleetpilot.dispatcher.http.server import Exchange
from fleetpilot.dispatcher.http.sse import event

PROMPT = [1, 2, 3, 4]


@pytest.mark.parametrize(("clock", "jump_s"), [("time", 86_400.0), ("time", -86_400.0), ("monotonic", 86_400.0)])
def test_clocks_may_jump(clock: str, jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with a_fleet(2) as (dispatcher, client, scripted):
            for engine in scripted:
                engine.token_s = 0.01
            body = orjson.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "stream": True})
            asked = [
                asyncio.create_task(client.fetch("POST", "/v1/completions", body, timeout_s=1e6)) for _ in range(8)
            ]
            await until(lambda: sum(engine.running for engine in scripted) == 8)
            real = getattr(time, clock)
            monkeypatch.setattr(time, clock, lambda: real() + jump_s)
            answers = await asyncio.gather(*asked)
            assert [text_of(answer) for answer in answers] == [expected_text(PROMPT, 60)] * 8
            assert dispatcher.outcomes == {"finished": 8}
            assert not dispatcher.fleet.view.instances["in_flight"].any()
            after = await client.fetch("POST", "/v1/completions", body, timeout_s=1e6)
            assert text_of(after) == expected_text(PROMPT, 60)

    asyncio.run(test())  # a deadline of the test's would have passed too


@pytest.mark.parametrize("tracks", [True, False])
def test_what_is_no_utf8_in_a_stream_is_made_good_or_passed_on(tracks: bool) -> None:
    class Broken(ScriptedEngine):
        async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            exchange.write(b'data: {"choices":[{"index":0,"text":"\xff\xfe\xc3","finish_reason":null}]}\n\n')
            await asyncio.sleep(self.token_s)
            exchange.write(event(b"[DONE]"))
            exchange.finish()

    async def test() -> None:
        async with a_fleet(2, migration=tracks, failover=tracks) as (dispatcher, client, scripted):
            scripted[0].__class__ = Broken
            answer = await ask(client, prompt=PROMPT)
            if tracks:
                assert text_of(answer) == expected_text(PROMPT, 40)
                assert dispatcher.counts["failovers"] == 1
            else:
                assert b'"text":"\xff\xfe\xc3"' in answer.body

    run(test)


def test_a_body_that_is_no_utf8_is_the_clients_fault() -> None:
    async def test() -> None:
        async with a_fleet(1) as (dispatcher, client, _):
            body = b'{"model":"tiny","prompt":"\xff\xfe\xc3"}'
            answer = await client.fetch("POST", "/v1/completions", body, timeout_s=WAIT_S)
            assert answer.status == 400
            assert dispatcher.counts["engine_failures"] == 0

    run(test)


class Body:
    """Of a chunked answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


@pytest.mark.parametrize("tracks", [True, False])
def test_who_does_not_read_takes_no_memory(tracks: bool) -> None:
    chunks, text = 4_000, "x" * 10_000

    class Talkative(ScriptedEngine):
        sent = 0

        async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            for number in range(chunks):
                while exchange.paused:
                    await asyncio.sleep(0.002)
                choice = {"index": 0, "text": f"{number:06}{text}", "finish_reason": None, "token_ids": [number]}
                exchange.write(event(orjson.dumps({"choices": [choice], "prompt_token_ids": PROMPT})))
                self.sent += 1
                if number % 16 == 0:
                    await asyncio.sleep(0)
            exchange.write(event(b"[DONE]"))
            exchange.finish()

    async def test() -> None:
        async with a_fleet(1, migration=tracks, failover=tracks) as (dispatcher, _, scripted):
            engine = scripted[0]
            engine.__class__ = Talkative
            reader, writer = await asyncio.open_connection("127.0.0.1", dispatcher.port, limit=65_536)
            asked = orjson.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": chunks, "stream": True})
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(asked)
            writer.write(head + asked)
            assert dispatcher._server is not None
            most, before = 0, -1
            while engine.sent != before or engine.sent == 0:  # until it is held back, or through
                before = engine.sent
                for _ in range(50):
                    await asyncio.sleep(0.01)
                    for connection in dispatcher._server.connections:
                        most = max(most, connection.transport.get_write_buffer_size())
            assert engine.sent < chunks
            assert most < 2**20
            body = Body()
            while not body.complete:
                body.parser.feed_data(await asyncio.wait_for(reader.read(2**20), WAIT_S))
            numbers = [int(part[:6]) for part in b"".join(body.parts).split(b'"text":"')[1:]]
            assert numbers == list(range(chunks))
            writer.close()

    run(test)


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on open files there")
def test_without_descriptors_streams_go_on_and_requests_wait() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    async def test() -> None:
        engines = [ScriptedEngine(f"engine{number}") for number in range(2)]
        for engine in engines:
            await engine.start()
            engine.token_s = 0.02
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "fleetpilot", "serve", "--port", str(port), "--policy", "join-shortest-queue"]
        serving = subprocess.Popen([*command, "--engines", *(e.url for e in engines)], preexec_fn=limit)
        flood: list[socket.socket] = []
        try:
            client = HttpClient(f"http://127.0.0.1:{port}")
            await until_ready(client)
            early = [HttpClient(client.origin) for _ in range(3)]
            for each in early:
                assert (await each.fetch("GET", "/health")).status == 200  # their connections are there
            streams = [asyncio.create_task(ask(client, max_tokens=100)) for _ in range(6)]
            await until(lambda: sum(engine.running for engine in engines) == 6)
            for _ in range(100):
                connection = socket.socket()
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.connect(("127.0.0.1", port))
                flood.append(connection)
            await asyncio.sleep(0.5)
            waiting = [asyncio.create_task(ask(each, max_tokens=4)) for each in early]
            answers = await asyncio.gather(*streams)
            assert [text_of(answer) for answer in answers] == [expected_text(PROMPT, 100)] * 6
            for connection in flood:
                connection.close()
            flood.clear()
            assert [text_of(answer) for answer in await asyncio.gather(*waiting)] == [expected_text(PROMPT, 4)] * 3
            late = HttpClient(client.origin)
            await until_ready(late)  # libuv closes what it cannot accept, and the flood's end may still be on its way
            assert text_of(await ask(late)) == expected_text(PROMPT, 40)
            shown = (await client.fetch("GET", "/metrics")).body.decode()
            assert 'event="requests_without_descriptors"' in shown
            assert "engine_failures" not in shown
            assert "engines_lost" not in shown
        finally:
            for connection in flood:
                connection.close()
            serving.terminate()
            serving.wait(WAIT_S)
            for engine in engines:
                await engine.kill()

    run(test)


async def until_ready(client: HttpClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(CallError):
                if b"starting" not in (answer := await client.fetch("GET", "/ready")).body and answer.status == 200:
                    return
            await asyncio.sleep(0.1)
