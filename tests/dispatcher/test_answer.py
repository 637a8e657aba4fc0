"""The client's stream equals a direct one: without a seam, across seams, with stop strings, logprobs and usage."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from fleetpilot.dispatcher.answer import Answer, EngineError, StopStrings
from fleetpilot.dispatcher.http.sse import DONE, EventReader, event
from fleetpilot.dispatcher.requests import CHAT, COMPLETIONS, ApiRequest, parse_request

PROMPT = [72, 266, 419]
PIECES = ["it", "it", "mw", " ", "", "é", "+", "te", "ud", '"', "; ", "re"]
"""Text of the answer's tokens; the fifth is the first half of the sixth's character."""
IDS = [321, 321, 479, 32, 195, 169, 43, 400, 401, 34, 402, 403]


def a_request(route: str = COMPLETIONS, **fields: Any) -> ApiRequest:
    content = {"prompt": "Hello"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "Hello"}]}
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": len(IDS)} | content | fields
    return parse_request(route, orjson.dumps(body), None, b"mine")


def engine_events(
    request: ApiRequest, *, first: int = 0, ids_asked: bool = True, name: str = "one", logprobs: bool = False
) -> list[bytes]:
    """What vLLM sends from the token `first` on, as recorded from 0.32; a completion wherever it goes on."""
    chat = request.route == CHAT and first == 0
    prompt = PROMPT + IDS[:first]
    options = request.fields.get("stream_options") or {}
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 100 + first,
        "model": "tiny",
    }
    chunks: list[dict[str, Any]] = []

    def usage(tokens: int) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + tokens, "completion_tokens": tokens}

    def add(choice: dict[str, Any], tokens: int, last: bool, **more: Any) -> None:
        chunk = head | {"choices": [choice]}
        if options.get("continuous_usage_stats"):
            chunk["usage"] = usage(tokens) | ({"completion_tokens_details": None} if chat else {})
        if last and not options.get("include_usage"):
            chunk["system_fingerprint"] = "vllm"
        chunks.append(chunk | more)

    if chat:
        delta = {"role": "assistant", "content": ""}
        more = {"prompt_token_ids": prompt if ids_asked else None, "prompt_text": None}
        add({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}, 0, False, **more)
    offset = 0
    for number in range(first, len(IDS)):
        last = number == len(IDS) - 1
        finish = "length" if last else None
        shown = [IDS[number]] if ids_asked else None
        if chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": PIECES[number]}, "logprobs": None}
            choice |= {"finish_reason": finish} | ({"stop_reason": None} if last else {}) | {"token_ids": shown}
        else:
            noted = (
                {"text_offset": [offset], "token_logprobs": [-1.5], "tokens": [PIECES[number]]} if logprobs else None
            )
            offset += len(PIECES[number])
            choice = {"index": 0, "text": PIECES[number], "logprobs": noted, "finish_reason": finish}
            choice |= {"stop_reason": None, "prompt_token_ids": prompt if ids_asked and number == first else None}
            choice |= {"token_ids": shown}
        add(choice, number + 1 - first, last)
    if options.get("include_usage"):
        chunks.append(head | {"choices": [], "usage": usage(len(IDS) - first), "system_fingerprint": "vllm"})
    return [orjson.dumps(chunk) for chunk in chunks] + [DONE]


def fed(answer: Answer, events: list[bytes]) -> list[bytes]:
    return [out for data in events for out in answer.feed(data)]


def moved(request: ApiRequest, seams: list[int], **options: Any) -> list[bytes]:
    """The client's stream if the request moves before it shows the tokens `seams`."""
    answer = Answer(request)
    head = 1 if request.route == CHAT else 0
    out: list[bytes] = []
    at = 0
    for number, seam in enumerate([*seams, None]):
        events = engine_events(request, first=at, name=f"engine{number}" if at else "one", **options)
        if seam is None:
            out += fed(answer, events)
        else:
            out += fed(answer, events[: seam - at + (head if at == 0 else 0)])
            ids = answer.resume()
            at = len(ids) - len(PROMPT)
            assert ids == PROMPT + IDS[:at]
    return out


