"""Kernel and oracle (tests/oracle.py) on the same cluster; every assertion here is an equality of the two."""

from __future__ import annotations

import math

import numpy as np
import oracle
from strategies import Cluster

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, RunLog, simulate
from fleetpilot.fleet.profiles import PROVENANCE_KEYS, HardwareProfile

COST_FIELDS = ("a_s", "w_s", "b_s", "w_e_s", "expert_share", "c_s", "d_s", "e_s", "host_step_s", "host_per_seq_s")
DRAFT_FIELDS = ("draft_tokens", "acceptance", "draft_s", "draft_per_seq_s")


def profile_of(instance: oracle.OracleInstance, name: str) -> HardwareProfile:
    usable_tokens = (instance.kv_blocks - instance.watermark_blocks) * instance.block_size
    budget = instance.max_num_batched_tokens
    return HardwareProfile(
        name=name,
        gpu="none",
        model="none",
        tp=1,
        engine="none",
        scheduler=instance.scheduler,
        block_size=instance.block_size,
        kv_blocks=instance.kv_blocks,
        max_num_seqs=instance.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=usable_tokens if instance.scheduler == "chunked" else min(usable_tokens, budget),
        prefix_cache=instance.prefix_cache,
        watermark=(instance.watermark_blocks + 0.5) / instance.kv_blocks if instance.watermark_blocks else 0.0,
        kv_bytes_per_token=instance.kv_bytes_per_token,
        priority_order=instance.priority_order,
        provenance=dict.fromkeys(PROVENANCE_KEYS, "drawn at random"),
        **{name: getattr(instance, name) for name in (*COST_FIELDS, *DRAFT_FIELDS)},
    )


def fleet_of_oracle(instances: list[oracle.OracleInstance], **options: object) -> FleetConfig:
    return FleetConfig(tuple(profile_of(instance, f"drawn-{i}") for i, instance in enumerate(instances)), **options)


def run_kernel(cluster: Cluster, *, leap: bool, check: bool = False) -> RunLog:
    table, instances = cluster
    return simulate(
        table, fleet_of_oracle(instances), load_policy("round-robin"), leap=leap, check=check, sample_interval_s=1 / 16
    )


def run_oracle(cluster: Cluster) -> oracle.OracleResult:
    table, instances = cluster
    return oracle.simulate(table, instances, lambda decision, row: decision % len(instances))


def assert_same(log: RunLog, expected: oracle.OracleResult) -> None:
    """What happened to each request, and the counters and memory of each instance."""
    for name in ("dispatch_s", "admitted_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(
            log.requests[name], [getattr(r, name) for r in expected.requests], rtol=1e-9, err_msg=name
        )
    for name in ("instance", "preemptions", "cached_tokens", "generated"):
        np.testing.assert_array_equal(log.requests[name], [getattr(r, name) for r in expected.requests], name)
    np.testing.assert_allclose(
        log.requests["preemption_loss_s"], [r.preempted_loss_s for r in expected.requests], rtol=1e-6, atol=1e-9
    )
    np.testing.assert_array_equal(log.instances["preemptions"], expected.preemptions)
    np.testing.assert_array_equal(log.instances["iterations"], expected.iterations)
    for sample in log.samples:
        boundaries = [b.time_s for b in expected.history[sample["instance"]]]
        if min((abs(t - sample["time_s"]) for t in boundaries), default=math.inf) > 1e-9:
            assert sample["used_blocks"] == expected.used_blocks_at(sample["instance"], sample["time_s"])


def assert_same_gaps(log: RunLog, expected: oracle.OracleResult) -> None:
    """The histogram of gaps between tokens."""
    edges = log.itl_edges_s
    gaps = np.maximum(np.concatenate([np.diff(r.token_times) for r in expected.requests]), edges[0])
    assert log.itl_counts.sum() == len(gaps)
    # a gap within rounding of an edge may fall on either side of it
    low, _ = np.histogram(gaps * (1 - 1e-9), edges)
    high, _ = np.histogram(gaps * (1 + 1e-9), edges)
    assert np.all(np.abs(np.cumsum(log.itl_counts) - np.cumsum(low)) <= np.abs(np.cumsum(low) - np.cumsum(high)))


def assert_bitwise_equal(leaping: RunLog, stepping: RunLog) -> None:
    """All but `busy_s`, which is a sum of leaps there and a sum of steps here."""
    assert leaping.requests.tobytes() == stepping.requests.tobytes()
    assert leaping.samples.tobytes() == stepping.samples.tobytes()
    assert leaping.itl_counts.tobytes() == stepping.itl_counts.tobytes()
    for name in sorted(set(leaping.instances.dtype.names or ()) - {"busy_s"}):
        np.testing.assert_array_equal(leaping.instances[name], stepping.instances[name], name)
