"""Putting a fleet and a workload into a `State`: what happens before the first event."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.config import PROTOCOLS, REQUEST_CHOICES, Failures, FleetConfig, SharedCache
from fleetpilot.cluster.state import (
    ENGINE,
    INSTANCE,
    MODE_CHUNKED,
    MODE_PREFILL_FIRST,
    NEVER,
    NIL,
    NODE,
    ROW,
    Capacity,
    State,
)
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.view import (
    INSTANCE_VIEW,
    KIND_DECODE,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SCALE,
    KIND_SOURCE,
    ROLES,
    STATE_ABSENT,
    STATE_READY,
)
from fleetpilot.workloads.table import RequestTable


def engine_record(profile: HardwareProfile) -> NDArray[np.void]:
    """One `ENGINE` record of a profile."""
    engine = np.zeros((), ENGINE)
    engine["cost"] = profile.cost_record()
    engine["mode"] = MODE_CHUNKED if profile.scheduler == "chunked" else MODE_PREFILL_FIRST
    for name in ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "watermark_blocks"):
        engine[name] = getattr(profile, name)
    engine["prefix_cache"] = profile.prefix_cache
    engine["priority_order"] = profile.priority_order
    engine["index_tokens"] = profile.kv_capacity_tokens
    engine["kv_bytes_per_block"] = profile.kv_bytes_per_token * profile.block_size
    return engine


def _plain(records: NDArray[np.void]) -> NDArray[np.void]:
    """Records without their fields, which NumPy copies several times faster."""
    return records.view(np.dtype((np.void, records.itemsize)))


def _clear(records: NDArray[np.void]) -> None:
    records.view(np.uint8).fill(0)


@lru_cache
def _static_view(profile: HardwareProfile) -> NDArray[np.void]:
    """One `INSTANCE_VIEW` record, `_plain`, with what is known before anything happens, but for the slot."""
    view = np.zeros((), INSTANCE_VIEW)
    view["candidate"] = 1
    view["state"] = STATE_READY
    view["kv_capacity_blocks"] = profile.kv_blocks
    for name in (
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "prefill_s_per_token",
        "decode_step_s",
        "decode_s_per_seq",
    ):
        view[name] = getattr(profile, name)
    view["poll_age_s"] = np.inf
    view["free_blocks"] = profile.kv_blocks
    return _plain(view)


def row_records(table: RequestTable) -> NDArray[np.void]:
    """The table as `ROW` records, with each row's children linked."""
    rows = np.zeros(len(table), ROW)
    _write_table(rows, table)
    return rows


def _write_table(rows: NDArray[np.void], table: RequestTable) -> None:
    _write_rows(
        rows.view(np.recarray),
        table.arrival_s,
        table.think_s,
        table.session,
        table.prompt_tokens,
        table.output_tokens,
        table.predicted_output_tokens,
        table.priority,
        table.slo_class,
        table.turn,
        table.prefix_node,
        table.own_node,
        table.parent,
    )


@kernel
def _write_rows(
    rows: Any,
    arrival_s: Any,
    think_s: Any,
    session: Any,
    prompt_tokens: Any,
    output_tokens: Any,
    predicted_output_tokens: Any,
    priority: Any,
    slo_class: Any,
    turn: Any,
    prefix_node: Any,
    own_node: Any,
    parent: Any,
) -> None:
    # Row by row: column by column every cache line of the records would be fetched once per column.
    closed = False
    for i in range(len(rows)):
        row = rows[i]
        row.arrival_s = arrival_s[i]
        row.think_s = think_s[i]
        row.session = session[i]
        row.prompt_tokens = prompt_tokens[i]
        row.output_tokens = output_tokens[i]
        row.predicted_output_tokens = predicted_output_tokens[i]
        row.priority = priority[i]
        row.slo_class = slo_class[i]
        row.turn = turn[i]
        row.prefix_node = prefix_node[i]
        row.own_node = own_node[i]
        row.closed = 0 if np.isnan(think_s[i]) else 1
        closed = closed or row.closed != 0
        row.first_child = NIL
        row.next_sibling = NIL
    if not closed:
        return
    for child in range(len(rows) - 1, -1, -1):
        if rows[child].closed != 0:
            rows[child].next_sibling = rows[parent[child]].first_child
            rows[parent[child]].first_child = child


