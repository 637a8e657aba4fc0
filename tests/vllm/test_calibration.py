"""Calibration and comparison on real engines, short and on whatever machine: that they work, not how exact they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import BLOCK_TOKENS, Engine

from fleetpilot.baselines import load_policy
from fleetpilot.calibration import Calibration, calibrate, validate
from fleetpilot.calibration.facts import Given
from fleetpilot.calibration.measure import Request
from fleetpilot.calibration.report import validation_markdown
from fleetpilot.calibration.validation import Setup
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload


@pytest.fixture
def calibrated(engines: tuple[Engine, Engine], tmp_path: Path) -> Calibration:
    request = Request(
        tuple(engine.url for engine in engines),
        tmp_path / "tiny.toml",
        given=Given(max_num_seqs=engines[0].max_num_seqs, max_num_batched_tokens=2048),
        limit_s=600.0,
        longest_prompt=512,
        rounds=1,
        max_error=1e9,
    )
    return calibrate(request)


def test_two_real_engines_are_calibrated_and_a_trace_is_compared(
    engines: tuple[Engine, Engine], calibrated: Calibration, tmp_path: Path
) -> None:
    (path,) = calibrated.paths
    profile = load_profile(path)
    assert (profile.block_size, profile.kv_blocks) == (BLOCK_TOKENS, engines[0].blocks - 1)
    assert profile.priority_order
    assert profile.engine.startswith("vLLM 0.")
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["fit"]["held_out"]["count"] > 0
    assert record["fit"]["held_out"]["median"] >= 0
    if calibrated.link is not None:
        assert profile.kv_bytes_per_token == 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, dimension, bytes
    table = workload("poisson?rate=2&prompt=uniform:20:200&output=uniform:4:20&n=12")
    urls = tuple(engine.url for engine in engines)
    policies = tuple(load_policy(name) for name in ("round-robin", "join-shortest-queue"))
    found = validate(Setup(table, urls, (str(path),), policies, repeats=1))
    assert found.failed == {"round-robin": 0, "join-shortest-queue": 0}
    assert all(row.engines > 0 for row in found.rows)
    assert "### Ranking of policies" in validation_markdown(found, "a test")
