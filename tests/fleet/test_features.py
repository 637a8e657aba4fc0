"""The table of features against the function that computes them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetpilot.fleet.features import (
    KINDS,
    QUANTITIES,
    ROLE_NAMES,
    STATES,
    Feature,
    features,
    features_for,
    sources,
)
from fleetpilot.fleet.view import (
    INSTANCE_FIELDS,
    INSTANCE_VIEW,
    STATE_READY,
    FleetView,
    empty_view,
)

ROOT = Path(__file__).parents[2]
ALL_KINDS = range(len(KINDS))

COUNTS = [f.name for f in INSTANCE_FIELDS if f.dtype == "f8" and f.source in ("poll", "ledger", "prefix index")]


def random_view(seed: int, batch: int = 3, instances: int = 7) -> FleetView:
    """Loads of all sizes, ties, idle, absent and draining instances, polls never seen, targets that do not exist."""
    rng = np.random.default_rng(seed)
    view = empty_view(batch, instances)
    i, r, f = view.instances, view.request, view.fleet
    for name in COUNTS:
        i[name] = rng.integers(0, 4, i.shape) * 10.0 ** rng.integers(0, 5, i.shape)
    i["poll_age_s"] = rng.choice([0.01, 0.5, 30.0, np.inf], i.shape)
    i["kv_capacity_blocks"] = rng.choice([851.0, 27_506.0], i.shape)
    i["block_size"] = 16.0
    i["max_num_seqs"] = rng.choice([256.0, 1024.0], i.shape)
    i["prefill_s_per_token"] = rng.choice([2e-5, 3e-4], i.shape)
    i["decode_step_s"] = rng.choice([0.004, 0.04], i.shape)
    i["decode_s_per_seq"] = 1e-4
    i["free_blocks"] = np.floor(rng.random(i.shape) * i["kv_capacity_blocks"])
    i["candidate"] = rng.random(i.shape) < 0.8
    i["state"] = np.where(rng.random(i.shape) < 0.6, STATE_READY, rng.integers(0, len(STATES), i.shape))
    i["migrating"] = rng.random(i.shape) < 0.3
    i["role"] = rng.integers(0, len(ROLE_NAMES), i.shape)
    i["origin"] = rng.random(i.shape) < 0.2
    nowhere = rng.random(i.shape) < 0.2
    i[nowhere] = np.zeros((), INSTANCE_VIEW)
    r["prompt_tokens"] = rng.integers(1, 100_000, batch) * (rng.random(batch) < 0.8)  # 0: no request
    i["matched_tokens"] = np.floor(rng.random(i.shape) * r["prompt_tokens"][:, None]) * ~nowhere
    r["predicted_output_tokens"] = rng.integers(1, 5_000, batch)
    r["streamed_tokens"] = rng.integers(0, 5_000, batch)
    r["priority"] = rng.integers(-3, 4, batch)
    r["ttft_target_s"] = rng.choice([0.175, 30.0, np.inf], batch)
    r["tpot_target_s"] = rng.choice([0.04, np.inf], batch)
    r["waited_s"] = rng.choice([0.0, 0.1, 60.0], batch)
    r["turn"] = rng.integers(0, 20, batch)
    f["may_hold"] = rng.integers(0, 2, batch)
    f["held"] = rng.integers(0, 100, batch)
    f["engine_reported"] = rng.integers(0, 2, batch)
    return view


class Record:
    """The fields of records as attributes."""

    def __init__(self, records: NDArray[np.void]):
        self.records = records

    def __getattr__(self, name: str) -> Any:
        return self.records[name].astype(np.float64)


def by_formula(feature: Feature, view: FleetView, row: int) -> NDArray[np.float64]:
    """What the table says: () or (N,)."""
    chosen = view.candidates[row]
    exists = view.instances["kv_capacity_blocks"][row] > 0

    def over_candidates(how: Any) -> Any:
        return lambda x: how(np.broadcast_to(x, chosen.shape)[chosen]) if chosen.any() else 0.0

    names: dict[str, Any] = {
        "i": Record(view.instances[row]),
        "r": Record(view.request[row]),
        "f": Record(view.fleet[row]),
        "share": lambda x, half: 1.0 - half / (half + x),
        "ratio": lambda x, y: np.divide(x, y, out=np.zeros(np.broadcast(x, y).shape), where=y != 0),
        "mean": over_candidates(np.mean),
        "least": over_candidates(np.min),
        "most": over_candidates(np.max),
        "lower": lambda x: (np.float32(x)[chosen][None] < np.float32(x)[:, None]).sum(axis=1) / max(chosen.sum(), 1),
        "max": np.maximum,
        "part": lambda x: x[exists].mean() if exists.any() else 0.0,
        **STATES,
        **ROLE_NAMES,
        "candidates": float(chosen.sum()),
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        for name, formula in QUANTITIES.items():
            names[name] = eval(formula, {}, names)
        value = eval(feature.formula, {}, names)
    return np.clip(value, feature.low, feature.high)


@pytest.mark.parametrize("key", ["instances", "request", "fleet"])
@given(seed=st.integers(0, 2**32 - 1))
def test_every_feature_is_what_its_formula_says(key: str, seed: int) -> None:
    view = random_view(seed)
    got = features(view, ALL_KINDS)[key]
    table = features_for(ALL_KINDS)[key]
    assert got.shape[-1] == len(table)
    assert got.dtype == np.float32
    for row in range(len(view)):
        present = view.instances["kv_capacity_blocks"][row] > 0
        for place, feature in enumerate(table):
            expected = by_formula(feature, view, row)
            values = got[row, ..., place]
            if key == "instances":
                values, expected = values[present], np.broadcast_to(expected, present.shape)[present]
            np.testing.assert_allclose(values, expected, rtol=2e-6, atol=2e-6, err_msg=feature.name)
        assert not got[row][~present].any() if key == "instances" else True


@given(seed=st.integers(0, 2**32 - 1))
def test_every_feature_stays_in_its_range(seed: int) -> None:
    arrays = features(random_view(seed), ALL_KINDS)
    for key, table in features_for(ALL_KINDS).items():
        low, high = (np.array([getattr(f, end) for f in table], np.float32) for end in ("low", "high"))
        assert np.all((low <= arrays[key]) & (arrays[key] <= high))


@given(seed=st.integers(0, 2**32 - 1))
def test_permuted_instances_permute_their_rows_and_change_nothing_else(seed: int) -> None:
    view = random_view(seed)
    order = np.random.default_rng(seed).permutation(view.instances.shape[1])
    permuted = features(FleetView(view.instances[:, order], view.request, view.fleet), ALL_KINDS)
    original = features(view, ALL_KINDS)
    np.testing.assert_allclose(permuted["instances"], original["instances"][:, order], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(permuted["action_mask"][:, :-1], original["action_mask"][:, order])
    for key in ("request", "fleet", "kind"):
        np.testing.assert_allclose(permuted[key], original[key], rtol=1e-6, atol=1e-6)


@given(seed=st.integers(0, 2**32 - 1))
def test_who_only_dispatches_reads_the_first_of_them(seed: int) -> None:
    view = random_view(seed)
    more = features(view, ALL_KINDS)
    for key, few in features(view).items():
        np.testing.assert_array_equal(few, more[key][..., : few.shape[-1]])


def test_the_mask_names_the_legal_choices() -> None:
    view = random_view(0)
    mask = features(view)["action_mask"]
    np.testing.assert_array_equal(mask[:, :-1], view.candidates)
    np.testing.assert_array_equal(mask[:, -1], view.may_hold)


def test_the_kind_is_one_hot() -> None:
    view = random_view(0, batch=len(KINDS))
    view.fleet["kind"] = np.arange(len(KINDS))
    np.testing.assert_array_equal(features(view)["kind"], np.eye(len(KINDS)))


def test_identities_are_not_read() -> None:
    """Slot numbers, sessions, the clock and the tie-break bits may be anything."""
    view, other = random_view(5), random_view(5)
    other.instances["slot"] = other.instances["slot"][:, ::-1]
    other.request["session"] = 77
    other.request["slo_class"] = 3
    other.fleet["time_s"] = 1e6
    other.fleet["random_key"] = 12345
    other.fleet["decisions"] = 999
    for key, array in features(view, ALL_KINDS).items():
        np.testing.assert_array_equal(array, features(other, ALL_KINDS)[key])


def test_names_are_unique_and_sources_known() -> None:
    for table in features_for(ALL_KINDS).values():
        names = [feature.name for feature in table]
        assert len(set(names)) == len(names)
        for feature in table:
            assert sources(feature.formula)
            assert (feature.age == "poll") == ("i.free_blocks" in feature.formula or "i.waiting" in feature.formula)


def test_a_formula_cannot_name_what_no_view_has() -> None:
    with pytest.raises(KeyError):
        sources("i.output_tokens")


def test_the_documentation_is_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "build_feature_docs.py"))
    assert tool["DOCS"].read_text(encoding="utf-8") == tool["page"](), "run python tools/build_feature_docs.py"