def node_records(table: RequestTable) -> NDArray[np.void]:
    """The prefix tree as `NODE` records."""
    nodes = np.zeros(len(table.node_parent), NODE)
    _write_nodes(nodes, table)
    return nodes


def _write_nodes(nodes: NDArray[np.void], table: RequestTable) -> None:
    nodes["parent"] = table.node_parent
    nodes["end_tokens"] = table.node_end_tokens


def check_fits(table: RequestTable, fleet: FleetConfig) -> None:
    """Refuse a request that some instance of the fleet could never serve.

    Raises:
        ValueError: naming the row, its tokens and the instance's limit.
    """
    total = np.add(table.prompt_tokens, table.output_tokens, dtype=np.int64)
    if len(total) == 0:
        return
    row = int(np.argmax(total))
    for profile in dict.fromkeys(fleet.profiles):
        limits = {
            "KV capacity": (profile.kv_blocks - profile.watermark_blocks) * profile.block_size,
            "max_model_len": profile.max_model_len,
        }
        if profile.scheduler == "prefill_first":
            limits["max_num_batched_tokens"] = profile.max_num_batched_tokens
        for name, limit in limits.items():
            if total[row] > limit:
                raise ValueError(
                    f"request {row}: prompt_tokens + output_tokens = {total[row]}: expected at most {limit}, "
                    f"the {name} in tokens of {profile.name}"
                )


def capacity_for(
    fleets: list[FleetConfig],
    rows: int,
    slots: int,
    nodes: int,
    closed_rows: int,
    **sizes: int | bool,
) -> Capacity:
    """The sizes of a state that holds any of these fleets in each of its environments."""
    profiles = [profile for fleet in fleets for profile in fleet.profiles]
    return Capacity(
        environments=len(fleets),
        instances=max(len(fleet.profiles) for fleet in fleets),
        rows=rows,
        slots=slots,
        nodes=nodes,
        max_num_seqs=max(p.max_num_seqs for p in profiles),
        max_block_size=max(p.block_size for p in profiles),
        polls=max(fleet.telemetry.polls_in_flight for fleet in fleets),
        closed_rows=closed_rows,
        classes=max(len(fleet.slo_classes) for fleet in fleets),
        failures=max(len(fleet.failures.at) if fleet.failures else 0 for fleet in fleets),
        transfers=any(fleet.pools is not None or fleet.shared_cache is not None for fleet in fleets),
        shared_cache=any(fleet.shared_cache is not None for fleet in fleets),
        updates=max(len(fleet.shared_cache.updates_s) if fleet.shared_cache else 0 for fleet in fleets),
        **sizes,  # type: ignore[arg-type]
    )


def _idle_instance() -> NDArray[np.void]:
    """One `INSTANCE` record before the first event, but for what depends on where and of which fleet it is."""
    instance = np.zeros((), INSTANCE)
    for name in (
        "prefilling",
        "head",
        "tail",
        "lru_head",
        "lru_tail",
        "unstarted_head",
        "unstarted_tail",
        "index_head",
        "index_tail",
        "migration",
        "incoming",
        "pulled",
        "transfers",
        "source_tick",
        "scale_tick",
    ):
        instance[name] = NIL
    instance["first_finish_step"] = NEVER
    instance["jitter"] = 1.0
    instance["last_decode_s"] = -1.0
    instance["due_s"] = np.inf
    return instance


_IDLE = _plain(_idle_instance())


