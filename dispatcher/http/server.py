"""An HTTP/1.1 server whose handlers are plain functions of an `Exchange`: one request and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
import orjson

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order of the wire."""

_LOG = logging.getLogger("fleetpilot.dispatcher")

_SWEEP_S = 1.0
_MOST_QUEUED = 64
"""Requests that a client may send on one connection before the first is answered; one that sends more is cut off."""
_ABSOLUTE = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server.

    Attributes:
        header_bytes: most bytes of a request before its body.
        body_bytes: most bytes of a body.
        request_s: from a request's first byte until it is complete; a slower client is answered 408.
        idle_s: a connection without a request is closed after this time.
        connections: further ones are closed at once.
    """

    header_bytes: int = 64 * 1024
    body_bytes: int = 64 * 1024 * 1024
    request_s: float = 60.0
    idle_s: float = 75.0
    connections: int = 16_384


class Exchange:
    """One request and its answer.

    Attributes:
        method: ``GET``, ``POST``, ...
        path: of the target, without the query.
        query: behind the ``?``, undecoded.
        headers: of the request.
        body: of the request, complete.
        started: the answer's head was sent.
        closed: the client went away, or the answer is complete.
        on_closed: called once if the client goes away before the answer is complete.
        on_drain: called when the client has read enough that more may be written (see `paused`).
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_head_only",
        "_keep_alive",
        "_unsent_head",
        "body",
        "closed",
        "headers",
        "method",
        "on_closed",
        "on_drain",
        "path",
        "query",
        "started",
    )

    def __init__(self, connection: _Connection, method: str, target: bytes, headers: Headers, keep_alive: bool):
        if not target.startswith(b"/"):
            target = _ABSOLUTE.sub(b"", target) or b"/"
        path, _, query = target.decode("latin-1").partition("?")
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.started = False
        self.closed = False
        self.on_closed: Callable[[], None] | None = None
        self.on_drain: Callable[[], None] | None = None
        self._connection = connection
        self._keep_alive = keep_alive
        self._head_only = method == "HEAD"
        self._chunked = False
        self._unsent_head = b""

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name, given in lower case."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than is written to it."""
        return self._connection.paused

    def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers = ()
    ) -> None:
        """Send a whole answer."""
        if self.closed:
            return
        length = b"%d" % len(body)
        head = self._head(status, [(b"content-type", content_type), (b"content-length", length), *headers])
        self._connection.write(head if self._head_only else head + body)
        self._complete()

    def start(self, status: int, headers: Headers) -> None:
        """Send the head of an answer whose body follows in parts.

        A ``content-length`` among the headers is kept; without one the body is chunked (HTTP/1.0: ends with the
        connection). The head goes out with the first part of the body, or soon where that takes its time.
        """
        if self.closed:
            return
        has_length = any(name == b"content-length" for name, _ in headers)
        if not has_length and self._connection.http11:
            self._chunked = True
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        elif not has_length:
            self._keep_alive = False
        self._unsent_head = self._head(status, headers)
        self._connection.server.loop.call_soon(self._send_head)

    def _send_head(self) -> None:
        if self._unsent_head:
            head, self._unsent_head = self._unsent_head, b""
            self._connection.write(head)

    def write(self, data: bytes) -> None:
        """Send a part of the body. Nothing is sent once the client has gone."""
        if data and not self.closed and not self._head_only:
            head, self._unsent_head = self._unsent_head, b""
            part = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
            self._connection.write(head + part)

    def finish(self) -> None:
        """The body is complete."""
        if self.closed:
            return
        self._send_head()
        if self._chunked and not self._head_only:
            self._connection.write(b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        """Cut the connection, so that the client cannot take what it has for the whole answer."""
        if not self.closed:
            self._send_head()
            self.closed = True
            self._connection.transport.abort()

    def _head(self, status: int, headers: Headers) -> bytes:
        self.started = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if not self._keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _complete(self) -> None:
        self.closed = True
        self.on_closed = self.on_drain = None
        self._connection.answered(self._keep_alive)


Handler = Callable[[Exchange], None]
"""Called with a complete request. Must not block; may answer later."""


def error_body(message: str, kind: str, code: int) -> bytes:
    """An error as the OpenAI API and vLLM have it."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


class _Connection(asyncio.Protocol):
    """A client's connection: its requests are answered one after the other."""

    def __init__(self, server: HttpServer):
        self.server = server
        self.transport: Any = None
        self.http11 = True
        self.paused = False
        self.parser = httptools.HttpRequestParser(self)
        self.active: Exchange | None = None
        self.queue: deque[Exchange] = deque()
        self.queued_bytes = 0
        self.refused = False
        self.since_s = self.server.loop.time()  # the last change between idle, reading and answering
        self.reading = False
        self._reset()

    def _reset(self) -> None:
        self.target = b""
        self.request_headers: list[tuple[bytes, bytes]] = []
        self.head_bytes = 0
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.in_head = True

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if len(self.server.connections) >= self.server.limits.connections:
            transport.abort()
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        exchange, self.active = self.active, None
        self.queue.clear()
        if exchange is not None and not exchange.closed:
            exchange.closed = True
            exchange._unsent_head = b""
            if exchange.on_closed is not None:
                exchange.on_closed()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        if not self.reading:
            self.reading = True
            self.since_s = self.server.loop.time()
        if self.in_head:
            self.head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # not taken up: the request was answered as any other
            self.refused = True
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refusal):
                self.refuse(cause.status, cause.message)
            else:
                self.refuse(400, f"malformed HTTP request: {error}")
        else:
            if self.in_head and self.head_bytes > self.server.limits.header_bytes:
                self.refuse(431, f"headers: expected at most {self.server.limits.header_bytes:,} bytes")

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.active is not None and self.active.on_drain is not None:
            self.active.on_drain()

    # httptools

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.request_headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.in_head = False
        if sum(len(name) + len(value) for name, value in self.request_headers) > self.server.limits.header_bytes:
            raise _Refusal(431, f"headers: expected at most {self.server.limits.header_bytes:,} bytes")
        limit = self.server.limits.body_bytes
        for name, value in self.request_headers:
            if name == b"content-length" and int(value) > limit:
                raise _Refusal(413, f"body: got {int(value):,} bytes, expected at most {limit:,}")
            if name == b"expect" and value.lower() == b"100-continue":
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self.body.append(data)
        self.body_bytes += len(data)
        if self.body_bytes > self.server.limits.body_bytes:
            raise _Refusal(413, f"body: expected at most {self.server.limits.body_bytes:,} bytes")

    def on_message_complete(self) -> None:
        self.http11 = self.parser.get_http_version() == "1.1"
        method = self.parser.get_method().decode("ascii")
        keep_alive = self.parser.should_keep_alive() and not self.parser.should_upgrade()
        exchange = Exchange(self, method, self.target, self.request_headers, keep_alive)
        exchange.body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self._reset()
        self.reading = False
        if self.active is None:
            self._handle(exchange)
        else:
            self.queue.append(exchange)
            self.queued_bytes += len(exchange.body)
            if len(self.queue) > _MOST_QUEUED or self.queued_bytes > self.server.limits.body_bytes:
                self.transport.abort()  # to read no more would be not to see that the client leaves

    # the exchanges

    def _handle(self, exchange: Exchange) -> None:
        if exchange.closed:  # the client left before it was its turn
            return
        self.active = exchange
        try:
            self.server.handler(exchange)
        except Exception:
            _LOG.exception("the handler of %s %s failed", exchange.method, exchange.path)
            if exchange.started:
                exchange.abort()
            else:
                exchange.respond(500, error_body("internal error", "InternalServerError", 500))

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def answered(self, keep_alive: bool) -> None:
        """The active exchange is complete: the next one, if the connection goes on."""
        self.active = None
        self.since_s = self.server.loop.time()
        if not keep_alive or self.server.closing:
            self.transport.close()
        elif self.queue:
            self.active = following = self.queue.popleft()  # what comes meanwhile is behind it
            self.queued_bytes -= len(following.body)
            self.server.loop.call_soon(self._handle, following)

    def refuse(self, status: int, message: str) -> None:
        """Answer what cannot be a request, and close: where the next would begin is not known."""
        self.refused = True
        if self.active is not None:
            self.transport.abort()
            return
        exchange = Exchange(self, "", b"", [], keep_alive=False)
        self.active = exchange
        exchange.respond(status, error_body(message, "BadRequestError", status))

    def sweep(self, now_s: float) -> None:
        """Close what is idle or too slow."""
        if self.active is not None:
            return
        if self.reading and now_s - self.since_s > self.server.limits.request_s:
            self.refuse(408, f"expected a complete request within {self.server.limits.request_s:g} s")
        elif not self.reading and now_s - self.since_s > self.server.limits.idle_s:
            self.transport.close()


