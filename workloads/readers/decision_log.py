"""Decision logs of ``fleetpilot serve`` (JSON lines): the requests that were served, as a workload."""

from __future__ import annotations

import math

from fleetpilot.workloads.readers.source import JsonObject, TraceFile, TraceRows
from fleetpilot.workloads.table import NO_PARENT, NO_SESSION

KEYS = {"record", "run", "unix_s"}
"""Of every record."""


def read(file: TraceFile) -> TraceRows:
    """Read the requests whose answers came to their end. Times are seconds.

    A request arrived its ``duration_s`` before the record of its outcome; its session and turn are those of the views
    that it was placed by. What prompts share is not in a log, so no prefixes are. Requests are left out, and counted,
    that were rejected, failed or given up by their client, and those whose answer was not streamed, of which the log
    does not tell the length. Of a log that was rotated, each file is a trace of its own.
    """
    rows = TraceRows("decision_log", "s", 1.0)
    sessions: dict[tuple[object, object], tuple[object, int]] = {}  # by run and request: session and turn
    numbers: dict[tuple[object, object], int] = {}
    for row, record in file.json_rows(cut=rows.dropped):
        run, request = record.get("run"), record.get("request")
        kind = record.get("record")
        if kind == "decision" and request is not None:
            seen = _request_of(file, row, record)
            if seen.get("session", NO_SESSION) != NO_SESSION:
                turn = file.tokens(row, "view.request.turn", seen.get("turn"))
                sessions[run, request] = file.tokens(row, "view.request.session", seen["session"]), turn
        elif kind == "outcome":
            if reason := _why_not(record):
                rows.dropped[reason] += 1
                continue
            session, turn = sessions.pop((run, request), (NO_SESSION, 0))
            number = NO_SESSION
            if session != NO_SESSION:
                number = numbers.setdefault((run, session), len(numbers))
            ended_s = file.seconds(row, "unix_s", record.get("unix_s"))
            rows.add(
                row,
                ended_s - file.seconds(row, "duration_s", record.get("duration_s")),
                file.tokens(row, "prompt_tokens", record.get("prompt_tokens")),
                file.tokens(row, "output_tokens", record.get("output_tokens")),
                math.nan,
                number,
                turn,
                NO_PARENT,
            )
    return rows


def _request_of(file: TraceFile, row: int, record: JsonObject) -> JsonObject:
    """What a decision's view says of the request."""
    view = record.get("view")
    request = view.get("request") if isinstance(view, dict) else None
    if not isinstance(request, dict):
        raise file.error(row, "view.request", request, "an object")
    return request


def _why_not(record: JsonObject) -> str:
    """Why an outcome is no request to be replayed; empty if it is."""
    outcome = record.get("outcome")
    if outcome != "finished":
        return str(outcome).replace(" ", "_")
    return "not_streamed" if record.get("output_tokens") is None else ""
