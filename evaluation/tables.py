"""Tables to show: as Markdown, as text for a terminal; the page's template shows them as HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A table's cell; `best` is marked."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table to show: the first column is text, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[Text]]
    note: str = ""


def markdown(table: Table) -> str:
    """The table in Markdown, the best in bold."""
    lines = [
        f"### {table.title}",
        "",
        table.note,
        "",
        "| " + " | ".join(table.header) + " |",
        "| --- |" + " ---: |" * (len(table.header) - 1),
        *("| " + " | ".join(f"**{c.text}**" if c.best else c.text for c in row) + " |" for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def plain(table: Table) -> str:
    """The table for a terminal: aligned columns, a star behind the best."""
    cells = [table.header, *([f"{cell.text}*" if cell.best else f"{cell.text} " for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
    align: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    lines = ["  ".join(pad(text, width) for pad, text, width in zip(align, row, widths, strict=True)) for row in cells]
    return "\n".join([table.title, *(line.rstrip() for line in lines)]) + "\n"


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"
