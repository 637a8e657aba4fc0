"""Measured points, kept as JSON lines while they are measured, so that a calibration can go on where it stopped."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class PointsFile:
    """A file of measured points; its first line says of which engines they are.

    Args:
        path: created with its first point.
        engines: what identifies the engines.

    Raises:
        ValueError: the file holds points of other engines, or lines that are none.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, engines: Any):
        self.path = path
        self._head = {"engines": engines}
        self._points: list[dict[str, Any]] = []
        if path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._points)

    def add(self, **point: Any) -> None:
        """Keep a point."""
        lines = [] if self._points or self.path.exists() else [self._head]
        self._points.append(point)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in (*lines, point))

    def of(self, **values: Any) -> list[dict[str, Any]]:
        """The points with these values."""
        return [point for point in self._points if all(point.get(name) == value for name, value in values.items())]

    def means(self, kind: str, *names: str) -> dict[tuple[int, str], dict[str, float]]:
        """By engine and key, the means over repeats of some values of the points of a kind."""
        groups: defaultdict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
        for point in self.of(kind=kind):
            groups[point["engine"], point["key"]].append(point)
        return {
            place: {name: float(np.mean([point[name] for point in points])) for name in names}
            for place, points in groups.items()
        }

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except ValueError:
                if number == len(lines):  # cut while it was written
                    self.path.write_text("".join(f"{kept}\n" for kept in lines[:-1]), encoding="utf-8")
                    break
                raise ValueError(f"{self.path}, line {number}: expected JSON") from None
            if number == 1 and value != self._head:
                raise ValueError(
                    f"{self.path}: points of other engines ({value.get('engines')!r}), expected "
                    f"{self._head['engines']!r}; remove the file, or choose another output"
                )
            if number > 1:
                self._points.append(value)
