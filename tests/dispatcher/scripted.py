"""Engines that speak vLLM's HTTP and do on cue what real ones do by accident.

Token n of any answer is a function of all before it, so an answer that goes on elsewhere is the same. A token's text is
``<id>``. What vLLM itself does is tested with vLLM (tests/vllm); here it is the dispatcher that is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.http.client import Answer, HttpClient
from fleetpilot.dispatcher.http.server import Exchange, HttpServer, error_body, serve
from fleetpilot.dispatcher.http.sse import event
from fleetpilot.dispatcher.service import Dispatcher

WAIT_S = 60.0

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {usage}
vllm:num_preemptions_total{{engine="0",model_name="tiny"}} 0.0
vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="257"}} 1.0
"""


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test to its end, within some minutes."""

    async def bounded() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await test()

    asyncio.run(bounded())


def next_token(token_ids: list[int]) -> int:
    """The token after these."""
    return (31 * sum(token_ids[-8:]) + len(token_ids)) % 997


def answer_tokens(prompt: list[int], count: int) -> list[int]:
    """The whole answer."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class ScriptedEngine:
    """One engine.

    Attributes:
        token_s: time of a token.
        seen: bodies of the requests that came, with their headers.
        running: requests that are being answered.
        aborted: requests whose client went away before their end.
        pinned: blocks' names that are held for a copy.
        copied: copies that were made here, as (pinned name, tokens).
    """

    def __init__(self, name: str = "engine"):
        self.name = name
        self.token_s = 0.002
        self.seen: list[tuple[dict[str, Any], dict[bytes, bytes]]] = []
        self.running = 0
        self.aborted = 0
        self.pinned: set[str] = set()
        self.copied: list[tuple[str, int]] = []
        self.server: HttpServer
        # faults
        self.metrics: bytes | None = None
        self.healthy = True
        self.refuse: tuple[int, dict[bytes, bytes]] | None = None
        self.refuse_if: Any = None
        self.cut_after: int | None = None
        self.error_after: int | None = None
        self.stall_after: int | None = None
        self.garbage_after: int | None = None
        self.probe_hangs = False
        self.copy_hangs = False
        self.priorities = True
        self.kv = True
        self._numbers = itertools.count()
        self._exchanges: set[Exchange] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def start(self, port: int = 0) -> None:
        self.server = await serve(self._handle, port=port)

    async def kill(self) -> None:
        """All its connections break, and nothing listens any more."""
        for connection in list(self.server.connections):
            connection.transport.abort()
        await self.server.close()

    def _handle(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        exchange.on_closed = task.cancel

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            exchange.respond(200 if self.healthy else 503, b"")
        elif exchange.path == "/metrics":
            text = METRICS.format(running=float(self.running), usage=min(1.0, 0.1 * self.running))
            exchange.respond(200, self.metrics if self.metrics is not None else text.encode(), b"text/plain")
        elif exchange.path == "/v1/models":
            exchange.respond(200, orjson.dumps({"data": [{"id": "tiny", "max_model_len": 8192}]}))
        elif exchange.path == "/version":
            exchange.respond(200, b'{"version":"0.32.0"}')
        elif exchange.path == "/server_info":
            policy = "priority" if self.priorities else "fcfs"
            exchange.respond(200, orjson.dumps({"vllm_config": {"scheduler_config": {"policy": policy}}}))
        elif exchange.path == "/tokenize":
            body = orjson.loads(exchange.body)
            exchange.respond(200, orjson.dumps({"tokens": _tokens(body)}))
        elif exchange.path == "/inference/v1/abort_requests":
            exchange.respond(200, b"")
        elif exchange.path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(exchange, orjson.loads(exchange.body))
        else:
            exchange.respond(404, b'{"detail":"Not Found"}')

    async def _complete(self, exchange: Exchange, body: dict[str, Any]) -> None:
        probing = body.get("kv_transfer_params") is not None
        if body.get("max_tokens") != 1 or probing:
            self.seen.append((body, dict(exchange.headers)))
        if body.get("model") != "tiny":
            exchange.respond(404, error_body(f"The model `{body.get('model')}` does not exist.", "NotFoundError", 404))
            return
        if self.refuse is not None and (self.refuse_if is None or self.refuse_if(body)):
            status, headers = self.refuse
            exchange.respond(status, error_body("no", "x", status), headers=list(headers.items()))
            return
        if probing:
            await self._transfer(exchange, body)
            return
        self.running += 1
        try:
            await self._stream(exchange, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _transfer(self, exchange: Exchange, body: dict[str, Any]) -> None:
        params = body["kv_transfer_params"]
        answer: dict[str, Any] = {"id": "cmpl-probe", "system_fingerprint": "vllm-scripted", "choices": []}
        if params.get("do_remote_decode"):
            if self.probe_hangs and len(body["prompt"]) > 3:
                await asyncio.sleep(WAIT_S)
            if self.kv:
                name = f"{self.name}-{next(self._numbers)}"
                self.pinned.add(name)
                place = {"remote_engine_id": self.name, "remote_host": "127.0.0.1", "remote_port": 1}
                what = {"remote_request_id": name, "remote_block_ids": [[1]]}
                answer["kv_transfer_params"] = {"do_remote_prefill": True} | place | what
        else:
            if self.copy_hangs:
                await asyncio.sleep(WAIT_S)
            self.copied.append((params["remote_request_id"], len(body["prompt"])))
        exchange.respond(200, orjson.dumps(answer))

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        prompt = _tokens(body)
        chat = "messages" in body
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + most, "completion_tokens": most}
        number = exchange.header(b"x-request-id") or b"0"
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + number.decode(),
            "object": "x",
            "created": 7,
            "model": "tiny",
        }
        if not body.get("stream"):
            await asyncio.sleep(self.token_s * most)
            text = "".join(f"<{token}>" for token in answer_tokens(prompt, most))
            exchange.respond(200, orjson.dumps(head | {"choices": [{"index": 0, "text": text}], "usage": usage}))
            return
        exchange.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        with_ids = bool(body.get("return_token_ids"))
        if chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunk = head | {"choices": [choice], "prompt_token_ids": prompt if with_ids else None}
            exchange.write(event(orjson.dumps(chunk)))
        for count, token in enumerate(answer_tokens(prompt, most)):
            if count == self.cut_after:
                exchange.abort()
                return
            if count == self.error_after:
                exchange.write(event(b'{"error":{"message":"EngineCore died","code":500}}'))
                exchange.finish()
                return
            if count == self.garbage_after:
                exchange.write(b"data: \xff\xfe{]\n\n")
            if count == self.stall_after:
                await asyncio.sleep(WAIT_S)
            await asyncio.sleep(self.token_s)
            choice = {"index": 0} | ({"delta": {"content": f"<{token}>"}} if chat else {"text": f"<{token}>"})
            choice |= {"logprobs": None, "finish_reason": "length" if count == most - 1 else None, "stop_reason": None}
            if not chat:
                choice["prompt_token_ids"] = prompt if with_ids and count == 0 else None
            choice["token_ids"] = [token] if with_ids else None
            exchange.write(event(orjson.dumps(head | {"choices": [choice]})))
        if (body.get("stream_options") or {}).get("include_usage"):
            exchange.write(event(orjson.dumps(head | {"choices": [], "usage": usage})))
        exchange.write(event(b"[DONE]"))
        exchange.finish()


