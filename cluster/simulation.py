"""One cluster, one workload, one policy: `simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import conservation, kernel, loading
from fleetpilot.cluster.config import FleetConfig, Telemetry
from fleetpilot.cluster.lifecycle import prepare
from fleetpilot.cluster.memory import handle
from fleetpilot.cluster.state import (
    ENDED,
    ITL_BINS,
    ITL_BINS_PER_OCTAVE,
    ITL_LOWEST_EXPONENT,
    MIGRATION_LOG,
    NEED_DECISION,
    NEED_FLUSH,
    NEED_ROWS,
    NEED_SLOTS,
    NEVER_ARRIVED,
    NIL,
    REQUEST_LOG,
    SAMPLE,
    STUCK,
    Capacity,
    State,
    allocate,
    as_records,
    grown,
)
from fleetpilot.fleet.jit import UNCOMPILED
from fleetpilot.fleet.policy import CompiledPolicy, OracleBound, Policy, kinds_of
from fleetpilot.fleet.view import FleetView
from fleetpilot.workloads.table import RequestTable

Progress = Callable[[float, int], None]
"""``progress(simulated seconds, requests ended)``."""

INSTANCE_LOG = np.dtype(
    [
        ("busy_s", "f8"),
        ("alive_s", "f8"),
        ("iterations", "i8"),
        ("decode_steps", "i8"),
        ("preemptions", "i8"),
        ("prefix_queries_tokens", "i8"),
        ("prefix_hits_tokens", "i8"),
        ("dispatched", "i8"),
        ("kv_blocks", "i8"),
        ("block_size", "i8"),
    ]
)

_RECORDS_PER_FLUSH = 8_192
_FIRST_SLOTS = 4_096


@dataclass(frozen=True)
class RunLog:
    """What happened in a run.

    Attributes:
        requests: (n,) `REQUEST_LOG` records by row; one per row of the table.
        samples: (k * N,) `SAMPLE` records, all instances at each sampling time.
        migrations: (m,) `MIGRATION_LOG` records of migrations that ended, in order of their ends.
        itl_edges_s: (m + 1,) edges of the histogram of gaps between tokens.
        itl_counts: (m,) gaps in each bin, pooled over all requests.
        instances: (N,) `INSTANCE_LOG` records.
        end_s: time of the last event.
        decisions: dispatches.
        forced: dispatches that the policy did not choose (held too long, or an illegal choice).
        invalid: illegal choices.
        held_s: sum over requests of the time between arrival and dispatch.
        meta: the run's configuration, JSON-serialisable.
    """

    requests: NDArray[np.void]
    samples: NDArray[np.void]
    migrations: NDArray[np.void]
    itl_edges_s: NDArray[np.float64]
    itl_counts: NDArray[np.int64]
    instances: NDArray[np.void]
    end_s: float
    decisions: int
    forced: int
    invalid: int
    held_s: float
    meta: dict[str, object] = field(default_factory=dict)

    @property
    def itl(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Edges and counts of the histogram of gaps between tokens."""
        return self.itl_edges_s, self.itl_counts


def simulate(
    table: RequestTable,
    fleet: FleetConfig,
    policy: Policy,
    seed: int = 0,
    *,
    sample_interval_s: float | None = 1.0,
    stop_s: float | None = None,
    leap: bool = True,
    check: bool = False,
    progress: Progress | None = None,
) -> RunLog:
    """Run a workload on a fleet under a policy until every request has ended.

    Args:
        table: the requests.
        fleet: instances and dispatcher.
        policy: asked for every dispatch; reset first.
        seed: of the policy's tie breaks and of jitter. Arrivals and lengths are the table's and do not depend on it.
        sample_interval_s: time between instance samples; None for none.
        stop_s: end the run at this time; requests still in the system are logged as cut, later ones as never arrived.
        leap: False steps one iteration per event (same results, slower; for tests).
        check: verify conservation (`cluster.conservation`) at every decision and at the end; slow.
        progress: called now and then.

    Raises:
        ValueError: if a request cannot be served by some instance, or a parameter is out of range.
    """
    if isinstance(policy, OracleBound):
        table, fleet = _true_lengths(table), _exact_loads(fleet)
    run = _Run(fleet, policy, seed, sample_interval_s, stop_s, leap, check)
    loading.check_fits(table, fleet)
    run.allocate(table)
    requests = np.zeros(len(table), REQUEST_LOG)
    requests["row"] = NIL
    for ended in run.parts(iter(()), progress):
        _place(ended, requests)
    _complete(requests, table)
    return run.result(requests, table.name)


