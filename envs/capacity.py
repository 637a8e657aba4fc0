"""What a fleet gets through when it never runs out of requests: what the load of an episode is measured against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.workloads.table import RequestTable


def capacity_rps(profile: HardwareProfile, table: RequestTable, instances: int = 1) -> float:
    """Requests per second that each instance of a fleet finishes with a full batch of such requests, without end.

    Little's law, in iterations. A batch of B decodes finishes B / E[output] requests per iteration, so as many are
    prefilled in it, and the cost model gives the iteration's time t: the capacity is B / E[output] / t. B is what the
    KV cache holds of such requests, at most ``max_num_seqs``: over its life a request holds
    E[output (own prompt + output / 2)] / E[output] tokens of its own on average, and half a block. Shared prefixes are
    in the cache, each on one instance, if that leaves room for more requests than keeping one's prefix oneself:
    dispatch as good as it gets.

    Preemptions and the unevenness of prefill are left out. Against the simulator (one instance, a backlog that never
    ends) it is within 10 %: tests/envs/test_capacity.py.

    Args:
        profile: of the instance.
        table: requests; only their lengths and shared prefixes count.
        instances: that the shared prefixes are spread over.
    """
    prompt, output = table.prompt_tokens.astype(np.float64), table.output_tokens.astype(np.float64)
    cached, shared_tokens = _shared(profile, table)
    mean_output = float(output.mean())
    own = prompt - cached
    own_tokens = float((output * (own + output / 2)).mean()) / mean_output + profile.block_size / 2
    context_tokens = own_tokens + float((output * cached).mean()) / mean_output
    kv_tokens = (profile.kv_blocks - profile.watermark_blocks) * profile.block_size
    apart = kv_tokens / (own_tokens + float(cached.mean()))
    together = (kv_tokens - shared_tokens / instances) / own_tokens
    batch = min(profile.max_num_seqs, max(apart, together, 1.0))
    finished = batch / mean_output  # per decode step
    prefill_tokens = float(own.mean())
    attention = float((own * (cached + own / 2)).mean())
    decodes = batch * context_tokens
    if profile.scheduler == "chunked":
        step_s = _iteration_s(profile, finished * prefill_tokens, finished * attention, batch, decodes)
    else:  # an iteration of its own for every prefill, or for all that fall to one decode step
        prefills = min(finished, 1.0)
        at_once = finished / prefills
        step_s = _iteration_s(profile, 0.0, 0.0, batch, decodes)
        step_s += prefills * _iteration_s(profile, at_once * prefill_tokens, at_once * attention, 0.0, 0.0)
    return finished / step_s


def _shared(profile: HardwareProfile, table: RequestTable) -> tuple[NDArray[np.float64], float]:
    """(n,) tokens of each prompt that the prefix cache holds, and the tokens of all that is shared."""
    if not profile.prefix_cache or len(table.node_end_tokens) == 0:
        return np.zeros(len(table)), 0.0
    ends = np.append(table.node_end_tokens, 0)
    size = profile.block_size
    cached = np.minimum(ends[table.prefix_node], table.prompt_tokens - 1) // size * size
    used = np.bincount(table.prefix_node + 1, minlength=len(ends))[1:] > 0
    lengths = ends[:-1] - ends[table.node_parent]
    return cached.astype(np.float64), float(lengths[used].sum())


def _iteration_s(
    profile: HardwareProfile, prefill_tokens: float, attention_tokens2: float, decodes: float, kv_tokens: float
) -> float:
    return profile.iteration_s(prefill_tokens, attention_tokens2, decodes, kv_tokens)  # type: ignore[arg-type]
