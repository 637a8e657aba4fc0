"""An HTTP/1.1 client of one server: calls whose answers are handed on as they come."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from fleetpilot.dispatcher.http.server import Headers

_IDLE_S = 3.0
"""uvicorn, which serves vLLM, closes idle connections after 5 s; one that it just closes must not be used again."""


class CallError(Exception):
    """A call got no answer, or not all of it.

    Attributes:
        answered: whether any byte of an answer came.
        refused: nothing listens there.
        local: this process has no file descriptor left to ask with; the server is not to blame.
    """

    def __init__(self, message: str, *, answered: bool, refused: bool = False, local: bool = False):
        super().__init__(message)
        self.answered = answered
        self.refused = refused
        self.local = local


class Receiver(Protocol):
    """Gets an answer as it comes: `on_start`, `on_data` any number of times, then `on_end`, or `on_error` at any time.

    Nothing is called any more after `Call.cancel`.
    """

    def on_start(self, status: int, headers: Headers) -> None:
        """The head of the answer."""

    def on_data(self, data: bytes) -> None:
        """A part of the body."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_error(self, error: CallError) -> None:
        """It will not be."""


class Call:
    """A request on its way."""

    def __init__(self, client: HttpClient, request: bytes, receiver: Receiver):
        self._client = client
        self._request = request
        self._receiver: Receiver | None = receiver
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Close its connection: vLLM aborts the request. Nothing if the answer is complete."""
        self._receiver = None
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.call = None
            self._connection.transport.abort()
            self._connection = None

    def pause(self) -> None:
        """Read no more for now, so that the server is slowed down."""
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def _on(self, connection: _Connection) -> None:
        self._connecting = None
        self._connection = connection
        connection.begin(self, self._request)

    def _failed(self, error: CallError) -> None:
        receiver, self._receiver, self._connection = self._receiver, None, None
        if receiver is not None:
            receiver.on_error(error)

    def _ended(self) -> None:
        receiver, self._receiver, self._connection = self._receiver, None, None
        if receiver is not None:
            receiver.on_end()


class _Connection(asyncio.Protocol):
    def __init__(self, client: HttpClient):
        self.client = client
        self.transport: Any = None
        self.parser = httptools.HttpResponseParser(self)
        self.call: Call | None = None
        self.calls = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.answered = False
        self.until_close = False  # the body ends with the connection
        self.idle_since_s = 0.0

    def begin(self, call: Call, request: bytes) -> None:
        self.call = call
        self.calls += 1
        self.answered = False
        self.headers = []
        self.transport.write(request)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.call is None:
            self.transport.abort()
            return
        self.answered = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self.transport.abort()
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            call, self.call = self.call, None
            self.transport.abort()
            if call is not None:
                call._failed(CallError(f"{self.client.origin}: malformed HTTP answer: {error}", answered=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self.client._forget(self)
        call, self.call = self.call, None
        if call is None:
            return
        if self.until_close and exc is None:
            call._ended()
        elif not self.answered and self.calls > 1:
            self.client._connect(call)  # closed by the server while it lay idle: it never saw the request
        else:
            call._failed(CallError(f"{self.client.origin}: connection lost", answered=self.answered))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        names = {name for name, _ in self.headers}
        self.until_close = not names & {b"content-length", b"transfer-encoding"}
        if self.call is not None and self.call._receiver is not None:
            self.call._receiver.on_start(self.parser.get_status_code(), self.headers)

    def on_body(self, data: bytes) -> None:
        if self.call is not None and self.call._receiver is not None:
            self.call._receiver.on_data(data)

    def on_message_complete(self) -> None:
        call, self.call = self.call, None
        if call is None:
            return
        if self.parser.should_keep_alive():
            self.transport.resume_reading()
            self.client._give_back(self)
        else:
            self.transport.close()
        call._ended()


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


class HttpClient:
    """Calls to one server.

    Args:
        url: ``http://host:port`` or ``https://...``; a path in front of all targets may follow.
        connect_timeout_s: for a connection to be made.
        tls: for ``https``, instead of the system's certificates.

    Raises:
        ValueError: the URL is none of these.
    """

    def __init__(self, url: str, connect_timeout_s: float = 2.0, tls: ssl.SSLContext | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"engine URL {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"engine URL {url!r}: expected a port from 1 to 65535") from None
        self.origin = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/").encode()
        self._host = parts.hostname
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._host_header = parts.netloc.encode()
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()

    def call(self, method: str, target: str, headers: Headers, body: bytes, receiver: Receiver) -> Call:
        """Send a request.

        Args:
            method: ``GET``, ``POST``, ...
            target: path and query.
            headers: without ``host``, ``content-length`` and ``connection``, which are added.
            body: may be empty.
            receiver: gets the answer; never called from inside this function.
        """
        lines = [
            b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), self._prefix, target.encode(), self._host_header)
        ]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        lines += [b"\r\n", body]
        call = Call(self, b"".join(lines), receiver)
        connection = self._take()
        if connection is None:
            self._connect(call)
        else:
            call._on(connection)
        return call

    async def fetch(
        self, method: str, target: str, body: bytes = b"", headers: Headers = (), *, timeout_s: float = 10.0
    ) -> Answer:
        """Send a request and wait for the whole answer. Cancelled, or too late, it is aborted at the server.

        A body is JSON unless a header says otherwise.

        Raises:
            CallError: no whole answer came.
            TimeoutError: none came in time.
        """
        if body and not any(name == b"content-type" for name, _ in headers):
            headers = [(b"content-type", b"application/json"), *headers]
        collector = _Collector()
        call = self.call(method, target, headers, body, collector)
        try:
            async with asyncio.timeout(timeout_s):
                return await collector.answer
        finally:
            call.cancel()

    def close(self) -> None:
        """Close all connections; calls on their way fail."""
        for connection in list(self._open):
            connection.transport.abort()

    def _take(self) -> _Connection | None:
        oldest_s = time.monotonic() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= oldest_s and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None

    def _give_back(self, connection: _Connection) -> None:
        now_s = time.monotonic()
        connection.idle_since_s = now_s
        self._idle.append(connection)
        while self._idle and self._idle[0].idle_since_s < now_s - _IDLE_S:
            self._idle.popleft().transport.close()

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _connect(self, call: Call) -> None:
        call._connecting = asyncio.get_running_loop().create_task(self._connected(call))

    async def _connected(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            reason = str(error) or f"no connection within {self._connect_timeout_s:g} s"
            local = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            call._failed(CallError(f"{self.origin}: {reason}", answered=False, refused=refused, local=local))
            return
        self._open.add(connection)
        call._on(connection)


class _Collector:
    """A receiver that waits for the whole answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: Headers = ()
        self._parts: list[bytes] = []

    def on_start(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._parts.append(data)

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, self._headers, b"".join(self._parts)))

    def on_error(self, error: CallError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
