"""A bound: `past-future`, with true output lengths and exact loads.

Source: as `past-future`; what knowing lengths and memory is worth to a policy that admits no more than will fit.
Reads: instance.kv_capacity_blocks, instance.block_size, instance.in_flight, instance.started_prompt_tokens,
    instance.unstarted_prompt_tokens, instance.streamed_tokens, instance.predicted_output_tokens, request.prompt_tokens,
    request.predicted_output_tokens, fleet.may_hold
Notes: Not a policy: the simulator tells it true lengths where others see predictions.
"""

from __future__ import annotations

from fleetpilot.baselines import past_future
from fleetpilot.fleet.policy import OracleBound

POLICY = OracleBound("oracle-past-future", past_future.POLICY.python_choose)
