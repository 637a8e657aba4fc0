"""Reading a vLLM server's metrics, on a recording of vLLM 0.32 under load."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fleetpilot.fleet.view import INSTANCE_FIELDS, INSTANCE_VIEW, empty_view
from fleetpilot.fleet.vllm_metrics import VllmMetrics, apply_poll, read_metrics

RECORDED = (Path(__file__).parents[1] / "data" / "vllm_metrics.txt").read_text()
READ = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")


def without(name: str) -> str:
    return "\n".join(line for line in RECORDED.split("\n") if not line.startswith(f"vllm:{name}{{"))


def instance(**fields: float) -> np.void:
    record: np.void = empty_view(1, 1).instances[0, 0]
    for field, value in fields.items():
        record[field] = value
    return record


def test_the_recording() -> None:
    metrics = read_metrics(RECORDED)
    assert metrics == VllmMetrics(
        running=6,
        waiting=4,
        kv_usage=0.6171875,
        preemptions=3,
        prefix_queries_tokens=10200,
        prefix_hits_tokens=0,
        kv_capacity_blocks=256,
        block_size=32,
    )
    # 257 blocks were configured; usage is a whole number of blocks only of the 256 that can be used.
    assert metrics.kv_usage * 256 == 158


def test_the_order_of_the_text_and_its_ends_do_not_matter() -> None:
    samples = [line for line in RECORDED.split("\n") if line and not line.startswith("#")]
    assert read_metrics("\n".join(reversed(samples))) == read_metrics(RECORDED)
    needed_first = sorted(samples, key=lambda line: not line.startswith("vllm:num_requests_running{"))
    assert read_metrics("\n".join(needed_first)) == read_metrics(RECORDED)


def test_samples_without_labels_and_with_awkward_labels() -> None:
    text = (
        "vllm:num_requests_running 2\n"
        'vllm:num_requests_waiting{model_name="a} 7 \\"b\\" {"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 5e-1 1395066363000\n'
    )
    assert read_metrics(text) == VllmMetrics(2, 3, 0.5, None, None, None, None, None)


def test_data_parallel_engines_are_added_up_and_their_usage_is_averaged() -> None:
    second = RECORDED.replace('engine="0"', 'engine="1"')
    second = second.replace("} 6.0\n", "} 1.0\n").replace("} 0.6171875\n", "} 0.25\n")
    both = read_metrics(RECORDED + second)
    assert (both.running, both.waiting, both.preemptions, both.prefix_queries_tokens) == (7, 8, 6, 20400)
    assert both.kv_usage == (0.6171875 + 0.25) / 2
    assert both.kv_capacity_blocks == 2 * 256
    assert both.block_size == 32


@pytest.mark.parametrize("name", READ[:3])
def test_a_missing_required_metric_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"metric vllm:{name} is missing"):
        read_metrics(without(name))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("num_preemptions_total", "preemptions"),
        ("prefix_cache_queries_total", "prefix_queries_tokens"),
        ("prefix_cache_hits_total", "prefix_hits_tokens"),
        ("cache_config_info", "kv_capacity_blocks"),
        ("cache_config_info", "block_size"),
    ],
)
def test_a_missing_optional_metric_is_none(name: str, field: str) -> None:
    assert getattr(read_metrics(without(name)), field) is None


def test_blocks_not_yet_known_are_none() -> None:
    assert read_metrics(RECORDED.replace('num_gpu_blocks="257"', 'num_gpu_blocks="None"')).kv_capacity_blocks is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0", "six"])
def test_a_value_that_is_no_count_is_refused(value: str) -> None:
    text = RECORDED.replace(
        'vllm:num_requests_running{engine="0",model_name="tiny"} 6.0', f"vllm:num_requests_running {value}"
    )
    assert text != RECORDED
    with pytest.raises(
        ValueError, match=rf"metric vllm:num_requests_running is '{value.replace('+', '.')}'; expected a finite"
    ):
        read_metrics(text)


def test_usage_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vllm:kv_cache_usage_perc is 61\.7; expected a fraction"):
        read_metrics(RECORDED.replace("} 0.6171875", "} 61.7"))


def test_bad_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="label num_gpu_blocks of vllm:cache_config_info is 'many'"):
        read_metrics(RECORDED.replace('num_gpu_blocks="257"', 'num_gpu_blocks="many"'))
    other = RECORDED.replace('engine="0"', 'engine="1"').replace(',block_size="32"', ',block_size="16"')
    with pytest.raises(ValueError, match=r"label block_size .* is \[16\.0, 32\.0\]; expected one size"):
        read_metrics(RECORDED + other)


def test_apply_poll_writes_the_poll_fields_and_the_load_that_follows() -> None:
    record = instance(block_size=32, in_flight=12, unstarted=5, unstarted_prompt_blocks=40, head_prompt_blocks=9)
    before = record.copy()
    apply_poll(record, read_metrics(RECORDED), age_s=0.125)
    written = {field for field in INSTANCE_VIEW.names or () if record[field] != before[field]}
    polled = {field.name for field in INSTANCE_FIELDS if field.source == "poll"}
    load = {"queued_demand_blocks", "head_demand_blocks", "queued", "batched"}
    assert written == (polled | load | {"kv_capacity_blocks"}) - {
        "prefix_hits_tokens",
        "preempted",
    }
    assert record["poll_age_s"] == 0.125
    assert record["kv_capacity_blocks"] == 256
    assert record["free_blocks"] == 256 - 158
    assert (record["queued"], record["batched"]) == (5, 7)
    assert (record["queued_demand_blocks"], record["head_demand_blocks"]) == (40, 9)


def test_apply_poll_sets_the_block_size_of_an_engine_without_requests() -> None:
    record = instance(block_size=16)
    apply_poll(record, read_metrics(RECORDED), age_s=0.0)
    assert record["block_size"] == 32


def test_apply_poll_keeps_what_the_server_does_not_export() -> None:
    record = instance(kv_capacity_blocks=792, block_size=16, preemptions=2)
    apply_poll(record, VllmMetrics(1, 0, 0.5, None, None, None, None, None), age_s=0.0)
    assert (record["kv_capacity_blocks"], record["block_size"], record["preemptions"]) == (792, 16, 2)
    assert record["free_blocks"] == 396


def test_apply_poll_refuses_another_block_size_while_requests_are_in_flight() -> None:
    record = instance(block_size=16, in_flight=3)
    with pytest.raises(ValueError, match=r"block_size changed from 16\.0 to 32\.0 with 3 requests in flight"):
        apply_poll(record, read_metrics(RECORDED), age_s=0.0)
    assert record["running"] == 0


@pytest.mark.parametrize("age_s", [-0.1, math.nan, math.inf])
def test_apply_poll_refuses_a_bad_age(age_s: float) -> None:
    with pytest.raises(ValueError, match="age_s is"):
        apply_poll(instance(), read_metrics(RECORDED), age_s)
