"""What holds for every baseline, whatever its rule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fleetpilot.baselines import (
    BASELINES,
    ORACLE_BOUNDS,
    PolicyRow,
    load_policy,
    policy_parameters,
    policy_ranges,
    policy_rows,
)
from fleetpilot.fleet.policy import CompiledPolicy, OracleBound, Policy, kinds_of
from fleetpilot.fleet.view import (
    FLEET_FIELDS,
    INSTANCE_FIELDS,
    KIND_DECODE,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    REJECT,
    REQUEST_FIELDS,
    ROLES,
    STATE_ABSENT,
    STATE_FAILED,
    Field,
    FleetView,
    empty_view,
)

NAMES = [*BASELINES, *ORACLE_BOUNDS]
ALL_READ = {
    "llm-d-slo": ["llm-d-slo", "llm-d-slo?explore=0.5"],
    "llm-d": ["llm-d", "llm-d?load=20&active=1&tokens=200"],
    "calibrated": ["calibrated", "calibrated?slo=50", "calibrated?sampled=1", "calibrated?guard=0.8"],
    "hpa-queue": ["hpa-queue?target=12&stabilization_s=200"],
    "hpa-kv": ["hpa-kv?target=0.5&stabilization_s=200"],
    "hpa-latency": ["hpa-latency?target=80&window_s=200&stabilization_s=200"],
    "mooncake": ["mooncake", "mooncake?margin=0.02", "mooncake?reject=0"],
    "llumnix-v1": ["llumnix-v1", "llumnix-v1?slo_s=0.5"],
    "smetric": ["smetric", "smetric?slack=0.2", "smetric?slack=3"],
    "dynamo-kv": ["dynamo-kv", "dynamo-kv?temperature=0.5"],
}
"""With which parameters policies read all that they say, on such views; by default with their own."""
HOLD = ["past-future", "oracle-past-future"]
"""Policies that hold a request at times."""
REJECTING = ["mooncake"]
"""Policies that turn a request away at times."""
PLACES = [KIND_DISPATCH, KIND_PREFILL, KIND_DECODE]
FIELDS: dict[str, Field] = {
    f"{table}.{field.name}": field
    for table, fields in (("instance", INSTANCE_FIELDS), ("request", REQUEST_FIELDS), ("fleet", FLEET_FIELDS))
    for field in fields
}
DOCS = Path(__file__).parents[2] / "docs" / "policies.md"


def random_view(
    rng: np.random.Generator, batch: int, instances: int, kinds: Sequence[int] = (KIND_DISPATCH,)
) -> FleetView:
    """Numbers in every field, small enough that ties and both sides of every threshold occur."""
    view = empty_view(batch, instances)
    for field in FIELDS:
        randomise(view, field, rng, kinds)
    return view


def randomise(view: FleetView, field: str, rng: np.random.Generator, kinds: Sequence[int]) -> None:
    table, name = field.split(".")
    records = {"instance": view.instances, "request": view.request, "fleet": view.fleet}[table]
    shape = records.shape
    if name == "slot":
        records[name] = np.arange(shape[-1])
    elif name == "candidate":
        records[name] = rng.integers(2, size=shape)
        records[name][np.arange(shape[0]), rng.integers(shape[1], size=shape[0])] = 1
    elif name == "random_key":
        records[name] = rng.integers(2**64, size=shape, dtype=np.uint64)
    elif name == "in_flight":
        records[name] = rng.choice([0, 1, 2, 3, 10, 100], size=shape)
    elif name == "time_s":
        records[name] = 100 * rng.random(shape)
    elif name == "poll_age_s":
        records[name] = rng.choice([0.05, 0.1, np.inf], size=shape)
    elif name in ("started_prompt_tokens", "unstarted_prompt_tokens", "unstarted_uncached_tokens", "streamed_tokens"):
        records[name] = rng.choice([0, 1, 2, 5, 11, 300, 2000], size=shape)
    elif name in ("matched_tokens", "indexed_tokens"):
        records[name] = rng.choice([0, 0, 100, 300, 4000], size=shape)
    elif name in ("queued_demand_blocks", "prefix_hits_tokens", "prefix_queries_tokens"):
        records[name] = rng.choice([0, 5, 11, 50, 200], size=shape)
    elif name == "decode_step_s":
        records[name] = rng.choice([0.001, 0.01, 0.4], size=shape)
    elif name in ("decode_s_per_seq", "prefill_s_per_token"):
        records[name] = rng.choice([0.0005, 0.001, 0.01], size=shape)
    elif name == "unstarted":
        records[name] = rng.choice([0, 0, 1, 11], size=shape)
    elif name == "max_num_seqs":
        records[name] = rng.choice([2, 8, 256], size=shape)
    elif name in ("ttft_target_s", "tpot_target_s"):
        records[name] = rng.choice([0.5, 2.0, 6.0, np.inf], size=shape)
    elif name in ("prompt_tokens", "predicted_output_tokens"):
        records[name] = rng.integers(1, 600, size=shape)
    elif name == "kv_usage":
        records[name] = rng.integers(5, size=shape) / 4
    elif name in ("kv_capacity_blocks", "free_blocks"):
        records[name] = rng.integers(1, 500, size=shape)
    elif name == "block_size":
        records[name] = rng.choice([8, 16, 32], size=shape)
    elif name == "kind":
        records[name] = rng.choice(kinds, size=shape)
    elif name == "state":
        records[name] = rng.integers(STATE_ABSENT, STATE_FAILED + 1, size=shape)
    elif name == "role":
        records[name] = rng.integers(len(ROLES), size=shape)
    elif name in ("origin", "migrating", "preempted", "urgent"):
        records[name] = rng.integers(2, size=shape)
    elif name == "priority":
        records[name] = rng.integers(-1, 2, size=shape)
    else:
        records[name] = rng.integers(0, 12, size=shape)


def test_names() -> None:
    assert list(ORACLE_BOUNDS) == ["oracle-least-work", "oracle-final-memory", "oracle-past-future"]
    assert list(BASELINES) == [
        "random",
        "round-robin",
        "join-shortest-queue",
        "power-of-two",
        "least-kv",
        "token-jsq",
        "length-heuristic",
        "vllm-dp",
        "least-conn",
        "freeness",
        "lmetric",
        "cache-aware",
        "llm-d",
        "llm-d-slo",
        "dynamo-kv",
        "smetric",
        "preble",
        "balance-route",
        "past-future",
        "polyserve",
        "calibrated",
        "splitwise",
        "mooncake",
        "infaas++",
        "llumnix",
        "llumnix-base",
        "llumnix-paper",
        "llumnix-surge",
        "llumnix-v1",
        "hpa-queue",
        "hpa-kv",
        "hpa-latency",
    ]
    assert [row.name for row in policy_rows()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_load_policy(name: str) -> None:
    policy = load_policy(name)
    assert isinstance(policy, Policy)
    assert policy.name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"policy 'jsq' is not known; expected one of random, round-robin, join-.*"):
        load_policy("jsq")


def test_a_name_sets_parameters() -> None:
    assert policy_parameters("llumnix") == {"threshold": 3.0, "low": 10.0, "high": 60.0}
    assert policy_parameters("lmetric") == {}
    policy = load_policy("llumnix?threshold=10&low=5")
    assert policy.name == "llumnix?threshold=10&low=5"
    assert policy is load_policy("llumnix?threshold=10&low=5")
    assert policy is not load_policy("llumnix")
    assert load_policy("llumnix").name == "llumnix"


def test_policies_with_a_memory_share_none() -> None:
    for name in ("preble", "preble?window_s=60"):
        assert load_policy(name) is not load_policy(name)


def test_a_scaler_dispatches_as_another_policy() -> None:
    scaler = load_policy("hpa-kv?dispatch=llumnix&target=0.5")
    assert kinds_of(scaler) == (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE)
    assert kinds_of(load_policy("hpa-kv")) == (KIND_DISPATCH, KIND_SCALE)
    view = random_view(np.random.default_rng(8), 200, 6)
    assert load_policy("hpa-kv?dispatch=lmetric").decide(view).choice.tolist() == (
        load_policy("lmetric").decide(view).choice.tolist()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_default_lies_within_its_range(name: str) -> None:
    parameters, ranges = policy_parameters(name), policy_ranges(name)
    assert ranges.keys() <= parameters.keys()
    for key, allowed in ranges.items():
        assert allowed.low <= float(parameters[key]) <= allowed.high
        assert allowed.kind in kinds_of(load_policy(name))
        assert allowed.low > 0 or not allowed.log
        for value in (allowed.low, allowed.high):
            assert load_policy(f"{name}?{key}={value:g}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llumnix?treshold=3", r"parameter 'treshold' is not known; expected one of threshold, low, high"),
        ("lmetric?low=3", r"policy 'lmetric\?low=3': parameter 'low' is not known; expected none"),
        ("infaas++?low=x", r"low = 'x': expected a number"),
        ("infaas++?low=", r"low = '': expected a number"),
        ("infaas++?low=inf", r"low = 'inf': expected a number"),
        ("infaas++?low=1&low=2", r"low is given twice"),
        ("infaas++?", r"expected PARAMETER=VALUE"),
        ("hpa-kv?dispatch=x", r"policy 'hpa-kv\?dispatch=x': dispatch = 'x': expected one of random, round-robin"),
        ("hpa-kv?dispatch=preble", r"dispatch = 'preble': expected one of random"),
        ("hpa-kv?dispatch=oracle-least-work", r"dispatch = 'oracle-least-work': expected one of random"),
        ("hpa-kv?target=0", r"target = 0: expected a number > 0"),
        ("calibrated?sampled=2", r"sampled = 2: expected 0 or 1"),
        ("calibrated?concurrency=0.5", r"concurrency = 0.5: expected at least 1"),
    ],
)
def test_bad_parameters(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(name)


def test_the_registry_compiles_nothing() -> None:
    # Numba starts LLVM with the first compilation, and only then.
    script = (
        "from fleetpilot.baselines import BASELINES, policy_rows, load_policy\n"
        "policies = [load_policy(name) for name in BASELINES]; policy_rows()\n"
        "print([policy.name for policy in policies if 'choose' in vars(policy)])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_only_candidates_are_chosen(name: str) -> None:
    policy = load_policy(name)
    seen = views(np.random.default_rng(2), policy, 500, 6)
    choice = np.array(choices(policy, seen))[-1]
    view = seen[-1]
    none = choice == NONE
    placed = np.isin(view.fleet["kind"], PLACES)
    assert (choice[placed] == REJECT).any() == (name in REJECTING)
    assert view.candidates[np.arange(500), choice][choice >= 0].all()
    assert np.isin(choice[choice < 0], [NONE, REJECT]).all()
    # A request must go somewhere, unless it may be held; a request that runs, or the fleet, may stay as it is.
    assert not none[placed & ~view.may_hold].any()
    assert none[placed].any() == (name in HOLD)
    for kind in set(kinds_of(policy)) - set(PLACES):
        assert 0 < none[view.fleet["kind"] == kind].mean() < 1


@pytest.mark.parametrize("name", NAMES)
def test_the_only_candidate_is_chosen(name: str) -> None:
    view = random_view(np.random.default_rng(3), batch=60, instances=6)
    view.fleet["may_hold"] = 0
    view.request["ttft_target_s"] = view.request["tpot_target_s"] = np.inf
    only = np.arange(60) % 6
    view.instances["candidate"] = only[:, None] == np.arange(6)
    policy = load_policy(name)
    policy.reset(60, 0)
    assert policy.decide(view).choice.tolist() == only.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_fleet_of_one(name: str) -> None:
    view = random_view(np.random.default_rng(4), batch=3, instances=1)
    view.fleet["may_hold"] = 0
    view.request["ttft_target_s"] = view.request["tpot_target_s"] = np.inf
    policy = load_policy(name)
    policy.reset(3, 0)
    assert policy.decide(view).choice.tolist() == [0] * 3


@pytest.mark.parametrize("name", NAMES)
def test_no_candidate_means_none(name: str) -> None:
    policy = load_policy(name)
    view = random_view(np.random.default_rng(5), 100, 4, kinds_of(policy))
    view.instances["candidate"] = 0
    policy.reset(100, 0)
    assert (policy.decide(view).choice == NONE).all()


def views(rng: np.random.Generator, policy: Policy, batch: int, instances: int) -> list[FleetView]:
    """One view, or several in a row for a policy with a memory."""
    one_after_another = 1 if isinstance(policy, CompiledPolicy) else 8
    made = [random_view(rng, batch, instances, kinds_of(policy)) for _ in range(one_after_another)]
    for number, view in enumerate(made):
        view.fleet["time_s"] += 100 * number
    return made


def choices(policy: Policy, views: Sequence[FleetView]) -> list[list[int]]:
    policy.reset(len(views[0]), 0)
    return [policy.decide(view).choice.tolist() for view in views]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent(name: str) -> None:
    policy = load_policy(name)
    seen = views(np.random.default_rng(6), policy, 80, 5)
    together = choices(policy, seen)
    for row in range(80):
        alone = [FleetView(v.instances[row : row + 1], v.request[row : row + 1], v.fleet[row : row + 1]) for v in seen]
        assert choices(policy, alone) == [[chosen[row]] for chosen in together]


@pytest.mark.parametrize("row", policy_rows(), ids=lambda row: row.name)
def test_a_policy_reads_the_fields_that_it_says(row: PolicyRow) -> None:
    """Another value changes some decision if the field is read, and none if it is not."""
    policies = [load_policy(name) for name in ALL_READ.get(row.name, [row.name])]
    kinds = kinds_of(policies[0])
    assert set(row.reads) <= set(FIELDS)
    rows = 1500 * len(kinds) if isinstance(policies[0], CompiledPolicy) else 200
    for field in FIELDS.keys() - {"instance.slot", "instance.candidate"}:
        rng = np.random.default_rng(7)
        seen = views(rng, policies[0], rows, 3)
        before = [choices(policy, seen) for policy in policies]
        for number, view in enumerate(seen):
            randomise(view, field, rng, kinds)
            view.fleet["time_s"] += 100 * number if field == "fleet.time_s" else 0
        changed = before != [choices(policy, seen) for policy in policies]
        assert changed == (field in row.reads), field


def test_bounds_are_marked_as_such() -> None:
    for name in NAMES:
        policy = load_policy(name)
        assert isinstance(policy, OracleBound) == (name in ORACLE_BOUNDS) == name.startswith("oracle-")
    assert all(row.rule.startswith("A bound:") for row in policy_rows() if row.name in ORACLE_BOUNDS)


def docs_row(row: PolicyRow) -> str:
    reads = "; ".join(f"`{field}` ({FIELDS[field].source})" for field in row.reads)
    parameters = "".join(
        f" `{name}={default if isinstance(default, str) else format(default, 'g')}`"
        for name, default in row.parameters.items()
    )
    return f"| `{row.name}`{parameters} | {row.rule} | {reads} | {row.source} | {row.notes} |"


@pytest.mark.parametrize("row", policy_rows(), ids=lambda row: row.name)
def test_the_documentation_states_the_row(row: PolicyRow) -> None:
    assert docs_row(row) in DOCS.read_text().splitlines()


def test_the_documentation_states_no_other_policy() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [docs_row(row) for row in policy_rows()]
