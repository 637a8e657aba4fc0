"""A binary heap of timed items in a slice of an array, ordered by (time, row)."""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import inlined, kernel


@inlined
def _before(time_s: float, row: int, other: Any) -> bool:
    return time_s < other.time_s or (time_s == other.time_s and row < other.row)


@inlined
def _put(entry: Any, time_s: float, index: int, row: int) -> None:
    entry.time_s = time_s
    entry.index = index
    entry.row = row


@kernel
def push(heap: Any, first: int, size: int, time_s: float, index: int, row: int) -> int:
    """Add an item to the heap of `size` items that begins at `first`; returns the new size."""
    i = size
    while i > 0 and _before(time_s, row, heap[first + (i - 1) // 2]):
        heap[first + i] = heap[first + (i - 1) // 2]
        i = (i - 1) // 2
    _put(heap[first + i], time_s, index, row)
    return size + 1


@kernel
def pop(heap: Any, first: int, size: int) -> int:
    """Remove the earliest item (it was at `first`); returns the new size."""
    size -= 1
    last = heap[first + size]
    time_s, index, row = last.time_s, last.index, last.row
    i = 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and _before(
            heap[first + child + 1].time_s, heap[first + child + 1].row, heap[first + child]
        ):
            child += 1
        if _before(time_s, row, heap[first + child]):
            break
        heap[first + i] = heap[first + child]
        i = child
    _put(heap[first + i], time_s, index, row)
    return size
