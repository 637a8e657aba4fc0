"""Replay Mooncake traces with Dynamo's offline simulator; prints CPU seconds and mean latencies of each as JSON.

Usage: python dynamo_replay.py ROUTER TRACE..., in an environment that has ai-dynamo-runtime.
"""

import json
import sys
import time

from dynamo._core import _normalize_mocker_config, run_mocker_trace_replay

INSTANCES = 8
ENGINE = {"num_gpu_blocks": 26_000, "block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 8_192}


def replay(trace, router, **options):
    """CPU seconds of one replay, and what it says of it."""
    before_s = time.process_time()
    result = run_mocker_trace_replay(
        [trace],
        extra_engine_args=_normalize_mocker_config({"engine": ENGINE}),
        num_workers=INSTANCES,
        router_mode=router,
        trace_block_size=512,
        **options,
    )
    return time.process_time() - before_s, result.summary


def measure(trace, router):
    """One replay, less the time that it takes to read the trace."""
    read_s, _ = replay(trace, router, max_sim_time_ms=1e-3)
    total_s, summary = replay(trace, router)
    return {
        "cpu_s": total_s - read_s,
        "completed": summary["completed_requests"],
        "ttft_s": summary["mean_ttft_ms"] / 1e3,
        "e2e_s": summary["mean_e2e_latency_ms"] / 1e3,
    }


print(json.dumps({trace: measure(trace, sys.argv[1]) for trace in sys.argv[2:]}))
