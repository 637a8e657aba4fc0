"""Several workers behind one port: one ledger, one fleet, one log; and what is lost when one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from scripted import WAIT_S, ScriptedEngine, a_fleet, ask, expected_text, run, text_of, until

from fleetpilot.agents import SHIPPED
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.decision_log import read_log
from fleetpilot.dispatcher.engine import EngineState
from fleetpilot.dispatcher.http.client import Answer, CallError, HttpClient
from fleetpilot.dispatcher.service import Dispatcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several workers need Linux")

PROMPT = [1, 2, 3, 4]
LONG = 10_000
"""Tokens of an answer that ends when the test does."""


async def worker_of(client: HttpClient) -> str:
    """Which worker, counted from the first that was started, a client's connection is with."""
    body = orjson.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "temperature": 0})
    answer = await client.fetch("POST", "/v1/completions", body, timeout_s=WAIT_S)
    return str(orjson.loads(answer.body)["id"]).split("-")[2]


async def pinned(origin: str, clients: int, workers: tuple[str, ...] = ("0", "1")) -> list[list[HttpClient]]:
    """So many clients of each worker, each with a connection."""
    found: dict[str, list[HttpClient]] = {worker: [] for worker in workers}
    async with asyncio.timeout(WAIT_S):
        while min(map(len, found.values())) < clients:
            client = HttpClient(origin)
            with contextlib.suppress(CallError):
                found.setdefault(await worker_of(client), []).append(client)
    return [found[worker][:clients] for worker in workers]


class Running:
    """A stream that goes on."""

    def __init__(self, client: HttpClient, prompt: list[int] | None = None, tokens: int = LONG):
        self.task = asyncio.create_task(ask(client, prompt=prompt or PROMPT, max_tokens=tokens))

    async def answer(self) -> Answer:
        return await self.task


def of_rows(dispatcher: Dispatcher) -> list[list[float]]:
    """Requests in flight by instance, as each worker booked them."""
    engines = len(dispatcher.fleet.engines)
    return [row[:engines].tolist() for row in dispatcher.fleet.board.ledgers["in_flight"][1:]]


def pids(dispatcher: Dispatcher) -> list[int]:
    """Of the workers, in the order they were started first."""
    assert dispatcher.workers is not None
    return dispatcher.workers.pids


async def samples(client: HttpClient) -> dict[str, float]:
    """What ``/metrics`` says."""
    text = (await client.fetch("GET", "/metrics", timeout_s=WAIT_S)).body.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def test_each_decision_sees_what_other_workers_placed() -> None:
    async def test() -> None:
        async with a_fleet(2, workers=2) as (dispatcher, client, engines):
            for engine in engines:
                engine.token_s = 0.05
            clients = await pinned(client.origin, 6)
            streams = []
            for one, other in zip(*clients, strict=True):
                for each in (one, other):
                    streams.append(Running(each))
                    await until(lambda: sum(engine.running for engine in engines) == len(streams))
                    assert abs(engines[0].running - engines[1].running) <= 1
            assert [sum(row) for row in of_rows(dispatcher)] == [6, 6]
            assert [dispatcher.fleet.in_flight(slot) for slot in (0, 1)] == [6, 6]
            for stream in streams:
                stream.task.cancel()
            await until(lambda: not any(engine.running for engine in engines))
            await until(lambda: not any(map(sum, of_rows(dispatcher))))

    run(test)


