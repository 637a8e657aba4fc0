"""A worker: a process that serves clients of a fleet which another one leads."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.decision_log import Records
from fleetpilot.dispatcher.decisions import Decided
from fleetpilot.dispatcher.http.server import Exchange
from fleetpilot.dispatcher.loop import run
from fleetpilot.dispatcher.workers.board import Board
from fleetpilot.dispatcher.workers.channel import Channel

if TYPE_CHECKING:
    from fleetpilot.dispatcher.engine import Engine
    from fleetpilot.dispatcher.service import Dispatcher

_LOG = logging.getLogger("fleetpilot.dispatcher")
_TOLD_S = 1.0
"""What a worker has counted is known to who leads at this age at most, should it be killed."""
_PAGE_S = 5.0
"""Who leads has so long for a page; Prometheus waits 10 s."""
_MOST_WAITING_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Place:
    """A worker's, in its dispatcher.

    Attributes:
        config: with the port that is listened on.
        memory: number of the board's file.
        row: on it.
        life: number of the process, of all that were workers so far.
    """

    config: ServeConfig
    memory: int
    row: int
    life: int


class Link(Records):
    """What a worker tells and asks the process that leads; its decision log as well.

    Args:
        place: of the worker.
        channel: to who leads.

    Attributes:
        board: see `Board`.
        life: see `Place`.
        counts: records that were dropped, as the process that leads did not take them.
    """

    def __init__(self, place: Place, channel: Channel):
        self.board = Board.open(place.memory, place.row, place.config.workers)
        self.life = place.life
        self.counts: Counter[str] = Counter()
        self._channel = channel
        self._asked: dict[int, tuple[Exchange, Any]] = {}
        self._numbers = itertools.count()

    def gone(self, engine: Engine, reason: str) -> None:
        """Nothing listens at an engine's address."""
        self._channel.send("gone", engine.slot, engine.url, reason)

    def wake(self, row: int) -> None:
        """The worker in this row has the request that waits longest, and may place it."""
        self._channel.send("wake", row)

    def ask(self, exchange: Exchange, *more: Any) -> None:
        """Have a page about all processes as the answer; `more` is for `Exchange.respond`.

        Not what this process knows where the other is late: counters would seem to have begun anew.
        """
        number = next(self._numbers)
        self._asked[number] = exchange, more
        self._channel.send("ask", number, exchange.path)
        asyncio.get_running_loop().call_later(_PAGE_S, self._give_up, number)

    def answered(self, number: int, body: bytes) -> None:
        """The page has come."""
        if number in self._asked:
            exchange, more = self._asked.pop(number)
            exchange.respond(200, body, *more)

    def _give_up(self, number: int) -> None:
        """The page has not come in time."""
        if number in self._asked:
            exchange, _ = self._asked.pop(number)
            text = f"the process that leads the workers has not answered within {_PAGE_S:g} s\n"
            exchange.respond(503, text.encode(), b"text/plain; charset=utf-8")

    def put(self, record: str, unix_s: float, content: Decided | dict[str, Any]) -> None:
        """Goes into the log that the process which leads writes."""
        if self._channel.waiting_bytes > _MOST_WAITING_BYTES:
            self.counts["dropped"] += 1
        else:
            self._channel.send("record", record, unix_s, content)

    def close(self) -> None:
        """What was put arrives by itself."""


class _Worker:
    """Does what the process that leads says, until that is gone."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._channel = Channel(self._handle, self._ended.set)
        self._dispatcher: Dispatcher
        self._link: Link
        self._tasks: set[asyncio.Task[None]] = set()

    async def work(self, end: socket.socket) -> None:
        """Until the end."""
        await self._channel.open(end)
        await self._ended.wait()
        self._channel.close()

    def _handle(self, name: str, *arguments: Any) -> None:
        _MESSAGES[name](self, *arguments)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self, place: Place, engines: list[Any]) -> None:
        from fleetpilot.dispatcher.service import Dispatcher

        self._link = Link(place, self._channel)
        try:
            self._dispatcher = Dispatcher(place.config, link=self._link)
        except (OSError, ValueError) as error:  # a policy's folder may have gone meanwhile
            self._fail(error)
            return
        for engine in engines:
            self._dispatcher.hear(*engine)
        self._run(self._start())

    async def _start(self) -> None:
        try:
            await self._dispatcher.start()
        except OSError as error:
            self._fail(error)
            return
        gc.freeze()
        self._channel.send("ready")
        self._tell_for_ever()

    def _fail(self, error: Exception) -> None:
        self._channel.send("failed", str(error))
        self._ended.set()

    def _tell_for_ever(self) -> None:
        self._channel.send("told", None, self._dispatcher.tally().past())
        asyncio.get_running_loop().call_later(_TOLD_S, self._tell_for_ever)

    def _tell(self, number: int, watched: bool) -> None:
        self._channel.send("told", number, self._dispatcher.tally(watched=watched))

    async def _reload(self, config: ServeConfig) -> None:
        try:
            await self._dispatcher.reload(lambda: config)
        except (OSError, ValueError) as error:
            _LOG.warning("a worker has not reloaded: %s", error)

    async def _stop(self, grace_s: float) -> None:
        await self._dispatcher.stop(grace_s)
        self._channel.send("told", None, self._dispatcher.tally().past())
        self._ended.set()


_MESSAGES: dict[str, Callable[..., None]] = {
    "begin": _Worker._begin,
    "engine": lambda worker, *news: worker._dispatcher.hear(*news),
    "elsewhere": lambda worker, slot: worker._dispatcher.send_elsewhere(worker._dispatcher.fleet.engines[slot]),
    "place": lambda worker: worker._dispatcher.place_held(),
    "answer": lambda worker, number, body: worker._link.answered(number, body),
    "tell": _Worker._tell,
    "reload": lambda worker, config: worker._run(worker._reload(config)),
    "stop": lambda worker, grace_s: worker._run(worker._stop(grace_s)),
}


def main() -> None:
    """Serve until who started this process says otherwise, over the socket whose number is the argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all processes
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run(_work(socket.socket(fileno=int(sys.argv[1]))))


async def _work(end: socket.socket) -> None:
    await _Worker().work(end)
