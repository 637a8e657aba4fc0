"""Policies that decide and are not obeyed, and policies that are exchanged while requests run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scripted import WAIT_S, ScriptedEngine, a_fleet, ask, expected_text, text_of, until
from test_decision_log import Leveller, records, run
from test_dispatcher import PROMPT, Sulky, running_request
from test_replay_log import Always

from fleetpilot.agents import load_policy
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.decision_log import read_log
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.replay import replay
from fleetpilot.dispatcher.shadow import Shadow
from fleetpilot.fleet.view import KIND_DISPATCH, Decision, FleetView


def test_a_shadow_is_asked_the_same_and_never_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(2, Always(0), shadow="round-robin", decision_log=str(path)) as (dispatcher, client, engines):
            for _ in range(8):
                assert (await ask(client)).status == 200
            assert [len(engine.seen) - 1 for engine in engines] == [8, 0]
            log = dispatcher.log
            assert log is not None
            await until(lambda: log.counts["written"] == 16)
            text = (await client.fetch("GET", "/metrics", timeout_s=WAIT_S)).body.decode()
            assert 'fleetpilot_shadow_decisions_total{result="same"} 4.0' in text
            assert 'fleetpilot_shadow_decisions_total{result="other"} 4.0' in text

    run(test)
    decisions = records(path, "decision")
    assert [record["shadow"]["choice"] for record in decisions] == [0, 1] * 4
    assert {(record["shadow"]["policy"], record["shadow"]["error"]) for record in decisions} == {("round-robin", None)}
    assert {record["choice"] for record in decisions} == {0}
    assert replay(read_log(path), load_policy("round-robin")).agreement["dispatch"].agreed == 4


@pytest.mark.parametrize(("how", "error"), [("raises", "RuntimeError"), ("beyond", "illegal choice")])
def test_a_shadow_that_misbehaves_is_counted_and_harms_nothing(how: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(2, decision_log=str(path)) as (dispatcher, client, _):
            log = dispatcher.log
            assert log is not None
            log.shadow = Shadow(Sulky(how))
            for _ in range(3):
                assert (await ask(client)).status == 200
            await until(lambda: log.shadow is not None and log.shadow.counts == {"failed": 3})

    run(test)
    assert [record["shadow"]["error"] for record in records(path, "decision")] == [error] * 3


class Waits:
    """A policy that takes as long as it is let."""

    name = "waits"

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def reset(self, batch: int, seed: int) -> None: ...

    def decide(self, view: FleetView) -> Decision:
        self.go_on.wait(WAIT_S)
        return Decision(np.array([1]))


def test_requests_do_not_wait_for_the_shadow_and_it_needs_no_log() -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0), shadow="random") as (dispatcher, client, _):
            log, slow = dispatcher.log, Waits()
            assert log is not None
            log.shadow = Shadow(slow)
            for _ in range(3):
                assert (await ask(client)).status == 200
            assert not log.shadow.counts
            slow.go_on.set()
            await until(lambda: log.shadow is not None and log.shadow.counts == {"other": 3})

    run(test)


def test_a_shadow_that_hangs_does_not_keep_the_dispatcher_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpilot.dispatcher.decision_log._LONGEST_CLOSE_S", 0.1)
    hangs = Waits()

    async def test() -> None:
        async with a_fleet(1, shadow="random") as (dispatcher, client, _):
            log = dispatcher.log
            assert log is not None
            log.shadow = Shadow(hangs)
            assert (await ask(client)).status == 200
        assert log._thread.is_alive()

    run(test)
    hangs.go_on.set()


def test_in_a_dry_run_the_fallback_places_and_nothing_moves(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = {"fallback": "round-robin", "dry_run": True, "rebalance_interval_s": 0.02, "decision_log": str(path)}

    async def test() -> None:
        async with a_fleet(2, Leveller(), **config) as (dispatcher, client, engines):
            for engine in engines:
                engine.token_s = 0.01
            odd = [HttpClient(client.origin) for _ in range(6)]
            tasks = []
            for number, c in enumerate(odd):  # long ones at the first engine: there is something to move
                tasks.append(asyncio.create_task(ask(c, max_tokens=100 if number % 2 == 0 else 1)))
                await until(lambda sent=number + 1: dispatcher.counts["dispatched"] == sent)
            assert {(await task).status for task in tasks} == {200}
            assert dispatcher.counts["migrations not made in a dry run"] > 0
            assert not [name for name in dispatcher.counts if name.startswith("migrations") and "dry" not in name]
            assert dispatcher.fleet.host.decided["dispatch", "dry run"] == 6

    run(test)
    decisions = records(path, "decision")
    assert {record["by"] for record in decisions} == {"dry run"}
    by_kind = {kind: [r for r in decisions if r["kind"] == kind] for kind in ("dispatch", "source", "destination")}
    assert [record["choice"] for record in by_kind["dispatch"]] == [0, 1] * 3
    assert {record["preferred"] for record in by_kind["dispatch"]} == {0}
    assert {record["preferred"] for record in by_kind["destination"]} == {1}
    assert {record["choice"] for kind in ("source", "destination") for record in by_kind[kind]} == {None}
    assert not records(path, "migration")
    assert replay(read_log(path), Leveller()).agreement["destination"].agreed == len(by_kind["destination"])


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"explore = 0\.1: expected 0 in a dry run"):
        ServeConfig(emulate=1, dry_run=True, explore=0.1)
    with pytest.raises(ValueError, match=r"explore = 1\.5: expected a number from 0 to 1"):
        ServeConfig(emulate=1, explore=1.5)


def test_a_policy_is_exchanged_while_requests_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def test() -> None:
        async with a_fleet(2, Always(0), decision_log=str(path)) as (dispatcher, client, engines):
            engines[0].token_s = 0.01
            runs = await running_request(dispatcher, client, max_tokens=100)
            await ask(HttpClient(client.origin), max_tokens=2)
            changes = {"policy": "round-robin", "shadow": "random", "explore": 0.0, "port": 1}
            await dispatcher.reload(lambda: dataclasses.replace(dispatcher.config, **changes))
            for _ in range(4):
                assert (await ask(HttpClient(client.origin), max_tokens=2)).status == 200
            assert not runs.done()
            assert text_of(await runs) == expected_text(PROMPT, 100)
            assert (dispatcher.counts["reloads"], dispatcher.config.port) == (1, 0)
            with pytest.raises(ValueError, match="'nonsense'"):
                await dispatcher.reload(lambda: dataclasses.replace(dispatcher.config, policy="nonsense"))
            with pytest.raises(ValueError, match="expected the folder of an exported policy"):
                await dispatcher.reload(lambda: dataclasses.replace(dispatcher.config, shadow=str(tmp_path)))
            assert dispatcher.counts["failed_reloads"] == 2
            assert dispatcher.fleet.host.policy.name == dispatcher.config.policy == "round-robin"
            assert (await ask(client)).status == 200
            assert 'event="reloads"' in (await client.fetch("GET", "/metrics", timeout_s=WAIT_S)).body.decode()

    run(test)
    decisions = records(path, "decision")
    assert [record["policy"] for record in decisions] == ["always"] * 2 + ["round-robin"] * 5
    assert len({record["choice"] for record in decisions[2:]}) == 2
    assert [record["decision"] for record in decisions] == list(range(1, 8))
    assert decisions[0]["shadow"] is None
    assert {record["shadow"]["policy"] for record in decisions[2:]} == {"random"}


def test_an_export_whose_files_were_replaced_is_read_again(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from fleetpilot.agents.export import export_policy
    from fleetpilot.agents.schema import sizes_for
    from fleetpilot.agents.scorer import SetScorer

    folder = tmp_path / "policy"

    def export(mode: str) -> None:
        scorer = SetScorer(sizes_for((KIND_DISPATCH,)))
        for name in ("instances", "request", "fleet"):
            getattr(scorer, f"low_{name}").fill_(-10.0)
            getattr(scorer, f"high_{name}").fill_(-9.0)
        export_policy(scorer, (KIND_DISPATCH,), folder, fallback="lmetric", mode=mode, provenance={})

    async def test() -> None:
        export("sample")
        async with a_fleet(2, load_policy(str(folder))) as (dispatcher, client, _):
            assert (await ask(client)).status == 200
            export("greedy")
            await dispatcher.reload(lambda: dataclasses.replace(dispatcher.config, policy=str(folder)))
            assert getattr(dispatcher.fleet.host.policy, "mode", None) == "greedy"
            assert (await ask(client)).status == 200
            assert dispatcher.fleet.host.fallback_counts == {"out of range": 2}  # what was counted stays

    run(test)


def test_policies_that_begin_to_move_requests_do_so_after_a_reload() -> None:
    async def test() -> None:
        async with a_fleet(2, Always(0), rebalance_interval_s=0.02) as (dispatcher, client, engines):
            for engine in engines:
                engine.token_s = 0.02
            tasks = [await running_request(dispatcher, client, max_tokens=100)]
            tasks += [asyncio.create_task(ask(HttpClient(client.origin), max_tokens=100)) for _ in range(3)]
            await until(lambda: dispatcher.counts["dispatched"] == 4)
            assert not dispatcher.migrations
            dispatcher.fleet.host.take_up(Leveller(), dispatcher.fleet.host.fallback, 0.0, dry_run=False)
            await until(lambda: dispatcher.counts["migrations completed"] >= 1)
            assert {(await task).status for task in tasks} == {200}

    run(test)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_a_served_policy_is_exchanged_by_sighup(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"

    def write(engine: ScriptedEngine, policy: str, more: str = "") -> None:
        file.write_text(f'engines = ["{engine.url}"]\npolicy = "{policy}"\nprofile = "tiny-cpu"\nport = 0\n{more}')

    async def test() -> None:
        engine = ScriptedEngine()
        await engine.start()
        write(engine, "round-robin")
        command = [sys.executable, "-m", "fleetpilot", "serve", "--config", str(file)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        said: Counter[str] = Counter()

        async def reads(words: str) -> str:
            assert process.stdout is not None
            while True:
                line = (await process.stdout.readline()).decode()
                assert line, f"never said {words}; {dict(said)}"
                said[line] += 1
                if words in line:
                    return line

        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", await reads("serving 1 engines with round-robin"))
            assert found is not None
            client = HttpClient(found[0])
            await reads("is ready")
            write(engine, "lmetric", "max_stages = 2\n")
            process.send_signal(signal.SIGHUP)
            await reads("max_stages has changed, which takes a new start")
            await reads("reloaded: policy lmetric")
            write(engine, "nonsense")
            process.send_signal(signal.SIGHUP)
            await reads("not reloaded, nothing has changed: ")
            file.write_text("policy = ")
            process.send_signal(signal.SIGHUP)
            await reads("not reloaded, nothing has changed: ")
            assert (await ask(client)).status == 200
        finally:
            process.send_signal(signal.SIGINT)
            await process.wait()
        assert process.returncode == 0
        await engine.kill()

    run(test)
