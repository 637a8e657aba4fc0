"""A second policy that decides beside the first, and nothing happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fleetpilot.dispatcher.decisions import Decided, is_legal, said
from fleetpilot.fleet.policy import Policy, kinds_of, refuse_oracle
from fleetpilot.fleet.view import NONE


class Shadow:
    """A policy that is asked what the policy is asked, and whose choices are compared and never carried out.

    Args:
        policy: asked for the kinds that it answers.
        seed: of it.

    Raises:
        ValueError: it is an oracle bound.

    Attributes:
        counts: its choices that were the ``same`` as the policy preferred, ``other`` ones, and those that ``failed``:
            it raised an error or chose what it may not.
    """

    def __init__(self, policy: Policy, seed: int = 0):
        refuse_oracle("shadow", policy)
        self.policy = policy
        self.counts: Counter[str] = Counter()
        policy.reset(1, seed)

    def ask(self, decided: Decided) -> dict[str, Any] | None:
        """What it would have chosen, as in the log; None where it is not for such decisions."""
        if decided.kind not in kinds_of(self.policy):
            return None
        error, choice = "", NONE
        try:
            choice = int(self.policy.decide(decided.view).choice[0])
            if not is_legal(choice, decided.view):
                error = "illegal choice"
        except Exception as raised:  # a policy is a plug-in
            error = type(raised).__name__
        self.counts["failed" if error else "same" if choice == decided.preferred else "other"] += 1
        return {"policy": self.policy.name, "choice": None if error else said(choice), "error": error or None}
