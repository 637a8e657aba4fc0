"""Links between instances: copies of KV that share them (docs/model.md).

Only fleets with pools or a shared cache keep account of that.

Each instance has one way in and one way out. A transfer is named by a slot: that of the request whose KV is pulled, or
the shadow of the migration from an instance (stock_migration.py), which has that instance's index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.cluster.memory import instance_at, migration_at, transfer_at
from fleetpilot.cluster.state import NIL, SHARED_CACHE
from fleetpilot.fleet.jit import inlined, kernel


@kernel
def begin(
    s: Any,
    env: Any,
    index: int,
    ends: tuple[int, int],
    round_trip_s: float,
    copied_bytes: float,
    bandwidth_bytes_per_s: float,
    time_s: float,
) -> None:
    """So many bytes begin to be copied from one instance, or the shared cache, to an instance: the `ends`."""
    source, destination = ends
    transfer, inst = transfer_at(s, index), instance_at(s, destination)
    transfer.source = source
    transfer.destination = destination
    transfer.since_s = time_s
    transfer.left_s = round_trip_s
    transfer.left_bytes = copied_bytes
    transfer.bandwidth_bytes_per_s = bandwidth_bytes_per_s
    transfer.share = 0
    transfer.end_s = np.inf
    transfer.next = NIL
    if inst.transfers == NIL:
        inst.transfers = index
    else:
        last = inst.transfers
        while transfer_at(s, last).next != NIL:
            last = transfer_at(s, last).next
        transfer_at(s, last).next = index
    inst.inbound += 1
    _count(s, env, source, 1)
    _share(s, env, source, destination, time_s)


@kernel
def end(s: Any, env: Any, index: int, time_s: float) -> None:
    """The transfer is done, or not wanted any more; what it was of is up to the caller."""
    transfer = transfer_at(s, index)
    source, destination = transfer.source, transfer.destination
    inst = instance_at(s, destination)
    if inst.transfers == index:
        inst.transfers = transfer.next
    else:
        before = inst.transfers
        while transfer_at(s, before).next != index:
            before = transfer_at(s, before).next
        transfer_at(s, before).next = transfer.next
    inst.inbound -= 1
    _count(s, env, source, -1)
    _share(s, env, source, destination, time_s)


@inlined
def _count(s: Any, env: Any, source: int, change: int) -> int:
    """Transfers from there, with so many more."""
    if source == SHARED_CACHE:
        env.shared_loads += change
        return env.shared_loads  # type: ignore[no-any-return]
    instance_at(s, source).outgoing += change
    return instance_at(s, source).outgoing  # type: ignore[no-any-return]


@kernel
def _share(s: Any, env: Any, source: int, destination: int, time_s: float) -> None:
    """The transfers that have an end in common with one that begins or ends go on at another speed.

    Those that are due end now, whatever rounding would make of what is left of them.
    """
    for g in range(env.instance0, env.instance0 + env.instances):
        index = instance_at(s, g).transfers
        while index != NIL:
            transfer = transfer_at(s, index)
            if transfer.source == source or g == destination:
                share = max(_count(s, env, transfer.source, 0), instance_at(s, g).inbound)
                if share != transfer.share and transfer.end_s > time_s:
                    _go_on(transfer, share, time_s)
                    if index < env.slot0:
                        migration_at(s, index).end_s = transfer.end_s
                env.next_event_s = min(env.next_event_s, transfer.end_s)
            index = transfer.next


@kernel
def _go_on(transfer: Any, share: int, time_s: float) -> None:
    """From now on the link is shared by so many."""
    if transfer.share > 0:
        spent_s = time_s - transfer.since_s
        waited_s = min(spent_s, transfer.left_s)
        copied_bytes = (spent_s - waited_s) * (transfer.bandwidth_bytes_per_s / transfer.share)
        transfer.left_s -= waited_s
        transfer.left_bytes = max(0.0, transfer.left_bytes - copied_bytes)
        transfer.since_s = time_s
    transfer.share = share
    transfer.end_s = time_s + (transfer.left_s + transfer.left_bytes / (transfer.bandwidth_bytes_per_s / share))


@kernel
def next_end_s(s: Any, env: Any, g: int) -> float:
    """When the next request whose KV the instance pulls or loads is there."""
    time_s = np.inf
    index = instance_at(s, g).transfers
    while index != NIL:
        if index >= env.slot0:
            time_s = min(time_s, transfer_at(s, index).end_s)
        index = transfer_at(s, index).next
    return time_s  # type: ignore[no-any-return]
