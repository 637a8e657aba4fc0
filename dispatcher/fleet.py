"""The fleet as the dispatcher sees it: engines, their polls, the ledger, and the view that policies decide on."""

from __future__ import annotations

import random
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetpilot.dispatcher.engine import NOWHERE, Engine, EngineState
from fleetpilot.dispatcher.policy_host import PolicyHost
from fleetpilot.dispatcher.prefix_index import PrefixIndex
from fleetpilot.dispatcher.workers.board import FORGET, MOST_ENGINES, PREFIX, SESSION, Board
from fleetpilot.fleet.ledger import Ledger, add_up, see_engines
from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.fleet.view import (
    FLEET_VIEW,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    REQUEST_VIEW,
    STATE_READY,
    FleetView,
    empty_view,
)
from fleetpilot.fleet.vllm_metrics import VllmMetrics, apply_poll

_NO_REQUEST = empty_view(1, 1).request
_KNOWN_SESSIONS = 65_536


@dataclass
class RequestFacts:
    """What the dispatcher knows of a request when it is to be placed.

    Attributes:
        request_id: unique among those in flight.
        prompt_tokens: exact where the prompt was tokenised, else estimated.
        prompt_blocks: names of the prompt's blocks for the prefix index, first to last.
        tokens_per_block: of these.
        predicted_output_tokens: of the whole answer.
        priority: the client's; lower is earlier.
        session: of the client, -1 for none.
        turn: within the session.
        arrived_s: when it came, complete (monotonic clock).
    """

    request_id: str
    prompt_tokens: int
    prompt_blocks: tuple[int, ...]
    tokens_per_block: float
    predicted_output_tokens: float
    priority: int
    session: int
    turn: int
    arrived_s: float


