"""Many clients, few blocks, engines that are killed: every answer is whole and what a lone engine would have said."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import numpy as np
import orjson
import pytest

from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.emulator.fleet import EmulatedFleet
from fleetpilot.dispatcher.emulator.server import EmulatedEngine, Options
from fleetpilot.dispatcher.http.client import Answer, HttpClient
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.profiles import load_profile

WAIT_S = 300.0
PROFILE = load_profile("tiny-cpu").replace(kv_blocks=256)


def a_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": "emulated",
        "max_tokens": draw.randrange(20, 200),
        "temperature": 0,
        "stream": True,
        "ignore_eos": draw.random() < 0.5,
        "stream_options": {"include_usage": True},
    }
    if draw.random() < 0.3:
        body["stop"] = [" the", " time"]
    if draw.random() < 0.3:
        text = "".join(draw.choice("abcdef ghijklm") for _ in range(draw.randrange(20, 600)))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": [draw.randrange(256, 400) for _ in range(draw.randrange(20, 600))]}


def content(answer: Answer) -> tuple[int, str, list[Any], list[Any]]:
    """What a client makes of a stream: status, text, how it ended, usage."""
    chunks = [orjson.loads(line[6:]) for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)
    ends = [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]]
    return answer.status, text, ends, [chunk["usage"] for chunk in chunks if chunk.get("usage")]


async def ask(url: str, route: str, body: dict[str, Any]) -> Answer:
    return await HttpClient(url).fetch("POST", route, orjson.dumps(body), timeout_s=WAIT_S)


async def soak(requests: int, engines: int, kills: int, workers: int = 1) -> None:
    draw = random.Random(7)
    asked = [a_request(draw) for _ in range(requests)]
    fleet = EmulatedFleet([PROFILE] * engines)
    await fleet.start()
    config = ServeConfig(
        engines=tuple(fleet.urls),
        port=0,
        workers=workers,
        policy="llumnix?threshold=20",
        profile="tiny-cpu",
        max_failovers=10,
    )
    dispatcher = Dispatcher(config)
    await dispatcher.start()
    await dispatcher.ready(engines, WAIT_S)
    answers = [asyncio.create_task(ask(f"http://127.0.0.1:{dispatcher.port}", *request)) for request in asked]
    for number in range(kills):
        while sum(task.done() for task in answers) < requests * (number + 1) // (kills + 2):
            await asyncio.sleep(0.01)
        killed = fleet.engines[number % engines]
        await killed.kill()
        fleet.engines[number % engines] = fresh = EmulatedEngine(PROFILE, Options())
        await fresh.start(port=killed.port)
    got = await asyncio.gather(*answers)
    lone = EmulatedEngine(load_profile("h100-llama-3.1-8b"), Options())
    await lone.start()
    expected = await asyncio.gather(*(ask(f"http://127.0.0.1:{lone.port}", *request) for request in asked))
    assert [content(answer) for answer in got] == [content(answer) for answer in expected]
    instances = dispatcher.fleet.view.instances[0]
    assert not any(dispatcher.at)
    assert not instances["migrating"].any()
    for name in ("in_flight", "unstarted", "streamed_tokens", "predicted_output_tokens", "started_prompt_tokens"):
        assert np.abs(instances[name]).max() < 1e-6, name
    tally = dispatcher.tally()
    if dispatcher.workers is not None:
        tally.add(await dispatcher.workers.tally(watched=False))
    assert tally.events["failovers"] > 0
    assert tally.outcomes == {"finished": requests}
    await dispatcher.stop()
    await asyncio.gather(fleet.stop(), lone.stop())


def test_no_token_is_lost_or_doubled(compiled: None) -> None:
    asyncio.run(soak(requests=80, engines=3, kills=2))


@pytest.mark.skipif(sys.platform != "linux", reason="several workers need Linux")
def test_nor_by_several_workers(compiled: None) -> None:
    asyncio.run(soak(requests=80, engines=3, kills=2, workers=2))
