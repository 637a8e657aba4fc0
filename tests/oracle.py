"""The cluster model of docs/model.md a second time: one event per iteration, plain objects, obvious rather than fast.

Nothing here is shared with `fleetpilot.cluster`: literal KV blocks lie in a literal free list, every decode takes its
blocks one by one, every boundary tries the head of the queue again, and conservation is asserted after each boundary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fleetpilot.workloads.table import NO_NODE, RequestTable

Owner = tuple[Literal["node", "tail"], int]
"""Whose content a block holds: ("node", index in the prefix tree) or ("tail", row)."""

Key = tuple[int, float, int]
"""Order of requests: (priority, dispatch time, row)."""


@dataclass(frozen=True)
class OracleInstance:
    """One engine's configuration; names, units and meaning as in docs/model.md."""

    scheduler: str
    kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_cache: bool = False
    priority_order: bool = False
    watermark_blocks: int = 0
    a_s: float = 0.0
    w_s: float = 0.0
    b_s: float = 0.0
    w_e_s: float = 0.0
    expert_share: float = 0.0
    c_s: float = 0.0
    d_s: float = 0.0
    e_s: float = 0.0
    host_step_s: float = 0.0
    host_per_seq_s: float = 0.0
    kv_bytes_per_token: int = 1
    draft_tokens: int = 0
    acceptance: float = 0.0
    draft_s: float = 0.0
    draft_per_seq_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.scheduler in ("chunked", "prefill_first"), self.scheduler
        if self.scheduler == "chunked":
            assert self.max_num_batched_tokens > self.max_num_seqs * (1 + self.draft_tokens)
            assert self.watermark_blocks == 0


@dataclass
class OracleRequest:
    """What happened to one request. Times in seconds; NaN and -1 for what has not happened.

    `preempted_loss_s` sums, over preemptions, the time from the preemption to the end of the iteration that completed
    the re-prefill, less what a step of the decodes would have taken then (at least 0). A preemption while an
    earlier one's re-prefill is still open does not start a second loss.
    """

    row: int
    arrival_s: float = math.nan
    dispatch_s: float = math.nan
    instance: int = -1
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    preemptions: int = 0
    preempted_loss_s: float = 0.0
    cached_tokens: int = 0
    generated: int = 0
    token_times: list[float] = field(default_factory=list)
    migrations: int = 0
    restarts: int = 0
    downtime_s: float = 0.0
    prefill_instance: int = -1
    handover_s: float = 0.0
    loaded_tokens: int = 0
    failed: bool = False
    rejected: bool = False


@dataclass(frozen=True)
class OracleBoundary:
    """An instance right after a boundary: `used_blocks` includes the blocks taken for the iteration that starts.

    Preemptions and prefix tokens count since the start of the simulation; the last three are of the waiting queue.
    """

    time_s: float
    used_blocks: int
    running: int
    waiting: int
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    waiting_blocks: int = 0
    head_blocks: int = 0
    preempted: int = 0


@dataclass
class OracleResult:
    """What a simulation gives: per row, and per instance (lists in the order of the instances)."""

    requests: list[OracleRequest]
    preemptions: list[int]
    iterations: list[int]
    evicted_blocks: list[int]
    """Resident blocks whose content was lost to a newcomer."""
    blocked_boundaries: list[int]
    """Boundaries at which the head of the queue did not fit into the KV memory while others waited behind it."""
    history: list[list[OracleBoundary]]

    def used_blocks_at(self, instance: int, time_s: float) -> int:
        """Used KV blocks after the last boundary at or before `time_s`."""
        past = [boundary for boundary in self.history[instance] if boundary.time_s <= time_s]
        return past[-1].used_blocks if past else 0


def iteration_time_s(c: OracleInstance, chunks: Sequence[tuple[int, int]], kv_tokens: Sequence[int]) -> float:
    """Duration of an iteration with prefill `chunks` of (context, tokens) and decodes that read `kv_tokens` each."""
    prefill_tokens = sum(tokens for _, tokens in chunks)
    decodes = len(kv_tokens)
    tokens = prefill_tokens + decodes * (1 + c.draft_tokens)
    drafting = c.draft_tokens > 0 and decodes > 0
    return (
        c.a_s
        + max(c.w_s, c.b_s * tokens)
        + c.w_e_s * (1 - (1 - c.expert_share) ** tokens)
        + c.c_s * sum(chunk * (context + chunk / 2) for context, chunk in chunks)
        + c.d_s * decodes
        + c.e_s * sum(kv_tokens)
        + c.host_step_s
        + c.host_per_seq_s * decodes
        + (c.draft_s + c.draft_per_seq_s * decodes) * drafting
    )


