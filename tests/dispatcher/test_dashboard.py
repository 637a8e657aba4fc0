"""The live page: that it says what is so, changes nothing, and can be read in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import re
import runpy
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from scripted import WAIT_S, a_fleet, ask, until
from test_decision_log import Leveller, run
from test_dispatcher import Sulky, running_request

from fleetpilot.dispatcher import dashboard
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.shadow import Shadow

ROOT = Path(__file__).parent.parent.parent


async def state(client: HttpClient) -> dict[str, Any]:
    answer = await client.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)
    assert answer.status == 200
    return orjson.loads(answer.body)


def test_the_state_is_that_of_the_fleet() -> None:
    async def test() -> None:
        async with a_fleet(2, Leveller(), migration=False) as (dispatcher, client, (engine, _)):
            shown = await state(client)
            assert (shown["policy"]["name"], shown["held"], shown["decisions"]) == ("leveller", 0, [])
            task = await running_request(dispatcher, client, max_tokens=100)
            engine.token_s = 0.02
            other = HttpClient(client.origin)
            await ask(other, max_tokens=2)
            shown = await state(other)
            first, second = shown["instances"]
            assert (first["url"], first["state"], first["in_flight"]) == (engine.url, "ready", 1)
            assert (second["state"], second["in_flight"], second["migrating"]) == ("ready", 0, False)
            assert first["poll_age_s"] < WAIT_S
            newest, oldest = shown["decisions"]
            assert (newest["number"], oldest["number"]) == (2, 1)
            assert (newest["kind"], newest["by"], newest["choice"], newest["prompt_tokens"]) == (
                "dispatch",
                "policy",
                0,
                4,
            )
            assert ["in_flight", 1.0, 0.0, 0.0] in newest["read"]
            assert shown["outcomes"] == {"finished": 1}
            await engine.kill()
            await until(lambda: dispatcher.counts["engines_lost"] == 1)
            assert (await state(other))["instances"][0]["state"] == "failed"
            await task

    run(test)


def test_what_a_baseline_reads_is_its_reason() -> None:
    async def test() -> None:
        async with a_fleet(2, shadow="random") as (dispatcher, client, _engines):
            await state(client)
            await running_request(dispatcher, client, max_tokens=300)
            await ask(HttpClient(client.origin))
            shown = await state(HttpClient(client.origin))
            assert shown["policy"]["rule"].startswith("min(")
            assert {name for name, *_ in shown["decisions"][0]["read"]} <= {"in_flight", "running", "waiting"}
            assert shown["shadow"]["name"] == "random"

    run(test)


def test_a_learned_policy_says_what_it_turns_away() -> None:
    async def test() -> None:
        for name, said in {
            "learned?late=1.5&cold=3&busy=0.8": "later than 1.5 times its target on all .* 1.2 times, .* 3 times",
            "learned?admission=none": "no request is rejected",
            "learned?admission=mooncake": "what mooncake would reject",
        }.items():
            async with a_fleet(1, name) as (_, client, _engines):
                policy = (await state(client))["policy"]
                assert policy["name"] == name
                assert re.search(said, policy["rule"])

    run(test)


def test_a_migration_is_shown_while_it_happens_and_afterwards() -> None:
    async def test() -> None:
        async with a_fleet(2, Leveller(), rebalance_interval_s=0.02) as (dispatcher, client, engines):
            engines[1].copy_hangs = True
            for engine in engines:
                engine.token_s = 0.02
            tasks = [await running_request(dispatcher, client, max_tokens=200)]
            tasks += [asyncio.create_task(ask(HttpClient(client.origin), max_tokens=200)) for _ in range(2)]
            await until(lambda: dispatcher.migrations)
            shown = await state(HttpClient(client.origin))
            (moving,) = shown["migrations"]
            assert (moving["source"], moving["destination"], moving["outcome"]) == (0, 1, "")
            assert [one["migrating"] for one in shown["instances"]] == [True, True]
            for task in tasks:
                task.cancel()
            await until(lambda: not dispatcher.migrations or dispatcher.moved)

    run(test)


def test_decisions_are_kept_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "_WATCHED_S", 0.0)

    async def test() -> None:
        async with a_fleet(1) as (dispatcher, client, _):
            await ask(client)
            assert not dispatcher.fleet.host.recent
            await state(client)
            await ask(client)
            assert not dispatcher.fleet.host.recent
            dispatcher.fleet.host.watched_until_s = time.monotonic() + WAIT_S
            for _ in range(33):
                await ask(client, max_tokens=1)
            assert len((await state(client))["decisions"]) == 30
            monkeypatch.setattr(dispatcher.fleet.host, "watched_until_s", 0.0)  # some time later
            assert (await state(client))["decisions"] == []

    run(test)


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing_foreign() -> None:
    async def test() -> None:
        async with a_fleet(1, api_keys=("the-key",), engine_api_key="the-other") as (_, client, _engines):
            answer = await client.fetch("GET", "/dashboard", timeout_s=WAIT_S)
            headers = dict(answer.headers)
            assert (answer.status, headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
            assert b"default-src 'none'" in headers[b"content-security-policy"]
            page = answer.body.decode()
            assert not re.search(r"https?://|//cdn|src=|@import|url\(|innerHTML", page)
            text = (await client.fetch("GET", "/dashboard/state", timeout_s=WAIT_S)).body
            assert b"the-" not in text
            for method, path, status in (
                ("POST", "/dashboard", 405),
                ("POST", "/dashboard/state", 405),
                ("GET", "/dashboard/", 404),
            ):
                assert (await client.fetch(method, path, timeout_s=WAIT_S)).status == status

    run(test)


@contextlib.asynccontextmanager
async def a_browser() -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api", reason="needs Playwright (pip install playwright)")
    async with playwright.async_playwright() as browsers:
        own = Path(browsers.chromium.executable_path)
        found = str(own) if own.exists() else shutil.which("chromium")
        if found is None:
            pytest.skip("needs Chromium (playwright install chromium)")
        browser = await browsers.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        await browser.close()


def test_the_page_is_whole_in_a_browser(tmp_path: Path) -> None:
    """At both widths, light and dark, with a policy whose name would be markup: nothing runs over, all is there."""
    problems = runpy.run_path(str(ROOT / "tools" / "screenshot_report.py"))["PROBLEMS"]

    class Named(Sulky):
        name = "<b>sulky</b>" + 80 * "y"  # has to be broken somewhere on a telephone

    async def look(browser: Any, url: str, width: int, scheme: str) -> None:
        page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        await page.goto(url)
        await page.get_by_text("live", exact=True).wait_for()
        await page.get_by_text("fallback, for the policy: RuntimeError").first.wait_for()
        await page.get_by_text(f"shadow {Named.name} agrees").wait_for()
        assert await page.locator("#instances article").count() == 3
        assert await page.locator("h1").text_content() == Named.name
        assert await page.locator("[role=meter]").first.get_attribute("aria-valuenow") is not None
        assert await page.evaluate(problems) == []
        await page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
        await page.close()
        assert said == []

    async def test() -> None:
        async with a_browser() as browser, a_fleet(3, Named("raises"), shadow="random") as (fleet, client, _):
            assert fleet.log is not None
            fleet.log.shadow = Shadow(Named("first"))
            await state(client)
            await asyncio.gather(*(ask(HttpClient(client.origin)) for _ in range(6)))
            for width in (1280, 400):
                for scheme in ("light", "dark"):
                    await look(browser, f"{client.origin}/dashboard", width, scheme)

    run(test)


def test_migrations_are_seen_in_the_page() -> None:
    async def test() -> None:
        async with a_browser() as browser, a_fleet(2, Leveller(), rebalance_interval_s=0.02) as (_, client, engines):
            page = await browser.new_page()
            await page.goto(f"{client.origin}/dashboard")
            await page.get_by_text("live", exact=True).wait_for()
            for engine in engines:
                engine.token_s = 0.01
            await asyncio.gather(*(ask(HttpClient(client.origin), max_tokens=200) for _ in range(4)))
            await page.get_by_text(re.compile(r"request \d: 0 → 1 completed, .* ms without a token")).first.wait_for()
            await page.get_by_text(re.compile(r"request \d moves → 1")).first.wait_for()

    run(test)


def test_the_page_says_when_the_dispatcher_is_gone() -> None:
    async def test() -> None:
        async with a_browser() as browser:
            page = await browser.new_page()
            async with a_fleet(1) as (_, client, _engines):
                await page.goto(f"{client.origin}/dashboard")
                await page.get_by_text("live", exact=True).wait_for()
            await page.get_by_text(re.compile("no answer for")).wait_for()

    run(test)
