"""Preemptions of two engines with little KV memory, by policy, on the same trace: Llumnix beside round robin.

The trace is 48 requests: prompts of 60 to 200 tokens, answers of 20 to 60 tokens or, every third on average, of 300 to
600. Eight are in flight at any time, taken in the trace's order: a client sends its next request when it has its
answer, so that the load is the same on a fast and on a slow machine. Each engine holds 1,440 tokens of KV cache.

Usage: python benchmarks/vllm/preemptions.py [--seeds N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from _engines import load, two_engines
from _report import machine, print_table
from driver import a_body, metrics, serving, stream, token_ids
from engines import Engine

from fleetpilot.baselines import load_policy

REQUESTS = 48
IN_FLIGHT = 8
BLOCKS = 46
FLAGS = ("--max-model-len", "1024")
POLICIES = ("round-robin", "llumnix")
PREEMPTIONS = ("vllm:num_preemptions_total", "")


@dataclass
class Outcome:
    """Of a trace under a policy."""

    preemptions: float
    migrations: int
    latencies_s: list[float]
    took_s: float


def trace(seed: int) -> list[dict[str, Any]]:
    """Requests in order; their answers do not end by themselves."""
    generator = random.Random(seed)
    bodies = []
    for _ in range(REQUESTS):
        prompt = token_ids(generator, generator.randrange(60, 200))
        long = generator.random() < 1 / 3
        tokens = generator.randrange(300, 600) if long else generator.randrange(20, 60)
        bodies.append(a_body(prompt=prompt, max_tokens=tokens))
    return bodies


async def replay(engines: list[Engine], policy: str, bodies: list[dict[str, Any]]) -> Outcome:
    """The trace through a dispatcher with this policy."""
    for engine in engines:
        await asyncio.to_thread(engine.reset)
    before = [(await metrics(engine))[PREEMPTIONS] for engine in engines]
    latencies_s: list[float] = []
    left = iter(bodies)
    begun_s = time.monotonic()
    async with serving(engines, load_policy(policy), poll_interval_s=0.1) as (dispatcher, client):

        async def ask_one_after_another() -> None:
            for body in left:
                sent_s = time.monotonic()
                answer = await stream(client, body)
                assert answer.whole
                assert answer.finish_reason == "length"
                latencies_s.append(time.monotonic() - sent_s)

        await asyncio.gather(*(ask_one_after_another() for _ in range(IN_FLIGHT)))
        migrations = dispatcher.counts["migrations completed"]
    after = [(await metrics(engine))[PREEMPTIONS] for engine in engines]
    return Outcome(sum(after) - sum(before), migrations, latencies_s, time.monotonic() - begun_s)


def report(outcomes: dict[str, list[Outcome]]) -> None:
    columns = ("policy", "preemptions", "sum", "migrations", "mean s", "p99 s", "trace s")
    rows = []
    for policy, runs in outcomes.items():
        latencies_s = [latency_s for run in runs for latency_s in run.latencies_s]
        rows.append(
            [
                policy,
                " ".join(f"{run.preemptions:.0f}" for run in runs),
                f"{sum(run.preemptions for run in runs):.0f}",
                " ".join(str(run.migrations) for run in runs),
                f"{statistics.mean(latencies_s):.1f}",
                f"{statistics.quantiles(latencies_s, n=100)[98]:.1f}",
                " ".join(f"{run.took_s:.0f}" for run in runs),
            ]
        )
    print_table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(machine())
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
    with two_engines(blocks=BLOCKS, max_num_seqs=16, flags=FLAGS) as engines:
        for seed in range(seeds):
            for policy in POLICIES:
                outcomes[policy].append(asyncio.run(replay(engines, policy, trace(seed))))
                print(f"  seed {seed}, {policy}: {load()}", flush=True)
    report(outcomes)


if __name__ == "__main__":
    main()
