"""The examples run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_random_policy(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "random_policy.py"), run_name="__main__")
    assert "slo_attainment" in capsys.readouterr().out


def test_own_policy(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_policy.py"), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    names = ["fewest-prompt-tokens", "fewest-tokens-sent", "round-robin", "lmetric"]
    assert [line.split()[0] for line in shown] == names
    assert all("goodput" in line for line in shown)


def test_train_sb3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    learn = contrib.MaskablePPO.learn

    def briefly(model: Any, total_timesteps: int) -> Any:
        return learn(model, 1)

    monkeypatch.setattr(contrib.MaskablePPO, "learn", briefly)
    example = runpy.run_path(str(EXAMPLES / "train_sb3.py"))
    example["main"].__globals__.update(EPISODES=2, SETTINGS={**example["SETTINGS"], "scored_requests": 20})
    example["main"]()
    assert "MaskablePPO     return" in capsys.readouterr().out


def test_train_gymnasium(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "train_gymnasium.py"))
    example["main"].__globals__.update(UPDATES=2, ENVS=8, STEPS=16, BATCH=64)
    example["main"]()
    assert "256 decisions: reward -" in capsys.readouterr().out
