"""Migration, lifecycle, failures and pools of docs/model.md a second time, on the engines of tests/oracle.py.

One event at a time, and after each of them conservation is asserted: every block, every request. Draws are those of the
run's seed 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from oracle import (
    Block,
    Engine,
    Job,
    Memory,
    OracleInstance,
    OracleRequest,
    OracleResult,
    Owner,
    Span,
    check_fits,
    path_of,
    split_mix,
)

from fleetpilot.cluster.config import Failures, Pools, Rebalancing, Scaling, SharedCache
from fleetpilot.workloads.table import RequestTable

OUTCOMES = (
    "completed",
    "moved",  # a waiting request, without a copy
    "no_space",
    "finished",
    "preempted",
    "too_long",
    "source_died",
    "destination_died",
)

ABSENT, STARTING, READY, DRAINING, FAILED = range(5)
REJECT = -2
"""An answer to a request of which nothing has been answered: it ends."""

(
    _NOTICE,
    _FAILURE,
    _DRAWN_FAILURE,
    _STARTED,
    _DEADLINE,
    _COPIED,
    _PULLED,
    _CAME_BACK,
    _ARRIVAL,
    _RETRY,
    _SOURCE_TICK,
    _SCALE_TICK,
    _SAMPLE,
    _BOUNDARY,
) = range(14)
"""Events, in the order in which those of the same time happen."""

_MOST_EVENTS = 200_000

SHARED = -1
"""In place of the instance that KV comes from."""

UNDECIDED = -1
"""The policy says after the prefill where a request decodes."""


@dataclass(frozen=True)
class OracleFleet:
    """The dispatcher's configuration; names as in `fleetpilot.cluster.FleetConfig`."""

    instances: tuple[OracleInstance, ...]
    rebalancing: Rebalancing | None = None
    scaling: Scaling | None = None
    failures: Failures | None = None
    pools: Pools | None = None
    shared_cache: SharedCache | None = None
    hold_interval_s: float = 0.1
    max_hold_s: float = 1e6


@dataclass(frozen=True)
class Question:
    """What a policy is asked, and what it can see of each instance then (lists in the order of the instances)."""

    time_s: float
    kind: str  # dispatch, prefill, decode, source, destination, scale
    candidates: list[bool]
    may_hold: bool
    may_reject: bool
    state: list[int]
    migrating: list[bool]
    origin: list[bool]
    in_flight: list[int]
    unstarted: list[int]
    unstarted_prompt_tokens: list[int]
    started_prompt_tokens: list[int]
    streamed_tokens: list[int]
    predicted_output_tokens: list[int]


@dataclass(eq=False)
class Transfer:
    """Bytes on their way; `round_trip_s` and `bytes_left` are what was left at `since_s`."""

    source: int  # or SHARED
    destination: int
    round_trip_s: float
    bytes_left: float
    bandwidth_bytes_per_s: float
    since_s: float
    share: int = 0  # transfers on the busier one of its two links
    end_s: float = math.inf

    def go_on(self, share: int, now_s: float) -> None:
        if self.share:
            spent_s = now_s - self.since_s
            waited_s = min(spent_s, self.round_trip_s)
            self.round_trip_s -= waited_s
            copied = (spent_s - waited_s) * (self.bandwidth_bytes_per_s / self.share)
            self.bytes_left = max(0.0, self.bytes_left - copied)
            self.since_s = now_s
        self.share = share
        self.end_s = now_s + (self.round_trip_s + self.bytes_left / (self.bandwidth_bytes_per_s / share))


class Links:
    """All that is being copied between instances."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def begin(self, transfer: Transfer) -> Transfer:
        self.transfers.append(transfer)
        self.share(transfer, transfer.since_s)
        return transfer

    def end(self, transfer: Transfer, now_s: float) -> None:
        self.transfers.remove(transfer)
        self.share(transfer, now_s)

    def share(self, changed: Transfer, now_s: float) -> None:
        for t in self.transfers:
            if t.source == changed.source or t.destination == changed.destination:
                outgoing = sum(other.source == t.source for other in self.transfers)
                inbound = sum(other.destination == t.destination for other in self.transfers)
                if max(outgoing, inbound) != t.share and t.end_s > now_s:
                    t.go_on(max(outgoing, inbound), now_s)


class Store:
    """The KV blocks that all instances share: of each node the first so many. The longest unused node is the first."""

    def __init__(self, config: SharedCache, block_bytes: int) -> None:
        self.config = config
        self.capacity_blocks = int(config.capacity_bytes // block_bytes)
        self.blocks: dict[Owner, int] = {}
        self.used_s: dict[Owner, float] = {}
        self.updates_s = sorted(config.updates_s)  # those to come

    def expire(self, now_s: float) -> None:
        updated = [time_s for time_s in self.updates_s if time_s <= now_s]
        self.updates_s = self.updates_s[len(updated) :]
        for owner in list(self.blocks):
            if updated or self.used_s[owner] + self.config.ttl_s <= now_s:
                del self.blocks[owner]

    def use(self, owner: Owner, blocks: int, now_s: float) -> None:
        self.blocks.pop(owner, None)
        self.blocks[owner] = blocks
        self.used_s[owner] = now_s

    def store(self, path: Sequence[Span], full: int, now_s: float) -> None:
        """The first `full` blocks of a sequence."""
        self.expire(now_s)
        for span in reversed(path):
            blocks = min(full, int(span.end)) - span.first
            if blocks > 0:
                self.use(span.owner, max(blocks, self.blocks.get(span.owner, 0)), now_s)
        while sum(self.blocks.values()) > self.capacity_blocks:
            owner = next(iter(self.blocks))
            self.blocks[owner] -= 1
            if self.blocks[owner] == 0:
                del self.blocks[owner]

    def reach(self, path: Sequence[Span], memory: Memory, matched: int, now_s: float) -> int:
        """So many blocks could be there: in the instance's memory to the match, and behind it from here."""
        self.expire(now_s)
        reached = 0
        for span in path:
            local = len(memory.resident_of(span.owner)) if span.first <= matched else 0
            reached = span.first + max(local, self.blocks.get(span.owner, 0))
            if reached < span.end:
                break
        return reached

    def load(self, path: Sequence[Span], matched: int, end: int, now_s: float) -> None:
        for span in reversed(path):
            if span.first < end and span.end > matched and span.owner in self.blocks:
                self.use(span.owner, self.blocks[span.owner], now_s)


