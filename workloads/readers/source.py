"""What all formats share: opening a file, checking fields, and the columns that a reader fills."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TextIO

from fleetpilot.workloads.table import MAX_TOKENS, NO_PARENT, NO_SESSION

MAX_TIME = 2**62
GZIP_MAGIC = b"\x1f\x8b"

JsonObject = dict[str, object]


class TraceFile:
    """A trace file, plain or gzip, read line by line. Its errors name file, line, field, value and expectation.

    Rows count from 0; a header and blank lines are not rows. Lines are those of the file, from 1.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._has_header = False

    def error(self, row: int, field: str, value: object, expected: str) -> ValueError:
        """The error for one field of one row."""
        return ValueError(f"{self.path.name}: line {self.line(row)}: {field} = {shown(value)}: expected {expected}")

    def line(self, row: int) -> int:
        """The line on which a row ends; found by reading the file again, as only errors ask for it."""
        with self.open() as text:
            if self._has_header:
                reader = csv.reader(text)
                next(islice(filter(None, reader), row + 1, None))
                return reader.line_num
            return next(islice((number for number, line in enumerate(text, 1) if line.strip()), row, None))

    @contextmanager
    def open(self) -> Iterator[TextIO]:
        """The file as text; undecodable bytes become U+FFFD, so that their field is refused and named."""
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self.path}: expected a regular file")
        with self.path.open("rb") as raw:
            zipped = raw.read(2) == GZIP_MAGIC
        try:
            if zipped:
                with gzip.open(self.path, "rt", encoding="utf-8-sig", errors="replace", newline="") as text:
                    yield text
            else:
                with self.path.open("rt", encoding="utf-8-sig", errors="replace", newline="") as text:
                    yield text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{self.path.name}: damaged gzip file: {error}") from error

    def first_line(self) -> str:
        """The first line that is not blank.

        Raises:
            ValueError: if there is none.
        """
        with self.open() as text:
            for line in text:
                if line.strip():
                    return line
        raise ValueError(f"{self.path.name}: the file is empty")

    def csv_header(self, line: str) -> list[str]:
        """The column names in a header line."""
        try:
            return [name.strip() for name in next(csv.reader([line]), [])]
        except csv.Error as error:
            raise ValueError(f"{self.path.name}: header: not CSV: {error}") from error

    def csv_rows(self, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[int, Sequence[str]]]:
        """Row number and the fields of the named columns; an optional column that is missing gives empty fields."""
        with self.open() as text:
            reader = csv.reader(text)
            try:
                self._has_header = True
                header = [name.strip() for name in next(filter(None, reader), [])]
                missing = [name for name in columns if name not in header]
                if missing:
                    raise ValueError(f"{self.path.name}: header {shown(header)}: expected a column {missing[0]!r}")
                width = len(header)
                wanted = [header.index(name) if name in header else width for name in (*columns, *optional)]
                pick = itemgetter(*wanted)
                for row, fields in enumerate(filter(None, reader)):
                    if len(fields) != width:
                        raise self.error(row, "line", fields, f"{width} fields, as in the header")
                    fields.append("")
                    yield row, pick(fields)
            except csv.Error as error:
                raise ValueError(f"{self.path.name}: line {reader.line_num}: not CSV: {error}") from error

    def json_rows(self, cut: Counter[str] | None = None) -> Iterator[tuple[int, JsonObject]]:
        """Row number and object of each line.

        Args:
            cut: counts lines that are no JSON, such as one that a crash cut; by default they are refused.
        """
        with self.open() as text:
            for row, line in enumerate(filter(str.strip, text)):
                try:
                    record = self.json_object(row, line)
                except ValueError:
                    if cut is None:
                        raise
                    cut["no_record"] += 1
                else:
                    yield row, record

    def json_object(self, row: int, line: str) -> JsonObject:
        """One line as a JSON object."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.error(row, "line", line.strip(), f"a JSON object ({error})") from error
        if not isinstance(value, dict):
            raise self.error(row, "line", value, "a JSON object")
        return value

    def seconds(self, row: int, field: str, value: object) -> float:
        """A time or duration as it stands (in the unit of the format): a finite number >= 0."""
        number = _number(value)
        if not 0 <= number <= MAX_TIME:  # false for NaN
            raise self.error(row, field, value, "a finite time >= 0")
        return number

    def tokens(self, row: int, field: str, value: object) -> int:
        """A count of tokens: an integer >= 0 (the caller decides what 0 means)."""
        if isinstance(value, str) and len(value) < 10 and value.isascii() and value.isdigit():
            return int(value)
        number = _number(value)
        if not (0 <= number <= MAX_TOKENS and number == math.floor(number)):
            raise self.error(row, field, value, f"an integer from 0 to {MAX_TOKENS}")
        return int(number)

    def block_ids(self, row: int, field: str, value: object, expected_blocks: Sequence[int], why: str) -> list[int]:
        """A list of content ids whose length is one of ``expected_blocks``; ``why`` explains that in the error."""
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self.error(row, field, value, "a list of integers")
        if len(value) not in expected_blocks:
            counts = " or ".join(map(str, sorted(set(expected_blocks))))
            raise self.error(row, f"len({field})", len(value), f"{counts} ({why})")
        return value


def shown(value: object) -> str:
    """A value as errors show it: plain ASCII, whatever the file held, and short."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _number(value: object) -> float:
    """A JSON number or the text of one; NaN for anything else."""
    if isinstance(value, str):
        if "_" in value:
            return math.nan
        try:
            return float(value)
        except ValueError:
            return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= MAX_TIME else math.inf


