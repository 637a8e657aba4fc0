"""Starting an engine by the user's command, and how long that takes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

from fleetpilot.calibration.live import LiveEngine, MeasureError
from fleetpilot.dispatcher.http.client import CallError

_LONGEST_START_S = 1800.0
_LONGEST_STOP_S = 30.0


class StartedEngine:
    """An engine that a command of the user started.

    Attributes:
        start_up_s: from starting the command until the engine had answered a request.
    """

    def __init__(self, process: subprocess.Popen[bytes], start_up_s: float):
        self._process = process
        self.start_up_s = start_up_s

    def stop(self) -> None:
        """End the command and all that it started."""
        _end(self._process)


async def start_engine(engine: LiveEngine, command: str) -> StartedEngine:
    """Start an engine, and wait for its first answer.

    Raises:
        MeasureError: something answers at its URL already, the command ends, or nothing answers in time.
    """
    if await _answers(engine):
        raise MeasureError(f"{engine.url} answers already; expected it free, as the start command is to start it")
    begun_s = time.perf_counter()
    process = subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not await _answers(engine):
            if process.poll() is not None:
                raise MeasureError(f"start command {command!r} ended with status {process.returncode}")
            if time.perf_counter() - begun_s > _LONGEST_START_S:
                raise MeasureError(f"{engine.url}: no answer {_LONGEST_START_S:g} s after the start command")
            await asyncio.sleep(0.2)
        await engine.ask()
    except BaseException:
        _end(process)
        raise
    return StartedEngine(process, time.perf_counter() - begun_s)


async def _answers(engine: LiveEngine) -> bool:
    try:
        return (await engine.engine.client.fetch("GET", "/health", headers=engine.headers, timeout_s=2.0)).status == 200
    except (CallError, TimeoutError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started: the shell that ran it is gone before they are."""
    for signal_number in (int(signal.SIGTERM), int(signal.SIGKILL)):
        deadline_s = time.monotonic() + _LONGEST_STOP_S
        while time.monotonic() < deadline_s:
            process.poll()
            if not _signalled(process.pid, signal_number):
                return
            signal_number = 0  # once; then only ask whether it is still there
            time.sleep(0.05)


def _signalled(group: int, number: int) -> bool:
    """Whether there is such a process group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
