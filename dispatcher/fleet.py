"""The fleet as the dispatcher sees it: engines, their polls, the ledger, and the view that policies decide on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.dispatcher.engine import NOWHERE, Engine, EngineState
from fleetpilot.dispatcher.policy_host import PolicyHost
from fleetpilot.dispatcher.prefix_index import PrefixIndex
from fleetpilot.fleet.ledger import Ledger
from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    FleetView,
    empty_view,
)
from fleetpilot.fleet.vllm_metrics import VllmMetrics, apply_poll

_NO_REQUEST = empty_view(1, 1).request


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
    """Engines and what is known of them; asks the policy.

    Args:
        profile: of the engines, the constants that policies read.
        host: of the policy.
        slo: the class that all requests are held to.
        seed: of random keys.

    Attributes:
        engines: by slot.
        ledger: of the requests in flight.
        view: a batch of one, kept up to date in place.
        held: requests that wait at the dispatcher.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        host: PolicyHost,
        slo: SLOClass,
        seed: int = 0,
    ):
        self.engines: list[Engine] = []
        self.host = host
        self.slo = slo
        self.view = empty_view(1, 0)
        self.index = PrefixIndex(0)
        self.held = 0
        Ledger.warm_up()
        self.ledger = Ledger(self.view.instances[0])
        self._profile = profile
        self._instances = self.view.instances[0]
        self._request = _columns(self.view.request)
        self._fleet = _columns(self.view.fleet)
        self._polled_s = np.empty(0)
        self._start_s = time.monotonic()
        self._random = random.Random(seed)

    def add(self, url: str) -> Engine:
        """An engine joins, in the slot of one that is expected, or is gone, or in a new one.

        Raises:
            ValueError: the URL is none.
        """
        expected = self.expected
        return self._seat(expected[0].slot if expected else self._free_slot(), url, EngineState.STARTING)

    @property
    def expected(self) -> list[Engine]:
        """Slots of instances that were ordered and are nowhere yet."""
        return [e for e in self.engines if e.state == EngineState.STARTING and not e.has_address]

    def expect(self, instances: int) -> None:
        """So many instances were ordered and are nowhere yet: to policies they are starting."""
        for engine in self.expected[instances:]:
            self.set_state(engine, EngineState.ABSENT)
        for _ in range(instances - len(self.expected)):
            self._seat(self._free_slot(), NOWHERE, EngineState.STARTING)

    def reserve(self, slots: int) -> None:
        """Have so many slots: a policy says that an instance should start by choosing an absent one."""
        while len(self.engines) < slots:
            self._seat(len(self.engines), NOWHERE, EngineState.ABSENT)

    def _free_slot(self) -> int:
        return next((e.slot for e in self.engines if e.state == EngineState.ABSENT), len(self.engines))

    def _seat(self, slot: int, url: str, state: EngineState) -> Engine:
        engine = Engine(slot, url)
        if slot == len(self.engines):
            self._grow()
            self.engines.append(engine)
        else:
            self.engines[slot] = engine
        self._instances[slot] = empty_view(1, 1).instances[0, 0]
        self._instances["slot"][slot] = slot
        _apply_profile(self._instances[slot], self._profile)
        self.set_state(engine, state)
        self.forget_poll(engine)
        return engine

    def _grow(self) -> None:
        grown = empty_view(1, len(self.engines) + 1)
        grown.instances[0, :-1] = self._instances
        self.view = FleetView(grown.instances, self.view.request, self.view.fleet)
        self._instances = grown.instances[0]
        self.ledger.grow(self._instances)
        self.index.grow()
        self._polled_s = np.append(self._polled_s, -np.inf)

    def set_state(self, engine: Engine, state: EngineState) -> None:
        """The engine is in this state now."""
        if state != engine.state:
            engine.state = state
            engine.state_since_s = time.monotonic()
        self._instances["state"][engine.slot] = state

    def polled(self, engine: Engine, metrics: VllmMetrics, sent_s: float) -> None:
        """An engine answered a poll that was sent at `sent_s` (monotonic clock).

        Raises:
            ValueError: see `apply_poll`.
        """
        apply_poll(self._instances[engine.slot], metrics, 0.0)
        self._polled_s[engine.slot] = sent_s

    def forget_poll(self, engine: Engine) -> None:
        """The engine is another one now: what the last one said is not known of it."""
        for field in ("running", "waiting", "kv_usage", "preemptions", "prefix_queries_tokens", "prefix_hits_tokens"):
            self._instances[field][engine.slot] = 0.0
        self._polled_s[engine.slot] = -np.inf
        self.index.forget(engine.slot)

    def choose_dispatch(
        self,
        facts: RequestFacts,
        may_hold: bool,
        without: frozenset[int] = frozenset(),
        *,
        may_reject: bool = False,
    ) -> int:
        """Where a request goes; `NONE` to hold it, or where no engine can take it; `REJECT` to turn it away."""
        now_s = time.monotonic()
        self._see_request(facts, 0, now_s)
        return self._ask(
            KIND_DISPATCH,
            may_hold,
            now_s,
            lambda engine: engine.slot not in without and engine.may_take(now_s),
            facts.request_id,
            may_reject=may_reject,
        )

    def choose_source(self, may_leave: Callable[[Engine], bool]) -> int:
        """The instance that a request leaves, or `NONE`."""
        self._see_no_request()
        return self._ask(KIND_SOURCE, True, time.monotonic(), may_leave)

    def choose_destination(
        self, source: int, may_take: Callable[[Engine], bool], facts: RequestFacts, streamed_tokens: int
    ) -> int:
        """The instance that takes this request, or `NONE`."""
        now_s = time.monotonic()
        self._see_request(facts, streamed_tokens, now_s)
        return self._ask(
            KIND_DESTINATION,
            True,
            now_s,
            lambda engine: engine.slot != source and engine.may_take(now_s) and may_take(engine),
            facts.request_id,
            origin=source,
        )

    def choose_scale(self, may_change: Callable[[Engine], bool]) -> int:
        """The instance to start, to drain or to keep, or `NONE`."""
        self._see_no_request()
        return self._ask(KIND_SCALE, True, time.monotonic(), may_change)

    def _see_request(self, facts: RequestFacts, streamed_tokens: int, now_s: float) -> None:
        """The decision is about a request."""
        self._instances["matched_tokens"] = self.index.match(facts.prompt_blocks, facts.tokens_per_block)
        request = self._request
        request["prompt_tokens"][0] = facts.prompt_tokens
        request["streamed_tokens"][0] = streamed_tokens
        request["predicted_output_tokens"][0] = facts.predicted_output_tokens
        request["priority"][0] = facts.priority
        request["ttft_target_s"][0] = self.slo.ttft_target_s(facts.prompt_tokens)
        request["tpot_target_s"][0] = self.slo.tpot_s
        request["waited_s"][0] = now_s - facts.arrived_s
        request["session"][0] = facts.session
        request["turn"][0] = facts.turn

    def _see_no_request(self) -> None:
        """The decision is about the fleet: what the simulator shows then."""
        self._instances["matched_tokens"] = 0.0
        self.view.request[:] = _NO_REQUEST

    def _ask(
        self,
        kind: int,
        may_hold: bool,
        now_s: float,
        is_candidate: Callable[[Engine], bool],
        request: str = "",
        origin: int = NONE,
        may_reject: bool = False,
    ) -> int:
        candidates = [is_candidate(engine) for engine in self.engines]
        if not any(candidates):
            return NONE
        self._instances["candidate"] = candidates
        self._instances["origin"] = False
        if origin != NONE:
            self._instances["origin"][origin] = True
        self._instances["poll_age_s"] = now_s - self._polled_s
        fleet = self._fleet
        fleet["time_s"][0] = now_s - self._start_s
        fleet["kind"][0] = kind
        fleet["may_hold"][0] = may_hold
        fleet["held"][0] = self.held
        fleet["random_key"][0] = self._random.getrandbits(64)
        choice = self.host.choose(self.view, request, may_reject=may_reject)
        if choice >= 0 and kind == KIND_DISPATCH:
            fleet["decisions"][0] += 1
        return choice

    def poll_age_s(self, slot: int) -> float:
        """Age of an instance's last poll; inf before the first."""
        return time.monotonic() - float(self._polled_s[slot])

    def set_migrating(self, slot: int, migrating: bool) -> None:
        """Whether an instance takes part in a migration."""
        self._instances["migrating"][slot] = migrating

    def dispatched(self, facts: RequestFacts, slot: int) -> None:
        """A request was sent to the instance in this slot."""
        matched_tokens = min(int(self._instances["matched_tokens"][slot]), facts.prompt_tokens)
        self.ledger.dispatch(
            facts.request_id,
            slot,
            facts.prompt_tokens,
            facts.predicted_output_tokens,
            matched_tokens,
            facts.priority,
        )
        instance = self._instances[slot]
        most_tokens = float(instance["kv_capacity_blocks"] * instance["block_size"])
        self.index.insert(slot, facts.prompt_blocks, facts.tokens_per_block, most_tokens)
        self._instances["indexed_tokens"][slot] = self.index.tokens[slot]


def _columns(records: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    """Its fields, to be written to: ten times as fast as a record's."""
    return {name: records[name] for name in records.dtype.names or ()}


def _apply_profile(instance: np.void, profile: HardwareProfile) -> None:
    instance["kv_capacity_blocks"] = profile.kv_blocks
    instance["block_size"] = profile.block_size
    instance["max_num_seqs"] = profile.max_num_seqs
    instance["max_num_batched_tokens"] = profile.max_num_batched_tokens
    instance["prefill_s_per_token"] = profile.prefill_s_per_token
    instance["decode_step_s"] = profile.decode_step_s
    instance["decode_s_per_seq"] = profile.decode_s_per_seq
