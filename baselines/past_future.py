"""min(requests in flight) among the candidates whose peak of future memory has room for the request; else hold.

Source: Past-Future scheduler of LightLLM, ASPLOS 2025, arXiv 2507.10150: a request is admitted if the peak of memory
    over the future fits. With requests in the order of their remaining tokens r_1 >= r_2 >= ... that is the maximum
    over k of (what the first k hold) + k r_k.
Reads: instance.kv_capacity_blocks, instance.block_size, instance.in_flight, instance.started_prompt_tokens,
    instance.unstarted_prompt_tokens, instance.streamed_tokens, instance.predicted_output_tokens, request.prompt_tokens,
    request.predicted_output_tokens, fleet.may_hold
Notes: The source admits into an engine's batch; here it is a guard of dispatch, and the rule among those that pass is
    join-shortest-queue. A dispatcher's view has sums over an instance's requests, so these are taken to hold equal
    shares and their remaining tokens to lie evenly between 0 and twice the mean. Output lengths are the predictor's,
    not drawn from the history. Where holding is not allowed, the least peak decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import held_tokens, remaining_tokens
from fleetpilot.fleet.policy import CompiledPolicy, Range
from fleetpilot.fleet.view import NONE

RANGES = {"reserve": Range(0.0, 0.3)}


@kernel
def peak_tokens(held: float, remaining: float, requests: float) -> float:
    """The peak of future memory of so many requests that hold and lack so much in all.

    With remaining tokens evenly between 0 and R = 2 remaining / requests, the k-th longest has R (1 - (k - 1/2) / n),
    and the first k hold k (held / n + R (1 - (k - 1/2) / n)), a parabola in k.
    """
    if requests <= 0.0:
        return 0.0
    longest = 2.0 * remaining / requests
    if longest == 0.0:
        return held
    first = (held / requests + longest) * requests / (2.0 * longest) + 0.25  # where the parabola's top lies
    peak = held
    for k in (np.floor(first), np.ceil(first)):
        k = min(max(k, 1.0), requests)
        peak = max(peak, k * (held / requests + longest * (1.0 - (k - 0.5) / requests)))
    return peak


@kernel
def peak_share(instance: Any, request: Any) -> float:
    """The peak with the request, over the capacity."""
    held = held_tokens(instance) + request.prompt_tokens
    remaining = remaining_tokens(instance) + request.predicted_output_tokens
    return float(
        peak_tokens(held, remaining, instance.in_flight + 1.0) / (instance.kv_capacity_blocks * instance.block_size)
    )


def make(reserve: float = 0.05) -> CompiledPolicy:
    """The policy with another reserve.

    Args:
        reserve: share of the capacity that the peak leaves free.
    """
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve = {reserve:g}: expected at least 0 and less than 1")

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        best, least = NONE, (0, np.inf)
        for slot in range(len(instances)):
            instance = instances[slot]
            if instance.candidate != 0:
                peak = peak_share(instance, requests[0])
                fits = peak <= 1.0 - reserve or instance.in_flight == 0
                key = (0, float(instance.in_flight)) if fits else (1, peak)
                if (fits or fleets[0].may_hold == 0) and (best == NONE or key < least):
                    best, least = slot, key
        return best

    return CompiledPolicy("past-future", choose)


POLICY = make()