def without_empty(events: list[bytes]) -> list[Any]:
    """Chunks but those that bring nothing: a token of an incomplete character may come twice, without text."""
    chunks = [orjson.loads(text[6:]) for text in events if text != event(DONE)]
    return [chunk for chunk in chunks if not chunk["choices"] or chunk["choices"][0].get("text") != ""]


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_without_a_seam_the_stream_is_the_engines_to_the_byte(route: str, options: Any) -> None:
    request = a_request(route, stream_options=options)
    direct = [event(data) for data in engine_events(request, ids_asked=False)]
    assert fed(Answer(request), engine_events(request)) == direct


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("seams", [[1], [4], [7], [11], [2, 6], [1, 2, 3, 9]])
def test_across_seams_the_stream_is_the_engines_to_the_byte(route: str, options: Any, seams: list[int]) -> None:
    request = a_request(route, stream_options=options)
    direct = [event(data) for data in engine_events(request, ids_asked=False)]
    assert moved(request, seams) == direct


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_continuous_usage_counts_the_whole_answer(route: str) -> None:
    request = a_request(route, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert moved(request, [3, 8]) == [event(data) for data in engine_events(request, ids_asked=False)]


@pytest.mark.parametrize("seams", [[5], [5, 6]])
def test_a_character_cut_by_the_seam_comes_once(seams: list[int]) -> None:
    request = a_request()
    direct = [event(data) for data in engine_events(request, ids_asked=False)]
    assert without_empty(moved(request, seams)) == without_empty(direct)


def joined(events: list[bytes], first: int, last: int) -> bytes:
    """The chunk of the tokens from `first` to `last`, as an engine sends whose server has fallen behind."""
    chunks = [orjson.loads(data) for data in events[first : last + 1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    return orjson.dumps(chunks[0] | {"choices": [choices[-1] | {"text": text, "token_ids": token_ids}]})


def test_several_tokens_in_a_chunk_may_end_inside_a_character() -> None:
    events = engine_events(a_request())
    answer = Answer(a_request())
    seen = []
    for data in (joined(events, 0, 1), events[2], joined(events, 3, 4), events[5], events[6], events[7]):
        fed(answer, [data])
        seen.append(answer.is_whole)
    assert seen == [False, True, False, True, True, True]
    answer = Answer(a_request())
    fed(answer, [events[0], joined(events, 0, 1)])
    assert answer.is_whole, "the last token came alone before, with text"


@pytest.mark.parametrize("seams", [[3], [5], [6], [5, 9]])
def test_token_ids_that_the_client_asked_for_come_once(seams: list[int]) -> None:
    request = a_request(return_token_ids=True)
    chunks = [orjson.loads(text[6:]) for text in moved(request, seams) if text != event(DONE)]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == IDS
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(PIECES)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert all(chunk["choices"][0]["prompt_token_ids"] is None for chunk in chunks[1:])


@pytest.mark.parametrize("seams", [[], [1], [4], [3, 7]])
def test_offsets_of_logprobs_count_from_the_answers_start(seams: list[int]) -> None:
    request = a_request(logprobs=0)
    direct = [event(data) for data in engine_events(request, ids_asked=False, logprobs=True)]
    assert moved(request, seams, logprobs=True) == direct


def as_vllm(stops: list[str], pieces: list[str], include: bool) -> tuple[list[str], str | None]:
    """vLLM's rules, written plainly: what is sent after each token, and the stop string."""
    held = 0 if include else max(map(len, stops)) - 1
    text, sent, out = "", 0, []
    for number, piece in enumerate(pieces):
        before = len(text)
        text += piece
        ends = {}
        for stop in stops if piece else []:
            at = text.find(stop, max(0, before + 1 - len(stop)))
            if at >= 0:
                ends.setdefault(at + len(stop), (stop, at))
        if ends:
            end = min(ends)
            stop, at = ends[end]
            out.append(text[sent : max(sent, end if include else at)])
            return out, stop
        upto = len(text) if number == len(pieces) - 1 else max(sent, len(text) - held)
        out.append(text[sent:upto])
        sent = upto
    return out, None


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings_are_found_as_vllm_finds_them(seed: int) -> None:
    draw = random.Random(seed)
    pieces = ["".join(draw.choice("ab") for _ in range(draw.randint(0, 3))) for _ in range(12)]
    stops = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
    include = draw.random() < 0.3
    expected, expected_stop = as_vllm(stops, pieces, include)
    out, stop = found(stops, pieces, include)
    assert (out, stop) == (expected, expected_stop)
    joined = ["".join(pieces[begin : begin + 3]) for begin in range(0, len(pieces), 3)]  # as a busy engine sends them
    out, stop = found(stops, joined, include)
    assert ("".join(out), stop) == ("".join(expected), expected_stop)


def found(stops: list[str], pieces: list[str], include: bool) -> tuple[list[str], str | None]:
    """What is sent after each piece, and the stop string."""
    finder, out, stop = StopStrings(stops, include), [], None
    for number, piece in enumerate(pieces):
        sent, stop = finder.feed(piece, last=number == len(pieces) - 1)
        out.append(sent)
        if stop is not None:
            break
    return out, stop


@pytest.mark.parametrize("seams", [[], [2], [3], [3, 6]])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        # recorded from vLLM 0.32: stop ["tm"] gives "i", "ti", "" with the stop
        (["tm"], False, (["i", "ti", ""], "tm")),
        (["tm"], True, (["it", "it", "m"], "tm")),
        ("w é", False, (["", "it", "it", "m", "", ""], "w é")),
    ],
)
def test_a_stop_string_ends_the_answer_across_a_seam(seams: list[int], stop: Any, include: bool, expected: Any) -> None:
    seams = [seam for seam in seams if seam < len(expected[0])]
    request = a_request(stop=stop, include_stop_str_in_output=include, stream_options={"include_usage": True})
    out = moved(request, seams)
    assert out[-1] == event(DONE)
    chunks = [orjson.loads(text[6:]) for text in out[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["text"] for choice in choices] == expected[0]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", expected[1])
    tokens = len(expected[0])
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "total_tokens": 3 + tokens, "completion_tokens": tokens}


def test_after_the_last_token_a_lost_engine_is_not_missed() -> None:
    request = a_request(stream_options={"include_usage": True})
    answer = Answer(request)
    answer.fingerprint = "vllm"
    events = engine_events(request)
    out = fed(answer, events[: len(IDS)])
    assert answer.reached_end
    assert out + list(answer.conclude()) == [event(data) for data in engine_events(request, ids_asked=False)]


@pytest.mark.parametrize(
    "data",
    [
        b'{"error":{"message":"gone","code":500}}',
        b'{"id":"x","choices":[{"index":0,"text":"","finish_reason":"abort","token_ids":[]}]}',
    ],
)
def test_an_engine_that_gives_up_has_failed(data: bytes) -> None:
    with pytest.raises(EngineError):
        fed(Answer(a_request()), [data])


def test_an_error_that_is_the_clients_ends_its_stream_as_the_engine_does() -> None:
    """vLLM finds some of them only after the stream's head was sent."""
    answer = Answer(a_request())
    error = b'{"error": {"message": "Token id 600 is out of vocabulary", "type": "BadRequestError", "code": 400}}'
    assert fed(answer, [error, DONE]) == [event(error), event(DONE)]
    assert answer.finished
    assert answer.fixed
    moved_answer = Answer(a_request())
    fed(moved_answer, engine_events(a_request())[:3])
    moved_answer.resume()
    with pytest.raises(EngineError):  # what goes on elsewhere was in order where it began
        fed(moved_answer, [error])


def test_a_stop_string_in_a_chat_ends_it_with_the_engines_own_keys_in_order() -> None:
    request = a_request(CHAT, stop=["mw"])
    answer = Answer(request)
    *_, last, _done = fed(answer, engine_events(request))
    choice = orjson.loads(last[6:])["choices"][0]
    assert list(choice) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "mw")


