"""What `read_trace` does for every format: detection, accounting, window, limit, load, bounds, errors for garbage."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads import RequestTable, detect_format, infinite_cache_hit, make_table, read_summary, read_trace

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"

EXAMPLES: dict[str, list[str]] = {
    "azure": [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
    ],
    "burstgpt": [
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log",
        "19440161.0,,2,ChatGPT,36,29,65,API log",
    ],
    "vidur": [HEADER, "0.0,374,44", "4.314579,396,109"],
    "mooncake": [
        '{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}',
        '{"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 48]}',
    ],
    "bailian": [
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 20, "output_length": 1, '
        '"type": "text", "turn": 1, "hash_ids": [1, 2]}',
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.1, "input_length": 40, "output_length": 1, '
        '"type": "text", "turn": 2, "hash_ids": [1, 3, 4]}',
    ],
    "weka": [
        '{"id": "a", "block_size": 64, "requests": [{"t": 0, "type": "s", "in": 70, "out": 5, "hash_ids": [1]}, '
        '{"t": 9, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 3.5}]}',
        '{"id": "b", "block_size": 64, "requests": [{"t": 0, "type": "s", "in": 70, "out": 5, "hash_ids": [1]}]}',
    ],
    "weka_requests": [
        '{"session_id": "a", "request_arrival_delta_s": 0.1, "input_tokens": 70, "output_tokens": 5, "api_time_s": 2}',
        '{"session_id": "a", "request_arrival_delta_s": 9.0, "input_tokens": 8, "output_tokens": 5, "think_time_s": 1}',
    ],
}


def report_of(table: RequestTable) -> dict[str, Any]:
    report = table.meta["read"]
    assert isinstance(report, dict)
    return report


def read(tmp_path: Path, *lines: str, **options: Any) -> RequestTable:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEADER, *lines]))
    return read_trace(path, **options)


@pytest.mark.parametrize("format", EXAMPLES)
@pytest.mark.parametrize("compressed", [False, True])
def test_formats_are_detected_and_read_plain_or_gzip(tmp_path: Path, format: str, compressed: bool) -> None:
    text = "\n\n".join(EXAMPLES[format]).encode()  # blank lines are not rows
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text) if compressed else text)
    assert detect_format(path) == format
    table = read_trace(path)
    assert report_of(table)["format"] == format
    assert len(table) == (3 if format == "weka" else 2)


@pytest.mark.parametrize("format", EXAMPLES)
def test_a_byte_order_mark_does_no_harm(tmp_path: Path, format: str) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(EXAMPLES[format]), encoding="utf-8-sig")
    assert report_of(read_trace(path))["format"] == format


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_decode_tokens, note ,arrived_at,num_prefill_tokens\n44,x,0.0,374\n109,y,4.5,396\n")
    table = read_trace(path)
    assert (table.prompt_tokens.tolist(), table.output_tokens.tolist()) == ([374, 396], [44, 109])


@pytest.mark.parametrize("content", ["", "\n \n", "a,b\n1,2\n", "a" * 200_000, '{"x": 1}\n', "[1, 2]\n", "\x00\x01\n"])
def test_unknown_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "strange.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"strange.csv"):
        read_trace(path)


def test_a_damaged_gzip_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    whole = gzip.compress("\n".join([HEADER, *(f"{k},{k + 1},1" for k in range(5000))]).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.csv.gz: damaged gzip file"):
        read_trace(path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format = 'sharegpt': expected one of azure, bailian, burstgpt"):
        read(tmp_path, "0,1,1", format="sharegpt")


def test_the_report_and_its_line(tmp_path: Path) -> None:
    table = read(tmp_path, "5,10,1", "3,20,1", "4,0,7", "9,30,0")
    assert report_of(table) == {
        "file": "trace.csv",
        "format": "vidur",
        "time_unit": "s",
        "rows_read": 4,
        "rows_emitted": 2,
        "dropped": {"zero_prompt_tokens": 1, "zero_output_tokens": 1},
        "inversions": 1,
        "origin": 3.0,
        "window_s": None,
        "load_factor": 1.0,
        "ticks_spread_s": None,
        "block_tokens": None,
    }
    json.dumps(table.meta)
    assert read_summary(table) == (
        "trace.csv (vidur, times in s): 4 rows read, 2 emitted, dropped: zero_prompt_tokens 1, zero_output_tokens 1; "
        "1 out of time order; span 2.0 s"
    )
    with pytest.raises(ValueError, match="expected one that read_trace made"):
        read_summary(make_table("made", [0.0], [1], [1]))


def test_sorting_is_stable(tmp_path: Path) -> None:
    table = read(tmp_path, *(f"{number % 2},{number + 1},1" for number in range(1000)))
    assert table.source_row.tolist() == [*range(0, 1000, 2), *range(1, 1000, 2)]
    assert table.prompt_tokens.tolist() == [row + 1 for row in table.source_row]


def test_load_factor_2_is_twice_the_load(tmp_path: Path) -> None:
    lines = ("0,1,1", "4,1,1", "10,1,1")
    assert read(tmp_path, *lines, load_factor=2.0).arrival_s.tolist() == [0.0, 2.0, 5.0]
    assert read(tmp_path, *lines, load_factor=0.5).arrival_s.tolist() == [0.0, 8.0, 20.0]


def test_load_factor_divides_think_times_too(tmp_path: Path) -> None:
    path = tmp_path / "weka.jsonl"
    path.write_text("\n".join(EXAMPLES["weka"]))
    table = read_trace(path, load_factor=2.0, session_gap_s=8.0)
    assert table.arrival_s.tolist() == pytest.approx([0.0, np.nan, 4.0], nan_ok=True)
    assert table.think_s.tolist() == pytest.approx([np.nan, 1.75, np.nan], nan_ok=True)


def test_a_window_is_in_seconds_of_the_source(tmp_path: Path) -> None:
    lines = ("100,1,1", "104,2,1", "110,3,1", "119.5,4,1", "120,5,1")
    table = read(tmp_path, *lines, window_s=(4.0, 20.0), load_factor=2.0)
    assert table.prompt_tokens.tolist() == [2, 3, 4]
    assert table.arrival_s.tolist() == [0.0, 3.0, 7.75]
    assert report_of(table)["dropped"] == {"outside_window": 2}


def test_a_limit_keeps_the_earliest_and_never_repeats(tmp_path: Path) -> None:
    lines = ("5,1,1", "3,2,1", "4,3,1")
    table = read(tmp_path, *lines, limit=2)
    assert table.prompt_tokens.tolist() == [2, 3]
    assert report_of(table)["dropped"] == {"beyond_limit": 1}
    assert len(set(table.source_row.tolist())) == 2
    with pytest.raises(ValueError, match=r"trace.csv: limit = 4: expected at most 3, the requests there are"):
        read(tmp_path, *lines, limit=4)


def test_too_long_requests_are_an_error_by_default(tmp_path: Path) -> None:
    message = (
        r"trace.csv: line 3: prompt \+ output tokens = 5010: expected at most max_total_tokens = 4096; choose over_len"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "0,4000,96", "1,10,5000", max_total_tokens=4096)


@pytest.mark.parametrize(
    ("policy", "kept", "counts"),
    [
        ("drop", [(10, 20)], {"over_length": 3}),
        ("truncate_prompt", [(10, 20), (3096, 1000)], {"over_length_output": 2}),
        ("truncate_output", [(10, 20), (4000, 96), (10, 4086)], {"over_length_prompt": 1}),
    ],
)
def test_policies_for_too_long_requests(
    tmp_path: Path, policy: str, kept: list[tuple[int, int]], counts: dict[str, int]
) -> None:
    """Among them decode 5000 with prefill 10: cutting its prompt to fit would leave -904 tokens of it."""
    lines = ("0,10,20", "1,4000,1000", "2,10,5000", "3,4096,4096")
    table = read(tmp_path, *lines, max_total_tokens=4096, over_length=policy)
    assert list(zip(table.prompt_tokens.tolist(), table.output_tokens.tolist(), strict=True)) == kept
    assert report_of(table)["dropped"] == counts
    assert report_of(table)["rows_emitted"] + sum(counts.values()) == 4


def test_truncation_is_counted(tmp_path: Path) -> None:
    report = report_of(read(tmp_path, "0,10,20", "1,90,20", max_total_tokens=50, over_length="truncate_prompt"))
    assert (report["truncate_prompt_rows"], report["truncate_prompt_tokens"]) == (1, 60)
    assert report["dropped"] == {}


def test_truncated_prompts_keep_the_beginning_and_what_they_share_of_it(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": k, "input_length": 1500, "output_length": 10, "hash_ids": [1, 2, 3]} for k in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    table = read_trace(path, max_total_tokens=800, over_length="truncate_prompt")
    assert table.prompt_tokens.tolist() == [790, 790]
    assert infinite_cache_hit(table) == 0.5


def test_truncation_holds_in_a_growing_session(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    turns = [{"session_id": "a", "delay": 1000, "input_length": 100, "output_length": 50} for _ in range(4)]
    turns[0]["timestamp"] = 0
    path.write_text("\n".join(map(json.dumps, turns)))
    for policy in ("truncate_prompt", "truncate_output", "drop"):
        table = read_trace(path, max_total_tokens=300, over_length=policy)
        assert np.all(table.prompt_tokens + table.output_tokens <= 300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over_length": "cut"}, "over_length = 'cut': expected 'error', 'drop'"),
        ({"over_length": "drop"}, "over_length = 'drop': expected max_total_tokens with it"),
        ({"max_total_tokens": 1}, "max_total_tokens = 1: expected >= 2"),
        ({"window_s": (5.0, 5.0)}, r"window_s = \(5.0, 5.0\): expected 0 <= start < end"),
        ({"window_s": (float("nan"), 5.0)}, "window_s"),
        ({"limit": 0}, "limit = 0: expected >= 1"),
        ({"load_factor": 0.0}, "load_factor = 0.0: expected a finite number > 0"),
        ({"load_factor": float("inf")}, "load_factor = inf: expected a finite number > 0"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "0,1,1", **options)


def test_a_rate_that_looks_1000_times_off_is_noticed(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"200 requests in 597000 s with times read in s, as vidur has them.*looks 1000"
    ):
        read(tmp_path, *(f"{3000 * k},1,1" for k in range(200)))  # milliseconds in a column of seconds
    with pytest.warns(UserWarning, match="looks 1000 times off"):
        read(tmp_path, *(f"{k / 1e5},1,1" for k in range(200)))


TIMES = st.one_of(st.integers(0, 20), st.floats(0, 20, allow_subnormal=False))


@given(
    rows=st.lists(st.tuples(TIMES, st.integers(0, 40), st.integers(0, 40)), max_size=30),
    window_s=st.none() | st.tuples(st.floats(0, 10), st.floats(10.5, 30)),
    policy=st.sampled_from(["drop", "truncate_prompt", "truncate_output"]),
)
def test_every_row_is_emitted_or_counted(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[float, int, int]],
    window_s: tuple[float, float] | None,
    policy: str,
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    path.write_text("\n".join([HEADER, *(f"{time},{prompt},{output}" for time, prompt, output in rows)]))
    table = read_trace(path, window_s=window_s, max_total_tokens=50, over_length=policy)  # type: ignore[arg-type]
    report = report_of(table)
    assert report["rows_read"] == len(rows) == report["rows_emitted"] + sum(report["dropped"].values())
    assert report["rows_emitted"] == len(table) == len(set(table.source_row.tolist()))
    origin = min((time for time, _, _ in rows), default=0.0)
    start = window_s[0] if window_s else 0.0
    for arrival_s, prompt, output, source in zip(
        table.arrival_s, table.prompt_tokens, table.output_tokens, table.source_row, strict=True
    ):
        time, source_prompt, source_output = rows[source]
        assert arrival_s == pytest.approx(time - origin - start, abs=1e-9)
        assert 1 <= prompt <= source_prompt
        assert 1 <= output <= source_output
        assert prompt + output <= 50
    emitted = {int(source) for source in table.source_row}
    fitting = {
        number
        for number, (time, prompt, output) in enumerate(rows)
        if prompt and output and prompt + output <= 50 and (not window_s or start <= time - origin < window_s[1])
    }
    assert fitting <= emitted


JUNK = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["nan", "-1", "1e400", '"', "\x00", "{}", "[" * 50_000, "9" * 5000, "{" * 3, ",,,,,,,,", "NaN"]),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**60, 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 3) | st.none(), max_size=3),
    st.dictionaries(st.sampled_from(["t", "in", "type"]), st.integers(), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes, bool]:
    """A format, the bytes of a file of it with one thing wrong, and whether that is in a row (not in the header)."""
    format = draw(st.sampled_from(sorted(EXAMPLES)))
    lines = list(EXAMPLES[format])
    is_csv = not lines[0].startswith("{")
    at = draw(st.integers(0, len(lines) - 1))
    in_row = not (is_csv and at == 0)
    if draw(st.booleans()):
        lines[at] = draw(JUNK)
    elif is_csv:
        fields = lines[at].split(",")
        fields[draw(st.integers(0, len(fields) - 1))] = draw(JUNK)
        lines[at] = ",".join(fields)
    else:
        record = json.loads(lines[at])
        place = record
        if "requests" in record and draw(st.booleans()):
            place = record["requests"][0]
        place[draw(st.sampled_from(sorted(place)))] = draw(VALUES)
        lines[at] = json.dumps(record)
    content = "\n".join(lines).encode(errors="surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(content)))
        content = content[:cut] + draw(st.binary(max_size=4)) + content[cut:]
        in_row = False  # it may be anywhere
    return format, content, in_row


def refusal(read: Callable[[], object]) -> str | None:
    """What the ValueError says, None if there is none."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_errors_name_the_line_of_the_file(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """A header, blank lines and fields with line breaks count as an editor counts them."""
    path = tmp_path / "trace"
    path.write_bytes(pack(b'\n"arrived_at",num_prefill_tokens,num_decode_tokens\n\n0,1,"1\n"\n\n1,x,1\n'))
    with pytest.raises(ValueError, match="trace: line 7: num_prefill_tokens = 'x'"):
        read_trace(path)
    path.write_bytes(pack(b'\n{"timestamp": 0, "input_length": 1, "output_length": 1}\n\n{"timestamp": 0}\n'))
    with pytest.raises(ValueError, match="trace: line 4: input_length = None"):
        read_trace(path, "mooncake")


@given(damaged())
def test_garbage_gives_an_error_that_names_file_and_line_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, bytes, bool]
) -> None:
    format, content, in_row = damage
    path = tmp_path_factory.mktemp("traces") / "damaged.trace"
    path.write_bytes(content)
    message = refusal(lambda: read_trace(path, format))
    assert message is None or "damaged.trace" in message
    assert message is None or not in_row or re.search(r"line [1-9]", message)
    assert message is None or message.isascii()
    message = refusal(lambda: detect_format(path))
    assert message is None or "damaged.trace" in message
