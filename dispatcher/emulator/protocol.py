"""What clients send to an emulated engine, checked as vLLM checks it, and the errors that it answers with."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import orjson
from numpy.typing import NDArray

from fleetpilot.dispatcher.emulator.vocabulary import VOCABULARY, tokenize
from fleetpilot.dispatcher.http.server import Exchange

MAX_CHOICES = 16_384
MAX_PROMPTS = 1_024
MAX_STOP_STRINGS = 64
DEFAULT_COMPLETION_TOKENS = 16


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of the answer.
        body: of the answer, JSON.
    """

    def __init__(
        self,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        status: int = 400,
        value: object = None,
    ):
        if value is not None:
            message = f"{message} (parameter={param}, value={value})"
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param, status)


def error_body(message: str, kind: str, param: str | None, status: int) -> bytes:
    """An error as vLLM writes it."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def invalid(kind: str, place: tuple[str | int, ...], message: str, value: object, **context: object) -> NoReturn:
    """Refuse a field in the words of vLLM's validation.

    Raises:
        RequestError: always.
    """
    where = ".".join(str(part) for part in ("body", *place))
    shown: dict[str, object] = {"type": kind, "loc": where, "msg": message, "input": _shown(value)}
    if context:
        shown["ctx"] = context
    raise RequestError(f"1 validation error:\n  {shown}", "Bad Request", where)


def _shown(value: object) -> object:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return value


@dataclass
class Generation:
    """One request of a client, for one or more answers.

    Attributes:
        chat: whether it came by ``/v1/chat/completions``.
        id: as the client sees it.
        model: as the client named it.
        prompts: the token ids of each.
        max_tokens: of each prompt's answers.
        choices: answers to each prompt.
        stop: strings that end an answer.
        stop_tokens: tokens that do.
        logprobs: alternatives per token, or None for no log-probabilities.
        kv: the client's ``kv_transfer_params``, or empty.
    """

    chat: bool
    id: str
    model: str
    prompts: list[NDArray[np.int32]]
    max_tokens: list[int]
    min_tokens: int
    choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stop: list[str]
    stop_tokens: list[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: int | None
    return_token_ids: bool
    priority: int
    seed: int
    salt: bytes
    kv: dict[str, Any]


def read_body(exchange: Exchange) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        RequestError: it is none.
    """
    content_type = (exchange.header(b"content-type") or b"").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise RequestError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request"
        )
    if not exchange.body:
        invalid("missing", (), "Field required", None)
    try:
        body = orjson.loads(exchange.body)
    except orjson.JSONDecodeError:
        body = _loads(exchange.body)
    if not isinstance(body, dict):
        invalid(
            "model_attributes_type", (), "Input should be a valid dictionary or object to extract fields from", body
        )
    return body


def _loads(content: bytes) -> object:
    """As Python's own parser reads it, whose words vLLM's errors have."""
    try:
        return json.loads(content)
    except UnicodeDecodeError:
        raise RequestError("There was an error parsing the body", "Bad Request") from None
    except json.JSONDecodeError as error:
        invalid("json_invalid", (error.pos,), "JSON decode error", {}, error=error.msg)


