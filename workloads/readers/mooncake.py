"""Mooncake traces (JSON lines), with the session keys that NVIDIA's aiperf adds to them."""

from __future__ import annotations

import math

from fleetpilot.workloads.readers.source import JsonObject, TraceFile, TraceRows
from fleetpilot.workloads.readers.ticks import Ticks, tick_width
from fleetpilot.workloads.table import NO_PARENT, NO_SESSION

BLOCK_TOKENS = 512
TICK_S = 3.0

_MS_PER_S = 1000.0


def read(file: TraceFile, *, ticks: Ticks = "spread") -> TraceRows:
    """Read the rows. Times are milliseconds; a content id stands for 512 tokens, the last one for the rest.

    Rows without ``session_id`` are requests of their own. Rows with one are the turns of a conversation as aiperf
    replays them: a later turn's ``input_length`` counts only what the user adds, so its prompt is the conversation
    before it and that; it comes ``delay`` milliseconds after the answer before it if it has a ``delay``, else at its
    own ``timestamp``. Its ``hash_ids`` describe the addition alone and say nothing about the prompt, so only their
    number is checked. ``text_input`` rows are refused: without a tokenizer their length is unknown.

    Args:
        file: the trace.
        ticks: the public traces tick every 3 s with about ten requests each. "spread" places them at random within
            their tick, "raw" leaves them together.
    """
    rows = TraceRows("mooncake", "ms", _MS_PER_S, tick_s=tick_width(ticks, TICK_S), block_tokens=BLOCK_TOKENS)
    numbers: dict[object, int] = {}
    last: dict[object, int] = {}
    for row, record in file.json_rows():
        added_tokens = file.tokens(row, "input_length", record.get("input_length"))
        output_tokens = file.tokens(row, "output_length", record.get("output_length"))
        name = record.get("session_id")
        if name is not None and not isinstance(name, str | int):
            raise file.error(row, "session_id", name, "a string or an integer")
        parent = NO_PARENT if name is None else last.get(name, NO_PARENT)
        if parent >= 0 and "delay" in record:
            time = rows.time[parent]
            think_s = file.seconds(row, "delay", record["delay"]) / _MS_PER_S
        else:
            time = file.seconds(row, "timestamp", record.get("timestamp"))
            think_s = math.nan
        prompt_tokens = added_tokens
        session, turn = NO_SESSION, 0
        if parent >= 0:
            prompt_tokens += rows.prompt_tokens[parent] + rows.output_tokens[parent]
            prompt_tokens = file.tokens(row, "prompt with the conversation before it", prompt_tokens)
            turn = rows.turn[parent] + 1
        if name is not None:
            session = numbers.setdefault(name, len(numbers))
            last[name] = len(rows)
            rows.grows = True
        rows.add(row, time, prompt_tokens, output_tokens, think_s, session, turn, parent)
        ids = ceil_blocks(file, row, "hash_ids", record, added_tokens, BLOCK_TOKENS)
        rows.add_blocks(ids if parent < 0 else ())
    return rows


def ceil_blocks(
    file: TraceFile, row: int, field: str, record: JsonObject, prompt_tokens: int, block_tokens: int
) -> list[int]:
    """The content ids of a prompt whose partial last block has one too; none where the key is missing.

    Raises:
        ValueError: if their number is not ``ceil(prompt_tokens / block_tokens)``: another block size or meaning.
    """
    if field not in record:
        return []
    expected = -(-prompt_tokens // block_tokens)
    why = f"{prompt_tokens} prompt tokens in blocks of {block_tokens}, the last one may be partial"
    return file.block_ids(row, field, record[field], (expected,), why)
