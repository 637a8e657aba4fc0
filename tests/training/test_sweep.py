"""Several runs side by side: which there are, that each is the one made alone, and that a lost one goes on."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
pytest.importorskip("onnxscript")

import torch
from stable_baselines3 import PPO

from fleetpilot.cli import main
from fleetpilot.training.callbacks import Checkpoints
from fleetpilot.training.config import Learning, TrainConfig, Validation, load_config
from fleetpilot.training.sweep import Member, members, sweep, table, train_member
from fleetpilot.training.train import begin, run_config

CHANGES = {"load": [0.8, 0.9], "scored_requests": 40, "warmup_requests": 10}
TINY = TrainConfig(
    name="tiny",
    environment="fleetpilot/Dispatch-v0",
    instances=4,
    rows=32,
    hidden=16,
    decisions=4 * 32 * 16,
    checkpoint_every=32 * 16,
    scenarios={"bursty": CHANGES, "steady": CHANGES},
    time_factors={"steady": 2.0},
    ppo=Learning(steps=16, batch_size=256, epochs=1, critic_decisions=0),
    validation=Validation(every=4 * 32 * 16, episodes=1, render_every=0),
)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of seed 1 that nothing disturbed, made by itself."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return begin(replace(TINY, seed=1), folder, command="", say=quiet, tick=quiet)


def quiet(line: str) -> None:
    """Nothing."""


def same_weights(one: Path, other: Path) -> bool:
    first, second = (PPO.load(folder / "Dispatch-v0.zip").policy.state_dict() for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_there_is_a_run_for_every_combination(tmp_path: Path) -> None:
    found = members(TINY, tmp_path, seeds=[0, 1], vary={"ppo.clip": [0.1, 0.2]}, each_scenario=True)
    assert len(found) == 8
    assert found[0].name == "bursty,seed=0,ppo.clip=0.1"
    assert found[0].folder == tmp_path / "ppo" / "Dispatch-v0_bursty,seed=0,ppo.clip=0.1"
    assert [member.config.ppo.clip for member in found[:2]] == [0.1, 0.2]
    assert {*found[0].config.scenarios} == {"bursty"}
    assert found[0].config.time_factors == {}
    assert found[-1].config == replace(TINY, seed=1, scenarios={"steady": CHANGES}, ppo=replace(TINY.ppo, clip=0.2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing varies"),
        ({"seeds": [1]}, "nothing varies"),
        ({"seeds": [1, 1]}, "expected different runs, got seed=1, seed=1"),
        ({"vary": {"ppo.clipping": [1, 2]}}, "ppo.clipping is not known; expected one of learning_rate"),
        ({"vary": {"seed.more": [1, 2]}}, "seed.more is not known: seed is no table"),
        ({"vary": {"rows": [32, -1]}}, "rows = -1: expected a whole number"),
    ],
)
def test_what_cannot_be_varied_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        members(TINY, tmp_path, **options)


def test_a_run_among_others_is_the_one_made_alone(backend: str, alone: Path, tmp_path: Path) -> None:
    runs = members(TINY, tmp_path, seeds=[0, 1], command="fleetpilot train")
    told: list[str] = []
    trained = sweep(runs, lambda run, made: told.append(run.name), backend=backend, workers=2)
    assert sorted(told) == ["seed=0", "seed=1"]
    assert same_weights(trained[1].folder, alone)
    assert not same_weights(trained[0].folder, alone)
    assert run_config(trained[1].folder).seed == 1
    assert "decisions: cost" in (trained[0].folder / "log.txt").read_text()
    (row, other) = table(runs, trained).rows
    assert row[2].best != other[2].best
    assert sweep(runs, lambda *_: None, backend=backend, workers=2) == trained, "nothing to do"
    with pytest.raises(ValueError, match="seed=0: holds a run with another configuration"):
        sweep(members(replace(TINY, rows=64), tmp_path, seeds=[0, 1]), lambda *_: None)


def dies_once(member: Member) -> Any:
    """Train, and kill this process after the second checkpoint, the first time."""
    fatal = member.folder.parent / "died"
    if not fatal.exists():
        real = Checkpoints._on_rollout_start

        def save_and_die(self: Checkpoints) -> None:
            real(self)
            if self.num_timesteps >= 2 * 32 * 16:
                fatal.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        Checkpoints._on_rollout_start = save_and_die  # type: ignore[method-assign]
    return train_member(member)


@pytest.mark.ray
def test_a_run_that_lost_its_worker_goes_on_from_its_checkpoint(
    ray_cluster: Any, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetpilot.training.sweep.train_member", dies_once)
    runs = members(TINY, tmp_path, seeds=[1, 2])
    trained = sweep(runs, lambda *_: None, backend="ray", workers=1)
    assert (tmp_path / "ppo" / "died").exists()
    assert same_weights(trained[0].folder, alone)


def test_a_lost_run_goes_on_when_the_sweep_is_called_again(alone: Path, tmp_path: Path) -> None:
    (run, _) = members(TINY, tmp_path, seeds=[1, 2])

    def stop(self: Checkpoints) -> None:
        if self.num_timesteps >= 2 * 32 * 16:
            raise OSError("the worker is gone")
        real(self)

    real = Checkpoints._on_rollout_start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_on_rollout_start", stop)
        with pytest.raises(OSError, match="gone"):
            train_member(run)
    trained = train_member(run)
    assert same_weights(trained.folder, alone)


def test_the_command_trains_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fleetpilot.training.config import config_to_toml

    (tmp_path / "mine.toml").write_text(config_to_toml(replace(TINY, decisions=512, rows=16)))
    command = ["train", "--config", str(tmp_path / "mine.toml"), "-o", str(tmp_path / "runs")]
    assert main([*command, "--seeds", "3,4", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "seed=3: cost" in shown
    assert (tmp_path / "runs/ppo/Dispatch-v0_seed=4/export/policy.onnx").is_file()
    assert load_config(str(tmp_path / "runs/ppo/Dispatch-v0_seed=4/Dispatch-v0/config.toml")).seed == 4
    assert main([*command, "--backend", "ray"]) == 2
    assert "--backend, --workers: expected with several runs" in capsys.readouterr().err
