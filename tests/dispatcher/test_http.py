"""The HTTP layer against raw sockets: what clients and engines may send, and what they may not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fleetpilot.dispatcher.http.client import CallError, HttpClient
from fleetpilot.dispatcher.http.server import Exchange, HttpServer, Limits, serve

WAIT_S = 30.0


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(4 * WAIT_S):
            await test

    asyncio.run(bounded())


def echo(exchange: Exchange) -> None:
    exchange.respond(200, exchange.method.encode() + b" " + exchange.path.encode() + b" " + exchange.body)


@contextlib.asynccontextmanager
async def serving(handler: Callable[[Exchange], None] = echo, **limits: Any) -> AsyncIterator[HttpServer]:
    server = await serve(handler, limits=Limits(**limits))
    try:
        yield server
    finally:
        await server.close()


async def said(server: HttpServer, *parts: bytes, until: bytes | None = None) -> bytes:
    """What the server answers to these bytes until it closes, or until it said `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        while until is None or until not in answer:
            data = await asyncio.wait_for(reader.read(65536), WAIT_S)
            if not data:
                break
            answer += data
    except ConnectionError:
        pass
    writer.close()
    return answer


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /a HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_request_is_understood_however_it_is_cut(size: int) -> None:
    async def test() -> None:
        request = post(b"hello", b"connection: close")
        async with serving() as server:
            answer = await said(server, *(request[at : at + size] for at in range(0, len(request), size)))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"POST /a hello")

    run(test())


@pytest.mark.parametrize(
    ("target", "path"), [(b"http://x:80/a?b=1", b"/a"), (b"HTTPS://x", b"/"), (b"/http://x/a", b"/http://x/a")]
)
def test_a_target_may_name_the_server(target: bytes, path: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await said(server, b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
        assert answer.endswith(b"GET %b " % path)

    run(test())


def test_a_chunked_body_and_expect_continue() -> None:
    async def test() -> None:
        head = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n"
        head += b"connection: close\r\n\r\n"
        async with serving() as server:
            answer = await said(server, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"POST /a abcde")

    run(test())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()

        def slow_first(exchange: Exchange) -> None:
            loop.call_later(0.05 if exchange.body == b"0" else 0.0, echo, exchange)

        async with serving(slow_first) as server:
            answer = await said(server, b"".join(post(b"%d" % n) for n in range(4)) + post(b"4", b"connection: close"))
        assert [answer.index(b"POST /a %d" % n) for n in range(5)] == sorted(
            answer.index(b"POST /a %d" % n) for n in range(5)
        )

    run(test())


def test_http_1_0_gets_its_body_until_the_connection_ends() -> None:
    async def test() -> None:
        def stream(exchange: Exchange) -> None:
            exchange.start(200, [(b"content-type", b"text/plain")])
            exchange.write(b"one")
            exchange.write(b"two")
            exchange.finish()

        async with serving(stream) as server:
            answer = await said(server, b"GET / HTTP/1.0\r\n\r\n")
        assert answer.endswith(b"\r\n\r\nonetwo")
        assert b"chunked" not in answer

    run(test())


def test_an_upgrade_is_not_taken_up() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await said(server, b"GET /a HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in answer

    run(test())


def test_head_gets_no_body() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await said(server, b"HEAD /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n")
        assert b"content-length: 8" in answer

    run(test())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),  # TLS to a plain port
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 5000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 50_000, b"431"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100001\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n30000\r\n" + b"a" * 0x30000, b"413"),
    ],
)
def test_what_is_no_request_gets_one_clear_error_and_the_connection_is_closed(
    request_bytes: bytes, status: bytes
) -> None:
    async def test() -> None:
        async with serving(header_bytes=4096, body_bytes=100_000) as server:
            answer = await said(server, request_bytes)
            assert answer.startswith(b"HTTP/1.1 " + status), answer
            assert b'"message":"' in answer
            assert not server.connections or await asyncio.sleep(0.05) is None
            assert (await said(server, post(b"x", b"connection: close"))).endswith(b"POST /a x")

    run(test())


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc"])
def test_a_client_that_sends_too_slowly_is_not_waited_for(sent: bytes) -> None:
    async def test() -> None:
        async with serving(request_s=0.2, idle_s=0.2) as server:
            answer = await said(server, sent)
        assert answer.startswith(b"HTTP/1.1 408") if sent else answer == b""

    run(test())


def test_a_client_that_leaves_is_told_to_the_handler_once() -> None:
    async def test() -> None:
        left = asyncio.Event()
        times = 0

        def hang(exchange: Exchange) -> None:
            def on_closed() -> None:
                nonlocal times
                times += 1
                left.set()

            exchange.on_closed = on_closed
            exchange.start(200, [])
            exchange.write(b"some")

        async with serving(hang) as server:
            await said(server, post(b""), until=b"some")
            await asyncio.wait_for(left.wait(), WAIT_S)
        assert times == 1

    run(test())


def test_a_client_that_sends_ahead_and_leaves_is_seen_to_leave() -> None:
    async def test() -> None:
        left: list[bytes] = []

        def never(exchange: Exchange) -> None:
            exchange.on_closed = lambda: left.append(exchange.body)

        async with serving(never) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(b"0") + post(b"1"))
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            async with asyncio.timeout(WAIT_S):
                while server.connections:
                    await asyncio.sleep(0.01)
        assert left == [b"0"]

    run(test())


def test_a_client_that_leaves_as_its_next_request_comes_up_is_seen_to_leave() -> None:
    async def test() -> None:
        handled: list[Exchange] = []
        async with serving(handled.append) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(b"1") + post(b"2"))
            async with asyncio.timeout(WAIT_S):
                while not (handled and handled[0]._connection.queue):
                    await asyncio.sleep(0.001)
            handled[0]._connection.transport.abort()
            handled[0].respond(200, b"")
            async with asyncio.timeout(WAIT_S):
                while server.connections:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            writer.close()
        assert [exchange.body for exchange in handled] == [b"1"]

    run(test())


def test_a_client_that_sends_too_far_ahead_is_cut_off() -> None:
    async def test() -> None:
        async with serving(lambda exchange: None, body_bytes=1000) as server:
            assert await said(server, post(b"0"), *(post(b"x" * 300) for _ in range(4))) == b""
            assert await said(server, *(post(b"") for _ in range(80))) == b""

    run(test())


def test_connections_beyond_the_limit_are_closed() -> None:
    async def test() -> None:
        async with serving(connections=1) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(b"a"))
            await reader.readuntil(b"POST /a a")
            assert await said(server, post(b"b")) == b""
            writer.close()

    run(test())


def test_a_handler_that_fails_is_one_500() -> None:
    async def test() -> None:
        def broken(exchange: Exchange) -> None:
            raise RuntimeError("secret")

        async with serving(broken) as server:
            answer = await said(server, post(b"", b"connection: close"))
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"secret" not in answer

    run(test())


def test_a_slow_reader_pauses_the_writer() -> None:
    async def test() -> None:
        drained = asyncio.Event()
        exchanges: list[Exchange] = []

        def stream(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.on_drain = drained.set
            exchange.start(200, [])
            while not exchange.paused:
                exchange.write(b"x" * 65536)

        async with serving(stream) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(b""))
            while not exchanges or not exchanges[0].paused:
                await asyncio.sleep(0.01)
            while not drained.is_set():
                await asyncio.wait_for(reader.read(1 << 20), WAIT_S)
            exchanges[0].finish()
            writer.close()

    run(test())


# --- the client ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def raw_server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    handlers: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*filter(None, handlers)), WAIT_S)


@pytest.mark.parametrize(
    ("answer", "answered"),
    [
        (b"", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", True),
        (b"garbage\r\n\r\n", True),
    ],
)
def test_half_an_answer_is_an_error(answer: bytes, answered: bool) -> None:
    async def test() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

        async with raw_server(speak) as port:
            with pytest.raises(CallError) as error:
                await HttpClient(f"http://127.0.0.1:{port}").fetch("GET", "/", timeout_s=WAIT_S)
        assert error.value.answered is answered

    run(test())


def test_an_answer_may_end_with_the_connection() -> None:
    async def test() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
            await writer.drain()

        async with raw_server(speak) as port:
            answer = await HttpClient(f"http://127.0.0.1:{port}").fetch("GET", "/", timeout_s=WAIT_S)
        assert (answer.status, answer.body) == (200, b"all of it")

    run(test())


def test_connections_are_kept_and_one_that_was_closed_meanwhile_is_replaced() -> None:
    async def test() -> None:
        connections = 0

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            for _ in range(2):  # then closes without a word, as a server does that was idle for too long
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        async with raw_server(speak) as port:
            client = HttpClient(f"http://127.0.0.1:{port}")
            for _ in range(5):
                assert (await client.fetch("GET", "/", timeout_s=WAIT_S)).body == b"ok"
            client.close()
        assert connections == 3

    run(test())


def test_a_server_that_is_not_there_is_said_so() -> None:
    async def test() -> None:
        with pytest.raises(CallError) as error:
            await HttpClient("http://127.0.0.1:1").fetch("GET", "/", timeout_s=WAIT_S)
        assert error.value.refused

    run(test())


def test_one_that_never_answers_is_given_up_and_told() -> None:
    async def test() -> None:
        closed = asyncio.Event()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            closed.set()

        async with raw_server(speak) as port:
            with pytest.raises(TimeoutError):
                await HttpClient(f"http://127.0.0.1:{port}").fetch("GET", "/", timeout_s=0.1)
            await asyncio.wait_for(closed.wait(), WAIT_S)

    run(test())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x/?a"]
)
def test_an_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="engine URL"):
        HttpClient(url)
