"""Memory and a lock that processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.dispatcher.workers.board import Board, FileLock, Journal

WAIT_S = 60.0


def journals(words: int, readers: int) -> list[Journal]:
    """Of one ring; the first is written to."""
    ring, ends = np.zeros(words, np.int64), np.zeros(2, np.int64)
    return [Journal(ring, ends) for _ in range(readers)]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12)), max_size=80))
def test_every_reader_has_every_entry_in_order(entries: list[tuple[int, list[int]]]) -> None:
    writer, reader = journals(64, 2)
    read = []
    for number, (kind, further) in enumerate(entries):
        assert not list(writer.read())
        writer.write(kind, number, further)
        if number % 2:
            read += list(reader.read())
    read += list(reader.read())
    assert read == [(kind, number, further) for number, (kind, further) in enumerate(entries)]
    assert reader.lost == 0


@given(st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=40, max_size=120))
def test_a_late_reader_has_whole_entries_of_the_last_lap(entries: list[list[int]]) -> None:
    writer, reader = journals(64, 2)
    for number, further in enumerate(entries):
        writer.write(1, number, further)
    read = list(reader.read())
    assert reader.lost == 1
    assert read == [(1, number, entries[number]) for number in range(len(entries) - len(read), len(entries))]
    writer.write(2, 7)
    assert list(reader.read()) == [(2, 7, [])]


def test_what_is_too_long_is_cut() -> None:
    writer, reader = journals(64, 2)
    writer.write(1, 2, range(100))
    assert list(reader.read()) == [(1, 2, list(range(16)))]


_HOLD = """
import sys, time
from pathlib import Path
from fleetpilot.dispatcher.workers.board import FileLock
with FileLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="several workers need Linux")
def test_the_kernel_frees_the_lock_of_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    command = [sys.executable, "-c", _HOLD, str(path)]
    with subprocess.Popen([*command, str(WAIT_S)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE) as waiter:
            try:
                with pytest.raises(subprocess.TimeoutExpired):
                    waiter.wait(1.0)
            finally:
                holder.kill()
            assert waiter.wait(WAIT_S) == 0
    lock = FileLock(path)
    with lock, lock:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="several workers need Linux")
def test_what_one_process_writes_others_read_until_it_is_gone() -> None:
    leader, memory = Board.create(2)
    with memory:
        worker, other = (Board.open(memory.fileno(), row, 2) for row in (1, 2))
        worker.own["in_flight"][3] = 2.0
        worker.own["dispatched"][3] = 5.0
        worker.own["migrating"][3] = 1
        worker.head_s[1, 3], worker.held[1], worker.oldest_held_s[1], worker.migrations[1] = 1.0, 4, 2.0, 1
        assert other.ledgers["in_flight"][:, 3].tolist() == [0.0, 2.0, 0.0]
        assert other.first_in_line() == 1
        leader.clear(1)
        assert not other.ledgers["in_flight"].any()
        assert not other.ledgers["migrating"].any()
        assert other.ledgers["dispatched"][:, 3].tolist() == [5.0, 0.0, 0.0]
        assert np.isinf(other.head_s).all()
        assert (other.held.sum(), other.migrations.sum(), other.first_in_line()) == (0, 0, 2)
