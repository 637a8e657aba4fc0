"""An emulated engine without its interface: the cluster model's one instance, fed as requests come (cluster/live.py).

Times are the caller's, in seconds from the start: nothing here looks at a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import loading
from fleetpilot.cluster.config import FleetConfig, Telemetry
from fleetpilot.cluster.lifecycle import prepare
from fleetpilot.cluster.live import (
    PROGRESS,
    begin_hold,
    drop,
    end_hold,
    end_iteration,
    fill_hold,
    start_iteration,
    submit,
)
from fleetpilot.cluster.memory import handle
from fleetpilot.cluster.state import IDLE, NIL, State, allocate, grown
from fleetpilot.dispatcher.emulator.block_tree import BlockTree
from fleetpilot.dispatcher.emulator.language_model import answer
from fleetpilot.fleet.profiles import HardwareProfile

_FIRST_SLOTS = 256
_NEVER_POLLED_S = 1e6


@dataclass(eq=False, slots=True)
class Job:
    """One sequence to generate.

    Attributes:
        prompt: (p,) its tokens.
        answer: (n,) what will have been generated at the end.
        on_tokens: called with (job, first, last) when the tokens `first` to `last - 1` of the answer have come; after
            the last one the job has ended.
        priority: lower goes first, where the engine orders by priority.
        salt: only sequences of the same salt share blocks.
        keep: whether the blocks stay pinned at the end, by the hold `lease`.
        cached_tokens: those of the prompt whose KV was there when it was admitted.
        pulled_tokens: of these, the ones that have come from another engine.
        arrival_s: when it was submitted; the others are NaN until they happen.
    """

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    on_tokens: Callable[[Job, int, int], None]
    priority: int = 0
    salt: bytes = b""
    keep: bool = False
    pulled_tokens: int = 0
    cached_tokens: int = 0
    arrival_s: float = math.nan
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    done: int = 0
    lease: int = NIL
    ended: bool = False
    path: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    slot: int = NIL
    hold: int = NIL  # of the blocks that are pulled for it, until it is admitted
    present_tokens: int = 0  # those that were there before the pull


class Engine:
    """One instance of a profile.

    Args:
        profile: its times, memory and scheduler.
        seed: of the iteration times' jitter.
    """

    def __init__(self, profile: HardwareProfile, seed: int = 0):
        self.profile = profile
        self.time_s = 0.0
        fleet = FleetConfig((profile,), telemetry=Telemetry(poll_interval_s=_NEVER_POLLED_S))
        nodes = 2 * profile.kv_blocks + profile.max_model_len // profile.block_size
        self._size = loading.capacity_for([fleet], rows=1, slots=_FIRST_SLOTS, nodes=nodes, closed_rows=0)
        self._state = allocate(self._size)
        loading.load_fleet(self._state, self._size, 0, fleet)
        loading.load_env(self._state, self._size, 0, fleet, seed=seed, leap=False, stop_s=np.inf)
        row = self._state.row
        row["prefix_node"] = row["first_child"] = row["next_sibling"] = NIL
        self._state.env["rows"] = 1
        self._state.env["nodes"] = nodes
        self._tree = BlockTree(profile.block_size, self._state.node)
        self._use(self._state)
        prepare(self._handle, 0)
        self._progress = np.zeros(profile.max_num_seqs, PROGRESS)
        self._jobs: dict[int, Job] = {}  # by slot
        self._holds: dict[int, NDArray[np.int32]] = {}  # their sequences, by slot
        self._pulls: deque[tuple[Job, Callable[[Job, int], None]]] = deque()  # that wait for blocks
        self._copying = 0
        self._fetched: list[Job] = []  # of which some blocks were pulled, until they are admitted
        self._dropped: list[Job] = []
        self._numbers = 0
        self.pulled_tokens = 0

    def _use(self, state: State) -> None:
        self._state = state
        self._handle: Any = handle(state)
        self._instance = state.instance[0]
        self._next = state.next_boundary
        self._row = state.row[0]

    @property
    def state(self) -> State:
        """The arrays, to look at."""
        return self._state

    @property
    def next_s(self) -> float:
        """When the iteration in progress ends, or one begins; inf if there is nothing to do."""
        return float(self._next["time_s"][0])

    # --- what it has to do -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return int(self._instance["in_batch"])

    @property
    def waiting(self) -> int:
        """Requests in the queue, and those whose blocks are being fetched."""
        return int(self._instance["waiting"]) + self.fetching

    @property
    def fetching(self) -> int:
        """Requests whose blocks come from another engine and are not here yet."""
        return len(self._pulls) + self._copying

    @property
    def copying(self) -> int:
        """Of those, the ones whose blocks are being copied."""
        return self._copying

    @property
    def used_blocks(self) -> int:
        """Blocks that requests and leases hold."""
        return self.profile.kv_blocks - int(self._instance["free_blocks"]) - int(self._instance["lru_blocks"])

    def counter(self, name: str) -> int:
        """A counter of the instance: ``preemptions``, ``prefix_queries_tokens``, ``prefix_hits_tokens``."""
        return int(self._instance[name])

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job, time_s: float) -> None:
        """The job arrives now. Its tokens must fit the profile's `max_model_len`."""
        self._enter(job, time_s)
        row = self._row
        row["arrival_s"] = time_s
        row["prompt_tokens"] = len(job.prompt)
        row["output_tokens"] = len(job.answer)
        row["priority"] = job.priority
        row["own_node"] = job.path[-1] if len(job.path) else NIL
        self.time_s = time_s
        job.slot = int(submit(self._handle, self._numbers, time_s))
        self._numbers += 1
        self._jobs[job.slot] = job

    def abort(self, job: Job, time_s: float) -> None:
        """The job is wanted no more: it leaves when the iteration in progress has ended."""
        if job.ended:
            return
        job.ended = True
        if job.slot == NIL:
            self._forget(job)
            self._begin_pulls()
            return
        self._dropped.append(job)
        if self._instance["doing"] == IDLE:
            self._next["time_s"] = time_s

    def step(self) -> None:
        """Do what is due at `next_s`: an iteration ends, and the next one begins."""
        time_s = self.next_s
        self.time_s = time_s
        count = end_iteration(self._handle, time_s, self._progress)
        came: list[tuple[Job, int]] = []
        for slot, generated in self._progress[:count].tolist():
            job = self._jobs[slot]
            if generated < 0:
                generated = len(job.answer)
            if generated == job.done:
                continue
            came.append((job, generated))
            if job.done == 0:
                self._see_start(job, time_s)
            if generated == len(job.answer):
                if job.keep and not job.ended:
                    blocks, rest = divmod(len(job.prompt) + generated - 1, self.profile.block_size)
                    job.lease = self._hold(job.path, blocks, 1 if rest else 0)
                self._leave(job)
        for job in self._dropped:
            if self._jobs.get(job.slot) is job:
                drop(self._handle, job.slot, time_s)
                self._leave(job)
        wanted = [(job, generated) for job, generated in came if job not in self._dropped]
        self._dropped.clear()
        start_iteration(self._handle, time_s)
        self._end_fetches()
        for job, generated in wanted:
            first, job.done = job.done, generated
            job.ended = generated == len(job.answer)
            job.on_tokens(job, first, generated)
            job.last_token_s = time_s
        self._begin_pulls()

    def _see_start(self, job: Job, time_s: float) -> None:
        """The first token has come; the slot tells what went before even where the request has left it."""
        slot = self._state.slot[job.slot]
        job.first_token_s = time_s
        job.admitted_s = float(slot["admitted_s"])
        job.cached_tokens = min(int(slot["cached_tokens"]), len(job.prompt))
        if job.pulled_tokens > 0:
            # what was pulled beyond full blocks is used, and the model's prefill of it only stands for its last token
            if job.cached_tokens >= (job.pulled_tokens - 1) // self.profile.block_size * self.profile.block_size:
                job.cached_tokens = max(job.cached_tokens, job.pulled_tokens)
            job.pulled_tokens = max(0, job.cached_tokens - job.present_tokens)
            self.pulled_tokens += job.pulled_tokens

    def _leave(self, job: Job) -> None:
        """The job has left the instance."""
        del self._jobs[job.slot]
        self._forget(job)

    def _forget(self, job: Job) -> None:
        if job.hold != NIL:
            self.release(job.hold, self.time_s)
            job.hold = NIL
        self._tree.leave(job.path)

    def _enter(self, job: Job, time_s: float) -> None:
        if math.isnan(job.arrival_s):
            job.arrival_s = time_s
            if self.profile.prefix_cache:
                tokens = np.concatenate([job.prompt, job.answer])[:-1]  # the last one's KV is never computed
                self._make_nodes(len(tokens) // self.profile.block_size)
                job.path = self._tree.enter(tokens, job.salt)
        self._make_slot()

    # --- blocks of other engines' requests ---------------------------------------------------------------------------

    def pull(self, job: Job, tokens: int, time_s: float, on_start: Callable[[Job, int], None]) -> None:
        """A job arrives whose first `tokens` tokens another engine has: blocks are taken for them once they are free.

        Then `on_start` is called with (job, tokens to be copied); `end_pull` ends it.
        """
        self._enter(job, time_s)
        job.pulled_tokens = min(tokens, len(job.prompt))
        self._pulls.append((job, on_start))
        self._begin_pulls()

    def _begin_pulls(self) -> None:
        while self._pulls:
            job, on_start = self._pulls[0]
            if not job.ended:
                blocks = min(job.pulled_tokens // self.profile.block_size, len(job.path))
                job.hold = self._hold(job.path, blocks)
                if job.hold == NIL and blocks > 0:
                    return
                self._copying += 1
            self._pulls.popleft()
            if not job.ended:
                job.present_tokens = int(self._state.slot[job.hold]["computed_tokens"]) if job.hold != NIL else 0
                on_start(job, job.pulled_tokens - job.present_tokens)

    def end_pull(self, job: Job, copied: bool, time_s: float) -> None:
        """The tokens have been copied, or the copy failed; the job joins the queue."""
        self._copying -= 1
        if job.ended:
            return
        if not copied:
            job.pulled_tokens = 0
        elif job.hold != NIL:
            fill_hold(self._handle, job.hold)
        self.submit(job, time_s)
        self._fetched.append(job)

    def _end_fetches(self) -> None:
        """Jobs that have been admitted hold their blocks themselves."""
        if not self._fetched:
            return
        # where such blocks are all that keeps others from being admitted, nobody would ever be
        stuck = self._instance["doing"] == IDLE
        for job in self._fetched:
            if job.hold != NIL and (stuck or not math.isnan(self._state.slot[job.slot]["admitted_s"])):
                self.release(job.hold, self.time_s)
                job.hold = NIL
        self._fetched = [job for job in self._fetched if job.hold != NIL]

    def _hold(self, path: NDArray[np.int32], blocks: int, partial: int = 0) -> int:
        """Pin a sequence's first blocks, and `partial` of its own; `NIL` if they are not free, or there are none."""
        if blocks + partial == 0 or len(path) < blocks or not self.profile.prefix_cache:
            return NIL
        self._make_slot()
        slot = int(begin_hold(self._handle, int(path[blocks - 1]) if blocks else NIL, blocks, partial))
        if slot != NIL:
            self._holds[slot] = path[:blocks]
            self._tree.use(path[:blocks])
        return slot

    def release(self, hold: int, time_s: float) -> None:
        """The blocks of a hold are pinned no more."""
        end_hold(self._handle, hold, time_s)
        self._tree.leave(self._holds.pop(hold))
        self._begin_pulls()

    def hold_of(self, hold: int) -> list[int]:
        """Numbers of the blocks that a hold pins."""
        numbers: list[int] = self._holds[hold].tolist()
        return numbers

    # --- memory ------------------------------------------------------------------------------------------------------

    def _make_slot(self) -> None:
        """See to it that a slot is free."""
        env = self._state.env[0]
        if env["free_slot"] != NIL or env["used_slots"] < env["slots"]:
            return
        first = len(self._state.slot)
        slots = grown(self._state.slot, 2 * first)
        slots["row"][first:] = NIL
        env["slots"] += first
        self._use(self._state._replace(slot=slots))

    def _make_nodes(self, blocks: int) -> None:
        """See to it that so many blocks can become known."""
        if self._tree.free >= blocks:
            return
        residency = self._state.residency
        self._tree.forget((residency["blocks"] > 0) | (residency["pins"] > 0))
        while self._tree.free < blocks + len(residency) // 4:
            nodes = grown(self._state.node, 2 * len(residency))
            residency = grown(residency, len(nodes))
            self._tree.move_to(nodes)
            self._state.env["nodes"] = len(nodes)
            self._use(self._state._replace(node=nodes, residency=residency))


def warm_up(profiles: Iterable[HardwareProfile]) -> None:
    """Compile, or load, what engines run: it takes seconds, or the first time on a machine minutes."""
    for profile in list(profiles)[:1]:
        engine = Engine(profile)
        prompt = np.arange(profile.block_size + 1, dtype=np.int32)
        for keep in (False, True):
            job = Job(prompt, prompt[:1], lambda job, first, last: None, keep=keep)
            engine.submit(job, engine.time_s)
            engine.step()
            engine.step()
            if job.lease != NIL:
                engine.release(job.lease, engine.time_s)
        job = Job(prompt + 1, prompt[:1], lambda job, first, last: None)
        engine.pull(job, len(prompt), engine.time_s, lambda job, blocks: None)
        engine.end_pull(job, True, engine.time_s)
        engine.abort(job, engine.time_s)
        engine.step()
        answer(prompt, 1, mean_tokens=1.0)
