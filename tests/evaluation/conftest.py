"""Hand-made logs: what a run would have recorded, written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetpilot.cluster.state import FINISHED, MIGRATION_LOG, REQUEST_LOG, SAMPLE

Rows = Callable[..., NDArray[np.void]]

INSTANCES = np.dtype(
    [
        ("busy_s", "f8"),
        ("alive_s", "f8"),
        ("preemptions", "i8"),
        ("prefix_queries_tokens", "i8"),
        ("prefix_hits_tokens", "i8"),
        ("kv_blocks", "i4"),
    ]
)


def _requests(*rows: dict[str, Any]) -> NDArray[np.void]:
    """One row per dict; a request that says nothing arrived at 0, never went further and is counted as finished."""
    table = np.zeros(len(rows), REQUEST_LOG)
    table["row"] = np.arange(len(rows))
    table["instance"] = 0
    table["status"] = FINISHED
    for name in ("dispatch_s", "admitted_s", "first_token_s", "finish_s"):
        table[name] = np.nan
    for row, values in zip(table, rows, strict=True):
        for name, value in values.items():
            row[name] = value
    return table


def _samples(*rows: dict[str, Any]) -> NDArray[np.void]:
    table = np.zeros(len(rows), SAMPLE)
    for row, values in zip(table, rows, strict=True):
        for name, value in values.items():
            row[name] = value
    return table


@pytest.fixture
def requests() -> Rows:
    return _requests


@pytest.fixture
def samples() -> Rows:
    return _samples


@pytest.fixture
def make_log() -> Callable[..., Any]:
    """A log of the given requests and samples, of instances with 100 KV blocks each."""

    def make(
        requests: NDArray[np.void],
        samples: NDArray[np.void] | None = None,
        *,
        instances: int = 1,
        gaps_s: tuple[float, ...] = (),
        migrations: tuple[tuple[Any, ...], ...] = (),
        **counters: Any,
    ) -> Any:
        table = np.zeros(instances, INSTANCES)
        table["kv_blocks"] = 100
        for name, value in counters.items():
            table[name] = value
        edges = np.geomspace(1e-4, 1e3, 2000)
        return SimpleNamespace(
            requests=requests,
            samples=np.zeros(0, SAMPLE) if samples is None else samples,
            migrations=np.array(list(migrations), MIGRATION_LOG),
            itl=(edges, np.histogram(gaps_s, edges)[0]),
            instances=table,
            end_s=100.0,
            decisions=len(requests),
            held_s=0.0,
        )

    return make