def simulate_stream(
    parts: Iterable[RequestTable],
    fleet: FleetConfig,
    policy: Policy,
    seed: int = 0,
    *,
    on_ended: Callable[[NDArray[np.void]], None],
    sample_interval_s: float | None = None,
    progress: Progress | None = None,
) -> RunLog:
    """Run a workload that comes in consecutive parts (`workloads.split`, `workloads.stream`) in bounded memory.

    Args:
        parts: open-loop tables without shared prefixes, later parts later in time.
        on_ended: gets `REQUEST_LOG` records of requests that ended, in order of their end per instance; `row` counts
            over all parts.
        fleet: as for `simulate`.
        policy: as for `simulate`.
        seed: as for `simulate`.
        sample_interval_s: as for `simulate`.
        progress: as for `simulate`.

    Returns:
        The run, with no requests in it.
    """
    if isinstance(policy, OracleBound):
        parts, fleet = map(_true_lengths, parts), _exact_loads(fleet)
    run = _Run(fleet, policy, seed, sample_interval_s, None, True)
    source = iter(parts)
    first = next(source, None)
    if first is None:
        raise ValueError("parts: got none, expected at least one table")
    run.check_part(first)
    run.allocate(first, more=True)
    for ended in run.parts(source, progress):
        on_ended(ended.copy())
    return run.result(np.empty(0, REQUEST_LOG), first.name)


def _true_lengths(table: RequestTable) -> RequestTable:
    """What an oracle bound sees instead: every prediction is the answer's true length."""
    return table.replace(predicted_output_tokens=table.output_tokens.astype(np.float32))


def _exact_loads(fleet: FleetConfig) -> FleetConfig:
    """The fleet as an oracle bound sees it: engines report what they hold, exactly and at once."""
    return replace(fleet, telemetry=Telemetry(fleet.telemetry.poll_interval_s, engine_reported=True))