def load_fleet(
    state: State, size: Capacity, e: int, fleet: FleetConfig, engines: NDArray[np.void] | None = None
) -> None:
    """Set environment `e` up with idle instances and no requests; `engines` replaces the profiles' own constants."""
    n = len(fleet.profiles)
    first = e * size.instances
    these = slice(first, first + n)
    g = np.arange(first, first + n)
    if engines is None:
        engines = np.array([engine_record(p) for p in fleet.profiles])
    _plain(state.engine)[these] = _plain(engines)
    kinds = tuple(zip(fleet.profiles, fleet.roles, strict=True))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    state.engine["profile"][these] = [numbers[kind] for kind in kinds]
    instance = state.instance[these]
    _plain(instance)[...] = _IDLE
    instance["env"] = e
    instance["batch0"] = g * size.max_num_seqs
    instance["residues0"] = g * size.max_block_size
    instance["residency0"] = g * size.nodes
    instance["node0"] = e * size.nodes
    instance["poll0"] = g * size.polls
    instance["polls"] = size.polls
    instance["free_blocks"] = engines["kv_blocks"]
    instance["reported"]["free_blocks"] = engines["kv_blocks"]
    ready = n if fleet.scaling is None else fleet.scaling.ready
    instance["life"] = np.where(np.arange(n) < ready, STATE_READY, STATE_ABSENT)
    instance["billed_from_s"] = np.where(np.arange(n) < ready, 0.0, np.nan)
    state.next_boundary[first : first + size.instances] = (np.inf, -np.inf)
    _clear(state.residues[first * size.max_block_size : (first + n) * size.max_block_size])
    nodes = slice(first * size.nodes, (first + n) * size.nodes)
    _clear(state.residency[nodes])
    _clear(state.indexed[nodes])
    views = state.view_instance[first : first + size.instances]
    _clear(views)
    for i, profile in enumerate(fleet.profiles):
        _plain(views)[i] = _static_view(profile)
    views["slot"][:n] = np.arange(n)
    if fleet.pools is not None:
        instance["role"] = views["role"][:n] = [ROLES.index(role) for role in fleet.roles]
    if size.transfers:
        state.transfer["source"][these] = NIL


def load_env(
    state: State,
    size: Capacity,
    e: int,
    fleet: FleetConfig,
    *,
    seed: int,
    leap: bool,
    stop_s: float,
    kinds: Collection[int] = (KIND_DISPATCH,),
) -> None:
    """Set the environment's own record: configuration, no requests, all slots free; `kinds` of decision are asked."""
    _clear(state.env[e : e + 1])
    env = state.env[e]
    env["instances"] = len(fleet.profiles)
    ready = fleet.roles if fleet.scaling is None else fleet.roles[: fleet.scaling.ready]
    env["ready_to_prefill"] = sum(role != "decode" for role in ready)
    env["ready_to_decode"] = sum(role != "prefill" for role in ready)
    env["instance0"] = e * size.instances
    env["row0"] = e * size.rows
    env["slot0"] = size.environments * size.instances + e * size.slots
    env["slots"] = size.slots
    env["node0"] = e * size.nodes
    env["released0"] = e * size.closed_rows
    env["deadline0"] = e * size.rows
    env["target0"] = e * size.classes
    env["next_hold_s"] = np.inf
    for name in ("decision_slot", "candidates_kind", "returned_head", "source", "prefill_choice", "prefilled_head"):
        env[name] = NIL
    env["completion_s"] = -1.0
    env["seed"] = np.uint64(seed)
    env["leap"] = leap
    env["stop_s"] = stop_s
    env["hold_interval_s"] = fleet.hold_interval_s
    env["max_hold_s"] = fleet.max_hold_s
    env["poll_interval_s"] = fleet.telemetry.poll_interval_s
    env["poll_delay_s"] = fleet.telemetry.poll_delay_s
    env["engine_reported"] = fleet.telemetry.engine_reported
    env["sample_interval_s"] = np.inf
    env["track_targets"] = size.track_targets
    env["matched_dirty"] = 1
    env["classes"] = len(fleet.slo_classes)
    for k, slo in enumerate(fleet.slo_classes):
        state.target[e * size.classes + k] = (slo.ttft_s, slo.ttft_s_per_prompt_token, slo.tpot_s)
    env["free_slot"] = NIL
    _load_moves(env, fleet, kinds)
    _load_scaling(env, fleet, kinds)
    _load_pools(env, fleet, kinds)
    if fleet.shared_cache is not None:
        _load_shared_cache(state, size, e, fleet, fleet.shared_cache)
    env["failure0"] = e * size.failures
    failures = Failures() if fleet.failures is None else fleet.failures
    given = [(time_s, max(0.0, time_s - failures.notice_s), instance) for time_s, instance in sorted(failures.at)]
    env["failures"] = len(given)
    state.failure[e * size.failures : e * size.failures + len(given)] = given
    env["mtbf_s"] = failures.mtbf_s
    env["repair_s"] = failures.repair_s
    env["restart"] = failures.requests == "restart"
    env["max_restarts"] = failures.max_restarts
    _clear(state.view_request[e : e + 1])
    _clear(state.view_fleet[e : e + 1])


