"""vLLM's timed_trace files: the block size must fit, the unit must be told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpilot.workloads import read_trace


@pytest.fixture
def mooncake_file(tmp_path: Path) -> Path:
    path = tmp_path / "timed.jsonl"
    rows = [
        {"timestamp": 1000 * number, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2 + number]}
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_blocks_and_unit_as_told(mooncake_file: Path) -> None:
    table = read_trace(mooncake_file, "timed_trace", chunk_tokens=512, seconds_per_unit=0.001)
    assert table.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert table.prompt_tokens.tolist() == [1025] * 3
    assert table.node_end_tokens.tolist() == [1024]
    slower = read_trace(mooncake_file, "timed_trace", chunk_tokens=512, seconds_per_unit=0.002)
    assert slower.arrival_s.tolist() == [0.0, 2.0, 4.0]  # a larger unit is slower, as in vLLM


@pytest.mark.parametrize("chunk_tokens", [16, 256, 1024])
def test_blocks_that_do_not_add_up_to_the_prompt_are_refused(mooncake_file: Path, chunk_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=rf"timed.jsonl: line 1: len\(hash_ids\) = 3: expected .* blocks of {chunk_tokens}"
    ):
        read_trace(mooncake_file, "timed_trace", chunk_tokens=chunk_tokens, seconds_per_unit=0.001)


def test_keys_may_have_other_names(tmp_path: Path) -> None:
    path = tmp_path / "renamed.jsonl"
    path.write_text(
        '{"t": 1.5, "in": 20, "out": 3, "blocks": [9, 8]}\n{"t": 2.0, "in": 20, "out": 3, "blocks": [9, 8]}'
    )
    labels = {"timestamp": "t", "input_length": "in", "output_length": "out", "hash_ids": "blocks"}
    table = read_trace(path, "timed_trace", chunk_tokens=16, seconds_per_unit=1.0, labels=labels)
    assert table.arrival_s.tolist() == [0.0, 0.5]
    assert table.node_end_tokens.tolist() == [20]
    with pytest.raises(ValueError, match="labels: unknown key 'time': expected any of timestamp"):
        read_trace(path, "timed_trace", chunk_tokens=16, seconds_per_unit=1.0, labels={"time": "t"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds_per_unit": 1.0}, "chunk_tokens = None: timed_trace needs"),
        ({"chunk_tokens": 16}, "seconds_per_unit = None: timed_trace needs"),
        ({"chunk_tokens": 0, "seconds_per_unit": 1.0}, "chunk_tokens = 0"),
        ({"chunk_tokens": 16, "seconds_per_unit": float("nan")}, "seconds_per_unit = nan"),
        ({"chunk_tokens": 16, "seconds_per_unit": -1.0}, "seconds_per_unit = -1.0"),
    ],
)
def test_nothing_is_assumed(mooncake_file: Path, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(mooncake_file, "timed_trace", **options)  # type: ignore[arg-type]


def test_milliseconds_read_as_seconds_are_noticed(traces: Path) -> None:
    path = traces / "mooncake" / "conversation_trace.jsonl.gz"
    with pytest.warns(UserWarning, match=r"6758 requests in 2.097e\+06 s .* looks 1000 times off"):
        table = read_trace(path, "timed_trace", chunk_tokens=512, seconds_per_unit=1.0)
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert "1000 times off" in str(report["warning"])
