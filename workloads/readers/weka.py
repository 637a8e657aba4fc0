"""WEKA's traces of coding agents: sessions (one JSON object a line), and the same flattened to one request a line."""

from __future__ import annotations

import math
from typing import NamedTuple

from fleetpilot.workloads.readers.source import JsonObject, TraceFile, TraceRows
from fleetpilot.workloads.table import NO_PARENT

CALLS = ("n", "s")


class Keys(NamedTuple):
    """Names of a call's fields: time in its session, wait before it, time it took (all in s), and its tokens."""

    t: str
    think: str
    api: str
    prompt: str
    output: str


NESTED = Keys("t", "think_time", "api_time", "in", "out")
FLAT = Keys("request_arrival_delta_s", "think_time_s", "api_time_s", "input_tokens", "output_tokens")


def read_sessions(file: TraceFile, *, session_gap_s: float = 0.0) -> TraceRows:
    """Read sessions as closed loops: a call is sent ``think_time`` seconds after the answer before it.

    Times count from the start of a session, and nothing says when the sessions started. Content ids count within their
    session (unless ``hash_id_scope`` is "global"); the public files leave the partial last block out or give it an id
    too, so both numbers of ids are taken.

    Calls that overlapped in the source are sent one after the other. Calls of subagents are left out and counted: the
    fork and join around them cannot be told in a table where a request has one parent.

    Args:
        file: the trace.
        session_gap_s: the first call of session k arrives k times this long after that of session 0.
    """
    _check_gap(session_gap_s)
    rows = TraceRows("weka", "s", 1.0)
    for row, record in file.json_rows():
        rows.block_tokens = _block_tokens(file, row, record, rows.block_tokens)
        shared_ids = record.get("hash_id_scope", "local") == "global"
        calls = record.get("requests")
        if not isinstance(calls, list):
            raise file.error(row, "requests", calls, "a list of calls")
        loop = _ClosedLoop(file, rows, row, row * session_gap_s, NESTED)
        for number, call in enumerate(calls):
            place = f"requests[{number}]."
            kind = call.get("type") if isinstance(call, dict) else None
            if kind == "subagent":
                nested = call.get("requests")
                rows.dropped["subagent_calls"] += len(nested) if isinstance(nested, list) else 1
                continue
            if kind not in CALLS:
                raise file.error(row, f"{place}type", kind, "'n', 's' or 'subagent'")
            prompt_tokens = loop.add(row, call, place)
            ids: list[int] = []
            if "hash_ids" in call:
                floor = prompt_tokens // rows.block_tokens
                ceil = -(-prompt_tokens // rows.block_tokens)
                why = f"{prompt_tokens} prompt tokens in blocks of {rows.block_tokens}"
                ids = file.block_ids(row, f"{place}hash_ids", call["hash_ids"], (floor, ceil), why)
            rows.add_blocks(ids if shared_ids else [(row, key) for key in ids])
    return rows


def read_requests(file: TraceFile, *, session_gap_s: float = 0.0) -> TraceRows:
    """Read the flattened form, in which the block list of a call is reduced to its length and a hash.

    Sessions, turns, lengths and think times are as in `read_sessions`. What the prompts share cannot be rebuilt: equal
    hashes tell equal prompts, but nothing tells how far two different prompts agree, so the table has no prefixes.

    Args:
        file: the trace.
        session_gap_s: as in `read_sessions`.
    """
    _check_gap(session_gap_s)
    rows = TraceRows("weka_requests", "s", 1.0)
    loops: dict[str, _ClosedLoop] = {}
    for row, call in file.json_rows():
        name = call.get("session_id")
        if not isinstance(name, str):
            raise file.error(row, "session_id", name, "a string")
        if name not in loops:
            loops[name] = _ClosedLoop(file, rows, len(loops), len(loops) * session_gap_s, FLAT)
        loops[name].add(row, call)
    return rows


class _ClosedLoop:
    """The chain of one session's calls."""

    def __init__(self, file: TraceFile, rows: TraceRows, session: int, start_s: float, keys: Keys) -> None:
        self.file = file
        self.rows = rows
        self.session = session
        self.start_s = start_s
        self.keys = keys
        self.last = NO_PARENT
        self.last_t = self.last_end = 0.0

    def add(self, row: int, call: JsonObject, place: str = "") -> int:
        """Append a call that follows the last one of the session, and return its prompt tokens."""
        file, rows, keys = self.file, self.rows, self.keys
        prompt_tokens = file.tokens(row, place + keys.prompt, call.get(keys.prompt))
        output_tokens = file.tokens(row, place + keys.output, call.get(keys.output))
        t = file.seconds(row, place + keys.t, call.get(keys.t))
        api, think = call.get(keys.api), call.get(keys.think)
        end = math.nan if api is None else t + file.seconds(row, place + keys.api, api)
        think_s, turn = math.nan, 0
        if self.last >= 0:
            rows.inversions += t < self.last_t
            turn = rows.turn[self.last] + 1
            if think is not None:
                think_s = file.seconds(row, place + keys.think, think)
            elif not math.isnan(self.last_end):
                think_s = max(t - self.last_end, 0.0)
            else:
                raise file.error(row, place + keys.think, think, f"a time in s, or {keys.api} in the call before")
        self.last = rows.add(row, self.start_s, prompt_tokens, output_tokens, think_s, self.session, turn, self.last)
        self.last_t, self.last_end = t, end
        return prompt_tokens


def _block_tokens(file: TraceFile, row: int, record: JsonObject, before: int | None) -> int:
    value = record.get("block_size")
    if type(value) is not int or not 1 <= value <= 2**20 or value != (before or value):
        expected = "an integer >= 1" if before is None else f"{before}, as in the sessions before"
        raise file.error(row, "block_size", value, expected)
    return value


def _check_gap(session_gap_s: float) -> None:
    if not 0 <= session_gap_s < math.inf:
        raise ValueError(f"session_gap_s = {session_gap_s}: expected a finite time >= 0")