def test_a_worker_that_is_killed_loses_its_own_connections_and_is_replaced() -> None:
    async def test() -> None:
        async with a_fleet(2, workers=2) as (dispatcher, client, engines):
            (mine, *_), (other, *_) = await pinned(client.origin, 2)
            for engine in engines:
                engine.token_s = 0.02
            for _ in range(40):
                await ask(mine, max_tokens=1)
            lost, kept = Running(mine), Running(other, tokens=100)
            await until(lambda: sum(engine.running for engine in engines) == 2)
            before = await samples(other)
            os.kill(pids(dispatcher)[0], signal.SIGKILL)
            with pytest.raises(CallError):
                await lost.answer()
            await until(lambda: of_rows(dispatcher)[0] == [0, 0])
            assert sum(engine.running for engine in engines) == 1
            answer = await kept.answer()
            assert (answer.status, text_of(answer)) == (200, expected_text(PROMPT, 100))
            ((_, *_), (fresh, *_)) = await pinned(client.origin, 1, ("1", "2"))
            after = await samples(fresh)
            assert after['fleetpilot_events_total{event="workers_lost"}'] == 1
            finished = 'fleetpilot_requests_total{outcome="finished"}'
            assert after[finished] > before[finished]
            await until(lambda: not any(map(sum, of_rows(dispatcher))))

    run(test)


def test_a_drain_ends_what_is_on_its_way_in_every_worker() -> None:
    async def test() -> None:
        async with a_fleet(2, workers=2) as (dispatcher, client, engines):
            for engine in engines:
                engine.token_s = 0.02
            (mine,), (other,) = await pinned(client.origin, 1)
            streams = [Running(mine, tokens=50), Running(other, tokens=50)]
            await until(lambda: sum(engine.running for engine in engines) == 2)
            processes = pids(dispatcher)
            await dispatcher.stop(grace_s=WAIT_S)
            assert [text_of(await stream.answer()) for stream in streams] == [expected_text(PROMPT, 50)] * 2
            with pytest.raises(CallError):
                await HttpClient(client.origin).fetch("GET", "/health")
            for process in processes:
                with pytest.raises(ProcessLookupError):
                    os.kill(process, 0)

    run(test)


def test_an_engine_that_dies_is_seen_by_all_and_their_streams_go_on() -> None:
    async def test() -> None:
        async with a_fleet(2, workers=2) as (dispatcher, client, engines):
            for engine in engines:
                engine.token_s = 0.02
            clients = await pinned(client.origin, 2)
            streams = [Running(each, tokens=60) for pair in clients for each in pair]
            await until(lambda: [engine.running for engine in engines] == [2, 2])
            await engines[0].kill()
            assert [text_of(await stream.answer()) for stream in streams] == [expected_text(PROMPT, 60)] * 4
            for each, *_ in clients:
                ready = orjson.loads((await each.fetch("GET", "/ready", timeout_s=WAIT_S)).body)
                assert ready == {"engines": ["failed", "ready"]}
            assert dispatcher.counts["engines_lost"] == 1
            await until(lambda: not any(map(sum, of_rows(dispatcher))))

    run(test)


def test_an_engine_that_leaves_gets_no_more_requests_from_any_worker(tmp_path: Path) -> None:
    file = tmp_path / "engines"

    async def test() -> None:
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        for engine in engines:
            await engine.start()
        file.write_text("\n".join(engine.url for engine in engines))
        async with a_fleet(0, workers=2, engines_file=str(file)) as (dispatcher, client, _):
            await dispatcher.ready(2, WAIT_S)
            (mine,), (other,) = await pinned(client.origin, 1)
            engines[0].token_s = 0.02
            await until(lambda: not any(map(sum, of_rows(dispatcher))))
            stays = Running(mine, tokens=60)  # ties go to the first
            await until(lambda: engines[0].running == 1)
            file.write_text(engines[1].url)
            await until(lambda: dispatcher.fleet.engines[0].state == EngineState.DRAINING)
            asked = len(engines[0].seen)
            for each in (other, *(await pinned(client.origin, 2))[1]):
                assert (await ask(each, max_tokens=3)).status == 200
            assert len(engines[0].seen) == asked
            assert text_of(await stays.answer()) == expected_text(PROMPT, 60)
            await until(lambda: dispatcher.fleet.engines[0].state == EngineState.ABSENT)
        for engine in engines:
            await engine.kill()

    run(test)


