"""Files for vLLM's `timed_trace` dataset (JSON lines): Mooncake's keys, but any name, time unit and block size."""

from __future__ import annotations

from collections.abc import Mapping

from fleetpilot.workloads.readers.mooncake import ceil_blocks
from fleetpilot.workloads.readers.source import TraceFile, TraceRows

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(
    file: TraceFile,
    *,
    chunk_tokens: int | None = None,
    seconds_per_unit: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> TraceRows:
    """Read the rows. The file does not say how to read it, so the caller must.

    The blocks of a request must add up to its prompt. With vLLM's default of 16 against blocks of 512 they do not: vLLM
    sends prompts that are 32 times too short there, this reader refuses the file.

    Args:
        file: the trace.
        chunk_tokens: tokens per content id (vLLM's ``--timed-trace-chunk-hash-size``, 16 if it is not given there).
        seconds_per_unit: seconds in one unit of the timestamps, 0.001 for milliseconds (vLLM's
            ``--timed-trace-sec-multiplier``; there as here a larger value means slower arrivals).
        labels: names in the file of any of ``timestamp``, ``input_length``, ``output_length``, ``hash_ids``.
    """
    if not chunk_tokens or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}: timed_trace needs the tokens per content id, an integer >= 1")
    if not seconds_per_unit or not 0 < seconds_per_unit < float("inf"):
        raise ValueError(f"seconds_per_unit = {seconds_per_unit}: timed_trace needs the unit of its times, > 0 s")
    unknown = set(labels or {}) - set(KEYS)
    if unknown:
        raise ValueError(f"labels: unknown key {sorted(unknown)[0]!r}: expected any of {', '.join(KEYS)}")
    time, prompt, output, ids = ((labels or {}).get(key, key) for key in KEYS)

    rows = TraceRows("timed_trace", f"{seconds_per_unit:g} s", 1 / seconds_per_unit, block_tokens=chunk_tokens)
    for row, record in file.json_rows():
        prompt_tokens = file.tokens(row, prompt, record.get(prompt))
        rows.add(
            row,
            file.seconds(row, time, record.get(time)),
            prompt_tokens,
            file.tokens(row, output, record.get(output)),
        )
        rows.add_blocks(ceil_blocks(file, row, ids, record, prompt_tokens, chunk_tokens))
    return rows
