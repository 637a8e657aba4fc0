"""min(backlog s x slo + work s x (1 + pressure) x slo + queue), what a request adds to an instance's time; calibrated.

Source: "Calibrate, Then Route", arXiv 2609.16206: backlog is the committed work in seconds, work the predicted tokens
    at the measured time per token, pressure the positive part of the KV use after admission, slo the weight of the
    request's class, queue the requests that wait. With pools the same is asked twice, of prompts at the measured time
    per prompt token and of answers. Power-of-two sampling and an admission guard are the cures that it
    suggests for concentration.
Reads: fleet.kind, instance.kv_capacity_blocks, instance.block_size, instance.prefill_s_per_token,
    instance.decode_step_s, instance.decode_s_per_seq, instance.free_blocks, instance.queued_demand_blocks,
    instance.queued, instance.unstarted_prompt_tokens, instance.predicted_output_tokens, instance.streamed_tokens,
    request.prompt_tokens, request.predicted_output_tokens, request.ttft_target_s, fleet.random_key, fleet.may_hold
Notes: None of its weights is published, so all are ours, to be tuned. The times per token come from the profile: of
    prefill as calibrated, of decode a step's time over the requests of a batch of `concurrency`. The slo weight is
    1 + `slo` / target for the first token. Pressure is `pressure` x (use - `full`) above `full`, use with the whole
    predicted answer. `sampled` = 1 takes the cheaper of two drawn candidates; `guard` > 0 passes over instances whose
    use would be above it, and holds a request that has no other where that is allowed. Without pools an instance is
    priced by prompts and answers together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.baselines.power_of_two import two_candidates
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import TYPICAL_BATCH, decode_s_per_token, remaining_tokens
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import KIND_DECODE, KIND_DISPATCH, KIND_PREFILL, NONE

RANGES = {
    "backlog": Range(0.0, 2.0),
    "queue": Range(0.01, 5.0, log=True),
    "pressure": Range(0.0, 40.0),
    "full": Range(0.0, 1.0),
    "slo": Range(0.0, 2.0),
    "concurrency": Range(1, 64, log=True),
    "sampled": Range(0, 1, whole=True),
    "guard": Range(0.0, 1.5),
}


@kernel
def time_s(instance: Any, kind: int, prompt_tokens: float, output_tokens: float, concurrency: float) -> float:
    """What prompts and answers of so many tokens take of the instance, as far as the decision is about them."""
    prefill_s = 0.0 if kind == KIND_DECODE else prompt_tokens * float(instance.prefill_s_per_token)
    decode_s = 0.0 if kind == KIND_PREFILL else output_tokens * decode_s_per_token(instance, concurrency)
    return prefill_s + decode_s


@kernel
def backlog_s(instance: Any, kind: int, concurrency: float) -> float:
    """Committed work: prompts without a first token, and the predicted rest of all answers."""
    return time_s(instance, kind, float(instance.unstarted_prompt_tokens), remaining_tokens(instance), concurrency)


@kernel
def work_s(instance: Any, request: Any, kind: int, concurrency: float) -> float:
    """What the request adds to it."""
    return time_s(instance, kind, float(request.prompt_tokens), float(request.predicted_output_tokens), concurrency)


@kernel
def use_after(instance: Any, request: Any, kind: int) -> float:
    """KV use once the queue and the request with all that it will hold are in; above 1 where they do not fit."""
    answer_tokens = 0.0 if kind == KIND_PREFILL else request.predicted_output_tokens
    demand = np.ceil((request.prompt_tokens + answer_tokens) / instance.block_size)
    used = instance.kv_capacity_blocks - instance.free_blocks + instance.queued_demand_blocks
    return float((used + demand) / instance.kv_capacity_blocks)


@kernel
def slo_weight(request: Any, slo: float) -> float:
    """1 without a target, more for a tighter one."""
    return float(1.0 + slo / request.ttft_target_s)


def make(
    backlog: float = 0.2,
    work: float = 1.0,
    queue: float = 0.5,
    pressure: float = 20.0,
    full: float = 0.3,
    slo: float = 0.35,
    concurrency: float = TYPICAL_BATCH,
    sampled: float = 0.0,
    guard: float = 0.0,
) -> CompiledPolicy:
    """The policy with other parameters.

    Args:
        backlog: weight of the committed work.
        work: weight of the request's own.
        queue: s per waiting request.
        pressure: growth of the request's own work per KV use above `full`.
        full: KV use from which there is pressure.
        slo: s, how much a target for the first token of so many seconds raises the weight of time.
        concurrency: requests that decode together when the time per token is taken, at least 1.
        sampled: 1 to choose among two candidates drawn at random, 0 among all.
        guard: KV use after admission above which an instance is passed over; 0 for none.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency = {concurrency:g}: expected at least 1")
    if sampled not in (0, 1):
        raise ValueError(f"sampled = {sampled:g}: expected 0 or 1")

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        request, kind = requests[0], fleets[0].kind
        first, second = (NONE, NONE) if sampled == 0 else two_candidates(instances, fleets[0])
        best, least = NONE, (0, np.inf)
        for slot in range(len(instances)):
            instance = instances[slot]
            if instance.candidate != 0 and (sampled == 0 or slot in (first, second)):
                use = use_after(instance, request, kind)
                cost = backlog * backlog_s(instance, kind, concurrency)
                cost += work * work_s(instance, request, kind, concurrency) * (1.0 + pressure * max(0.0, use - full))
                over = 1 if guard > 0 and use > guard else 0
                key = (over, cost * slo_weight(request, slo) + queue * instance.queued)
                may_wait = over == 1 and fleets[0].may_hold != 0
                if not may_wait and (best == NONE or key < least):
                    best, least = slot, key
        return best

    return CompiledPolicy("calibrated", choose, (KIND_DISPATCH, KIND_PREFILL, KIND_DECODE))


POLICY = make()
