"""An emulated engine: vLLM's HTTP interface on its own port, over an instance of the cluster model in real time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from fleetpilot.dispatcher.emulator import transfer
from fleetpilot.dispatcher.emulator.answers import Answer, Choice
from fleetpilot.dispatcher.emulator.engine import Engine, Job
from fleetpilot.dispatcher.emulator.metrics import CONTENT_TYPE, Metrics
from fleetpilot.dispatcher.emulator.protocol import (
    Generation,
    RequestError,
    chat_text,
    error_body,
    invalid,
    read_body,
    read_chat,
    read_completion,
    read_tokens,
)
from fleetpilot.dispatcher.emulator.vocabulary import NAMES, detokenize, tokenize
from fleetpilot.dispatcher.http.server import Exchange, HttpServer, serve
from fleetpilot.fleet.profiles import HardwareProfile

VERSION = "0.32.0"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_log = logging.getLogger(__name__)
_MOST_STEPS = 64
"""Boundaries done at a time where the process is behind: requests must be heard meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an emulated engine is like, beside its profile.

    Attributes:
        model: the served model's name.
        priority_order: waiting requests and victims go by priority (``--scheduling-policy priority``).
        mean_tokens: mean length of answers that are not limited.
        lease_s: how long blocks stay pinned that another engine may pull.
        bandwidth_bytes_per_s: of the link over which blocks are pulled.
        round_trip_s: added to each pull.
        kv_load_failure_policy: a request whose blocks cannot be pulled is computed, ``recompute``, or fails, ``fail``.
        seed: of the iteration times' jitter.
    """

    model: str = "emulated"
    priority_order: bool = True
    mean_tokens: float = 256.0
    lease_s: float = 30.0
    bandwidth_bytes_per_s: float = 2.6e9
    round_trip_s: float = 0.012
    kv_load_failure_policy: str = "recompute"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("mean_tokens", 1.0),
            ("lease_s", 0.0),
            ("bandwidth_bytes_per_s", 1.0),
            ("round_trip_s", 0.0),
        ):
            if not low <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected a finite number >= {low:g}")
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise ValueError(f"kv_load_failure_policy = {self.kv_load_failure_policy!r}: expected recompute or fail")
        if not self.model:
            raise ValueError("model = '': expected a name")


@dataclass
class Faults:
    """What goes wrong, for tests; may be changed while the engine runs.

    Attributes:
        wedged: iterations end no more, while ``/health`` stays green; see `EmulatedEngine.wedge`.
        unhealthy: ``/health`` answers 503.
        refuse: status with which generation is refused before it begins, as vLLM's admission does with 503; None: not.
        metrics: turns the text of ``/metrics`` into what is told.
    """

    wedged: bool = False
    unhealthy: bool = False
    refuse: int | None = None
    metrics: Callable[[str], str] | None = field(default=None, repr=False)


class _Running(NamedTuple):
    """A choice of an answer while it is generated."""

    name: str
    answer: Answer
    choice: Choice
    job: Job


class EmulatedEngine:
    """One engine on one port. `start` it inside an event loop.

    Attributes:
        engine: the scheduler and its memory.
        faults: see `Faults`.
        leases: blocks kept for other engines.
        engine_id: as ``kv_transfer_params`` name it.
        port: it listens on, once started.
    """

    def __init__(self, profile: HardwareProfile, options: Options | None = None):
        self.options = options or Options()
        self.profile = profile.replace(priority_order=self.options.priority_order)
        self.engine = Engine(self.profile, self.options.seed)
        self.metrics = Metrics(self.options.model)
        self.faults = Faults()
        self.engine_id = str(uuid.uuid4())
        self.host = ""
        self.port = 0
        self._server: HttpServer | None = None
        self._loop: asyncio.AbstractEventLoop
        self._zero_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._requests: dict[str, list[_Running]] = {}  # by the id that aborts them
        self._exchanges: set[Exchange] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.leases = transfer.Leases(self._release, self.options.lease_s, self._count_expired)
        self._routes: dict[tuple[str, str], Callable[[Exchange], None]] = {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/load"): self._load,
            ("GET", "/kv_event_sources"): lambda exchange: exchange.respond(200, b"{}"),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/inference/v1/abort_requests"): self._abort_requests,
            ("POST", transfer.READ_PATH): self._kv_read,
            ("POST", transfer.RELEASE_PATH): self._kv_release,
        }

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        self._zero_s = self._loop.time()
        self._server = await serve(self._handle, host, port)
        self.host = host
        self.port = self._server.port
        transfer.announce(self)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop listening, let requests end for `grace_s`, and cut the rest."""
        transfer.retire(self)
        if self._server is not None:
            await self._server.close(grace_s)
            self._server = None
        self._schedule()
        for task in list(self._tasks):
            task.cancel()
        self.leases.clear()

    async def kill(self) -> None:
        """As a process that dies: the port is closed and every stream is cut."""
        self.faults.wedged = True
        for exchange in list(self._exchanges):
            exchange.on_closed = None
            exchange.abort()
        self._exchanges.clear()
        await self.stop()

    async def crash(self) -> None:
        """As a process whose scheduler dies: every request ends in an error, then the port is closed."""
        for running in [one for same in self._requests.values() for one in same]:
            if not running.answer.exchange.closed:
                self._fail(running, DEAD)
        await self.stop()

    def wedge(self) -> None:
        """From now on nothing goes on, while the engine looks healthy."""
        self._catch_up()
        self.faults.wedged = True
        self._schedule()

    def unwedge(self) -> None:
        """Go on, from where the engine's clock stood still."""
        self.faults.wedged = False
        self._zero_s = self._loop.time() - max(self.engine.time_s, min(self._now_s(), self.engine.next_s))
        self._schedule()

    # --- time --------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._loop.time() - self._zero_s

    def _catch_up(self) -> float:
        """Do what is due; the time of what happens now."""
        now_s = self._now_s()
        for _ in range(_MOST_STEPS):
            if self.engine.next_s > now_s or self.faults.wedged:
                break
            self.engine.step()
        return max(self.engine.time_s, min(now_s, self.engine.next_s))

    def _tick(self) -> None:
        self._timer = None
        self._timer_s = float("inf")
        self._catch_up()
        self._schedule()

    def _schedule(self) -> None:
        """See to it that the next boundary comes in time."""
        next_s = float("inf") if self.faults.wedged or self._server is None else self.engine.next_s
        if next_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = next_s
        if next_s < float("inf"):
            self._timer = self._loop.call_at(self._zero_s + next_s, self._tick)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, exchange: Exchange) -> None:
        route = self._routes.get((exchange.method, exchange.path))
        try:
            if route is None:
                known = any(path == exchange.path for _, path in self._routes)
                message, status = ("Method Not Allowed", 405) if known else ("Not Found", 404)
                exchange.respond(status, orjson.dumps({"detail": message}))
                return
            route(exchange)
        except RequestError as error:
            exchange.respond(error.status, error.body)
        except Exception as error:
            _log.exception("%s %s", exchange.method, exchange.path)
            exchange.respond(500, error_body(str(error), "InternalServerError", None, 500))

    def _completions(self, exchange: Exchange) -> None:
        self._generate(exchange, read_completion)

    def _chat(self, exchange: Exchange) -> None:
        self._generate(exchange, read_chat)

    def _generate(self, exchange: Exchange, parse: Callable[[Exchange, str, int], Generation]) -> None:
        if self.faults.refuse is not None:
            status = self.faults.refuse
            raise RequestError("The engine takes no more requests.", "ServiceUnavailableError", status=status)
        try:
            generation = parse(exchange, self.options.model, self.profile.max_model_len)
        except RequestError:
            self._say_rejected(exchange)
            raise
        answer = Answer(exchange, generation, mean_tokens=self.options.mean_tokens)
        running = [self._start(answer, choice) for choice in answer.choices]
        self._exchanges.add(exchange)

        def gone() -> None:
            self._exchanges.discard(exchange)
            for one in running:
                self._abort(one, tell=False)

        exchange.on_closed = gone
        self._schedule()

    def _start(self, answer: Answer, choice: Choice) -> _Running:
        generation = answer.generation

        def on_tokens(job: Job, first: int, last: int) -> None:
            self._count_tokens(job, first, last)
            if job.ended:
                self._end(running)
            answer.advance(choice, last)
            if answer.open == 0:
                self._exchanges.discard(answer.exchange)

        job = Job(choice.prompt, choice.tokens, on_tokens, generation.priority, generation.salt)
        job.keep = bool(generation.kv.get("do_remote_decode"))
        name = generation.id if generation.chat else f"{generation.id}-{choice.index // generation.choices}"
        running = _Running(name, answer, choice, job)
        self._requests.setdefault(name, []).append(running)
        now_s = self._catch_up()
        if transfer.wants_pull(generation.kv):
            tokens = int(generation.kv.get("remote_num_tokens") or 0)
            self.engine.pull(job, tokens, now_s, lambda _, missing: self._run(self._copy(running, missing)))
        else:
            self.engine.submit(job, now_s)
        return running

    def _count_tokens(self, job: Job, first: int, last: int) -> None:
        metrics, now_s = self.metrics, self.engine.time_s
        metrics.generation_tokens += last - first
        if first == 0:
            metrics.first_token_s.observe(now_s - job.arrival_s)
            metrics.queue_s.observe(job.admitted_s - job.arrival_s)
            metrics.prompt_tokens += len(job.prompt)
            metrics.cached_tokens += job.cached_tokens
            metrics.pulled_tokens += job.pulled_tokens
        else:
            metrics.gap_s.observe(now_s - job.last_token_s)

    def _forget(self, running: _Running) -> bool:
        """The request has ended; False if it had before."""
        same = self._requests.get(running.name, [])
        if running not in same:
            return False
        same.remove(running)
        if not same:
            del self._requests[running.name]
        return True

    def _end(self, running: _Running) -> None:
        """All tokens have come."""
        self._forget(running)
        _, answer, choice, job = running
        self.metrics.ended[choice.finish_reason] += 1
        self.metrics.whole_s.observe(self.engine.time_s - job.arrival_s)
        if job.keep:
            params = self._grant(running.name, job)
            if choice.index == 0:
                answer.kv_transfer_params = params

    def _abort(self, running: _Running, *, tell: bool) -> None:
        """End a request before its end; `tell` the client so."""
        if not self._forget(running):
            return
        self.engine.abort(running.job, self._catch_up())
        self._schedule()
        self.metrics.ended["abort"] += 1
        if tell:
            running.answer.abort(running.choice)
            if running.answer.open == 0:
                self._exchanges.discard(running.answer.exchange)

    def _fail(self, running: _Running, message: str) -> None:
        """The request, all its choices, ends in an error."""
        self.metrics.ended["error"] += 1
        for other in [one for same in self._requests.values() for one in same if one.answer is running.answer]:
            self._forget(other)
            self.engine.abort(other.job, self._catch_up())
        running.answer.fail(message)
        self._exchanges.discard(running.answer.exchange)

    # --- blocks that other engines pull, or that are pulled ----------------------------------------------------------

    def _grant(self, name: str, job: Job) -> dict[str, Any]:
        """Keep the blocks of a request that has ended; what names them."""
        lease = f"{name}-{secrets.token_hex(4)}"
        tokens = np.concatenate([job.prompt, job.answer])[:-1]
        blocks: list[int] = []
        if job.lease >= 0:
            blocks = self.engine.hold_of(job.lease)
            if len(tokens) % self.profile.block_size:
                blocks.append(self.profile.kv_blocks)  # the last one is not full and has no number of its own
            self.leases.grant(lease, job.lease, tokens)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": lease,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.profile.tp,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(tokens) if blocks else 0,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": job.cached_tokens,
        }

    def _release(self, hold: int) -> None:
        self.engine.release(hold, self._catch_up())
        self._schedule()

    def _count_expired(self) -> None:
        self.metrics.expired_leases += 1

    async def _copy(self, running: _Running, missing: int) -> None:
        """Pull the tokens that are missing here; if that fails, they are computed, or the request fails."""
        job, kv = running.job, running.answer.generation.kv
        tokens = job.prompt[: job.pulled_tokens]
        there = missing <= 0 or await transfer.read(kv, tokens)
        if missing > 0 and there:
            seconds = missing * self.profile.kv_bytes_per_token / self.options.bandwidth_bytes_per_s
            end_s = self._loop.time() + self.options.round_trip_s + seconds
            while there and ((left_s := end_s - self._loop.time()) > 0 or transfer.stands_still(kv)):
                await asyncio.sleep(max(0.01, min(left_s, self.options.lease_s / 6)))
                there = await transfer.read(kv, tokens)
        if not there and not job.ended:
            self.metrics.failed_pulls += 1
            if self.options.kv_load_failure_policy == "fail":
                self._fail(running, "Internal server error")
        self.engine.end_pull(job, there, self._catch_up())
        self._schedule()
        await transfer.release(kv)

    def _say_rejected(self, exchange: Exchange) -> None:
        """Blocks that the request named are not going to be read."""
        try:
            kv = orjson.loads(exchange.body)["kv_transfer_params"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return
        if isinstance(kv, dict) and transfer.wants_pull(kv):
            self._run(transfer.release(kv))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _kv_read(self, exchange: Exchange) -> None:
        body = read_body(exchange)
        there = self.leases.read(str(body.get("request_id")), str(body.get("digest")), int(body.get("tokens") or 0))
        exchange.respond(200 if there else 404, b"{}")

    def _kv_release(self, exchange: Exchange) -> None:
        self.leases.release(str(read_body(exchange).get("request_id")))
        exchange.respond(200, b"{}")

    # --- the other routes --------------------------------------------------------------------------------------------

    def _models(self, exchange: Exchange) -> None:
        now = int(time.time())
        permission = {
            "id": f"modelperm-{secrets.token_hex(8)}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self.options.model,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": self.profile.model,
            "parent": None,
            "max_model_len": self.profile.max_model_len,
            "permission": [permission],
        }
        exchange.respond(200, orjson.dumps({"object": "list", "data": [model]}))

    def _health(self, exchange: Exchange) -> None:
        exchange.respond(503 if self.faults.unhealthy else 200, b"")

    def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, orjson.dumps({"version": VERSION}))

    def _metrics(self, exchange: Exchange) -> None:
        self._catch_up()
        text = self.metrics.text(self.engine)
        if self.faults.metrics is not None:
            text = self.faults.metrics(text)
        exchange.respond(200, text.encode(), CONTENT_TYPE)

    def _load(self, exchange: Exchange) -> None:
        exchange.respond(200, orjson.dumps({"server_load": len(self._exchanges)}))

    def _tokenize(self, exchange: Exchange) -> None:
        body = read_body(exchange)
        prompt = body.get("prompt")
        if "messages" in body:
            prompt = chat_text(body, generate=body.get("add_generation_prompt") is not False)
        if not isinstance(prompt, str):
            invalid("string_type", ("prompt",), "Input should be a valid string", prompt)
        tokens = tokenize(prompt).tolist()
        names = [NAMES[token] for token in tokens] if body.get("return_token_strs") else None
        shown = {
            "count": len(tokens),
            "max_model_len": self.profile.max_model_len,
            "tokens": tokens,
            "token_strs": names,
        }
        exchange.respond(200, orjson.dumps(shown))

    def _detokenize(self, exchange: Exchange) -> None:
        tokens = read_tokens(read_body(exchange).get("tokens"), ("tokens",))
        exchange.respond(200, orjson.dumps({"prompt": detokenize(tokens)}))

    def _abort_requests(self, exchange: Exchange) -> None:
        try:
            body = orjson.loads(exchange.body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"JSON decode error: {error}", "Bad Request") from None
        names = body.get("request_ids") if isinstance(body, dict) else None
        if names is None:
            raise RequestError("Missing 'request_ids' in request body", "Bad Request")
        exchange.respond(200, b"")
        for name in [names] if isinstance(names, str) else names:
            for running in list(self._requests.get(str(name), ())):
                self._abort(running, tell=True)
