"""How long prompts are, and what their blocks are called: exact where an engine tokenises them, estimated elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from fleetpilot.dispatcher.fleet import RequestFacts
from fleetpilot.dispatcher.http.client import CallError
from fleetpilot.dispatcher.prefix_index import BLOCK_TOKENS, block_names
from fleetpilot.dispatcher.requests import CHAT, ApiRequest

if TYPE_CHECKING:
    from fleetpilot.dispatcher.http.server import Exchange
    from fleetpilot.dispatcher.service import Dispatcher

_CACHED_PROMPTS = 4_096
_SHORT_CHARACTERS = 256
"""A prompt up to this length is off by less than asking is worth, once the estimate was learned."""
_LEARNED_FROM = 8
"""Prompts that make a good estimate."""
_ASKED_AGAIN = 32
"""Of so many short prompts one is asked for, as the estimate may change."""
_DEADLINE_S = 1.0
_FIRST_CHARACTERS_PER_TOKEN = 4.0
_LEARNING_RATE = 0.05
_COMPLETION_QUESTION = ("model", "prompt", "add_special_tokens")
_CHAT_QUESTION = (
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
)
"""Fields of a request that decide on its tokens."""

Admit = Callable[["Exchange", ApiRequest, RequestFacts], None]


class Prompts:
    """Measures prompts.

    Attributes:
        characters_per_token: of prompts seen so far, for those that no engine tokenises.
    """

    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher = dispatcher
        self.characters_per_token = _FIRST_CHARACTERS_PER_TOKEN
        self._learned = 0  # prompts that it was learned from
        self._estimated = 0  # short prompts since
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()
        self._next_engine = 0

    def measure(self, exchange: Exchange, request: ApiRequest, admit: Admit) -> None:
        """Call `admit` with the facts, at once where no engine need be asked."""
        arrived_s = time.monotonic()
        prompt = request.fields.get("prompt")
        if request.route != CHAT and isinstance(prompt, list):
            token_ids = prompt if set(map(type, prompt)) <= {int} else _flat(prompt)
            admit(exchange, request, self._facts(request, token_ids, arrived_s))
            return
        if self._may_estimate(request):
            admit(exchange, request, self._estimate(request, arrived_s))
            return
        question = _question(request)
        if (known := self._known.get(question)) is not None:
            self._known.move_to_end(question)
            admit(exchange, request, self._facts(request, known, arrived_s))
        elif (engine := self._tokenizer()) is None:
            admit(exchange, request, self._estimate(request, arrived_s))
        else:
            self._dispatcher._run(self._tokenise(engine, question, exchange, request, admit, arrived_s))

    def _may_estimate(self, request: ApiRequest) -> bool:
        """Whether the prompt is short, and others have told how long such are."""
        if self._learned < _LEARNED_FROM or len(_text(request)) > _SHORT_CHARACTERS:
            return False
        self._estimated += 1
        return self._estimated % _ASKED_AGAIN != 0

    def _tokenizer(self) -> Any:
        """An engine to ask, in turn."""
        engines = [
            engine
            for engine in self._dispatcher.fleet.engines
            if engine.serves and engine.capabilities is not None and engine.capabilities.tokenize
        ]
        if not engines:
            return None
        self._next_engine += 1
        return engines[self._next_engine % len(engines)]

    async def _tokenise(
        self, engine: Any, question: bytes, exchange: Exchange, request: ApiRequest, admit: Admit, arrived_s: float
    ) -> None:
        headers = [(name, value) for name, value in exchange.headers if name == b"authorization"]
        try:
            answer = await engine.client.fetch(
                "POST", "/tokenize", question, self._dispatcher.engine_headers(headers), timeout_s=_DEADLINE_S
            )
            token_ids = orjson.loads(answer.body)["tokens"] if answer.status == 200 else None
        except (CallError, TimeoutError, ValueError, KeyError, asyncio.CancelledError):
            token_ids = None
        if token_ids is None:
            facts = self._estimate(request, arrived_s)
        else:
            facts = self._facts(request, token_ids, arrived_s)
            self._learn(request, len(token_ids))
            self._known[question] = token_ids
            while len(self._known) > _CACHED_PROMPTS:
                self._known.popitem(last=False)
        admit(exchange, request, facts)

    def _learn(self, request: ApiRequest, tokens: int) -> None:
        self._learned += 1
        ratio = len(_text(request)) / max(tokens, 1)
        rate = max(_LEARNING_RATE, 1 / self._learned)
        self.characters_per_token += rate * (ratio - self.characters_per_token)

    def _facts(self, request: ApiRequest, token_ids: list[int], arrived_s: float) -> RequestFacts:
        names = block_names(token_ids, _salt(request))
        return self._facts_of(request, max(1, len(token_ids)), names, float(BLOCK_TOKENS), arrived_s)

    def _estimate(self, request: ApiRequest, arrived_s: float) -> RequestFacts:
        text = _text(request)
        names = block_names(text, _salt(request))
        tokens = max(1, round(len(text) / max(self.characters_per_token, 0.1)))
        return self._facts_of(request, tokens, names, tokens / len(names) if names else 0.0, arrived_s)

    def _facts_of(
        self, request: ApiRequest, tokens: int, names: tuple[int, ...], tokens_per_block: float, arrived_s: float
    ) -> RequestFacts:
        name = request.fields.get("session_id")
        session, turn = self._dispatcher.fleet.turn(name) if isinstance(name, str) else (-1, 0)
        return RequestFacts(
            request_id=self._dispatcher.new_id(),
            prompt_tokens=tokens,
            prompt_blocks=names,
            tokens_per_block=tokens_per_block,
            predicted_output_tokens=0.0,
            priority=request.priority,
            session=session,
            turn=turn,
            arrived_s=arrived_s,
        )


def _question(request: ApiRequest) -> bytes:
    """What `/tokenize` is asked."""
    names = _CHAT_QUESTION if request.route == CHAT else _COMPLETION_QUESTION
    return orjson.dumps({name: request.fields[name] for name in names if name in request.fields})


def _salt(request: ApiRequest) -> tuple[object, object]:
    return request.fields.get("model"), str(request.fields.get("cache_salt"))


def _text(request: ApiRequest) -> str:
    """The prompt's text."""
    if request.route != CHAT:
        prompt = request.fields.get("prompt")
        return prompt if isinstance(prompt, str) else str(prompt)
    parts = []
    messages = request.fields.get("messages")
    for message in messages if isinstance(messages, list) else ():  # the engine says what is wrong with it
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts += [str(part.get("text", "")) for part in content if isinstance(part, dict)]
    return "\n".join(parts)


def _flat(prompts: list[Any]) -> list[int]:
    """The tokens of several prompts in one request, as one."""
    return [token for prompt in prompts if isinstance(prompt, list) for token in prompt if isinstance(token, int)]
