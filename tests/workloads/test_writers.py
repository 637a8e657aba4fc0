"""Written files: what is read back is what was written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads import RequestTable, make_table, read_trace, write_mooncake, write_vidur
from fleetpilot.workloads.prefix_tree import prefix_tree

EXACT = ("prompt_tokens", "output_tokens", "prefix_node", "own_node", "node_parent", "node_end_tokens")
LENGTHS = ("prompt_tokens", "output_tokens")


def assert_same(read: RequestTable, written: RequestTable, columns: tuple[str, ...]) -> None:
    for column in columns:
        assert getattr(read, column).tolist() == getattr(written, column).tolist(), column
    assert np.abs(read.arrival_s - written.arrival_s).max(initial=0.0) <= 1e-6


def test_the_mooncake_slice_comes_back_line_by_line(traces: Path, tmp_path: Path) -> None:
    """Even the content ids are the source's: Mooncake, too, numbers blocks in order of appearance."""
    path = traces / "mooncake" / "conversation_trace.jsonl.gz"
    write_mooncake(read_trace(path, ticks="raw"), tmp_path / "out.jsonl")
    with gzip.open(path, "rt") as text:
        source = [json.loads(line) for line in text]
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == source


def test_spread_times_come_back(traces: Path, tmp_path: Path) -> None:
    table = read_trace(traces / "mooncake" / "conversation_trace.jsonl.gz")
    write_mooncake(table, tmp_path / "out.jsonl")
    assert_same(read_trace(tmp_path / "out.jsonl", rebase=False), table, EXACT)


def test_azure_comes_back_from_vidur_files(traces: Path, tmp_path: Path) -> None:
    table = read_trace(traces / "azure_2023" / "AzureLLMInferenceTrace_code.csv")
    write_vidur(table, tmp_path / "out.csv")
    assert_same(read_trace(tmp_path / "out.csv"), table, LENGTHS)
    write_mooncake(table, tmp_path / "out.jsonl")
    back = read_trace(tmp_path / "out.jsonl")
    assert_same(back, table, EXACT)  # in particular no prefix that was not there


@st.composite
def tables(draw: st.DrawFn) -> RequestTable:
    """Open-loop tables whose prefixes are those of 512-token blocks."""
    count = draw(st.integers(1, 8))
    lists = [draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)) for _ in range(count)]
    prompt = np.array([len(ids) * 512 - draw(st.sampled_from([0, 0, 1, 300])) for ids in lists])
    offsets = np.cumsum([0] + [len(ids) for ids in lists])
    node_parent, node_end_tokens, prefix_node, own_node = prefix_tree(offsets, np.concatenate(lists), 512, prompt)
    return make_table(
        "t",
        np.cumsum([0.0] + [draw(st.floats(1e-5, 1e5)) for _ in range(count - 1)]),
        prompt,
        [draw(st.integers(1, 2000)) for _ in range(count)],
        node_parent=node_parent,
        node_end_tokens=node_end_tokens,
        prefix_node=prefix_node,
        own_node=own_node,
    )


@given(tables())
def test_reading_undoes_writing(tmp_path_factory: pytest.TempPathFactory, table: RequestTable) -> None:
    folder = tmp_path_factory.mktemp("written")
    write_mooncake(table, folder / "out.jsonl")
    assert_same(read_trace(folder / "out.jsonl"), table, EXACT)


def test_what_a_continued_sequence_shares_survives(tmp_path: Path) -> None:
    table = make_table(
        "t",
        [0.0, 1.0],
        [1100, 2000],
        [900, 10],
        node_parent=[-1, 0],
        node_end_tokens=[512, 2000],
        prefix_node=[0, 1],
        own_node=[1, -1],
    )
    write_mooncake(table, tmp_path / "out.jsonl")
    first, second = (json.loads(line)["hash_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first[:2] == second[:2]  # 1024 of the 1100 tokens; the partial third block is not that of the second prompt
    assert set(first[2:]).isdisjoint(second)


def test_what_a_format_has_no_place_for_is_told(tmp_path: Path) -> None:
    table = make_table(
        "t",
        [0.0, 1.0],
        [600, 600],
        [1, 1],
        priority=[0, 1],
        node_parent=[-1],
        node_end_tokens=[512],
        prefix_node=[0, 0],
    )
    with pytest.warns(UserWarning, match="has no place in the format") as caught:
        write_vidur(table, tmp_path / "out.csv")
    assert [str(warning.message) for warning in caught] == [
        "write_vidur: priority of 1 rows has no place in the format",
        "write_vidur: prefix_node of 2 rows has no place in the format",
    ]
    with pytest.warns(UserWarning, match="write_mooncake: priority of 1 rows"):
        write_mooncake(table, tmp_path / "out.jsonl")


@pytest.mark.parametrize("write", [write_mooncake, write_vidur])
def test_closed_loops_have_no_times_to_write(tmp_path: Path, write: object) -> None:
    table = make_table("t", [0.0, np.nan], [5, 5], [1, 1], parent=[-1, 0], think_s=[np.nan, 2.0])
    with pytest.raises(ValueError, match=r"arrival_s\[1\] = nan: expected a table without closed-loop rows"):
        write(table, tmp_path / "out")  # type: ignore[operator]
    assert not (tmp_path / "out").exists()
