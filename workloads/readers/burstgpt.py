"""BurstGPT traces, versions 1 to 3 (CSV; version 3 has more columns, in another order)."""

from __future__ import annotations

from fleetpilot.workloads.readers.source import TraceFile, TraceRows
from fleetpilot.workloads.readers.ticks import Ticks, tick_width
from fleetpilot.workloads.table import NO_PARENT, NO_SESSION

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION = "Session ID"
TICK_S = 1.0


def read(file: TraceFile, *, ticks: Ticks = "spread") -> TraceRows:
    """Read the rows; one without response tokens is a request that failed, and is dropped as such.

    Times are whole seconds from a local midnight (of day 0 in versions 1 and 2; version 3 starts at 19,440,110). A row
    with a session follows the one before it in that session; API rows have none.

    Args:
        file: the trace.
        ticks: "spread" places the requests of one second at random within it, "raw" leaves them together.
    """
    rows = TraceRows("burstgpt", "s", 1.0, zero_output_reason="failed", tick_s=tick_width(ticks, TICK_S))
    numbers: dict[str, int] = {}
    last: dict[str, int] = {}
    for row, (timestamp, prompt, output, name) in file.csv_rows(COLUMNS, optional=(SESSION,)):
        session, turn, parent = NO_SESSION, 0, NO_PARENT
        if name:
            session = numbers.setdefault(name, len(numbers))
            parent = last.get(name, NO_PARENT)
            turn = rows.turn[parent] + 1 if parent >= 0 else 0
            last[name] = len(rows)
        rows.add(
            row,
            file.seconds(row, COLUMNS[0], timestamp),
            file.tokens(row, COLUMNS[1], prompt),
            file.tokens(row, COLUMNS[2], output),
            session=session,
            turn=turn,
            parent=parent,
        )
    return rows