def test_reasoning_is_not_rebuilt_from_tokens() -> None:
    answer = Answer(a_request(CHAT))
    chunk = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None, "token_ids": [5]}]}
    fed(answer, [orjson.dumps(chunk)])
    assert answer.fixed == "reasoning or tool calls"


@pytest.mark.parametrize(
    ("fields", "fixed"),
    [
        ({}, ""),
        ({"stop": ["a"], "logprobs": 1, "temperature": 0.7}, ""),
        ({"seed": 1}, ""),
        ({"seed": 1, "temperature": 0.7}, "seed"),
        ({"stop": ["a"]}, ""),
        ({"stop": ["a"], "min_tokens": 2}, "min_tokens"),
        ({"stop": [], "min_tokens": 2}, ""),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stream": False}, "stream"),
        ({"stream_options": "all"}, "stream_options"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_what_cannot_be_rebuilt_from_tokens_is_left_alone(fields: dict[str, Any], fixed: str) -> None:
    assert a_request(**fields).fixed == fixed


def test_events_come_out_whole_however_the_stream_is_cut() -> None:
    stream = b"".join(event(data) for data in engine_events(a_request())) + b": keep-alive\n\n"
    for size in (1, 2, 7, 64, len(stream)):
        reader = EventReader()
        got = [data for at in range(0, len(stream), size) for data in reader.feed(stream[at : at + size])]
        assert got == engine_events(a_request())
