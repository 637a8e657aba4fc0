"""Steps rows of environments, in this thread or in several."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.batch import ClusterBatch
from fleetpilot.envs.kernel import Outputs, step_rows
from fleetpilot.fleet.features import feature_scratch


class Stepper:
    """Steps the rows of a batch."""

    def __init__(self, cluster: ClusterBatch, episodes: NDArray[np.void], weights: NDArray[np.float64], threads: int):
        self._fixed: tuple[Any, ...] = (episodes, weights, *vars(cluster.view).values())
        self._handle = cluster.handle
        self._rows = len(episodes)
        self._scratch = feature_scratch(cluster.size.instances)

    def step(self, actions: NDArray[np.int64], skip: NDArray[np.bool_], out: Outputs) -> int:
        ended = step_rows(self._handle, 0, self._rows, actions, skip, *self._fixed, self._scratch, *out)
        if ended < 0:
            raise RuntimeError(f"row {-1 - ended}: no event is due")
        return int(ended)

    def close(self) -> None:
        pass