def _tokens(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        return [9, *(ord(letter) % 512 for message in body["messages"] for letter in str(message["content"]))]
    prompt = body["prompt"]
    return [ord(letter) % 512 for letter in prompt] if isinstance(prompt, str) else list(prompt)


@contextlib.asynccontextmanager
async def a_fleet(
    engines: int = 2, policy: Any = None, **config: Any
) -> AsyncIterator[tuple[Dispatcher, HttpClient, list[ScriptedEngine]]]:
    """A dispatcher, with a policy or the name of one, in front of scripted engines, all ready, and a client of it."""
    scripted = [ScriptedEngine(f"engine{number}") for number in range(engines)]
    for engine in scripted:
        await engine.start()
    settings: dict[str, Any] = {
        "policy": "join-shortest-queue",
        "port": 0,
        "profile": "tiny-cpu",
        "poll_interval_s": 0.02,
    }
    if isinstance(policy, str):
        settings["policy"], policy = policy, None
    dispatcher = Dispatcher(ServeConfig(engines=tuple(e.url for e in scripted), **settings | config), policy)
    await dispatcher.start()
    try:
        await dispatcher.ready(engines, WAIT_S)
        yield dispatcher, HttpClient(f"http://127.0.0.1:{dispatcher.port}"), scripted
    finally:
        await dispatcher.stop()
        for engine in scripted:
            await engine.kill()


async def ask(client: HttpClient, headers: Any = (), route: str = "/v1/completions", **fields: Any) -> Answer:
    """A completion, of 40 tokens if nothing else is said."""
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0, "stream": True} | fields
    if route == "/v1/completions":
        body.setdefault("prompt", [1, 2, 3, 4])
    return await client.fetch("POST", route, orjson.dumps(body), headers, timeout_s=WAIT_S)


def text_of(answer: Answer) -> str:
    """A streamed answer's text."""
    out = []
    for line in answer.body.decode().split("\n\n"):
        if line.startswith("data: {"):
            for choice in orjson.loads(line[6:]).get("choices", ()):
                out.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(out)


def expected_text(prompt: list[int], count: int) -> str:
    """What a whole answer says."""
    return "".join(f"<{token}>" for token in answer_tokens(prompt, count))


async def until(condition: Any) -> None:
    """Wait for it."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)