class _Run:
    """A state for one environment, and what its kernel asks for while it runs."""

    def __init__(
        self,
        fleet: FleetConfig,
        policy: Policy,
        seed: int,
        sample_interval_s: float | None,
        stop_s: float | None,
        leap: bool,
        check: bool = False,
    ):
        if sample_interval_s is not None and not (np.isfinite(sample_interval_s) and sample_interval_s > 0):
            raise ValueError(f"sample_interval_s = {sample_interval_s!r}: expected a finite time > 0 or None")
        if stop_s is not None and not (np.isfinite(stop_s) and stop_s > 0):
            raise ValueError(f"stop_s = {stop_s!r}: expected a finite time > 0 or None")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed = {seed}: expected a whole number from 0 to 2**64 - 1")
        self.fleet = fleet
        self.policy = policy
        self.seed = seed
        self.sample_interval_s = sample_interval_s
        self.stop_s = stop_s
        self.leap = leap
        self.check = check
        self.samples: list[NDArray[np.void]] = []
        self.migrations: list[NDArray[np.void]] = []
        self.ended = 0
        self.end_s = 0.0  # the last end so far
        self.last_arrival_s = 0.0  # of the parts so far
        self.state: State
        self.handle: Any
        self.views: tuple[NDArray[np.void], ...]
        self.size: Capacity

    def allocate(self, table: RequestTable, *, more: bool = False) -> None:
        """Make the state and load the first requests."""
        slots = max(1, min(len(table), _FIRST_SLOTS))
        self.size = loading.capacity_for(
            [self.fleet],
            rows=0,  # `_load` puts its own arrays in
            slots=slots,
            nodes=len(table.node_parent),
            closed_rows=int(np.count_nonzero(~np.isnan(table.think_s))),
            log=max(_RECORDS_PER_FLUSH, 2 * slots),
            samples=0 if self.sample_interval_s is None else max(_RECORDS_PER_FLUSH, len(self.fleet.profiles)),
            itl=True,
            migrations=0 if self.fleet.rebalancing is None else max(_RECORDS_PER_FLUSH, len(self.fleet.profiles)),
        )
        self._use(allocate(self.size))
        loading.load_fleet(self.state, self.size, 0, self.fleet)
        stop_s = np.inf if self.stop_s is None else self.stop_s
        kinds = kinds_of(self.policy)
        loading.load_env(
            self.state, self.size, 0, self.fleet, seed=self.seed, leap=self.leap, stop_s=stop_s, kinds=kinds
        )
        prepare(self.handle, 0)
        self._load(table)
        env = self.state.env
        env["track_log"] = 1
        env["more_rows"] = more
        if self.sample_interval_s is not None:
            env["sample_interval_s"] = self.sample_interval_s
        self.policy.reset(1, self.seed)

    def _use(self, state: State) -> None:
        self.state = state
        self.handle = handle(state)
        views = as_records(state) if UNCOMPILED else state
        self.views = (views.view_instance, views.view_request, views.view_fleet)

    def check_part(self, table: RequestTable) -> None:
        """A part of a stream must not refer to other parts."""
        if len(table.node_parent) or np.any(table.parent >= 0):
            raise ValueError(f"{table.name}: expected parts without sessions and shared prefixes")
        if len(table) and table.arrival_s[0] < self.last_arrival_s:
            raise ValueError(
                f"{table.name}: arrival_s[0] = {table.arrival_s[0]}: expected at least {self.last_arrival_s}, "
                "the last arrival of the parts before"
            )
        self.last_arrival_s = max(self.last_arrival_s, table.span_s)
        loading.check_fits(table, self.fleet)

    def parts(self, source: Iterator[RequestTable], progress: Progress | None) -> Iterator[NDArray[np.void]]:
        """Run to the end; yields the requests that have ended since, in an array that is written over afterwards."""
        while True:
            status = self._advance()
            if progress is not None:
                progress(float(self.state.env["time_s"][0]), self.ended + int(self.state.counts["log"][0]))
            if status == NEED_FLUSH:
                yield self._flush()
            elif status == NEED_SLOTS:
                self._grow_slots()
            elif status == NEED_ROWS:
                self._load_part(next(source, None))
            elif status == STUCK:
                raise RuntimeError(f"{int(self.state.env['active'][0])} requests are in the system and no event is due")
            elif status == ENDED:
                kernel.cut(self.handle, 0)
                yield self._flush()
                return

    def _advance(self) -> int:
        """Let the kernel run until it needs more than a decision."""
        if isinstance(self.policy, CompiledPolicy) and not self.check:
            return int(kernel.run(self.handle, 0, self.policy.choose, *self.views))
        while True:
            status = int(kernel.advance(self.handle, 0))
            if self.check:
                conservation.check(self.state)
            if status != NEED_DECISION:
                return status
            instances, request, fleet = (array.copy() for array in self.views)
            decision = self.policy.decide(FleetView(instances.reshape(1, -1), request, fleet))
            kernel.apply(self.handle, 0, int(decision.choice[0]))

    def _flush(self) -> NDArray[np.void]:
        """Empty the log and the samples; the log's requests."""
        counts = self.state.counts
        self.samples.append(self.state.sample[: counts["samples"][0]].copy())
        self.migrations.append(self.state.migration_log[: counts["migrations"][0]].copy())
        ended = self.state.log[: counts["log"][0]]
        self.ended += len(ended)
        self.end_s = max(self.end_s, float(np.nanmax(ended["finish_s"], initial=0.0)))
        counts["samples"] = 0
        counts["migrations"] = 0
        counts["log"] = 0
        return ended

    def _grow_slots(self) -> None:
        """Twice as many requests may be in the system at a time."""
        old = self.size.slots
        self.size = Capacity(**{**vars(self.size), "slots": 2 * old, "log": max(self.size.log, 4 * old)})
        slots = grown(self.state.slot, len(self.state.slot) + old)
        slots["row"][len(self.state.slot) :] = NIL
        log = grown(self.state.log, max(len(self.state.log), self.size.log))
        self.state.counts["log_size"] = len(log)
        transfers = self.state.transfer
        if self.size.transfers:
            transfers = grown(transfers, len(slots))
        self._use(self.state._replace(slot=slots, log=log, transfer=transfers))
        self.state.env["slots"] = self.size.slots

    def _load_part(self, table: RequestTable | None) -> None:
        env = self.state.env
        if table is None:
            env["more_rows"] = 0
            return
        self.check_part(table)
        env["row_base"] += env["rows"][0]
        self._load(table)

    def _load(self, table: RequestTable) -> None:
        """Put the requests to come, and the prefix tree that they share, into the state."""
        rows, nodes = loading.row_records(table), loading.node_records(table)
        self._use(self.state._replace(row=rows, node=nodes))
        loading.expect_table(self.state, 0, table)

    def result(self, requests: NDArray[np.void], workload: str) -> RunLog:
        """The log of the run."""
        env = self.state.env[0]
        instance = self.state.instance
        instances = np.zeros(len(instance), INSTANCE_LOG)
        for name in set(INSTANCE_LOG.names or ()) & set(instance.dtype.names or ()):
            instances[name] = instance[name]
        instances["kv_blocks"] = self.state.engine["kv_blocks"]
        instances["block_size"] = self.state.engine["block_size"]
        end_s = max(float(env["time_s"]), self.end_s)
        since_s = np.where(np.isnan(instance["billed_from_s"]), end_s, instance["billed_from_s"])
        instances["alive_s"] = instance["alive_s"] + (end_s - since_s)
        return RunLog(
            requests=requests,
            samples=np.concatenate(self.samples) if self.samples else np.empty(0, SAMPLE),
            migrations=np.concatenate(self.migrations) if self.migrations else np.empty(0, MIGRATION_LOG),
            itl_edges_s=itl_edges_s(),
            itl_counts=self.state.itl["count"].copy(),
            instances=instances,
            end_s=end_s,
            decisions=int(env["decisions"]),
            forced=int(env["forced"]),
            invalid=int(env["invalid"]),
            held_s=float(env["held_s"]),
            meta={
                "workload": workload,
                "policy": self.policy.name,
                "seed": self.seed,
                "instances": [profile.name for profile in self.fleet.profiles],
                "poll_interval_s": self.fleet.telemetry.poll_interval_s,
                "poll_delay_s": self.fleet.telemetry.poll_delay_s,
                "engine_reported": self.fleet.telemetry.engine_reported,
                "stop_s": self.stop_s,
            },
        )


