"""Mooncake traces: milliseconds, 512-token blocks, ticks, and aiperf's sessions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fleetpilot.workloads import RequestTable, detect_format, read_summary, read_trace


def row(timestamp: float, input_length: int, output_length: int = 5, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, **more}


def read(tmp_path: Path, *rows: dict[str, object], **options: object) -> RequestTable:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_trace(path, **options)  # type: ignore[arg-type]


def test_times_are_milliseconds(tmp_path: Path) -> None:
    table = read(tmp_path, row(0, 600, hash_ids=[0, 1]), row(3_536_999, 500, hash_ids=[0]))
    assert table.span_s == 3536.999  # not 3,536,999 s
    assert "times in ms" in read_summary(table)


def test_shared_blocks_are_shared_prefixes(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        row(0, 6955, 52, hash_ids=[46, *range(47, 60)]),
        row(1, 1500, hash_ids=[46, 47, 99]),
        row(2, 100, hash_ids=[7]),
    )
    assert table.node_end_tokens.tolist() == [1024]
    assert table.prefix_node.tolist() == [0, 0, -1]


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)])
def test_the_number_of_blocks_is_the_ceiling(tmp_path: Path, tokens: int, blocks: int) -> None:
    read(tmp_path, row(0, tokens, hash_ids=list(range(blocks))))
    for wrong in (blocks - 1, blocks + 1):
        message = rf"mooncake.jsonl: line 1: len\(hash_ids\) = {wrong}: expected {blocks} \({tokens} prompt tokens in"
        with pytest.raises(ValueError, match=message):
            read(tmp_path, row(0, tokens, hash_ids=list(range(wrong))))


def test_twenty_tokens_in_two_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: len\(hash_ids\) = 2: expected 1"):
        read(tmp_path, row(0, 20, hash_ids=[123, 456]))


@pytest.mark.parametrize("bit", [32, 40, 63, 64, 100])
def test_ids_that_differ_in_a_high_bit_stay_distinct(tmp_path: Path, bit: int) -> None:
    low = 0x9E3779B9
    table = read(tmp_path, row(0, 512, hash_ids=[low]), row(1, 512, hash_ids=[low + 2**bit]))
    assert table.prefix_node.tolist() == [-1, -1]
    table = read(tmp_path, row(0, 512, hash_ids=[low + 2**bit]), row(1, 512, hash_ids=[low + 2**bit]))
    assert table.prefix_node.tolist() == [0, 0]


def test_a_shared_id_at_another_place_is_not_a_shared_prefix(tmp_path: Path) -> None:
    table = read(tmp_path, row(0, 1024, hash_ids=[1, 2]), row(1, 1024, hash_ids=[3, 2]))
    assert len(table.node_parent) == 0


@pytest.mark.parametrize("ids", [[1.5], ["a"], [True], None, 3, [[1]]])
def test_ids_are_integers(tmp_path: Path, ids: object) -> None:
    with pytest.raises(ValueError, match=r"line 1: hash_ids = .*: expected a list of integers"):
        read(tmp_path, row(0, 512, hash_ids=ids))


def test_empty_prompts_and_answers_are_dropped_by_name(tmp_path: Path) -> None:
    table = read(tmp_path, row(0, 0, hash_ids=[]), row(1000, 5, 0, hash_ids=[1]), row(2000, 5, hash_ids=[1]))
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["dropped"] == {"zero_prompt_tokens": 1, "zero_output_tokens": 1}
    assert (report["rows_read"], report["rows_emitted"]) == (3, 1)
    assert table.arrival_s.tolist() == [2.0]  # one constant per file, whatever is dropped


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "-1", '"soon"', "null", "true", "1e999", "[]", "9" * 400]
)
def test_bad_times_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mooncake.jsonl"
    good = json.dumps(row(0, 5, hash_ids=[1]))
    path.write_text(good + "\n" + good.replace('"timestamp": 0', f'"timestamp": {text}'))
    with pytest.raises(ValueError, match=r"mooncake.jsonl: line 2: "):
        read_trace(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: timestamp = None: expected a finite time >= 0"):
        read(tmp_path, row(0, 5, hash_ids=[1]), {"input_length": 5, "output_length": 5, "hash_ids": [1]})


def test_the_clock_of_the_public_traces_ticks_every_3_s(tmp_path: Path) -> None:
    times = [0] * 10 + [2999] * 10 + [6000] * 10
    rows = [row(time, number + 1, hash_ids=[number]) for number, time in enumerate(times)]
    spread = read(tmp_path, *rows)
    assert np.all(np.diff(spread.arrival_s) > 0)
    assert np.searchsorted(spread.arrival_s, [2.999, 6.0, 9.0]).tolist() == [10, 20, 30]
    assert spread.prompt_tokens.tolist() == list(range(1, 31))
    assert read(tmp_path, *rows, ticks="raw").arrival_s.tolist() == [time / 1000 for time in times]


def test_a_tick_ends_where_the_next_instant_is(tmp_path: Path) -> None:
    table = read(tmp_path, *(row(time, number + 1, hash_ids=[number]) for number, time in enumerate([0] * 9 + [20])))
    assert table.prompt_tokens.tolist() == list(range(1, 11))
    assert table.arrival_s[9] == 0.02


def test_a_trace_without_ties_keeps_its_times(tmp_path: Path) -> None:
    times = [0, 1, 2500, 2500.25, 7000]
    table = read(tmp_path, *(row(time, 5, hash_ids=[1]) for time in times))
    assert table.arrival_s.tolist() == [time / 1000 for time in times]


def test_a_session_grows_in_a_closed_loop(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        row(1000, 300, 40, session_id="abc", hash_ids=[123]),
        row(2000, 300, 10, session_id="other", hash_ids=[123]),
        {"session_id": "abc", "delay": 2500, "input_length": 150, "output_length": 20},
        {"session_id": "abc", "delay": 0, "input_length": 1, "output_length": 7},
    )
    # In the order of arrival, a closed loop right behind its head.
    assert table.session.tolist() == [0, 0, 0, 1]
    assert table.turn.tolist() == [0, 1, 2, 0]
    assert table.parent.tolist() == [-1, 0, 1, -1]
    assert table.prompt_tokens.tolist() == [300, 300 + 40 + 150, 300 + 40 + 150 + 20 + 1, 300]
    assert table.arrival_s.tolist() == pytest.approx([0.0, np.nan, np.nan, 1.0], nan_ok=True)
    assert table.think_s.tolist() == pytest.approx([np.nan, 2.5, 0.0, np.nan], nan_ok=True)
    # Each turn starts with all of the turn before, and the two first turns are the same prompt.
    ends = table.node_end_tokens[table.prefix_node].tolist()
    assert ends == [300, 340, 510, 300]
    assert table.node_end_tokens[table.own_node[:2]].tolist() == [340, 510]
    assert table.own_node[2:].tolist() == [-1, -1]


def test_a_closed_loop_moves_with_its_head_when_ticks_are_spread(tmp_path: Path) -> None:
    heads = [row(0, 10 + number, session_id=number) for number in range(5)]
    answers = [{"session_id": number, "delay": 5, "input_length": 1, "output_length": 1} for number in range(5)]
    table = read(tmp_path, *heads, *answers)
    assert table.session.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert table.parent.tolist() == [-1, 0, -1, 2, -1, 4, -1, 6, -1, 8]


def test_a_session_with_times_of_its_own_is_open_loop(tmp_path: Path) -> None:
    table = read(tmp_path, row(0, 300, 40, session_id=1), row(500, 100, 5, session_id=1))
    assert table.arrival_s.tolist() == [0.0, 0.5]
    assert table.prompt_tokens.tolist() == [300, 440]
    assert table.parent.tolist() == [-1, 0]


def test_text_without_a_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no known trace format"):
        read(tmp_path, {"timestamp": 0, "text_input": "Hello", "output_length": 4})


def test_two_formats_with_the_same_keys_and_other_units_are_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(json.dumps(row(1234500.5, 512, 64)))
    with pytest.raises(ValueError, match=r"fit Mooncake \(milliseconds\) and GuideLLM \(seconds\): expected format="):
        detect_format(path)
    assert len(read_trace(path, "mooncake")) == 1
