"""The dispatcher: takes clients' requests, asks the policy, moves what runs, and survives its engines."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import math
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson

from fleetpilot.agents import load_policy
from fleetpilot.dispatcher import dashboard, metrics, telemetry
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.decision_log import DecisionLog, Records
from fleetpilot.dispatcher.engine import Capabilities, Engine, EngineState
from fleetpilot.dispatcher.fleet import Fleet, RequestFacts
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.http.server import Exchange, Headers, HttpServer, Limits, error_body, serve
from fleetpilot.dispatcher.migration import Migration, migrate
from fleetpilot.dispatcher.policy_host import PolicyHost
from fleetpilot.dispatcher.prompts import Prompts
from fleetpilot.dispatcher.relay import Relay
from fleetpilot.dispatcher.requests import CHAT, COMPLETIONS, ApiRequest, BadRequest, parse_request
from fleetpilot.dispatcher.scaling.actuator import Actuator, make_actuator
from fleetpilot.dispatcher.scaling.scaler import Scaler
from fleetpilot.dispatcher.shadow import Shadow
from fleetpilot.dispatcher.tally import Tally
from fleetpilot.dispatcher.tracing import Tracing
from fleetpilot.dispatcher.workers.board import Board
from fleetpilot.dispatcher.workers.pool import Workers
from fleetpilot.dispatcher.workers.worker import Link
from fleetpilot.fleet.policy import CompiledPolicy, Policy, kinds_of, require_compiled
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import SLO_CLASSES
from fleetpilot.fleet.view import KIND_SCALE, KIND_SOURCE, NONE, empty_view

_LOG = logging.getLogger("fleetpilot.dispatcher")

_FAILURES_IN_A_ROW = 5
_OPEN_S = 5.0
"""An engine that failed so many calls in a row gets none for so long."""
_LEAST_RETRIES = 10
"""That may always be made, so that a quiet dispatcher can retry at all."""
_BUSY_S = 0.2
"""An engine that admits no more, and does not say for how long, is left alone for this time."""
_LONGEST_BUSY_S = 30.0
METRICS = "/metrics"
_FILE_S = 1.0
_MOVED = 20
_FIRST_MEAN_OUTPUT_TOKENS = 256.0
_LEARNING_RATE = 0.02


class Dispatcher:
    """A server in front of engines.

    It leads its fleet - watches engines, scales, writes the log - and serves clients. With several workers the process
    that is asked for leads, and each worker has a dispatcher that serves.

    Args:
        config: see `ServeConfig`.
        policy: instead of `config.policy`; not with several workers.
        actuator: instead of the one that `config.scaler` names.
        link: of a worker, to the process that leads.
        loaded: `load_policies` of the configuration, where that has been done.

    Raises:
        ValueError: a policy, profile or URL is not known or malformed.

    Attributes:
        fleet: engines and what is known of them.
        workers: that serve clients, where there are several; None where this process serves.
        at: by slot, the requests that an engine serves, by request id, in the order they came to it.
        counts: what happened so far, by name.
        downtimes_s: of the latest migrations.
        migrations: that go on.
        moved: the latest that ended, oldest first.
        log: of decisions, from `start` to `stop` where the configuration asks for one.
        scaler: None where the fleet is not scaled.
    """

    def __init__(
        self,
        config: ServeConfig,
        policy: Policy | None = None,
        actuator: Actuator | None = None,
        link: Link | None = None,
        loaded: Policies | None = None,
    ):
        if not (config.engines or config.engines_file or config.scaler):
            raise ValueError("engines: got none, expected at least one URL, or engines_file, emulate or scaler")
        self.config = config
        self._link = link
        loaded = loaded or load_policies(config, policy, with_shadow=link is None)
        self._shadow = loaded.shadow
        self.workers = Workers(config) if config.workers > 1 and link is None else None
        board = link.board if link is not None else self.workers.board if self.workers is not None else Board.alone()
        seed = config.seed + (link.life if link is not None else 0)  # what is drawn in one worker is not in another
        host = PolicyHost(
            loaded.policy,
            loaded.fallback,
            config.decision_deadline_s,
            seed,
            config.explore,
            dry_run=config.dry_run,
        )
        self.fleet = Fleet(load_profile(config.profile), host, SLO_CLASSES[config.slo], seed, board)
        self.at: list[dict[str, Relay]] = []
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.downtimes_s: deque[float] = deque(maxlen=10_000)
        self.migrations: set[Migration] = set()
        self.moved: deque[Migration] = deque(maxlen=_MOVED)
        self.prompts = Prompts(self)
        self._held: deque[Relay] = deque()
        self._homeless: deque[Relay] = deque()  # whose engine failed, waiting for another
        self._placing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: HttpServer | Workers | None = None
        self.log: Records | None = None
        self._ids = itertools.count()
        self._id_prefix = "" if link is None else f"{link.life}-"
        self._tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint else None
        self._keys = [key.encode() for key in config.api_keys]
        self._engine_key_headers = config.engine_key_headers

        self.scaler: Scaler | None = None
        if link is not None:
            return
        board.mean_output_tokens[0] = _FIRST_MEAN_OUTPUT_TOKENS
        for url in config.fixed_engines:
            self._add(url)
        if config.scaler:
            self.scaler = Scaler(self, actuator or make_actuator(config))

    @property
    def tracks(self) -> bool:
        """Whether streams are followed token by token, so that they can go on elsewhere."""
        return self.config.failover or self.config.migration

    @property
    def shadow(self) -> Shadow | None:
        """That is asked as well, in the process that leads."""
        return self.log.shadow if isinstance(self.log, DecisionLog) else None

    @property
    def port(self) -> int:
        """That it listens on."""
        assert self._server is not None
        return self._server.port

    @property
    def cuts(self) -> bool:
        """Whether it stops and cuts what is left."""
        return isinstance(self._server, HttpServer) and self._server.cuts

    async def start(self) -> None:
        """Listen, and watch the engines.

        Raises:
            OSError: the address cannot be bound, or a certificate not be read, or the decision log not be written.
            ValueError: the scaler's settings do not fit what is there.
        """
        config = self.config
        if config.decision_log or config.shadow:
            self._begin_log()
        if self.workers is None:
            await self._serve_clients()
        else:
            self._server = self.workers
            await self.workers.open(self)
        if self._link is not None:
            return
        for engine in self.fleet.engines:
            self._watch(engine)
        if config.engines_file:
            self.read_engines_file()
            self._run(self._every(_FILE_S, self.read_engines_file))
        if self.scaler is not None:
            await self.scaler.open()
            self._run(self.scaler.run())

    async def _serve_clients(self) -> None:
        config = self.config
        tls = None
        if config.tls_cert:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                tls.load_cert_chain(config.tls_cert, config.tls_key)
            except OSError as error:
                files = f"tls_cert = {config.tls_cert!r}, tls_key = {config.tls_key!r}"
                raise OSError(f"{files}: {error.strerror or error}") from None
        limits = Limits(
            body_bytes=config.max_body_bytes, connections=math.ceil(config.max_connections / config.workers)
        )
        shared = self._link is not None
        self._server = await serve(self.handle, config.host, config.port, limits=limits, tls=tls, shared=shared)
        self._run(self._every(config.hold_interval_s, self._tick))
        if config.migration:  # each worker in turn, about the requests that it serves
            self._run(self._every(config.rebalance_interval_s * config.workers, self.rebalance))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no new requests, let those on their way end for `grace_s`, then cut the rest."""
        if self.scaler is not None:
            self.scaler.pause()
        if self._server is not None:
            await self._server.close(grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.scaler is not None:
            await self.scaler.close()
        for engine in self.fleet.engines:
            engine.client.close()
        if self.log is not None:
            log, self.log, self.fleet.host.log = self.log, None, None
            await asyncio.to_thread(log.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self.workers is not None:
            self.fleet.board.close()

    def _begin_log(self) -> None:
        config = self.config
        self.log = self._link or DecisionLog(config.decision_log, config.decision_log_bytes, self._shadow)
        self.fleet.host.log = self.log

    async def reload(self, read: Callable[[], ServeConfig]) -> None:
        """Load the policies of new settings, and take them up when they are ready; requests go on meanwhile.

        Args:
            read: gives the settings, of which `RELOADED` is taken over. The rest needs a new start; a warning names
                what differs.

        Raises:
            ValueError, OSError: the settings cannot be read, or a policy is not known or cannot be loaded; nothing has
                changed then.
        """
        try:
            new, rest = self.config.reloaded(read())
            loaded = await asyncio.to_thread(load_policies, new, with_shadow=self._link is None)
            self.fleet.host.take_up(loaded.policy, loaded.fallback, new.explore, dry_run=new.dry_run)
        except Exception:
            self.counts["failed_reloads"] += 1
            raise
        self.config, self._shadow = new, loaded.shadow
        if isinstance(self.log, DecisionLog):
            self.log.shadow = self._shadow
        elif self.log is None and new.shadow:
            self._begin_log()
        if self._link is not None:
            return
        if self.workers is not None:
            self.workers.tell("reload", new)
        self.counts["reloads"] += 1
        for name in rest:
            _LOG.warning("%s has changed, which takes a new start", name)
        _LOG.info("reloaded: policy %s, shadow %s", new.policy, new.shadow or "none")

    async def ready(self, engines: int, timeout_s: float) -> None:
        """Wait until so many engines are ready.

        Raises:
            TimeoutError: they are not in time.
        """
        async with asyncio.timeout(timeout_s):
            while sum(engine.state == EngineState.READY for engine in self.fleet.engines) < engines:
                await asyncio.sleep(0.02)

    def _run(self, coroutine: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a task of the dispatcher failed", exc_info=task.exception())

    async def _every(self, interval_s: float, act: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            act()

    # engines come and go

    def _add(self, url: str) -> Engine:
        engine = self.fleet.add(url)
        self.at += [{} for _ in range(len(self.fleet.engines) - len(self.at))]
        return engine

    def _seat(self, slot: int, url: str) -> Engine:
        engine = self.fleet.seat(slot, url, EngineState.STARTING)
        self.at += [{} for _ in range(len(self.fleet.engines) - len(self.at))]
        return engine

    def _watch(self, engine: Engine) -> None:
        engine.watcher = self._run(telemetry.watch(self, engine))

    def read_engines_file(self) -> None:
        """Bring the fleet in line with the file. One that cannot be read changes nothing."""
        try:
            lines = Path(self.config.engines_file).read_text().splitlines()
            urls = dict.fromkeys(line.strip().rstrip("/") for line in lines if line.strip() and line.strip()[0] != "#")
            for url in urls:
                HttpClient(url)
        except (OSError, ValueError) as error:
            self.counts["unreadable_engine_files"] += 1
            if self.counts["unreadable_engine_files"] == 1:
                _LOG.warning("engines_file: %s", error)
            return
        self.set_engines(list(urls))

    def set_engines(self, urls: list[str]) -> None:
        """These engines, and no others: new ones join, the others drain and leave."""
        there = {engine.url: engine for engine in self.fleet.engines if engine.state != EngineState.ABSENT}
        for url in urls:
            if url not in there:
                self._watch(self._add(url))
            elif there[url].leaving:
                there[url].leaving = False
                if there[url].state == EngineState.DRAINING:
                    self.fleet.set_state(there[url], EngineState.READY)
        for url, engine in there.items():
            if url not in urls and not engine.leaving:
                _LOG.info("engine %d (%s) drains", engine.slot, engine.url)
                engine.leaving = True
                if engine.state == EngineState.READY:
                    self.fleet.set_state(engine, EngineState.DRAINING)

    def hear(self, slot: int, url: str, state: EngineState, capabilities: Capabilities | None) -> None:
        """What the process that leads says of an engine, in a worker."""
        engine = self.fleet.engines[slot] if slot < len(self.fleet.engines) else None
        if engine is None or engine.url != url or engine.state == EngineState.ABSENT:
            engine = self._seat(slot, url)
        engine.capabilities = capabilities
        if state == EngineState.FAILED and engine.serves:
            self._lose(engine, "the engine has failed")
        self.fleet.set_state(engine, state)
        if state == EngineState.READY:
            self.place_held()
        elif state == EngineState.ABSENT:
            engine.client.close()

    def hear_gone(self, slot: int, url: str, reason: str) -> None:
        """What a worker says of an engine, in the process that leads."""
        engine = self.fleet.engines[slot]
        if engine.url == url and engine.serves:
            self.engine_is_gone(engine, reason)

    def engine_left(self, engine: Engine) -> None:
        """An engine that drained is gone."""
        _LOG.info("engine %d (%s) is gone", engine.slot, engine.url)
        self.fleet.set_state(engine, EngineState.ABSENT)
        self.fleet.forget_poll(engine)
        engine.client.close()
        if engine.watcher is not None:
            engine.watcher.cancel()  # its slot may be another's from now on

    # clients

    def handle(self, exchange: Exchange) -> None:
        """A client's request."""
        route = _ROUTES.get((exchange.method, exchange.path))
        if route is None:
            known = any(path == exchange.path for _, path in _ROUTES)
            status, message = (405, "Method Not Allowed") if known else (404, "Not Found")
            exchange.respond(status, error_body(message, "NotFoundError", status))
        elif exchange.path.startswith("/v1/") and not self._is_authorised(exchange):
            exchange.respond(401, error_body("Unauthorized", "AuthenticationError", 401))
        else:
            route(self, exchange)

    def _is_authorised(self, exchange: Exchange) -> bool:
        if not self._keys:
            return True
        presented = (exchange.header(b"authorization") or b"").removeprefix(b"Bearer ")
        return any([hmac.compare_digest(presented, key) for key in self._keys])

    def engine_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """A request's headers, with the engines' key in place of the client's."""
        if self._engine_key_headers or self._keys:
            headers = [(name, value) for name, value in headers if name != b"authorization"]
        return [*headers, *self._engine_key_headers]

    def _serve_models(self, exchange: Exchange) -> None:
        models: dict[str, dict[str, object]] = {}
        for engine in self.fleet.engines:
            if engine.serves and engine.capabilities is not None:
                for name in engine.capabilities.models:
                    models.setdefault(
                        name,
                        {
                            "id": name,
                            "object": "model",
                            "created": int(time.time()),
                            "owned_by": "vllm",
                            "max_model_len": engine.capabilities.max_model_len,
                        },
                    )
        exchange.respond(200, orjson.dumps({"object": "list", "data": list(models.values())}))

    def _serve_health(self, exchange: Exchange) -> None:
        exchange.respond(200, b"", b"text/plain")

    def _serve_ready(self, exchange: Exchange) -> None:
        states = [engine.state.name.lower() for engine in self.fleet.engines]
        body = orjson.dumps({"engines": states})
        exchange.respond(200 if any(engine.serves for engine in self.fleet.engines) else 503, body)

    def _serve_dashboard(self, exchange: Exchange) -> None:
        exchange.respond(200, dashboard.page(), b"text/html; charset=utf-8", dashboard.HEADERS)

    def _serve_metrics(self, exchange: Exchange) -> None:
        self._serve_whole(exchange, b"text/plain; version=0.0.4; charset=utf-8")

    def _serve_dashboard_state(self, exchange: Exchange) -> None:
        self._serve_whole(exchange, b"application/json", dashboard.HEADERS)

    def _serve_whole(self, exchange: Exchange, content_type: bytes, headers: Headers = ()) -> None:
        """Answer with what all processes know."""
        if self._link is not None:
            self._link.ask(exchange, content_type, headers)
        else:
            tally = self.tally(watched=exchange.path != METRICS)
            exchange.respond(200, self._whole(exchange.path, tally), content_type, headers)

    async def page(self, path: str) -> bytes:
        """The body of ``/metrics`` or ``/dashboard/state``, for a worker that was asked."""
        assert self.workers is not None
        tally = self.tally()
        tally.add(await self.workers.tally(watched=path != METRICS))
        return self._whole(path, tally)

    def _whole(self, path: str, tally: Tally) -> bytes:
        return metrics.exposition(self, tally) if path == METRICS else orjson.dumps(dashboard.state(self, tally))

    def tally(self, *, watched: bool = False) -> Tally:
        """What this process counted so far.

        Args:
            watched: decisions are kept for the live page.
        """
        host = self.fleet.host
        if watched:
            dashboard.watch(host)
        moves = (*self.migrations, *reversed(self.moved))
        return Tally(
            outcomes=Counter(self.outcomes),
            events=Counter(self.counts),
            fallbacks=Counter(host.fallback_counts),
            decided=Counter(host.decided),
            records=Counter(self.log.counts) if self.log is not None else Counter(),
            downtimes_s=list(self.downtimes_s),
            migrations=[dashboard.migration(move) for move in moves],
            recent=list(host.recent),
        )

    def _serve_answer(self, exchange: Exchange) -> None:
        try:
            request_id = exchange.header(b"x-request-id") or f"fleetpilot-{self.new_id()}".encode()
            request = parse_request(exchange.path, exchange.body, exchange.header(b"x-vllm-priority"), request_id)
        except BadRequest as error:
            exchange.respond(400, error_body(error.message, "BadRequestError", 400))
            return
        if request.fields.get("kv_transfer_params") is not None and not self.config.client_kv_transfer:
            message = (
                "kv_transfer_params: expected none, wrong ones can kill an engine (client_kv_transfer allows them)"
            )
            exchange.respond(400, error_body(message, "BadRequestError", 400))
            return
        self.counts["requests"] += 1
        self.prompts.measure(exchange, request, self._admit)

    def new_id(self) -> str:
        """None like another of this dispatcher, whatever process it is of."""
        return f"{self._id_prefix}{next(self._ids)}"

    def _admit(self, exchange: Exchange, request: ApiRequest, facts: RequestFacts) -> None:
        if exchange.closed:
            return
        most = request.max_tokens
        mean = float(self.fleet.board.mean_output_tokens[0])
        facts.predicted_output_tokens = mean if most is None else min(mean, max(most, 1))
        span = self._tracing.begin(request, exchange.headers) if self._tracing is not None else None
        relay = Relay(self, exchange, request, facts, span)
        if self.fleet.held or not relay.place():
            self._held.append(relay)
            self._note_held()

    # what relays tell

    def serves(self, relay: Relay, streamed_tokens: int) -> None:
        """The relay's request, which is booked, is sent to its engine, with so many tokens of its answer behind it."""
        self.at[relay.slot][relay.facts.request_id] = relay
        if streamed_tokens:
            self.fleet.ledger.tokens(relay.facts.request_id, streamed_tokens)

    def leaves(self, relay: Relay) -> None:
        """The relay's request is not at its engine any more."""
        if relay.slot != NONE and self.at[relay.slot].pop(relay.facts.request_id, None) is not None:
            self.fleet.ledger.end(relay.facts.request_id)

    def on_end(self, relay: Relay, outcome: str) -> None:
        """The relay has ended."""
        self.leaves(relay)
        self.outcomes[outcome] += 1
        if self.log is not None or relay.span is not None:
            self._tell_outcome(relay, outcome)
        if outcome == "finished" and relay.tokens:
            mean = self.fleet.board.mean_output_tokens
            mean[0] += _LEARNING_RATE * (relay.tokens - mean[0])
        if relay in self._held:
            self._held.remove(relay)
            self._note_held()
        if relay in self._homeless:
            self._homeless.remove(relay)
        self._tick()

    def _tell_outcome(self, relay: Relay, outcome: str) -> None:
        fields = relay.outcome()
        if self.log is not None:
            self.log.outcome(outcome=outcome, **fields)
        if relay.span is not None:
            relay.span.end(outcome, fields)

    def on_resumed(self, relay: Relay, migration: Migration) -> None:
        """The first token of a relay's request came from its destination."""
        relay.moved_by = None
        migration.resumed_s = time.monotonic()
        downtime_s = migration.resumed_s - migration.stopped_s
        self.downtimes_s.append(downtime_s)
        relay.migrations += 1
        relay.downtime_s += downtime_s

    def may_retry(self) -> bool:
        """Whether the budget of retries allows one more."""
        return self.counts["retries"] < _LEAST_RETRIES + self.config.retry_share * self.counts["requests"]

    def on_engine_failure(self, engine: Engine, reason: str, *, admission: bool, headers: Headers) -> None:
        """A call to an engine failed. An engine that admits no more is not ill."""
        now_s = time.monotonic()
        if admission:
            self.counts["admission_rejections"] += 1
            self.fleet.block(engine, now_s + _retry_after_s(headers))
            return
        self.counts["engine_failures"] += 1
        engine.failures += 1
        _LOG.warning("engine %d (%s): %s", engine.slot, engine.url, reason)
        if engine.failures >= _FAILURES_IN_A_ROW:
            engine.failures = 0
            self.fleet.block(engine, now_s + _OPEN_S)
            self.counts["breaker_openings"] += 1

    def engine_is_gone(self, engine: Engine, reason: str) -> None:
        """An engine serves no more: its requests go on elsewhere, or fail."""
        if self._link is not None:
            self._link.gone(engine, reason)
        else:
            _LOG.warning("engine %d (%s) has failed: %s", engine.slot, engine.url, reason)
            self.counts["engines_lost"] += 1
        self._lose(engine, reason)

    def _lose(self, engine: Engine, reason: str) -> None:
        self.fleet.set_state(engine, EngineState.FAILED)
        for relay in list(self.at[engine.slot].values()):
            relay.engine_broke(reason)

    def send_elsewhere(self, engine: Engine) -> None:
        """The requests of an engine go on at others by recompute, as far as they can and one takes them."""
        if self.workers is not None:
            self.workers.tell("elsewhere", engine.slot)
        for relay in list(self.at[engine.slot].values()):
            now_s = time.monotonic()
            takers = any(self.fleet.may_take(other, now_s) for other in self.fleet.engines if other is not engine)
            if takers and relay.can_go_elsewhere and relay.fail_over():
                self.counts["requests_sent_elsewhere"] += 1

    # placing what waits

    def go_on_elsewhere(self, relay: Relay, failed: int) -> None:
        """A request lost its engine."""
        self.counts["failovers"] += 1
        relay.homeless_since_s = time.monotonic()
        if not self._resume(relay, frozenset((failed,))):
            self._homeless.append(relay)

    def go_on_later(self, relay: Relay, reason: str) -> None:
        """A request could not be sent, and is at the next tick, unless it has been so for long."""
        self.counts["requests_without_descriptors"] += 1
        now_s = time.monotonic()
        if relay.homeless_since_s <= relay.last_token_s:
            relay.homeless_since_s = now_s
        if now_s - relay.homeless_since_s > self.config.max_hold_s:
            relay.fail(503, reason)
        else:
            self._homeless.append(relay)

    def _resume(self, relay: Relay, without: frozenset[int]) -> bool:
        slot = self.fleet.choose_dispatch(relay.facts_now(), False, without)
        if slot == NONE:
            return False
        if not relay.go_on_at(slot):
            self.fleet.ledger.end(relay.facts.request_id)
            return False
        return True

    def place_held(self) -> None:
        """Ask again for what waits: streams without an engine first, then requests in order."""
        if self._placing:
            return
        self._placing = True
        try:
            self._place_homeless()
            self._place_held()
        finally:
            self._placing = False

    def _place_homeless(self) -> None:
        for relay in list(self._homeless):
            if self._resume(relay, frozenset()):
                self._homeless.remove(relay)
            elif time.monotonic() - relay.homeless_since_s > self.config.max_hold_s:
                self._homeless.remove(relay)
                relay.fail(503, f"its engine failed, and no other took it within {self.config.max_hold_s:g} s")

    def _place_held(self) -> None:
        while self.fleet.held and self._is_first() and self._held:
            relay = self._held[0]
            if not relay.place():
                return
            if self._held and self._held[0] is relay:  # one that is given up takes itself out
                self._held.popleft()
            self._note_held()

    def _is_first(self) -> bool:
        """Whether no request of another worker waits longer than this one's; else that worker may place it."""
        first = self.fleet.board.first_in_line()
        if first == self.fleet.board.me:
            return True
        if self._link is not None:
            self._link.wake(first)
        return False

    def _note_held(self) -> None:
        self.fleet.hold(len(self._held), self._held[0].facts.arrived_s if self._held else math.inf)

    def _tick(self) -> None:
        if self._homeless or self.fleet.held:
            self.place_held()

    # moving what runs

    def rebalance(self) -> None:
        """Ask the policy for pairs until it has no more."""
        if KIND_SOURCE not in self.fleet.host.kinds:
            return
        asked: set[int] = set()
        while self._move_one(asked):
            pass

    def _move_one(self, asked: set[int]) -> bool:
        """Ask the policy for a pair of which no source was asked about before, and move; False if it has none."""
        fleet = self.fleet
        with fleet.board.lock:
            if fleet.migrations >= self.config.max_migrations:
                return False
            source = fleet.choose_source(lambda engine: engine.slot not in asked and self._may_leave(engine))
            if source == NONE:
                return False
            asked.add(source)
            relay = self._leaving(fleet.engines[source])
            if relay is None:
                return True
            destination = fleet.choose_destination(source, self._may_move_to, relay.facts, relay.tokens)
            if destination != NONE and fleet.host.dry_run:
                self.counts["migrations not made in a dry run"] += 1
            elif destination != NONE:
                self.move(relay, destination, fleet.host.number)
        return True

    def move(self, relay: Relay, destination: int, decision: int = 0) -> Migration:
        """Begin to move a running request, by the decision of this number."""
        migration = Migration(relay, relay.engine, self.fleet.engines[destination], decision)
        self.migrations.add(migration)
        self._mark_migrating()
        self._run(self._migrate(migration))
        return migration

    async def _migrate(self, migration: Migration) -> None:
        try:
            await migrate(self, migration)
        finally:
            migration.outcome = migration.outcome or "cancelled"
            self.counts[f"migrations {migration.outcome}"] += 1
            if self.log is not None:
                self.log.migration(**migration.fields())
            self.migrations.discard(migration)
            self.moved.append(migration)
            self._mark_migrating()

    def _mark_migrating(self) -> None:
        slots = {engine.slot for m in self.migrations for engine in (m.source, m.destination)}
        self.fleet.set_migrating(len(self.migrations), slots)

    def _may_leave(self, engine: Engine) -> bool:
        return (
            engine.serves
            and engine.capabilities is not None
            and engine.capabilities.kv_transfer
            and not self.fleet.is_migrating(engine.slot)
            and self._leaving(engine) is not None
        )

    def _may_move_to(self, engine: Engine) -> bool:
        return (
            engine.capabilities is not None
            and engine.capabilities.kv_transfer
            and not self.fleet.is_migrating(engine.slot)
        )

    def _leaving(self, engine: Engine) -> Relay | None:
        """The request that leaves an engine: the last to come that decodes and can move."""
        return next((relay for relay in reversed(self.at[engine.slot].values()) if relay.movable), None)


class Policies(NamedTuple):
    """That a dispatcher asks."""

    policy: Policy
    fallback: CompiledPolicy
    shadow: Shadow | None


def load_policies(config: ServeConfig, policy: Policy | None = None, *, with_shadow: bool = True) -> Policies:
    """By name, compiled and ready; `policy` goes before the configuration's.

    Raises:
        ValueError: one is not known, or cannot be loaded, or not be used as what it is to be.
    """
    fallback = require_compiled("fallback", load_policy(config.fallback))  # first: a learned policy takes longer
    loaded = Policies(
        policy or load_policy(config.policy),
        fallback,
        Shadow(load_policy(config.shadow), config.seed) if config.shadow and with_shadow else None,
    )
    if config.workers > 1 and (policy is not None or not isinstance(loaded.policy, CompiledPolicy)):
        raise ValueError(
            f"workers = {config.workers}: expected 1 with policy {loaded.policy.name!r}: one that is not compiled "
            "may keep what it knows in one process"
        )
    if config.scaler and KIND_SCALE not in kinds_of(loaded.policy):
        raise ValueError(f"policy = {loaded.policy.name!r}: expected one that scales, as scaler is set")
    for asked in (loaded.policy, loaded.fallback):
        if isinstance(asked, CompiledPolicy):
            asked.decide(empty_view(1, 1))  # compile now, not at the first request
    return loaded


def _retry_after_s(headers: Headers) -> float:
    for name, value in headers:
        if name == b"retry-after" and value.isdigit():
            return min(float(value), _LONGEST_BUSY_S)
    return _BUSY_S


_ROUTES: dict[tuple[str, str], Callable[[Dispatcher, Exchange], None]] = {
    ("POST", COMPLETIONS): Dispatcher._serve_answer,
    ("POST", CHAT): Dispatcher._serve_answer,
    ("GET", "/v1/models"): Dispatcher._serve_models,
    ("GET", "/health"): Dispatcher._serve_health,
    ("GET", "/ready"): Dispatcher._serve_ready,
    ("GET", METRICS): Dispatcher._serve_metrics,
    ("GET", "/dashboard"): Dispatcher._serve_dashboard,
    ("GET", "/dashboard/state"): Dispatcher._serve_dashboard_state,
}