class _Refusal(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


class HttpServer:
    """A listening server; made by `serve`.

    Attributes:
        port: that it listens on.
        cuts: it has closed and ends what is left: clients that go now do not leave by themselves.
    """

    def __init__(self, handler: Handler, limits: Limits):
        self.handler = handler
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.connections: set[_Connection] = set()
        self.closing = False
        self.cuts = False
        self.port = 0
        self._server: asyncio.Server
        self._sweeper: asyncio.TimerHandle

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None, shared: bool) -> None:
        self._server = await self.loop.create_server(
            lambda: _Connection(self), host, port, ssl=tls, backlog=2048, reuse_port=shared or None
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for connection in list(self.connections):
            connection.sweep(now_s)
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening, let exchanges end for `grace_s`, then cut what is left."""
        self.closing = True
        self._sweeper.cancel()
        self._server.close()
        for connection in list(self.connections):
            if connection.active is None:
                connection.transport.close()
        deadline_s = self.loop.time() + grace_s
        while self.connections and self.loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        self.cuts = True
        for connection in list(self.connections):
            connection.transport.abort()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), 1.0)


async def serve(
    handler: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    shared: bool = False,
) -> HttpServer:
    """Listen.

    Args:
        handler: called with every complete request.
        host: address to bind.
        port: 0 takes a free one, `HttpServer.port`.
        limits: see `Limits`.
        tls: for HTTPS.
        shared: other processes listen there too, and connections are spread.

    Raises:
        OSError: the address cannot be bound.
    """
    server = HttpServer(handler, limits or Limits())
    await server._listen(host, port, tls, shared)
    return server