def test_requests_that_are_held_are_placed_in_the_order_they_came(tmp_path: Path) -> None:
    file, log = tmp_path / "engines", tmp_path / "log.jsonl"
    settings: dict[str, Any] = {"engines_file": str(file), "decision_log": str(log), "hold_interval_s": 60.0}

    async def test() -> None:
        engine = ScriptedEngine()
        await engine.start()
        file.write_text(engine.url)
        async with a_fleet(0, workers=2, **settings) as (dispatcher, client, _):
            await dispatcher.ready(1, WAIT_S)
            clients = await pinned(client.origin, 4)
            file.write_text("")
            await until(lambda: dispatcher.fleet.engines[0].state == EngineState.ABSENT)
            streams = []
            for pair in zip(*clients, strict=True):
                for each in pair:
                    streams.append(Running(each, [7] * (10 + len(streams))))
                    await until(lambda: dispatcher.fleet.held == len(streams))
            assert (await samples(client))["fleetpilot_held"] == len(streams)
            file.write_text(engine.url)
            await until(lambda: engine.running == len(streams))
            assert dispatcher.fleet.held == 0
            for stream in streams:
                stream.task.cancel()
        await engine.kill()

    run(test)
    decisions = sorted((r for r in read_log(log) if r["record"] == "decision"), key=lambda r: r["decision"])
    lengths = [record["view"]["request"]["prompt_tokens"] for record in decisions]
    assert [length for length in lengths if length >= 10] == list(range(10, 18))


@pytest.mark.parametrize("relaying", [("0",), ("1",), ("0", "1")])
def test_the_worker_that_relays_a_request_moves_it(relaying: tuple[str, ...], tmp_path: Path) -> None:
    file, log = tmp_path / "engines", tmp_path / "log.jsonl"
    settings: dict[str, Any] = {"engines_file": str(file), "decision_log": str(log), "rebalance_interval_s": 0.05}
    settings |= {"copy_deadline_s": 2.0}

    async def test() -> None:
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        for engine in engines:
            engine.token_s = 0.02
            await engine.start()
        file.write_text(engines[0].url)
        async with a_fleet(0, "llumnix?threshold=100", workers=2, **settings) as (dispatcher, client, _):
            await dispatcher.ready(1, WAIT_S)
            clients = dict(zip("01", await pinned(client.origin, 4), strict=True))
            streams = [Running(each, tokens=400) for worker in relaying for each in clients[worker]]
            await until(lambda: engines[0].running == len(streams))
            engines[1].copy_hangs = True
            file.write_text("\n".join(engine.url for engine in engines))
            await until(lambda: dispatcher.fleet.view.instances["migrating"].sum() == 2)
            await asyncio.sleep(0.5)  # both workers could begin another one, if an instance took part in several
            assert dispatcher.fleet.migrations == 1
            engines[1].copy_hangs = False
            answers = [await stream.answer() for stream in streams]
            assert [text_of(answer) for answer in answers] == [expected_text(PROMPT, 400)] * len(streams)
            assert (await samples(client))['fleetpilot_events_total{event="migrations completed"}'] > 0
            assert not any(map(sum, of_rows(dispatcher)))
            assert not dispatcher.fleet.view.instances["migrating"].any()
            assert dispatcher.fleet.migrations == 0
        for engine in engines:
            await engine.kill()

    run(test)
    records = list(read_log(log))
    moved = {r["request"].split("-")[0] for r in records if r["record"] == "outcome" and r["migrations"]}
    assert moved
    assert moved <= {*relaying}
    for record in records:
        if record["record"] == "decision" and record["kind"] in ("source", "destination"):
            instances = record["view"]["instances"]
            candidates = [slot for slot, candidate in enumerate(instances["candidate"]) if candidate]
            assert not any(instances["migrating"][slot] for slot in candidates)


