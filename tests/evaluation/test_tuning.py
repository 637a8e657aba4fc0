"""The search for parameters: on development windows alone, within its budget, repeatable, resumable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetpilot.baselines import BASELINES, load_policy, policy_ranges, read_name
from fleetpilot.cluster import FleetConfig, Pools, Rebalancing, Scaling
from fleetpilot.evaluation import Scenario, cut, tuning
from fleetpilot.evaluation.experiments import learned
from fleetpilot.evaluation.segments import windows_of
from fleetpilot.evaluation.tuned import OURS, read_tuned, tuned_names
from fleetpilot.evaluation.tuning import (
    INSTANCE_PRICE,
    Study,
    Trial,
    Tuned,
    objective,
    run_studies,
    tune,
    with_parameters,
)
from fleetpilot.fleet.policy import CompiledPolicy
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import CHAT, TIGHT
from fleetpilot.workloads.table import RequestTable, make_table

DOCS = Path(__file__).parents[2] / "docs"
A10 = load_profile("a10-llama-7b")
L40S = load_profile("l40s-llama-3.1-8b")


def busy(n: int = 160, rate: float = 2.2, seed: int = 1) -> RequestTable:
    """More than two A10s can carry for a while."""
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.uniform(0, n / rate, n))
    classes = rng.integers(0, 2, n)
    return make_table("busy", arrival, rng.integers(50, 2000, n), rng.integers(1, 300, n), slo_class=classes)


DEVELOPMENT = windows_of(cut(busy(), 4), "development")
SCENARIO = Scenario("busy", DEVELOPMENT, FleetConfig((A10, A10), slo_classes=(CHAT, TIGHT)))


def study(path: Path, policy: str = "calibrated", **changes: Any) -> Study:
    return replace(Study(policy, "family", (SCENARIO,), (0,), 6, 0, path / "trials.jsonl"), **changes)


def run_study(of: Study) -> Tuned:
    (tuned,) = run_studies([of], "the command", workers=1)
    return tuned


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies of the runs that were made."""
    made: list[str] = []
    outcome_of = tuning.outcome_of

    def counted(job: Any) -> Any:
        made.append(job.policy)
        return outcome_of(job)

    monkeypatch.setattr(tuning, "outcome_of", counted)
    return made


def test_the_first_trial_has_the_defaults_and_the_best_is_no_worse(tmp_path: Path, runs: list[str]) -> None:
    tuned = run_study(study(tmp_path))
    assert len(tuned.trials) == 6
    assert tuned.trials[0].policy == "calibrated"
    assert tuned.best.value == max(trial.value for trial in tuned.trials) >= tuned.trials[0].value
    assert len(set(runs)) == 6
    assert len(runs) == 6 * 2  # development windows
    for trial in tuned.trials[1:]:
        values = dict(part.split("=") for part in trial.policy.partition("?")[2].split("&"))
        assert values.keys() <= policy_ranges("calibrated").keys()
        for name, text in values.items():
            assert policy_ranges("calibrated")[name].low <= float(text) <= policy_ranges("calibrated")[name].high
        load_policy(trial.policy)


