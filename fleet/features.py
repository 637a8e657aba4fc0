"""What learned policies read of a `FleetView`: one table of features, and the one function that computes them.

The simulator's environments and a dispatcher call the same function, so a policy sees the same numbers in both. Every
feature is a ratio, a share of the candidates, or a time or size brought to [0, 1] by a fixed physical constant; none is
an identity, an index or a rank, and none depends on statistics of past observations. Permuting the instances permutes
their rows and changes nothing else.

The formulas of the table are Python expressions over the view's fields: `i` an instance, `r` the request, `f` the
fleet, and

- ``share(x, h) = x / (x + h)``: 0 at 0, 1/2 at h, 1 at infinity, for x >= 0;
- ``mean(x)``, ``least(x)``, ``most(x)`` over the candidates, 0 without any; ``candidates``: how many they are;
- ``lower(x)``: share of the candidates with a strictly lower x;
- ``ratio(x, y) = x / y``, 0 where y is 0;
- ``part(x)``: the share of all instances for which x holds;
- the states ``ABSENT``, ``STARTING``, ``READY``, ``DRAINING``, ``FAILED``;
- the roles ``MIXED``, ``PREFILL``, ``DECODE``;
- the quantities of `QUANTITIES`.

Results are clipped to the stated range. Rows of slots without an instance are 0.

Who only dispatches reads `INSTANCE_FEATURES`, `REQUEST_FEATURES` and `FLEET_FEATURES`; who answers other kinds of
decision too reads `MORE_INSTANCE_FEATURES`, ... after them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.jit import inlined, kernel, kernel_array
from fleetpilot.fleet.view import (
    FLEET_FIELDS,
    INSTANCE_FIELDS,
    KIND_DISPATCH,
    REQUEST_FIELDS,
    ROLE_DECODE,
    ROLE_MIXED,
    ROLE_PREFILL,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_FAILED,
    STATE_READY,
    STATE_STARTING,
    FleetView,
)

KINDS = ("dispatch", "prefill", "decode", "source", "destination", "scale")
"""Kinds of decision, by `FleetView.fleet["kind"]`: what is one-hot encoded."""

STATES = {
    "ABSENT": STATE_ABSENT,
    "STARTING": STATE_STARTING,
    "READY": STATE_READY,
    "DRAINING": STATE_DRAINING,
    "FAILED": STATE_FAILED,
}
"""Names in formulas of what `i.state` may be."""

ROLE_NAMES = {"MIXED": ROLE_MIXED, "PREFILL": ROLE_PREFILL, "DECODE": ROLE_DECODE}
"""Names in formulas of what `i.role` may be."""

Age = Literal["now", "poll"]


@dataclass(frozen=True)
class Feature:
    """One number that a policy reads.

    Attributes:
        name: as in docs/features.md.
        unit: of what the formula computes before it is brought to its range.
        low: least value.
        high: largest value.
        age: ``now`` if the dispatcher knows it as of the decision, ``poll`` if it is as old as the last visible poll.
        formula: see the module.
        meaning: in words.
    """

    name: str
    unit: str
    low: float
    high: float
    age: Age
    formula: str
    meaning: str


QUANTITIES: dict[str, str] = {
    "kv_tokens": "i.kv_capacity_blocks * i.block_size",
    "known_tokens": "i.started_prompt_tokens + i.unstarted_prompt_tokens + i.streamed_tokens",
    "backlog_s": "i.unstarted_uncached_tokens * i.prefill_s_per_token",
    "prefill_s": "(r.prompt_tokens - i.matched_tokens) * i.prefill_s_per_token",
    "step_s": "i.decode_step_s + i.decode_s_per_seq * i.batched",
}
"""Names used in formulas, each a formula itself."""

INSTANCE_FEATURES: tuple[Feature, ...] = (
    Feature("candidate", "0/1", 0, 1, "now", "i.candidate", "may be chosen"),
    Feature("free", "ratio", 0, 1, "poll", "i.free_blocks / i.kv_capacity_blocks", "free KV blocks"),
    Feature(
        "free_after_queue",
        "ratio",
        -2,
        1,
        "poll",
        "(i.free_blocks - i.queued_demand_blocks) / i.kv_capacity_blocks",
        "free KV blocks once the queue is in, negative where it does not fit",
    ),
    Feature(
        "head_of_line",
        "ratio",
        0,
        4,
        "poll",
        "i.head_demand_blocks / (i.free_blocks + 1)",
        "blocks for the head of the queue over the free ones; above 1 it blocks the queue",
    ),
    Feature(
        "known_kv",
        "ratio",
        0,
        2,
        "now",
        "known_tokens / kv_tokens",
        "tokens of its requests by now over its KV capacity",
    ),
    Feature(
        "predicted_kv",
        "ratio",
        0,
        4,
        "now",
        "(known_tokens + max(i.predicted_output_tokens - i.streamed_tokens, 0)) / kv_tokens",
        "the same when all answers are as long as predicted",
    ),
    Feature(
        "request_kv",
        "ratio",
        0,
        2,
        "now",
        "(r.prompt_tokens + r.predicted_output_tokens - i.matched_tokens) / kv_tokens",
        "what this request would add to it",
    ),
    Feature("batch_fill", "ratio", 0, 1, "now", "i.batched / i.max_num_seqs", "requests in the batch over the most"),
    Feature("step", "s", 0, 1, "now", "share(step_s, 0.05)", "calibrated decode step at this batch"),
    Feature(
        "tpot_use", "ratio", 0, 4, "now", "step_s / r.tpot_target_s", "that step over the request's target per token"
    ),
    Feature("backlog", "s", 0, 1, "now", "share(backlog_s, 0.5)", "calibrated time to prefill the unstarted requests"),
    Feature("prefill", "s", 0, 1, "now", "share(prefill_s, 0.5)", "calibrated time to prefill this request there"),
    Feature(
        "ttft_use",
        "ratio",
        0,
        4,
        "now",
        "(r.waited_s + backlog_s + prefill_s + step_s) / r.ttft_target_s",
        "calibrated time to first token there over the request's target",
    ),
    Feature(
        "matched",
        "ratio",
        0,
        1,
        "now",
        "i.matched_tokens / max(r.prompt_tokens, 1)",
        "share of the prompt that the prefix index holds",
    ),
    Feature(
        "queued", "ratio", 0, 1, "now", "i.queued / max(i.in_flight, 1)", "share of its requests without a first token"
    ),
    Feature(
        "waiting",
        "ratio",
        0,
        1,
        "poll",
        "i.waiting / max(i.running + i.waiting, 1)",
        "share of its requests that the engine says wait",
    ),
    Feature(
        "poll_age", "s", 0, 1, "now", "share(i.poll_age_s, 0.5)", "age of the last visible poll, 1 before the first"
    ),
    Feature(
        "prefill_speed",
        "s",
        0,
        1,
        "now",
        "share(1024 * i.prefill_s_per_token, 0.1)",
        "calibrated prefill of 1,024 tokens",
    ),
    Feature("decode_speed", "s", 0, 1, "now", "share(i.decode_step_s, 0.02)", "calibrated decode step of one request"),
    Feature(
        "kv_size", "ratio", 0, 4, "now", "ratio(kv_tokens, mean(kv_tokens))", "KV capacity over the candidates' mean"
    ),
    Feature(
        "load",
        "ratio",
        0,
        4,
        "now",
        "ratio(i.in_flight, mean(i.in_flight))",
        "requests in flight over the candidates' mean",
    ),
    Feature("lower_load", "share", 0, 1, "now", "lower(i.in_flight)", "candidates with fewer requests in flight"),
    Feature("lower_backlog", "share", 0, 1, "now", "lower(backlog_s)", "candidates with a shorter backlog"),
    Feature(
        "lower_kv", "share", 0, 1, "now", "lower(known_tokens / kv_tokens)", "candidates with less known KV demand"
    ),
)

REQUEST_FEATURES: tuple[Feature, ...] = (
    Feature("prompt", "tokens", 0, 1, "now", "share(r.prompt_tokens, 1024)", "prompt length"),
    Feature("output", "tokens", 0, 1, "now", "share(r.predicted_output_tokens, 256)", "predicted answer"),
    Feature("urgency", "", -1, 1, "now", "-r.priority", "1 before, -1 behind the default priority"),
    Feature(
        "ttft_tightness", "s", 0, 1, "now", "1 - share(r.ttft_target_s, 1.0)", "0 for no target for the first token"
    ),
    Feature("tpot_tightness", "s", 0, 1, "now", "1 - share(r.tpot_target_s, 0.05)", "0 for no target per output token"),
    Feature("waited", "s", 0, 1, "now", "share(r.waited_s, 1.0)", "time since its arrival"),
    Feature("waited_use", "ratio", 0, 4, "now", "r.waited_s / r.ttft_target_s", "that time over its target"),
    Feature("turn", "", 0, 1, "now", "share(r.turn, 1.0)", "0 for the first turn of a session"),
)

FLEET_FEATURES: tuple[Feature, ...] = (
    Feature("may_hold", "0/1", 0, 1, "now", "f.may_hold", "the request may be held at the dispatcher"),
    Feature("held", "ratio", 0, 4, "now", "f.held / max(candidates, 1)", "requests held, per candidate"),
    Feature("mean_free", "ratio", 0, 1, "poll", "mean(i.free_blocks / i.kv_capacity_blocks)", "free KV blocks, mean"),
    Feature(
        "least_free", "ratio", 0, 1, "poll", "least(i.free_blocks / i.kv_capacity_blocks)", "free KV blocks, least"
    ),
    Feature("mean_known_kv", "ratio", 0, 2, "now", "mean(known_tokens / kv_tokens)", "known KV demand, mean"),
    Feature("mean_step", "s", 0, 1, "now", "share(mean(step_s), 0.05)", "decode step, mean"),
    Feature("mean_backlog", "s", 0, 1, "now", "share(mean(backlog_s), 0.5)", "backlog, mean"),
    Feature("least_backlog", "s", 0, 1, "now", "share(least(backlog_s), 0.5)", "backlog, least"),
    Feature(
        "blocked",
        "share",
        0,
        1,
        "poll",
        "mean(i.head_demand_blocks > i.free_blocks)",
        "candidates whose queue's head does not fit",
    ),
    Feature(
        "imbalance",
        "ratio",
        0,
        8,
        "now",
        "ratio(most(i.in_flight), mean(i.in_flight))",
        "most over mean requests in flight",
    ),
    Feature(
        "exact",
        "0/1",
        0,
        1,
        "now",
        "f.engine_reported",
        "engines report their load (papers' experiments only)",
    ),
)

MORE_INSTANCE_FEATURES: tuple[Feature, ...] = (
    Feature("absent", "0/1", 0, 1, "now", "i.state == ABSENT", "not started"),
    Feature("starting", "0/1", 0, 1, "now", "i.state == STARTING", "will serve"),
    Feature("ready", "0/1", 0, 1, "now", "i.state == READY", "serves"),
    Feature("draining", "0/1", 0, 1, "now", "i.state == DRAINING", "takes no new requests, and leaves"),
    Feature("failed", "0/1", 0, 1, "now", "i.state == FAILED", "failed and not repaired"),
    Feature("migrating", "0/1", 0, 1, "now", "i.migrating", "source or destination of a migration"),
    Feature(
        "urgent",
        "ratio",
        0,
        1,
        "now",
        "i.urgent / max(i.in_flight, 1)",
        "share of its requests before the default priority",
    ),
    Feature(
        "moving_kv",
        "ratio",
        0,
        2,
        "now",
        "(r.prompt_tokens + r.streamed_tokens) / kv_tokens",
        "what this request is by now over its KV capacity",
    ),
    Feature("prefill_only", "0/1", 0, 1, "now", "i.role == PREFILL", "hands its requests over to be decoded"),
    Feature("decode_only", "0/1", 0, 1, "now", "i.role == DECODE", "decodes what was prefilled elsewhere"),
    Feature(
        "origin", "0/1", 0, 1, "now", "i.origin", "the request comes from it: source of a migration, or of a hand-over"
    ),
)

MORE_REQUEST_FEATURES: tuple[Feature, ...] = (
    Feature("streamed", "tokens", 0, 1, "now", "share(r.streamed_tokens, 256)", "tokens of its answer so far"),
)

MORE_FLEET_FEATURES: tuple[Feature, ...] = (
    Feature("ready", "share", 0, 1, "now", "part(i.state == READY)", "instances that serve"),
    Feature("starting", "share", 0, 1, "now", "part(i.state == STARTING)", "instances that start"),
    Feature("draining", "share", 0, 1, "now", "part(i.state == DRAINING)", "instances that drain"),
    Feature("migrating", "share", 0, 1, "now", "part(i.migrating)", "instances in a migration"),
)

_F, _R, _G, _K = len(INSTANCE_FEATURES), len(REQUEST_FEATURES), len(FLEET_FEATURES), len(KINDS)
_RANKED = 3
_LOW, _HIGH = (np.array([getattr(f, end) for f in INSTANCE_FEATURES], np.float32) for end in ("low", "high"))
_ALL_F = _F + len(MORE_INSTANCE_FEATURES)
_STATES = len(STATES)
_NEVER_S = 1e9  # in place of an infinite age


def sources(formula: str) -> tuple[str, ...]:
    """Where a dispatcher gets what a formula reads: sources of `fleetpilot.fleet.view`, sorted.

    Raises:
        KeyError: the formula reads a field that no view has.
    """
    for name, quantity in QUANTITIES.items():
        formula = re.sub(rf"\b{name}\b", quantity, formula)
    fields = re.findall(r"\b([irf])\.(\w+)", formula)
    return tuple(sorted({_SOURCES[table, name] for table, name in fields}))


_SOURCES = {
    (letter, field.name): field.source
    for letter, table in {"i": INSTANCE_FIELDS, "r": REQUEST_FIELDS, "f": FLEET_FIELDS}.items()
    for field in table
}


class FeatureArrays(NamedTuple):
    """Features of a batch of B views of N instances, float32."""

    instances: NDArray[np.float32]  # (B, N, F)
    request: NDArray[np.float32]  # (B, R)
    fleet: NDArray[np.float32]  # (B, G)
    kind: NDArray[np.float32]  # (B, K) one-hot
    action_mask: NDArray[np.float32]  # (B, N + 1), 1 where an instance, or last none, may be chosen


def features_for(kinds: Collection[int]) -> dict[str, tuple[Feature, ...]]:
    """What one reads who answers these kinds of decision: ``instances``, ``request`` and ``fleet``."""
    tables = {"instances": INSTANCE_FEATURES, "request": REQUEST_FEATURES, "fleet": FLEET_FEATURES}
    if reads_more(kinds):
        more = {"instances": MORE_INSTANCE_FEATURES, "request": MORE_REQUEST_FEATURES, "fleet": MORE_FLEET_FEATURES}
        return {key: (*table, *more[key]) for key, table in tables.items()}
    return tables


def reads_more(kinds: Collection[int]) -> bool:
    """Whether one who answers these kinds of decision reads more than who only dispatches."""
    return set(kinds) != {KIND_DISPATCH}


def features(view: FleetView, kinds: Collection[int] = (KIND_DISPATCH,)) -> dict[str, NDArray[np.float32]]:
    """The features of a view, as the environments' observations hold them: see `FeatureArrays`.

    Args:
        view: what is known.
        kinds: of decision that the policy answers.
    """
    batch, instances = view.instances.shape
    arrays = feature_arrays(batch, instances, kinds)
    _write_rows(view.instances, view.request, view.fleet, *arrays, feature_scratch(instances))
    return arrays._asdict()


def feature_arrays(batch: int, instances: int, kinds: Collection[int] = (KIND_DISPATCH,)) -> FeatureArrays:
    """Fresh arrays to be written."""
    more = (len(MORE_INSTANCE_FEATURES), len(MORE_REQUEST_FEATURES), len(MORE_FLEET_FEATURES))
    f, r, g = more if reads_more(kinds) else (0, 0, 0)
    return FeatureArrays(
        np.empty((batch, instances, _F + f), np.float32),
        np.empty((batch, _R + r), np.float32),
        np.empty((batch, _G + g), np.float32),
        np.empty((batch, _K), np.float32),
        np.empty((batch, instances + 1), np.float32),
    )


def feature_scratch(instances: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Room for `write_features`, one per thread: (N, F) denominators, and (2, 3, N) what is ranked, and the ranks."""
    over = kernel_array(instances * _F, np.float32).reshape(instances, _F)
    over[...] = 1.0
    return over, kernel_array(2 * _RANKED * instances, np.float32).reshape(2, _RANKED, instances)


