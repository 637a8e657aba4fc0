"""An engine that computes nothing, as light as Python can have it, for what stands in front of it to be measured.

It speaks as much of vLLM's HTTP as dispatchers ask for: completions, streamed or not, ``/health``, ``/v1/models``, and
a ``/metrics`` of the length of vLLM's. All streams get a token at every step, as those of one batch do.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import uvloop

MODEL = "tiny"
STEP_S = 0.02
_METRICS_BYTES = 60_000
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')
_PROMPT_IDS = list(range(1000, 1040))


def _answer(status: bytes, body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, content_type, len(body)) + body


def _part(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _completion(**choice: object) -> dict[str, object]:
    whole = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None} | choice
    kind = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1790000000, "model": MODEL}
    return kind | {"choices": [whole]}


def _event(**choice: object) -> bytes:
    return _part(b"data: " + json.dumps(_completion(**choice), separators=(",", ":")).encode() + b"\n\n")


def _events(with_ids: bool) -> tuple[bytes, bytes, bytes]:
    """The first of a stream, one of the middle, and the last."""
    ids: dict[str, object] = {"prompt_token_ids": None, "token_ids": [1234]} if with_ids else {}
    first = ids | {"prompt_token_ids": _PROMPT_IDS} if with_ids else ids
    end = _event(**ids, finish_reason="length") + _part(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return _event(**first), _event(**ids), end


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENTS = {with_ids: _events(with_ids) for with_ids in (False, True)}
_USAGE = {"prompt_tokens": 40, "total_tokens": 41, "completion_tokens": 1}
_COMPLETION = _answer(b"200 OK", json.dumps(_completion(finish_reason="length") | {"usage": _USAGE}).encode())
_ROUTES = {
    b"/health": _answer(b"200 OK", b""),
    b"/v1/models": _answer(
        b"200 OK", json.dumps({"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]}).encode()
    ),
    b"/version": _answer(b"200 OK", b'{"version":"0.32.0"}'),
    b"/tokenize": _answer(b"200 OK", json.dumps({"count": 40, "max_model_len": 8192, "tokens": _PROMPT_IDS}).encode()),
}
_NOT_FOUND = _answer(b"404 Not Found", b'{"detail":"Not Found"}')


class _Connection(asyncio.Protocol):
    def __init__(self, engine: _Engine):
        self.engine = engine
        self.transport: Any = None
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (head := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self.buffer, 0, head + 2)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self.buffer) < end:
                return
            path = self.buffer.split(b" ", 2)[1].partition(b"?")[0]
            body, self.buffer = self.buffer[head + 4 : end], self.buffer[end:]
            self._serve(path, body)

    def _serve(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/completions":
            self.transport.write(self.engine.metrics if path == b"/metrics" else _ROUTES.get(path, _NOT_FOUND))
        elif not _STREAM.search(body):
            self.transport.write(_COMPLETION)
        else:
            most = _MAX_TOKENS.search(body)
            first, middle, end = _EVENTS[b'"return_token_ids"' in body]
            self.transport.write(_STREAM_HEAD)
            self.engine.streams[self] = chain((first,), repeat(middle, int(most[1]) - 2 if most else 14), (end,))


class _Engine:
    def __init__(self, metrics: bytes):
        self.metrics = metrics
        self.streams: dict[_Connection, Iterator[bytes]] = {}  # events that are still to be sent

    async def step_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += STEP_S
            await asyncio.sleep(due_s - loop.time())
            for connection, events in list(self.streams.items()):
                event = next(events, None)
                if event is None:
                    self.streams.pop(connection, None)
                else:
                    connection.transport.write(event)


def _metrics() -> bytes:
    """As much text as vLLM has, and in it what dispatchers look for."""
    label = f'engine="0",model_name="{MODEL}"'
    line = f'vllm:inter_token_latency_seconds_bucket{{{label},le="%d.0"}} 0.0\n'
    told = [
        f"vllm:{name}{{{label}}} 0.0\n"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    ]
    told.append(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="10000",{label}}} 1.0\n')
    others = [line % number for number in range(_METRICS_BYTES // len(line))]
    text = "".join([*others[::2], *told, *others[1::2]])
    return _answer(b"200 OK", text.encode(), b"text/plain; version=0.0.4; charset=utf-8")


async def _serve() -> None:
    engine = _Engine(_metrics())
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await engine.step_for_ever()


def main() -> None:
    """Serve until the process is ended; the port is the first line of the output."""
    uvloop.run(_serve())
