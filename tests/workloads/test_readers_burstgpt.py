"""BurstGPT traces: three versions by column name, failures, sessions, ties of the one-second clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpilot.workloads import RequestTable, detect_format, read_trace

V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
V3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def read(tmp_path: Path, header: str, *lines: str, **options: object) -> RequestTable:
    path = tmp_path / "burst.csv"
    path.write_text("\n".join([header, *lines]))
    assert detect_format(path) == "burstgpt"
    return read_trace(path, **options)  # type: ignore[arg-type]


def test_version_1_counts_from_midnight(tmp_path: Path) -> None:
    lines = ("5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,1087,230,1317,Conversation log")
    table = read(tmp_path, V1, *lines)
    assert table.arrival_s.tolist() == [0.0, 40.0]
    assert table.prompt_tokens.tolist() == [472, 1087]
    assert table.output_tokens.tolist() == [18, 230]
    assert read(tmp_path, V1, *lines, rebase=False).arrival_s.tolist() == [5.0, 45.0]


def test_version_3_is_rebased_and_read_by_name(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        V3,
        "19440110.0,1722ac82-0a46,43,GPT-4,906,446,1352,Conversation log",
        "19440120.0,,9,ChatGPT,36,29,65,API log",
        "19440130.0,d5983bf9,9,ChatGPT,37,29,66,Conversation log",
        "19440170.0,1722ac82-0a46,2,GPT-4,1500,20,1520,Conversation log",
    )
    assert table.arrival_s.tolist() == [0.0, 10.0, 20.0, 60.0]  # not idle for 225 days
    assert table.prompt_tokens.tolist() == [906, 36, 37, 1500]
    assert table.session.tolist() == [0, -1, 1, 0]
    assert table.turn.tolist() == [0, 0, 0, 1]
    assert table.parent.tolist() == [-1, -1, -1, 0]
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["origin"] == 19440110.0


def test_failures_are_dropped_by_name_and_links_step_over_them(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        V3,
        "100.0,a,4,GPT-4,90,44,134,Conversation log",
        "110.0,a,4,GPT-4,91,0,91,Conversation log",
        "120.0,a,4,GPT-4,92,44,136,Conversation log",
        "130.0,,4,GPT-4,0,0,0,API log",
    )
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert (report["rows_read"], report["rows_emitted"], report["dropped"]) == (4, 2, {"failed": 2})
    assert table.prompt_tokens.tolist() == [90, 92]
    assert table.turn.tolist() == [0, 2]
    assert table.parent.tolist() == [-1, 0]


def test_ties_of_the_clock_are_spread_or_left(tmp_path: Path) -> None:
    lines = [f"{second},ChatGPT,{row + 1},3,66,API log" for row, second in enumerate([7, 7, 7, 8, 20, 20])]
    spread = read(tmp_path, V1, *lines)
    assert spread.prompt_tokens.tolist() == [1, 2, 3, 4, 5, 6]  # in the order of the file
    assert spread.arrival_s[3] == 1.0  # alone at its second
    assert len(set(spread.arrival_s.tolist())) == 6
    assert [int(second) for second in spread.arrival_s] == [0, 0, 0, 1, 13, 13]
    assert read(tmp_path, V1, *lines, ticks="raw").arrival_s.tolist() == [0, 0, 0, 1, 13, 13]
    with pytest.raises(ValueError, match="ticks = 'even': expected 'spread' or 'raw'"):
        read(tmp_path, V1, *lines, ticks="even")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e999", "", "1_0", "noon"])
def test_bad_times_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match=rf"burst.csv: line 3: Timestamp = '{value}': expected a finite time >= 0"):
        read(tmp_path, V1, "5,GPT-4,1,1,2,API log", f"{value},GPT-4,1,1,2,API log")
