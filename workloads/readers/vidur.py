"""Vidur's processed traces (CSV)."""

from __future__ import annotations

from fleetpilot.workloads.readers.source import TraceFile, TraceRows

COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def read(file: TraceFile) -> TraceRows:
    """Read the rows. Times are seconds."""
    rows = TraceRows("vidur", "s", 1.0)
    for row, (arrival, prompt, output) in file.csv_rows(COLUMNS):
        rows.add(
            row,
            file.seconds(row, COLUMNS[0], arrival),
            file.tokens(row, COLUMNS[1], prompt),
            file.tokens(row, COLUMNS[2], output),
        )
    return rows