def test_the_same_seed_makes_the_same_trials(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = run_study(study(tmp_path / "a"))
    assert run_study(study(tmp_path / "b")) == first
    (tmp_path / "c").mkdir()
    assert run_studies([study(tmp_path / "c")], "the command", workers=2) == [first]
    assert run_study(study(tmp_path / "b", seed=1)).trials[1:] != first.trials[1:]


def test_an_interrupted_study_goes_on_where_it_was(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = run_study(study(tmp_path / "whole"))
    counted = tuning.outcome_of

    def interrupted(job: Any) -> Any:
        if len(runs) == 12 + 5:  # in the third trial
            raise KeyboardInterrupt
        return counted(job)

    monkeypatch.setattr(tuning, "outcome_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study(tmp_path / "cut"))
    monkeypatch.setattr(tuning, "outcome_of", counted)
    kept = (tmp_path / "cut" / "trials.jsonl").read_text()
    (tmp_path / "cut" / "trials.jsonl").write_text(kept + '\n{"key": "cut off by a cr')
    del runs[:]
    assert run_study(study(tmp_path / "cut")) == whole
    assert len(runs) == (6 - 2) * 2
    del runs[:]
    assert run_study(study(tmp_path / "cut")) == whole
    assert run_study(study(tmp_path / "cut", trials=3)).trials == whole.trials[:3]
    assert runs == []


def test_trials_of_another_setup_are_not_taken(tmp_path: Path, runs: list[str]) -> None:
    run_study(study(tmp_path, trials=1))
    other = replace(SCENARIO, fleet=replace(SCENARIO.fleet, slo_classes=(TIGHT, TIGHT)))
    run_study(study(tmp_path, trials=1, scenarios=(other,)))
    assert len(runs) == 4


def test_only_parameters_that_matter_are_looked_for(tmp_path: Path) -> None:
    def names(policy: str, **fleet: Any) -> list[str]:
        scenario = replace(SCENARIO, fleet=replace(SCENARIO.fleet, **fleet))
        return list(study(tmp_path, policy, scenarios=(scenario,)).ranges)

    assert names("llumnix") == []
    assert names("llumnix", rebalancing=Rebalancing()) == ["threshold"]
    assert names("llumnix", scaling=Scaling(ready=2)) == ["low", "high"]
    assert names("llumnix", rebalancing=Rebalancing(), scaling=Scaling(ready=2)) == ["threshold", "low", "high"]
    assert names("llumnix-v1") == []
    pools: dict[str, Any] = {"profiles": (L40S, L40S), "pools": Pools.of(prefill=1, decode=1)}
    assert names("llumnix-v1", **pools) == ["slo_s", "fill"]
    assert names("splitwise", **pools) == ["prompt", "token"]
    assert names("cache-aware", rebalancing=Rebalancing()) == ["least", "ratio", "prefix"]


def test_parameters_in_the_name_stay(tmp_path: Path) -> None:
    of = study(tmp_path, "calibrated?sampled=1&guard=0", trials=3)
    assert "sampled" not in of.ranges
    assert "guard" not in of.ranges
    tuned = run_study(of)
    assert tuned.trials[0].policy == "calibrated?sampled=1&guard=0"
    assert all(trial.policy.startswith("calibrated?sampled=1&guard=0&backlog=") for trial in tuned.trials[1:])


def test_a_policy_without_parameters_is_tried_once(tmp_path: Path, runs: list[str]) -> None:
    tuned = run_study(study(tmp_path, "lmetric"))
    assert [trial.policy for trial in tuned.trials] == ["lmetric"]
    assert runs == ["lmetric"] * 2


def test_a_fleet_that_scales_pays_for_its_instances() -> None:
    summary = {"goodput": {"share": 0.9}, "fleet": {"run_instances": 1.5}}
    fixed = FleetConfig((A10, A10))
    assert objective(summary, fixed) == 0.9
    assert objective(summary, replace(fixed, scaling=Scaling())) == pytest.approx(0.9 - INSTANCE_PRICE * 0.75)
    with pytest.raises(ValueError, match="no scored request"):
        objective({"goodput": {"share": None}}, fixed)


def test_names_hold_rounded_parameters_that_are_not_the_defaults() -> None:
    assert with_parameters("llumnix", {"threshold": 3.0, "low": 10.0}) == "llumnix"
    assert with_parameters("llumnix", {"threshold": 4.56789, "low": 10.0}) == "llumnix?threshold=4.57"
    assert with_parameters("llumnix?low=3", {"threshold": 4.0}) == "llumnix?low=3&threshold=4"
    assert with_parameters("llumnix", {"threshold": 2048.0, "low": 0.00012345}) == "llumnix?threshold=2050&low=0.000123"


def test_windows_for_development_and_for_tests_share_none() -> None:
    segments = cut(busy(), 5)
    development, test = windows_of(segments, "development"), windows_of(segments, "test")
    assert [table.name[-6:] for table in development] == [" [1/5]", " [3/5]", " [5/5]"]
    assert [table.name[-6:] for table in test] == [" [2/5]", " [4/5]"]
    assert windows_of(segments, "all") == segments
    with pytest.raises(ValueError, match="windows for test: none of 1; expected at least 2 segments"):
        windows_of(segments[:1], "test")


def test_what_was_chosen_is_written_and_read(tmp_path: Path) -> None:
    options: dict[str, Any] = {"trials": 3, "workers": 2, "command": "the command"}
    tune([SCENARIO], ["cache-aware", "lmetric"], tmp_path, family="chat", **options)
    (found,) = tune([SCENARIO], ["length-heuristic"], tmp_path, family="other", **options)
    path = tmp_path / "tuned.json"
    families = read_tuned(path)
    assert {family: list(policies) for family, policies in families.items()} == {
        "chat": ["cache-aware", "lmetric"],
        "other": ["length-heuristic"],
    }
    record = families["other"]["length-heuristic"]
    assert record["chosen"] == found.best.policy
    assert record["goodput"] == found.best.goodput
    assert record["trials"] == 3
    assert record["development_windows"] == {"busy": 2}
    assert record["command"] == "the command"
    names = tuned_names(path, "other", ["round-robin", "length-heuristic"])
    assert names == ["round-robin", found.best.policy]
    with pytest.raises(ValueError, match="family 'code' is not there; expected one of chat, other"):
        tuned_names(path, "code", ["round-robin"])


def test_what_comes_with_fleetpilot_was_tuned_within_one_budget_and_is_no_worse_there() -> None:
    budget = learned.plan()["tuning"]
    for family, policies in read_tuned(OURS).items():
        for policy, record in policies.items():
            load_policy(record["chosen"])
            name, fixed = read_name(policy)
            chosen, parameters = read_name(record["chosen"])
            assert chosen == name
            assert parameters.items() >= fixed.items()
            assert parameters.keys() - fixed.keys() <= policy_ranges(name).keys()
            assert record["value"] >= record["default_value"]
            compiled = isinstance(load_policy(name), CompiledPolicy)
            assert record["trials"] == budget["trials" if compiled else "trials_in_python"]
            assert record["commit"]
            assert record["command"] == "python tools/build_tuning.py"
            page = "tuning.md" if family in learned.names() else "reproductions.md"
            assert f"`{record['chosen']}`" in (DOCS / page).read_text("utf-8")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "families": null}',
        b'{"format": 1, "families": {"chat": [1]}}',
        b'{"format": 1, "families": {"chat": {"llumnix": {}}}}',
        b'"\xff"',
    ],
)
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a file that fleetpilot tune wrote"):
        read_tuned(path)
    path.write_text(json.dumps({"format": 2, "families": {}}))
    with pytest.raises(ValueError, match="format = 2: expected 1"):
        read_tuned(path)
    path.write_text(json.dumps({"format": 1, "families": {"chat": {"llumnix": {"chosen": 5}}}}))
    with pytest.raises(ValueError, match="chosen = 5: expected a policy's name"):
        read_tuned(path)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one scenario, policy, seed and trial"):
        tune([SCENARIO], [], tmp_path, family="chat")
    with pytest.raises(ValueError, match="policy 'nobody' is not known"):
        tune([SCENARIO], ["nobody"], tmp_path, family="chat")


def test_every_parameter_that_is_looked_for_can_be_set_on_both_ends(tmp_path: Path) -> None:
    for policy in BASELINES:
        ranges = policy_ranges(policy)
        for pick in (lambda allowed: allowed.low, lambda allowed: allowed.high):
            values = {name: pick(allowed) for name, allowed in ranges.items()}
            if values:
                load_policy(with_parameters(policy, values))


def test_a_trial_is_a_line_of_json(tmp_path: Path) -> None:
    tuned = run_study(study(tmp_path, trials=2))
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().split("\n")[1:]]
    assert [Trial(line["policy"], line["value"], line["goodput"]) for line in lines] == list(tuned.trials)
