"""A calibration over HTTP, of emulated engines. How exact it is depends on the machine: not asserted here."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulated import eventually

from fleetpilot.calibration import CalibrationError, calibrate
from fleetpilot.calibration.facts import Given
from fleetpilot.calibration.link import Copy, fit_link
from fleetpilot.calibration.measure import Request, calibration_text
from fleetpilot.cli import main
from fleetpilot.fleet.profiles import HardwareProfile, load_profile, profile_to_toml

ANY_FIT = 1e9


def request_of(urls: list[str], out: Path, **options: object) -> Request:
    return Request(tuple(urls), out, rounds=1, limit_s=300.0, **{"max_error": ANY_FIT, **options})  # type: ignore[arg-type]


def test_two_engines_give_a_profile_each_and_the_link(
    urls: list[str], profiles: list[HardwareProfile], tmp_path: Path
) -> None:
    said: list[str] = []
    found = calibrate(request_of(urls, tmp_path / "mine.toml", hardware="a desk"), said.append)
    assert [path.name for path in found.paths] == ["mine-1.toml", "mine-2.toml"]
    for path, profile in zip(found.paths, profiles, strict=True):
        mine = load_profile(path)
        assert mine.gpu == "a desk"
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_model_len"):
            assert getattr(mine, name) == getattr(profile, name), name
        assert mine.decode_s(2, 100) > 0
        assert "held out" in mine.provenance["cost"]
        assert "measured" in mine.provenance["scheduler"]
    record = json.loads((tmp_path / "mine.json").read_text())
    assert record["fit"]["held_out"]["count"] > 0
    assert record["poll_s"] == found.poll_s > 0
    # Copies of so few blocks may take no longer than the machine's noise; then that is said.
    assert (record["link"] is None) == any("link" in what for what in found.not_measured)
    assert "start-up" in " ".join(found.not_measured)
    text = calibration_text(found)
    assert "held out" in text
    assert "not measured: start-up time" in text
    assert any("round 1" in line for line in said)


def test_a_bad_fit_is_refused_its_points_are_kept_and_the_same_command_goes_on(urls: list[str], tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    given = Given(4, 128, 4096)
    with pytest.raises(CalibrationError, match=r"the fit is bad.*expected at most 0%"):
        calibrate(request_of(urls[:1], out, given=given, max_error=1e-9))
    assert not out.exists()
    points = (tmp_path / "mine.points.jsonl").read_text()
    found = calibrate(request_of(urls[:1], out, given=given))
    assert (tmp_path / "mine.points.jsonl").read_text() == points
    without_polls = [line for line in points.splitlines() if '"poll"' not in line]
    (tmp_path / "mine.points.jsonl").write_text("\n".join(without_polls) + "\n")
    assert calibrate(request_of(urls[:1], out, given=given)).poll_s > 0
    profile = load_profile(out)
    assert (profile.max_num_batched_tokens, profile.kv_bytes_per_token) == (128, 4096)
    assert "given" in profile.provenance["scheduler"]
    assert "link (give two URLs)" in found.not_measured


def test_time_that_runs_out_is_said_and_points_are_kept(urls: list[str], tmp_path: Path) -> None:
    request = Request((urls[0],), tmp_path / "mine.toml", given=Given(4, 128, 4096), limit_s=0.0)
    with pytest.raises(CalibrationError, match="the same command goes on"):
        calibrate(request)
    assert (tmp_path / "mine.points.jsonl").exists()


def test_an_interruption_keeps_the_points(urls: list[str], tmp_path: Path) -> None:
    points = tmp_path / "mine.points.jsonl"
    command = [sys.executable, "-m", "fleetpilot", "calibrate", urls[0], "-o", str(tmp_path / "mine.toml")]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "128"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    eventually(lambda: points.exists() and len(points.read_text().splitlines()) > 4, "points are measured")
    process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    assert process.wait(60) == 130
    assert error == f"fleetpilot: interrupted; points are kept in {points}, the same command goes on\n"


START = """
import sys
from fleetpilot.dispatcher.emulator import Options
from fleetpilot.dispatcher.emulator.fleet import run
from fleetpilot.fleet.profiles import load_profile
run([load_profile(sys.argv[1])], Options(), host="127.0.0.1", port=int(sys.argv[2]))
"""


def test_the_start_command_is_timed_and_ended(profiles: list[HardwareProfile], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "engine.toml").write_text(profile_to_toml(profiles[0]))
    (tmp_path / "start.py").write_text(START)
    command = f"{sys.executable} {tmp_path / 'start.py'} {tmp_path / 'engine.toml'} {port}"
    request = request_of(
        [f"http://127.0.0.1:{port}"], tmp_path / "mine.toml", given=Given(4, 128, 4096), start_command=command
    )
    found = calibrate(request)
    assert found.start_up_s is not None
    assert found.start_up_s > 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_engine_that_is_not_there_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "http://127.0.0.1:9", "-o", str(tmp_path / "mine.toml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "127.0.0.1:9" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://a:1", "-o", "mine.json"], "expected a name that ends in .toml"),
        (["a:1", "-o", "mine.toml"], "expected http://HOST:PORT"),
    ],
)
def test_arguments_that_cannot_be_meant_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_link_comes_back_from_its_own_times() -> None:
    def copy(tokens: int) -> Copy:
        return Copy(tokens, 0.01, 0.012 + 0.005 + tokens * 4096 / 2e9, 0.005, tokens * 4096.0)

    link = fit_link([copy(n) for n in (100, 1000, 4000)], 131072, step_s=0.005)
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert link.round_trip_s == pytest.approx(0.012)
    assert link.kv_bytes_per_token == pytest.approx(4096)
    assert link.error < 1e-6


def test_a_bandwidth_that_the_noise_hides_is_what_the_noise_leaves_room_for() -> None:
    times_s = {63: 0.0332, 255: 0.0456, 511: 0.0306, 1022: 0.0328}  # of two engines that share a host
    link = fit_link([Copy(n, 0.03, time_s, 0.03, n * 8192.0) for n, time_s in times_s.items()], 8192, 0.015)
    assert 1022 * 8192 / 0.0456 < link.bandwidth_bytes_per_s < np.inf
    assert 0.0 < link.round_trip_s < 0.0306


def test_a_link_whose_long_copies_take_no_longer_is_refused() -> None:
    with pytest.raises(ValueError, match="expected longer ones to take longer"):
        fit_link([Copy(100, 0.01, 0.02, 0.01, 1.0), Copy(1000, 0.01, 0.01, 0.01, 1.0)], 4096, 0.005)
