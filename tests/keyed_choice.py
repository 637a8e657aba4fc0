"""A policy for the kernel and the oracle alike: keyed draws among the candidates, the same as long as these are."""

from __future__ import annotations

import random

import numpy as np
from oracle_fleet import Question

from fleetpilot.fleet.view import (
    KIND_DECODE,
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_PREFILL,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    REJECT,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_FAILED,
    STATE_READY,
    STATE_STARTING,
    Decision,
    FleetView,
)

KINDS = {
    KIND_DISPATCH: "dispatch",
    KIND_PREFILL: "prefill",
    KIND_DECODE: "decode",
    KIND_SOURCE: "source",
    KIND_DESTINATION: "destination",
    KIND_SCALE: "scale",
}
STATES = (STATE_ABSENT, STATE_STARTING, STATE_READY, STATE_DRAINING, STATE_FAILED)
"""In the order of the oracle's."""

NONE_SHARE = {"dispatch": 0.1, "prefill": 0.1, "decode": 0.1, "source": 0.2, "destination": 0.1, "scale": 0.6}


class KeyedChoice:
    """Keeps what it was asked in `questions`, and its answers in `answers`; rejects a share of what it may."""

    name = "keyed-choice"
    kinds = tuple(KINDS)

    def __init__(self, seed: int = 0, reject_share: float = 0.0):
        self.seed = seed
        self.reject_share = reject_share
        self.questions: list[Question] = []
        self.answers: list[int | None] = []

    def reset(self, batch: int, seed: int) -> None:
        assert batch == 1

    def choose(self, question: Question) -> int | None:
        """For the oracle. A question without a candidate leaves no trace, so it may be asked or not."""
        if not any(question.candidates):
            return None
        draws = random.Random(f"{self.seed}/{len(self.questions)}")
        share, place = draws.random(), draws.random()
        candidates = [i for i, candidate in enumerate(question.candidates) if candidate]
        none = question.may_hold and share < NONE_SHARE[question.kind]
        answer = None if none else candidates[int(place * len(candidates))]
        if question.may_reject and share >= 1 - self.reject_share:
            answer = REJECT
        self.questions.append(question)
        self.answers.append(answer)
        return answer

    def decide(self, view: FleetView) -> Decision:
        """For the kernel."""
        instances = view.instances[0]

        def whole(name: str) -> list[int]:
            return [int(value) for value in instances[name]]

        kind = KINDS[int(view.fleet["kind"][0])]
        may_hold = bool(view.may_hold[0])
        placed = kind in ("dispatch", "prefill") or (kind == "decode" and may_hold)
        question = Question(
            float(view.fleet["time_s"][0]),
            kind,
            view.candidates[0].tolist(),
            may_hold,
            placed and int(view.request["streamed_tokens"][0]) == 0,
            [STATES.index(state) for state in instances["state"]],
            [bool(migrating) for migrating in instances["migrating"]],
            [bool(origin) for origin in instances["origin"]],
            whole("in_flight"),
            whole("unstarted"),
            whole("unstarted_prompt_tokens"),
            whole("started_prompt_tokens"),
            whole("streamed_tokens"),
            whole("predicted_output_tokens"),
        )
        answer = self.choose(question)
        return Decision(np.array([NONE if answer is None else answer]))