def itl_edges_s() -> NDArray[np.float64]:
    """(ITL_BINS + 1,) edges of the gap histogram in seconds."""
    octave, part = np.divmod(np.arange(ITL_BINS + 1), ITL_BINS_PER_OCTAVE)
    return np.ldexp(0.5 + 0.5 * part / ITL_BINS_PER_OCTAVE, octave + ITL_LOWEST_EXPONENT)


def _place(ended: NDArray[np.void], requests: NDArray[np.void]) -> None:
    """Copy records to where their rows are: as plain bytes, which NumPy copies several times faster than fields."""
    plain = np.dtype((np.void, REQUEST_LOG.itemsize))
    requests.view(plain)[ended["row"]] = ended.view(plain)


def _complete(requests: NDArray[np.void], table: RequestTable) -> None:
    """Write the records of rows that never came to the dispatcher."""
    rows = np.flatnonzero(requests["row"] == NIL)
    absent = np.zeros(len(rows), REQUEST_LOG)
    absent["row"] = rows
    absent["status"] = NEVER_ARRIVED
    absent["instance"] = -1
    absent["prefill_instance"] = -1
    for name in ("dispatch_s", "admitted_s", "first_token_s", "finish_s"):
        absent[name] = np.nan
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "predicted_output_tokens", "priority", "slo_class"):
        absent[name] = getattr(table, name)[rows]
    _place(absent, requests)
