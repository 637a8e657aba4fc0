"""Runs a policy under conditions: in time, legal, and never able to stop the dispatcher."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from fleetpilot.dispatcher.decision_log import Records
from fleetpilot.dispatcher.decisions import (
    BY_DRY_RUN,
    BY_EXPLORATION,
    BY_FALLBACK,
    BY_POLICY,
    RECENT,
    Decided,
    is_legal,
)
from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.policy import CompiledPolicy, Policy, kinds_of, refuse_oracle
from fleetpilot.fleet.view import KIND_DISPATCH, NONE, FleetView

_LOG = logging.getLogger("fleetpilot.dispatcher")

OUT_OF_RANGE = "out of range"


class PolicyHost:
    """A policy and the baseline that answers where it cannot.

    Args:
        policy: asked for every decision of its kinds.
        fallback: a compiled baseline, asked when the policy raises an error, answers illegally or too late.
        deadline_s: for a decision. A compiled policy is not interrupted: its decisions take microseconds.
        seed: of the policies, and of what is explored.
        explore: share of the requests to be placed that go to a candidate drawn uniformly instead. A hold stays one:
            it is asked about many times a second, and would soon be none.
        dry_run: the policy is asked, and requests go where the fallback sends them; the caller moves none.

    Raises:
        ValueError: one of them is an oracle bound.

    Attributes:
        fallbacks: reason -> how often the fallback decided.
        decided: (kind, by whom) -> decisions.
        number: of the latest decision, from 1.
        log: that is told of every decision; None for none.
        recent: decisions, but those that nothing moves, until `watched_until_s` (monotonic clock).
    """

    def __init__(
        self,
        policy: Policy,
        fallback: CompiledPolicy,
        deadline_s: float = 0.05,
        seed: int = 0,
        explore: float = 0.0,
        dry_run: bool = False,
    ):
        self.deadline_s = deadline_s
        self.seed = seed
        self.fallbacks: Counter[str] = Counter()
        self.decided: Counter[tuple[str, str]] = Counter()
        self.number = 0
        self.log: Records | None = None
        self.recent: deque[Decided] = deque(maxlen=RECENT)
        self.watched_until_s = 0.0
        self._draws = random.Random(seed)
        self._worker: ThreadPoolExecutor | None = None
        self._use(policy, fallback, explore, dry_run)

    def take_up(self, policy: Policy, fallback: CompiledPolicy, explore: float, *, dry_run: bool) -> None:
        """These from the next decision on; what was counted stays.

        Raises:
            ValueError: one of them is an oracle bound; nothing has changed then.
        """
        counted = Counter(self.fallback_counts)
        self._use(policy, fallback, explore, dry_run)
        self.fallbacks = counted

    def _use(self, policy: Policy, fallback: CompiledPolicy, explore: float, dry_run: bool) -> None:
        refuse_oracle("policy", policy)
        refuse_oracle("fallback", fallback)
        policy.reset(1, self.seed)
        fallback.reset(1, self.seed)
        if self._worker is not None:
            self._worker.shutdown(wait=False)
        self.policy = policy
        self.fallback = fallback
        self.explore = explore
        self.dry_run = dry_run
        self._worker = None if isinstance(policy, CompiledPolicy) else ThreadPoolExecutor(1, "policy")

    @property
    def kinds(self) -> tuple[int, ...]:
        """Of decision that the policy answers."""
        return kinds_of(self.policy)

    @property
    def fallback_counts(self) -> dict[str, int]:
        """`fallbacks`, and under ``out of range`` the decisions that a learned policy left to its own baseline."""
        outside = self._outside() + self.fallbacks[OUT_OF_RANGE]
        return {**self.fallbacks, **({OUT_OF_RANGE: outside} if outside else {})}

    def _outside(self) -> int:
        """Decisions that a learned policy left to its own baseline."""
        return int(getattr(self.policy, "counts", {}).get("out_of_range", 0))

    def choose(self, view: FleetView, request: str = "", *, may_reject: bool = False) -> int:
        """The slot chosen, `NONE`, or `REJECT` where that may be.

        In a dry run what the policy prefers, where that is no dispatch.

        Args:
            view: of one fleet.
            request: that the decision is about, for the log.
            may_reject: whether the request may be turned away.
        """
        preferred, reason = self._preferred(view, may_reject)
        kind = int(view.fleet["kind"][0])
        choice, propensity, by = preferred, 1.0, BY_FALLBACK if reason else BY_POLICY
        if self.dry_run:
            choice, by = self._by_fallback(view, may_reject) if kind == KIND_DISPATCH else NONE, BY_DRY_RUN
        elif self.explore and kind == KIND_DISPATCH and preferred >= 0:
            choice, propensity = self._explored(preferred, view)
            by = by if choice == preferred else BY_EXPLORATION
        self.number += 1
        self.decided[KINDS[kind], by] += 1
        watched = time.monotonic() < self.watched_until_s
        if watched or self.log is not None:
            decided = Decided(
                number=self.number,
                request=request,
                kind=kind,
                policy=self.policy.name,
                by=by,
                reason=reason,
                preferred=preferred,
                choice=choice,
                propensity=propensity,
                view=_copy(view),
            )
            if watched and (kind == KIND_DISPATCH or preferred != NONE):
                self.recent.append(decided)
            if self.log is not None:
                self.log.decision(decided)
        return preferred if self.dry_run and kind != KIND_DISPATCH else choice

    def _preferred(self, view: FleetView, may_reject: bool) -> tuple[int, str]:
        """The choice of the policy, or of the fallback and why."""
        outside = self._outside()
        try:
            choice = self._asked(view)
        except FutureTimeoutError:
            reason = "timeout"
        except Exception as error:  # a policy is a plug-in: whatever it raises must not stop the dispatcher
            reason = type(error).__name__
        else:
            if is_legal(choice, view, may_reject=may_reject):
                return choice, self._why_outside(outside)
            reason = "illegal choice"
        self.fallbacks[reason] += 1
        return self._by_fallback(view, may_reject), reason

    def _why_outside(self, before: int) -> str:
        """The reason if a learned policy has just left a decision to its own baseline."""
        if self._outside() == before:
            return ""
        if before == 0:
            _LOG.warning(
                "policy %s: what it sees is outside the ranges that it was trained on, so its own fallback decides; "
                "fleetpilot_policy_fallbacks_total counts how often, docs/training.md says what helps",
                self.policy.name,
            )
        return OUT_OF_RANGE

    def _by_fallback(self, view: FleetView, may_reject: bool) -> int:
        if int(view.fleet["kind"][0]) not in kinds_of(self.fallback):
            return NONE
        choice = int(self.fallback.decide(view).choice[0])
        return choice if is_legal(choice, view, may_reject=may_reject) else NONE

    def _explored(self, preferred: int, view: FleetView) -> tuple[int, float]:
        """The choice that is carried out, and its probability."""
        candidates = view.candidates[0].nonzero()[0].tolist()
        choice = self._draws.choice(candidates) if self._draws.random() < self.explore else preferred
        return choice, self.explore / len(candidates) + (1.0 - self.explore) * (choice == preferred)

    def _asked(self, view: FleetView) -> int:
        if self._worker is None:
            return int(self.policy.decide(view).choice[0])
        copy = _copy(view)
        start_s = time.monotonic()
        future = self._worker.submit(lambda: self.policy.decide(copy).choice[0])
        choice = int(future.result(timeout=self.deadline_s))
        if time.monotonic() - start_s > self.deadline_s:
            raise FutureTimeoutError
        return choice


def _copy(view: FleetView) -> FleetView:
    return FleetView(view.instances.copy(), view.request.copy(), view.fleet.copy())