def read_completion(exchange: Exchange, model: str, max_model_len: int) -> Generation:
    """A request of ``/v1/completions``.

    Raises:
        RequestError: vLLM would refuse it.
    """
    body = read_body(exchange)
    wanted = _whole(body, "max_tokens")
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        _value_error("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompts = _prompts(prompt)
    max_tokens = DEFAULT_COMPLETION_TOKENS if wanted is None else wanted
    generation = _generation(exchange, body, model, prompts, chat=False)
    logprobs = _whole(body, "logprobs")
    if logprobs is not None and logprobs < -1:
        _value_error("`logprobs` must be a positive value or -1.", "logprobs")
    generation.logprobs = logprobs
    if _flag(body, "echo"):
        raise RequestError("echo: emulated engines do not echo prompts", param="echo")
    text = isinstance(prompt, str) or isinstance(prompt[0], str)
    generation.max_tokens = [_limit(len(p), max_tokens, max_model_len, "max_tokens", text=text) for p in prompts]
    _check_sampling(generation, body)
    return generation


def read_chat(exchange: Exchange, model: str, max_model_len: int) -> Generation:
    """A request of ``/v1/chat/completions``.

    Raises:
        RequestError: vLLM would refuse it.
    """
    body = read_body(exchange)
    prompt = tokenize(chat_text(body))
    generation = _generation(exchange, body, model, [prompt], chat=True)
    wanted = _whole(body, "max_tokens")
    newer = _whole(body, "max_completion_tokens")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    wanted = wanted if newer is None else newer
    top = _whole(body, "top_logprobs") or 0
    generation.logprobs = top if _flag(body, "logprobs") else None
    if top and generation.logprobs is None:
        _value_error("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    generation.max_tokens = [_limit(len(prompt), wanted, max_model_len, name, text=True)]
    _check_sampling(generation, body)
    return generation


def chat_text(body: Mapping[str, Any], *, generate: bool = True) -> str:
    """The text that the messages of a chat are turned into, and the beginning of the answer where it is to `generate`.

    Raises:
        RequestError: they are no messages.
    """
    messages = body.get("messages")
    if messages is None:
        invalid("missing", ("messages",), "Field required", dict(body))
    if not isinstance(messages, list):
        invalid("list_type", ("messages",), "Input should be a valid list", messages)
    if not messages:
        raise RequestError(
            "Cannot apply chat template to an empty conversation. Provide at least one message.", "BadRequestError"
        )
    lines = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            invalid("missing", ("messages", i, "role"), "Field required", message)
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        lines.append(f"<|{message['role']}|>\n{content or ''}\n")
    return "".join(lines) + ("<|assistant|>\n" if generate else "")


def _generation(
    exchange: Exchange, body: Mapping[str, Any], model: str, prompts: list[NDArray[np.int32]], *, chat: bool
) -> Generation:
    """The fields that both routes have."""
    named = body.get("model")
    if named is not None and not isinstance(named, str):
        invalid("string_type", ("model",), "Input should be a valid string", named)
    if named is not None and named != model:
        raise RequestError(
            f"The model `{named}` does not exist. Valid aliases: {model}.", "NotFoundError", "model", 404
        )
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options and not stream:
        _value_error("Stream options can only be defined when `stream=True`.", "stream_options")
    if options is not None and not isinstance(options, dict):
        invalid("model_attributes_type", ("stream_options",), "Input should be a valid dictionary", options)
    options = options or {}
    include_usage = _flag(options, "include_usage")
    kv = body.get("kv_transfer_params")
    if kv is not None and not isinstance(kv, dict):
        invalid("dict_type", ("kv_transfer_params",), "Input should be a valid dictionary", kv)
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= 128 and not set(salt) & set("@/\\\0")):
        message = (
            "must be a non-empty string if provided"
            if not salt or not isinstance(salt, str)
            else ("must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL")
        )
        _value_error(f"Parameter 'cache_salt' {message}.", "cache_salt")
    own_id = exchange.header(b"x-request-id")
    given_id = own_id.decode("latin-1") if own_id is not None else body.get("request_id") or secrets.token_hex(16)
    choices = _whole(body, "n")
    return Generation(
        chat=chat,
        id=f"{'chatcmpl' if chat else 'cmpl'}-{given_id}",
        model=model,
        prompts=prompts,
        max_tokens=[],
        min_tokens=_whole(body, "min_tokens") or 0,
        choices=1 if choices is None else choices,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and _flag(options, "continuous_usage_stats"),
        stop=_stop_strings(body),
        stop_tokens=read_tokens(body.get("stop_token_ids") or [], ("stop_token_ids",)),
        include_stop=_flag(body, "include_stop_str_in_output"),
        ignore_eos=_flag(body, "ignore_eos"),
        logprobs=None,
        return_token_ids=_flag(body, "return_token_ids"),
        priority=_priority(exchange, body),
        seed=_whole(body, "seed") or 0,
        salt=(salt or "").encode(),
        kv=kv or {},
    )


def _limit(prompt_tokens: int, wanted: int | None, max_model_len: int, name: str, *, text: bool) -> int:
    """How many tokens may be generated after the prompt."""
    if wanted is not None and wanted > max_model_len:
        raise RequestError(
            f"{name}={wanted} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            param=name,
            value=wanted,
        )
    if prompt_tokens > max_model_len:
        if text:  # vLLM's tokenizer goes no further
            prompt_tokens = max_model_len + 1
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{'at least ' if text else ''}{prompt_tokens} input tokens, "
            "which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            param="input_tokens",
            value=prompt_tokens,
        )
    room = max_model_len - prompt_tokens
    return room if wanted is None else min(room, wanted)


