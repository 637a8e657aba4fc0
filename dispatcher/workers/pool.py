"""The workers of a dispatcher, as the process that leads sees them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetpilot.dispatcher.engine import Engine
from fleetpilot.dispatcher.tally import Tally
from fleetpilot.dispatcher.workers.board import Board
from fleetpilot.dispatcher.workers.channel import Channel
from fleetpilot.dispatcher.workers.worker import Place

if TYPE_CHECKING:
    from fleetpilot.dispatcher.config import ServeConfig
    from fleetpilot.dispatcher.service import Dispatcher

_LOG = logging.getLogger("fleetpilot.dispatcher")
_CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "from fleetpilot.dispatcher.workers.worker import main; main()"
)
_ANSWER_S = 1.0
"""A worker that does not say so soon what it counted counts with what it said last."""
_START_S = 60.0
_STOP_S = 5.0
_RESTART_S, _MOST_RESTART_S = 1.0, 30.0
"""Between two starts of a worker, at least; twice as long after each that did not come up."""


@dataclass(eq=False)
class _Worker:
    """A process.

    Attributes:
        row: on the board.
        process: itself.
        channel: to it.
        ready: done when it listens, or could not.
        ended: the channel is closed: all that it said has been heard.
        tally: that it told last.
    """

    row: int
    process: asyncio.subprocess.Process
    channel: Channel
    ready: asyncio.Future[None]
    ended: asyncio.Event
    tally: Tally = field(default_factory=Tally)


class Workers:
    """Processes that listen on one port, which the kernel spreads clients' connections over.

    One that ends is replaced. What was booked for it is released: engines end what they did for it when its
    connections break.

    Args:
        config: of the dispatcher.

    Attributes:
        board: that all of them write.
        port: that they listen on.
    """

    def __init__(self, config: ServeConfig):
        if not hasattr(socket, "SO_REUSEPORT") or os.name != "posix":
            raise ValueError(f"workers = {config.workers}: expected 1 on this system")
        self.board, self._memory = Board.create(config.workers)
        self.port = 0
        self._config = config
        self._dispatcher: Dispatcher
        self._workers: dict[int, _Worker] = {}  # by row
        self._past = Tally()  # of workers that are gone
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()
        self._lives = itertools.count()
        self._reserved: list[socket.socket] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = False
        self._closing = False
        seed = os.environ.get("PYTHONHASHSEED", "random")
        seed = str(secrets.randbelow(2**32)) if seed == "random" else seed
        self._environment = {**os.environ, "PYTHONHASHSEED": seed}  # prefixes and sessions are known by their hashes

    @property
    def pids(self) -> list[int]:
        """Of those that run, by row."""
        return [self._workers[row].process.pid for row in sorted(self._workers)]

    async def open(self, dispatcher: Dispatcher) -> None:
        """Start them; they listen.

        Args:
            dispatcher: that leads.

        Raises:
            OSError: they cannot listen at the address, or not start.
        """
        self._dispatcher = dispatcher
        dispatcher.fleet.on_change = lambda engine: self.tell("engine", *_news(engine))
        host, port = self._config.host, self._config.port
        try:
            self._reserved = _reserve(host, port)
        except OSError as error:
            raise OSError(f"host = {host!r}, port = {port}: {error.strerror or error}") from None
        self.port = int(self._reserved[0].getsockname()[1])
        rows = range(1, 1 + self._config.workers)
        started = await asyncio.gather(*(self._start(row) for row in rows))
        self._keepers = [asyncio.get_running_loop().create_task(self._keep(worker)) for worker in started]
        await asyncio.wait([worker.ready for worker in started], timeout=_START_S)
        late = OSError(f"a worker was not ready within {_START_S:g} s")
        errors = [worker.ready.exception() if worker.ready.done() else late for worker in started]
        for failure in filter(None, errors):
            await self.close()
            raise failure
        self._opened = True

    async def close(self, grace_s: float = 0.0) -> None:
        """Take no new requests, let those on their way end for `grace_s`, then cut the rest; end the processes."""
        self._closing = True
        self.tell("stop", grace_s)
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=grace_s + _STOP_S)
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        await asyncio.gather(*self._keepers, *self._tasks, return_exceptions=True)
        for reserved in self._reserved:
            reserved.close()
        self._memory.close()

    def tell(self, name: str, *arguments: Any) -> None:
        """A message to every worker."""
        for worker in self._workers.values():
            worker.channel.send(name, *arguments)

    async def tally(self, *, watched: bool) -> Tally:
        """What all workers counted so far, those included that are gone.

        Args:
            watched: they keep decisions for the live page.
        """
        number = next(self._numbers)
        question = self._questions[number] = _Question(set(self._workers), asyncio.Event())
        self.tell("tell", number, watched)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await question.answered.wait()
        del self._questions[number]
        whole = Tally()
        whole.add(self._past)
        for worker in self._workers.values():
            whole.add(worker.tally)
        return whole

    # processes

    async def _start(self, row: int) -> _Worker:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            number, memory = theirs.fileno(), self._memory.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _CODE, str(number)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(number, memory),
                env=self._environment,
            )
        ended = asyncio.Event()
        channel = Channel(lambda *message: self._handle(worker, *message), ended.set)
        worker = _Worker(row, process, channel, loop.create_future(), ended)
        await channel.open(ours)
        config = dataclasses.replace(self._dispatcher.config, port=self.port)
        engines = [_news(engine) for engine in self._dispatcher.fleet.engines]
        channel.send("begin", Place(config, memory, row, next(self._lives)), engines)
        self._workers[row] = worker
        return worker

    async def _keep(self, worker: _Worker) -> None:
        """Replace a worker whenever it ends."""
        pause_s = _RESTART_S
        while True:
            earliest_s = time.monotonic() + pause_s
            status = await worker.process.wait()
            await worker.ended.wait()  # what it said last has been heard
            if not worker.ready.done():
                worker.ready.set_exception(OSError(f"a worker ended with status {status} while it started"))
            failed = worker.ready.exception() is not None
            pause_s = min(2.0 * pause_s, _MOST_RESTART_S) if failed else _RESTART_S
            if self._opened and not self._closing:
                self._lost(worker, status)
                await asyncio.sleep(earliest_s - time.monotonic())
            if self._closing or not self._opened:
                return
            worker = await self._start(worker.row)

    def _lost(self, worker: _Worker, status: int) -> None:
        reason = worker.ready.exception() or f"ended with status {status}"
        _LOG.warning("worker process %d: %s; another one starts", worker.process.pid, reason)
        self._dispatcher.counts["workers_lost"] += 1
        self._past.add(worker.tally.past())
        del self._workers[worker.row]
        for question in self._questions.values():
            question.has_answered(worker.row)
        with self.board.lock:
            self.board.clear(worker.row)
        self.tell("place")

    # what they say

    def _handle(self, worker: _Worker, name: str, *arguments: Any) -> None:
        _MESSAGES[name](self, worker, *arguments)

    def _ready(self, worker: _Worker) -> None:
        if not worker.ready.done():
            worker.ready.set_result(None)

    def _failed(self, worker: _Worker, reason: str) -> None:
        if not worker.ready.done():
            worker.ready.set_exception(OSError(reason))

    def _told(self, worker: _Worker, number: int | None, tally: Tally) -> None:
        shown = worker.tally if number is None else tally  # nobody asked what there is to look at
        worker.tally = dataclasses.replace(tally, migrations=shown.migrations, recent=shown.recent)
        if number in self._questions:
            self._questions[number].has_answered(worker.row)

    def _wake(self, worker: _Worker, row: int) -> None:
        if row in self._workers:
            self._workers[row].channel.send("place")

    def _ask(self, worker: _Worker, number: int, path: str) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(worker, number, path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, worker: _Worker, number: int, path: str) -> None:
        worker.channel.send("answer", number, await self._dispatcher.page(path))


_MESSAGES: dict[str, Callable[..., None]] = {
    "ready": Workers._ready,
    "failed": Workers._failed,
    "told": Workers._told,
    "ask": Workers._ask,
    "wake": Workers._wake,
    "gone": lambda workers, worker, *engine: workers._dispatcher.hear_gone(*engine),
    "record": lambda workers, worker, *record: workers._dispatcher.log.put(*record),
}


class _Question(NamedTuple):
    """What they counted: rows that have not answered."""

    rows: set[int]
    answered: asyncio.Event

    def has_answered(self, row: int) -> None:
        self.rows.discard(row)
        if not self.rows:
            self.answered.set()


def _news(engine: Engine) -> tuple[Any, ...]:
    """See `Dispatcher.hear`."""
    return engine.slot, engine.url, engine.state, engine.capabilities


def _reserve(host: str, port: int) -> list[socket.socket]:
    """Sockets that hold an address for all workers; nobody else listens there, and these neither.

    Raises:
        OSError: it cannot be bound.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    reserved: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        at = (address[0], reserved[0].getsockname()[1] if reserved else port, *address[2:])
        for shared in (False, True):
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                bound.bind(at)
                if not shared:
                    bound.listen()  # fails where somebody listens, if sharing or not
            except OSError:
                bound.close()
                raise
            if not shared:
                bound.close()
        reserved.append(bound)
    return reserved
