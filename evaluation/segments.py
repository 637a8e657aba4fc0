"""Independent segments of a trace, and loads relative to what a fleet can carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fleetpilot.workloads.selection import equal_windows, row_columns, select
from fleetpilot.workloads.table import NO_PARENT

if TYPE_CHECKING:
    from fleetpilot.cluster import FleetConfig
    from fleetpilot.fleet.profiles import HardwareProfile
    from fleetpilot.workloads import RequestTable

MAX_SPEED_UP = 2.0
"""A real trace is sped up by at most this: beyond, its bursts and its requests' lifetimes no longer belong together."""
BACKLOG = 10_000
"""Requests that a capacity is measured with: many times what is in a batch at one time."""


def cut(table: RequestTable, segments: int) -> tuple[RequestTable, ...]:
    """Cut a trace into consecutive windows of equal length, each with its own clock.

    All turns of a closed-loop chain go with the turn that started it. Shared prefixes stay shared inside a segment.

    Raises:
        ValueError: a window has no request.
    """
    _require_requests(table)
    _, window, length_s = equal_windows(table, segments)
    counts = np.bincount(window, minlength=segments)
    if counts.min() == 0:
        empty = int(counts.argmin())
        raise ValueError(f"{table.name}: window {empty} of {segments} has no request; expected fewer segments")
    if segments == 1:
        return (table,)
    return tuple(
        select(table, window == k, start_s=k * length_s, name=f"{table.name} [{k + 1}/{segments}]")
        for k in range(segments)
    )


WINDOWS = ("all", "development", "test")


def windows_of(segments: tuple[RequestTable, ...], part: str) -> tuple[RequestTable, ...]:
    """The segments for development, every other one from the first on, those for tests, the rest, or all.

    What is chosen by some windows is scored on others; neighbours, so that both see the whole trace.

    Raises:
        ValueError: the part has no segment.
    """
    kept = {"all": segments, "development": segments[::2], "test": segments[1::2]}[part]
    if not kept:
        raise ValueError(f"windows for {part}: none of {len(segments)}; expected at least 2 segments")
    return kept


def _require_requests(table: RequestTable) -> None:
    if not len(table):
        raise ValueError(f"{table.name}: no requests; expected at least one")


# --- load --------------------------------------------------------------------------------------------------------


def rate_rps(table: RequestTable) -> float:
    """Requests offered per second, over the span of the arrivals.

    Raises:
        ValueError: all requests arrive at once, or some are released by others: their rate depends on the answers.
    """
    if np.isnan(table.arrival_s).any():
        raise ValueError(
            f"{table.name}: a closed loop has no rate of its own; expected an open loop for a load (?loop=open)"
        )
    if table.span_s == 0:
        raise ValueError(f"{table.name}: all requests arrive at 0 s; expected a span to take a rate over")
    return len(table) / table.span_s


def capacity_rps(table: RequestTable, fleet: FleetConfig) -> float:
    """Requests per second that a fleet gets through when it never runs out of them.

    Per profile, one instance is given `BACKLOG` requests at once, the table from its start and over again, and its
    admissions are counted between a fifth and four fifths of them. The fleet's capacity is the sum over its instances.
    A load is a rate of requests over it: above 1 the waiting grows without end, however well requests are dispatched.

    A fleet with pools is given `BACKLOG` requests per instance as a whole, in turn to all that prefill and to all that
    decode, and what it finishes is counted: whoever prefills is ahead of who decodes.

    Raises:
        ValueError: an empty table.
    """
    fleet = replace(fleet, rebalancing=None, scaling=None, failures=None)
    if fleet.pools is not None:
        return _backlog_rps(_backlog(table, BACKLOG * len(fleet.profiles)), fleet, "finish_s")
    backlog = _backlog(table)
    per_profile = {
        profile: _backlog_rps(backlog, replace(fleet, profiles=(profile,)), "admitted_s")
        for profile in set(fleet.profiles)
    }
    return sum(per_profile[profile] for profile in fleet.profiles)


def _backlog(table: RequestTable, requests: int = BACKLOG) -> RequestTable:
    """So many requests at 0 s: copies of the table, which share no prefix with each other."""
    _require_requests(table)
    rows = np.arange(requests) % len(table)
    copy = np.arange(requests) // len(table)
    copies, nodes = int(copy[-1]) + 1, len(table.node_parent)
    columns = {name: column[rows] for name, column in row_columns(table).items()}
    columns |= {
        "arrival_s": np.zeros(requests),
        "think_s": np.full(requests, np.nan),
        "parent": np.full(requests, NO_PARENT),
        **{
            name: np.where(columns[name] >= 0, columns[name] + copy * nodes, -1) for name in ("prefix_node", "own_node")
        },
    }
    shift = np.repeat(np.arange(copies) * nodes, nodes)
    node_parent = np.tile(table.node_parent, copies)
    return table.replace(
        **columns,
        node_parent=np.where(node_parent >= 0, node_parent + shift, -1),
        node_end_tokens=np.tile(table.node_end_tokens, copies),
    )


def _backlog_rps(backlog: RequestTable, fleet: FleetConfig, moment: str) -> float:
    from fleetpilot.baselines import load_policy
    from fleetpilot.cluster import simulate

    log = simulate(backlog, fleet, load_policy("round-robin"), sample_interval_s=None)
    times_s = np.sort(log.requests[moment])
    first, last = len(times_s) // 5, len(times_s) * 4 // 5
    return (last - first) / float(times_s[last] - times_s[first])


def at_load(table: RequestTable, fleet: FleetConfig, load: float, capacity: float | None = None) -> RequestTable:
    """The open-loop table with its arrivals sped up or slowed down to a load, as a share of the fleet's capacity.

    Args:
        table: the requests.
        fleet: that serves them.
        load: share of its capacity.
        capacity: of the fleet, in requests/s; by default it is measured (`capacity_rps`).

    Raises:
        ValueError: that would take a speed-up beyond `MAX_SPEED_UP`; or the table is a closed loop.
    """
    if not 0 < load < np.inf:
        raise ValueError(f"load = {load}: expected a finite number > 0")
    capacity = capacity_rps(table, fleet) if capacity is None else capacity
    speed_up = load * capacity / rate_rps(table)
    if speed_up > MAX_SPEED_UP:
        windows = math.ceil(speed_up / MAX_SPEED_UP)
        fewer = "take fewer instances or " if len(fleet.profiles) > 1 else ""
        raise ValueError(
            f"load = {load}: {table.name} would have to run {speed_up:.2f} times as fast for {len(fleet.profiles)} "
            f"instances; expected at most {MAX_SPEED_UP:g} times: {fewer}superpose {windows} windows"
        )
    return table.replace(arrival_s=table.arrival_s / speed_up)


def offered_load(segments: Sequence[RequestTable], fleet: FleetConfig) -> float | None:
    """The load that segments offer on average, as a share of the fleet's capacity; None where they have no rate."""
    span_s = sum(table.span_s for table in segments)
    if not span_s or any(np.isnan(table.arrival_s).any() for table in segments):
        return None
    return sum(map(len, segments)) / span_s / capacity_rps(max(segments, key=len), fleet)


def instances_for_load(table: RequestTable, profile: HardwareProfile, load: float) -> int:
    """The number of instances at which the table's own rate is nearest to a load, at least 1."""
    from fleetpilot.cluster import FleetConfig

    return max(1, round(rate_rps(table) / (load * capacity_rps(table, FleetConfig((profile,))))))