def _check_sampling(generation: Generation, body: Mapping[str, Any]) -> None:
    """The ranges of sampling parameters."""
    wanted = min(generation.max_tokens)
    if wanted < 1:
        raise RequestError(f"max_tokens must be at least 1, got {wanted}.", param="max_tokens", value=wanted)
    if generation.min_tokens < 0:
        raise RequestError(f"min_tokens must be greater than or equal to 0, got {generation.min_tokens}.")
    if generation.min_tokens > wanted:
        raise RequestError(
            f"min_tokens must be less than or equal to max_tokens={wanted}, got {generation.min_tokens}."
        )
    if generation.choices < 1:
        raise RequestError(f"n must be at least 1, got {generation.choices}.")
    if generation.choices > MAX_CHOICES:
        raise RequestError(
            f"n must be at most {MAX_CHOICES}, got {generation.choices}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    if generation.choices > 1 and _number(body, "temperature") == 0:
        raise RequestError(f"n must be 1 when using greedy sampling, got {generation.choices}.")
    for name, low, high, words in (
        ("temperature", 0.0, 1e308, "must be non-negative"),
        ("temperature", 0.0, 2.0, "must be in [0, 2]"),
        ("presence_penalty", -2.0, 2.0, "must be in [-2, 2]"),
        ("frequency_penalty", -2.0, 2.0, "must be in [-2, 2]"),
        ("top_p", 1e-12, 1.0, "must be in (0, 1]"),
        ("min_p", 0.0, 1.0, "must be in [0, 1]"),
    ):
        value = _number(body, name)
        if value is not None and not low <= value <= high:
            param = name if name == "temperature" else None
            value = float(value)
            raise RequestError(f"{name} {words}, got {value}.", param=param, value=value if param else None)


def _value_error(message: str, field: str) -> NoReturn:
    raise RequestError(f"{message} (parameter={field})", param=field)


def _prompts(prompt: object) -> list[NDArray[np.int32]]:
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if not isinstance(prompt, list):
        invalid("string_type", ("prompt",), "Input should be a valid string", prompt)
    if prompt and isinstance(prompt[0], int) and not isinstance(prompt[0], bool):
        return [np.array(read_tokens(prompt, ("prompt",)), np.int32)]
    if len(prompt) > MAX_PROMPTS:
        _value_error(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MAX_PROMPTS}. To increase this "
            "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    prompts = []
    for i, part in enumerate(prompt):
        if isinstance(part, str) and part:
            prompts.append(tokenize(part))
        elif isinstance(part, list) and part:
            prompts.append(np.array(read_tokens(part, ("prompt", i)), np.int32))
        elif isinstance(part, str | list):
            raise RequestError("The decoder prompt cannot be empty", param="prompt")
        else:
            invalid("string_type", ("prompt", i), "Input should be a valid string", part)
    if not prompts:
        raise RequestError("You must pass at least one prompt")
    return prompts


def read_tokens(values: object, place: tuple[str | int, ...]) -> list[int]:
    """A list of token ids.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(values, list):
        invalid("list_type", place, "Input should be a valid list", values)
    for i, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool):
            invalid("int_type", (*place, i), "Input should be a valid integer", value)
        if value < 0:
            invalid("greater_than_equal", (*place, i), "Input should be greater than or equal to 0", value, ge=0)
        if value >= VOCABULARY:
            raise RequestError(f"Token id {value} is out of vocabulary")
    return values


def _stop_strings(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop")
    if stop is None:
        return []
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        invalid("string_type", ("stop",), "Input should be a valid string", stop)
    if len(stop) > MAX_STOP_STRINGS:
        invalid("too_long", ("stop",), f"List should have at most {MAX_STOP_STRINGS} items", stop)
    for i, text in enumerate(stop):
        if not isinstance(text, str):
            invalid("string_type", ("stop", i), "Input should be a valid string", text)
        if not text:
            raise RequestError("stop cannot contain an empty string.")
    return stop


def _priority(exchange: Exchange, body: Mapping[str, Any]) -> int:
    """The header goes before the body; one that is no number is ignored."""
    own = _whole(body, "priority") or 0
    header = exchange.header(b"x-vllm-priority")
    if header is not None:
        with contextlib.suppress(ValueError):
            own = int(header)
    return max(-(2**31), min(own, 2**31 - 1))


def _field(body: Mapping[str, Any], name: str, holds: Callable[[Any], bool], kind: str, message: str) -> Any:
    value = body.get(name)
    if value is not None and not holds(value):
        invalid(kind, (name,), message, value)
    return value


def _whole(body: Mapping[str, Any], name: str) -> int | None:
    """As vLLM takes whole numbers: also as texts, and as floats without a fraction."""
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float):
        if not value.is_integer():
            message = "Input should be a valid integer, got a number with a fractional part"
            invalid("int_from_float", (name,), message, value)
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            message = "Input should be a valid integer, unable to parse string as an integer"
            invalid("int_parsing", (name,), message, value)
    invalid("int_type", (name,), "Input should be a valid integer", value)


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
        return value
    invalid("float_type", (name,), "Input should be a valid number", value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        invalid("bool_type", (name,), "Input should be a valid boolean", value)
    return bool(value)