def test_what_one_worker_placed_is_in_the_prefix_index_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    text = "the same words again and again " * 40

    async def test() -> None:
        async with a_fleet(2, workers=2, policy="cache-aware", decision_log=str(path)) as (_, client, _engines):
            (mine,), (other,) = await pinned(client.origin, 1)
            for each in (mine, other):
                for body in ({"prompt": list(range(96))}, {"prompt": text}, {"session_id": "s"}):
                    assert (await ask(each, max_tokens=3, **body)).status == 200

    run(test)
    log = list(read_log(path))
    workers = {record["request"]: record["request_id"].split("-")[1] for record in log if record["record"] == "outcome"}
    decisions = [record for record in log if record["record"] == "decision"]
    numbers = [record["decision"] for record in decisions]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert workers.keys() == {record["request"] for record in decisions}
    long, quoted, session = ([], [], [])
    for record in decisions:
        view = record["view"]
        match, length = max(view["instances"]["matched_tokens"]), view["request"]["prompt_tokens"]
        row = (workers[record["request"]], match > 0, record["choice"])
        if length == 96:
            long.append(row)
        elif length > 96:
            quoted.append(row)
        if view["request"]["session"] >= 0:
            session.append((row[0], view["request"]["session"], view["request"]["turn"]))
    for first, second in (long, quoted):
        assert (first[:2], second[:2]) == (("0", False), ("1", True))
        assert first[2] == second[2]
    assert session == [("0", 0, 0), ("1", 0, 1)]


def test_every_worker_tells_of_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_fleet(2, workers=2) as (_, client, _engines):
            clients = await pinned(client.origin, 1)
            first = [await samples(each) for (each,) in clients]
            for (each,) in clients:
                await each.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)
                for _ in range(3):
                    await ask(each, max_tokens=2)
            names = (
                'fleetpilot_requests_total{outcome="finished"}',
                'fleetpilot_events_total{event="requests"}',
                'fleetpilot_decisions_total{by="policy",kind="dispatch"}',
            )
            for (each,), before in zip(clients, first, strict=True):
                after = await samples(each)
                assert [after[name] - before[name] for name in names] == [6, 6, 6]
                page = orjson.loads((await each.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)).body)
                assert {decision["request"].split("-")[0] for decision in page["decisions"]} == {"0", "1"}
                numbers = [decision["number"] for decision in page["decisions"]]
                assert numbers == sorted(numbers, reverse=True)
                assert page["outcomes"]["finished"] == after[names[0]]

    run(test)


def test_a_policy_is_taken_up_by_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_fleet(2, workers=2) as (dispatcher, client, _):
            clients = await pinned(client.origin, 1)
            await dispatcher.reload(lambda: replace(dispatcher.config, policy="round-robin", shadow="lmetric"))
            for (each,) in clients:
                await each.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)

                async def policy(each: HttpClient = each) -> set[tuple[str, str]]:
                    await ask(each, max_tokens=2)
                    page = orjson.loads((await each.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)).body)
                    return {(of["policy"], of["request"].split("-")[0]) for of in page["decisions"]}

                worker = await worker_of(each)
                async with asyncio.timeout(WAIT_S):
                    while ("round-robin", worker) not in await policy():
                        pass
            with pytest.raises(ValueError, match="not known"):
                await dispatcher.reload(lambda: replace(dispatcher.config, policy="no-such-policy"))
            after = await samples(client)
            assert after['fleetpilot_events_total{event="reloads"}'] == 1
            assert after['fleetpilot_events_total{event="failed_reloads"}'] == 1
            assert dispatcher.shadow is not None
            await until(lambda: sum(dispatcher.shadow.counts.values()) > 0)

    run(test)


