"""What a fleet gets through when it never runs out of requests: what the load of an episode is measured against."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.config import Pools
from fleetpilot.cluster.state import MODE_CHUNKED
from fleetpilot.fleet.cost_model import base_time_s, tokens_per_step
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.view import ROLE_DECODE, ROLE_PREFILL, ROLES
from fleetpilot.workloads.table import RequestTable


def mean_capacity_rps(engines: NDArray[np.void], table: RequestTable, instances: int, pools: Pools | None) -> float:
    """Requests per second and instance of a fleet.

    With pools: what its mixed instances get through by themselves, and what the narrower of the two pools lets through.

    Args:
        engines: (profiles,) the `ENGINE` records of its instances, again and again.
        table: see `capacity_rps`.
        instances: of the fleet.
        pools: of the fleet.
    """
    roles = pools.roles if pools else ("mixed",) * instances
    of_role = dict.fromkeys(ROLES, 0.0)
    for (engine, role), count in Counter((k % len(engines), role) for k, role in enumerate(roles)).items():
        of_role[role] += count * capacity_rps(engines[engine], table, roles.count(role), role)
    mixed, prefill, decode = of_role.values()
    return (mixed + min(prefill, decode)) / instances


def capacity_rps(engine: NDArray[np.void], table: RequestTable, instances: int = 1, role: str = "mixed") -> float:
    """Requests per second that each instance of a fleet finishes with a full batch of such requests, without end.

    Little's law, in iterations. A batch of B decodes finishes B / E[output] requests per iteration, so as many are
    prefilled in it, and the cost model gives the iteration's time t: the capacity is B / E[output] / t. B is what the
    KV cache holds of such requests, at most ``max_num_seqs``: over its life a request holds
    E[output (own prompt + output / 2)] / E[output] tokens of its own on average, and half a block. Shared prefixes are
    in the cache, each on one instance, if that leaves room for more requests than keeping one's prefix oneself:
    dispatch as good as it gets.

    An instance that only prefills fills its iterations with them, one that only decodes computes one prompt token of
    each request.

    Preemptions and the unevenness of prefill are left out. Against the simulator (one instance, a backlog that never
    ends) it is within 10 %, with a factor for memory that answers of very different lengths fight for:
    tests/envs/test_episodes.py.

    Args:
        engine: the `ENGINE` record of an instance.
        table: requests; only their lengths and shared prefixes count.
        instances: that the shared prefixes are spread over.
        role: of the instances, one of `ROLES`.
    """
    columns = table.prompt_tokens, table.output_tokens, table.prefix_node, table.node_parent, table.node_end_tokens
    return float(_capacity_rps(engine.reshape(1).view(np.recarray), *columns, instances, ROLES.index(role)))


@kernel
def _capacity_rps(
    engines: Any,
    prompt_tokens: Any,
    output_tokens: Any,
    prefix_node: Any,
    node_parent: Any,
    node_end_tokens: Any,
    instances: int,
    role: int,
) -> float:
    engine = engines[0]
    size = engine.block_size
    used = np.zeros(len(node_end_tokens), np.bool_)
    whole_blocks = node_end_tokens // size * size
    output = own = cached = attention = output_x_own = output_x_cached = 0.0
    n = len(prompt_tokens)
    for i in range(n):
        hit = 0
        if engine.prefix_cache != 0 and prefix_node[i] >= 0:
            used[prefix_node[i]] = True
            hit = whole_blocks[prefix_node[i]]
            if hit >= prompt_tokens[i]:
                hit = (prompt_tokens[i] - 1) // size * size
        rest = prompt_tokens[i] - hit
        output += output_tokens[i]
        own += rest
        cached += hit
        attention += rest * (hit + rest / 2)
        output_x_own += output_tokens[i] * (rest + output_tokens[i] / 2)
        output_x_cached += output_tokens[i] * hit
    if role == ROLE_PREFILL:
        at_once = engine.max_num_batched_tokens * n / own
        return at_once / _iteration_s(engine.cost, at_once * own / n, at_once * attention / n, 0.0, 0.0)
    shared_tokens = 0.0
    for node in range(len(used)):
        if used[node]:
            parent = node_parent[node]
            shared_tokens += node_end_tokens[node] - (node_end_tokens[parent] if parent >= 0 else 0)
    own_tokens = output_x_own / output + size / 2
    kv_tokens = (engine.kv_blocks - engine.watermark_blocks) * size
    apart = kv_tokens / (own_tokens + cached / n)
    together = (kv_tokens - shared_tokens / instances) / own_tokens
    batch = min(float(engine.max_num_seqs), max(apart, together, 1.0))
    finished = batch * n / output * tokens_per_step(engine.cost)  # per decode step
    context_tokens = batch * (own_tokens + output_x_cached / output)
    if role == ROLE_DECODE:
        attention = own + cached
        own = n * 1.0
    if engine.mode == MODE_CHUNKED:
        step_s = _iteration_s(engine.cost, finished * own / n, finished * attention / n, batch, context_tokens)
    else:  # an iteration of its own for every prefill, or for all that fall to one decode step
        prefills = min(finished, 1.0)
        at_once = finished / prefills
        step_s = _iteration_s(engine.cost, 0.0, 0.0, batch, context_tokens)
        step_s += prefills * _iteration_s(engine.cost, at_once * own / n, at_once * attention / n, 0.0, 0.0)
    return finished / step_s


@inlined
def _iteration_s(cost: Any, prefill_tokens: float, attention_tokens2: float, decodes: float, kv_tokens: float) -> float:
    """Time of one iteration; counts are means here, so they need not be whole."""
    return base_time_s(cost, prefill_tokens, attention_tokens2, decodes) + cost.e_s * kv_tokens  # type: ignore[arg-type, no-any-return]
