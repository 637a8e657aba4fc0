"""A real engine is started while requests run, takes some, and is drained: they move, and their clients see nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest
from driver import (
    COMPLETIONS,
    NIXL,
    Stream,
    a_body,
    assert_same,
    direct_stream,
    metrics,
    relay_of,
    run,
    serving,
    settled,
    stream,
    token_ids,
    until,
)
from engines import START_LIMIT_S, Engine

from fleetpilot.dispatcher.engine import EngineState
from fleetpilot.dispatcher.scaling.sleep import CannotSleep, SleepActuator
from fleetpilot.fleet.view import (
    KIND_DESTINATION,
    KIND_DISPATCH,
    KIND_SCALE,
    KIND_SOURCE,
    NONE,
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_READY,
    Decision,
    FleetView,
)

pytestmark = pytest.mark.vllm

MOVED = 3
MOVED_TOKENS = 1200
"""Of an answer that is to move: the first must not have ended when the last has begun to move."""
CONTEXT_TOKENS = 600


class Told:
    """A policy that scales on cue, moves what drains, and sends requests to one engine."""

    name = "told"
    kinds = (KIND_DISPATCH, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE)

    def __init__(self) -> None:
        self.slot = 0
        self.scale: int | None = None

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        candidates = view.instances[0][view.instances[0]["candidate"] != 0]
        kind = view.fleet["kind"][0]
        if kind in (KIND_DISPATCH, KIND_DESTINATION):
            slots = candidates["slot"][candidates["slot"] == self.slot]
        else:
            wanted = STATE_DRAINING if kind == KIND_SOURCE else self.scale
            slots = candidates["slot"][candidates["state"] == wanted] if wanted is not None else ()
        return Decision(np.array([slots[0] if len(slots) else NONE]))


def test_engines_without_a_sleep_mode_are_refused_though_their_routes_answer(engines: tuple[Engine, Engine]) -> None:
    async def test() -> None:
        with pytest.raises(CannotSleep, match="it has no sleep mode"):
            await SleepActuator([engine.url for engine in engines]).open(lambda: None)

    run(test)


def test_an_engine_is_started_under_load_and_drained_by_migration(engines: tuple[Engine, Engine]) -> None:
    async def test() -> None:
        policy, is_up = Told(), asyncio.Event()
        asked: list[tuple[dict[str, Any], Stream]] = []
        settings = {
            "scaler": "process",
            "scale_command": engines[1].template(),
            "max_instances": 2,
            "scale_interval_s": 0.2,
            "scale_out_cooldown_s": 0.0,
            "scale_in_cooldown_s": 0.0,
            "scale_in_load": 1.0,
            "start_deadline_s": START_LIMIT_S,
            "rebalance_interval_s": 0.1,
        }
        async with serving(engines[:1], policy, **settings) as (dispatcher, client):

            async def ask(number: int, tokens: int) -> None:
                prompt = token_ids(random.Random(number), CONTEXT_TOKENS)
                body = a_body(max_tokens=tokens, prompt=prompt)
                asked.append((body, await stream(client, body, name=f"asked-{number}")))

            async def load(first: int) -> None:
                for number in itertools.count(first, 2):
                    if is_up.is_set():
                        return
                    await ask(number, 200)

            loads = [asyncio.create_task(load(first)) for first in range(2)]
            await until(lambda: len(dispatcher.at[0]) == 2)
            policy.scale = STATE_ABSENT
            await dispatcher.ready(2, START_LIMIT_S)
            assert asked, "no request ended while the engine started"
            is_up.set()
            await asyncio.gather(*loads)
            policy.scale, policy.slot = None, 1
            numbers = range(1000, 1000 + MOVED)
            streams = [asyncio.create_task(ask(number, MOVED_TOKENS)) for number in numbers]
            relays = [await relay_of(dispatcher, f"asked-{number}") for number in numbers]
            await until(lambda: all(relay.movable and relay.slot == 1 for relay in relays))
            url, before = dispatcher.fleet.engines[1].url, await metrics(engines[0])
            policy.scale, policy.slot = STATE_READY, 0
            await until(lambda: dispatcher.fleet.engines[1].state == EngineState.ABSENT)
            policy.scale = None
            await asyncio.gather(*streams)
            assert [relay.migrations for relay in relays] == [1] * MOVED, dict(dispatcher.counts)
            by_nixl = (await metrics(engines[0]))[NIXL] - before[NIXL]
            print("requests:", len(asked), "tokens by NIXL:", int(by_nixl), dict(dispatcher.counts))
            assert dispatcher.counts["migrations completed"] == MOVED
            assert by_nixl >= MOVED * CONTEXT_TOKENS
            assert dispatcher.counts["failovers"] == dispatcher.counts["engines_lost"] == 0
            assert dispatcher.outcomes == {"finished": len(asked)}
            await until(lambda: dispatcher.scaler is not None and url not in dispatcher.scaler.instances)
            for body, answer in asked[:4] + asked[-MOVED:]:
                assert_same(answer, await direct_stream(engines[0], body, COMPLETIONS))
        await settled(engines[0])

    run(test)
