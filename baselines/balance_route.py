"""min(KV tokens of the requests in flight); ties go to the lowest slot.

Source: BalanceRoute, arXiv 2605.06113, BR-0: the F-score is how much a request of s tokens shrinks the sum of gaps to
    the fullest of G workers, F = min(s, m) - (G - 1) max(0, s - m), with the margin m = highest load - load.
Reads: instance.started_prompt_tokens, instance.unstarted_prompt_tokens, instance.streamed_tokens
Notes: The source chooses which of many waiting requests go where at each step of workers that wait for each other; here
    a request is asked for when it comes. F grows with the margin, and equal scores go to the least load, the source's
    own order being unknown: so of one request alone this is left. The horizon and classifier of BR-H are left out.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import held_tokens
from fleetpilot.fleet.policy import CompiledPolicy, lowest_candidate


@kernel
def kv_tokens(instance: Any, request: Any, fleet: Any) -> float:
    """What the source balances."""
    return held_tokens(instance)


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    return lowest_candidate(kv_tokens, instances, requests, fleets)


POLICY = CompiledPolicy("balance-route", choose)