class TraceRows:
    """The columns that a format reader fills, in file order, zero-token rows included.

    Attributes:
        format: name of the format.
        time_unit: unit of ``time`` in words.
        units_per_s: how many of them a second has.
        zero_output_reason: what it means in this format that no token came back.
        tick_s: width of the clock's ticks if equal times are to be spread over them, else None.
        block_tokens: tokens per content block; None where the format identifies no content.
        time: arrival in the format's unit; of a row that is released by its parent, the parent's.
        prompt_tokens, output_tokens, think_s, session, turn, parent, source_row: as in `RequestTable`, except that a
            parent is an earlier row in file order.
        block_offsets, block_ids: content ids of row r are ``block_ids[block_offsets[r]:block_offsets[r + 1]]``,
            numbered from 0 in order of appearance (so that no bit of a 64-bit id is lost).
        grows: whether the prompt of a row with a parent starts with the parent's prompt and output.
        inversions: neighbours out of time order, as far as the reader has put them right itself.
        dropped: rows that the reader itself left out, by reason (they are in none of the columns).
        notes: further counts for the reading report.
    """

    def __init__(
        self,
        format: str,
        time_unit: str,
        units_per_s: float,
        *,
        integer_time: bool = False,
        zero_output_reason: str = "zero_output_tokens",
        tick_s: float | None = None,
        block_tokens: int | None = None,
    ) -> None:
        self.format = format
        self.time_unit = time_unit
        self.units_per_s = units_per_s
        self.zero_output_reason = zero_output_reason
        self.tick_s = tick_s
        self.block_tokens = block_tokens
        self.time: array[float] = array("q" if integer_time else "d")
        self.prompt_tokens = array("q")
        self.output_tokens = array("q")
        self.source_row = array("q")
        self.session = array("q")
        self.turn = array("q")
        self.parent = array("q")
        self.think_s = array("d")
        self.block_offsets = array("q", [0])
        self.block_ids = array("q")
        self.grows = False
        self.inversions = 0
        self.dropped: Counter[str] = Counter()
        self.notes: dict[str, object] = {}
        self._interned: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self.time)

    def add(
        self,
        row: int,
        time: float,
        prompt_tokens: int,
        output_tokens: int,
        think_s: float = math.nan,
        session: int = NO_SESSION,
        turn: int = 0,
        parent: int = NO_PARENT,
    ) -> int:
        """Append one request and return its index."""
        self.source_row.append(row)
        self.time.append(time)
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        self.think_s.append(think_s)
        self.session.append(session)
        self.turn.append(turn)
        self.parent.append(parent)
        return len(self.time) - 1

    def add_blocks(self, ids: Sequence[object]) -> None:
        """Append the content ids of the request just added (none: its content is unknown)."""
        interned = self._interned
        self.block_ids.extend([interned.setdefault(key, len(interned)) for key in ids])
        self.block_offsets.append(len(self.block_ids))
