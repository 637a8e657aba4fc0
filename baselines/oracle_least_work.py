"""A bound: min(seconds of work to do, the request's included), with true output lengths and exact loads.

Source: the oracle of "least work left" in queueing theory; what knowing lengths and loads is worth at most to a policy
    that balances work.
Reads: instance.prefill_s_per_token, instance.decode_step_s, instance.decode_s_per_seq,
    instance.unstarted_uncached_tokens, instance.predicted_output_tokens, instance.streamed_tokens,
    instance.matched_tokens, request.prompt_tokens, request.predicted_output_tokens
Notes: Not a policy: the simulator tells it true lengths where others see predictions. Work is prefill and, per token
    still to come, a step's share of a batch of 16.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import TYPICAL_BATCH, decode_s_per_token, prefill_backlog_s, prefill_s, remaining_tokens
from fleetpilot.fleet.policy import OracleBound, lowest_candidate


@kernel
def work_s(instance: Any, request: Any, fleet: Any) -> float:
    """Until all is done that the instance has, with the request."""
    tokens = remaining_tokens(instance) + request.predicted_output_tokens
    decode_s = tokens * decode_s_per_token(instance, TYPICAL_BATCH)
    return float(prefill_backlog_s(instance) + prefill_s(instance, request) + decode_s)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(work_s, instances, requests, fleets)


POLICY = OracleBound("oracle-least-work", choose)
