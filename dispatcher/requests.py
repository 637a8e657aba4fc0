"""Requests of the OpenAI API: what the dispatcher must know of one, and what it asks an engine for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DEFAULT_MAX_TOKENS = 16
"""Of the completions API; a chat goes on until the model's limit."""
KV_SOURCE = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Of ``kv_transfer_params``: without one of these a copy hangs, and ending it ends its destination's engine core."""


class BadRequest(Exception):
    """A request that no engine need see.

    Attributes:
        message: names the field, its value and what was expected.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


def _none(value: Any) -> bool:
    return value is None


def _off(value: Any) -> bool:
    return value is None or value is False


def _zero(value: Any) -> bool:
    return value is None or value == 0


def _one(value: Any) -> bool:
    return value is None or value == 1


def _anything(value: Any) -> bool:
    return True


def _mapping(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _empty(value: Any) -> bool:
    return not value


def _stops(stop: Any) -> bool:
    """Whether these are stop strings that vLLM takes."""
    stops = [stop] if isinstance(stop, str) else stop
    return stops is None or (isinstance(stops, list) and all(isinstance(text, str) and text for text in stops))


def _texts(messages: Any) -> bool:
    """Whether a chat is text alone: images and the like are not rebuilt from tokens."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") if isinstance(message, dict) else 0 for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(content is None or isinstance(content, (str, list)) for content in contents) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    )


_SAMPLING: dict[str, Callable[[Any], bool]] = {
    "model": _anything,
    "temperature": _anything,
    "top_p": _anything,
    "top_k": _anything,
    "min_p": _anything,
    "repetition_penalty": _anything,  # over prompt and answer alike, so a seam changes nothing
    "stop_token_ids": _anything,
    "ignore_eos": _anything,
    "include_stop_str_in_output": _anything,
    "skip_special_tokens": _anything,
    "spaces_between_special_tokens": _anything,
    "logit_bias": _anything,
    "allowed_token_ids": _anything,
    "cache_salt": _anything,
    "user": _anything,
    "session_id": _anything,
    "seed": _anything,
}
"""What a resumed request repeats as it is."""

_MOVABLE: dict[str, Callable[[Any], bool]] = _SAMPLING | {
    "stream": lambda value: value is True,
    "stream_options": _mapping,
    "max_tokens": _anything,
    "min_tokens": _anything,
    "stop": _stops,
    "priority": _anything,
    "request_id": _anything,
    "return_token_ids": _anything,
    "n": _one,
    "best_of": _one,
    "echo": _off,
    "suffix": _none,
    "presence_penalty": _zero,  # over the answer alone: what was generated before a seam would count as prompt
    "frequency_penalty": _zero,
    "return_tokens_as_token_ids": _off,
    "truncate_prompt_tokens": _none,
    "use_beam_search": _off,
    "prompt_logprobs": _none,
    "response_format": _none,
    "structured_outputs": _none,
    "kv_transfer_params": _none,
    "add_special_tokens": _anything,
}
"""Field -> whether an answer with this value can be continued from its tokens; no other field may be there."""

_MOVABLE_BY_ROUTE = {
    COMPLETIONS: _MOVABLE | {"prompt": _anything, "logprobs": _anything},
    CHAT: _MOVABLE
    | {
        "messages": _texts,
        "max_completion_tokens": _anything,
        "add_generation_prompt": _anything,
        "chat_template": _anything,
        "chat_template_kwargs": _anything,
        "logprobs": _off,
        "top_logprobs": _zero,
        "tools": _empty,
        "tool_choice": lambda value: value in (None, "none"),
    },
}


def why_not_movable(route: str, fields: Mapping[str, Any]) -> str:
    """The first field that keeps an answer from being continued elsewhere; empty if none does."""
    known = _MOVABLE_BY_ROUTE[route]
    for name, value in fields.items():
        if name not in known or not known[name](value):
            return name
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        return "seed"
    if fields.get("stop") and fields.get("min_tokens"):  # which of a chunk's text comes before the minimum is not said
        return "min_tokens"
    prompt = fields.get("prompt", "")
    if isinstance(prompt, list) and not (prompt and all(isinstance(token, int) for token in prompt)):
        return "prompt"
    return ""


_KINDS = {
    "model": (str, "a text"),
    "stream": (bool, "true or false"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "priority"), (int, "a whole number")),
}
"""What the dispatcher itself reads of a body; each may be null."""


