"""Small clusters under pressure, and the requests that put them under it: hypothesis strategies, and fixed samples.

Everything is scarce on purpose. KV memory is little more than the longest request needs, so that requests are
preempted, cached blocks are evicted and heads of the queue do not fit. Arrivals and think times lie on a grid of 1/64 s
that sums of iteration times do not meet (these are multiples of odd decimals, other ones on each instance): times tie
where the model says that they do - requests that arrive together, a think time of 0 - and not by accident of rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from oracle import OracleInstance
from oracle_fleet import OracleFleet

from fleetpilot.cluster.config import (
    DECODE_CHOICES,
    FIRST_TOKEN_FROM,
    PROTOCOLS,
    REQUEST_CHOICES,
    Failures,
    Pools,
    Rebalancing,
    Scaling,
    SharedCache,
)
from fleetpilot.workloads.table import NO_NODE, NO_PARENT, NO_SESSION, RequestTable, make_table

GRID_S = 1 / 64

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several."""

Cluster = tuple[RequestTable, list[OracleInstance]]


@dataclass
class _Rows:
    """Requests in the order they were made, parents before children, and the prefix tree."""

    rows: list[dict[str, float]] = field(default_factory=list)
    node_parent: list[int] = field(default_factory=list)
    node_end_tokens: list[int] = field(default_factory=list)

    def add_node(self, parent: int, tokens: int) -> int:
        self.node_parent.append(parent)
        self.node_end_tokens.append(self.end_tokens(parent) + tokens)
        return len(self.node_parent) - 1

    def end_tokens(self, node: int) -> int:
        return 0 if node == NO_NODE else self.node_end_tokens[node]


def request_table(pick: Pick, max_requests: int = 25) -> RequestTable:
    """A table of 2 to `max_requests` requests: singles and sessions over one tree of shared prefixes.

    Nodes are cut anywhere, blocks or not. Turns of a session run through their predecessor's own node; some are
    released by it (closed loop), others arrive on their own, possibly while it still runs or waits.
    """
    drawn = _Rows()
    for node in range(pick(range(5))):
        drawn.add_node(pick(range(NO_NODE, node)), pick(range(1, 25)))
    roots = len(drawn.node_parent)
    wanted = pick(range(2, max_requests + 1))
    arrival_s = 0.0
    session = 0
    while len(drawn.rows) < wanted:
        arrival_s += pick([0, 0, 0, 1, 2, 4, 8, 40]) * GRID_S
        turns = min(pick([1, 1, 1, 2, 3, 4]), wanted - len(drawn.rows))
        prefix = pick(range(NO_NODE, roots))
        _add_session(pick, drawn, session if turns > 1 else NO_SESSION, turns, prefix, arrival_s)
        session += turns > 1
    return _table(drawn)


def _add_session(pick: Pick, drawn: _Rows, session: int, turns: int, prefix: int, arrival_s: float) -> None:
    for turn in range(turns):
        new_tokens = pick(range(0 if drawn.end_tokens(prefix) else 1, 21))
        prompt = drawn.end_tokens(prefix) + new_tokens
        output = pick(range(1, 31))
        own = NO_NODE
        if turn < turns - 1 and pick([True, True, True, False]):
            own = drawn.add_node(prefix, pick(range(max(1, new_tokens), new_tokens + output + 1)))
        closed = turn > 0 and pick([False, True])
        if turn > 0 and not closed:
            arrival_s += pick(range(31)) * GRID_S
        drawn.rows.append(
            {
                "arrival_s": math.nan if closed else arrival_s,
                "sort_s": arrival_s,
                "parent": len(drawn.rows) - 1 if turn else NO_PARENT,
                "think_s": pick(range(11)) * GRID_S if closed else math.nan,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "priority": pick(range(3)),
                "session": session,
                "turn": turn,
                "prefix_node": prefix,
                "own_node": own,
            }
        )
        prefix = own if own != NO_NODE else prefix