def split_mix(stream: int) -> float:
    """A number from 0 to 1, of seed 0."""
    x = 0x9E3779B97F4A7C15 * (stream + 1) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return ((x ^ x >> 31) >> 11) / 2**53


@dataclass(eq=False)
class Block:
    """One KV block. `content` is set while it is resident for a node or a tail: block `index` of that owner."""

    content: tuple[Owner, int] | None = None


@dataclass(frozen=True)
class Span:
    """The blocks [first, end) of a sequence that belong to one owner."""

    owner: Owner
    first: int
    end: float


@dataclass(eq=False)
class Job:
    """A request on an instance."""

    row: int
    prompt: int
    output: int
    key: Key
    path: list[Span]
    record: OracleRequest
    prefill_length: int = 0
    computed: int = 0
    generated: int = 0
    blocks: list[Block] = field(default_factory=list)
    lost_at_s: float = math.nan
    lost_step_s: float = math.nan
    generated_before: int = 0  # it was dispatched
    stopped_s: float = math.nan  # for the last stage of a migration
    decode_at: int | None = None  # the instance that decodes it; None: the one where it is
    prefilled_s: float = math.nan  # when it left the batch for that one
    loaded_blocks: int | None = None  # that a cache shared by all had for it and those before them
    export: Job | None = None  # what holds its blocks where its prefill was, until they are pulled

    @property
    def streamed(self) -> int:
        return self.generated - self.generated_before

    @property
    def is_decode(self) -> bool:
        return self.computed >= self.prefill_length


class Memory:
    """The KV blocks of one instance: free list, resident blocks by owner, pins."""

    def __init__(self, blocks: int) -> None:
        self.all = [Block() for _ in range(blocks)]
        self.free = list(self.all)
        self.resident: dict[Owner, list[Block]] = {}
        self.pins: dict[Owner, int] = {}
        self.evicted = 0

    def resident_of(self, owner: Owner) -> list[Block]:
        return self.resident.setdefault(owner, [])

    def matched_blocks(self, path: Sequence[Span], cap: int) -> int:
        """Blocks at the start of the sequence that are resident, at most `cap`."""
        matched = 0
        for span in path:
            matched += len(self.resident_of(span.owner))
            if len(self.resident_of(span.owner)) < span.end - span.first:
                break
        return min(matched, cap)

    def free_once_pinned(self, path: Sequence[Span], matched: int) -> int:
        """Free blocks that would be left after `pin`."""
        taken = 0
        for span in path:
            if self.pins.get(span.owner, 0) == 0:
                taken += sum(span.first + i < matched for i in range(len(self.resident_of(span.owner))))
        return len(self.free) - taken

    def pin(self, path: Sequence[Span], matched: int) -> list[Block]:
        """Pin the path and return the matched blocks. What lies beyond is dropped where nobody else pins it."""
        shared: list[Block] = []
        for span in path:
            resident = self.resident_of(span.owner)
            if self.pins.get(span.owner, 0) == 0:
                for block in resident:
                    self.free.remove(block)
                while resident and span.first + len(resident) > matched:
                    dropped = resident.pop()
                    dropped.content = None
                    self.free.insert(0, dropped)
            shared += resident[: max(0, matched - span.first)]
            self.pins[span.owner] = self.pins.get(span.owner, 0) + 1
        assert len(shared) == matched
        return shared

    def take(self) -> Block:
        """The block at the front of the free list; what it held is gone."""
        block = self.free.pop(0)
        if block.content is not None:
            owner, index = block.content
            assert self.pins.get(owner, 0) == 0, "a pinned block lay in the free list"
            assert self.resident[owner].pop() is block, "the last block of an owner goes first"
            assert index == len(self.resident[owner])
            block.content = None
            self.evicted += 1
        return block

    def fill(self, path: Sequence[Span], blocks: Sequence[Block], first: int, end: int) -> None:
        """Blocks [first, end) of the sequence are full: what stands right behind resident blocks becomes resident."""
        for span in path:
            resident = self.resident_of(span.owner)
            for i in range(max(first, span.first), int(min(end, span.end))):
                assert i - span.first <= len(resident), "a request never runs ahead of the nodes it has filled"
                if i - span.first == len(resident):
                    blocks[i].content = (span.owner, i - span.first)
                    resident.append(blocks[i])

    def release(self, path: Sequence[Span], blocks: Sequence[Block]) -> None:
        """Give back private blocks, then the path from the deepest owner up, last blocks first."""
        self.free += [block for block in reversed(blocks) if block.content is None]
        for span in reversed(path):
            self.pins[span.owner] -= 1
            if self.pins[span.owner] == 0:
                self.free += reversed(self.resident_of(span.owner))

    def forget(self, owner: Owner) -> None:
        """The owner's blocks hold nothing that anybody could match any more."""
        for block in self.resident_of(owner):
            block.content = None
        self.resident[owner] = []


