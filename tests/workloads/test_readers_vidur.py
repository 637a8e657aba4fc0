"""Vidur's CSV."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpilot.workloads import detect_format, read_trace


def test_rows_are_seconds_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "splitwise.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n")
    assert detect_format(path) == "vidur"
    table = read_trace(path)
    assert table.arrival_s.tolist() == [0.0, 4.314579]
    assert table.prompt_tokens.tolist() == [374, 396]
    assert table.output_tokens.tolist() == [44, 109]


def test_a_file_of_lengths_without_times_is_no_trace(traces: Path) -> None:
    path = traces / "vidur" / "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"
    with pytest.raises(ValueError, match="no known trace format has the fields"):
        read_trace(path)
    with pytest.raises(ValueError, match="expected a column 'arrived_at'"):
        read_trace(path, "vidur")