@kernel
def _write_rows(
    view_instances: Any,
    view_request: Any,
    view_fleet: Any,
    instances: Any,
    request: Any,
    fleet: Any,
    kind: Any,
    mask: Any,
    scratch: Any,
) -> None:
    write_features(
        view_instances, view_request, view_fleet, 0, len(view_request), instances, request, fleet, kind, mask, scratch
    )


@inlined
def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@inlined
def _share(value: float, half: float) -> float:
    return 1.0 - half / (half + value)


@inlined
def _ratio(value: float, over: float) -> float:
    return value / over if over != 0.0 else 0.0


@inlined
def _rank(ranked: Any, mask: Any, row: int, count: int) -> None:
    """For each of the ranked quantities and instances: how many candidates have less."""
    ranked[1] = 0.0
    none = np.float32(0.0)
    for other in range(0, count, 2):  # two at once: the sums go through memory
        following = min(other + 1, count - 1)
        one, more = mask[row, other], mask[row, following] if following > other else none
        a, b, c = ranked[0, 0, other], ranked[0, 1, other], ranked[0, 2, other]
        d, e, f = ranked[0, 0, following], ranked[0, 1, following], ranked[0, 2, following]
        for k in range(count):  # all three at once: each waits for its own last sum
            ranked[1, 0, k] += (one if a < ranked[0, 0, k] else none) + (more if d < ranked[0, 0, k] else none)
            ranked[1, 1, k] += (one if b < ranked[0, 1, k] else none) + (more if e < ranked[0, 1, k] else none)
            ranked[1, 2, k] += (one if c < ranked[0, 2, k] else none) + (more if f < ranked[0, 2, k] else none)


