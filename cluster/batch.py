"""Many clusters in one state: what the environments are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import loading
from fleetpilot.cluster.config import FleetConfig
from fleetpilot.cluster.lifecycle import prepare
from fleetpilot.cluster.memory import handle
from fleetpilot.cluster.state import Capacity, State, allocate, as_records, copy_state, restore_state
from fleetpilot.fleet.jit import UNCOMPILED
from fleetpilot.fleet.view import KIND_DISPATCH, FleetView
from fleetpilot.workloads.table import RequestTable


class ClusterBatch:
    """`size.environments` clusters of up to `size.instances` instances.

    Attributes:
        state: the arrays.
        handle: what kernels take for them.
        view: (E, N), (E,) and (E,) live records; copy what is kept.
    """

    def __init__(self, size: Capacity):
        self.size = size
        self.state: State = allocate(size)
        self.handle: Any = handle(self.state)
        records = as_records(self.state) if UNCOMPILED else self.state
        shape = (size.environments, size.instances)
        self.view = FleetView(records.view_instance.reshape(shape), records.view_request, records.view_fleet)

    def load(
        self,
        e: int,
        fleet: FleetConfig,
        table: RequestTable,
        *,
        seed: int,
        stop_s: float,
        engines: NDArray[np.void] | None = None,
        kinds: Collection[int] = (KIND_DISPATCH,),
    ) -> None:
        """Reset environment `e` to an idle fleet with these requests to come; no event has happened yet.

        Args:
            e: index of the environment.
            fleet: its fleet.
            table: its requests.
            seed: of tie breaks and jitter.
            stop_s: when the run ends.
            engines: `ENGINE` records that replace the profiles' constants.
            kinds: of decision that are asked for.
        """
        loading.load_fleet(self.state, self.size, e, fleet, engines)
        loading.load_env(self.state, self.size, e, fleet, seed=seed, leap=True, stop_s=stop_s, kinds=kinds)
        loading.load_table(self.state, self.size, e, table)
        prepare(self.handle, e)

    def save(self) -> State:
        """A copy of everything, for `restore`."""
        return copy_state(self.state)

    def restore(self, saved: State) -> None:
        """Go on from a saved copy."""
        restore_state(self.state, saved)
