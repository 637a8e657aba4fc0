"""Emulated engines answer as vLLM does, over real HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from emulated import FAST, SLOW, Emulated, eventually

from fleetpilot.dispatcher.emulator.vocabulary import END, PIECES, detokenize
from fleetpilot.fleet.vllm_metrics import read_metrics

Start = Callable[..., Emulated]

ENDLESS = {"ignore_eos": True, "max_tokens": 3000}


def ids(prompt: str) -> list[int]:
    return list(prompt.encode())


def generate(fleet: Emulated, prompt: object, count: int, engine: int = 0, **body: Any) -> list[int]:
    """The first `count` tokens after a prompt."""
    answer = fleet.complete(engine, prompt=prompt, max_tokens=count, ignore_eos=True, return_token_ids=True, **body)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


# --- tokens and text -----------------------------------------------------------------------------------------------


def test_the_answer_to_a_prompt_is_the_same_on_every_engine(emulate: Start) -> None:
    fleet = emulate(2)
    assert generate(fleet, "Hello", 100) == generate(fleet, ids("Hello"), 100, engine=1)
    assert generate(fleet, "Hello", 100) != generate(fleet, "Hallo", 100)


def test_a_request_that_goes_on_from_what_it_had_gets_the_same_tokens(emulate: Start) -> None:
    fleet = emulate(2)
    whole = generate(fleet, "Once upon a time", 200)
    for cut in (1, 37, 38, 39, 150):
        assert whole[:cut] + generate(fleet, ids("Once upon a time") + whole[:cut], 200 - cut, engine=1) == whole


def test_where_an_answer_ends_does_not_depend_on_where_it_went_on(emulate: Start) -> None:
    fleet = emulate(mean_tokens=40.0)
    answer = fleet.complete(prompt="Where does it end?", max_tokens=3000, return_token_ids=True)
    tokens = answer["choices"][0]["token_ids"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert tokens[-1] == END
    rest = fleet.complete(prompt=ids("Where does it end?") + tokens[:2], max_tokens=3000, return_token_ids=True)
    assert tokens[:2] + rest["choices"][0]["token_ids"] == tokens


def test_text_is_that_of_the_tokens_and_has_letters_beyond_ascii(emulate: Start) -> None:
    fleet = emulate()
    answer = fleet.complete(prompt="A long story", max_tokens=1500, ignore_eos=True, return_token_ids=True)
    choice = answer["choices"][0]
    assert detokenize(choice["token_ids"]).rstrip("�") == choice["text"]
    assert not choice["text"].isascii()
    assert sum(letter.isascii() for letter in choice["text"]) > 0.9 * len(choice["text"])


def test_characters_are_held_back_until_they_are_complete(emulate: Start) -> None:
    fleet = emulate()
    stream = fleet.stream(
        "/v1/completions", {"prompt": "A long story", "max_tokens": 1500, "ignore_eos": True, "return_token_ids": True}
    )
    text = ""
    inside = 0
    tokens: list[int] = []
    for event in stream:
        choice = event["choices"][0]
        tokens += choice["token_ids"]
        text += choice["text"]
        inside += choice["text"] == ""
        assert "�" not in choice["text"]
    assert inside > 0
    assert detokenize(tokens).rstrip("�") == text


def test_a_prompt_that_ends_inside_a_character_is_told_again_with_it(emulate: Start) -> None:
    fleet = emulate()
    answer = fleet.complete(prompt=[*ids("caf"), 0xC3], max_tokens=1)
    assert re.fullmatch("caf[à-ÿ]", answer["choices"][0]["text"])


# --- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_has_vllms_events(emulate: Start) -> None:
    fleet = emulate()
    body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    stream = fleet.stream("/v1/completions", body, headers={"X-Request-Id": "mine"})
    assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = list(stream)
    assert stream.done
    first, second, third = generate(fleet, "Hello", 3)
    assert [list(event) for event in events] == [
        ["id", "object", "created", "model", "choices"],
        ["id", "object", "created", "model", "choices"],
        ["id", "object", "created", "model", "choices", "system_fingerprint"],
    ]
    assert {event["id"] for event in events} == {"cmpl-mine"}
    assert list(events[0]["choices"][0].items()) == [
        ("index", 0),
        ("text", PIECES[first].decode()),
        ("logprobs", None),
        ("finish_reason", None),
        ("stop_reason", None),
        ("prompt_token_ids", ids("Hello")),
        ("token_ids", [first]),
    ]
    assert events[1]["choices"][0]["prompt_token_ids"] is None
    assert events[1]["choices"][0]["token_ids"] == [second]
    assert events[2]["choices"][0]["token_ids"] == [third]
    assert events[2]["choices"][0]["finish_reason"] == "length"


def test_a_stream_without_ids_has_their_keys(emulate: Start) -> None:
    events = list(emulate().stream("/v1/completions", {"prompt": "Hello", "max_tokens": 2}))
    assert all(event["choices"][0]["token_ids"] is None for event in events)
    assert all(event["choices"][0]["prompt_token_ids"] is None for event in events)


def test_usage_comes_when_it_is_asked_for(emulate: Start) -> None:
    fleet = emulate()
    body = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
    usage = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}
    *events, last = fleet.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]) == ([], usage)
    assert "system_fingerprint" in last
    assert all("usage" not in event and "system_fingerprint" not in event for event in events)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = fleet.stream("/v1/completions", {**body, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2]
    assert last["usage"] == usage


def test_several_prompts_and_choices_share_a_stream(emulate: Start) -> None:
    fleet = emulate()
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4, "ignore_eos": True, "temperature": 1.0}
    texts = [""] * 4
    reasons: list[str | None] = [None] * 4
    for event in fleet.stream("/v1/completions", body):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == ["length"] * 4
    assert len(set(texts)) == 4
    whole = fleet.complete(**body)
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"] == {
        "prompt_tokens": 6,
        "total_tokens": 22,
        "completion_tokens": 16,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_a_chat_is_streamed_as_vllm_streams_it(emulate: Start) -> None:
    fleet = emulate()
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    greeting, *events = fleet.stream("/v1/chat/completions", body, headers={"X-Request-Id": "mine"})
    assert list(greeting) == ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"]
    assert greeting["id"] == "chatcmpl-mine"
    assert greeting["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [list(event["choices"][0]) for event in events] == [
        ["index", "delta", "logprobs", "finish_reason", "token_ids"],
        ["index", "delta", "logprobs", "finish_reason", "token_ids"],
        ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"],
    ]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == generate(fleet, greeting["prompt_token_ids"], 3)
    whole = fleet.post("/v1/chat/completions", body).json
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["prompt_token_ids"] == greeting["prompt_token_ids"]
    counted = fleet.post("/tokenize", {"messages": body["messages"]}).json
    assert counted["tokens"] == greeting["prompt_token_ids"]


def test_logprobs_have_a_name_and_a_place_for_every_token(emulate: Start) -> None:
    fleet = emulate()
    body = {"prompt": "A long story", "max_tokens": 200, "ignore_eos": True, "logprobs": 2}
    offsets: list[int] = []
    names: list[str] = []
    for event in fleet.stream("/v1/completions", body):
        logprobs = event["choices"][0]["logprobs"]
        offsets += logprobs["text_offset"]
        names += logprobs["tokens"]
        assert all(len(top) == 2 for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert len(names) == 200
    assert offsets == [sum(len(name) for name in names[:i]) for i in range(200)]
    assert fleet.complete(**body)["choices"][0]["logprobs"]["text_offset"] == offsets
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    content = fleet.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert [list(one) for one in content] == [["token", "logprob", "bytes", "top_logprobs"]] * 2


# --- where answers end ---------------------------------------------------------------------------------------------


def told(fleet: Emulated, **body: Any) -> list[tuple[str, Any, Any]]:
    """Text, finish reason and stop reason of every event."""
    events = fleet.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True, **body})
    shown = ("text", "finish_reason", "stop_reason")
    return [tuple(event["choices"][0][name] for name in shown) for event in events]  # type: ignore[misc]


def words(fleet: Emulated) -> list[str]:
    """The first words of the answer to Hello, which are one token each."""
    return [PIECES[token].decode() for token in generate(fleet, "Hello", 5)]


def test_a_stop_string_ends_the_answer_where_it_is_complete(emulate: Start) -> None:
    fleet = emulate()
    first, second, third, *_ = words(fleet)
    stop = second[-2:] + third[:3]  # across two tokens
    events = told(fleet, stop=stop)
    assert len(events) == 3
    assert "".join(text for text, _, _ in events) == first + second[:-2]
    assert events[-1][1:] == ("stop", stop)
    assert [text for text, _, _ in told(fleet, stop=[stop], include_stop_str_in_output=True)] == [
        first,
        second,
        third[:3],
    ]


def test_text_that_could_begin_a_stop_string_is_held_back(emulate: Start) -> None:
    fleet = emulate()
    first, second, third, fourth, fifth = words(fleet)
    events = told(fleet, stop=["$$$$$"], max_tokens=5)
    assert events[0][0] == first[:-4]
    assert events[1][0] == first[-4:] + second[:-4]
    assert "".join(text for text, _, _ in events) == first + second + third + fourth + fifth
    assert events[-1][1:] == ("length", None)


def test_a_stop_string_within_the_least_length_is_ignored(emulate: Start) -> None:
    fleet = emulate()
    _, second, *_ = words(fleet)
    assert len(told(fleet, stop=[second], min_tokens=1)) == 2
    assert len(told(fleet, stop=[second], min_tokens=2)) > 2


def test_a_stop_token_ends_the_answer_without_its_text(emulate: Start) -> None:
    fleet = emulate()
    tokens = generate(fleet, "Hello", 3)
    assert told(fleet, stop_token_ids=[tokens[2]])[-1] == ("", "stop", tokens[2])
    assert told(fleet, stop_token_ids=[tokens[2]], include_stop_str_in_output=True)[-1][0] == PIECES[tokens[2]].decode()


def test_the_end_is_counted_and_has_no_text(emulate: Start) -> None:
    fleet = emulate(mean_tokens=5.0)
    answer = fleet.complete(prompt="Hello", max_tokens=3000, return_token_ids=True)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert choice["token_ids"][-1] == END
    longer = fleet.complete(prompt="Hello", max_tokens=3000, min_tokens=200, return_token_ids=True)
    assert len(longer["choices"][0]["token_ids"]) > 200
    assert len(generate(fleet, "Hello", 200)) == 200


def test_an_abort_ends_the_stream_with_its_reason(emulate: Start) -> None:
    fleet = emulate(profile=SLOW)
    body = {"prompt": "Hello", **ENDLESS, "stream_options": {"include_usage": True}}
    stream = fleet.stream("/v1/completions", body, headers={"X-Request-Id": "mine"})
    events = iter(stream)
    next(events)
    for name in ("cmpl-mine", "mine", "nobody"):
        assert fleet.post("/inference/v1/abort_requests", {"request_ids": [name]}).status == 200
    next(events)
    answer = fleet.post("/inference/v1/abort_requests", {"request_ids": ["cmpl-mine-0"]})
    assert (answer.status, answer.body) == (200, b"")
    *rest, last, usage = events
    assert last["choices"][0]["finish_reason"] == "abort"
    assert usage["usage"]["completion_tokens"] == 2 + len(rest)
    assert stream.done
    eventually(lambda: fleet.metric("vllm:num_requests_running") == 0, "the request has left the batch")
    assert fleet.metric("vllm:kv_cache_usage_perc") == 0
    assert fleet.metric('vllm:request_success_total{finished_reason="abort"}') == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(emulate: Start, streamed: bool) -> None:
    fleet = emulate(profile=SLOW)
    if streamed:
        stream = fleet.stream("/v1/completions", {"prompt": "Hello", **ENDLESS})
        next(iter(stream))
        stream.close()
    else:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", fleet.fleet.engines[0].port)
        connection.request(
            "POST",
            "/v1/completions",
            b'{"prompt":"Hello","ignore_eos":true,"max_tokens":3000}',
            {"content-type": "application/json"},
        )
        eventually(lambda: fleet.metric("vllm:num_requests_running") == 1, "it runs")
        connection.close()
    eventually(lambda: fleet.metric("vllm:num_requests_running") == 0, "the request has left the batch")
    assert fleet.metric("vllm:kv_cache_usage_perc") == 0


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        (b"{", 400, "Bad Request", "body.1"),
        (b"[]", 400, "Bad Request", "body"),
        (b"", 400, "Bad Request", "body"),
        ({"prompt": []}, 400, "BadRequestError", None),
        ({}, 400, "BadRequestError", "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "NotFoundError", "model"),
        ({"prompt": "a", "max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, 400, "Bad Request", "body.max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "BadRequestError", "max_tokens"),
        ({"prompt": "a" * 5000, "max_tokens": 5}, 400, "BadRequestError", "input_tokens"),
        ({"prompt": 7}, 400, "Bad Request", "body.prompt"),
        ({"prompt": [1, "b"]}, 400, "Bad Request", "body.prompt.1"),
        ({"prompt": [1, -2]}, 400, "Bad Request", "body.prompt.1"),
        ({"prompt": [100000]}, 400, "BadRequestError", None),
        ({"prompt": "a", "stop": [""]}, 400, "BadRequestError", None),
        ({"prompt": "a", "stop": 3}, 400, "Bad Request", "body.stop"),
        ({"prompt": "a", "n": 0}, 400, "BadRequestError", None),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "BadRequestError", None),
        ({"prompt": "a", "temperature": 3}, 400, "BadRequestError", "temperature"),
        ({"prompt": "a", "stream": "yes"}, 400, "Bad Request", "body.stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
        ({"prompt": "a", "min_tokens": 20}, 400, "BadRequestError", None),
        ({"prompt": "a", "cache_salt": "@"}, 400, "BadRequestError", "cache_salt"),
        ({"prompt": "a", "kv_transfer_params": 3}, 400, "Bad Request", "body.kv_transfer_params"),
    ],
)
def test_what_vllm_refuses_is_refused_in_its_words(
    emulate: Start, body: object, status: int, kind: str, param: str | None
) -> None:
    answer = emulate().post("/v1/completions", body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"], error["param"]) == (status, status, kind, param)
    assert error["message"]


def test_other_refusals(emulate: Start) -> None:
    fleet = emulate()
    wrong_type = fleet.post("/v1/completions", {"prompt": "a"}, headers={"content-type": "text/plain"})
    assert wrong_type.status == 400
    assert (fleet.get("/v1/completions").status, fleet.get("/nothing").status) == (405, 404)
    assert fleet.get("/nothing").json == {"detail": "Not Found"}
    assert fleet.post("/v1/chat/completions", {"messages": []}).status == 400
    assert fleet.post("/v1/chat/completions", {}).json["error"]["param"] == "body.messages"
    assert fleet.post("/inference/v1/abort_requests", {}).json["error"]["message"] == (
        "Missing 'request_ids' in request body"
    )
    assert fleet.post("/detokenize", {"tokens": "no"}).status == 400


def test_a_prompt_leaves_the_answer_what_room_there_is(emulate: Start) -> None:
    answer = emulate().complete(prompt="a" * (FAST.max_model_len - 3), max_tokens=100, ignore_eos=True)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")


# --- the other routes ----------------------------------------------------------------------------------------------


def test_models_version_health_and_tokens(emulate: Start) -> None:
    fleet = emulate(model="tiny")
    model = fleet.get("/v1/models").json["data"][0]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == ("tiny", FAST.max_model_len, "vllm")
    assert re.match(r"0\.32", fleet.get("/version").json["version"])
    assert [(answer.status, answer.body) for answer in (fleet.get("/health"), fleet.get("/ping"))] == [(200, b"")] * 2
    assert fleet.get("/load").json == {"server_load": 0}
    tokens = fleet.post("/tokenize", {"prompt": "café"}).json
    assert (tokens["count"], tokens["tokens"], tokens["max_model_len"]) == (5, ids("café"), FAST.max_model_len)
    assert fleet.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "café"}


def test_metrics_are_those_that_a_dispatcher_reads(emulate: Start) -> None:
    fleet = emulate(profile=SLOW)
    prompt = "x" * 320
    fleet.complete(prompt=prompt, max_tokens=2, ignore_eos=True)
    fleet.complete(prompt=prompt, max_tokens=2, ignore_eos=True)
    stream = fleet.stream("/v1/completions", {"prompt": prompt, **ENDLESS})
    next(iter(stream))
    metrics = read_metrics(fleet.get("/metrics").body.decode())
    assert (metrics.running, metrics.waiting, metrics.preemptions) == (1, 0, 0)
    assert metrics.kv_usage == pytest.approx(21 / SLOW.kv_blocks)
    assert (metrics.kv_capacity_blocks, metrics.block_size) == (SLOW.kv_blocks, SLOW.block_size)
    assert (metrics.prefix_queries_tokens, metrics.prefix_hits_tokens) == (960, 2 * 304)
    for source, tokens in {"local_compute": 960 - 608, "local_cache_hit": 608, "external_kv_transfer": 0}.items():
        assert fleet.metric(f'vllm:prompt_tokens_by_source_total{{source="{source}"}}') == tokens
    assert fleet.metric('vllm:request_success_total{finished_reason="length"}') == 2
    assert fleet.metric("vllm:generation_tokens_total") >= 5
    assert fleet.metric("vllm:time_to_first_token_seconds_count") == 3
    assert fleet.get("/load").json == {"server_load": 1}
    stream.close()


def test_priority_goes_before_arrival(emulate: Start) -> None:
    fleet = emulate(profile=SLOW.replace(max_num_seqs=1))
    running = fleet.stream("/v1/completions", {"prompt": "Hello", "ignore_eos": True, "max_tokens": 30})
    next(iter(running))
    body = {"prompt": "Hello", "ignore_eos": True, "max_tokens": 40}
    late = fleet.stream_later("/v1/completions", {**body, "priority": 1})
    early = fleet.stream_later("/v1/completions", {**body, "priority": 1}, headers={"X-Vllm-Priority": "-1"})
    eventually(lambda: fleet.metric("vllm:num_requests_waiting") == 2, "both wait")
    list(early.result())
    assert not late.done()
    list(late.result())
