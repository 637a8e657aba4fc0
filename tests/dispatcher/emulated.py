"""Emulated engines in a thread of their own, and a plain HTTP client for them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from fleetpilot.dispatcher.emulator import EmulatedEngine, EmulatedFleet, Options
from fleetpilot.fleet.profiles import HardwareProfile, load_profile

T = TypeVar("T")

WAIT_S = 60.0
FAST = load_profile("tiny-cpu").replace(
    name="fast", block_size=16, kv_blocks=600, max_model_len=4096, a_s=0.001, b_s=1e-6, c_s=0.0, d_s=1e-5, e_s=0.0
)
"""A step takes about a millisecond."""
SLOW = FAST.replace(name="slow", a_s=0.03)


class Answer:
    """Status, headers and body of an answer."""

    def __init__(self, response: http.client.HTTPResponse):
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Stream:
    """A streamed answer."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse):
        self.connection = connection
        self.response = response
        self.status = response.status
        self.done = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The events up to [DONE]."""
        for line in self.response:
            if line.startswith(b"data: "):
                if line == b"data: [DONE]\n":
                    self.done = True
                    self.response.read()
                    return
                yield json.loads(line[6:])

    def close(self) -> None:
        """Go away."""
        if self.connection.sock is not None:
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()


class Emulated:
    """A fleet that is served until `close`."""

    def __init__(self, profiles: Sequence[HardwareProfile], options: Options):
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.pool = ThreadPoolExecutor(16)
        self.fleet = EmulatedFleet(profiles, options)
        self.run(self.fleet.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the engines' event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def do(self, work: Callable[[EmulatedEngine], T], engine: int = 0) -> T:
        async def call() -> T:
            return work(self.fleet.engines[engine])

        return self.run(call())

    def close(self) -> None:
        self.run(self.fleet.stop())
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()

    def _send(
        self, engine: int, method: str, path: str, body: object, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.fleet.engines[engine].port, timeout=WAIT_S)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {"content-type": "application/json"} if content is not None else {}
        connection.request(method, path, content, {**own, **headers})
        return connection, connection.getresponse()

    def get(self, path: str, engine: int = 0, **headers: str) -> Answer:
        connection, response = self._send(engine, "GET", path, None, headers)
        answer = Answer(response)
        connection.close()
        return answer

    def post(self, path: str, body: object, engine: int = 0, headers: dict[str, str] | None = None) -> Answer:
        connection, response = self._send(engine, "POST", path, body, headers or {})
        answer = Answer(response)
        connection.close()
        return answer

    def stream(self, path: str, body: dict[str, Any], engine: int = 0, headers: dict[str, str] | None = None) -> Stream:
        return Stream(*self._send(engine, "POST", path, {**body, "stream": True}, headers or {}))

    def stream_later(
        self, path: str, body: dict[str, Any], engine: int = 0, headers: dict[str, str] | None = None
    ) -> Future[Stream]:
        """A stream that may take its time to begin."""
        return self.pool.submit(self.stream, path, body, engine, headers)

    def complete(self, engine: int = 0, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The body of a completion that was not streamed."""
        answer = self.post("/v1/completions", body, engine, headers)
        assert answer.status == 200, answer.body
        return answer.json

    def metric(self, name: str, engine: int = 0) -> float:
        """The value of one sample, named with labels except engine and model."""
        for line in self.get("/metrics", engine).body.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            plain = sample.replace('engine="0",', "").replace(',model_name="emulated"', "")
            if plain.replace('{model_name="emulated"}', "").replace('model_name="emulated",', "") == name:
                return float(value)
        raise AssertionError(f"no metric {name}")


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until it does."""
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.01)
