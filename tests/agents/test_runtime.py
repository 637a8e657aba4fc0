"""Exports: the same choices as PyTorch and ONNX Runtime make, refused when they are not what they should be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from networks import ALL_KINDS, KIND_NAMES, fleet_envs, logits_of, some_scorer

from fleetpilot.agents import LearnedPolicy, load_export, load_policy
from fleetpilot.agents.export import export_policy, network_of
from fleetpilot.agents.runtime import OnnxNetwork
from fleetpilot.agents.schema import SCHEMA_VERSION, sizes_for
from fleetpilot.agents.scorer import SetScorer, likeliest
from fleetpilot.cluster import FleetConfig
from fleetpilot.cluster.simulation import simulate
from fleetpilot.cluster.state import REJECTED
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.evaluation import Scenario, evaluate
from fleetpilot.evaluation.experiments.learned import Size, cells
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.features import INSTANCE_FEATURES
from fleetpilot.fleet.jit import UNCOMPILED
from fleetpilot.fleet.latency import memory_wait_s, prefill_backlog_s, prefill_s, tpot_s, ttft_s
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import KIND_SCALE, NONE, REJECT, FleetView
from fleetpilot.workloads import workload

VIEWS = 640 if UNCOMPILED else 10_240


def views_and_features(rows: int, instances: int) -> tuple[FleetVectorEnv, dict[str, Any]]:
    envs = fleet_envs(rows, instances)
    observations, _ = envs.reset(seed=5)
    return envs, observations


def test_the_runtime_agrees_with_pytorch_and_onnx_runtime_on_many_views(exported: Path) -> None:
    pytest.importorskip("onnxruntime")
    scorer, policy, onnx = some_scorer(ALL_KINDS), load_export(exported), OnnxNetwork(exported)
    seen = 0
    kinds = np.zeros(6)
    for instances in (2, 8, 64):
        envs, observations = views_and_features(64, instances)
        rng = np.random.default_rng(instances)
        while seen < VIEWS * {2: 1, 8: 2, 64: 3}[instances] / 3:
            logits = logits_of(scorer, observations)
            np.testing.assert_allclose(policy.score(observations).logits, logits, rtol=0, atol=1e-5)
            np.testing.assert_allclose(onnx.logits(observations), logits, rtol=0, atol=1e-5)
            expected = likeliest(torch.as_tensor(logits)).numpy()
            choice = policy.decide(envs.view).choice
            np.testing.assert_array_equal(np.where(choice == NONE, instances, choice), expected)
            np.testing.assert_array_equal(onnx.logits(observations).argmax(axis=1), logits.argmax(axis=1))
            kinds += observations["kind"].sum(axis=0)
            seen += len(choice)
            # random legal steps, so that all kinds of decision come up
            draws = rng.random(observations["action_mask"].shape) * observations["action_mask"]
            observations, *_ = envs.step(draws.argmax(axis=1))
    assert seen >= VIEWS
    assert np.all(kinds[[0, 3, 4, 5]] > 0)


def test_decide_on_its_own_and_inside_the_simulator_are_the_same(exported: Path) -> None:
    policy = load_export(exported)
    table = workload("poisson?rate=6&n=400&prompt=uniform:50:900&output=uniform:2:200")
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 3)
    inside = simulate(table, fleet, policy)

    class Outside:
        name = "outside"
        kinds = policy.kinds

        def reset(self, batch: int, seed: int) -> None:
            policy.reset(batch, seed)

        def decide(self, view: FleetView) -> Any:
            return policy.decide(view)

    outside = simulate(table, fleet, Outside())
    np.testing.assert_array_equal(inside.requests, outside.requests)
    assert policy.counts["decisions"] == outside.decisions


def test_sampling_follows_the_probabilities_and_the_seed() -> None:
    policy = LearnedPolicy("p", network_of(some_scorer(), (0,)), "lmetric", "sample")
    envs = FleetVectorEnv(1, instances=4, scored_requests=20, warmup_requests=5)
    envs.reset(seed=1)
    view = FleetView(*(np.repeat(array.copy(), 4_000, axis=0) for array in vars(envs.view).values()))
    view.fleet["random_key"] = np.random.default_rng(0).integers(2**63, size=4_000)
    view.fleet["may_hold"] = 1
    choice = policy.decide(view).choice
    logits = policy.explain(view).logits[0].astype(float)
    expected = np.exp(logits - logits.max())
    found = np.bincount(np.where(choice == NONE, 4, choice), minlength=5) / 4_000
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.03)
    np.testing.assert_array_equal(policy.decide(view).choice, choice)


def test_out_of_range_and_nan_fall_back_to_the_baseline_and_are_counted() -> None:
    scorer = some_scorer()
    scorer.low_request.fill_(0.0)
    scorer.high_request.fill_(0.3)
    policy = LearnedPolicy("p", network_of(scorer, (0,)), "join-shortest-queue")
    envs = FleetVectorEnv(3, instances=4, scored_requests=20, warmup_requests=5)
    envs.reset(seed=1)
    view = FleetView(*(array.copy() for array in vars(envs.view).values()))
    view.request["prompt_tokens"] = [100, 10_000, 100]
    view.request["predicted_output_tokens"] = 50
    view.request["ttft_target_s"] = view.request["tpot_target_s"] = np.inf
    view.instances["kv_usage"][2] = np.nan
    view.instances["free_blocks"][2, 1] = np.nan
    policy.reset(3, 0)
    choice = policy.decide(view).choice
    assert policy.counts == {"decisions": 3, "out_of_range": 2}
    assert policy.explain(view).out_of_range.tolist() == [False, True, True]
    jsq = load_policy("join-shortest-queue").decide(view).choice
    assert choice[1:].tolist() == jsq[1:].tolist()
    policy.reset(3, 0)
    assert policy.counts == {"decisions": 0, "out_of_range": 0}


def test_a_larger_fleet_is_not_out_of_range_for_its_size() -> None:
    scorer = some_scorer()
    small, large = (
        FleetVectorEnv(1, instances=count, scored_requests=20, warmup_requests=20).reset(seed=1)[0] for count in (4, 64)
    )
    ranks = [feature.formula.startswith("lower(") for feature in INSTANCE_FEATURES]
    scorer.low_instances[ranks] = torch.as_tensor(small["instances"][0][:, ranks].min(axis=0))
    scorer.high_instances[ranks] = torch.as_tensor(small["instances"][0][:, ranks].max(axis=0))
    policy = LearnedPolicy("p", network_of(scorer, (0,)), "lmetric")
    assert not policy.score(large).out_of_range.any()


def test_evaluate_runs_an_export_like_any_policy(exported: Path, tmp_path: Path) -> None:
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 3)
    scenario = Scenario("s", (workload("poisson?rate=6&n=200"),), fleet)
    mine = str(exported)
    runs = evaluate([scenario], [mine, f"{mine}?mode=sample", "lmetric"], tmp_path, seeds=[0], workers=1)
    assert [run.summary["label"] for run in runs] == [mine, f"{mine}?mode=sample", "lmetric"]
    other = tmp_path / "other"
    export_policy(some_scorer(hidden=16), (0,), other, fallback="lmetric", mode="greedy", provenance={})
    said: list[str] = []
    evaluate([scenario], [mine, "lmetric"], tmp_path, seeds=[0], workers=1, progress=said.append)
    assert said == ["2 of 2 runs are on disk already"]
    shutil.rmtree(exported.parent / "kept", ignore_errors=True)
    shutil.copytree(exported, exported.parent / "kept")
    shutil.rmtree(exported)
    shutil.copytree(other, exported)
    try:
        evaluate([scenario], [mine], tmp_path, seeds=[0], workers=1, progress=said.append)
    finally:
        shutil.rmtree(exported)
        shutil.copytree(exported.parent / "kept", exported)
    assert said[1].startswith("1/1")  # another export of the same name is run anew


def test_an_environment_lets_an_export_decide_the_rest(exported: Path) -> None:
    envs = FleetVectorEnv(2, instances=4, kinds=["scale"], others=str(exported), scenario="tides", scored_requests=50)
    observations, _ = envs.reset(seed=1)
    for _ in range(20):
        observations, _, terminated, *_ = envs.step(np.full(2, 4))
        assert np.all(observations["kind"][~terminated, 5] == 1)


def test_the_runtime_needs_neither_pytorch_nor_gymnasium(exported: Path) -> None:
    code = (
        f"import sys; from fleetpilot.agents import load_policy; p = load_policy({str(exported)!r}); p.choose;"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unwanted = {"torch", "stable_baselines3", "gymnasium", "onnxruntime", "fleetpilot.cluster", "matplotlib"}
    assert unwanted & set(loaded) == set()


# --- refusals --------------------------------------------------------------------------------------------------------


def truncate(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-100])

    return damage


def change(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "policy.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def rename_a_feature(folder: Path) -> None:
    path = folder / "policy.json"
    path.write_text(path.read_text().replace('"head_of_line"', '"head_of_queue"'))


def other_weights(folder: Path) -> None:
    """Consistent in itself, but not with the golden vectors."""
    import hashlib

    path = folder / "weights.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["score.weight"] = arrays["score.weight"] + 0.1
    np.savez(path, **arrays)
    card = json.loads((folder / "policy.json").read_text())
    card["files"]["weights.npz"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "policy.json").write_text(json.dumps(card))


BAD = {
    "truncated network": (truncate("policy.onnx"), r"policy\.onnx: damaged or of another export"),
    "truncated weights": (truncate("weights.npz"), r"weights\.npz: damaged or of another export"),
    "truncated card": (truncate("policy.json"), r"policy\.json: not JSON"),
    "no golden vectors": (lambda folder: (folder / "golden.npz").unlink(), r"golden\.npz: no such file"),
    "no card": (lambda folder: (folder / "policy.json").unlink(), "with a file policy.json"),
    "newer": (change(schema_version=SCHEMA_VERSION + 1), "a newer fleetpilot is needed"),
    "older": (change(schema_version=0), "export the policy again"),
    "not ours": (change(format="model"), "format is not 'fleetpilot-policy'"),
    "wrong schema": (rename_a_feature, "features are not those of this version: instances has .*head_of_queue"),
    "unknown kind": (change(kinds=["teleport"]), r"kinds = \['teleport'\]: expected some of dispatch"),
    "another size": (change(hidden=64), "weights; expected"),
    "no mode": (change(mode="best"), "mode = 'best': expected one of greedy, sample"),
    "unknown fallback": (change(fallback="best"), "policy 'best' is not known"),
    "a bound as fallback": (change(fallback="oracle-least-work"), "fallback = 'oracle-least-work': expected a policy"),
    "files are missing": (change(files={}), r"files = \[\]: expected policy\.onnx"),
    "other weights": (other_weights, "logits are off the golden ones"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_export_that_is_not_right_is_refused(case: str, exported: Path, tmp_path: Path) -> None:
    damage, message = BAD[case]
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_policy(str(folder))


def test_what_the_admission_rejects_is_rejected_unless_an_instance_is_idle() -> None:
    network = network_of(some_scorer(), (0,))
    plain = LearnedPolicy("p", network, "lmetric")
    admitting = LearnedPolicy("q", network, "lmetric", admission="mooncake")
    gate = load_policy("mooncake")
    envs = FleetVectorEnv(32, scenario="bursty", instances=3, load=1.5, scored_requests=40, warmup_requests=40)
    envs.reset(seed=1)
    turned_away = 0
    for _ in range(40):
        placed, said = plain.decide(envs.view).choice, gate.decide(envs.view).choice
        instances = envs.view.instances
        idle = np.any((instances["candidate"] != 0) & (instances["in_flight"] == 0), axis=1)
        rejected = (said == REJECT) & ~idle
        np.testing.assert_array_equal(admitting.decide(envs.view).choice, np.where(rejected, REJECT, placed))
        turned_away += rejected.sum()
        envs.step(np.where(placed == NONE, 3, placed))
    assert turned_away > 0


@pytest.mark.parametrize("admission", ["mooncake", Admission()])
def test_with_an_admission_the_simulator_decides_as_outside(admission: str | Admission) -> None:
    network = network_of(some_scorer(), (0,))
    admitting = LearnedPolicy("p", network, "lmetric", admission=admission)
    (cell,) = cells("bursty", "development", Size(windows=1, share=0.05, loads=(1.05,)))

    class Outside:
        name, kinds, reset, decide = "outside", admitting.kinds, admitting.reset, admitting.decide

    inside = simulate(cell.segments[0], cell.fleet, admitting).requests
    assert inside.tobytes() == simulate(cell.segments[0], cell.fleet, Outside()).requests.tobytes()
    assert 0 < np.sum(inside["status"] == REJECTED) < len(inside)


def test_an_admission_of_its_own_sends_late_requests_where_they_are_in_time_or_rejects_them() -> None:
    network, own = network_of(some_scorer(), (0,)), Admission(late=1.0, cold=5.0, busy=0.5)
    plain, admitting = LearnedPolicy("p", network, "lmetric"), LearnedPolicy("q", network, "lmetric", admission=own)
    envs = FleetVectorEnv(32, scenario="bursty", instances=3, load=1.5, prompt_scale=2.0, scored_requests=80)
    envs.reset(seed=1)
    rows, counts = np.arange(32), np.zeros(7)
    for _ in range(120):
        views, r = envs.view.instances, envs.view.request
        views["indexed_tokens"][::2] = (views["kv_capacity_blocks"] * views["block_size"])[::2]
        placed = plain.decide(envs.view).choice
        times_s = [[_times_s(i, request) for i in of] for of, request in zip(views, r, strict=True)]
        queue_s, alone_s, first_s = np.moveaxis(np.array(times_s), 2, 0)  # each (32, 3)
        target_s, waited_s = r["ttft_target_s"][:, None], r["waited_s"][:, None]
        slowness = np.array([[tpot_s(i) for i in of] for of in views]) / (0.6 * r["tpot_target_s"][:, None])
        limit_s = target_s * np.maximum(0.5, np.sqrt(np.maximum(0.0, 1.0 - slowness**2)))
        late, long = waited_s + first_s > limit_s, waited_s + alone_s > limit_s
        cached = views["indexed_tokens"] + r["prompt_tokens"][:, None]
        full = (views["in_flight"] > 0) & (cached > 0.5 * views["kv_capacity_blocks"] * views["block_size"])
        refused = late & (~long | (waited_s + alone_s > 5.0 * target_s) | (queue_s > 0.0) | full)
        elsewhere_s = np.where(refused | (views["candidate"] == 0), np.inf, first_s)
        instead = np.where(np.isinf(elsewhere_s).all(axis=1), REJECT, elsewhere_s.argmin(axis=1))
        sent, at = placed != NONE, np.maximum(placed, 0)
        away = sent & refused[rows, at]
        expected = np.where(away, instead, placed)
        np.testing.assert_array_equal(admitting.decide(envs.view).choice, expected)
        alone = sent & late[rows, at] & ~refused[rows, at]
        unqueued = sent & long[rows, at] & (waited_s + alone_s <= 5.0 * target_s)[rows, at] & (queue_s <= 0.0)[rows, at]
        counts += [
            (away & ~long[rows, at]).sum(),
            (away & long[rows, at]).sum(),
            alone.sum(),
            (expected == REJECT).sum(),
            (away & (expected >= 0)).sum(),
            (away & unqueued).sum(),
            (sent & (limit_s < target_s)[rows, at] & (limit_s > 0.5 * target_s)[rows, at]).sum(),
        ]
        envs.step(np.where(placed == NONE, 3, placed))
    assert np.all(counts > 0), (
        "late by the queue, by itself, alone and served, rejected, sent elsewhere, refused for a cache, earlier if slow"
    )


@pytest.mark.parametrize(("fallback", "message"), [("preble", "expected a compiled policy"), ("best", "not known")])
def test_a_fallback_that_cannot_be_is_refused_before_anything_is_written(
    fallback: str, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    with pytest.raises(ValueError, match=message):
        export_policy(some_scorer(), (0,), folder, fallback=fallback, mode="greedy", provenance={})
    assert not folder.exists()


def _times_s(instance: Any, request: Any) -> tuple[float, float, float]:
    queue_s = prefill_backlog_s(instance) + memory_wait_s(instance, request)
    return queue_s, prefill_s(instance, request), ttft_s(instance, request)


def test_an_export_says_what_it_turns_away_and_its_name_can_say_otherwise(tmp_path: Path) -> None:
    export_policy(
        some_scorer(),
        (0,),
        tmp_path,
        fallback="lmetric",
        mode="greedy",
        provenance={},
        admission=Admission(late=1.25, cold=0.5),
    )
    asked = {
        "": Admission(1.25, 0.5),
        "?admission=none": None,
        "?late=2": Admission(2.0, 0.5),
        "?cold=0": Admission(1.25, 0.0),
        "?busy=0.7": Admission(1.25, 0.5, 0.7),
    }
    for name, admission in asked.items():
        assert load_policy(f"{tmp_path}{name}").admission == admission  # type: ignore[attr-defined]
    for name, message in {
        "?late=x": "numbers",
        "?late=-1": "late = -1",
        "?busy=1.5": "busy = 1.5: expected a share",
        "?late=1&admission=mooncake": "one of both",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_policy(f"{tmp_path}{name}")
    card = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps({**card, "admission": {"late": -1}}))
    with pytest.raises(ValueError, match=r"admission.*late = -1"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize(
    ("admission", "message"),
    [
        ("best", "admission = 'best': policy 'best' is not known"),
        ("oracle-past-future", "admission"),
        ("preble", "expected a compiled"),
    ],
)
def test_an_admission_that_cannot_be_is_refused(admission: str, message: str, exported: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(f"{exported}?admission={admission}")


@pytest.mark.parametrize("name", ["?mode=best", "?temperature=2", "?mode=greedy&x=1"])
def test_parameters_that_an_export_does_not_have_are_refused(name: str, exported: Path) -> None:
    with pytest.raises(ValueError, match="mode"):
        load_policy(f"{exported}{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("?", r"expected PARAMETER=VALUE behind the \?"),
        ("?late=1&late=2", "late is given twice"),
        ("?mode=sample&late=1&mode=sample", "mode is given twice"),
    ],
)
def test_each_parameter_is_given_once(name: str, message: str, exported: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(f"{exported}{name}")


def test_an_unknown_name_lists_what_decides_anywhere() -> None:
    with pytest.raises(
        ValueError, match=r"policy 'lerned' is not known; expected one of .*, learned, or the fol"
    ) as said:
        load_policy("lerned")
    assert "oracle" not in str(said.value)


def test_what_the_network_does_not_answer_its_fallback_does() -> None:
    network = network_of(some_scorer((KIND_SCALE,)), (KIND_SCALE,))
    policy, other = LearnedPolicy("p", network, "llumnix"), load_policy("llumnix")
    assert set(policy.kinds) == set(other.kinds) | {KIND_SCALE}
    envs = FleetVectorEnv(16, scenario="tides", instances=4, kinds=("dispatch", "source", "destination", "scale"))
    observations, _ = envs.reset(seed=1)
    for _ in range(200):
        learned = observations["kind"][:, KIND_SCALE] > 0
        choice = policy.decide(envs.view).choice
        np.testing.assert_array_equal(choice[~learned], other.decide(envs.view).choice[~learned])
        observations, *_ = envs.step(np.where(choice == NONE, 4, choice))
    assert policy.counts["decisions"] > 0


def test_an_untrained_network_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a trained network"):
        export_policy(SetScorer(sizes_for((0,))), (0,), tmp_path, fallback="lmetric", mode="greedy", provenance={})


def test_the_card_says_what_the_policy_is(exported: Path) -> None:
    card = json.loads((exported / "policy.json").read_text())
    assert card["kinds"] == KIND_NAMES
    assert card["provenance"] == {"by": "us"}
    first = card["features"]["instances"][0]
    assert first["name"] == "candidate"
    assert first["formula"] == "i.candidate"
