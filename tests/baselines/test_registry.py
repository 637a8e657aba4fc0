"""What holds for every baseline, whatever its rule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fleetpilot.baselines import BASELINES, PolicyRow, load_policy, policy_parameters, policy_rows
from fleetpilot.fleet.policy import Policy, kinds_of
from fleetpilot.fleet.view import (
    FLEET_FIELDS,
    INSTANCE_FIELDS,
    KIND_DISPATCH,
    NONE,
    REQUEST_FIELDS,
    STATE_ABSENT,
    STATE_FAILED,
    Field,
    FleetView,
    empty_view,
)

NAMES = list(BASELINES)
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
    elif name in ("migrating", "preempted", "urgent"):
        records[name] = rng.integers(2, size=shape)
    elif name == "priority":
        records[name] = rng.integers(-1, 2, size=shape)
    else:
        records[name] = rng.integers(0, 12, size=shape)


def test_names() -> None:
    assert NAMES == [
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
        "infaas++",
        "llumnix",
        "llumnix-base",
        "llumnix-paper",
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
    view = random_view(np.random.default_rng(2), 500, 6, kinds_of(policy))
    choice = policy.decide(view).choice
    none = choice == NONE
    assert view.candidates[np.arange(500), choice][~none].all()
    # A request must go somewhere; a request that runs, or the fleet, may stay as it is.
    dispatch = view.fleet["kind"] == KIND_DISPATCH
    assert not none[dispatch].any()
    for kind in set(kinds_of(policy)) - {KIND_DISPATCH}:
        assert 0 < none[view.fleet["kind"] == kind].mean() < 1


@pytest.mark.parametrize("name", NAMES)
def test_the_only_candidate_is_chosen(name: str) -> None:
    view = random_view(np.random.default_rng(3), batch=60, instances=6)
    only = np.arange(60) % 6
    view.instances["candidate"] = only[:, None] == np.arange(6)
    assert load_policy(name).decide(view).choice.tolist() == only.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_fleet_of_one(name: str) -> None:
    assert (
        load_policy(name).decide(random_view(np.random.default_rng(4), batch=3, instances=1)).choice.tolist() == [0] * 3
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_candidate_means_none(name: str) -> None:
    policy = load_policy(name)
    view = random_view(np.random.default_rng(5), 100, 4, kinds_of(policy))
    view.instances["candidate"] = 0
    assert (policy.decide(view).choice == NONE).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent(name: str) -> None:
    policy = load_policy(name)
    view = random_view(np.random.default_rng(6), 80, 5, kinds_of(policy))
    alone = [
        policy.decide(FleetView(view.instances[i : i + 1], view.request[i : i + 1], view.fleet[i : i + 1])).choice[0]
        for i in range(80)
    ]
    assert policy.decide(view).choice.tolist() == alone


@pytest.mark.parametrize("row", policy_rows(), ids=lambda row: row.name)
def test_a_policy_reads_the_fields_that_it_says(row: PolicyRow) -> None:
    """Another value changes some decision if the field is read, and none if it is not."""
    policy = load_policy(row.name)
    kinds = kinds_of(policy)
    assert set(row.reads) <= set(FIELDS)
    for field in FIELDS.keys() - {"instance.slot", "instance.candidate"}:
        rng = np.random.default_rng(7)
        view = random_view(rng, 1500 * len(kinds), 3, kinds)
        before = policy.decide(view).choice
        randomise(view, field, rng, kinds)
        changed = not np.array_equal(before, policy.decide(view).choice)
        assert changed == (field in row.reads), field


def docs_row(row: PolicyRow) -> str:
    reads = "; ".join(f"`{field}` ({FIELDS[field].source})" for field in row.reads)
    parameters = "".join(f" `{name}={default:g}`" for name, default in row.parameters.items())
    return f"| `{row.name}`{parameters} | {row.rule} | {reads} | {row.source} | {row.notes} |"


@pytest.mark.parametrize("row", policy_rows(), ids=lambda row: row.name)
def test_the_documentation_states_the_row(row: PolicyRow) -> None:
    assert docs_row(row) in DOCS.read_text().splitlines()


def test_the_documentation_states_no_other_policy() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [docs_row(row) for row in policy_rows()]