def _table(drawn: _Rows) -> RequestTable:
    order = sorted(range(len(drawn.rows)), key=lambda i: drawn.rows[i]["sort_s"])  # stable: children follow parents
    row_of = {i: row for row, i in enumerate(order)} | {NO_PARENT: NO_PARENT}
    rows = [drawn.rows[i] for i in order]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "sort_s"}
    columns["parent"] = [row_of[int(parent)] for parent in columns["parent"]]
    return make_table(
        "drawn",
        columns.pop("arrival_s"),
        columns.pop("prompt_tokens"),
        columns.pop("output_tokens"),
        node_parent=drawn.node_parent,
        node_end_tokens=drawn.node_end_tokens,
        **columns,
    )


def instance(pick: Pick, table: RequestTable, index: int = 0, block_size: int | None = None) -> OracleInstance:
    """An engine on which each request of `table` fits, and few of them together."""
    longest = int((table.prompt_tokens + table.output_tokens).max())
    scheduler = pick(["chunked", "prefill_first"])
    block_size = block_size or pick([1, 2, 3, 4, 8])
    max_num_seqs = pick([1, 2, 3, 4, 6, 8, 8])
    needed_blocks = math.ceil(longest / block_size)
    watermark_blocks = pick(range(3)) if scheduler == "prefill_first" else 0
    budget = max_num_seqs + pick(range(1, 25)) if scheduler == "chunked" else longest + pick(range(41))
    moe = pick([False, True])

    def cost(unit_s: float, most: int) -> float:
        return pick(range(most + 1)) * unit_s

    return OracleInstance(
        scheduler=scheduler,
        kv_blocks=needed_blocks + watermark_blocks + pick(range(needed_blocks // 2 + 1)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_cache=pick([True, True, False]),
        priority_order=pick([False, True]),
        watermark_blocks=watermark_blocks,
        a_s=(0.00731, 0.00911, 0.01103, 0.01301)[index] + cost(0.00137, 3),
        w_s=cost(0.00317, 4),
        b_s=cost(0.000391, 3),
        w_e_s=0.00557 if moe else 0.0,
        expert_share=pick([1 / 16, 1 / 8, 1 / 4]) if moe else 0.0,
        c_s=cost(0.0000137, 2),
        d_s=cost(0.000171, 2),
        e_s=cost(0.0000219, 2),
        host_step_s=cost(0.00113, 1),
        host_per_seq_s=cost(0.000071, 1),
    )


def cluster(pick: Pick) -> Cluster:
    """A table and 1 to 3 engines, each configured on its own."""
    table = request_table(pick)
    count = pick([1, 1, 2, 3])
    return table, [instance(pick, table, index) for index in range(count)]


def cluster_on_grid(pick: Pick) -> Cluster:
    """The same, often of equal engines, with all costs on the grid or a power of two finer: exact sums, many ties."""
    table, instances = cluster(pick)
    if pick([False, True]):
        instances = instances[:1] * len(instances)
    return table, [on_grid(pick, instance) for instance in instances]


def on_grid(pick: Pick, instance: OracleInstance) -> OracleInstance:
    """The same engine with all costs on the grid or a power of two finer."""

    def cost(*halvings: int) -> float:
        return pick([0.0, *(GRID_S / 2**n for n in halvings)])

    no_costs = dict.fromkeys(("w_e_s", "expert_share", "c_s", "host_step_s", "host_per_seq_s"), 0.0)
    return replace(instance, a_s=GRID_S, w_s=cost(0), b_s=cost(3), d_s=cost(2), e_s=cost(6, 7), **no_costs)


def fleet(pick: Pick, exact: bool = False, protocol: str | None = None) -> tuple[RequestTable, OracleFleet]:
    """A table and a fleet of 2 to 4 engines in which requests move, instances come and go, and fail.

    Everything but iterations and copies happens on the grid of `GRID_S`; with `exact` these lie on it, too, or a power
    of two finer, and engines are often equal: ties everywhere. The protocol of migrations is drawn, too, unless given.
    """
    table = request_table(pick)
    block_size = pick([1, 2, 4, 4, 8] if exact else [1, 2, 3, 4, 8])
    kv_bytes_per_token = pick([1, 2])
    instances = [instance(pick, table, index, block_size) for index in range(pick([2, 2, 3, 4]))]
    room = pick([0, 0, 4, 16])
    instances = [replace(i, kv_blocks=i.kv_blocks + room, kv_bytes_per_token=kv_bytes_per_token) for i in instances]
    if exact:
        instances = [on_grid(pick, instance) for instance in instances]
        if pick([False, True]):
            instances = instances[:1] * len(instances)
    drawn = OracleFleet(
        tuple(instances),
        rebalancing(pick, block_size * kv_bytes_per_token, exact) if pick([True, True, True, False]) else None,
        scaling(pick, len(instances)) if pick([True, False]) else None,
        failures(pick, len(instances)) if pick([True, False]) else None,
        hold_interval_s=pick([1, 4]) * GRID_S,
        max_hold_s=pick([8, 64_000]) * GRID_S,
    )
    if drawn.failures:
        notice_s, most = pick([0, 0, 2, 8, 32]) * GRID_S, pick([0, 1, 100, 100, 100])
        drawn = replace(drawn, failures=replace(drawn.failures, notice_s=notice_s, max_restarts=most))
    if drawn.rebalancing and (protocol or pick(PROTOCOLS)) == "vllm":
        stock = {instance: stock_engine(pick, instance) for instance in dict.fromkeys(drawn.instances)}
        drawn = replace(
            drawn,
            instances=tuple(stock[instance] for instance in drawn.instances),
            rebalancing=stock_rebalancing(pick, drawn.rebalancing),
        )
    if drawn.failures:
        drawn = replace(drawn, failures=replace(drawn.failures, mtbf_s=pick([math.inf, 1.0, math.inf, math.inf])))
    return table, drawn


def fleet_with_pools(pick: Pick, exact: bool = False, protocol: str | None = None) -> tuple[RequestTable, OracleFleet]:
    """`fleet`, with instances that only prefill, and instances that decode what these hand over."""
    table, drawn = fleet(pick, exact, protocol)
    chunked = {instance: chunked_engine(pick, instance) for instance in dict.fromkeys(drawn.instances)}
    instances = tuple(chunked[instance] for instance in drawn.instances)
    roles = [pick(["prefill", "decode", "mixed"]) for _ in instances]
    roles[:2] = pick([["prefill", "decode"], ["prefill", "mixed"], ["decode", "prefill"], ["mixed", "prefill"]])
    link = rebalancing(pick, instances[0].block_size * instances[0].kv_bytes_per_token, exact)
    pools = Pools(
        tuple(roles),
        first_token_from=pick(FIRST_TOKEN_FROM),
        decode_choice=pick(DECODE_CHOICES),
        round_trip_s=pick([0.0, GRID_S / 4, GRID_S] if exact else [0.000713, 0.00537, 0.0311]),
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
    )
    scaled = drawn.scaling and replace(drawn.scaling, ready=max(2, drawn.scaling.ready))
    return table, replace(drawn, instances=instances, pools=pools, scaling=scaled)


def fleet_with_shared_cache(
    pick: Pick, exact: bool = False, protocol: str | None = None
) -> tuple[RequestTable, OracleFleet]:
    """A fleet, with pools or without, whose instances share a cache of a few blocks to some hundred."""
    table, drawn = pick([fleet, fleet_with_pools])(pick, exact, protocol)
    stock = {instance: stock_engine(pick, instance) for instance in dict.fromkeys(drawn.instances)}
    instances = tuple(stock[instance] for instance in drawn.instances)
    block_bytes = instances[0].block_size * instances[0].kv_bytes_per_token
    link = rebalancing(pick, block_bytes, exact)
    cache = SharedCache(
        capacity_bytes=pick([1, 4, 16, 256]) * block_bytes,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        round_trip_s=link.round_trip_s,
        ttl_s=pick([math.inf, math.inf, 0.1, 0.5]),
        updates_s=pick([(), (), (16 * GRID_S,), (40 * GRID_S, 8 * GRID_S)]),
    )
    return table, replace(drawn, instances=instances, shared_cache=cache)


def fleet_that_speculates(
    pick: Pick, exact: bool = False, protocol: str | None = None
) -> tuple[RequestTable, OracleFleet]:
    """A fleet, with pools or without, of whose engines some or all decode speculatively."""
    table, drawn = pick([fleet, fleet_with_pools])(pick, exact, protocol)
    drafting = {instance: speculating_engine(pick, instance, exact) for instance in dict.fromkeys(drawn.instances)}
    return table, replace(drawn, instances=tuple(drafting[instance] for instance in drawn.instances))


def speculating_engine(pick: Pick, instance: OracleInstance, exact: bool) -> OracleInstance:
    """The same engine, as a rule with drafts."""
    drafts = pick([0, 1, 3, 5])
    budget = instance.max_num_batched_tokens + (
        drafts * instance.max_num_seqs if instance.scheduler == "chunked" else 0
    )
    return replace(
        instance,
        draft_tokens=drafts,
        acceptance=pick([0.3, 0.8, 0.97]),
        draft_s=pick([0.0, GRID_S / 8 if exact else 0.00217]),
        draft_per_seq_s=pick([0.0, GRID_S / 16 if exact else 0.000273]),
        max_num_batched_tokens=budget,
    )


def chunked_engine(pick: Pick, instance: OracleInstance) -> OracleInstance:
    """The same engine with chunked prefill."""
    if instance.scheduler == "chunked":
        return instance
    budget = instance.max_num_seqs + pick(range(1, 25))
    return replace(instance, scheduler="chunked", watermark_blocks=0, max_num_batched_tokens=budget)


def stock_rebalancing(pick: Pick, rebalancing: Rebalancing) -> Rebalancing:
    """Protocol `vllm`, with more stages: of these only the first may find nothing of the copy."""
    return replace(
        rebalancing,
        protocol="vllm",
        bandwidth_bytes_per_s=rebalancing.bandwidth_bytes_per_s / pick([1, 4]),
        max_stages=pick([2, 3, 8, 8]),
        last_stage_blocks=pick([1, 1, 1, 3]),
    )


def stock_engine(pick: Pick, instance: OracleInstance) -> OracleInstance:
    """The same engine with chunked prefill and a prefix cache, as the protocol `vllm` needs them."""
    return replace(chunked_engine(pick, instance), prefix_cache=True)


def rebalancing(pick: Pick, block_bytes: int, exact: bool) -> Rebalancing:
    """Copies from less than one iteration to tens of them."""
    block_s = pick([GRID_S / 16, GRID_S / 2, 2 * GRID_S] if exact else [0.000317, 0.00413, 0.0237])
    return Rebalancing(
        interval_s=pick([1, 2, 4, 8]) * GRID_S,
        max_pairs=pick([1, 2, None]),
        choice=pick(REQUEST_CHOICES),
        round_trip_s=pick([0.0, GRID_S / 4, GRID_S] if exact else [0.000713, 0.00537, 0.0311]),
        bandwidth_bytes_per_s=block_bytes / block_s,
        slowdown=pick([1.0, 1.25]),
        max_stages=pick([2, 3, 4, 8]),
        last_stage_blocks=pick([1, 2, 3, 4]),
    )


def scaling(pick: Pick, instances: int) -> Scaling:
    """Instances that start and drain all the time."""
    least = pick([1, 1, 2])
    return Scaling(
        interval_s=pick([2, 8, 32]) * GRID_S,
        first_s=pick([0, 1, 8]) * GRID_S,
        ready=pick(range(1, instances + 1)),
        min_instances=least,
        max_instances=pick([None, *range(least, instances + 1)]),
        start_up_s=pick([0, 2, 16]) * GRID_S,
        drain_deadline_s=pick([0, 2, 8, 32, math.inf, math.inf]) * GRID_S,
    )


def failures(pick: Pick, instances: int) -> Failures:
    """Up to five failures, some of them at once, some of instances that have failed already or are absent."""
    times = [pick([0, 0, 1, 4, 16, 32]) for _ in range(pick(range(6)))]
    return Failures(
        at=tuple((sum(times[: i + 1]) * GRID_S, pick(range(instances))) for i in range(len(times))),
        repair_s=pick([1, 8, 32]) * GRID_S,
        requests=pick(["restart", "restart", "fail"]),
    )


def _picker(draw: st.DrawFn) -> Pick:
    return lambda options: draw(st.sampled_from(options))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """`cluster`, drawn by hypothesis."""
    return cluster(_picker(draw))


@st.composite
def clusters_on_grid(draw: st.DrawFn) -> Cluster:
    """`cluster_on_grid`, drawn by hypothesis."""
    return cluster_on_grid(_picker(draw))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[RequestTable, OracleFleet]:
    """`fleet`, drawn by hypothesis."""
    return fleet(_picker(draw))


@st.composite
def fleets_on_grid(draw: st.DrawFn) -> tuple[RequestTable, OracleFleet]:
    """`fleet` with exact times, drawn by hypothesis."""
    return fleet(_picker(draw), exact=True)


@st.composite
def pools(draw: st.DrawFn) -> tuple[RequestTable, OracleFleet]:
    """`fleet_with_pools`, drawn by hypothesis."""
    return fleet_with_pools(_picker(draw))


@st.composite
def pools_on_grid(draw: st.DrawFn) -> tuple[RequestTable, OracleFleet]:
    """`fleet_with_pools` with exact times, drawn by hypothesis."""
    return fleet_with_pools(_picker(draw), exact=True)


@st.composite
def shared_caches(draw: st.DrawFn) -> tuple[RequestTable, OracleFleet]:
    """`fleet_with_shared_cache`, with exact times or not, drawn by hypothesis."""
    pick = _picker(draw)
    return fleet_with_shared_cache(pick, exact=pick([False, True]))


@st.composite
def speculating(draw: st.DrawFn) -> tuple[RequestTable, OracleFleet]:
    """`fleet_that_speculates`, with exact times or not, drawn by hypothesis."""
    pick = _picker(draw)
    return fleet_that_speculates(pick, exact=pick([False, True]))


def fixed_cluster(seed: int) -> Cluster:
    """`cluster`, always the same for a seed."""
    return cluster(random.Random(seed).choice)


def fixed_cluster_on_grid(seed: int) -> Cluster:
    """`cluster_on_grid`, always the same for a seed."""
    return cluster_on_grid(random.Random(seed).choice)


def fixed_fleet(seed: int, exact: bool = False, protocol: str = "llumnix") -> tuple[RequestTable, OracleFleet]:
    """`fleet`, always the same for a seed."""
    return fleet(random.Random(seed).choice, exact, protocol)


def fixed_pools(seed: int, exact: bool = False) -> tuple[RequestTable, OracleFleet]:
    """`fleet_with_pools`, always the same for a seed."""
    return fleet_with_pools(random.Random(seed).choice, exact)


def fixed_shared_cache(seed: int, exact: bool = False) -> tuple[RequestTable, OracleFleet]:
    """`fleet_with_shared_cache`, always the same for a seed."""
    return fleet_with_shared_cache(random.Random(seed).choice, exact)


def fixed_speculating(seed: int, exact: bool = False) -> tuple[RequestTable, OracleFleet]:
    """`fleet_that_speculates`, always the same for a seed."""
    return fleet_that_speculates(random.Random(seed).choice, exact)


def fixed_fleet_of_fast_and_slow(seed: int) -> tuple[RequestTable, OracleFleet]:
    """`fixed_fleet` on the grid, iterations of the first instance an eighth as long as those of all others.

    So boundaries of the slow tie with boundaries in the middle of a leap of the fast.
    """
    table, fleet = fixed_fleet(seed, exact=True)
    no_costs = dict.fromkeys(("w_s", "b_s", "d_s", "e_s"), 0.0)
    instances = (
        replace(i, a_s=GRID_S / 4 if n == 0 else 2 * GRID_S, **no_costs) for n, i in enumerate(fleet.instances)
    )
    return table, replace(fleet, instances=tuple(instances))
