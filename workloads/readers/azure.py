"""Azure LLM inference traces 2023, 2024 and 2025 (CSV; 2025 has one more column, the images of a request)."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from fleetpilot.workloads.readers.source import TraceFile, TraceRows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"

_NS_PER_S = 10**9
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_EXPECTED = "a time like 2023-11-16 18:17:03.9799600 or 2024-05-10T00:00:00.009930+00:00"


def read(file: TraceFile) -> TraceRows:
    """Read the rows. Every digit of a time is kept: times are whole nanoseconds until the first one is subtracted."""
    rows = TraceRows("azure", "ns", _NS_PER_S, integer_time=True)
    parse = _TimestampParser(file)
    with_images = 0
    for row, (timestamp, prompt, output, images) in file.csv_rows(COLUMNS, optional=(IMAGES,)):
        rows.add(row, parse(row, timestamp), file.tokens(row, COLUMNS[1], prompt), file.tokens(row, COLUMNS[2], output))
        if images:
            with_images += file.tokens(row, IMAGES, images) > 0
    if with_images:
        rows.notes["rows_with_images"] = with_images
    return rows


class _TimestampParser:
    """Timestamps to nanoseconds since 1970. Either all of a file carry an offset from UTC, or none."""

    def __init__(self, file: TraceFile) -> None:
        self.file = file
        self.has_offset: bool | None = None
        self.last_second = ("", "")
        self.last_ns = 0

    def __call__(self, row: int, text: str) -> int:
        match = _TIMESTAMP.fullmatch(text.strip())
        if not match:
            raise self.file.error(row, "TIMESTAMP", text, _EXPECTED)
        second, fraction, offset = match[1], match[2] or "", match[3] or ""
        if self.has_offset is None:
            self.has_offset = bool(offset)
        if self.has_offset != bool(offset):
            expected = "an offset from UTC" if self.has_offset else "no offset from UTC"
            raise self.file.error(row, "TIMESTAMP", text, f"{expected}, as in the rows before")
        if (second, offset) != self.last_second:  # rows come many to a second
            try:
                moment = datetime.fromisoformat(second + offset)
                self.last_ns = int((moment if offset else moment.replace(tzinfo=UTC)).timestamp()) * _NS_PER_S
            except (ValueError, OverflowError) as error:
                raise self.file.error(row, "TIMESTAMP", text, f"{_EXPECTED} ({error})") from error
            self.last_second = (second, offset)
        nanoseconds = self.last_ns + int(fraction.ljust(9, "0"))
        if not 0 <= nanoseconds < 2**62:
            raise self.file.error(row, "TIMESTAMP", text, "a year from 1970 to 2115")
        return nanoseconds