def _load_moves(env: np.void, fleet: FleetConfig, kinds: Collection[int]) -> None:
    """When the policy is asked for a SOURCE, and how a request moves."""
    moves = fleet.rebalancing
    env["rebalance_interval_s"] = np.inf
    if moves is None or KIND_SOURCE not in kinds:
        return
    env["rebalance_interval_s"] = moves.interval_s
    env["max_pairs"] = len(fleet.profiles) if moves.max_pairs is None else moves.max_pairs
    env["request_choice"] = REQUEST_CHOICES.index(moves.choice)
    env["protocol"] = PROTOCOLS.index(moves.protocol)
    for name in ("round_trip_s", "bandwidth_bytes_per_s", "slowdown", "max_stages", "last_stage_blocks"):
        env[name] = getattr(moves, name)


def _load_scaling(env: np.void, fleet: FleetConfig, kinds: Collection[int]) -> None:
    """When the policy is asked for SCALE, and what that takes."""
    scaling = fleet.scaling
    env["scale_first_s"] = env["scale_interval_s"] = np.inf
    if scaling is None or KIND_SCALE not in kinds:
        return
    env["max_instances"] = len(fleet.profiles) if scaling.max_instances is None else scaling.max_instances
    env["scale_first_s"] = scaling.first_s
    env["scale_interval_s"] = scaling.interval_s
    for name in ("min_instances", "start_up_s", "drain_deadline_s"):
        env[name] = getattr(scaling, name)


def _load_pools(env: np.void, fleet: FleetConfig, kinds: Collection[int]) -> None:
    """How requests go from prefill to decode."""
    if fleet.pools is None:
        return
    env["pools"] = 1
    env["transfers"] = 1
    env["knows_prefill"] = KIND_PREFILL in kinds
    env["knows_decode"] = KIND_DECODE in kinds
    env["first_token_from_prefill"] = fleet.pools.first_token_from == "prefill"
    env["decode_after_prefill"] = fleet.pools.decode_choice == "after_prefill"
    env["pull_round_trip_s"] = fleet.pools.round_trip_s
    env["pull_bandwidth_bytes_per_s"] = fleet.pools.bandwidth_bytes_per_s


def _load_shared_cache(state: State, size: Capacity, e: int, fleet: FleetConfig, cache: SharedCache) -> None:
    """An empty store."""
    env = state.env[e]
    env["shared_cache"] = 1
    env["transfers"] = 1
    block_bytes = fleet.profiles[0].kv_bytes_per_token * fleet.profiles[0].block_size
    env["shared_capacity_blocks"] = int(cache.capacity_bytes // block_bytes)
    env["shared_head"] = env["shared_tail"] = NIL
    env["shared_ttl_s"] = cache.ttl_s
    env["shared_round_trip_s"] = cache.round_trip_s
    env["shared_bandwidth_bytes_per_s"] = cache.bandwidth_bytes_per_s
    env["update0"] = e * size.updates
    env["updates"] = len(cache.updates_s)
    state.update["time_s"][e * size.updates : e * size.updates + len(cache.updates_s)] = sorted(cache.updates_s)
    _clear(state.shared[e * size.nodes : (e + 1) * size.nodes])


def load_table(state: State, size: Capacity, e: int, table: RequestTable) -> None:
    """The requests of an episode, and the prefix tree that they share, in the environment's part of the state."""
    rows = state.row[e * size.rows : e * size.rows + len(table)]
    nodes = state.node[e * size.nodes : e * size.nodes + len(table.node_parent)]
    _write_table(rows, table)
    _write_nodes(nodes, table)
    expect_table(state, e, table)


def expect_table(state: State, e: int, table: RequestTable) -> None:
    """Tell environment `e` of the requests that its part of the state holds."""
    env = state.env[e]
    env["rows"] = len(table)
    env["cursor"] = 0
    env["nodes"] = len(table.node_parent)
    env["closed_loop"] = not np.isnan(table.think_s).all()
