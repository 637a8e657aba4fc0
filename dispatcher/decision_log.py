"""The decision log: every decision with what the policy saw, and what became of requests and migrations.

A line is a JSON object with ``record``, ``run`` (of one dispatcher from start to stop) and ``unix_s``. A ``decision``
has a number in its run, the request it is about, and the whole view; an ``outcome`` names the request, a ``migration``
the decision that began it. Infinity is ``null``, as JSON has none. Prompts are there as lengths alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from fleetpilot.dispatcher.decisions import Decided
from fleetpilot.dispatcher.shadow import Shadow

_LOG = logging.getLogger("fleetpilot.dispatcher")

FILES = 4
"""The file that is written to, and older ones with .1, .2, .3 behind the name."""
_MOST_WAITING = 4_096
"""Records that may wait for the disk; some kilobytes each."""
_LONGEST_CLOSE_S = 10.0

DECISION, OUTCOME, MIGRATION = "decision", "outcome", "migration"


class Records(ABC):
    """Where decisions, and what became of them, are told.

    Attributes:
        counts: records, by what became of them.
    """

    counts: Counter[str]

    def decision(self, decided: Decided) -> None:
        """A decision was made."""
        self.put(DECISION, time.time(), decided)

    def outcome(self, **fields: Any) -> None:
        """A request has ended."""
        self.put(OUTCOME, time.time(), fields)

    def migration(self, **fields: Any) -> None:
        """A migration has ended, or the request goes on at its destination."""
        self.put(MIGRATION, time.time(), fields)

    @abstractmethod
    def put(self, record: str, unix_s: float, content: Decided | dict[str, Any]) -> None:
        """A record of that time."""

    @abstractmethod
    def close(self) -> None:
        """No more come."""


class DecisionLog(Records):
    """A file of JSON lines, written by a thread of its own: whoever logs waits neither for the disk nor for the shadow.

    Args:
        path: of the file, which is continued if it exists; empty: none, the shadow is asked all the same.
        most_bytes: of all files together; the oldest goes when a new one begins.
        shadow: asked about every decision before it is written; None for none. It may be replaced at any time.

    Raises:
        OSError: the file cannot be opened.

    Attributes:
        counts: records ``written``, ``dropped`` because too many waited for the disk, and ``failed`` on it.
    """

    def __init__(self, path: str, most_bytes: int, shadow: Shadow | None = None):
        self.shadow = shadow
        self.counts: Counter[str] = Counter()
        self._run = secrets.token_hex(4)
        if path:
            _end_last_line(Path(path))
        self._file = (
            _File(path, maxBytes=most_bytes // FILES, backupCount=FILES - 1, encoding="utf-8") if path else None
        )
        self._waiting: queue.SimpleQueue[tuple[str, float, Decided | dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="decision log", daemon=True)
        self._thread.start()

    def put(self, record: str, unix_s: float, content: Decided | dict[str, Any]) -> None:
        """Dropped where too many wait."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self.counts["dropped"] += 1
        else:
            self._waiting.put((record, unix_s, content))

    def close(self) -> None:
        """Write what waits, and end; a disk or a shadow that hangs is not waited for."""
        self._waiting.put(None)
        self._thread.join(_LONGEST_CLOSE_S)
        if self._file is not None and not self._thread.is_alive():
            self._file.close()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            record, unix_s, content = item
            shadow, shadowed = self.shadow, None
            if shadow is not None and isinstance(content, Decided):
                shadowed = shadow.ask(content)
            if self._file is not None:
                fields = content.fields() | {"shadow": shadowed} if isinstance(content, Decided) else content
                self._write(self._file, {"record": record, "run": self._run, "unix_s": unix_s} | fields)

    def _write(self, file: _File, fields: dict[str, Any]) -> None:
        try:
            file.emit(logging.makeLogRecord({"msg": orjson.dumps(fields).decode()}))
        except Exception as error:  # whatever a disk or a plug-in's name does, the next record may do better
            self.counts["failed"] += 1
            if self.counts["failed"] == 1:
                _LOG.warning("decision_log: %s", error)
        else:
            self.counts["written"] += 1


def _end_last_line(path: Path) -> None:
    """A line that a crash cut is not joined to the next."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")


class _File(RotatingFileHandler):
    """The rotation of the standard library, whose errors reach who writes."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where the error is being handled."""
        raise


# --- reading ---------------------------------------------------------------------------------------------------------


def log_files(path: Path) -> list[Path]:
    """The files of a log that are there, oldest first."""
    older = [path.with_name(f"{path.name}.{number}") for number in range(FILES - 1, 0, -1)]
    return [file for file in [*older, path] if file.is_file()]


def read_log(path: Path, unreadable: Counter[str] | None = None) -> Iterator[dict[str, Any]]:
    """The records of a log in the order they were written.

    Args:
        path: of the file that is written to; older ones beside it are read first.
        unreadable: counts, by file, lines that are no records, such as one that a crash cut.

    Raises:
        FileNotFoundError: there is no such file.
    """
    files = log_files(path)
    if not files:
        raise FileNotFoundError(2, "No such file", str(path))
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    record = None
                if isinstance(record, dict) and "record" in record:
                    yield record
                elif unreadable is not None:
                    unreadable[str(file)] += 1
