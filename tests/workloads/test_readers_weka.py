"""WEKA traces: sessions as closed loops, content ids of a session, think times recorded or inferred."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fleetpilot.workloads import RequestTable, detect_format, read_trace


def call(t: float, tokens: int, ids: list[int] | None = None, **more: object) -> dict[str, object]:
    found: dict[str, object] = {"t": t, "type": "s", "model": "m", "in": tokens, "out": 10, "api_time": 2.0, **more}
    return found if ids is None else {**found, "hash_ids": ids}


def session(name: str, *calls: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "tool_tokens": 8,
        "system_tokens": 7,
        "requests": calls,
        **more,
    }


def read(tmp_path: Path, *sessions: dict[str, object], **options: object) -> RequestTable:
    path = tmp_path / "weka.jsonl"
    path.write_text("\n".join(map(json.dumps, sessions)))
    assert detect_format(path) == "weka"
    return read_trace(path, **options)  # type: ignore[arg-type]


def test_sessions_are_closed_loops(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        session("a", call(0.5, 100), call(7.0, 150, think_time=4.5), call(60.0, 200, think_time=51.0)),
        session("b", call(0.0, 90), call(1.0, 95, think_time=0.0)),
        session_gap_s=30.0,
    )
    assert table.session.tolist() == [0, 0, 0, 1, 1]
    assert table.turn.tolist() == [0, 1, 2, 0, 1]
    assert table.parent.tolist() == [-1, 0, 1, -1, 3]
    assert table.arrival_s.tolist() == pytest.approx([0.0, np.nan, np.nan, 30.0, np.nan], nan_ok=True)
    assert table.think_s.tolist() == pytest.approx([np.nan, 4.5, 51.0, np.nan, 0.0], nan_ok=True)


def test_without_a_think_time_it_is_what_passed_since_the_answer(tmp_path: Path) -> None:
    calls = [call(0.0, 100), call(5.0, 110), call(6.0, 120)]  # the last one came before the answer to the second
    assert read(tmp_path, session("a", *calls)).think_s.tolist() == pytest.approx([np.nan, 3.0, 0.0], nan_ok=True)
    del calls[0]["api_time"]
    message = (
        r"weka.jsonl: line 1: requests\[1\].think_time = None: expected a time in s, or api_time in the call before"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path, session("a", *calls))


def test_ids_count_within_their_session_unless_they_are_global(tmp_path: Path) -> None:
    sessions = [session(name, call(0.0, 130, [1, 2]), call(9.0, 260, [1, 2, 3, 4])) for name in "ab"]
    local = read(tmp_path, *sessions)
    assert local.node_end_tokens.tolist() == [128, 128]
    assert local.prefix_node.tolist() == [0, 0, 1, 1]
    everywhere = read(tmp_path, *({**found, "hash_id_scope": "global"} for found in sessions))
    assert everywhere.node_end_tokens.tolist() == [128, 256]
    assert everywhere.prefix_node.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("blocks", [2, 3])
def test_the_partial_last_block_may_have_an_id_or_not(tmp_path: Path, blocks: int) -> None:
    ids = list(range(1, blocks + 1))
    table = read(tmp_path, session("a", call(0.0, 150, ids), call(9.0, 150, ids)))
    assert table.node_end_tokens.tolist() == [min(64 * blocks, 150)]


@pytest.mark.parametrize("blocks", [1, 4])
def test_other_numbers_of_blocks_are_refused(tmp_path: Path, blocks: int) -> None:
    with pytest.raises(
        ValueError, match=rf"len\(requests\[0\].hash_ids\) = {blocks}: expected 2 or 3 \(150 prompt tokens"
    ):
        read(tmp_path, session("a", call(0.0, 150, list(range(blocks)))))


def test_subagents_are_left_out_and_counted(tmp_path: Path) -> None:
    subagent = {"t": 3.0, "type": "subagent", "agent_id": "x", "requests": [call(0.0, 5), call(1.0, 6)]}
    table = read(tmp_path, session("a", call(0.0, 100), subagent, call(20.0, 200, think_time=18.0)))
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert (report["rows_read"], report["rows_emitted"], report["dropped"]) == (4, 2, {"subagent_calls": 2})
    assert table.parent.tolist() == [-1, 0]


def test_a_dropped_call_leaves_its_wait_to_the_next(tmp_path: Path) -> None:
    calls = [
        call(0.0, 100),
        call(5.0, 9000, think_time=3.0),
        call(9.0, 120, think_time=2.0),
        call(12.0, 130, think_time=1.0),
    ]
    table = read(tmp_path, session("a", *calls), max_total_tokens=4096, over_length="drop")
    assert table.parent.tolist() == [-1, 0, 1]
    assert table.turn.tolist() == [0, 2, 3]
    assert table.think_s.tolist() == pytest.approx([np.nan, 5.0, 1.0], nan_ok=True)
    calls[0]["in"] = 9000
    table = read(tmp_path, session("a", *calls), max_total_tokens=4096, over_length="drop")
    assert table.parent.tolist() == [-1, 0]  # the session now starts with its third call
    assert table.arrival_s.tolist() == pytest.approx([0.0, np.nan], nan_ok=True)


def test_calls_out_of_order_are_counted(tmp_path: Path) -> None:
    table = read(tmp_path, session("a", call(5.0, 100), call(0.0, 100, think_time=1.0)))
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["inversions"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "line 2: block_size = 0: expected 64, as in the sessions before"),
        ({"block_size": 16}, "line 2: block_size = 16: expected 64, as in the sessions before"),
        ({"requests": {}}, "line 2: requests = {}: expected a list of calls"),
        ({"requests": [3]}, r"line 2: requests\[0\].type = None: expected 'n', 's' or 'subagent'"),
        ({"requests": [{"type": "s", "t": 0, "in": 5}]}, r"line 2: requests\[0\].out = None: expected an integer"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"weka.jsonl: {message}"):
        read(tmp_path, session("a", call(0.0, 100)), session("b", call(0.0, 100), **change))


def test_a_gap_between_sessions_is_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"session_gap_s = -1.0: expected a finite time >= 0"):
        read(tmp_path, session("a", call(0.0, 100)), session_gap_s=-1.0)
