"""The ``/metrics`` of an emulated engine: the names and labels of vLLM 0.32 that dispatchers and dashboards read."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable

from fleetpilot.dispatcher.emulator.engine import Engine

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class Histogram:
    """Counts of observations by size."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]):
        self.name = name
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count an observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, labels: str) -> Iterable[str]:
        """Its samples."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            shown = "+Inf" if bound == float("inf") else repr(float(bound))
            before, _, after = labels.partition(",")
            yield f'{self.name}_bucket{{{before},le="{shown}",{after}}} {total}.0'
        yield f"{self.name}_count{{{labels}}} {total}.0"
        yield f"{self.name}_sum{{{labels}}} {self._sum}"


class Metrics:
    """What the engine counts beside what the cluster model does.

    Args:
        model: name of the served model.

    Attributes:
        ended: requests by the reason of their end.
    """

    def __init__(self, model: str):
        self._labels = f'engine="0",model_name="{model}"'.replace("\\", r"\\").replace("\n", r"\n")
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.pulled_tokens = 0
        self.generation_tokens = 0
        self.ended = dict.fromkeys(FINISH_REASONS, 0)
        self.failed_pulls = 0
        self.expired_leases = 0
        self.first_token_s = Histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_TOKEN_S
        )
        self.gap_s = Histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _GAP_S
        )
        self.whole_s = Histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _LATENCY_S
        )
        self.queue_s = Histogram(
            "vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _LATENCY_S
        )
        self.start_s = time.time()

    def text(self, engine: Engine) -> str:
        """The exposition."""
        profile = engine.profile
        labels = self._labels
        lines: list[str] = []

        def add(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
            lines.append(f"# HELP {name} {text}")
            lines.append(f"# TYPE {name} {kind}")
            for extra, value in samples:
                lines.append(f"{name}{{{_merged(labels, extra)}}} {float(value)}")

        waiting = engine.waiting
        deferred = engine.fetching
        hits = engine.counter("prefix_hits_tokens") - engine.pulled_tokens
        queries = engine.counter("prefix_queries_tokens")
        local = self.cached_tokens - self.pulled_tokens
        add(
            "vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", ("", engine.running)
        )
        add("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", ("", waiting))
        add(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "Number of requests waiting to be processed, by reason.",
            ('reason="capacity"', waiting - deferred),
            ('reason="deferred"', deferred),
        )
        add(
            "vllm:num_requests_kv_fetch_by_stage",
            "gauge",
            "Number of requests whose KV is fetched from another engine, by stage.",
            ('stage="waiting_to_start"', deferred - engine.copying),
            ('stage="in_progress"', engine.copying),
            ('stage="completed_waiting"', 0),
        )
        add(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            ("", engine.used_blocks / profile.kv_blocks),
        )
        for name, text, value in (
            ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", queries),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", max(hits, 0)),
            ("external_prefix_cache_queries", "External prefix cache queries from KV connector.", queries - hits),
            ("external_prefix_cache_hits", "External prefix cache hits from KV connector.", engine.pulled_tokens),
            ("num_preemptions", "Cumulative number of preemption from the engine.", engine.counter("preemptions")),
            ("prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", self.generation_tokens),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", self.cached_tokens),
            ("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.", self.failed_pulls),
            ("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", self.expired_leases),
        ):
            add(f"vllm:{name}_total", "counter", text, ("", value))
        add(
            "vllm:prompt_tokens_by_source_total",
            "counter",
            "Number of prompt tokens by source.",
            ('source="local_compute"', self.prompt_tokens - self.cached_tokens),
            ('source="local_cache_hit"', local),
            ('source="external_kv_transfer"', self.pulled_tokens),
        )
        add(
            "vllm:request_success_total",
            "counter",
            "Count of successfully processed requests.",
            *((f'finished_reason="{reason}"', count) for reason, count in self.ended.items()),
        )
        for histogram in (self.first_token_s, self.gap_s, self.whole_s, self.queue_s):
            lines.append(f"# HELP {histogram.name} {histogram.text}")
            lines.append(f"# TYPE {histogram.name} histogram")
            lines.extend(histogram.lines(labels))
        add(
            "vllm:cache_config_info",
            "gauge",
            "Information of the LLMEngine CacheConfig",
            (
                f'block_size="{profile.block_size}",cache_dtype="auto",enable_prefix_caching="{profile.prefix_cache}",'
                f'num_gpu_blocks="{profile.kv_blocks + 1}"',
                1,
            ),
        )
        lines.append("# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.")
        lines.append("# TYPE process_start_time_seconds gauge")
        lines.append(f"process_start_time_seconds {self.start_s}")
        return "\n".join(lines) + "\n"


def _merged(labels: str, extra: str) -> str:
    """Labels in the order of their names, as Prometheus' client writes them."""
    return labels if not extra else ",".join(sorted([*labels.split(","), *extra.split(",")]))