class Engine:
    """One instance."""

    def __init__(self, config: OracleInstance) -> None:
        self.config = config
        self.memory = Memory(config.kv_blocks)
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.scheduled: list[tuple[Job, int]] = []  # the iteration under way: (request, tokens computed in it)
        self.duration_s = math.nan  # of the last iteration that started
        self.boundary_s = math.inf  # of the next boundary; inf while idle
        self.slowdown = 1.0
        self.extra_tokens: list[int] = []  # contexts of tokens that the next iteration computes besides
        self.now_s = 0.0
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self.iterations = 0
        self.blocked_boundaries = 0
        self.history: list[OracleBoundary] = []

    @property
    def used_blocks(self) -> int:
        return self.config.kv_blocks - len(self.memory.free)

    def demand_blocks(self, job: Job) -> int:
        """Blocks of a waiting request's prefill."""
        return math.ceil((job.prompt + job.generated) / self.config.block_size)

    # --- what the fleet calls ----------------------------------------------------------------------------------------

    def submit(self, job: Job, now_s: float) -> None:
        self.waiting.append(job)
        if self.config.priority_order:
            self.waiting.sort(key=lambda job: job.key)
        if self.boundary_s == math.inf:
            self.boundary_s = now_s

    def boundary(self) -> list[Job]:
        """The boundary at `boundary_s`. Returns the requests that finished at it."""
        finished = self.end_iteration()
        self.begin_iteration()
        assert self.scheduled or not self.waiting, "stuck: the head does not fit an empty instance"
        return finished

    def end_iteration(self) -> list[Job]:
        """Steps 1 and 2 of the boundary. Returns the requests that finished at it."""
        assert self.boundary_s >= self.now_s, "time went back"
        self.now_s = self.boundary_s
        self.account()
        return self.retire()

    def begin_iteration(self) -> None:
        """Step 3 of the boundary."""
        self.form_iteration()
        if self.scheduled:
            self.duration_s = self.scheduled_time_s() * self.slowdown
            self.boundary_s = self.now_s + self.duration_s
            self.iterations += 1
        else:
            assert not self.running, "stuck: requests run but none is scheduled"
            self.boundary_s = math.inf
        self.extra_tokens = []
        self.history.append(
            OracleBoundary(
                self.now_s,
                self.used_blocks,
                len(self.running),
                len(self.waiting),
                self.preemptions,
                self.prefix_queries_tokens,
                self.prefix_hits_tokens,
                sum(self.demand_blocks(job) for job in self.waiting),
                self.demand_blocks(self.waiting[0]) if self.waiting else 0,
                sum(not math.isnan(job.lost_at_s) for job in self.waiting),
            )
        )
        self.check()

    # --- the three steps of a boundary -------------------------------------------------------------------------------

    def account(self) -> None:
        """Step 1: the iteration that ends has computed its tokens."""
        for job, tokens in self.scheduled:
            decoded = job.is_decode
            job.computed += tokens
            if job.is_decode:
                self.complete(job)
            if decoded:
                self.accept_drafts(job)
        self.scheduled = []

    def accept_drafts(self, job: Job) -> None:
        """Tokens of the step besides the one that every decode gives; each takes its place at once, or is lost."""
        size = self.config.block_size
        draw = split_mix(7_000_000_033 + job.row * 2**31 + job.generated)
        right = sum(draw < self.config.acceptance ** (i + 1) for i in range(self.config.draft_tokens))
        for _ in range(min(right, job.output - job.generated)):
            if job.computed == len(job.blocks) * size:
                if not self.memory.free:
                    return
                job.blocks.append(self.memory.take())
            job.computed += 1
            self.give_token(job)

    def complete(self, job: Job) -> None:
        """All tokens of the request are computed."""
        self.give_token(job)

    def give_token(self, job: Job) -> None:
        record = job.record
        job.generated += 1
        assert job.generated <= job.output
        record.generated = job.generated
        record.token_times.append(self.now_s)
        if job.generated == 1:
            record.first_token_s = self.now_s
        if not math.isnan(job.lost_at_s):
            record.preempted_loss_s += max(0.0, self.now_s - job.lost_at_s - job.lost_step_s)
            job.lost_at_s = math.nan

    def retire(self) -> list[Job]:
        """Step 2: finished requests leave in the order of the running list."""
        finished = [job for job in self.running if job.generated == job.output]
        for job in finished:
            self.running.remove(job)
            job.record.finish_s = self.now_s
            self.leave(job, preempted=False)
        return finished

    def join(self) -> None:
        """Requests that arrive in the middle of their decoding join the batch; here there are none."""

    def take_in(self) -> None:
        """Requests that were prefilled elsewhere join the batch; here there are none."""

    def form_iteration(self) -> None:
        """Step 3. Again at once if the pass preempted all that it had scheduled."""
        while True:
            self.join()
            preemptions = self.preemptions
            if self.config.scheduler == "chunked":
                self.schedule_chunked()
            else:
                self.schedule_prefill_first()
            if self.scheduled or self.preemptions == preemptions:
                return

    # --- schedulers --------------------------------------------------------------------------------------------------

    def schedule_chunked(self) -> None:
        preemptions = self.preemptions
        for job in list(self.running):
            if job not in self.running:  # a victim of this pass
                continue
            tokens = min(1 if job.is_decode else job.prefill_length - job.computed, self.budget_left())
            assert tokens > 0, "max_num_batched_tokens > max_num_seqs leaves something for each"
            if not self.schedule(job, tokens):
                break
        if self.preemptions > preemptions:
            return
        self.take_in()
        while self.waiting and self.budget_left() > 0 and len(self.running) < self.config.max_num_seqs:
            job = self.waiting[0]
            if not self.admit(job):
                break
            if job in self.running:
                self.schedule(job, min(job.prefill_length - job.computed, self.budget_left()))

    def schedule_prefill_first(self) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            job = self.waiting[0]
            if self.uncached_tokens(job) > self.budget_left():
                break
            if not self.admit(job):
                break
            self.schedule(job, job.prefill_length - job.computed)
        self.running.sort(key=lambda job: job.key)
        if self.scheduled:
            return
        for job in list(self.running):
            if job not in self.running:  # a victim of this pass
                continue
            if not self.schedule(job, 1):
                break

    def budget_left(self) -> int:
        drafts = self.config.draft_tokens
        taken = sum(tokens + drafts * job.is_decode for job, tokens in self.scheduled)
        return self.config.max_num_batched_tokens - taken

    def schedule(self, job: Job, tokens: int) -> bool:
        """Take the blocks for the next `tokens` of a running request, at the cost of victims. False if it was one."""
        needed = max(0, math.ceil((job.computed + tokens) / self.config.block_size) - len(job.blocks))
        while needed > len(self.memory.free):
            victim = max(self.running, key=lambda job: job.key) if self.config.priority_order else self.running[-1]
            self.preempt(victim)
            if victim is job:
                return False
        for _ in range(needed):
            job.blocks.append(self.memory.take())
        if not job.is_decode:
            full = (job.computed + tokens) // self.config.block_size
            nodes = [span for span in job.path if span.owner[0] == "node"]
            self.memory.fill(nodes, job.blocks, job.computed // self.config.block_size, full)
        self.scheduled.append((job, tokens))
        return True

    def matched_blocks(self, job: Job) -> int:
        length = job.prompt + job.generated
        return self.memory.matched_blocks(job.path, cap=(length - 1) // self.config.block_size)

    def uncached_tokens(self, job: Job) -> int:
        return job.prompt + job.generated - self.matched_blocks(job) * self.config.block_size

    def admit(self, job: Job) -> bool:
        """Move the head of the queue to the batch if its whole prefill fits."""
        assert job is self.waiting[0]
        length = job.prompt + job.generated
        matched = self.matched_blocks(job)
        needed = math.ceil(length / self.config.block_size) - matched
        if needed > self.memory.free_once_pinned(job.path, matched) - self.config.watermark_blocks:
            self.blocked_boundaries += len(self.waiting) > 1
            return False
        self.waiting.pop(0)
        self.running.append(job)
        job.blocks = self.memory.pin(job.path, matched)
        assert needed <= len(self.memory.free)
        job.prefill_length = length
        job.computed = matched * self.config.block_size
        job.record.cached_tokens += job.computed
        self.prefix_queries_tokens += length
        self.prefix_hits_tokens += job.computed
        if math.isnan(job.record.admitted_s):
            job.record.admitted_s = self.now_s
        return True

    def preempt(self, job: Job) -> None:
        decode_step_s = iteration_time_s(self.config, [], [j.prompt + j.generated for j in self.running if j.is_decode])
        self.running.remove(job)
        self.scheduled = [entry for entry in self.scheduled if entry[0] is not job]
        self.leave(job, preempted=True)
        self.waiting.insert(0, job)
        if self.config.priority_order:
            self.waiting.sort(key=lambda job: job.key)
        self.preemptions += 1
        job.record.preemptions += 1
        if math.isnan(job.lost_at_s):
            job.lost_at_s, job.lost_step_s = self.now_s, decode_step_s

    def leave(self, job: Job, *, preempted: bool) -> None:
        """Release the request's blocks; those that decoding filled become resident first."""
        if job.path:
            last = job.path[-1]  # its own node or its private tail
            if last.owner[0] == "node" or preempted:
                self.memory.fill([last], job.blocks, last.first, job.computed // self.config.block_size)
            else:
                self.memory.forget(last.owner)
        self.memory.release(job.path, job.blocks)
        job.blocks = []
        job.computed = 0

    # --- time and conservation ---------------------------------------------------------------------------------------

    def scheduled_time_s(self) -> float:
        chunks = [(job.computed, tokens) for job, tokens in self.scheduled if not job.is_decode]
        chunks += [(context, 1) for context in self.extra_tokens]
        kv_tokens = [job.prompt + job.generated for job, _ in self.scheduled if job.is_decode]
        return iteration_time_s(self.config, chunks, kv_tokens)

    def holders(self) -> list[Job]:
        """Requests that hold blocks here."""
        return self.running

    def reserved(self) -> list[Block]:
        """Blocks that are taken for a request that is not here yet."""
        return []

    def check(self) -> None:
        memory, block_size = self.memory, self.config.block_size
        free = {id(block) for block in memory.free}
        assert len(free) == len(memory.free), "a block lies in the free list twice"
        used = {id(block) for job in self.holders() for block in job.blocks}
        assert used.isdisjoint(map(id, self.reserved()))
        used |= {id(block) for block in self.reserved()}
        used |= {id(b) for owner, blocks in memory.resident.items() if memory.pins.get(owner, 0) for b in blocks}
        assert not used & free, "a block in use or pinned lies in the free list"
        assert used | free == {id(block) for block in memory.all}, "used + free == kv_blocks"
        for owner, blocks in memory.resident.items():
            assert [block.content for block in blocks] == [(owner, i) for i in range(len(blocks))]
        assert all(pins >= 0 for pins in memory.pins.values())
        pins = Counter(span.owner for job in self.holders() for span in job.path)
        assert pins == Counter({owner: count for owner, count in memory.pins.items() if count})
        tokens_of = {id(job): tokens for job, tokens in self.scheduled}
        for job in self.holders():
            blocks = math.ceil((job.computed + tokens_of.get(id(job), 0)) / block_size)
            assert len(job.blocks) == blocks or (job.loaded_blocks is not None and len(job.blocks) > blocks)
            for span, deeper in zip(job.path, job.path[1:], strict=False):
                if memory.resident_of(deeper.owner):
                    assert len(memory.resident_of(span.owner)) == span.end - span.first, "a child outlived its parent"
        assert len(self.running) <= self.config.max_num_seqs
        assert self.budget_left() >= 0
        for job in self.running[:-1]:
            assert job.computed + tokens_of.get(id(job), 0) >= job.prefill_length, "only the last is partly prefilled"
        assert all(job.blocks == [] and job.computed == 0 for job in self.waiting)


def path_of(table: RequestTable, row: int, block_size: int) -> list[Span]:
    """The owners of a request's blocks, from the root of the prefix tree to its own node or private tail."""
    nodes: list[int] = []
    node = int(table.prefix_node[row])
    while node != NO_NODE:
        nodes.insert(0, node)
        node = int(table.node_parent[node])
    if table.own_node[row] != NO_NODE:
        nodes.append(int(table.own_node[row]))
    path = []
    first = 0
    for node in nodes:
        end = int(table.node_end_tokens[node]) // block_size
        path.append(Span(("node", node), first, end))
        first = end
    if table.own_node[row] == NO_NODE:
        path.append(Span(("tail", row), first, math.inf))
    return path


def check_fits(table: RequestTable, instance: OracleInstance) -> None:
    """Every request can run alone on the instance, also when it was preempted before its last token."""
    for row in range(len(table)):
        longest = int(table.prompt_tokens[row] + table.output_tokens[row]) - 1
        assert math.ceil(longest / instance.block_size) + instance.watermark_blocks <= instance.kv_blocks, row
        if instance.scheduler == "prefill_first":
            assert longest <= instance.max_num_batched_tokens, row


def simulate(
    table: RequestTable,
    instances: Sequence[OracleInstance],
    choose: Callable[[int, int], int],
    observe: Callable[[float, int, Sequence[Engine]], None] = lambda now_s, row, engines: None,
) -> OracleResult:
    """Run all requests of `table` to their end.

    Args:
        table: the requests; each must fit each instance.
        instances: the engines.
        choose: (number of the decision from 0, row) -> index of the instance the request is dispatched to.
        observe: called with (time, row, engines) before each decision.
    """
    for instance in instances:
        check_fits(table, instance)
    engines = [Engine(config) for config in instances]
    records = [OracleRequest(row) for row in range(len(table))]
    arrivals = [(float(table.arrival_s[row]), row) for row in range(len(table)) if math.isnan(table.think_s[row])]
    decisions = 0
    now_s = 0.0
    while True:
        arrivals.sort()
        arrival_s = arrivals[0][0] if arrivals else math.inf
        boundary_s, index = min((engine.boundary_s, i) for i, engine in enumerate(engines))
        if min(arrival_s, boundary_s) == math.inf:
            break
        assert min(arrival_s, boundary_s) >= now_s, "time went back"
        now_s = min(arrival_s, boundary_s)
        if arrival_s <= boundary_s:
            _, row = arrivals.pop(0)
            observe(now_s, row, engines)
            chosen = choose(decisions, row)
            decisions += 1
            assert 0 <= chosen < len(engines), f"decision {decisions - 1}: chose {chosen}; holding is not modelled"
            config, record = instances[chosen], records[row]
            record.arrival_s, record.dispatch_s, record.instance = arrival_s, now_s, chosen
            priority = int(table.priority[row]) if config.priority_order else 0
            job = Job(
                row=row,
                prompt=int(table.prompt_tokens[row]),
                output=int(table.output_tokens[row]),
                key=(priority, now_s, row),
                path=path_of(table, row, config.block_size) if config.prefix_cache else [],
                record=record,
            )
            engines[chosen].submit(job, now_s)
        else:
            for job in engines[index].boundary():
                for row in range(len(table)):
                    if table.parent[row] == job.row and not math.isnan(table.think_s[row]):
                        arrivals.append((now_s + float(table.think_s[row]), row))
    return OracleResult(
        requests=records,
        preemptions=[engine.preemptions for engine in engines],
        iterations=[engine.iterations for engine in engines],
        evicted_blocks=[engine.memory.evicted for engine in engines],
        blocked_boundaries=[engine.blocked_boundaries for engine in engines],
        history=[engine.history for engine in engines],
    )