class Fleet:
    """Engines and what is known of them; asks the policy, and books what it chose in the same step.

    Args:
        profile: of the engines, the constants that policies read.
        host: of the policy.
        slo: the class that all requests are held to.
        seed: of random keys.
        board: what other processes of this dispatcher know as well; None for one that is alone.

    Attributes:
        engines: by slot.
        ledger: of the requests in flight that this process serves.
        index: of the prefixes that dispatches of all processes have left.
        board: see above.
        heard_s: (slots,) when each instance last sent this process anything on a request (monotonic clock), to be set.
        on_change: called with an engine whose state this process, which leads, has set.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        host: PolicyHost,
        slo: SLOClass,
        seed: int = 0,
        board: Board | None = None,
    ):
        self.engines: list[Engine] = []
        self.host = host
        self.slo = slo
        self.board = board or Board.alone()
        self.index = PrefixIndex(0)
        self.on_change: Callable[[Engine], None] = lambda engine: None
        Ledger.warm_up()
        self.ledger = Ledger(self.board.own, self.board.head_s[self.board.me])
        self._profile = profile
        self._view = empty_view(1, 0)
        self._instances = self._view.instances[0]
        self._request = self._view.request.view(np.uint8).data
        self._fleet = self._view.fleet.view(np.uint8).data
        self._unready: set[int] = set()  # slots whose engine is not ready, as far as this process has heard
        self.heard_s = self.board.last_token_s[self.board.me]
        self._sessions: OrderedDict[int, list[int]] = OrderedDict()
        self._start_s = time.monotonic()
        self._random = random.Random(seed)

    @property
    def leads(self) -> bool:
        """Whether this process says which engines there are and how they fare."""
        return self.board.me == 0

    @property
    def view(self) -> FleetView:
        """What is known now: a batch of one, kept up to date in place whenever this is asked."""
        self._look(time.monotonic())
        return self._view

    def _look(self, now_s: float) -> int:
        """Bring the view's instances up to date; how many of them requests may be sent to."""
        board = self.board
        add_up(self._instances, board.instances, board.ledgers, board.head_s, board.me)
        return int(see_engines(self._instances, board.polled_s, board.blocked_until_s, now_s))

    # engines come and go

    def add(self, url: str) -> Engine:
        """An engine joins, in the slot of one that is expected, or is gone, or in a new one.

        Raises:
            ValueError: the URL is none, or there are as many engines as there may be.
        """
        expected = self.expected
        return self.seat(expected[0].slot if expected else self._free_slot(), url, EngineState.STARTING)

    @property
    def expected(self) -> list[Engine]:
        """Slots of instances that were ordered and are nowhere yet."""
        return [e for e in self.engines if e.state == EngineState.STARTING and not e.has_address]

    def expect(self, instances: int) -> None:
        """So many instances were ordered and are nowhere yet: to policies they are starting."""
        for engine in self.expected[instances:]:
            self.set_state(engine, EngineState.ABSENT)
        for _ in range(instances - len(self.expected)):
            self.seat(self._free_slot(), NOWHERE, EngineState.STARTING)

    def reserve(self, slots: int) -> None:
        """Have so many slots: a policy says that an instance should start by choosing an absent one."""
        while len(self.engines) < slots:
            self.seat(len(self.engines), NOWHERE, EngineState.ABSENT)

    def _free_slot(self) -> int:
        return next((e.slot for e in self.engines if e.state == EngineState.ABSENT), len(self.engines))

    def seat(self, slot: int, url: str, state: EngineState) -> Engine:
        """An engine is in this slot from now on: a free one, or the next."""
        if slot >= MOST_ENGINES:
            raise ValueError(f"engine {url!r}: expected at most {MOST_ENGINES:,} engines")
        engine = Engine(slot, url)
        if slot == len(self.engines):
            self.engines.append(engine)
            self._view = FleetView(empty_view(1, slot + 1).instances, self._view.request, self._view.fleet)
            self._instances = self._view.instances[0]
            self.index.grow()
        else:
            self.engines[slot] = engine
        empty = empty_view(1, 1).instances[0, 0]
        _apply_profile(empty, self._profile)
        with self.board.lock:
            self.board.own[slot] = empty
            if self.leads:
                empty["slot"] = slot
                self.board.instances[slot] = empty
                self.board.blocked_until_s[slot] = 0.0
        if self.leads:
            self.forget_poll(engine)
        self.set_state(engine, state)
        return engine

    def set_state(self, engine: Engine, state: EngineState) -> None:
        """The engine is in this state now; in a process that does not lead, as far as it has heard."""
        if state != engine.state:
            engine.state = state
            engine.state_since_s = time.monotonic()
        (self._unready.discard if state == EngineState.READY else self._unready.add)(engine.slot)
        if self.leads:
            with self.board.lock:
                self.board.instances["state"][engine.slot] = state
            self.on_change(engine)

    def block(self, engine: Engine, until_s: float) -> None:
        """The engine gets no requests until then (monotonic clock)."""
        with self.board.lock:
            blocked_until_s = self.board.blocked_until_s
            blocked_until_s[engine.slot] = max(until_s, blocked_until_s[engine.slot])

    def may_take(self, engine: Engine, now_s: float) -> bool:
        """Whether a request may be sent to it."""
        return (
            engine.state == EngineState.READY
            and bool(self.board.instances["state"][engine.slot] == STATE_READY)
            and now_s >= float(self.board.blocked_until_s[engine.slot])
        )

    def polled(self, engine: Engine, metrics: VllmMetrics, sent_s: float) -> None:
        """An engine answered a poll that was sent at `sent_s` (monotonic clock).

        Raises:
            ValueError: see `apply_poll`.
        """
        instances = self.board.instances
        with self.board.lock:
            instances["in_flight"][engine.slot] = self.in_flight(engine.slot)
            apply_poll(instances[engine.slot], metrics, 0.0)
            self.board.polled_s[engine.slot] = sent_s

    def forget_poll(self, engine: Engine) -> None:
        """The engine is another one now: what the last one said is not known of it."""
        with self.board.lock:
            instance = self.board.instances[engine.slot]
            for field in (
                *("running", "waiting", "kv_usage", "preemptions", "prefix_queries_tokens", "prefix_hits_tokens"),
                "indexed_tokens",
            ):
                instance[field] = 0.0
            self.board.polled_s[engine.slot] = -np.inf
            self._catch_up()
            self.index.forget(engine.slot)
            self._note(FORGET, engine.slot)

    # what is known of them

    def in_flight(self, slot: int) -> int:
        """Requests that this instance has, of all processes."""
        return int(self.board.ledgers["in_flight"][:, slot].sum())

    def last_token_s(self, slot: int) -> float:
        """When the instance last sent anything on a request (monotonic clock)."""
        return float(self.board.last_token_s[:, slot].max())

    def poll_age_s(self, slot: int) -> float:
        """Age of an instance's last poll; inf before the first."""
        return time.monotonic() - float(self.board.polled_s[slot])

    def is_migrating(self, slot: int) -> bool:
        """Whether an instance takes part in a migration."""
        return bool(self.board.ledgers["migrating"][:, slot].any())

    @property
    def migrations(self) -> int:
        """That go on, of all processes."""
        return sum(self.board.migrations.tolist())

    def set_migrating(self, migrations: int, slots: Collection[int]) -> None:
        """So many migrations of this process go on, between the instances in these slots."""
        migrating = self.board.own["migrating"][: len(self.engines)]
        with self.board.lock:
            migrating[:] = 0
            migrating[list(slots)] = 1
            self.board.migrations[self.board.me] = migrations

    @property
    def held(self) -> int:
        """Requests that wait at the dispatcher."""
        return sum(self.board.held.tolist())

    def hold(self, requests: int, oldest_s: float) -> None:
        """So many requests wait in this process, the first since `oldest_s` (monotonic clock; inf for none)."""
        self.board.held[self.board.me] = requests
        self.board.oldest_held_s[self.board.me] = oldest_s

    def turn(self, session: str) -> tuple[int, int]:
        """A request of a session has come: the session's number, and the turn within it."""
        key = hash(session)
        with self.board.lock:
            self._catch_up()
            number, turn = self._sessions.get(key, (int(self.board.numbers[_SESSIONS]), -1))
            self.board.numbers[_SESSIONS] = max(number + 1, int(self.board.numbers[_SESSIONS]))
            self._note(SESSION, key, (number, turn + 1))
            self._know_session(key, number, turn + 1)
        return number, turn + 1

    def _know_session(self, key: int, number: int, turn: int) -> None:
        self._sessions[key] = [number, turn]
        self._sessions.move_to_end(key)
        if len(self._sessions) > _KNOWN_SESSIONS:
            self._sessions.popitem(last=False)

    # deciding

    def choose_dispatch(
        self,
        facts: RequestFacts,
        may_hold: bool,
        without: frozenset[int] = frozenset(),
        *,
        may_reject: bool = False,
    ) -> int:
        """Where a request goes, which is booked there; `NONE` to hold it, or where no engine can take it; `REJECT`."""
        with self.board.lock:
            now_s = time.monotonic()
            if not self._look(now_s) - self._leave_out(without):
                return NONE
            self._see_request(facts, 0, now_s)
            choice = self._ask(KIND_DISPATCH, may_hold, now_s, facts.request_id, may_reject=may_reject)
            if choice >= 0:
                self.board.numbers[_DISPATCHES] += 1
                self._book(facts, choice, now_s)
        return choice

    def choose_source(self, may_leave: Callable[[Engine], bool]) -> int:
        """The instance that a request leaves, or `NONE`."""
        return self._choose_instance(KIND_SOURCE, may_leave)

    def choose_scale(self, may_change: Callable[[Engine], bool]) -> int:
        """The instance to start, to drain or to keep, or `NONE`."""
        return self._choose_instance(KIND_SCALE, may_change)

    def _choose_instance(self, kind: int, is_candidate: Callable[[Engine], bool]) -> int:
        with self.board.lock:
            now_s = time.monotonic()
            self._look(now_s)
            candidates = [is_candidate(engine) for engine in self.engines]
            if not any(candidates):
                return NONE
            self._instances["candidate"] = candidates
            self._view.request[:] = _NO_REQUEST  # what the simulator shows where the decision is about the fleet
            return self._ask(kind, True, now_s)

    def choose_destination(
        self, source: int, may_take: Callable[[Engine], bool], facts: RequestFacts, streamed_tokens: int
    ) -> int:
        """The instance that takes this request, or `NONE`."""
        with self.board.lock:
            now_s = time.monotonic()
            takers = self._look(now_s)
            takers -= self._leave_out({source, *(engine.slot for engine in self.engines if not may_take(engine))})
            if not takers:
                return NONE
            self._see_request(facts, streamed_tokens, now_s)
            self._instances["origin"][source] = True
            return self._ask(KIND_DESTINATION, True, now_s, facts.request_id)

    def book(self, facts: RequestFacts, slot: int) -> None:
        """A request is sent to the instance in this slot without a decision of now."""
        with self.board.lock:
            now_s = time.monotonic()
            self._look(now_s)
            self._see_request(facts, 0, now_s)
            self._book(facts, slot, now_s)

    def _leave_out(self, slots: Collection[int]) -> int:
        """These are no candidates, nor are those that this process has not heard to be ready; how many have been."""
        candidate = self._instances["candidate"]
        were = 0
        for slot in self._unready.union(slots) if slots else self._unready:
            were += int(candidate[slot])
            candidate[slot] = 0
        return were

    def _see_request(self, facts: RequestFacts, streamed_tokens: int, now_s: float) -> None:
        """The decision is about a request."""
        self._catch_up()
        if facts.prompt_blocks:
            self._instances["matched_tokens"] = self.index.match(facts.prompt_blocks, facts.tokens_per_block)
        _write_request(
            self._request,
            prompt_tokens=facts.prompt_tokens,
            streamed_tokens=streamed_tokens,
            predicted_output_tokens=facts.predicted_output_tokens,
            priority=facts.priority,
            slo_class=0,
            ttft_target_s=self.slo.ttft_target_s(facts.prompt_tokens),
            tpot_target_s=self.slo.tpot_s,
            waited_s=now_s - facts.arrived_s,
            session=facts.session,
            turn=facts.turn,
        )

    def _ask(
        self,
        kind: int,
        may_hold: bool,
        now_s: float,
        request: str = "",
        may_reject: bool = False,
    ) -> int:
        """The choice among the view's candidates."""
        numbers = self.board.numbers
        decisions, dispatches, _ = numbers.tolist()
        _write_fleet(
            self._fleet,
            time_s=now_s - self._start_s,
            kind=kind,
            may_hold=may_hold,
            held=self.held,
            decisions=dispatches,
            random_key=self._random.getrandbits(64),
            engine_reported=0,
        )
        self.host.number = decisions
        choice = self.host.choose(self._view, request, may_reject=may_reject)
        numbers[_DECISIONS] = self.host.number
        return choice

    def _book(self, facts: RequestFacts, slot: int, now_s: float) -> None:
        """The request that the view is about goes to the instance in this slot."""
        matched_tokens = min(int(self._instances["matched_tokens"][slot]), facts.prompt_tokens)
        self.ledger.dispatch(
            facts.request_id,
            slot,
            facts.prompt_tokens,
            facts.predicted_output_tokens,
            matched_tokens,
            facts.priority,
            now_s,
        )
        if facts.prompt_blocks:
            self._insert(slot, facts.tokens_per_block, facts.prompt_blocks)
            self.board.instances["indexed_tokens"][slot] = self.index.tokens[slot]
            per_block = struct.unpack("q", struct.pack("d", facts.tokens_per_block))
            self._note(PREFIX, slot, (*per_block, *facts.prompt_blocks))

    # what each process keeps of what all have done

    def _insert(self, slot: int, tokens_per_block: float, blocks: Sequence[int]) -> None:
        instance = self.board.instances[slot]
        most_tokens = float(instance["kv_capacity_blocks"] * instance["block_size"])
        self.index.insert(slot, blocks, tokens_per_block, most_tokens)

    def _note(self, kind: int, argument: int, further: Sequence[int] = ()) -> None:
        if self.board.journal is not None:
            self.board.journal.write(kind, argument, further)

    def catch_up(self) -> None:
        """Take in what other processes have done."""
        with self.board.lock:
            self._catch_up()

    def _catch_up(self) -> None:
        journal = self.board.journal
        if journal is None or journal.is_read:
            return
        for kind, argument, further in journal.read():
            if kind == SESSION:
                self._know_session(argument, *further)
            elif argument >= len(self.engines):
                pass  # this process has not heard of the engine yet, and sends it nothing
            elif kind == PREFIX:
                (tokens_per_block,) = struct.unpack("d", struct.pack("q", further[0]))
                self._insert(argument, tokens_per_block, further[1:])
            else:
                self.index.forget(argument)


_DECISIONS, _DISPATCHES, _SESSIONS = range(3)
"""Places in `Board.numbers`."""


def _writer(dtype: np.dtype[np.void]) -> Callable[..., None]:
    """Writes one record of this type, given by its fields in their order: ten times as fast as field by field."""
    codes = {"f": "d", "i": "q", "u": "Q"}
    record = struct.Struct("".join(codes[dtype[name].kind] for name in dtype.names or ()))
    assert record.size == dtype.itemsize

    def write(memory: memoryview, **fields: Any) -> None:
        assert (*fields,) == dtype.names
        record.pack_into(memory, 0, *fields.values())

    return write


_write_request = _writer(REQUEST_VIEW)
_write_fleet = _writer(FLEET_VIEW)


def _apply_profile(instance: np.void, profile: HardwareProfile) -> None:
    instance["kv_capacity_blocks"] = profile.kv_blocks
    instance["block_size"] = profile.block_size
    instance["max_num_seqs"] = profile.max_num_seqs
    instance["max_num_batched_tokens"] = profile.max_num_batched_tokens
    instance["prefill_s_per_token"] = profile.prefill_s_per_token
    instance["decode_step_s"] = profile.decode_step_s
    instance["decode_s_per_seq"] = profile.decode_s_per_seq
