"""What clients get through the dispatcher, beside what the engines themselves say."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import httpx2 as httpx
import openai
import pytest
from driver import (
    CHAT,
    COMPLETIONS,
    COMPUTED,
    NIXL,
    WAIT_S,
    Steered,
    a_body,
    assert_same,
    gauges,
    http_client,
    metrics,
    run,
    serving,
    settled,
    stream,
    token_ids,
    until,
)
from engines import MODEL_NAME, Engine, free_ports

pytestmark = pytest.mark.vllm

Engines = tuple[Engine, Engine]

TEXT = "Once upon a time there was a fleet of engines."
IDS = [72, 101, 108, 108, 111, 44, 32, 300, 301]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}},
}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

COMPLETION_BODIES: dict[str, dict[str, Any]] = {
    "text": {"prompt": TEXT},
    "token ids": {"prompt": IDS},
    "usage": {"prompt": TEXT} | USAGE,
    "continuous usage": {"prompt": TEXT} | CONTINUOUS,
    "shown ids": {"prompt": TEXT, "return_token_ids": True},
    "stop string": {"prompt": "Hello", "stop": ["w +"]} | USAGE,
    "stop string in the answer": {"prompt": "Hello", "stop": "w +", "include_stop_str_in_output": True},
    "stop strings never met": {"prompt": "Hello", "stop": ["never", "met at all"]},
    "stop token": {"prompt": "Hello", "stop_token_ids": [479]},
    "at least": {"prompt": "Hello", "stop": ["it"], "min_tokens": 3},
    "logprobs": {"prompt": TEXT, "logprobs": 2},
    "several": {"prompt": TEXT, "n": 2, "temperature": 0.8, "seed": 5, "max_tokens": 8},
    "two prompts": {"prompt": [IDS, IDS[::-1]], "max_tokens": 8},
    "sampled": {"prompt": TEXT, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 11},
    "echo": {"prompt": TEXT, "echo": True},
    "penalties": {"prompt": TEXT, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "guided": {"prompt": TEXT, "structured_outputs": {"regex": "[a-f]{6}[0-9]+"}, "max_tokens": 12},
    "urgent": {"prompt": TEXT, "priority": -3},
}
CHAT_BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": USAGE,
    "continuous usage": CONTINUOUS,
    "shown ids": {"return_token_ids": True},
    "stop string": {"stop": ["is`"]},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "several": {"n": 2, "temperature": 0.8, "seed": 5, "max_tokens": 8},
    "tools not to be used": {"tools": [TOOL], "tool_choice": "none"},
    "length by its other name": {"max_tokens": None, "max_completion_tokens": 7},
}
BODIES = {COMPLETIONS: COMPLETION_BODIES, CHAT: CHAT_BODIES}


def comparable(error: str) -> str:
    """Without the number of fields, of which the dispatcher may add some."""
    return re.sub(r"<dict of \d+ items>", "<dict>", error)


def without_time(text: str) -> dict[str, Any]:
    return json.loads(text) | {"created": 0}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_answers_equal_direct_ones(engines: Engines, route: str) -> None:
    async def test() -> None:
        async with serving(engines) as (dispatcher, client), http_client(engines[0].url) as engine:

            async def compare(name: str, fields: dict[str, Any]) -> None:
                content = {"messages": [{"role": "user", "content": "Hello"}]} if route == CHAT else {}
                body = a_body(**content) | {"max_tokens": 12} | fields
                await compare_streamed(client, engine, route, body, name)
                await compare_whole(client, engine, route, body, name)

            await each([(name, compare(name, fields)) for name, fields in BODIES[route].items()])
            assert dispatcher.outcomes == {"finished": 2 * len(BODIES[route])}

    run(test)


async def each(named: list[tuple[str, Coroutine[Any, Any, None]]]) -> None:
    """All of them, some at a time; says which failed."""
    slots = asyncio.Semaphore(8)

    async def one(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        async with slots:
            try:
                await coroutine
            except Exception as error:
                error.add_note(f"with {name}")
                raise

    results = await asyncio.gather(*(one(*each) for each in named), return_exceptions=True)
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise ExceptionGroup("some failed", errors)


async def compare_streamed(
    client: httpx.AsyncClient, engine: httpx.AsyncClient, route: str, body: dict[str, Any], name: str
) -> None:
    direct = await stream(engine, body, route, name)
    ours = await stream(client, body, route, name)
    assert ours.chunks[0]["id"] == direct.chunks[0]["id"]
    for index in (0, 1):  # several answers in one stream come in any order
        assert_same(ours.only(index), direct.only(index))


async def compare_whole(
    client: httpx.AsyncClient, engine: httpx.AsyncClient, route: str, body: dict[str, Any], name: str
) -> None:
    whole = {field: value for field, value in body.items() if field != "stream_options"}
    headers = {"x-request-id": name}
    expected = await engine.post(route, json=whole, headers=headers)
    answer = await client.post(route, json=whole, headers=headers)
    assert (answer.status_code, expected.status_code) == (200, 200)
    assert without_time(answer.text) == without_time(expected.text)
    assert answer.headers["content-type"] == expected.headers["content-type"]


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "look"}}])
def test_tools_are_passed_through(engines: Engines, choice: Any) -> None:
    """The second engine has a parser of tool calls."""

    async def test() -> None:
        messages = [{"role": "user", "content": "Hello"}]
        body = a_body(messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=24, **USAGE)
        async with serving(engines, Steered(1)) as (_, client), http_client(engines[1].url) as engine:
            ours = await stream(client, body, CHAT)
            assert_same(ours, await stream(engine, body, CHAT))
            called = any(each["delta"].get("tool_calls") for each in ours.choices)
            assert called == (choice != "auto")
            del body["stream_options"]
            whole, expected = [(await each.post(CHAT, json=body)).json() for each in (client, engine)]
            message, expected_message = whole["choices"][0]["message"], expected["choices"][0]["message"]
            for call in (*message.get("tool_calls", ()), *expected_message.get("tool_calls", ())):
                call["id"] = ""
            assert message == expected_message
            assert bool(message.get("tool_calls")) == called

    run(test)


def test_the_official_client(engines: Engines) -> None:
    async def test() -> None:
        async with serving(engines) as (dispatcher, _):
            ours = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{dispatcher.port}/v1", api_key="x", max_retries=0)
            direct = openai.AsyncOpenAI(base_url=f"{engines[0].url}/v1", api_key="x", max_retries=0)
            assert [model.id async for model in ours.models.list()] == [MODEL_NAME]
            said = [await _all_ways(client) for client in (ours, direct)]
            assert said[0] == said[1]
            with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
                await ours.completions.create(model="other", prompt=TEXT)
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                await ours.completions.create(model=MODEL_NAME, prompt=TEXT, max_tokens=100_000)

    run(test)


async def _all_ways(client: openai.AsyncOpenAI) -> list[Any]:
    """A completion and a chat, streamed and not."""
    common: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 20}
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    usage: Any = {"include_usage": True}
    completion = await client.completions.create(prompt=TEXT, **common)
    chat = await client.chat.completions.create(messages=messages, **common)
    streamed = await client.completions.create(prompt=TEXT, stream=True, stream_options=usage, **common)
    chunks = [chunk async for chunk in streamed]
    streamed_chat = await client.chat.completions.create(messages=messages, stream=True, stream_options=usage, **common)
    chat_chunks = [chunk async for chunk in streamed_chat]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    chat_text = "".join(chunk.choices[0].delta.content or "" for chunk in chat_chunks if chunk.choices)
    assert text == completion.choices[0].text
    assert chat_text == chat.choices[0].message.content
    usages = [completion.usage, chunks[-1].usage, chat.usage, chat_chunks[-1].usage]
    return [text, chat_text, [(each.prompt_tokens, each.completion_tokens) for each in usages if each]]


ERRORS: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"model": "other", "prompt": "a"},
        {"prompt": [1] * 9000},
        {"prompt": "a", "max_tokens": 9000},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "temperature": "hot"},
        {"prompt": "a", "logprobs": "x"},
        {"prompt": "a", "stop": 5},
        {"prompt": "a", "stop": [""]},
        {"prompt": "a", "stop": ["x", 5]},
        {"prompt": "a", "n": "two"},
        {"prompt": "a", "stream_options": "x"},
        {"prompt": "a", "logit_bias": 7},
        {"prompt": {"a": 1}},
        {"prompt": 5},
        {"prompt": [1, "a"]},
        {"prompt": [600]},
        {"prompt": [-1]},
        {"prompt": [[]]},
        {"prompt": []},
        {"prompt": [True]},
        {"prompt": [1.5]},
        {"prompt": ""},
        {},
        {"prompt": "a", "min_tokens": -1},
        {"prompt": "a", "priority": 2**70},
        {"prompt": "a", "seed": 2**70},
    ],
    CHAT: [
        {"model": "other", "messages": [{"role": "user", "content": "a"}]},
        {"messages": []},
        {"messages": 5},
        {"messages": "text"},
        {"messages": [5]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "a" * 20_000}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": 5},
        {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": "auto"},
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 3},
        {},
    ],
}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_wrong_request_gets_one_clear_error(engines: Engines, route: str) -> None:
    """The engine's own, or the dispatcher's where it has to understand the field itself."""

    async def test() -> None:
        async with serving(engines) as (dispatcher, client), http_client(engines[0].url) as engine:

            async def compare(text: str) -> None:
                headers = {"content-type": "application/json"}
                direct = await engine.post(route, content=text, headers=headers)
                ours = await client.post(route, content=text, headers=headers)
                shown = f"{ours.status_code} {ours.text[:300]}, direct {direct.text[:300]}"
                if direct.status_code == 200:
                    assert ours.status_code in (200, 400), shown
                    return
                assert ours.status_code == direct.status_code, shown
                message = ours.json()["error"]["message"]
                assert comparable(ours.text) == comparable(direct.text) or "expected" in message, shown

            texts = [
                json.dumps({"model": MODEL_NAME, "max_tokens": 3, "stream": streamed} | fields)
                for fields in ERRORS[route]
                for streamed in (False, True)
            ]
            await each([(text[:100], compare(text)) for text in texts])
            assert dispatcher.counts["engine_failures"] == 0
            assert dispatcher.counts["retries"] == 0
            assert not any(dispatcher.at)

    run(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: nan\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", 404),
        *(
            (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body), 400)
            for body in (b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"prompt": NaN}', b'{"model": 5, "prompt": "a"}')
        ),
    ],
)
def test_what_is_no_request_never_reaches_an_engine(engines: Engines, sent: bytes, status: int) -> None:
    async def test() -> None:
        async with serving(engines) as (dispatcher, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", dispatcher.port)
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode()
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            assert json.loads(await reader.readexactly(length))["error"]["message"]
            writer.close()
            assert dispatcher.counts["dispatched"] == 0

    run(test)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_a_client_that_leaves_aborts_its_request(engines: Engines, streamed: bool, moves: bool) -> None:
    """Within a second, of three tries on a machine that may be busy."""

    async def test() -> None:
        times_s = []
        async with serving(engines, migration=moves, failover=moves) as (dispatcher, client):
            for _ in range(3):
                body = a_body(prompt=TEXT, max_tokens=3000, stream=streamed)
                task = asyncio.create_task(client.post(COMPLETIONS, json=body))
                while (await gauges(engines[0]))[0] != 1.0:
                    await asyncio.sleep(0.05)
                before = (await metrics(engines[0]))["vllm:generation_tokens_total", ""]
                task.cancel()
                left_s = time.monotonic()
                while (await gauges(engines[0]))[0] != 0.0:
                    assert time.monotonic() < left_s + WAIT_S
                times_s.append(time.monotonic() - left_s)
                after = (await metrics(engines[0]))["vllm:generation_tokens_total", ""]
                assert after - before < 500
            assert min(times_s) < 1.0, times_s
            await until(lambda: dispatcher.outcomes["client left"] == 3)
            assert not any(dispatcher.at)

    run(test)


def test_urgent_requests_do_not_queue(engines: Engines) -> None:
    """Behind a full batch the last to come starts first; the header counts as the field does."""

    async def test() -> None:
        engine = engines[0]
        async with serving(engines) as (_, client):
            async with http_client(engine.url) as direct:
                body = a_body(max_tokens=150, priority=-1000)
                fillers = [
                    asyncio.create_task(stream(direct, body | {"prompt": [100 + n]}))
                    for n in range(engine.max_num_seqs)
                ]
                while (await gauges(engine))[0] < engine.max_num_seqs:
                    await asyncio.sleep(0.05)
                ended: list[int] = []

                async def ask(priority: int, headers: dict[str, str]) -> None:
                    body = a_body(prompt=IDS, max_tokens=1, stream=True)
                    body |= {} if headers else {"priority": priority}
                    answer = await client.post(COMPLETIONS, json=body, headers=headers)
                    assert answer.status_code == 200
                    ended.append(priority)

                asked = []
                for count, priority in enumerate((5, 0, -5, -7), start=1):
                    headers = {"x-vllm-priority": "-7"} if priority == -7 else {}
                    asked.append(asyncio.create_task(ask(priority, headers)))
                    while (await gauges(engine))[1] < count:
                        await asyncio.sleep(0.05)
                await fillers[0]
                for filler in fillers[1:]:
                    filler.cancel()
                await asyncio.gather(*asked)
            assert ended == sorted(ended)

    run(test)


@pytest.mark.parametrize("streamed", [True, False])
def test_prefill_here_and_decode_there(engines: Engines, streamed: bool) -> None:
    """Clients that do this themselves are passed through: the second engine computes next to nothing of the prompt."""

    async def test() -> None:
        policy = Steered(0)
        prompt = token_ids(random.Random(7 + streamed), 900)
        async with serving(engines, policy, client_kv_transfer=True) as (_, client):
            wanted = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
            prefill = await client.post(COMPLETIONS, json=a_body(prompt=prompt, max_tokens=1) | wanted)
            params = prefill.json()["kv_transfer_params"]
            policy.slot = 1
            before = await metrics(engines[1])
            body = a_body(prompt=prompt) | {"kv_transfer_params": params}
            if streamed:
                text = (await stream(client, body)).text
            else:
                text = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
            after = await metrics(engines[1])
            assert after[COMPUTED] - before[COMPUTED] < 0.05 * len(prompt)
            assert after[NIXL] - before[NIXL] >= 0.95 * len(prompt)
            async with http_client(engines[0].url) as engine:
                direct = await engine.post(COMPLETIONS, json=a_body(prompt=prompt))
            assert text == direct.json()["choices"][0]["text"]
        await settled(*engines)

    run(test)


def test_the_command(engines: Engines) -> None:
    """`fleetpilot serve` as users start it, with the policy it has by default."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "fleetpilot", "serve", "--port", str(port), "--profile", "tiny-cpu", "--engines"]
    command += [engine.url for engine in engines]
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=WAIT_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("vLLM 0.") == len(engines)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f":{port}/v1" in process.stdout.readline()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            deadline_s = time.monotonic() + WAIT_S
            while client.get("/ready").json()["engines"] != ["ready", "ready"]:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            official = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x")
            answers = [
                official.completions.create(model=MODEL_NAME, prompt=f"{TEXT} {n}", temperature=0) for n in range(6)
            ]
            assert all(answer.usage and answer.usage.completion_tokens == 16 for answer in answers)
            text = client.get("/metrics").text
        assert 'fleetpilot_requests_total{outcome="finished"} 6.0' in text
        assert "fleetpilot_policy_fallbacks_total{" not in text
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
