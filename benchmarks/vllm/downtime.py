"""How long a moving request stands still, beside recomputing it at its destination, by the length of its context.

A request of 500 to 6,000 tokens runs on one engine beside two others and moves to the other engine, which runs one of
its own: by live migration, or by recompute (the same stop and resumption, without the copy before). Downtime is from
the source's last token to the destination's first, as they come to the dispatcher; the excess is over one step of the
destination then. The source's other streams are compared with themselves just before: gaps between tokens from the
first probe until the stop ("copying"), and, as a control, while the source answers an ordinary request with the same
tokens, all in its cache, by one token ("one request"): engine, HTTP server and dispatcher share a core, unless
`--server-apart` gives the source's HTTP server and the dispatcher the other core (where the destination computes).

Usage: python benchmarks/vllm/downtime.py [--repetitions N] [--server-apart]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import orjson
from _engines import load, two_engines
from _report import machine, print_table, spread
from driver import Steered, a_body, move, relay_of, serving, settled, stream, token_ids, until
from engines import Engine

from fleetpilot.dispatcher import migration as migration_module
from fleetpilot.dispatcher.relay import Relay
from fleetpilot.dispatcher.requests import COMPLETIONS
from fleetpilot.dispatcher.service import Dispatcher

CONTEXTS = (500, 1000, 2000, 4000, 6000)
TOKENS_BEFORE = 15
TOKENS_BEHIND = 12
WINDOW_S = 1.0
"""Before the migration, that the source's other streams are compared with."""

_copy_stages = migration_module._copy_stages


@dataclass
class Measured:
    """Of one context length.

    Attributes:
        downtime_s: by migration and by recompute.
        excess_s: of migrations, over one step at the destination.
        before_s: gaps between tokens of the source's other streams just before a migration.
        copying_s: the same from the first probe until the stop.
        request_s: the same while the source answers an ordinary request with these tokens.
    """

    downtime_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    excess_s: list[float] = field(default_factory=list)
    before_s: list[float] = field(default_factory=list)
    copying_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)


class Clock:
    """When tokens of a request came to the dispatcher."""

    def __init__(self, relay: Relay):
        self.times_s: list[float] = []
        count = relay._count

        def counted(tokens: int) -> None:
            self.times_s += [time.monotonic()] * max(0, tokens - relay.tokens)
            count(tokens)

        relay._count = counted  # type: ignore[method-assign]

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Between a token and the one before, of the tokens in this time."""
        return [after - before for before, after in pairwise(self.times_s) if start_s < after <= end_s]


async def no_copy(*_: Any) -> None:
    """A migration without a copy: its destination recomputes."""


async def start(dispatcher: Dispatcher, client: Any, name: str, slot: int, prompt: list[int], tokens: int) -> Any:
    """A request that decodes at this engine, and its task."""
    dispatcher.fleet.host.policy.slot = slot  # type: ignore[attr-defined]
    body = a_body(prompt=prompt, max_tokens=tokens)
    task = asyncio.create_task(stream(client, body, name=name))
    relay = await relay_of(dispatcher, name)
    clock = Clock(relay)
    await until(lambda: relay.movable)
    return relay, clock, task


async def measure(
    dispatcher: Dispatcher,
    client: Any,
    engines: list[Engine],
    prompt: list[int],
    copied: bool,
    others: list[Clock],
    name: str,
    measured: Measured,
) -> None:
    """Move one request."""
    migration_module._copy_stages = _copy_stages if copied else no_copy  # type: ignore[assignment]
    relay, clock, task = await start(dispatcher, client, name, 0, prompt, 1500)
    await until(lambda: relay.tokens >= TOKENS_BEFORE)
    await asyncio.sleep(WINDOW_S)
    if copied:
        measured.request_s += await gaps_beside_a_request(dispatcher, prompt, others)
        await asyncio.sleep(WINDOW_S)
    migration = await move(dispatcher, relay, 1)
    assert migration.outcome == "completed", migration.outcome
    seam = len(clock.times_s)
    await until(lambda: len(clock.times_s) >= seam + TOKENS_BEHIND)
    task.cancel()
    downtime_s = migration.resumed_s - migration.stopped_s
    measured.downtime_s[copied].append(downtime_s)
    if copied:
        step_s = statistics.median(clock.gaps_s(migration.resumed_s, time.monotonic()))
        measured.excess_s.append(downtime_s - step_s)
        for other in others:
            measured.before_s += other.gaps_s(migration.begun_s - WINDOW_S, migration.begun_s)
            measured.copying_s += other.gaps_s(migration.begun_s, migration.stopped_s)
    await until(lambda: relay.ended)


async def gaps_beside_a_request(dispatcher: Dispatcher, prompt: list[int], others: list[Clock]) -> list[float]:
    """Between tokens of the source's other streams while it answers this prompt by one token."""
    begun_s = time.monotonic()
    body = orjson.dumps(a_body(prompt=prompt, max_tokens=1, stream=False))
    answer = await dispatcher.fleet.engines[0].client.fetch("POST", COMPLETIONS, body, timeout_s=60.0)
    assert answer.status == 200
    end_s = time.monotonic()
    return [gap_s for other in others for gap_s in other.gaps_s(begun_s, end_s)]


