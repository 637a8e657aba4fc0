"""Stepping the rows of a batch in one thread or in several."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.batch import ClusterBatch
from fleetpilot.envs.kernel import Outputs, step_rows
from fleetpilot.fleet.features import feature_scratch
from fleetpilot.fleet.jit import UNCOMPILED

_LEAD_ROWS = 16
"""So many rows more for the calling thread: the others have to be woken up, and it would have to be if it waited."""

LEAST_US = 100.0
"""A thread that is woken has at least so much to do: waking it costs 15 to 20, and less is not done sooner by two."""

_ROW_US, _INSTANCE_US = 1.3, 0.08
"""Of a step: each row, and each instance of a row (``benchmarks/environment.py``)."""

Job = tuple[NDArray[np.int64], NDArray[np.bool_], Outputs]


class _Part:
    """Some consecutive rows of a batch."""

    def __init__(self, first: int, last: int, cluster: ClusterBatch, fixed: tuple[Any, ...]):
        view, scratch = cluster.view, feature_scratch(cluster.size.instances)
        handles = (cluster.handle,) if UNCOMPILED else np.array([cluster.handle])
        self._rows = handles, first, last
        self._fixed: tuple[Any, ...] = *fixed, view.instances, view.request, view.fleet, scratch

    def step(self, job: Job) -> int:
        """See `step_rows`."""
        actions, skip, out = job
        arguments: tuple[Any, ...] = *self._rows, actions, skip, *self._fixed, *out
        return int(step_rows(*arguments))


class _Worker:
    """A thread of its own for a part. A step takes 0.1 ms: an executor would cost twice as much, and `prange` spins."""

    def __init__(self, part: _Part):
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.results: SimpleQueue[int] = SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(part, self.jobs, self.results), daemon=True)
        self.thread.start()


def _work(part: _Part, jobs: SimpleQueue[Job | None], results: SimpleQueue[int]) -> None:
    while (job := jobs.get()) is not None:
        results.put(part.step(job))


class Stepper:
    """Steps a batch, its rows dealt out to threads once and for all.

    Args:
        cluster: the batch.
        episodes: (E,) `EPISODE`.
        metrics: (E, METRICS), written in rows whose episode ends.
        weights: of the reward's components.
        admission: (3,) `fleetpilot.fleet.admission.admission_array`.
        deciders: of `step_rows`: the kinds of decision that are the agent's, the policy that answers the others, and
            the kinds that this one knows.
        threads: at most, this one included: each has a row at least, and `LEAST_US` to do.

    Attributes:
        threads: that step.
    """

    def __init__(
        self,
        cluster: ClusterBatch,
        episodes: NDArray[np.void],
        metrics: NDArray[np.float64],
        weights: NDArray[np.float64],
        admission: NDArray[np.float64],
        deciders: tuple[int, Any, int],
        threads: int,
    ):
        rows = len(episodes)
        step_us = rows * (_ROW_US + _INSTANCE_US * cluster.size.instances)
        threads = max(1, min(threads, rows, int(step_us / LEAST_US)))
        lead = min(_LEAD_ROWS, rows // 4) if threads > 1 else 0
        edges = [0, *(lead + (rows - lead) * part // threads for part in range(1, threads + 1))]
        parts = [
            _Part(edges[k], edges[k + 1], cluster, (episodes, metrics, weights, admission, *deciders))
            for k in range(threads)
        ]
        self.threads = threads
        self._own = parts[0]
        self._workers = [_Worker(part) for part in parts[1:]]

    def step(self, actions: NDArray[np.int64], skip: NDArray[np.bool_], out: Outputs) -> int:
        """Step all rows but those to skip; returns how many episodes ended.

        Raises:
            RuntimeError: a row is in a state that no decision ends.
        """
        job = actions, skip, out
        for worker in self._workers:
            worker.jobs.put(job)
        ended = self._own.step(job)
        for worker in self._workers:
            result = worker.results.get()
            ended = ended + result if min(ended, result) >= 0 else min(ended, result)
        if ended < 0:
            raise RuntimeError(f"row {-1 - ended}: requests are in the system and no event is due")
        return ended

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.jobs.put(None)
            worker.thread.join()
        self._workers = []
