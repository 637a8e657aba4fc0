"""Bailian traces: seconds, 16-token blocks, conversations by chat id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpilot.workloads import RequestTable, detect_format, read_trace


def chat(number: int, parent: int, timestamp: float, tokens: int, turn: int, ids: list[int]) -> dict[str, object]:
    return {
        "chat_id": number,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": 132,
        "type": "text",
        "turn": turn,
        "hash_ids": ids,
    }


def read(tmp_path: Path, *rows: dict[str, object]) -> RequestTable:
    path = tmp_path / "bailian.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert detect_format(path) == "bailian"
    return read_trace(path)


def test_a_conversation(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        chat(159, -1, 61.114, 33, 1, [1089, 1090, 1091]),
        chat(160, -1, 61.5, 20, 1, [1089, 5]),
        chat(170, 159, 62.614, 70, 2, [1089, 1090, 6326, 6327, 6328]),
    )
    assert table.arrival_s.tolist() == pytest.approx([0.0, 0.386, 1.5])  # seconds
    assert table.session.tolist() == [159, 160, 159]
    assert table.turn.tolist() == [0, 0, 1]
    assert table.parent.tolist() == [-1, -1, 0]
    assert table.node_end_tokens[table.prefix_node].tolist() == [32, 16, 32]


def test_a_turn_whose_parent_is_not_in_the_file_keeps_its_session(tmp_path: Path) -> None:
    row = chat(159, 55, 61.114, 521, 2, [1089, *range(32)])
    row["timestamp"] = 61.114
    table = read(tmp_path, row, chat(180, 159, 70.0, 16, 3, [9]))
    assert table.session.tolist() == [55, 55]
    assert table.turn.tolist() == [1, 2]
    assert table.parent.tolist() == [-1, 0]
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["rows_whose_parent_is_missing"] == 1


def test_a_parent_that_arrives_later_is_no_parent(tmp_path: Path) -> None:
    table = read(tmp_path, chat(1, -1, 9.0, 16, 1, [1]), chat(2, 1, 3.0, 16, 2, [2]))
    assert table.parent.tolist() == [-1, -1]
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["links_to_later_rows_cut"] == 1


def test_blocks_of_16_tokens_are_counted(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"bailian.jsonl: line 1: len\(hash_ids\) = 1: expected 2 \(17 prompt tokens in"
    ):
        read(tmp_path, chat(1, -1, 9.0, 17, 1, [1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chat_id": "x"}, "chat_id = 'x': expected an integer >= -1"),
        ({"parent_chat_id": None}, "parent_chat_id = None: expected an integer >= -1"),
        ({"turn": 0}, "turn = 0: expected an integer >= 1"),
        ({"timestamp": -0.5}, "timestamp = -0.5: expected a finite time >= 0"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"bailian.jsonl: line 1: {message}"):
        read(tmp_path, chat(1, -1, 9.0, 16, 1, [1]) | change)
