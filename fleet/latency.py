"""What a profile's calibrated constants say of the latency of a request that an instance would take.

Coarse on purpose: a router has the three constants of `fleetpilot.fleet.view`, what it sent, and no more. Prefill is
serial and takes what is left to compute; a decode step grows with the batch. All functions take records of the view.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel

TYPICAL_BATCH = 16.0
"""Requests that decode together, where a token's share of a step is asked for and no batch is known."""


@kernel
def uncached_tokens(instance: Any, request: Any) -> float:
    """Of the prompt, as the prefix index has it."""
    return max(0.0, float(request.prompt_tokens - instance.matched_tokens))


@kernel
def prefill_backlog_s(instance: Any) -> float:
    """To prefill what was sent and has no first token yet."""
    return float(instance.unstarted_uncached_tokens * instance.prefill_s_per_token)


@kernel
def prefill_s(instance: Any, request: Any) -> float:
    """To prefill what the request's prompt does not find cached."""
    return uncached_tokens(instance, request) * float(instance.prefill_s_per_token)


@kernel
def memory_wait_s(instance: Any, request: Any) -> float:
    """Until KV blocks are free for what is queued and for the request's prompt.

    Answers that end evenly over twice the mean time that is left to them free their blocks at a constant rate.
    """
    demand = instance.queued_demand_blocks + np.ceil(request.prompt_tokens / instance.block_size)
    lacking = demand - instance.free_blocks
    used = instance.kv_capacity_blocks - instance.free_blocks
    if lacking <= 0.0 or used <= 0.0 or instance.batched <= 0.0:
        return 0.0
    mean_rest_s = remaining_tokens(instance) / instance.in_flight * step_s(instance, instance.batched)
    return float(lacking / used * 2.0 * mean_rest_s)


@kernel
def step_s(instance: Any, batch: float) -> float:
    """A decode step of a batch of so many requests, at least one."""
    return float(instance.decode_step_s + instance.decode_s_per_seq * (max(batch, 1.0) - 1.0))


@kernel
def decode_s_per_token(instance: Any, batch: float) -> float:
    """A token's share of a decode step of so many requests."""
    return step_s(instance, batch) / batch


@kernel
def ttft_s(instance: Any, request: Any) -> float:
    """Until the request's first token: a wait for memory, the backlog, its own prefill, and the step that goes on."""
    computed_s = prefill_backlog_s(instance) + prefill_s(instance, request) + step_s(instance, instance.in_flight)
    return memory_wait_s(instance, request) + computed_s


@kernel
def tpot_s(instance: Any) -> float:
    """Per token with one request more, once all that the instance has are in its batch."""
    return step_s(instance, instance.in_flight + 1.0)


@kernel
def remaining_tokens(instance: Any) -> float:
    """Predicted tokens that the requests in flight have still to stream."""
    return max(0.0, float(instance.predicted_output_tokens - instance.streamed_tokens))


@kernel
def held_tokens(instance: Any) -> float:
    """KV tokens of the requests in flight, by the ledger: their prompts and what was streamed."""
    return float(instance.started_prompt_tokens + instance.unstarted_prompt_tokens + instance.streamed_tokens)


@kernel
def final_tokens(instance: Any, request: Any) -> float:
    """KV tokens of the requests in flight and of this one if all were at their predicted last token."""
    here = float(request.prompt_tokens + request.predicted_output_tokens)
    return held_tokens(instance) + remaining_tokens(instance) + here