@inlined
def write_features(
    view_instances: Any,
    view_request: Any,
    view_fleet: Any,
    first: int,
    last: int,
    instances: Any,
    request: Any,
    fleet: Any,
    kind: Any,
    mask: Any,
    scratch: Any,
) -> None:
    """Write the features of the rows from `first` to before `last` of a view.

    Args:
        view_instances: (B, N) records of `INSTANCE_VIEW`.
        view_request: (B,) records of `REQUEST_VIEW`.
        view_fleet: (B,) records of `FLEET_VIEW`.
        first: row.
        last: row.
        instances: (B, N, F) written in these rows, as all that follow. With room for more than `INSTANCE_FEATURES`,
            more is written, into `request` and `fleet` too.
        request: (B, R).
        fleet: (B, G).
        kind: (B, K).
        mask: (B, N + 1).
        scratch: `feature_scratch` of the caller's thread.
    """
    count = view_instances.shape[1]
    over, ranked = scratch
    for row in range(first, last):
        r = view_request[row]
        f = view_fleet[row]
        per_ttft = 1.0 / r.ttft_target_s
        per_tpot = 1.0 / r.tpot_target_s
        per_prompt = 1.0 / max(r.prompt_tokens, 1.0)
        candidates = 0
        sum_kv = sum_load = sum_free = sum_known = sum_step = sum_backlog = 0.0
        most_load = blocked = 0.0
        least_free = least_backlog = np.inf
        for k in range(count):
            i = view_instances[row, k]
            mask[row, k] = i.candidate
            if i.kv_capacity_blocks == 0.0:  # no instance in this slot
                for j in range(_F):
                    instances[row, k, j] = 0.0
                continue
            kv_tokens = i.kv_capacity_blocks * i.block_size
            known_tokens = i.started_prompt_tokens + i.unstarted_prompt_tokens + i.streamed_tokens
            rest_tokens = max(i.predicted_output_tokens - i.streamed_tokens, 0.0)
            backlog_s = i.unstarted_uncached_tokens * i.prefill_s_per_token
            prefill_s = (r.prompt_tokens - i.matched_tokens) * i.prefill_s_per_token
            step_s = i.decode_step_s + i.decode_s_per_seq * i.batched
            per_kv = 1.0 / kv_tokens
            per_block = per_kv * i.block_size
            free = i.free_blocks * per_block
            known = known_tokens * per_kv
            # numerators, below divided by denominators that are 1 where nothing else is written
            instances[row, k, 0] = i.candidate
            instances[row, k, 1] = free
            instances[row, k, 2] = (i.free_blocks - i.queued_demand_blocks) * per_block
            instances[row, k, 3] = i.head_demand_blocks
            over[k, 3] = i.free_blocks + 1.0
            instances[row, k, 4] = known
            instances[row, k, 5] = (known_tokens + rest_tokens) * per_kv
            instances[row, k, 6] = (r.prompt_tokens + r.predicted_output_tokens - i.matched_tokens) * per_kv
            instances[row, k, 7] = i.batched
            over[k, 7] = i.max_num_seqs
            instances[row, k, 8] = step_s
            over[k, 8] = step_s + 0.05
            instances[row, k, 9] = step_s * per_tpot
            instances[row, k, 10] = backlog_s
            over[k, 10] = backlog_s + 0.5
            instances[row, k, 11] = prefill_s
            over[k, 11] = prefill_s + 0.5
            instances[row, k, 12] = (r.waited_s + backlog_s + prefill_s + step_s) * per_ttft
            instances[row, k, 13] = i.matched_tokens * per_prompt
            instances[row, k, 14] = i.queued
            over[k, 14] = max(i.in_flight, 1.0)
            instances[row, k, 15] = i.waiting
            over[k, 15] = max(i.running + i.waiting, 1.0)
            poll_age_s = min(i.poll_age_s, _NEVER_S)
            instances[row, k, 16] = poll_age_s
            over[k, 16] = poll_age_s + 0.5
            instances[row, k, 17] = 1024.0 * i.prefill_s_per_token
            over[k, 17] = 1024.0 * i.prefill_s_per_token + 0.1
            instances[row, k, 18] = i.decode_step_s
            over[k, 18] = i.decode_step_s + 0.02
            instances[row, k, 19] = kv_tokens  # these two until all instances are known
            instances[row, k, 20] = i.in_flight
            ranked[0, 0, k] = i.in_flight
            ranked[0, 1, k] = backlog_s
            ranked[0, 2, k] = known
            if i.candidate != 0:
                candidates += 1
                sum_kv += kv_tokens
                sum_load += i.in_flight
                sum_free += free
                sum_known += known
                sum_step += step_s
                sum_backlog += backlog_s
                most_load = max(most_load, i.in_flight)
                least_free = min(least_free, free)
                least_backlog = min(least_backlog, backlog_s)
                if i.head_demand_blocks > i.free_blocks:
                    blocked += 1.0
        per_candidate = 1.0 / max(candidates, 1)
        per_mean_kv = _ratio(candidates, sum_kv)
        per_mean_load = _ratio(candidates, sum_load)
        _rank(ranked, mask, row, count)
        for k in range(count):
            if view_instances[row, k].kv_capacity_blocks != 0.0:
                instances[row, k, 19] *= per_mean_kv
                instances[row, k, 20] *= per_mean_load
                for q in range(_RANKED):
                    instances[row, k, 21 + q] = ranked[1, q, k] * per_candidate
        for k in range(count):
            for j in range(_F):
                value = instances[row, k, j] / over[k, j]
                instances[row, k, j] = min(max(value, _LOW[j]), _HIGH[j])
        mask[row, count] = f.may_hold
        request[row, 0] = _share(r.prompt_tokens, 1024.0)
        request[row, 1] = _share(r.predicted_output_tokens, 256.0)
        request[row, 2] = _clip(-r.priority, -1.0, 1.0)
        request[row, 3] = 1.0 / (1.0 + r.ttft_target_s)
        request[row, 4] = 0.05 / (0.05 + r.tpot_target_s)
        request[row, 5] = _share(r.waited_s, 1.0)
        request[row, 6] = _clip(r.waited_s * per_ttft, 0.0, 4.0)
        request[row, 7] = _share(r.turn, 1.0)
        fleet[row, 0] = f.may_hold
        fleet[row, 1] = _clip(f.held * per_candidate, 0.0, 4.0)
        fleet[row, 2] = sum_free * per_candidate
        fleet[row, 3] = least_free if candidates > 0 else 0.0
        fleet[row, 4] = _clip(sum_known * per_candidate, 0.0, 2.0)
        fleet[row, 5] = _share(sum_step * per_candidate, 0.05)
        fleet[row, 6] = _share(sum_backlog * per_candidate, 0.5)
        fleet[row, 7] = _share(least_backlog, 0.5) if candidates > 0 else 0.0
        fleet[row, 8] = blocked * per_candidate
        fleet[row, 9] = _clip(most_load * per_mean_load, 0.0, 8.0)
        fleet[row, 10] = f.engine_reported
        for j in range(_K):
            kind[row, j] = 1.0 if j == f.kind else 0.0
    if instances.shape[2] > _F:
        _write_more(view_instances, view_request, first, last, instances, request, fleet)


