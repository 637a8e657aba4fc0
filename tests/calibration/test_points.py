"""Points survive whatever ends a calibration, and are never mixed with those of other engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpilot.calibration.points import PointsFile

ENGINES = [{"version": "0.32.0", "kv_blocks": 64.0}]


def test_points_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    points = PointsFile(path, ENGINES)
    assert not path.exists()
    for time_s in (0.5, 0.125, 0.125):
        points.add(kind="decode", engine=0, key="a", time_s=time_s)
    points.add(kind="decode", engine=1, key="a", time_s=9.0)
    again = PointsFile(path, ENGINES)
    assert len(again) == 4
    assert len(again.of(engine=0, key="a")) == 3
    assert again.means("decode", "time_s") == {(0, "a"): {"time_s": 0.25}, (1, "a"): {"time_s": 9.0}}


def test_a_line_that_was_cut_is_left_out_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    points = PointsFile(path, ENGINES)
    points.add(kind="decode", engine=0, key="a", time_s=0.5)
    with path.open("a") as file:
        file.write('{"kind": "deco')
    again = PointsFile(path, ENGINES)
    assert len(again) == 1
    again.add(kind="decode", engine=0, key="b", time_s=0.7)
    assert len(PointsFile(path, ENGINES)) == 2


def test_points_of_other_engines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    PointsFile(path, ENGINES).add(kind="decode", engine=0, key="a", time_s=0.5)
    with pytest.raises(ValueError, match="points of other engines"):
        PointsFile(path, [{"version": "0.33.0", "kv_blocks": 64.0}])


def test_a_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text('{"engines": 1}\nnonsense\n{}\n')
    with pytest.raises(ValueError, match="line 2: expected JSON"):
        PointsFile(path, 1)
