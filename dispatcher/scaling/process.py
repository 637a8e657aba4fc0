"""Engines as processes of this host, started from a command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fleetpilot.dispatcher.scaling.actuator import ActuatorError

_LOG = logging.getLogger("fleetpilot.dispatcher")
_STDERR = 2


@dataclass(eq=False)
class _Instance:
    """An engine's process, leader of a process group of its own, and the task that waits for its end."""

    process: asyncio.subprocess.Process
    index: int
    ended: asyncio.Task[None] | None = None


class ProcessActuator:
    """See `Actuator`. An engine gets an interrupt from nobody but the dispatcher; what it says goes to standard error.

    Args:
        command: words as a shell would split them, without a shell. In them ``{port}`` stands for the port that the
            engine is to listen on, ``{side_port}`` for another free one, and ``{index}`` for the lowest number, from 0
            on, that no other of these engines has.
        stop_grace_s: from SIGTERM to SIGKILL.
    """

    def __init__(self, command: str, stop_grace_s: float):
        self._words = command_words(command)
        self._stop_grace_s = stop_grace_s
        self._instances: dict[str, _Instance] = {}
        self._changed: Callable[[], None] = lambda: None
        self._starting = asyncio.Lock()

    @property
    def instances(self) -> Collection[str]:
        """Of every process that has not ended."""
        return self._instances.keys()

    @property
    def pending(self) -> int:
        """None: a process has its address from the start."""
        return 0

    async def open(self, changed: Callable[[], None]) -> None:
        """Nothing is there yet."""
        self._changed = changed

    async def start(self, most: int) -> None:
        """Start a process."""
        async with self._starting:
            if len(self._instances) >= most:
                raise ActuatorError(f"{len(self._instances)} engines are there, expected fewer than {most}")
            indices = {instance.index for instance in self._instances.values()}
            index = next(number for number in range(most) if number not in indices)
            port, side_port = _free_ports(2)
            values = {"{port}": str(port), "{side_port}": str(side_port), "{index}": str(index)}
            words = [_filled(word, values) for word in self._words]
            try:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=asyncio.subprocess.DEVNULL, stdout=_STDERR, start_new_session=True
                )
            except OSError as error:
                raise ActuatorError(f"scale_command: {error}") from None
            url = f"http://127.0.0.1:{port}"
            _LOG.info("engine process %d starts at %s", process.pid, url)
            instance = self._instances[url] = _Instance(process, index)
            instance.ended = asyncio.get_running_loop().create_task(self._wait(url, instance))

    async def _wait(self, url: str, instance: _Instance) -> None:
        status = await instance.process.wait()
        _LOG.info("engine process %d at %s ended with status %d", instance.process.pid, url, status)
        _signal_group(instance.process.pid, signal.SIGKILL)  # what its leader left behind
        del self._instances[url]
        self._changed()

    def may_stop(self, url: str) -> bool:
        """Any of them."""
        return url in self._instances

    async def stop(self, url: str) -> None:
        """End a process."""
        instance = self._instances.get(url)
        if instance is None:
            return
        assert instance.ended is not None
        with contextlib.suppress(ProcessLookupError):
            instance.process.terminate()
        await asyncio.wait((instance.ended,), timeout=self._stop_grace_s)
        if not instance.ended.done():
            _LOG.warning("engine process %d has not ended in %g s", instance.process.pid, self._stop_grace_s)
            _signal_group(instance.process.pid, signal.SIGKILL)
            await asyncio.wait((instance.ended,))

    async def cancel_pending(self) -> None:
        """There are none."""

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(self.stop(url) for url in list(self._instances)))


def command_words(command: str) -> list[str]:
    """The words of a command template.

    Raises:
        ValueError: it cannot be split, or has no place for a port.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"scale_command = {command!r}: {error}") from None
    if not any("{port}" in word for word in words):
        raise ValueError(f"scale_command = {command!r}: expected a command with {{port}} in it")
    return words


def _filled(word: str, values: dict[str, str]) -> str:
    """Not by `str.format`: engines take JSON."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _free_ports(count: int) -> list[int]:
    """Ports that are free now; an engine that finds its port taken does not come up, and another one is started."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
