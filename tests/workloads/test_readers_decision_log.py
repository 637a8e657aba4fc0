"""Decision logs of the dispatcher, read as traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpilot.workloads import RequestTable, detect_format, read_trace


def record(kind: str, unix_s: float, **fields: Any) -> dict[str, Any]:
    return {"record": kind, "run": "r1", "unix_s": unix_s, **fields}


def decision(request: str, session: int = -1, turn: int = 0, **fields: Any) -> dict[str, Any]:
    view = {"request": {"prompt_tokens": 9.0, "session": session, "turn": turn}}
    return record("decision", 0.0, request=request, view=view, **fields)


def outcome(request: str, ended_s: float, duration_s: float, **fields: Any) -> dict[str, Any]:
    known = {"outcome": "finished", "prompt_tokens": 10, "output_tokens": 5, "duration_s": duration_s}
    return record("outcome", ended_s, request=request, **(known | fields))


def read(tmp_path: Path, *records: dict[str, Any]) -> RequestTable:
    path = tmp_path / "decisions.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    assert detect_format(path) == "decision_log"
    return read_trace(path)


def test_requests_arrive_when_they_did_and_in_that_order(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        decision("0"),
        decision("1"),
        outcome("1", 1_790_000_104.0, 2.0, prompt_tokens=20, output_tokens=6),
        outcome("0", 1_790_000_110.0, 9.5, output_tokens=70),
    )
    assert table.arrival_s.tolist() == [0.0, 1.5]
    assert table.prompt_tokens.tolist() == [10, 20]
    assert table.output_tokens.tolist() == [70, 6]
    assert table.session.tolist() == [-1, -1]


def test_sessions_are_kept_and_runs_told_apart(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        decision("0", session=0, turn=0),
        outcome("0", 1_790_000_010.0, 1.0),
        decision("1", session=0, turn=1),
        outcome("1", 1_790_000_020.0, 1.0),
        decision("0", session=0, turn=0) | {"run": "r2"},
        outcome("0", 1_790_000_030.0, 1.0) | {"run": "r2"},
    )
    assert table.session.tolist() == [0, 0, 1]
    assert table.turn.tolist() == [0, 1, 0]


def test_what_cannot_be_replayed_is_left_out_and_counted(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        record("decision", 0.0, request=None, view={}),
        outcome("0", 1_790_000_010.0, 1.0, outcome="client left"),
        outcome("1", 1_790_000_011.0, 1.0, outcome="rejected", output_tokens=None),
        outcome("2", 1_790_000_012.0, 1.0, output_tokens=None),
        record("migration", 1_790_000_013.0, request="3"),
        outcome("3", 1_790_000_014.0, 1.0),
    )
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["dropped"] == {"client_left": 1, "rejected": 1, "not_streamed": 1}
    assert (report["rows_read"], report["rows_emitted"]) == (4, 1)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"decisions.jsonl: line 1: duration_s = None: expected a finite time >= 0"):
        read(tmp_path, outcome("0", 1_790_000_010.0, 1.0) | {"duration_s": None})


def test_a_line_that_a_crash_cut_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    whole = json.dumps(outcome("0", 1_790_000_010.0, 1.0))
    path.write_text(f'{whole}\n{{"record":"decis\n{whole}\n')
    table = read_trace(path)
    assert len(table) == 2
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["dropped"] == {"no_record": 1}


def test_a_session_that_is_none_is_named(tmp_path: Path) -> None:
    damaged = decision("0")
    damaged["view"]["request"]["session"] = [1]
    with pytest.raises(ValueError, match=r"line 1: view\.request\.session = \[1\]"):
        read(tmp_path, damaged, outcome("0", 1_790_000_010.0, 1.0))
