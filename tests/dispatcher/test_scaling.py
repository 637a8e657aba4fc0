"""What a policy says on SCALE is done, within limits, and no request is lost by it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from scripted import WAIT_S, ScriptedEngine, ask, expected_text, run, text_of, until
from told import PROMPT, QUICK, TOKENS, Told, become, on, states

from fleetpilot.agents import load_policy
from fleetpilot.dispatcher.config import ServeConfig, load_config
from fleetpilot.dispatcher.emulator.server import EmulatedEngine, Options
from fleetpilot.dispatcher.engine import EngineState
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.scaling.actuator import ActuatorError
from fleetpilot.dispatcher.scaling.process import ProcessActuator
from fleetpilot.dispatcher.scaling.scaler import load_without
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import (
    STATE_ABSENT,
    STATE_DRAINING,
    STATE_READY,
    STATE_STARTING,
    empty_view,
)


class ScriptedActuator:
    """Starts engines that speak HTTP in this process.

    Attributes:
        make: an engine, not started yet.
        engines: by URL.
        orders: as they came, before anything was done.
        stopped: URLs.
        open_for_orders: while cleared, orders are not carried out yet.
        open_for_stops: while cleared, stops are not.
        refuses: errors of the next calls, by name of the method.
    """

    def __init__(self, make: Callable[[], Any] = ScriptedEngine):
        self.make = make
        self.engines: dict[str, Any] = {}
        self.orders = 0
        self.cancelled = 0
        self.stopped: list[str] = []
        self.open_for_orders = asyncio.Event()
        self.open_for_orders.set()
        self.open_for_stops = asyncio.Event()
        self.open_for_stops.set()
        self.refuses: dict[str, str] = {}
        self.pending = 0
        self.changed: Callable[[], None] = lambda: None

    @property
    def instances(self) -> list[str]:
        return list(self.engines)

    def _refuse(self, call: str) -> None:
        if call in self.refuses:
            raise ActuatorError(self.refuses.pop(call))

    async def open(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def start(self, most: int) -> None:
        self.orders += 1
        self._refuse("start")
        await self.open_for_orders.wait()
        engine = self.make()
        await engine.start()
        self.engines[f"http://127.0.0.1:{getattr(engine, 'port', 0) or engine.server.port}"] = engine

    def may_stop(self, url: str) -> bool:
        return True

    async def stop(self, url: str) -> None:
        self._refuse("stop")
        await self.open_for_stops.wait()
        self.stopped.append(url)
        await self.engines.pop(url).kill()

    async def cancel_pending(self) -> None:
        self.cancelled += 1
        self.pending -= 1

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.kill()
        self.engines = {}


NEVER_S = 1e4
Scaled = tuple[Dispatcher, HttpClient, Any]


@asynccontextmanager
async def scaled(policy: Any, actuator: Any, ready: int | None = None, **config: Any) -> AsyncIterator[Scaled]:
    """A dispatcher with this actuator that asks quickly and knows no cooldown, its least instances ready."""
    settings: dict[str, Any] = (
        QUICK
        | {
            "scaler": "process",
            "scale_command": "unused {port}",
            "max_instances": 3,
        }
        | config
    )
    dispatcher = Dispatcher(ServeConfig(**settings), policy, actuator)
    await dispatcher.start()
    try:
        least = settings.get("min_instances", 1) if ready is None else ready
        await dispatcher.ready(least, 2 * WAIT_S)
        yield dispatcher, HttpClient(f"http://127.0.0.1:{dispatcher.port}"), actuator
    finally:
        await dispatcher.stop()


def slow_engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.token_s = 0.005
    return engine


def test_an_engine_starts_takes_requests_and_is_drained_by_migration() -> None:
    async def test() -> None:
        policy = Told()
        async with scaled(policy, ScriptedActuator(slow_engine)) as (dispatcher, client, actuator):
            assert states(dispatcher) == [STATE_READY, STATE_ABSENT, STATE_ABSENT]
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_ABSENT)
            url = dispatcher.fleet.engines[1].url
            task = asyncio.create_task(ask(client, prompt=PROMPT, max_tokens=TOKENS))
            await on(dispatcher, 1)
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_ABSENT, STATE_ABSENT)
            assert text_of(await task) == expected_text(PROMPT, TOKENS)
            await until(lambda: actuator.stopped == [url])
            counts = dispatcher.counts
            assert (counts["scale_outs"], counts["scale_ins"], counts["migrations completed"]) == (2, 1, 1)
            assert counts["failovers"] == counts["engines_lost"] == 0
            assert dispatcher.outcomes == {"finished": 1}
            assert (await ask(client)).status == 200

    run(test)


def test_without_migration_a_drain_waits_for_its_requests() -> None:
    async def test() -> None:
        policy = Told(moves=False)
        async with scaled(policy, ScriptedActuator(slow_engine), min_instances=2) as (dispatcher, client, actuator):
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_READY)
            task = asyncio.create_task(ask(client, prompt=PROMPT, max_tokens=TOKENS))
            await on(dispatcher, 2)
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_READY, STATE_DRAINING)
            others = [asyncio.create_task(ask(HttpClient(client.origin))) for _ in range(8)]
            assert {answer.status for answer in await asyncio.gather(*others)} == {200}
            assert not actuator.stopped
            assert len(dispatcher.at[2]) == 1
            assert text_of(await task) == expected_text(PROMPT, TOKENS)
            await until(lambda: len(actuator.stopped) == 1)
            assert dispatcher.counts["migrations completed"] == dispatcher.counts["failovers"] == 0

    run(test)


def test_an_instance_that_drains_can_be_kept() -> None:
    async def test() -> None:
        policy = Told(moves=False)
        async with scaled(policy, ScriptedActuator(slow_engine)) as (dispatcher, client, actuator):
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_ABSENT)
            task = asyncio.create_task(ask(client, prompt=PROMPT, max_tokens=TOKENS))
            await on(dispatcher, 1)
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_DRAINING, STATE_ABSENT)
            await become(dispatcher, policy, STATE_DRAINING, STATE_READY, STATE_READY, STATE_ABSENT)
            assert dispatcher.counts["drains_cancelled"] == 1
            more = [asyncio.create_task(ask(HttpClient(client.origin), max_tokens=TOKENS)) for _ in range(3)]
            await until(lambda: len(dispatcher.at[1]) == 2)
            assert {answer.status for answer in await asyncio.gather(task, *more)} == {200}
            assert not actuator.stopped

    run(test)


def test_at_its_deadline_a_drain_sends_elsewhere_what_can_go_and_waits_for_the_rest() -> None:
    async def test() -> None:
        policy = Told(moves=False)
        async with scaled(policy, ScriptedActuator(slow_engine), drain_deadline_s=0.1) as (dispatcher, client, _):
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_ABSENT)
            tasks = []
            for count, fields in enumerate(({}, {}, {"prompt_logprobs": 0}, {})):
                tasks.append(asyncio.create_task(ask(HttpClient(client.origin), max_tokens=TOKENS, **fields)))
                await until(lambda: sum(len(at) for at in dispatcher.at) == count + 1)  # noqa: B023
            # Of the two on the last engine one cannot be continued from its tokens.
            await until(lambda: len(dispatcher.at[1]) == 2)
            await on(dispatcher, 1, count=2)
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_DRAINING, STATE_ABSENT)
            await until(lambda: len(dispatcher.at[1]) == 1)
            assert dispatcher.counts["requests_sent_elsewhere"] == 1
            (relay,) = dispatcher.at[1].values()
            assert relay.request.fixed
            assert states(dispatcher)[1] == STATE_DRAINING
            assert [text_of(a) for a in await asyncio.gather(*tasks)] == [expected_text(PROMPT, TOKENS)] * 4
            await until(lambda: states(dispatcher)[1] == STATE_ABSENT)
            assert dispatcher.outcomes == {"finished": 4}

    run(test)


def test_what_was_ordered_counts_and_the_maximum_is_hard() -> None:
    async def test() -> None:
        policy, actuator = Told(), ScriptedActuator()
        async with scaled(policy, actuator) as (dispatcher, _, _):
            actuator.open_for_orders.clear()
            policy.next, policy.every = STATE_ABSENT, True
            await until(lambda: states(dispatcher) == [STATE_READY, STATE_STARTING, STATE_STARTING])
            assert policy.seen == [STATE_READY, STATE_STARTING, STATE_ABSENT]  # when it chose the last
            for _ in range(3):
                dispatcher.scaler.decide(time.monotonic())  # type: ignore[union-attr]
            await until(lambda: actuator.orders == 3)
            assert states(dispatcher) == [STATE_READY, STATE_STARTING, STATE_STARTING]
            actuator.open_for_orders.set()
            await dispatcher.ready(3, WAIT_S)
            policy.next = STATE_READY
            await until(lambda: len(actuator.stopped) == 2)
            assert actuator.orders == 3
            assert sorted(states(dispatcher)) == [STATE_ABSENT, STATE_ABSENT, STATE_READY]  # never below the minimum

    run(test)


def test_an_instance_that_is_being_ended_still_takes_up_room() -> None:
    async def test() -> None:
        policy, actuator = Told(), ScriptedActuator()
        async with scaled(policy, actuator, max_instances=2) as (dispatcher, _, _):
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY)
            actuator.open_for_stops.clear()
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_ABSENT)
            policy.next = STATE_ABSENT
            dispatcher.scaler.decide(time.monotonic())  # type: ignore[union-attr]
            assert states(dispatcher) == [STATE_READY, STATE_ABSENT]
            actuator.open_for_stops.set()
            await dispatcher.ready(2, WAIT_S)
            assert actuator.orders == 3

    run(test)


def test_an_order_that_stays_without_an_address_is_taken_back() -> None:
    async def test() -> None:
        actuator = ScriptedActuator()
        async with scaled(Told(), actuator, start_deadline_s=0.1, min_instances=1) as (dispatcher, _, _):
            actuator.pending = 1
            actuator.changed()
            assert states(dispatcher) == [STATE_READY, STATE_STARTING, STATE_ABSENT]
            await until(lambda: actuator.cancelled == 1)
            await until(lambda: states(dispatcher) == [STATE_READY, STATE_ABSENT, STATE_ABSENT])
            assert dispatcher.counts["starts_given_up"] == 1

    run(test)


def test_cooldowns_hold_starts_and_drains() -> None:
    async def test() -> None:
        policy = Told()
        config = {"scale_interval_s": NEVER_S, "scale_out_cooldown_s": 30.0, "scale_in_cooldown_s": 300.0}
        async with scaled(policy, ScriptedActuator(), **config) as (dispatcher, _, actuator):
            assert dispatcher.scaler is not None
            clock_s = time.monotonic()

            def offered(after_s: float) -> list[int]:
                dispatcher.scaler.decide(clock_s + after_s)  # type: ignore[union-attr]
                return policy.offered

            assert offered(0.0) == []  # the start of the least instances was one too
            assert offered(40.0) == [STATE_ABSENT]
            policy.next = STATE_ABSENT
            offered(40.0)
            await dispatcher.ready(2, WAIT_S)
            policy.offered = []
            assert offered(69.0) == []
            policy.next = STATE_ABSENT
            assert offered(71.0) == [STATE_ABSENT]
            await dispatcher.ready(3, WAIT_S)
            policy.offered = []
            assert offered(370.0) == []
            policy.next = STATE_READY
            assert offered(372.0) == [STATE_READY, STATE_READY]  # beside the one that it chose
            await until(lambda: len(actuator.engines) == 2)
            assert offered(373.0) == [STATE_ABSENT]
            assert offered(673.0).count(STATE_READY) == 2

    run(test)


def test_an_instance_whose_load_the_others_could_not_take_does_not_drain() -> None:
    async def test() -> None:
        policy = Told()
        async with scaled(policy, ScriptedActuator(slow_engine), scale_in_load=0.05) as (dispatcher, client, actuator):
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_ABSENT)
            places = int(dispatcher.fleet.view.instances[0]["max_num_seqs"][0])
            count = places // 10  # a tenth of what one engine has room for
            tasks = [asyncio.create_task(ask(HttpClient(client.origin), max_tokens=TOKENS)) for _ in range(count)]
            await until(lambda: sum(len(at) for at in dispatcher.at) == count)
            policy.next, policy.offered = STATE_READY, [STATE_READY]
            await until(lambda: policy.offered == [STATE_ABSENT])
            assert states(dispatcher) == [STATE_READY, STATE_READY, STATE_ABSENT]
            assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}
            await until(lambda: len(actuator.stopped) == 1)

    run(test)


def test_the_load_of_what_stays_is_that_of_polls_or_of_the_ledger() -> None:
    instances = empty_view(1, 4).instances[0]
    instances["kv_capacity_blocks"], instances["block_size"], instances["max_num_seqs"] = 100.0, 16.0, 10.0
    instances["free_blocks"], instances["poll_age_s"] = 60.0, 0.1
    instances["state"] = [STATE_READY, STATE_READY, STATE_DRAINING, STATE_ABSENT]
    assert load_without(instances, 0) == pytest.approx(120 / 100)
    instances["poll_age_s"][2] = np.inf  # never polled: the ledger alone
    instances["streamed_tokens"][2] = 160.0
    assert load_without(instances, 0) == pytest.approx(90 / 100)
    instances["queued_demand_blocks"][1] = 5.0
    assert load_without(instances, 0) == pytest.approx(95 / 100)
    instances["in_flight"] = 5.0
    assert load_without(instances, 0) == pytest.approx(15 / 10)
    assert load_without(instances, 3) == pytest.approx(15 / 20)
    instances["state"][1] = STATE_DRAINING
    assert load_without(instances, 0) == np.inf


def test_in_a_dry_run_only_the_minimum_is_kept() -> None:
    async def test() -> None:
        policy, actuator = Told(), ScriptedActuator()
        policy.next, policy.every = STATE_ABSENT, True
        async with scaled(policy, actuator, dry_run=True) as (dispatcher, _, _):
            await until(lambda: dispatcher.counts["scalings not made in a dry run"] > 3)
            assert states(dispatcher) == [STATE_READY, STATE_ABSENT, STATE_ABSENT]
            assert actuator.orders == 1

    run(test)


def test_a_policy_that_does_not_scale_is_not_taken_up() -> None:
    async def test() -> None:
        async with scaled(Told(), ScriptedActuator()) as (dispatcher, client, _):
            with pytest.raises(ValueError, match="policy = 'round-robin': expected one that scales"):
                await dispatcher.reload(lambda: replace(dispatcher.config, policy="round-robin"))
            await dispatcher.reload(lambda: replace(dispatcher.config, policy="infaas++"))
            assert dispatcher.fleet.host.policy.name == "infaas++"
            assert (await ask(client)).status == 200

    run(test)


def test_a_refused_start_is_counted_and_tried_again_later() -> None:
    async def test() -> None:
        policy, actuator = Told(), ScriptedActuator()
        async with scaled(policy, actuator) as (dispatcher, _, _):
            actuator.refuses["start"] = "no room"
            policy.next = STATE_ABSENT
            await until(lambda: dispatcher.counts["starts_given_up"] == 1)
            assert states(dispatcher) == [STATE_READY, STATE_ABSENT, STATE_ABSENT]
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_ABSENT)

    run(test)


def test_an_instance_that_cannot_be_stopped_serves_on() -> None:
    async def test() -> None:
        policy, actuator = Told(), ScriptedActuator()
        async with scaled(policy, actuator) as (dispatcher, client, _):
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_READY, STATE_ABSENT)
            actuator.refuses["stop"] = "forbidden"
            policy.next = STATE_READY
            await until(lambda: dispatcher.counts["scale_refusals"] == 1)
            await dispatcher.ready(2, WAIT_S)
            assert not actuator.stopped
            answers = [asyncio.create_task(ask(HttpClient(client.origin))) for _ in range(4)]
            assert {answer.status for answer in await asyncio.gather(*answers)} == {200}

    run(test)


def test_llumnix_grows_and_shrinks_the_fleet_and_every_answer_is_whole(compiled: None) -> None:
    async def test() -> None:
        profile = load_profile("tiny-cpu").replace(kv_blocks=256)
        actuator = ScriptedActuator(lambda: EmulatedEngine(profile, Options()))
        lone = EmulatedEngine(load_profile("h100-llama-3.1-8b"), Options())
        await lone.start()
        body = {"model": "emulated", "temperature": 0, "stream": True, "max_tokens": 150, "ignore_eos": True}
        asked = [orjson.dumps(body | {"prompt": [300 + n] * (100 + 5 * n)}) for n in range(40)]

        async def text(url: str, request: bytes) -> str:
            answer = await HttpClient(url).fetch("POST", "/v1/completions", request, timeout_s=4 * WAIT_S)
            assert answer.status == 200
            return text_of(answer)

        policy = load_policy("llumnix?low=10&high=60")
        async with scaled(policy, actuator, scale_in_load=0.7, scale_interval_s=0.2) as (dispatcher, client, _):
            tasks = [asyncio.create_task(text(client.origin, request)) for request in asked]
            await dispatcher.ready(3, WAIT_S)
            got = await asyncio.gather(*tasks)
            assert got == await asyncio.gather(*(text(f"http://127.0.0.1:{lone.port}", each) for each in asked))
            await until(lambda: sorted(states(dispatcher)) == [STATE_ABSENT, STATE_ABSENT, STATE_READY])
            assert len(actuator.engines) == 1
            assert dispatcher.outcomes == {"finished": 40}
            assert dispatcher.counts["engines_lost"] == dispatcher.counts["starts_given_up"] == 0
        await lone.stop()

    run(test)


# processes


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(actuator: ProcessActuator) -> dict[str, int]:
    return {url: instance.process.pid for url, instance in actuator._instances.items()}


def test_engine_processes_start_drain_die_and_no_request_is_lost(compiled: None) -> None:
    command = f"{sys.executable} -m fleetpilot emulate --engines 1 --port {{port}} --profile tiny-cpu"
    body = {"model": "emulated", "temperature": 0, "stream": True, "max_tokens": 400, "ignore_eos": True}

    async def text(url: str, number: int) -> str:
        request = orjson.dumps(body | {"prompt": [300 + number] * 100})
        answer = await HttpClient(url).fetch("POST", "/v1/completions", request, timeout_s=4 * WAIT_S)
        assert answer.status == 200
        return text_of(answer)

    async def test() -> None:
        policy, actuator = Told(), ProcessActuator(command, 30.0)
        async with scaled(policy, actuator, scale_command=command) as (dispatcher, client, _):
            requests = [asyncio.create_task(text(client.origin, number)) for number in range(3)]
            policy.next = STATE_ABSENT
            await dispatcher.ready(2, 2 * WAIT_S)
            requests += [asyncio.create_task(text(client.origin, number)) for number in range(3, 6)]
            started = pids(actuator)
            leaving = dispatcher.fleet.engines[1].url
            await on(dispatcher, 1, count=2)
            policy.next = STATE_READY
            await until(lambda: leaving not in actuator.instances)
            assert not is_running(started[leaving])
            await until(lambda: dispatcher.fleet.engines[1].state == EngineState.ABSENT)
            assert dispatcher.counts["migrations completed"] >= 2
            assert dispatcher.counts["failovers"] == 0
            await on(dispatcher, 0, tokens=1)
            (last,) = pids(actuator).values()
            requests += [asyncio.create_task(text(client.origin, number)) for number in range(6, 8)]
            await on(dispatcher, 0, count=2)
            os.kill(last, 9)
            texts = await asyncio.gather(*requests)  # by another process, as the fleet is kept at its minimum
            (url,) = pids(actuator)
            assert texts == await asyncio.gather(*(text(url, number) for number in range(8)))
            assert dispatcher.outcomes == {"finished": 8}
            (last,) = pids(actuator).values()
        assert not is_running(last)

    run(test)


@pytest.mark.parametrize(
    "command",
    ["sh -c 'exit 3' {port}", "sleep 600{port}", "/nowhere/to/be/found {port}"],
    ids=["exits", "hangs", "none"],
)
def test_a_process_that_does_not_come_up_is_given_up(command: str) -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        await engine.start()
        actuator = ProcessActuator(command, 5.0)
        config = {"engines": (engine.url,), "scale_command": command, "start_deadline_s": 0.5, "max_instances": 2}
        policy = Told()
        async with scaled(policy, actuator, **config) as (dispatcher, client, _):
            policy.next = STATE_ABSENT
            await until(lambda: dispatcher.counts["starts_given_up"] == 1)
            await until(lambda: not actuator.instances)
            assert states(dispatcher) == [STATE_READY, STATE_ABSENT]
            policy.next = STATE_ABSENT
            await until(lambda: dispatcher.counts["starts_given_up"] == 2)
            assert (await ask(client)).status == 200
            policy.next = STATE_READY
            assert dispatcher.counts["scale_ins"] == 0  # nothing stops the engine of the configuration
        await engine.kill()

    run(test)


@pytest.mark.parametrize(
    "command",
    ["sh -c 'trap \"\" TERM; sleep 611 & sleep 612; sleep 613' {port}", "sh -c 'sleep 611 & exec sleep 612' {port}"],
    ids=["ignores SIGTERM", "leaves a child behind"],
)
def test_of_a_process_nothing_is_left(command: str) -> None:
    async def test() -> None:
        actuator = ProcessActuator(command, 0.2)
        await actuator.open(lambda: None)
        await actuator.start(1)
        with pytest.raises(ActuatorError, match="fewer than 1"):
            await actuator.start(1)
        (url,), (pid,) = pids(actuator), pids(actuator).values()
        await actuator.stop(url)
        assert not actuator.instances
        await until(lambda: not _group_runs(pid))

    run(test)


def _group_runs(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def test_places_in_a_command_are_filled_and_json_is_left_alone(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "{index}"
        script = f"""printf "%s\\n" "$@" > {file}.new; mv {file}.new {file}; sleep 614"""
        actuator = ProcessActuator(f"""sh -c '{script}' sh --port={{port}} {{side_port}} '{{"a": {{}}}}'""", 0.1)
        await actuator.open(lambda: None)
        await actuator.start(2)
        await actuator.start(2)
        files = [tmp_path / "0", tmp_path / "1"]
        await until(lambda: all(file.exists() for file in files))
        words = [file.read_text().split("\n") for file in files]
        assert [each[0] for each in words] == [f"--port={url.rpartition(':')[2]}" for url in actuator.instances]
        assert len({each[1] for each in words}) == 2
        assert {each[2] for each in words} == {'{"a": {}}'}
        await actuator.close()
        assert not actuator.instances

    run(test)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scaler": "docker", "max_instances": 2}, "scaler = 'docker': expected one of process, kubernetes, sleep"),
        ({"scaler": "process", "max_instances": 2}, "scale_command = '': expected with scaler = 'process'"),
        (
            {"scale_command": "x {port}"},
            "scale_command = 'x {port}': expected with scaler = 'process', and there alone",
        ),
        ({"scaler": "process", "scale_command": "x {port}"}, "max_instances = 0: expected at least min_instances, 1"),
        (
            {"scaler": "process", "scale_command": "x {port}", "max_instances": 1, "engines": ("http://a", "http://b")},
            "max_instances = 1: expected at least .* 2, as scaler",
        ),
        (
            {"scaler": "process", "scale_command": "x {port}", "max_instances": 1, "engines_file": "f"},
            "engines_file = 'f': expected none, as scaler is set",
        ),
        (
            {"scaler": "process", "scale_command": "x", "max_instances": 1},
            "scale_command = 'x': expected a command with {port}",
        ),
        (
            {"scaler": "process", "scale_command": "'x {port}", "max_instances": 1},
            "scale_command = .*No closing quotation",
        ),
        (
            {"scaler": "process", "scale_command": "x {port}", "max_instances": 1, "policy": "round-robin"},
            "policy = 'round-robin': expected one that scales",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Dispatcher(load_config({"policy": "llumnix"} | settings, None, {}))