@dataclass
class ApiRequest:
    """A request for a completion or a chat.

    Attributes:
        route: `COMPLETIONS` or `CHAT`.
        fields: of its JSON body.
        body: as the client sent it.
        request_id: for the engines' logs and aborts.
        streamed: whether the answer is.
        priority: the client's.
        fixed: why its answer cannot be continued elsewhere; empty if it can.
    """

    route: str
    fields: dict[str, Any]
    body: bytes
    request_id: str
    streamed: bool
    priority: int
    fixed: str

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the answer; None: up to the model's limit."""
        if self.route == CHAT:
            for name in ("max_completion_tokens", "max_tokens"):
                if self.fields.get(name) is not None:
                    return int(self.fields[name])
            return None
        value = self.fields.get("max_tokens", DEFAULT_MAX_TOKENS)
        return None if value is None else int(value)

    @property
    def stops(self) -> list[str]:
        """Strings that end the answer."""
        stop = self.fields.get("stop")
        return [stop] if isinstance(stop, str) else list(stop or ())

    @property
    def shows_tokens(self) -> bool:
        """Whether the client sees single tokens, so that none of them may be generated anew."""
        return bool(self.fields.get("return_token_ids")) or self.fields.get("logprobs") not in (None, False)

    def engine_body(self, *, tracked: bool, priority: bool) -> bytes:
        """What an engine is asked for: byte for byte the client's body where nothing must be added.

        Args:
            tracked: ask for token ids, and leave stop strings to the dispatcher, who sees across a seam.
            priority: the engine knows priorities: the client's p becomes 2p, so that 2p - 1 lies between.
        """
        changes: dict[str, Any] = {}
        if tracked:
            changes["return_token_ids"] = True
            if self.fields.get("stop"):
                changes["stop"] = None
        if priority and self.priority != 0:
            changes["priority"] = 2 * self.priority
        return orjson.dumps(self.fields | changes) if changes else self.body

    def resumed_body(
        self, token_ids: list[int], generated: int, max_model_len: int | None, *, priority: bool
    ) -> bytes | None:
        """A completion that continues the answer after `generated` tokens; None if it may not go on.

        Args:
            token_ids: prompt and answer so far.
            generated: tokens of the answer so far.
            max_model_len: the engine's limit, needed where the client gave none.
            priority: the engine knows priorities.
        """
        most = self.max_tokens
        left = most - generated if most is not None else (max_model_len or 1 << 20) - len(token_ids)
        if left < 1:
            return None
        fields = {name: self.fields[name] for name in _SAMPLING if name in self.fields}
        fields |= {
            "prompt": token_ids,
            "max_tokens": left,
            "min_tokens": max(0, int(self.fields.get("min_tokens") or 0) - generated),
            "stream": True,
            "return_token_ids": True,
        }
        if "stream_options" in self.fields:
            fields["stream_options"] = self.fields["stream_options"]
        if self.route == COMPLETIONS and "logprobs" in self.fields:
            fields["logprobs"] = self.fields["logprobs"]
        if priority:
            fields["priority"] = 2 * self.priority - 1
        return orjson.dumps(fields)


def parse_request(route: str, body: bytes, header_priority: bytes | None, request_id: bytes) -> ApiRequest:
    """Read a request as far as the dispatcher must understand it; the engine judges the rest.

    Raises:
        BadRequest: it is no JSON object, or a field that the dispatcher needs is of the wrong type.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: expected JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"body: got a JSON {type(fields).__name__}, expected an object")
    for name in fields.keys() & _KINDS.keys():
        _expect(name, fields[name], *_KINDS[name])
    _expect_whole_transfer(fields.get("kv_transfer_params"))
    priority = fields.get("priority") or 0
    if header_priority is not None:
        try:
            priority = int(header_priority)
        except ValueError:
            raise BadRequest(f"header x-vllm-priority = {header_priority!r}: expected a whole number") from None
    streamed = fields.get("stream") is True
    return ApiRequest(
        route=route,
        fields=fields,
        body=body,
        request_id=request_id.decode("latin-1"),
        streamed=streamed,
        priority=priority,
        fixed=why_not_movable(route, fields) if streamed else "stream",
    )


def _expect_whole_transfer(params: Any) -> None:
    """Parameters with blocks come from an engine, and are whole."""
    if not isinstance(params, dict) or "remote_block_ids" not in params:
        return
    for name in KV_SOURCE:
        if params.get(name) is None:
            raise BadRequest(f"kv_transfer_params.{name}: expected beside remote_block_ids, as an engine answered it")


def _expect(name: str, value: Any, kind: type, words: str) -> None:
    if value is not None and type(value) is not kind:
        raise BadRequest(f"{name} = {value!r}: expected {words}")
