"""What the processes of a dispatcher know together: one block of memory, and a lock that the kernel frees.

Every row of `ledgers` has one writer, a process, and views add the rows up. What is decided is decided and booked under
`Board.lock`, so each decision sees all that were booked before it, whoever booked them.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows, where a board is one process's
    fcntl = None  # type: ignore[assignment]

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.view import INSTANCE_VIEW

MOST_ENGINES = 4_096
"""Slots of a fleet. Memory that is not written to takes none."""
_JOURNAL_WORDS = 1 << 20


class Board:
    """Memory, of this process alone or shared by all that `open` the same file.

    Args:
        me: which row this process writes: 0 leads the fleet, the workers have the rows behind it.
        rows: of all processes.
        memory: of `size` bytes, zeros at first.
        lock: held while a decision is made and booked.

    Attributes:
        instances: (MOST_ENGINES,) records of `INSTANCE_VIEW` without the ledger's fields, written by who leads.
        ledgers: (rows, MOST_ENGINES) such records with the ledger's fields and ``migrating``, a row for each process.
        head_s: (rows, MOST_ENGINES) when the request behind a row's ``head_prompt_blocks`` was booked.
        last_token_s: (rows, MOST_ENGINES) when an instance last sent something. All times are of the monotonic clock.
        polled_s: (MOST_ENGINES,) when the last poll that was answered was sent.
        blocked_until_s: (MOST_ENGINES,) no request is sent there before.
        held: (rows,) requests that wait.
        oldest_held_s: (rows,) when the first of them came; inf for none.
        migrations: (rows,) that go on.
        numbers: (3,) decisions so far, dispatches among them, sessions.
        mean_output_tokens: (1,) of the answers so far.
        journal: see `Journal`.
    """

    def __init__(self, me: int, rows: int, memory: Any, lock: AbstractContextManager[Any]):
        self.me = me
        self.lock = lock
        arrays = {}
        offset = 0
        for name, shape, dtype in _layout(rows):
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(memory, dtype, count, offset).reshape(shape)
            offset += _padded(count * dtype.itemsize)
        self.instances: NDArray[np.void] = arrays["instances"]
        self.ledgers: NDArray[np.void] = arrays["ledgers"]
        self.head_s: NDArray[np.float64] = arrays["head_s"]
        self.last_token_s: NDArray[np.float64] = arrays["last_token_s"]
        self.polled_s: NDArray[np.float64] = arrays["polled_s"]
        self.blocked_until_s: NDArray[np.float64] = arrays["blocked_until_s"]
        self.held: NDArray[np.int64] = arrays["held"]
        self.oldest_held_s: NDArray[np.float64] = arrays["oldest_held_s"]
        self.migrations: NDArray[np.int64] = arrays["migrations"]
        self.numbers: NDArray[np.int64] = arrays["numbers"]
        self.mean_output_tokens: NDArray[np.float64] = arrays["mean_output_tokens"]
        self.journal = Journal(arrays["journal"], arrays["journal_ends"]) if rows > 1 else None

    @classmethod
    def alone(cls) -> Board:
        """Of this process, which leads and serves."""
        return cls(0, 1, np.zeros(_size(1), np.uint8), contextlib.nullcontext())._begun()

    @classmethod
    def create(cls, workers: int) -> tuple[Board, Any]:
        """Of this process, which leads, and its workers; in a file without a name, for processes that inherit it."""
        memory = tempfile.TemporaryFile()  # noqa: SIM115
        memory.truncate(_size(1 + workers))
        return cls.open(memory.fileno(), 0, workers)._begun(), memory

    @classmethod
    def open(cls, file: int, me: int, workers: int) -> Board:
        """What the process that leads has created, by the number that its file has in this process."""
        memory = mmap.mmap(file, _size(1 + workers))
        return cls(me, 1 + workers, memory, FileLock(Path(f"/proc/self/fd/{file}")))

    def _begun(self) -> Board:
        self.head_s[:] = np.inf
        self.oldest_held_s[:] = np.inf
        return self

    def clear(self, row: int) -> None:
        """A worker is gone: nothing is booked in its row. What it had dispatched counts as dispatched by who leads."""
        self.ledgers["dispatched"][0] += self.ledgers["dispatched"][row]
        self.ledgers[row] = np.zeros(1, INSTANCE_VIEW)
        self.head_s[row] = np.inf
        self.held[row] = 0
        self.oldest_held_s[row] = np.inf
        self.migrations[row] = 0

    def first_in_line(self) -> int:
        """The row of the process whose request waits longest; `me` where none waits."""
        oldest_s = self.oldest_held_s.tolist()
        first_s = min(oldest_s)
        return oldest_s.index(first_s) if first_s < np.inf else self.me

    def close(self) -> None:
        """Nothing is decided any more; the memory goes with the last of the arrays."""
        if isinstance(self.lock, FileLock):
            self.lock.close()

    @property
    def own(self) -> NDArray[np.void]:
        """(MOST_ENGINES,) this process's row of `ledgers`."""
        return self.ledgers[self.me]


