"""The decision log: every decision with what the policy saw, and what became of requests and migrations.

A line is a JSON object with ``record``, ``run`` (of one dispatcher from start to stop) and ``unix_s``. A ``decision``
has a number in its run, the request it is about, and the whole view; an ``outcome`` names the request, a ``migration``
the decision that began it. Infinity is ``null``, as JSON has none. Prompts are there as lengths alone.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.view import FLEET_VIEW, INSTANCE_VIEW, NONE, REQUEST_VIEW, FleetView

_LOG = logging.getLogger("fleetpilot.dispatcher")

FILES = 4
"""The file that is written to, and older ones with .1, .2, .3 behind the name."""
_MOST_WAITING = 4_096
"""Records that may wait for the disk; some kilobytes each."""

DECISION, OUTCOME, MIGRATION = "decision", "outcome", "migration"
BY_POLICY, BY_FALLBACK, BY_EXPLORATION = "policy", "fallback", "exploration"
"""Who decided."""


@dataclass(frozen=True)
class Decided:
    """A decision.

    Attributes:
        number: in its run, from 1.
        request: that it is about; empty for none.
        kind: of `fleetpilot.fleet.view`.
        policy: its name.
        by: who decided, as `BY_POLICY`.
        reason: why the policy did not; empty where it did.
        preferred: choice of the policy, or of the fallback in its place.
        choice: that was carried out.
        propensity: probability of `choice` under the way choices were made, given the view.
        view: what the policy saw, a copy.
    """

    number: int
    request: str
    kind: int
    policy: str
    by: str
    reason: str
    preferred: int
    choice: int
    propensity: float
    view: FleetView

    def fields(self) -> dict[str, Any]:
        """As in the log."""
        return {
            "decision": self.number,
            "request": self.request or None,
            "kind": KINDS[self.kind],
            "policy": self.policy,
            "by": self.by,
            "reason": self.reason or None,
            "preferred": _or_none(self.preferred),
            "choice": _or_none(self.choice),
            "propensity": self.propensity,
            "view": view_fields(self.view),
        }


def _or_none(slot: int) -> int | None:
    return None if slot == NONE else slot


class DecisionLog:
    """A file of JSON lines, written by a thread of its own: whoever logs never waits for the disk.

    Args:
        path: of the file; it is continued if it exists.
        most_bytes: of all files together; the oldest goes when a new one begins.

    Raises:
        OSError: the file cannot be opened.

    Attributes:
        counts: records ``written``, ``dropped`` because too many waited for the disk, and ``failed`` on it.
    """

    def __init__(self, path: str, most_bytes: int):
        self.counts: Counter[str] = Counter()
        self._run = secrets.token_hex(4)
        self._file = _File(path, maxBytes=most_bytes // FILES, backupCount=FILES - 1, encoding="utf-8")
        self._waiting: queue.SimpleQueue[tuple[str, float, Decided | dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="decision log", daemon=True)
        self._thread.start()

    def decision(self, decided: Decided) -> None:
        """A decision was made."""
        self._put(DECISION, decided)

    def outcome(self, **fields: Any) -> None:
        """A request has ended."""
        self._put(OUTCOME, fields)

    def migration(self, **fields: Any) -> None:
        """A migration has ended, or the request goes on at its destination."""
        self._put(MIGRATION, fields)

    def _put(self, record: str, content: Decided | dict[str, Any]) -> None:
        if self._waiting.qsize() >= _MOST_WAITING:
            self.counts["dropped"] += 1
        else:
            self._waiting.put((record, time.time(), content))

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            record, unix_s, content = item
            fields = content.fields() if isinstance(content, Decided) else content
            line = orjson.dumps({"record": record, "run": self._run, "unix_s": unix_s} | fields).decode()
            try:
                self._file.emit(logging.makeLogRecord({"msg": line}))
            except OSError as error:
                self.counts["failed"] += 1
                if self.counts["failed"] == 1:
                    _LOG.warning("decision_log: %s", error)
            else:
                self.counts["written"] += 1


class _File(RotatingFileHandler):
    """The rotation of the standard library, whose errors reach who writes."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where the error is being handled."""
        raise


# --- views as JSON, and back -----------------------------------------------------------------------------------------


def view_fields(view: FleetView) -> dict[str, Any]:
    """A view of one fleet: its instances by column."""
    instances, request, fleet = view.instances[0], view.request[0], view.fleet[0]
    return {
        "instances": {name: instances[name].tolist() for name in _names(INSTANCE_VIEW)},
        "request": dict(zip(_names(REQUEST_VIEW), request.item(), strict=True)),
        "fleet": dict(zip(_names(FLEET_VIEW), fleet.item(), strict=True)),
    }


def view_of(fields: Mapping[str, Any]) -> FleetView:
    """The view again, bit for bit.

    Raises:
        ValueError: fields are missing, unknown or of the wrong type: the log is of another version, or damaged.
    """
    try:
        columns = fields["instances"]
        view = FleetView(
            np.zeros((1, len(columns["slot"])), INSTANCE_VIEW), np.zeros(1, REQUEST_VIEW), np.zeros(1, FLEET_VIEW)
        )
        for part, records in (("instances", view.instances[0]), ("request", view.request), ("fleet", view.fleet)):
            _fill(part, fields[part], records)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"view: {type(error).__name__}: {error}; expected that of a decision log") from None
    return view


def _fill(part: str, fields: Mapping[str, Any], records: np.ndarray[Any, Any]) -> None:
    names = _names(records.dtype)
    if set(fields) != set(names):
        odd = sorted(set(fields) ^ set(names))
        raise ValueError(f"view: {part} with other fields than this version's: {', '.join(odd)}")
    for name in names:
        value = fields[name]
        values = value if part == "instances" else [value]
        if len(values) != len(records):
            raise ValueError(f"view: {part}.{name} has {len(values)} values, expected {len(records)}")
        records[name] = [np.inf if item is None else item for item in values]


def _names(dtype: np.dtype[np.void]) -> tuple[str, ...]:
    assert dtype.names is not None
    return dtype.names


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