async def bench(engines: list[Engine], repetitions: int) -> dict[int, Measured]:
    """Lengths and ways take turns, so that what else the machine does falls on all of them."""
    generator = random.Random(1)
    measured: dict[int, Measured] = defaultdict(Measured)
    prompts = {context: token_ids(generator, context - TOKENS_BEFORE) for context in CONTEXTS}
    async with serving(engines, Steered(), stalled_s=3600.0) as (dispatcher, client):
        for repetition in range(repetitions):
            for context, prompt in prompts.items():
                for copied in (True, False):
                    await settled(engines[1])  # else its prefix cache is not emptied
                    await asyncio.to_thread(engines[1].reset)
                    name = f"{repetition}-{context}-{copied}"
                    kept = [
                        await start(dispatcher, client, f"{name}-{n}", slot, token_ids(generator, 30), 4000)
                        for n, slot in enumerate((0, 0, 1))
                    ]
                    others = [clock for _, clock, _ in kept[:2]]
                    await measure(dispatcher, client, engines, prompt, copied, others, name, measured[context])
                    for relay, _, task in kept:
                        task.cancel()
                        await until(lambda relay=relay: relay.ended)
            print(f"  {repetition + 1} of {repetitions}: {load()}", flush=True)
    return measured


def report(measured: dict[int, Measured]) -> None:
    columns = (
        "context",
        "migration ms",
        "recompute ms",
        "recompute / migration",
        "excess ms",
        "others ms",
        "copying ms",
        "one request ms",
    )
    rows = []
    for context, one in measured.items():
        moved, recomputed = (statistics.median(one.downtime_s[copied]) for copied in (True, False))
        rows.append(
            [
                f"{context:,}",
                spread([1e3 * time_s for time_s in one.downtime_s[True]]),
                spread([1e3 * time_s for time_s in one.downtime_s[False]]),
                f"{recomputed / moved:.1f}",
                spread([1e3 * time_s for time_s in one.excess_s]),
                f"{1e3 * statistics.mean(one.before_s):.1f}",
                f"{1e3 * statistics.mean(one.copying_s):.1f}",
                f"{1e3 * statistics.mean(one.request_s):.1f}",
            ]
        )
    print("smallest / median / largest:")
    print_table(columns, rows)
    first, last = (statistics.median(measured[context].downtime_s[True]) for context in (CONTEXTS[0], CONTEXTS[-1]))
    print(f"median at {CONTEXTS[-1]:,} tokens / at {CONTEXTS[0]:,}: {last / first:.2f} (aim: at most 2)")
    share = last / statistics.median(measured[CONTEXTS[-1]].downtime_s[False])
    print(f"median at {CONTEXTS[-1]:,} tokens / by recompute: {share:.3f} (aim: at most 0.1)")
    before_s, copying_s, request_s = (
        statistics.mean(gap_s for one in measured.values() for gap_s in gaps_s(one))
        for gaps_s in (attrgetter("before_s"), attrgetter("copying_s"), attrgetter("request_s"))
    )
    print(
        f"the source's other streams: a token every {1e3 * before_s:.1f} ms before, every {1e3 * copying_s:.1f} ms "
        f"while copying: {copying_s / before_s - 1:+.1%} (aim: at most +5 %); "
        f"every {1e3 * request_s:.1f} ms beside one ordinary request: {request_s / before_s - 1:+.1%}"
    )
    migrations = sum(len(one.excess_s) for one in measured.values())
    gaps = sum(len(one.copying_s) for one in measured.values()) / 2 / migrations
    print(f"a migration delays each of them by {1e3 * gaps * (copying_s - before_s):.0f} ms on the whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--server-apart", action="store_true", help="the source's core computes and does nothing else")
    arguments = parser.parse_args()
    print(machine())
    with two_engines() as engines:
        if arguments.server_apart:
            engines[0].move_server(engines[1].core)
            os.sched_setaffinity(0, {engines[1].core})
        measured = asyncio.run(bench(engines, arguments.repetitions))
    report(measured)


if __name__ == "__main__":
    main()
