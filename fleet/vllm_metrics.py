"""Reads the poll fields of `INSTANCE_VIEW` from the text of a vLLM server's ``/metrics``.

A live server's text has about 60 kB, of which a dispatcher needs seven metrics, ten times a second from every engine:
the text is searched for them, not parsed. Names and labels are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from fleetpilot.fleet.ledger import stock_load

_NAMES = (
    _RUNNING := "vllm:num_requests_running",
    _WAITING := "vllm:num_requests_waiting",
    _USAGE := "vllm:kv_cache_usage_perc",
    _PREEMPTIONS := "vllm:num_preemptions_total",
    _QUERIES := "vllm:prefix_cache_queries_total",
    _HITS := "vllm:prefix_cache_hits_total",
    _CONFIG := "vllm:cache_config_info",
)
# Anchored by the line break and not by ^: the search then jumps from line to line, eight times as fast.
_SAMPLE = re.compile(rf"\n({'|'.join(_NAMES)})({{.*}})? (\S+)")


@dataclass(frozen=True)
class VllmMetrics:
    """One poll of one server: the sums over its data-parallel engines, of `kv_usage` the mean.

    `None` stands for what the server does not export.

    Attributes:
        running: requests in the batch.
        waiting: requests waiting.
        kv_usage: fraction of the usable KV blocks in use.
        preemptions: preemptions since the server started.
        prefix_queries_tokens: tokens looked up in the prefix cache since the server started.
        prefix_hits_tokens: tokens found there.
        kv_capacity_blocks: usable KV blocks, one fewer than each engine reports: vLLM never hands out its block 0, and
            usage is counted without it.
        block_size: tokens per KV block.
    """

    running: float
    waiting: float
    kv_usage: float
    preemptions: float | None
    prefix_queries_tokens: float | None
    prefix_hits_tokens: float | None
    kv_capacity_blocks: float | None
    block_size: float | None


def read_metrics(text: str) -> VllmMetrics:
    """Read a Prometheus exposition of vLLM.

    Raises:
        ValueError: a required metric is missing (running, waiting, KV usage), a value is not a finite number >= 0, KV
            usage is above 1, or the engines' block sizes differ.
    """
    texts: dict[str, list[str]] = {name: [] for name in _NAMES}
    configs = []
    for name, labels, value in _SAMPLE.findall("\n" + text):
        texts[name].append(value)
        if name == _CONFIG:
            configs.append(labels)
    for name in (_RUNNING, _WAITING, _USAGE):
        if not texts[name]:
            raise ValueError(f"metric {name} is missing; expected the text of a vLLM server's /metrics")
    values = {name: _numbers(f"metric {name}", texts[name]) for name in _NAMES}
    if max(values[_USAGE]) > 1:
        raise ValueError(f"metric {_USAGE} is {max(values[_USAGE])}; expected a fraction, at most 1")
    block_sizes = set(_label_numbers(configs, "block_size"))
    if len(block_sizes) > 1:
        raise ValueError(f"label block_size of {_CONFIG} is {sorted(block_sizes)}; expected one size for all engines")
    return VllmMetrics(
        running=sum(values[_RUNNING]),
        waiting=sum(values[_WAITING]),
        kv_usage=sum(values[_USAGE]) / len(values[_USAGE]),
        preemptions=_total(values[_PREEMPTIONS]),
        prefix_queries_tokens=_total(values[_QUERIES]),
        prefix_hits_tokens=_total(values[_HITS]),
        kv_capacity_blocks=_total([blocks - 1 for blocks in _label_numbers(configs, "num_gpu_blocks")]),
        block_size=block_sizes.pop() if block_sizes else None,
    )


def apply_poll(instance: Any, metrics: VllmMetrics, age_s: float) -> None:
    """Write a poll into an `INSTANCE_VIEW` record and refresh the load fields that follow from it.

    What the server does not export keeps the value it had.

    Args:
        instance: the record, written in place.
        metrics: the poll.
        age_s: seconds since the server answered it.

    Raises:
        ValueError: the age is not a finite number >= 0, or the block size changed while requests are in flight, whose
            blocks the ledger has counted in the old one.
    """
    if not (math.isfinite(age_s) and age_s >= 0):
        raise ValueError(f"age_s is {age_s}; expected a finite number of seconds >= 0")
    if metrics.block_size not in (None, instance["block_size"]) and instance["in_flight"]:
        raise ValueError(
            f"block_size changed from {instance['block_size']} to {metrics.block_size} with "
            f"{instance['in_flight']:.0f} requests in flight; expected them ended before an engine restarts"
        )
    for field, value in vars(metrics).items():
        if value is not None:
            instance[field] = value
    instance["poll_age_s"] = age_s
    stock_load(instance)


def _numbers(name: str, texts: list[str]) -> list[float]:
    """The values as numbers."""
    numbers = []
    for text in texts:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name} is {text!r}; expected a finite number >= 0")
        numbers.append(number)
    return numbers


def _label_numbers(configs: list[str], label: str) -> list[float]:
    """The label's value for every engine; empty if an engine does not (yet) state it."""
    texts = [value for labels in configs for value in re.findall(rf'[{{,]{label}="([^"]*)"', labels)]
    return [] if "None" in texts else _numbers(f"label {label} of {_CONFIG}", texts)


def _total(values: list[float]) -> float | None:
    return sum(values) if values else None