def test_serve_starts_reloads_and_drains_workers(tmp_path: Path) -> None:
    settings = tmp_path / "fleet.toml"

    def configure(policy: str) -> None:
        settings.write_text(f'policy = "{policy}"\nprofile = "tiny-cpu"\nworkers = 2\nport = 0\n')

    async def test() -> None:
        engine = ScriptedEngine()
        await engine.start()
        configure("join-shortest-queue")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleetpilot", "serve", "--config", str(settings), "--engines", engine.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None

        async def line_with(text: str) -> str:
            async with asyncio.timeout(WAIT_S):
                while text not in (line := (await process.stdout.readline()).decode()):
                    assert line, f"it ended before it said {text!r}"
            return line

        found = re.search(r"http://\S+?(?=/v1)", await line_with("serving"))
        assert found is not None
        await line_with("is ready")
        (mine,), (other,) = await pinned(found[0], 1)
        configure("round-robin")
        process.send_signal(signal.SIGHUP)
        await line_with("reloaded: policy round-robin")
        settings.write_text("policy = [")
        process.send_signal(signal.SIGHUP)
        await line_with("not reloaded, nothing has changed")
        assert (await samples(mine))['fleetpilot_events_total{event="failed_reloads"}'] == 1
        engine.token_s = 0.02
        streams = [Running(mine, tokens=50), Running(other, tokens=50)]
        await until(lambda: engine.running == 2)
        process.send_signal(signal.SIGTERM)
        assert [text_of(await stream.answer()) for stream in streams] == [expected_text(PROMPT, 50)] * 2
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
        await engine.kill()

    run(test)


def test_an_address_that_others_listen_at_is_refused() -> None:
    async def test() -> None:
        async with a_fleet(1, workers=2) as (dispatcher, _, engines):
            for workers in (1, 2):
                config = replace(dispatcher.config, workers=workers, port=dispatcher.port, engines=(engines[0].url,))
                second = Dispatcher(config)
                with pytest.raises(OSError, match=f"{dispatcher.port}.*in use"):
                    await second.start()
                await second.stop()
                del second
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always", ResourceWarning)
                    gc.collect()
                assert not [each for each in said if "/proc/self/fd" in str(each.message)], "the lock's file is closed"

    run(test)


def test_a_page_about_all_is_refused_where_the_process_that_leads_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with a_fleet(1, workers=2) as (dispatcher, client, _):
            never = asyncio.Event()
            pages = dispatcher.page

            async def hang(path: str) -> bytes:
                await never.wait()
                return await pages(path)

            monkeypatch.setattr(dispatcher, "page", hang)
            for path in ("/metrics", "/dashboard/state"):
                answer = await client.fetch("GET", path, timeout_s=WAIT_S)
                assert answer.status == 503
                assert b"the process that leads the workers has not answered" in answer.body
            assert (await ask(client)).status == 200
            never.set()  # late answers are nobody's
            monkeypatch.undo()
            assert "fleetpilot_requests_total" in "".join(await samples(client))

    run(test)


def test_a_certificate_that_is_not_there_is_named_by_whoever_reads_it() -> None:
    async def test() -> None:
        for workers in (1, 2):
            config = ServeConfig(engines=("http://127.0.0.1:1",), workers=workers, port=0, tls_cert="/c", tls_key="/k")
            dispatcher = Dispatcher(config)
            with pytest.raises(OSError, match="tls_cert = '/c', tls_key = '/k': No such file"):
                await dispatcher.start()
            await dispatcher.stop()

    run(test)


def test_a_worker_whose_policy_has_gone_says_so_and_comes_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(SHIPPED["learned"], folder)

    async def test() -> None:
        async with a_fleet(1, policy=str(folder), workers=2) as (dispatcher, client, _):
            folder.rename(tmp_path / "gone")
            os.kill(pids(dispatcher)[0], signal.SIGKILL)
            await until(lambda: f"{folder}: expected the folder" in caplog.text)
            assert (await ask(client)).status == 200  # of the other one
            (tmp_path / "gone").rename(folder)
            async with asyncio.timeout(WAIT_S):
                while await worker_of(HttpClient(client.origin)) in ("0", "1"):
                    await asyncio.sleep(0.05)

    run(test)
    assert "Traceback" not in caplog.text


def test_policies_that_keep_a_state_are_refused() -> None:
    with pytest.raises(ValueError, match="workers = 2: expected 1 with policy 'preble'"):
        asyncio.run(_made("preble"))


async def _made(policy: str) -> Any:
    async with a_fleet(1, workers=2, policy=policy) as made:
        return made
