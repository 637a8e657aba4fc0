"""The kernel against the second model of tests/oracle.py, and leaps against single steps."""

import math

import numpy as np
import oracle
import pytest
import strategies
from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, RunLog, simulate
from fleetpilot.fleet.profiles import PROVENANCE_KEYS, HardwareProfile
from fleetpilot.workloads.table import RequestTable
from hypothesis import given, settings
from hypothesis import strategies as st

COST_FIELDS = ("a_s", "w_s", "b_s", "w_e_s", "expert_share", "c_s", "d_s", "e_s", "host_step_s", "host_per_seq_s")


def profile_of(instance: oracle.OracleInstance, index: int) -> HardwareProfile:
    return HardwareProfile(
        name=f"drawn-{index}",
        gpu="none",
        model="none",
        tp=1,
        engine="none",
        scheduler=instance.scheduler,
        block_size=instance.block_size,
        kv_blocks=instance.kv_blocks,
        max_num_seqs=instance.max_num_seqs,
        max_num_batched_tokens=instance.max_num_batched_tokens,
        max_model_len=(instance.kv_blocks - instance.watermark_blocks) * instance.block_size
        if instance.scheduler == "chunked"
        else min(
            (instance.kv_blocks - instance.watermark_blocks) * instance.block_size, instance.max_num_batched_tokens
        ),
        prefix_cache=instance.prefix_cache,
        watermark=(instance.watermark_blocks + 0.5) / instance.kv_blocks if instance.watermark_blocks else 0.0,
        kv_bytes_per_token=1,
        priority_order=instance.priority_order,
        provenance=dict.fromkeys(PROVENANCE_KEYS, "drawn at random"),
        **{name: getattr(instance, name) for name in COST_FIELDS},
    )


def run_kernel(table: RequestTable, instances: list[oracle.OracleInstance], *, leap: bool) -> RunLog:
    fleet = FleetConfig(tuple(profile_of(instance, i) for i, instance in enumerate(instances)))
    return simulate(table, fleet, load_policy("round-robin"), leap=leap, sample_interval_s=1 / 16)


def assert_same(log: RunLog, expected: oracle.OracleResult) -> None:
    for name in ("dispatch_s", "admitted_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(
            log.requests[name], [getattr(r, name) for r in expected.requests], rtol=1e-9, err_msg=name
        )
    for ours, theirs in (
        ("instance", "instance"),
        ("preemptions", "preemptions"),
        ("cached_tokens", "cached_tokens"),
        ("generated", "generated"),
    ):
        np.testing.assert_array_equal(log.requests[ours], [getattr(r, theirs) for r in expected.requests], ours)
    np.testing.assert_allclose(
        log.requests["preemption_loss_s"], [r.preempted_loss_s for r in expected.requests], rtol=1e-6, atol=1e-9
    )
    np.testing.assert_array_equal(log.instances["preemptions"], expected.preemptions)
    np.testing.assert_array_equal(log.instances["iterations"], expected.iterations)
    for sample in log.samples:
        boundaries = [b.time_s for b in expected.history[sample["instance"]]]
        if min((abs(t - sample["time_s"]) for t in boundaries), default=math.inf) > 1e-9:
            assert sample["used_blocks"] == expected.used_blocks_at(sample["instance"], sample["time_s"])


def assert_gaps(log: RunLog, expected: oracle.OracleResult) -> None:
    gaps = np.concatenate([np.diff(r.token_times) for r in expected.requests])
    assert log.itl_counts.sum() == len(gaps)
    edges = log.itl_edges_s
    # a gap within rounding of an edge may fall on either side of it
    low, _ = np.histogram(gaps * (1 - 1e-9), edges)
    high, _ = np.histogram(gaps * (1 + 1e-9), edges)
    assert np.all(np.abs(np.cumsum(log.itl_counts) - np.cumsum(low)) <= np.abs(np.cumsum(low) - np.cumsum(high)))


@given(strategies.clusters())
def test_completions_preemptions_and_blocks_equal_the_oracle(
    cluster: tuple[RequestTable, list[oracle.OracleInstance]],
) -> None:
    table, instances = cluster
    expected = oracle.simulate(table, instances, lambda decision, row: decision % len(instances))
    log = run_kernel(table, instances, leap=True)
    assert_same(log, expected)
    assert_gaps(log, expected)


@given(strategies.clusters())
def test_leaps_equal_single_steps_bitwise(cluster: tuple[RequestTable, list[oracle.OracleInstance]]) -> None:
    table, instances = cluster
    leaping = run_kernel(table, instances, leap=True)
    stepping = run_kernel(table, instances, leap=False)
    assert leaping.requests.tobytes() == stepping.requests.tobytes()
    assert leaping.samples.tobytes() == stepping.samples.tobytes()
    assert leaping.itl_counts.tobytes() == stepping.itl_counts.tobytes()
    for name in set(leaping.instances.dtype.names) - {"busy_s"}:  # a sum of leaps against a sum of steps
        np.testing.assert_array_equal(leaping.instances[name], stepping.instances[name], name)