@dataclass(eq=False)
class Migration:
    """A migration, from its decision on; `stages` and `blocks` count what was begun to be copied."""

    job: Job
    source: int
    destination: int
    start_s: float
    preemptions: int  # of the request when it began
    reserved: list[Block] = field(default_factory=list)
    shadow: Job | None = None  # protocol vllm: what holds the copy at the destination while it is made
    copied: int = 0  # full blocks that were at the destination when a stage ended
    on_its_way_s: float = math.inf  # until then nobody has the request
    stage: Transfer | None = None  # that is being copied
    step: str = ""  # at the source's next boundary: probe, read or stop
    stop_s: float = math.nan
    end_s: float = math.nan
    stages: int = 0
    blocks: int = 0
    outcome: str = ""

    @property
    def row(self) -> int:
        return self.job.row

    @property
    def stage_end_s(self) -> float:
        return self.stage.end_s if self.stage else self.on_its_way_s

    @property
    def stopped(self) -> bool:
        return not math.isnan(self.stop_s)

    @property
    def gone(self) -> str:
        """Why the request cannot leave any more."""
        if not math.isnan(self.job.record.finish_s):
            return "finished"
        return "preempted" if self.job.record.preemptions > self.preemptions else ""


@dataclass
class FleetResult(OracleResult):
    """What a simulation gives on top."""

    migrations: list[Migration]
    """In the order of their ends."""
    alive_s: list[float]
    """Billed seconds of each instance."""
    end_s: float
    samples: list[tuple[float, int, int]]
    """(time, instance, used blocks)"""