class FileLock:
    """Held by one process at a time, as often as it likes; freed by the kernel when its holder dies."""

    def __init__(self, path: Path):
        self._file = path.open("r+b")  # a lock belongs to a file as it was opened: each process opens it itself
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX)
        self._depth += 1

    def close(self) -> None:
        """It cannot be taken any more."""
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)


PREFIX, FORGET, SESSION, _END_OF_LAP = range(4)
"""Kinds of entries: blocks that a prompt left at an instance; that it holds none any more; a turn of a session."""
_HEAD = 3


class Journal:
    """What happened that every process keeps in structures of its own, in order; read and written under the lock.

    Entries are written round and round, so one that is not read for long is lost; a reader that began late, or was
    late, has the last lap. Whoever writes has read all before.

    Args:
        words: (n,) ring of entries: kind, argument, number of further words, and these.
        ends: (2,) words written so far, and those before this lap.

    Attributes:
        lost: how often this reader missed some.
    """

    def __init__(self, words: NDArray[np.int64], ends: NDArray[np.int64]):
        self.lost = 0
        self._words = words
        self._ends = ends
        self._read = int(ends[1])

    @property
    def is_read(self) -> bool:
        """Whether there is nothing new."""
        return bool(self._ends[0] == self._read)

    def read(self) -> Iterator[tuple[int, int, list[int]]]:
        """Kind, argument and further words of each new entry."""
        end, lap = self._ends.tolist()
        if end - self._read > len(self._words):
            self.lost += 1
            self._read = lap
        while self._read < end:
            start = self._read % len(self._words)
            kind, argument, size = self._words[start : start + _HEAD].tolist()
            self._read += _HEAD + size
            if kind == _END_OF_LAP:
                self._read += -self._read % len(self._words)
            else:
                yield kind, argument, self._words[start + _HEAD : start + _HEAD + size].tolist()

    def write(self, kind: int, argument: int, further: Sequence[int] = ()) -> None:
        """An entry, after all that are there were read. What is too long for a quarter of the ring is cut."""
        further = further[: len(self._words) // 4]
        end = int(self._ends[0])
        if end % len(self._words) + 2 * _HEAD + len(further) > len(self._words):
            start = end % len(self._words)
            self._words[start : start + _HEAD] = (_END_OF_LAP, 0, 0)
            end += -end % len(self._words)
            self._ends[1] = end
        start = end % len(self._words)
        self._words[start : start + _HEAD] = (kind, argument, len(further))
        self._words[start + _HEAD : start + _HEAD + len(further)] = further
        self._read = end + _HEAD + len(further)
        self._ends[0] = self._read


def _layout(rows: int) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    whole, real = np.dtype(np.int64), np.dtype(np.float64)
    return [
        ("instances", (MOST_ENGINES,), INSTANCE_VIEW),
        ("ledgers", (rows, MOST_ENGINES), INSTANCE_VIEW),
        ("head_s", (rows, MOST_ENGINES), real),
        ("last_token_s", (rows, MOST_ENGINES), real),
        ("polled_s", (MOST_ENGINES,), real),
        ("blocked_until_s", (MOST_ENGINES,), real),
        ("held", (rows,), whole),
        ("oldest_held_s", (rows,), real),
        ("migrations", (rows,), whole),
        ("numbers", (3,), whole),
        ("mean_output_tokens", (1,), real),
        ("journal", (_JOURNAL_WORDS if rows > 1 else 0,), whole),
        ("journal_ends", (2,), whole),
    ]


def _size(rows: int) -> int:
    """Bytes."""
    return sum(_padded(int(np.prod(shape)) * dtype.itemsize) for _, shape, dtype in _layout(rows))


def _padded(size: int) -> int:
    """To whole cache lines."""
    return size + -size % 64
