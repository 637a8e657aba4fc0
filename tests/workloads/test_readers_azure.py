"""Azure traces: every published form of a time, and no digit lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpilot.workloads import RequestTable, detect_format, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read(tmp_path: Path, *lines: str, header: str = HEADER) -> RequestTable:
    path = tmp_path / "azure.csv"
    path.write_text("\r\n".join([header, *lines, ""]))
    assert detect_format(path) == "azure"
    return read_trace(path)


@pytest.mark.parametrize(
    "form",
    [
        "2023-11-16 18:17:0{}",
        "2023-11-16T18:17:0{}",
        "2024-05-10 00:00:0{}+00:00",
        "2024-05-10T00:00:0{}Z",
        "2024-05-10T02:00:0{}+0200",
    ],
)
def test_all_forms_of_a_time(tmp_path: Path, form: str) -> None:
    # The row without a fraction comes first (it must not end up at another origin than the rest).
    table = read(tmp_path, *(f"{form.format(second)},10,5" for second in ("3", "3.009930", "4.9799601")))
    assert table.arrival_s.tolist() == pytest.approx([0.0, 0.00993, 1.9799601], abs=1e-12)


def test_100_ns_apart_is_not_together(tmp_path: Path) -> None:
    table = read(tmp_path, "2023-11-16 18:17:03.9799600,10,5", "2023-11-16 18:17:03.9799601,10,5")
    assert table.arrival_s[1] == pytest.approx(1e-7, rel=1e-9)


def test_offsets_count(tmp_path: Path) -> None:
    table = read(tmp_path, "2024-05-10 02:00:00+02:00,10,5", "2024-05-10 00:00:01+00:00,10,5")
    assert table.arrival_s.tolist() == [0.0, 1.0]


def test_the_earliest_row_is_the_origin(tmp_path: Path) -> None:
    table = read(tmp_path, "2023-11-16 18:17:05,10,5", "2023-11-16 18:17:03,20,5", "2023-11-16 18:17:04,30,0")
    assert table.arrival_s.tolist() == [0.0, 2.0]
    assert table.source_row.tolist() == [1, 0]
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["inversions"] == 1
    assert report["dropped"] == {"zero_output_tokens": 1}


def test_dates_have_no_zero_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"{HEADER}\n2023-11-16 18:17:05,10,5\n")
    with pytest.raises(ValueError, match="rebase = False: azure files have dates"):
        read_trace(path, rebase=False)


def test_the_image_column_of_2025_is_read_by_name(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        "2024-10-15 00:00:00.0000000,2,900,120",
        "2024-10-15 00:00:01.0000000,0,800,110",
        header="TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
    )
    assert table.prompt_tokens.tolist() == [900, 800]
    report = table.meta["read"]
    assert isinstance(report, dict)
    assert report["rows_with_images"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yesterday,10,5", r"azure.csv: line 3: TIMESTAMP = 'yesterday': expected a time like"),
        ("2023-13-16 18:17:03,10,5", r"line 3: TIMESTAMP = '2023-13-16 18:17:03': expected .*month"),
        ("2023-11-16 18:17:03.1234567891,10,5", r"line 3: TIMESTAMP"),  # more digits than a nanosecond has
        (
            "2023-11-16 18:17:03+00:00,10,5",
            r"line 3: TIMESTAMP = .*: expected no offset from UTC, as in the rows before",
        ),
        ("1969-11-16 18:17:03,10,5", r"line 3: TIMESTAMP = .*: expected a year from 1970"),
        ("2023-11-16 18:17:03,ten,5", r"line 3: ContextTokens = 'ten': expected an integer from 0"),
        ("2023-11-16 18:17:03,-10,5", r"line 3: ContextTokens = '-10': expected an integer from 0"),
        ("2023-11-16 18:17:03,10,5.5", r"line 3: GeneratedTokens = '5.5': expected an integer from 0"),
        ("2023-11-16 18:17:03,nan,5", r"line 3: ContextTokens = 'nan': expected an integer from 0"),
        ("2023-11-16 18:17:03,10", r"line 3: line = .*: expected 3 fields, as in the header"),
    ],
)
def test_errors_name_file_row_field_value_and_expectation(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "2023-11-16 18:17:03.9799600,4808,10", line)
