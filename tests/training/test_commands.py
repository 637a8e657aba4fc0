"""``fleetpilot train``, ``export`` and ``explain``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
pytest.importorskip("onnxscript")

from fleetpilot.agents import load_policy
from fleetpilot.cli import main
from fleetpilot.fleet.admission import Admission

CONFIG = """
environment = "fleetpilot/Fleet-v0"
instances = 4
rows = 16
group = 2
hidden = 16
decisions = 512
fallback = "llumnix"

[changes]
scored_requests = 30
warmup_requests = 10
rebalancing = { protocol = "vllm" }
reward = { instance_cost = 0.02 }
admission = { late = 1.5 }

[scenarios.tides]
fleet_size = [2, 4]

[imitation]
policies = ["llumnix"]
decisions = 4_000

[ppo]
steps = 16
batch_size = 128
critic_decisions = 256

[validation]
episodes = 2
render_every = 0
"""


def test_a_policy_for_all_kinds_of_decision_is_trained_exported_used_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(CONFIG)
    assert main(["train", "--config", str(tmp_path / "mine.toml"), "--seed", "3", "-o", str(tmp_path)]) == 0
    folder = tmp_path / "ppo" / "Fleet-v0_1"
    shown = capsys.readouterr().out
    assert "tides: best baseline llumnix" in shown
    assert "512 decisions: cost" in shown
    assert "seed = 3" in (folder / "Fleet-v0" / "config.toml").read_text()
    policy = tmp_path / "policy"
    assert load_policy(str(folder / "export")).admission == Admission(late=1.5)  # type: ignore[attr-defined]
    assert main(["export", str(folder), "-o", str(policy), "--mode", "sample", "--late", "0.8", "--busy", "0.7"]) == 0
    assert load_policy(str(policy)).admission == Admission(late=0.8, busy=0.7)  # type: ignore[attr-defined]
    workload = ["--workload", "poisson?rate=4&n=200", "--instances", "3", "--rebalance-s", "1", "--ready", "2"]
    assert main(["simulate", "--policy", f"{policy}?mode=greedy", *workload]) == 0
    assert "goodput" in capsys.readouterr().out
    explain = ["explain", str(policy), "--scenario", "tides", "--instances", "4", "--decision", "20"]
    assert main([*explain, "-o", str(tmp_path / "explained")]) == 0
    assert "moved most by" in capsys.readouterr().out
    assert (tmp_path / "explained" / "explanation.png").is_file()