@kernel
def _write_more(
    view_instances: Any, view_request: Any, first: int, last: int, instances: Any, request: Any, fleet: Any
) -> None:
    """The features that come after those of who only dispatches."""
    for row in range(first, last):
        r = view_request[row]
        moving_tokens = r.prompt_tokens + r.streamed_tokens
        present = ready = starting = draining = migrating = 0
        for k in range(view_instances.shape[1]):
            i = view_instances[row, k]
            if i.kv_capacity_blocks == 0.0:
                for j in range(_F, _ALL_F):
                    instances[row, k, j] = 0.0
                continue
            for state in range(_STATES):
                instances[row, k, _F + state] = 1.0 if i.state == state else 0.0
            instances[row, k, _F + 5] = i.migrating
            instances[row, k, _F + 6] = _clip(i.urgent / max(i.in_flight, 1.0), 0.0, 1.0)
            instances[row, k, _F + 7] = _clip(moving_tokens / (i.kv_capacity_blocks * i.block_size), 0.0, 2.0)
            instances[row, k, _F + 8] = 1.0 if i.role == ROLE_PREFILL else 0.0
            instances[row, k, _F + 9] = 1.0 if i.role == ROLE_DECODE else 0.0
            instances[row, k, _F + 10] = i.origin
            present += 1
            ready += 1 if i.state == STATE_READY else 0
            starting += 1 if i.state == STATE_STARTING else 0
            draining += 1 if i.state == STATE_DRAINING else 0
            migrating += 1 if i.migrating != 0 else 0
        per_instance = 1.0 / max(present, 1)
        request[row, _R] = _share(r.streamed_tokens, 256.0)
        fleet[row, _G] = ready * per_instance
        fleet[row, _G + 1] = starting * per_instance
        fleet[row, _G + 2] = draining * per_instance
        fleet[row, _G + 3] = migrating * per_instance
