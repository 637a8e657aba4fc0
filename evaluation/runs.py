"""One run: made, measured and stored, as a JSON and four Parquet files under one stem.

``<stem>.json`` (config, provenance, metrics) is written last and atomically, so a run that has it is complete.
``<stem>.requests.parquet`` has one row per request, ``<stem>.samples.parquet`` one per instance and sample,
``<stem>.itl.parquet`` one per bin of the histogram of gaps between tokens, ``<stem>.migrations.parquet`` one per
migration that was begun.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import recfunctions
from numpy.typing import NDArray

from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.provenance import to_json
from fleetpilot.workloads.selection import offered_s

if TYPE_CHECKING:
    from fleetpilot.cluster import FleetConfig, RunLog
    from fleetpilot.fleet.policy import Policy
    from fleetpilot.workloads import RequestTable


MAX_SAMPLES = 100_000_000
"""Samples of a run, at most: 3 GB of memory."""


@dataclass(frozen=True)
class Outcome:
    """A run in memory.

    Attributes:
        log: what happened.
        scored: (n,) which requests count.
        summary: what was measured, as plain JSON values: under the result names of ``vllm bench serve``, and ours under
            ``metrics``.
    """

    log: RunLog
    scored: NDArray[np.bool_]
    summary: dict[str, Any]

    def write(self, stem: Path, origin: Mapping[str, object]) -> StoredRun:
        """Store it under a stem, with what is to be known of where it came from."""
        return self.files(origin).write(stem)

    def files(self, origin: Mapping[str, object]) -> RunFiles:
        """What would be stored."""
        requests = recfunctions.append_fields(self.log.requests, "scored", self.scored, usemask=False)
        tables = {
            "requests": requests,
            "samples": self.log.samples,
            "itl": metrics.itl_bins(self.log),
            "migrations": self.log.migrations,
        }
        return RunFiles({name: _parquet(rows) for name, rows in tables.items()}, to_json({**self.summary, **origin}))


@dataclass(frozen=True)
class RunFiles:
    """A run's files before they are written, perhaps by another machine than the one that made them.

    Attributes:
        tables: the Parquet files by name.
        summary: the JSON.
    """

    tables: dict[str, bytes]
    summary: str

    def write(self, stem: Path) -> StoredRun:
        """Write them under a stem, the summary last."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        for name, content in self.tables.items():
            _with_suffix(stem, f"{name}.parquet").write_bytes(content)
        write_atomically(_with_suffix(stem, "json"), self.summary)
        return StoredRun(stem, json.loads(self.summary))


def run_one(
    table: RequestTable,
    fleet: FleetConfig,
    policy: Policy,
    *,
    seed: int = 0,
    warmup_share: float = 0.1,
    sample_interval_s: float = 1.0,
) -> Outcome:
    """Simulate one policy on one table and measure it.

    Args:
        table: the requests.
        fleet: the instances and what a dispatcher sees of them.
        policy: decides.
        seed: of tie-breaks.
        warmup_share: share of the arrivals' span that is not scored.
        sample_interval_s: seconds between samples of the instances.
    """
    from fleetpilot.cluster import simulate

    check_samples(table, len(fleet.profiles), sample_interval_s)
    started = time.perf_counter()
    log = simulate(table, fleet, policy, seed=seed, sample_interval_s=sample_interval_s)
    wall_s = time.perf_counter() - started
    window = metrics.window_after_warmup(table, warmup_share)
    scored = window.contains(offered_s(table))
    summary = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": "fleetpilot-simulator",
        "label": policy.name,
        "workload": table.name,
        "seed": seed,
        **metrics.vllm_bench_result(log, scored, window, fleet.slo_classes),
        "metrics": metrics.summary(log, scored, window, fleet.slo_classes),
        "simulated_s": log.end_s,
        "wall_s": wall_s,
        "policy_counts": getattr(policy, "counts", None),  # of a learned policy
    }
    return Outcome(log, scored, summary)


def check_samples(table: RequestTable, instances: int, sample_interval_s: float) -> None:
    """Refuse a run that would take more samples than memory holds.

    Raises:
        ValueError: naming the table, its span and the bound.
    """
    span_s = max(table.span_s, float(np.nanmax(table.think_s, initial=0.0)))
    samples = span_s / sample_interval_s * instances
    if samples > MAX_SAMPLES:
        raise ValueError(
            f"{table.name}: requests over {span_s:.3g} s on {instances} instances: {samples:.3g} samples, one per "
            f"instance every {sample_interval_s:g} s: expected at most {MAX_SAMPLES:,}: a higher rate or fewer requests"
        )


@dataclass(frozen=True)
class StoredRun:
    """A run on disk.

    Attributes:
        stem: path of its files, without their suffixes.
        summary: what ``<stem>.json`` says.
    """

    stem: Path
    summary: dict[str, Any]

    @classmethod
    def read(cls, stem: Path) -> StoredRun | None:
        """The run, or None if it is not there or not complete."""
        try:
            return cls(stem, json.loads(_with_suffix(stem, "json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def requests(self) -> NDArray[np.void]:
        """(n,) ``RunLog.requests`` and the column ``scored`` (bool)."""
        return _read_parquet(_with_suffix(self.stem, "requests.parquet"))

    def scored_requests(self) -> NDArray[np.void]:
        """The requests in the scored window."""
        requests = self.requests()
        return requests[requests["scored"]]

    def samples(self) -> NDArray[np.void]:
        """(t * instances,) ``RunLog.samples``."""
        return _read_parquet(_with_suffix(self.stem, "samples.parquet"))

    def itl(self) -> NDArray[np.void]:
        """(m,) `metrics.BIN` of the gaps between tokens."""
        return _read_parquet(_with_suffix(self.stem, "itl.parquet"))

    def migrations(self) -> NDArray[np.void]:
        """(m,) ``RunLog.migrations``."""
        return _read_parquet(_with_suffix(self.stem, "migrations.parquet"))


def _with_suffix(stem: Path, suffix: str) -> Path:
    return stem.with_name(f"{stem.name}.{suffix}")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there completely or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def _parquet(rows: NDArray[np.void]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pa.table({name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()}), buffer)
    return buffer.getvalue()


def _read_parquet(path: Path) -> NDArray[np.void]:
    from pyarrow import parquet

    table = parquet.read_table(path)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    rows = np.empty(table.num_rows, np.dtype([(name, values.dtype) for name, values in columns.items()]))
    for name, values in columns.items():
        rows[name] = values
    return rows
