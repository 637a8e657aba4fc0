"""A binary heap of timed items in a slice of an array, ordered by (time, row)."""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel


@kernel
def _before(a: Any, b: Any) -> bool:
    return a.time_s < b.time_s or (a.time_s == b.time_s and a.row < b.row)


@kernel
def _swap(heap: Any, i: int, j: int) -> None:
    time_s, index, row = heap[i].time_s, heap[i].index, heap[i].row
    heap[i] = heap[j]
    heap[j].time_s = time_s
    heap[j].index = index
    heap[j].row = row


@kernel
def push(heap: Any, first: int, size: int, time_s: float, index: int, row: int) -> int:
    """Add an item to the heap of `size` items that begins at `first`; returns the new size."""
    i = size
    heap[first + i].time_s = time_s
    heap[first + i].index = index
    heap[first + i].row = row
    while i > 0 and _before(heap[first + i], heap[first + (i - 1) // 2]):
        _swap(heap, first + i, first + (i - 1) // 2)
        i = (i - 1) // 2
    return size + 1


@kernel
def pop(heap: Any, first: int, size: int) -> int:
    """Remove the earliest item (it was at `first`); returns the new size."""
    size -= 1
    heap[first] = heap[first + size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            return size
        if child + 1 < size and _before(heap[first + child + 1], heap[first + child]):
            child += 1
        if not _before(heap[first + child], heap[first + i]):
            return size
        _swap(heap, first + i, first + child)
        i = child