class FleetEngine(Engine):
    """An engine that requests can leave and join in the middle."""

    def __init__(self, config: OracleInstance, index: int, state: int, pools: Pools | None, links: Links) -> None:
        super().__init__(config)
        self.pools = pools
        self.role = pools.roles[index] if pools else "mixed"
        self.links = links
        self.store: Store | None = None
        self.prefilled: list[Job] = []  # left the batch at the boundary under way, for another instance
        self.exports: list[Job] = []  # hold the blocks of such requests until these have pulled them
        self.pulls: list[tuple[Job, Transfer]] = []
        self.pulled: list[Job] = []  # join the batch at the next boundary
        self.index = index
        self.state = state
        self.arriving: list[Job] = []  # join the batch at the next boundary
        self.migration: Migration | None = None
        self.stopped: list[Job] = []  # at most one: left the batch, its last blocks are copied
        self.left: list[Job] = []  # at most one: on its way, holds nothing, counts here until the COMMIT
        self.ready_s = math.inf  # end of start-up or repair
        self.deadline_s = math.inf  # of a drain
        self.billed_since_s = 0.0 if state == READY else math.nan
        self.billed_s = 0.0

    def present(self) -> list[Job]:
        pulling = [job for job, _ in self.pulls]
        return self.running + self.stopped + self.arriving + self.pulled + pulling + self.waiting

    def requests(self) -> list[Job]:
        return self.present() + self.left

    def holders(self) -> list[Job]:
        m = self.migration
        shadows = [m.shadow] if m is not None and m.shadow is not None and m.destination == self.index else []
        pulls = self.pulled + [job for job, _ in self.pulls]
        return self.running + self.stopped + self.arriving + shadows + pulls + self.exports

    def reserved(self) -> list[Block]:
        m = self.migration
        return m.reserved if m is not None and m.destination == self.index else []

    def wake(self, now_s: float) -> None:
        """Something became free, or arrived: an idle instance has a boundary at once if it has anything to do."""
        if self.boundary_s == math.inf and (self.waiting or self.arriving or self.pulled):
            self.boundary_s = now_s

    def join(self) -> None:
        """Before the scheduler runs: arriving requests join the batch, at the end of the decodes."""
        while self.arriving and len(self.running) < self.config.max_num_seqs:
            job = self.arriving.pop(0)
            assert job.is_decode
            self.end_downtime(job)
            self.running.insert(sum(other.is_decode for other in self.running), job)

    # --- from prefill to decode --------------------------------------------------------------------------------------

    def complete(self, job: Job) -> None:
        if job.computed == job.prefill_length:
            self.keep(job)
        from_prefill = self.pools is not None and self.pools.first_token_from == "prefill"
        if from_prefill and job.generated + 1 == job.output:
            job.decode_at = None  # there is nothing more to decode
        if job.decode_at is None:
            self.give_token(job)
            return
        self.running.remove(job)
        if from_prefill:
            self.give_token(job)
        job.record.prefill_instance = self.index
        job.export = replace(job)
        self.exports.append(job.export)
        job.prefilled_s = self.now_s
        job.blocks, job.computed = [], 0
        self.prefilled.append(job)

    # --- the shared cache --------------------------------------------------------------------------------------------

    def nodes(self, job: Job) -> list[Span]:
        return [span for span in job.path if span.owner[0] == "node"]

    def keep(self, job: Job) -> None:
        """What the request has computed is stored."""
        if self.store is not None:
            self.store.store(self.nodes(job), job.computed // self.config.block_size, self.now_s)

    def retire(self) -> list[Job]:
        for job in self.running:
            if job.generated == job.output:
                self.keep(job)
        return super().retire()

    def may_load(self, job: Job) -> int:
        """Blocks of the head of the queue that would be there with what the shared cache has."""
        if self.store is None:
            return 0
        cap = (job.prompt + job.generated - 1) // self.config.block_size
        return min(cap, self.store.reach(self.nodes(job), self.memory, self.matched_blocks(job), self.now_s))

    def begin_load(self, job: Job) -> bool:
        config, matched, end = self.config, self.matched_blocks(job), self.may_load(job)
        if not self.leave_queue_with_blocks(job, matched):
            return False
        if math.isnan(job.record.admitted_s):
            job.record.admitted_s = self.now_s
        job.record.cached_tokens += end * config.block_size
        job.record.loaded_tokens += (end - matched) * config.block_size
        job.loaded_blocks = end
        self.store.load(self.nodes(job), matched, end, self.now_s)
        loaded = (end - matched) * config.block_size * config.kv_bytes_per_token
        cache = self.store.config
        transfer = Transfer(SHARED, self.index, cache.round_trip_s, loaded, cache.bandwidth_bytes_per_s, self.now_s)
        self.pulls.append((job, self.links.begin(transfer)))
        return True

    def leave_queue_with_blocks(self, job: Job, matched: int) -> bool:
        """The head of the queue takes all blocks of its prefill, if they are free."""
        size, length = self.config.block_size, job.prompt + job.generated
        needed = math.ceil(length / size) - matched
        if needed > self.memory.free_once_pinned(job.path, matched):
            self.blocked_boundaries += len(self.waiting) > 1
            return False
        self.waiting.remove(job)
        job.blocks = self.memory.pin(job.path, matched)
        job.blocks += [self.memory.take() for _ in range(needed)]
        job.computed = length
        self.prefix_queries_tokens += length
        self.prefix_hits_tokens += matched * size
        return True

    def drop_export(self, job: Job) -> None:
        self.exports.remove(job.export)
        self.leave(job.export, preempted=False)
        job.export = None

    def begin_pull(self, job: Job) -> bool:
        """The head of the queue takes its blocks, if they are free, and its KV begins to come."""
        size = self.config.block_size
        length, matched = job.prompt + job.generated, self.matched_blocks(job)
        if not self.leave_queue_with_blocks(job, matched):
            return False
        copied = (math.ceil((length - 1) / size) - matched) * size * self.config.kv_bytes_per_token
        pools, source = self.pools, job.record.prefill_instance
        transfer = Transfer(source, self.index, pools.round_trip_s, copied, pools.bandwidth_bytes_per_s, self.now_s)
        self.pulls.append((job, self.links.begin(transfer)))
        return True

    def take_in(self) -> None:
        while self.pulled and self.budget_left() > 0 and len(self.running) < self.config.max_num_seqs:
            job = self.pulled.pop(0)
            job.prefill_length = job.prompt + job.generated
            if job.loaded_blocks is None:
                job.computed = job.prefill_length - 1
                job.record.handover_s += self.now_s - job.prefilled_s
            else:
                job.computed = job.loaded_blocks * self.config.block_size
            if not math.isnan(job.stopped_s):
                self.end_downtime(job)
            self.running.append(job)
            self.schedule(job, min(job.prefill_length - job.computed, self.budget_left()))

    def admit(self, job: Job) -> bool:
        job.loaded_blocks = None
        if job.export is not None:
            return self.begin_pull(job)
        if self.may_load(job) > self.matched_blocks(job):
            return self.begin_load(job)
        admitted = super().admit(job)
        if admitted and not math.isnan(job.stopped_s):
            self.end_downtime(job)
        return admitted

    def end_downtime(self, job: Job) -> None:
        job.record.downtime_s += self.now_s - job.stopped_s
        job.stopped_s = math.nan

    def clear(self) -> list[Job]:
        """Lose everything. Returns the requests that were here, which hold nothing any more."""
        jobs = self.present()
        for job in jobs:
            job.blocks, job.computed = [], 0
        self.iterations -= bool(self.scheduled)  # the one under way never ends
        self.running, self.stopped, self.arriving, self.waiting, self.scheduled = [], [], [], [], []
        self.exports, self.pulls, self.pulled = [], [], []
        self.memory = type(self.memory)(self.config.kv_blocks)
        self.extra_tokens = []
        self.boundary_s = math.inf
        return jobs


class Fleet:
    """The dispatcher and its instances."""

    def __init__(
        self,
        table: RequestTable,
        config: OracleFleet,
        choose: Callable[[Question], int | None],
        sample_interval_s: float,
    ) -> None:
        for instance in config.instances:
            check_fits(table, instance)
        self.table = table
        self.config = config
        self.choose = choose
        ready = config.scaling.ready if config.scaling else len(config.instances)
        self.links = Links()
        block_bytes = config.instances[0].block_size * config.instances[0].kv_bytes_per_token
        store = Store(config.shared_cache, block_bytes) if config.shared_cache else None
        self.engines = [
            FleetEngine(engine, i, READY if i < ready else ABSENT, config.pools, self.links)
            for i, engine in enumerate(config.instances)
        ]
        for engine in self.engines:
            engine.store = store
        self.records = [OracleRequest(row) for row in range(len(table))]
        self.now_s = 0.0
        self.due_s: dict[int, float] = {}  # when each request came to the dispatcher, the last time
        self.arrivals = [(float(table.arrival_s[row]), row) for row in range(len(table)) if not self.is_closed(row)]
        self.came_back: list[Job] = []  # at this very time
        self.held: list[Job] = []
        self.next_retry_s = math.inf
        self.failures = sorted(config.failures.at) if config.failures else []  # those to come
        self.notices = [(self.notice_s(time_s), index) for time_s, index in self.failures]
        self.drawn_failures = [0] * len(config.instances)  # so many of each have happened
        self.next_drawn_s = [self.until_drawn_s(index, 0) for index in range(len(config.instances))]
        self.source_ticks = self.scale_ticks = self.samples_taken = 0
        self.sample_interval_s = sample_interval_s
        self.samples: list[tuple[float, int, int]] = []
        self.migrations: list[Migration] = []

    def is_closed(self, row: int) -> bool:
        return not math.isnan(self.table.think_s[row])

    # --- events ------------------------------------------------------------------------------------------------------

    def run(self) -> FleetResult:
        for _ in range(_MOST_EVENTS):
            if not self.arrivals and self.in_system() == 0:
                return self.result()
            time_s, kind, index = min(self.next_events())
            assert time_s >= self.now_s, "time went back"
            assert time_s < math.inf, "stuck"
            self.now_s = time_s
            self.happen(kind, index)
            self.leave_drained()
            self.check()
        raise AssertionError(f"not done after {_MOST_EVENTS} events")

    def next_events(self) -> list[tuple[float, int, int]]:
        """(time, kind, index) of the next event of each kind and instance."""
        rebalancing, scaling = self.config.rebalancing, self.config.scaling
        events = [(time_s, _NOTICE, index) for time_s, index in self.notices[:1]]
        events += [(time_s, _FAILURE, index) for time_s, index in self.failures[:1]]
        for index, engine in enumerate(self.engines):
            events += [(engine.ready_s, _STARTED, index), (engine.deadline_s, _DEADLINE, index)]
            events.append((self.next_drawn_s[index], _DRAWN_FAILURE, index))
            if engine.migration is not None and engine.migration.source == index:
                events.append((engine.migration.stage_end_s, _COPIED, index))
            events.append((engine.boundary_s, _BOUNDARY, index))
            events += [(transfer.end_s, _PULLED, index) for _, transfer in engine.pulls]
        events += [(self.now_s, _CAME_BACK, 0)] * bool(self.came_back)
        events += [(time_s, _ARRIVAL, row) for time_s, row in sorted(self.arrivals)[:1]]
        if self.held:
            events.append((self.next_retry_s, _RETRY, 0))
        if rebalancing:
            events.append(((self.source_ticks + 1) * rebalancing.interval_s, _SOURCE_TICK, 0))
        if scaling:
            events.append((scaling.first_s + self.scale_ticks * scaling.interval_s, _SCALE_TICK, 0))
        if self.sample_interval_s < math.inf:
            events.append((self.samples_taken * self.sample_interval_s, _SAMPLE, 0))
        return events

    def happen(self, kind: int, index: int) -> None:
        if kind == _NOTICE:
            self.notices.pop(0)
            if self.engines[index].state == READY:
                self.engines[index].state = DRAINING
        elif kind == _FAILURE:
            self.failures.pop(0)
            self.fail(index)
        elif kind == _DRAWN_FAILURE:
            self.drawn_failures[index] += 1
            self.next_drawn_s[index] += self.until_drawn_s(index, self.drawn_failures[index])
            self.fail(index)
        elif kind == _STARTED:
            self.engines[index].ready_s = math.inf
            if self.engines[index].state == FAILED:
                self.engines[index].billed_since_s = self.now_s
            self.engines[index].state = DRAINING if self.under_notice(index) else READY
        elif kind == _DEADLINE:
            self.engines[index].deadline_s = math.inf
            self.come_back(self.clear(index))
        elif kind == _COPIED:
            self.end_stage(self.engines[index].migration)
        elif kind == _PULLED:
            self.end_pull(self.engines[index])
        elif kind == _CAME_BACK:
            self.dispatch_or_hold(self.came_back.pop(0))
        elif kind == _ARRIVAL:
            self.arrivals.remove((self.now_s, index))
            self.arrive(index)
        elif kind == _RETRY:
            self.retry()
        elif kind == _SOURCE_TICK:
            self.source_ticks += 1
            self.rebalance()
        elif kind == _SCALE_TICK:
            self.scale_ticks += 1
            self.scale()
        elif kind == _SAMPLE:
            self.samples_taken += 1
            self.samples += [(self.now_s, i, engine.used_blocks) for i, engine in enumerate(self.engines)]
        else:
            self.boundary(index)

    def boundary(self, index: int) -> None:
        engine = self.engines[index]
        finished = engine.end_iteration()
        for job in finished:
            for row in range(len(self.table)):
                if self.table.parent[row] == job.row and self.is_closed(row):
                    self.arrivals.append((self.now_s + float(self.table.think_s[row]), row))
        if engine.migration is not None and engine.migration.source == index and engine.migration.step:
            self.take_step(engine.migration)
        engine.begin_iteration()
        if finished or engine.prefilled:
            self.next_retry_s = self.now_s
        while engine.prefilled:
            self.hand_over(engine, engine.prefilled.pop(0))

    # --- decisions ---------------------------------------------------------------------------------------------------

    def ask(
        self,
        kind: str,
        candidates: Sequence[int],
        may_hold: bool = True,
        origin: int | None = None,
        may_reject: bool = False,
    ) -> int | None:
        """The policy's choice among the candidates; it is not asked if there are none."""
        if not candidates:
            return None
        jobs = [engine.requests() for engine in self.engines]
        to_come = [[job for job in self.to_be_handed_over() if job.decode_at == i] for i in range(len(jobs))]
        unstarted = [
            [job for job in here if job.streamed == 0] + coming for here, coming in zip(jobs, to_come, strict=True)
        ]
        started = [[job for job in here if job.streamed > 0] for here in jobs]
        answers = [
            [job for job in here if job.decode_at is None] + coming for here, coming in zip(jobs, to_come, strict=True)
        ]
        question = Question(
            self.now_s,
            kind,
            [i in candidates for i in range(len(self.engines))],
            may_hold,
            may_reject,
            [engine.state for engine in self.engines],
            [engine.migration is not None for engine in self.engines],
            [i == origin for i in range(len(self.engines))],
            [len(here) + len(coming) for here, coming in zip(jobs, to_come, strict=True)],
            [len(here) for here in unstarted],
            [sum(job.prompt + job.generated_before for job in here) for here in unstarted],
            [sum(job.prompt + job.generated_before for job in here) for here in started],
            [sum(job.streamed for job in here) for here in started],
            [int(sum(float(self.table.predicted_output_tokens[job.row]) for job in here)) for here in answers],
        )
        chosen = self.choose(question)
        legal = may_reject if chosen == REJECT else may_hold if chosen is None else chosen in candidates
        assert legal, "an illegal choice"
        return chosen

    def has(self, state: int) -> int:
        return sum(engine.state == state for engine in self.engines)

    def arrive(self, row: int) -> None:
        self.records[row].arrival_s = self.now_s
        prompt, output = int(self.table.prompt_tokens[row]), int(self.table.output_tokens[row])
        self.dispatch_or_hold(Job(row, prompt, output, key=(0, 0.0, row), path=[], record=self.records[row]))

    def dispatch_or_hold(self, job: Job) -> None:
        """Of a request that arrives now, or comes back."""
        self.due_s[job.row] = self.now_s
        if not self.dispatch(job):
            self.held.append(job)
            if len(self.held) == 1:
                self.plan_retry()

    def retry(self) -> None:
        if self.dispatch(self.held[0]):
            self.held.pop(0)
            self.next_retry_s = self.now_s
        else:
            self.plan_retry()

    def plan_retry(self) -> None:
        latest_s = self.due_s[self.held[0].row] + self.config.max_hold_s
        self.next_retry_s = min(self.now_s + self.config.hold_interval_s, latest_s)

    def dispatch(self, job: Job) -> bool:
        """False if the request is to be held."""
        candidates = [i for i in self.ready() if self.engines[i].role != "decode"] if self.decoders() else []
        may_hold = self.now_s < self.due_s[job.row] + self.config.max_hold_s
        if not candidates and not may_hold:
            self.end_as_failed([job])
            return True
        fresh = job.generated == 0
        chosen = self.ask("prefill" if self.config.pools else "dispatch", candidates, may_hold, may_reject=fresh)
        if chosen == REJECT:
            job.record.rejected = True
            return True
        if chosen is None:
            return False
        decode_at = None
        if self.engines[chosen].role == "prefill":
            decode_at = UNDECIDED
            if self.config.pools.decode_choice == "at_admission":
                decode_at = self.ask("decode", self.decoders(), may_hold, chosen, may_reject=fresh and may_hold)
                if decode_at == REJECT:
                    job.record.rejected = True
                    return True
                if decode_at is None:
                    return False
        job.decode_at = decode_at
        job.record.dispatch_s = self.now_s
        job.generated_before = job.generated
        self.settle(job, chosen)
        self.engines[chosen].submit(job, self.now_s)
        return True

    def settle(self, job: Job, index: int) -> None:
        """The request is this instance's now."""
        config = self.config.instances[index]
        job.record.instance = index
        priority = int(self.table.priority[job.row]) if config.priority_order else 0
        job.key = (priority, job.record.dispatch_s, job.row)
        job.path = self.path(job.row, index)

    def path(self, row: int, index: int) -> list[Span]:
        config = self.config.instances[index]
        return path_of(self.table, row, config.block_size) if config.prefix_cache else []

    # --- pools -------------------------------------------------------------------------------------------------------

    def ready(self) -> list[int]:
        return [i for i, engine in enumerate(self.engines) if engine.state == READY]

    def decoders(self) -> list[int]:
        return [i for i in self.ready() if self.engines[i].role != "prefill"]

    def to_be_handed_over(self) -> list[Job]:
        """Requests that their decode instances know of already."""
        return [
            job for engine in self.engines for job in engine.requests() + engine.prefilled if job.decode_at is not None
        ]

    def hand_over(self, engine: FleetEngine, job: Job) -> None:
        """The request's prefill was done at the boundary that has just been."""
        decode_at, job.decode_at = job.decode_at, None
        if decode_at not in self.ready():
            if not self.decoders():
                engine.drop_export(job)
                engine.wake(self.now_s)
                self.come_back([job])
                return
            decode_at = self.ask("decode", self.decoders(), may_hold=False, origin=engine.index)
        self.settle(job, decode_at)
        self.engines[decode_at].submit(job, self.now_s)

    def end_pull(self, engine: FleetEngine) -> None:
        job, transfer = min(engine.pulls, key=lambda pull: pull[1].end_s)  # of those that end now the first
        self.links.end(transfer, self.now_s)
        engine.pulls.remove((job, transfer))
        full = job.loaded_blocks
        if full is None:
            self.drop_export(job)
            full = (job.computed - 1) // engine.config.block_size
        engine.memory.fill(engine.nodes(job), job.blocks, 0, full)
        engine.pulled.append(job)
        engine.wake(self.now_s)

    def drop_export(self, job: Job) -> None:
        source = self.engines[job.record.prefill_instance]
        source.drop_export(job)
        source.wake(self.now_s)

    # --- migration ---------------------------------------------------------------------------------------------------

    def rebalance(self) -> None:
        """The SOURCE tick."""
        most = self.config.rebalancing.max_pairs
        chosen: list[int] = []
        while most is None or len(chosen) < most:
            free = [i for i, engine in enumerate(self.engines) if engine.migration is None]
            sources = [i for i in free if i not in chosen and self.leaving(self.engines[i]) is not None]
            source = self.ask("source", sources)
            if source is None:
                return
            chosen.append(source)
            ready = [i for i in free if i != source and i in self.decoders()]
            destination = self.ask("destination", ready, origin=source)
            if destination is not None:
                self.migrate(source, destination)
            self.leave_drained()

    def leaving(self, engine: FleetEngine) -> Job | None:
        """The request that would leave."""
        if engine.state not in (READY, DRAINING):
            return None
        decoding = [job for job in reversed(engine.running) if job.is_decode]  # so ties go to the last
        if not decoding:
            if self.config.pools:
                return None
            return engine.waiting[-1] if engine.state == DRAINING and engine.waiting else None

        def tokens(job: Job) -> int:
            return job.prompt + job.generated

        choice = self.config.rebalancing.choice
        if choice == "last":
            return decoding[0]
        if choice == "shortest":
            return min(decoding, key=tokens)
        if choice == "longest":
            return max(decoding, key=tokens)
        return max(decoding, key=lambda job: (int(self.table.priority[job.row]), -tokens(job)))

    def migrate(self, source: int, destination: int) -> None:
        engine = self.engines[source]
        job = self.leaving(engine)
        m = Migration(job, source, destination, self.now_s, job.record.preemptions)
        if job in engine.waiting:
            engine.waiting.remove(job)
            engine.memory.forget(("tail", job.row))
            self.settle(job, destination)
            self.engines[destination].submit(job, self.now_s)
            self.end(m, "moved")
            return
        for i in (source, destination):
            self.engines[i].migration = m
            self.engines[i].slowdown = self.config.rebalancing.slowdown
        if self.config.rebalancing.protocol == "vllm":
            m.step = "probe"
        else:
            self.begin_stage(m, job.computed // engine.config.block_size)

    def begin_stage(self, m: Migration, blocks: int) -> bool:
        """PRE-ALLOC and copy; False if the migration ends here."""
        memory = self.engines[m.destination].memory
        if len(memory.free) < blocks:
            self.end(m, "no_space")
            return False
        m.reserved += [memory.take() for _ in range(blocks)]
        m.copied += blocks
        self.copy(m, blocks)
        return True

    def copy(self, m: Migration, blocks: int) -> None:
        rebalancing, config = self.config.rebalancing, self.config.instances[m.source]
        m.stages += 1
        m.blocks += blocks
        block_bytes = config.block_size * config.kv_bytes_per_token
        m.stage = self.links.begin(
            Transfer(
                m.source,
                m.destination,
                rebalancing.round_trip_s,
                blocks * block_bytes,
                rebalancing.bandwidth_bytes_per_s,
                self.now_s,
            )
        )

    def end_copy(self, m: Migration) -> None:
        if m.stage:
            self.links.end(m.stage, self.now_s)
        m.stage = None

    def end_stage(self, m: Migration) -> None:
        job, block_size = m.job, self.config.instances[m.source].block_size
        self.end_copy(m)
        m.on_its_way_s = math.inf
        if m.stopped:
            self.commit(m)
            return
        if m.shadow is not None:
            self.cache(m)
        if m.gone:
            self.end(m, m.gone)
        elif math.ceil(job.computed / block_size) - m.copied <= self.config.rebalancing.last_stage_blocks:
            m.step = "stop"
        elif m.stages == self.config.rebalancing.max_stages - 1:
            self.end(m, "too_long")
        elif self.config.rebalancing.protocol == "vllm":
            m.step = "probe"
        else:
            self.begin_stage(m, job.computed // block_size - m.copied)

    def take_step(self, m: Migration) -> None:
        """Between steps 2 and 3 of the source's boundary."""
        step, m.step = m.step, ""
        if m.gone:
            self.end(m, m.gone)
        elif step == "probe":
            self.probe(m)
        elif step == "read":
            self.read(m)
        elif self.config.rebalancing.protocol == "vllm":
            self.let_go(m)
        else:
            self.stop(m)

    def stop(self, m: Migration) -> None:
        """Protocol llumnix."""
        source, job = self.engines[m.source], m.job
        if self.begin_stage(m, math.ceil(job.computed / source.config.block_size) - m.copied):
            m.stop_s = job.stopped_s = self.now_s
            source.running.remove(job)
            source.stopped = [job]

    def probe(self, m: Migration) -> None:
        source = self.engines[m.source]
        if len(source.running) == source.config.max_num_seqs:
            self.end(m, "no_space")
            return
        source.extra_tokens.append(m.job.computed)
        m.step = "read"

    def read(self, m: Migration) -> None:
        """One iteration after the probe. The shadow takes its blocks, and the copy begins."""
        job, block_size = m.job, self.config.instances[m.source].block_size
        memory, path = self.engines[m.destination].memory, self.path(job.row, m.destination)
        full = job.computed // block_size
        matched = memory.matched_blocks(path, cap=full)
        if full - matched > memory.free_once_pinned(path, matched):
            self.end(m, "no_space")
            return
        m.shadow = Job(job.row, full * block_size + 1, 0, job.key, path, job.record, computed=full * block_size)
        m.shadow.blocks = memory.pin(path, matched)
        m.shadow.blocks += [memory.take() for _ in range(full - matched)]
        self.copy(m, full - matched)

    def cache(self, m: Migration) -> None:
        """The copy is there. An engine computes a token to learn that."""
        destination, shadow = self.engines[m.destination], m.shadow
        m.copied = len(shadow.blocks)
        destination.memory.fill(shadow.path, shadow.blocks, 0, m.copied)
        self.release_shadow(m)
        if destination.present():
            destination.extra_tokens.append(shadow.computed)
        destination.wake(self.now_s)

    def release_shadow(self, m: Migration) -> None:
        self.engines[m.destination].memory.release(m.shadow.path, m.shadow.blocks)
        m.shadow = None

    def let_go(self, m: Migration) -> None:
        source, job = self.engines[m.source], m.job
        m.stop_s = job.stopped_s = self.now_s
        source.running.remove(job)
        source.leave(job, preempted=False)
        source.left = [job]
        m.on_its_way_s = self.now_s + self.config.rebalancing.round_trip_s

    def commit(self, m: Migration) -> None:
        source, destination, job = self.engines[m.source], self.engines[m.destination], m.job
        if source.left:
            source.left = []
            self.settle(job, m.destination)
            destination.waiting.insert(0, job)
            if destination.config.priority_order:
                destination.waiting.sort(key=lambda job: job.key)
            self.end(m, "completed")
            return
        computed = job.computed
        source.stopped = []
        source.leave(job, preempted=False)
        self.settle(job, m.destination)
        job.blocks, job.computed = m.reserved, computed
        destination.memory.pin(job.path, 0)
        nodes = [span for span in job.path if span.owner[0] == "node"]
        destination.memory.fill(nodes, job.blocks, 0, computed // destination.config.block_size)
        destination.arriving.append(job)
        self.end(m, "completed")

    def end(self, m: Migration, outcome: str) -> None:
        source, destination = self.engines[m.source], self.engines[m.destination]
        self.end_copy(m)
        if source.migration is m:
            source.migration = destination.migration = None
            source.slowdown = destination.slowdown = 1.0
        if outcome in ("completed", "moved"):
            m.job.record.migrations += 1
        else:
            destination.memory.free[:0] = m.reserved
            if m.shadow is not None:
                self.release_shadow(m)
            if self.config.rebalancing.protocol == "vllm":
                self.free_tail(m)
        if outcome == "destination_died":
            source.arriving += source.stopped
            source.stopped = []
        source.wake(self.now_s)
        destination.wake(self.now_s)
        m.outcome, m.end_s = outcome, self.now_s
        self.migrations.append(m)

    def free_tail(self, m: Migration) -> None:
        """Nobody will match what was copied of the private tail."""
        memory, tail = self.engines[m.destination].memory, ("tail", m.row)
        blocks = memory.resident_of(tail)
        memory.free = blocks + [block for block in memory.free if block not in blocks]
        memory.forget(tail)

    # --- lifecycle and failures --------------------------------------------------------------------------------------

    def scale(self) -> None:
        """The SCALE tick."""
        scaling = self.config.scaling
        most = len(self.engines) if scaling.max_instances is None else scaling.max_instances
        seen: list[int] = []
        while True:
            candidates: list[int] = []
            for i, engine in enumerate(self.engines):
                absent = [e for e in self.engines if e.state == ABSENT]
                absent = [e for e in absent if e.config == engine.config and e.role == engine.role]
                free = [e for e in absent if e.index not in seen and not self.under_notice(e.index)]
                first_absent = free[0] if free else None
                started = self.has(STARTING) + self.has(READY) + self.has(DRAINING)
                if (
                    i not in seen
                    and not self.under_notice(i)
                    and (
                        (engine is first_absent and started < most)
                        or (engine.state == READY and self.has(READY) > scaling.min_instances and self.can_spare(i))
                        or engine.state == DRAINING
                    )
                ):
                    candidates.append(i)
            chosen = self.ask("scale", candidates)
            if chosen is None:
                return
            seen.append(chosen)
            engine = self.engines[chosen]
            if engine.state == ABSENT:
                engine.state = STARTING
                engine.ready_s = self.now_s + scaling.start_up_s
                engine.billed_since_s = self.now_s
            elif engine.state == READY:
                engine.state = DRAINING
                engine.deadline_s = self.now_s + scaling.drain_deadline_s
                self.leave_drained()
            else:
                engine.deadline_s = math.inf
                engine.state = READY

    def can_spare(self, index: int) -> bool:
        """Whether the instance is neither the last that can prefill nor the last that can decode."""
        role, others = self.engines[index].role, [self.engines[i].role for i in self.ready() if i != index]
        prefills, decodes = (any(other != without for other in others) for without in ("decode", "prefill"))
        return (role == "decode" or prefills) and (role == "prefill" or decodes)

    def leave_drained(self) -> None:
        """Draining instances without a request and without a migration are absent."""
        for engine in self.engines:
            waits = self.under_notice(engine.index)
            busy = engine.requests() or engine.exports or engine.migration is not None
            if engine.state == DRAINING and not waits and not busy:
                engine.clear()
                engine.state = ABSENT
                engine.deadline_s = math.inf
                self.stop_billing(engine)

    def stop_billing(self, engine: FleetEngine) -> None:
        engine.billed_s += self.now_s - engine.billed_since_s
        engine.billed_since_s = math.nan

    def until_drawn_s(self, index: int, n: int) -> float:
        """From the failure drawn before, or the start, to the n-th one."""
        mtbf_s = self.config.failures.mtbf_s if self.config.failures else math.inf
        if mtbf_s == math.inf:
            return math.inf
        return -mtbf_s * math.log(1 - split_mix(3_000_000_019 + 4_000_000_000 * index + n))

    def notice_s(self, failure_s: float) -> float:
        return max(0.0, failure_s - self.config.failures.notice_s)

    def under_notice(self, index: int) -> bool:
        """Whether a failure of it is to come and has been announced."""
        return any(i == index and self.notice_s(time_s) <= self.now_s for time_s, i in self.failures)

    def fail(self, index: int) -> None:
        engine = self.engines[index]
        if engine.state in (ABSENT, FAILED):
            return
        self.stop_billing(engine)
        engine.state = FAILED
        engine.deadline_s = math.inf
        engine.ready_s = self.now_s + self.config.failures.repair_s
        jobs = self.clear(index)
        if self.config.failures.requests == "restart":
            self.come_back(jobs)
        else:
            self.end_as_failed(jobs)

    def end_as_failed(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.record.failed = True

    def clear(self, index: int) -> list[Job]:
        """The instance loses its requests, which are returned, its KV and its migration."""
        m, running = self.engines[index].migration, len(self.engines[index].running)
        pulls = self.engines[index].pulls
        jobs = self.engines[index].clear()
        for _, transfer in pulls:
            self.links.end(transfer, self.now_s)
        for job in jobs:
            job.decode_at = None
            if job.export is not None and job.export in self.engines[job.record.prefill_instance].exports:
                self.drop_export(job)
        jobs += self.lose_exports(index)
        if m is None:
            return jobs
        left = self.engines[m.source].left
        if m.destination == index:
            m.reserved, m.shadow = [], None
            jobs[running:running] = left
            self.engines[m.source].left = []
            self.end(m, "destination_died")
        elif not left:
            self.end(m, "source_died")
        return jobs

    def lose_exports(self, index: int) -> list[Job]:
        """The instance has lost the blocks of requests that others wait for. Returns these requests."""
        lost: list[Job] = []
        for engine in self.engines:
            for job, transfer in list(engine.pulls):
                if job.export is not None and job.record.prefill_instance == index:
                    self.links.end(transfer, self.now_s)
                    engine.pulls.remove((job, transfer))
                    engine.memory.free[:0] = [block for block in job.blocks if block.content is None]
                    engine.memory.release(job.path, [])
                    job.blocks, job.computed, job.export = [], 0, None
                    lost.append(job)
                    engine.wake(self.now_s)
            for job in list(engine.waiting):
                if job.export is not None and job.record.prefill_instance == index:
                    engine.waiting.remove(job)
                    job.export = None
                    lost.append(job)
        return lost

    def come_back(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.record.restarts += 1
            job.lost_at_s = job.stopped_s = math.nan
        most = self.config.failures.max_restarts if self.config.failures else Failures().max_restarts
        self.end_as_failed([job for job in jobs if job.record.restarts > most])
        self.came_back += [job for job in jobs if not job.record.failed]

    # --- conservation and the result ---------------------------------------------------------------------------------

    def in_system(self) -> int:
        return sum(len(engine.requests()) for engine in self.engines) + len(self.held) + len(self.came_back)

    def check(self) -> None:
        """Every request is in one place, every block is used, reserved or free."""
        rows = [job.row for engine in self.engines for job in engine.requests()]
        rows += [job.row for job in self.held] + [job.row for job in self.came_back]
        rows += [row for _, row in self.arrivals]
        for record in self.records:
            rows += [record.row] * (record.failed + record.rejected + (not math.isnan(record.finish_s)))
        times = Counter(rows)
        for row in range(len(self.table)):
            not_released = self.is_closed(row) and math.isnan(self.records[self.table.parent[row]].finish_s)
            assert times[row] == (not not_released), f"row {row} is at {times[row]} places"
        for index, engine in enumerate(self.engines):
            engine.check()
            m = engine.migration
            assert m is None or index in (m.source, m.destination)
            assert m is None or engine.state in (READY, DRAINING) or engine.left
            assert math.isnan(engine.billed_since_s) == (engine.state in (ABSENT, FAILED))
            if engine.state not in (READY, DRAINING):
                assert not engine.present()
                assert engine.used_blocks == 0
            if engine.boundary_s == math.inf:
                assert not engine.running
                assert not engine.arriving
                assert not engine.pulled
                awaits = engine.migration is not None or engine.exports or engine.pulls
                assert not engine.waiting or awaits, "idle, though a request waits"
            assert not engine.prefilled

    def result(self) -> FleetResult:
        for engine in self.engines:
            if not math.isnan(engine.billed_since_s):
                self.stop_billing(engine)
        return FleetResult(
            requests=self.records,
            preemptions=[engine.preemptions for engine in self.engines],
            iterations=[engine.iterations for engine in self.engines],
            evicted_blocks=[engine.memory.evicted for engine in self.engines],
            blocked_boundaries=[engine.blocked_boundaries for engine in self.engines],
            history=[engine.history for engine in self.engines],
            migrations=self.migrations,
            alive_s=[engine.billed_s for engine in self.engines],
            end_s=self.now_s,
            samples=self.samples,
        )


def simulate_fleet(
    table: RequestTable,
    config: OracleFleet,
    choose: Callable[[Question], int | None],
    sample_interval_s: float = math.inf,
) -> FleetResult:
    """Run all requests of `table` to their end.

    Args:
        table: the requests; each must fit each instance.
        config: the fleet.
        choose: answers each question with one of its candidates, or None.
        sample_interval_s: at 0, this, twice this, ... the used blocks are noted.
    """
    return Fleet(table, config, choose, sample_interval_s).run()
