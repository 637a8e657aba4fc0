"""Snapshots of real runs against what the arrays say otherwise, and pictures of snapshots made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from fleetpilot.cluster import ClusterBatch, FleetConfig, Telemetry, kernel, loading, telemetry
from fleetpilot.cluster.config import Rebalancing, Scaling
from fleetpilot.cluster.state import NEED_DECISION
from fleetpilot.envs import FleetVectorEnv
from fleetpilot.envs.rendering import (
    PALETTE,
    InstanceSnapshot,
    MigrationSnapshot,
    RequestSnapshot,
    Snapshot,
    ansi,
    render_row,
    rgb,
    snapshot,
)
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import CHAT, TIGHT
from fleetpilot.fleet.view import (
    KIND_SCALE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_FAILED,
    STATE_READY,
    STATE_STARTING,
)
from fleetpilot.workloads import workload

INSTANCES = 4
DECISIONS = 600


def scarce_memory(profile: str, uri: str) -> ClusterBatch:
    """Two environments of fleets that are short of KV memory; the second is the one that is used."""
    table = workload(uri)
    rng = np.random.default_rng(0)
    table = replace(
        table,
        slo_class=rng.integers(3, size=len(table)).astype(np.int32),  # one more than there are
        priority=rng.integers(2, size=len(table)).astype(np.int32),
    )
    engine = replace(load_profile(profile), kv_blocks=1_100, max_model_len=8_192)
    fleet = FleetConfig.of(
        engine, INSTANCES, slo_classes=(CHAT, TIGHT), telemetry=Telemetry(engine_reported=True), max_hold_s=5.0
    )
    size = loading.capacity_for(
        [fleet] * 2,
        len(table),
        len(table),
        len(table.node_parent),
        int(np.count_nonzero(~np.isnan(table.think_s))),
        track_targets=True,
        samples=INSTANCES,
    )
    batch = ClusterBatch(size)
    batch.load(1, fleet, table, seed=0, stop_s=np.inf)
    return batch


def decisions(batch: ClusterBatch) -> Iterator[int | None]:
    """Decide at random, hold some requests; yields the previous choice while a decision is pending."""
    rng = np.random.default_rng(1)
    chosen = None
    for _ in range(DECISIONS):
        assert kernel.advance(batch.handle, 1) == NEED_DECISION
        yield chosen
        chosen = None if rng.random() < 0.1 else int(rng.integers(INSTANCES))
        kernel.apply(batch.handle, 1, -1 if chosen is None else chosen)


CHUNKED = ("h100-llama-3.1-8b", "sessions/chat?rate=40&n=2000&max_context=8000")
PREFILL_FIRST = ("a10-llama-7b", "poisson?rate=12&lengths=ShareGPT&n=2000")
RUNS = pytest.mark.parametrize("run", [CHUNKED, PREFILL_FIRST], ids=["chunked", "prefill-first"])


@RUNS
def test_a_snapshot_agrees_with_samples_costs_and_pins(run: tuple[str, str]) -> None:
    batch = scarce_memory(*run)
    costs = np.empty(kernel.COSTS)
    seen = {"waiting": 0, "held": 0, "missed": 0, "shared": 0, "cached": 0, "class 1": 0}
    for _ in decisions(batch):
        fleet = snapshot(batch, 1)
        kernel.costs(batch.handle, 1, costs)
        assert (fleet.missed, fleet.finished, fleet.time_s) == (costs[1], costs[3], costs[6])
        assert len(fleet.held) == batch.view.fleet["held"][1]
        batch.state.counts["samples"] = 0
        telemetry.sample(batch.handle, 1, fleet.time_s)
        for i, instance in enumerate(fleet.instances):
            sample = batch.state.sample[i]
            assert instance.kv_capacity_blocks - instance.kv_used_blocks == sample["free_blocks"]
            assert (len(instance.running), len(instance.waiting)) == (sample["running"], sample["waiting"])
            assert 0 <= instance.kv_cached_blocks <= sample["free_blocks"]
            assert instance.shared_blocks == blocks_of_shared_nodes(batch, i)
            seen["waiting"] += len(instance.waiting)
            seen["shared"] += instance.shared_blocks
            seen["cached"] += instance.kv_cached_blocks
            seen["class 1"] += sum(request.slo_class == 1 for request in instance.running)
            assert all(request.slo_class < 2 for request in instance.running + instance.waiting)
        seen["held"] += len(fleet.held)
        seen["missed"] += fleet.missed
    assert batch.state.instance["preemptions"].sum() > 0
    assert [name for name, count in seen.items() if count == 0] == (
        ["shared", "cached"] if run is PREFILL_FIRST else []
    )


def blocks_of_shared_nodes(batch: ClusterBatch, i: int) -> int:
    """Resident blocks of the prefix-tree nodes that two or more requests of the batch have pinned."""
    instance = batch.state.instance[INSTANCES + i]
    nodes = batch.state.residency[instance["residency0"] : instance["residency0"] + batch.size.nodes]
    return int(nodes["blocks"][nodes["pins"] > 1].sum())


@RUNS
def test_progress_within_a_leap_is_that_of_single_steps(run: tuple[str, str]) -> None:
    leaping, stepping = scarce_memory(*run), scarce_memory(*run)
    stepping.state.env["leap"] = 0
    for chosen, same in zip(decisions(leaping), decisions(stepping), strict=True):
        assert snapshot(leaping, 1, chosen=chosen) == snapshot(stepping, 1, chosen=same)


def test_blocks_of_moving_requests_are_neither_shared_nor_lost() -> None:
    """Migrations in every phase, drains, start-ups and failures: what is in use is somebody's."""
    envs = FleetVectorEnv(
        1,
        scenario="steady",
        instances=INSTANCES,
        kinds=["dispatch", "source", "destination", "scale"],
        profile=load_profile("h100-llama-3.1-8b").replace(kv_blocks=3_000, max_model_len=16_384),
        rebalancing=Rebalancing(bandwidth_bytes_per_s=3e8),
        scaling=Scaling(interval_s=1.0, first_s=1.0),
        failures_per_hour=360.0,
        repair_s=3.0,
        start_up_s=2.0,
        scored_requests=100,
        warmup_requests=20,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    seen: dict[Any, int] = {}
    for _ in range(4_000):
        masks = envs.action_masks()
        if rng.random() < 0.8 and masks[0, :-1].any() and envs._cluster.view.fleet["kind"][0] != KIND_SCALE:
            masks[0, -1] = False
        envs.step(np.argmax(masks * rng.random(masks.shape), axis=1))
        fleet = snapshot(envs._cluster, 0)
        for i, instance in enumerate(fleet.instances):
            state = envs._cluster.state.instance[i]
            nodes = slice(state["residency0"], state["residency0"] + envs._cluster.size.nodes)
            residency = envs._cluster.state.residency[nodes]
            assert instance.shared_blocks == residency["blocks"][residency["pins"] > 1].sum()
            assert instance.state == envs._cluster.view.instances["state"][0, i]
            assert (instance.moving_blocks > 0) <= (instance.state in (STATE_READY, STATE_DRAINING))
            seen[instance.state] = seen.get(instance.state, 0) + 1
        for migration in fleet.migrations:
            assert migration.source != migration.destination
            seen[migration.stopped] = seen.get(migration.stopped, 0) + 1
            ends = {fleet.instances[end].state for end in (migration.source, migration.destination)}
            assert ends <= {STATE_READY, STATE_DRAINING}
    assert {True, False, STATE_ABSENT, STATE_STARTING, STATE_READY, STATE_DRAINING, STATE_FAILED} == set(seen)


def fleet_of(*instances: InstanceSnapshot, **fields: Any) -> Snapshot:
    values = {"held": (), "chosen": None, "finished": 0, "missed": 0, "slo_classes": 2, **fields}
    return Snapshot(time_s=12.5, instances=instances, **values)


def requests(*blocks: int, slo_class: int = 0, priority: int = 0) -> tuple[RequestSnapshot, ...]:
    return tuple(RequestSnapshot(held, slo_class, priority) for held in blocks)


IDLE = InstanceSnapshot(1_000, 0, 0, (), ())
BUSY = InstanceSnapshot(1_000, 700, 100, requests(200) + requests(300, slo_class=1), requests(0, 0, 0, slo_class=1))


def pixels(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    return (picture == np.array(colour, np.uint8)).all(axis=2)


def tall_columns(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    """Columns where a bar or tick of the colour stands; swatches and text are lower."""
    return pixels(picture, colour).sum(axis=0) > 20


def test_the_table_has_a_line_per_instance() -> None:
    title, _, first, second = ansi(fleet_of(IDLE, BUSY, chosen=1, held=requests(0), finished=9, missed=4)).split("\n")
    assert title == "time 12.50 s   held 1   finished 9   missed 4"
    assert first.split() == ["0", "0", "/", "1,000", "0.0%", "[", "]", "0", "0"]
    assert second.split() == [">", "1", "700", "/", "1,000", "70.0%", "[##############", "]", "2", "3"]
    assert len(first) == len(second)


def test_the_table_says_what_is_not_ready_and_what_moves() -> None:
    fleet = fleet_of(
        replace(IDLE, state=STATE_ABSENT),
        replace(IDLE, state=STATE_STARTING, due_s=15.0),
        replace(BUSY, state=STATE_DRAINING),
        BUSY,
        replace(IDLE, state=STATE_FAILED, due_s=72.5),
        BUSY,
        BUSY,
        migrations=(MigrationSnapshot(2, 3, 1_500, False), MigrationSnapshot(5, 6, 20, True)),
    )
    ends = [line.split()[-5:] for line in ansi(fleet).split("\n")[2:]]
    assert ends[0][-1] == "absent"
    assert ends[1][-3:] == ["starting", "2.5", "s"]
    assert ends[2] == ["draining", "->", "3", "1,500", "copied"]
    assert ends[3][-3:] == ["->", "from", "2"]
    assert ends[4][-3:] == ["failed", "60.0", "s"]
    assert ends[5][-4:] == ["=>", "6", "20", "copied"]
    assert ends[6][-3:] == ["=>", "from", "5"]


@pytest.mark.parametrize("state", [STATE_ABSENT, STATE_STARTING, STATE_DRAINING, STATE_FAILED])
def test_each_state_looks_different_and_only_its_own_row(state: int) -> None:
    ready = rgb(fleet_of(*[BUSY] * 8))
    pictures = {s: rgb(fleet_of(*[BUSY] * 3, replace(BUSY, state=s), *[BUSY] * 4)) for s in range(5)}
    assert all((pictures[state] != pictures[s]).any() for s in range(5) if s != state)
    rows = np.flatnonzero((pictures[state] != ready).any(axis=(1, 2)))
    assert rows.max() - rows.min() < 50
    kept = pixels(pictures[state], PALETTE[0]).sum() / pixels(ready, PALETTE[0]).sum()
    assert (kept > 0.95) == (state == STATE_DRAINING)  # its requests are still to be seen


@pytest.mark.parametrize("instances", [2, 16, 64, 300])
def test_a_migration_is_an_arc_in_the_gutter_between_its_ends(instances: int) -> None:
    still = rgb(fleet_of(*[BUSY] * instances))
    source, destination = 0, instances - 1
    moving, stopped, back = (
        rgb(fleet_of(*[BUSY] * instances, migrations=(MigrationSnapshot(*ends, 5, how),)))
        for ends, how in (
            ((source, destination), False),
            ((source, destination), True),
            ((destination, source), False),
        )
    )
    legend = still.shape[0] - 30
    changed = (moving != still).any(axis=2)[:legend]
    bars = pixels(still, PALETTE[0])[:legend]
    if instances <= 16:
        assert not (changed & bars).any()
    rows = np.flatnonzero(changed.any(axis=1))
    assert len(rows) > 20
    assert (moving != stopped)[:legend].any()
    assert (moving != back)[:legend].any()
    alone = rgb(fleet_of(*[BUSY] * instances, chosen=destination))
    marked = np.flatnonzero((alone != still).any(axis=(1, 2)))
    assert rows.min() <= marked.min() + 40
    assert rows.max() <= still.shape[0] - 30


def test_a_bar_is_as_long_as_its_blocks() -> None:
    first, second = (tall_columns(rgb(fleet_of(BUSY)), PALETTE[k]) for k in range(2))
    ticks, bar = 3 * 3, int(second.sum()) - 3 * 3
    assert bar / int(first.sum()) == pytest.approx(300 / 200, rel=0.02)
    whole = tall_columns(rgb(fleet_of(InstanceSnapshot(1_000, 1_000, 0, requests(1_000), ()))), PALETTE[0])
    assert bar / int(whole.sum()) == pytest.approx(0.3, rel=0.02)
    edges = np.flatnonzero(np.diff(second[np.flatnonzero(second)[bar - 1] + 1 :].astype(int)))
    assert len(edges) == 2 * 3  # each tick begins and ends
    assert ticks == int(second.sum()) - bar


def test_lower_priority_is_paler() -> None:
    def brightness(priority: int) -> int:
        instance = InstanceSnapshot(1_000, 1_000, 0, requests(1_000, priority=priority), ())
        return int(rgb(fleet_of(instance)).sum())

    assert brightness(-1) == brightness(0) < brightness(1) < brightness(2) == brightness(7)


def test_what_is_cached_is_hatched_at_the_end_of_the_bar() -> None:
    cached = rgb(fleet_of(replace(IDLE, kv_cached_blocks=500)))
    changed = np.flatnonzero((cached != rgb(fleet_of(IDLE))).any(axis=(0, 2)))
    whole = np.flatnonzero(tall_columns(rgb(fleet_of(replace(IDLE, kv_cached_blocks=1_000))), (196, 196, 190)))
    bar = np.flatnonzero((rgb(fleet_of(BUSY)) != rgb(fleet_of(IDLE))).any(axis=(0, 2)))[0]
    assert len(whole) == 0  # stripes, not an area
    assert changed[0] > bar + (changed[-1] - bar) * 0.49


def test_a_choice_is_marked_beside_its_bar_alone() -> None:
    marked = rgb(fleet_of(*[BUSY] * 8, chosen=5))
    rows = np.flatnonzero((marked != rgb(fleet_of(*[BUSY] * 8))).any(axis=(1, 2)))
    mark = np.flatnonzero((marked != rgb(fleet_of(*[BUSY] * 8, chosen=4))).any(axis=(1, 2)))
    assert 5 < len(rows) < 30
    assert mark[0] < rows[0]
    assert mark[-1] == rows[-1]


@pytest.mark.parametrize("instances", [1, 16, 64, 300])
def test_each_instance_gets_its_place(instances: int) -> None:
    empty = rgb(fleet_of(*[IDLE] * instances))
    touched = np.zeros(empty.shape[:2], int)
    middle = instances // 2
    for i in {0, 1, 2, middle - 1, middle, middle + 1, instances - 2, instances - 1} & set(range(instances)):
        fleet = [IDLE] * instances
        fleet[i] = replace(BUSY, waiting=requests(*[0] * 500))
        place = (rgb(fleet_of(*fleet)) != empty).any(axis=2)
        place[:40] = False  # the header's counts
        assert place.any()
        touched += place
    assert touched.max() == 1


@pytest.mark.parametrize(("width", "height"), [(960, 540), (480, 320), (1_920, 1_080)])
def test_a_picture_is_what_video_encoders_take(width: int, height: int) -> None:
    fleet = fleet_of(*[BUSY] * 16, held=requests(*[0] * 2_000), finished=123_456, missed=65_432)
    picture = rgb(fleet, width, height)
    assert (picture.shape, picture.dtype) == ((height, width, 3), np.uint8)
    assert picture.flags.c_contiguous
    np.testing.assert_array_equal(picture, rgb(fleet, width, height))


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (961, 540, "width = 961: expected an even number"),
        (960, 541, "height = 541: expected an even number"),
        (200, 540, "width = 200: expected at least 312"),
        (480, 320, "height = 320: expected at least 514 for 100 instances"),
    ],
)
def test_a_size_that_does_not_do_is_refused(width: int, height: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rgb(fleet_of(*[IDLE] * 100), width, height)


def test_a_row_is_drawn_in_the_mode_asked_for() -> None:
    batch = scarce_memory(*CHUNKED)
    for chosen in decisions(batch):
        last = chosen
    fleet = snapshot(batch, 1, chosen=last)
    assert render_row(batch, 1, "ansi", chosen=last) == ansi(fleet)
    np.testing.assert_array_equal(render_row(batch, 1, "rgb_array", chosen=last), rgb(fleet))
