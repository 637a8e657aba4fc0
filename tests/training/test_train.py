"""Whole runs: they learn, leave a folder that can be used, and go on after a kill as if nothing had happened."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
pytest.importorskip("onnxscript")

import torch
from stable_baselines3 import PPO

from fleetpilot.agents import LearnedPolicy, load_policy
from fleetpilot.training.checkpoint import read_checkpoint
from fleetpilot.training.config import Imitation, Learning, Stage, TrainConfig, Validation, config_to_toml, load_config
from fleetpilot.training.ppo import FleetPPO
from fleetpilot.training.train import export_run, resume, run_config, train
from fleetpilot.training.validation import relative_cost, validate

BURSTY = {"load": [0.8, 0.9], "scored_requests": 60, "warmup_requests": 20}
TINY = TrainConfig(
    name="tiny",
    environment="fleetpilot/Dispatch-v0",
    instances=4,
    rows=32,
    hidden=16,
    decisions=8 * 32 * 16,
    checkpoint_every=2 * 32 * 16,
    scenarios={"bursty": BURSTY},
    stages=(Stage(share=0.5, changes={"load": 0.6}), Stage(share=0.5)),
    ppo=Learning(steps=16, batch_size=256, epochs=1, critic_decisions=600),
    validation=Validation(every=3 * 32 * 16, episodes=2, render_every=2),
)


def quiet(line: str) -> None:
    """Nothing."""


def run(config: TrainConfig, out: Path) -> Path:
    return train(config, out, command="fleetpilot train", say=quiet, tick=quiet)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    return run(TINY, tmp_path_factory.mktemp("whole"))


def test_entries_of_one_scenario_are_told_apart() -> None:
    changes = {"calm": {**BURSTY, "load": 0.5}, "overload": {**BURSTY, "load": 1.1}}
    config = dataclasses.replace(TINY, scenarios={f"bursty#{name}": of for name, of in changes.items()})
    found = config.environments()
    assert [(name, of["scenario"], of["load"]) for name, of in found.items()] == [
        ("bursty#calm", "bursty", 0.5),
        ("bursty#overload", "bursty", 1.1),
    ]
    costs = {name: of.cost for name, of in validate(load_policy("lmetric"), config.environment, found, 4, 50).items()}
    assert costs["bursty#overload"] > costs["bursty#calm"]


def test_imitation_beats_join_shortest_queue(tmp_path: Path) -> None:
    config = dataclasses.replace(
        TINY,
        hidden=32,
        stages=(Stage(share=1.0),),
        decisions=32 * 16,
        imitation=Imitation(policies=("join-shortest-queue", "lmetric"), decisions=60_000),
        validation=Validation(episodes=8, render_every=0),
    )
    folder = run(config, tmp_path)
    policy: Any = load_policy(str(folder / "export"))
    scenarios = config.environments()
    found, jsq = (
        validate(each, config.environment, scenarios, 16, 50) for each in (policy, load_policy("join-shortest-queue"))
    )
    assert relative_cost(found, jsq) < 0.9
    assert policy.counts["out_of_range"] < 0.01 * policy.counts["decisions"]


class Killed(BaseException):
    """As by a signal."""


def test_a_run_that_was_killed_goes_on_identically(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = 0
    original = FleetPPO.train

    def train_until_killed(model: FleetPPO) -> None:
        nonlocal updates
        updates += 1
        if updates == 7:
            raise Killed
        original(model)

    monkeypatch.setattr(FleetPPO, "train", train_until_killed)
    with pytest.raises(Killed):
        run(TINY, tmp_path / "killed")
    monkeypatch.undo()
    folder = tmp_path / "killed" / "ppo" / "Dispatch-v0_1"
    before = read_checkpoint(folder)["counts"]["num_timesteps"]
    assert 0 < before < 7 * 32 * 16
    resume(folder, say=quiet, tick=quiet)
    one, other = (PPO.load(each / "Dispatch-v0.zip").policy.state_dict() for each in (whole, folder))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with np.load(whole / "evaluations.npz") as a, np.load(folder / "evaluations.npz") as b:
        np.testing.assert_array_equal(a["timesteps"], b["timesteps"])
        np.testing.assert_array_equal(a["results"], b["results"])


def test_ctrl_c_keeps_what_was_learned(whole: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        if line.startswith("38%"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(TINY, tmp_path / "stopped", command="fleetpilot train", say=lines.append, tick=interrupt)
    folder = tmp_path / "stopped" / "ppo" / "Dispatch-v0_1"
    assert lines[-1] == f"kept; fleetpilot train --resume {folder} goes on from there"
    assert read_checkpoint(folder)["counts"]["num_timesteps"] == 3 * 32 * 16
    resume(folder, say=quiet, tick=quiet)
    one, other = (PPO.load(each / "Dispatch-v0.zip").policy.state_dict() for each in (whole, folder))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_folder_holds_what_is_needed_to_repeat_use_and_look_at_a_run(whole: Path, tmp_path: Path) -> None:
    folder = whole
    inside = folder / "Dispatch-v0"
    assert (inside / "command.txt").read_text() == "fleetpilot train\n"
    assert run_config(folder) == load_config(str(inside / "config.toml"))
    assert run_config(folder) == TINY
    assert (folder / "best_model.zip").is_file()
    assert list((folder / "videos").glob("*.gif"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (folder / "tensorboard").glob("events*")
    curves = EventAccumulator(str(events)).Reload().Tags()["scalars"]  # type: ignore[no-untyped-call]
    wanted = {
        "reward/waiting",
        "reward/slo_miss",
        "train/approx_kl",
        "train/explained_variance",
        "validation/cost",
        "validation-bursty/goodput",
        "validation-bursty/ttft_p99_s",
        "validation-bursty/migrations_per_request",
        "validation-bursty/instances",
    }
    assert wanted <= set(curves)
    again = export_run(folder, tmp_path / "mine", mode="sample", fallback="join-shortest-queue")
    policy = load_policy(str(again))
    assert isinstance(policy, LearnedPolicy)
    assert policy.mode == "sample"
    assert load_config(str(again / "training.toml")) == TINY
    head, *judged = [line.split(",") for line in (again / "validation.csv").read_text().splitlines()]
    assert head == ["decisions", "cost", *TINY.scenarios]
    assert int(judged[-1][0]) == TINY.decisions
    second = run(dataclasses.replace(TINY, decisions=32 * 16, stages=(Stage(share=1.0),)), whole.parents[1])
    assert second.name == "Dispatch-v0_2"


def test_training_ends_early_when_it_gets_no_better(tmp_path: Path) -> None:
    config = dataclasses.replace(
        TINY,
        stages=(Stage(share=1.0),),
        decisions=10**9,
        ppo=dataclasses.replace(TINY.ppo, learning_rate=1e-30),
        validation=Validation(every=32 * 16, episodes=1, patience=2, render_every=0),
    )
    run(config, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decisions = 1", "environment: expected it to be given"),
        ("environment = 'X'\ndecisions = 1\n[scenarios.steady]", "environment = 'X': expected one of fleetpilot/"),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 0\n[scenarios.steady]",
            "decisions = 0: expected a whole",
        ),
        ("environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.sunny]", "scenario 'sunny' is not known"),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\nspeed = 2",
            "speed is not known; expected one of name",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\n[ppo]\nrate = 1",
            "ppo.rate is not",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\n[[stages]]\nshare = 0.5",
            "stages: shares are",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\nfallback = 'preble'\n[scenarios.steady]",
            "fallback = 'preble': expected a compiled policy",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\n[imitation]\n"
            "policies = ['oracle-least-work']\ndecisions = 1",
            "imitation.policies = 'oracle-least-work': expected a policy; this bound knows",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\n[time_factors]\nbursty = 2.0",
            "time_factors: bursty is no scenario here; expected one of steady",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\n[time_factors]\nsteady = 0",
            "time_factors: steady = 0: expected a finite number > 0",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\nlod = 1",
            r"mine\.toml: scenarios: steady: .*'lod' is not known",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\nadmission = 1",
            "admission = 1: expected a table with some of late, cold, busy",
        ),
        (
            "environment = 'fleetpilot/Dispatch-v0'\ndecisions = 1\n[scenarios.steady]\nadmission = { foo = 1 }",
            "admission = {'foo': 1}: expected a table with some of late, cold, busy",
        ),
        ("decisions = ", "not TOML"),
    ],
)
def test_bad_configurations_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(str(path))


def test_unknown_configurations_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config 'fast' is not known; expected one of .*quick"):
        load_config("fast")
    with pytest.raises(ValueError, match="expected the folder of a run that was begun"):
        resume(tmp_path)
    with pytest.raises(ValueError, match="expected the folder of a training run"):
        export_run(tmp_path)


def test_a_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    from fleetpilot.training.config import configurations

    for name in configurations():
        config = load_config(name)
        path = tmp_path / f"{name}.toml"
        path.write_text(config_to_toml(config))
        assert config.summary, path
        assert config_to_toml(load_config(str(path))) == path.read_text()
        config.environments()
