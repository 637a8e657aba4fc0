"""How long prompts are, and what their blocks are called: exact where an engine tokenises them, estimated elsewhere."""

from __future__ import annotations

import asyncio
import itertools
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
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()
        self._sessions: OrderedDict[str, list[int]] = OrderedDict()
        self._next_engine = 0
        self._numbers = itertools.count()

    def measure(self, exchange: Exchange, request: ApiRequest, admit: Admit) -> None:
        """Call `admit` with the facts, at once where no engine need be asked."""
        prompt = request.fields.get("prompt")
        if request.route != CHAT and isinstance(prompt, list):
            token_ids = prompt if all(isinstance(token, int) for token in prompt) else _flat(prompt)
            admit(exchange, request, self._facts(request, token_ids))
            return
        question = _question(request)
        if (known := self._known.get(question)) is not None:
            self._known.move_to_end(question)
            admit(exchange, request, self._facts(request, known))
        elif (engine := self._tokenizer()) is None:
            admit(exchange, request, self._estimate(request))
        else:
            self._dispatcher._run(self._tokenise(engine, question, exchange, request, admit))

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
        self, engine: Any, question: bytes, exchange: Exchange, request: ApiRequest, admit: Admit
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
            facts = self._estimate(request)
        else:
            facts = self._facts(request, token_ids)
            self._learn(request, len(token_ids))
            self._known[question] = token_ids
            while len(self._known) > _CACHED_PROMPTS:
                self._known.popitem(last=False)
        admit(exchange, request, facts)

    def _learn(self, request: ApiRequest, tokens: int) -> None:
        ratio = len(_text(request)) / max(tokens, 1)
        self.characters_per_token += _LEARNING_RATE * (ratio - self.characters_per_token)

    def _facts(self, request: ApiRequest, token_ids: list[int]) -> RequestFacts:
        names = block_names(token_ids, _salt(request))
        return self._facts_of(request, max(1, len(token_ids)), names, float(BLOCK_TOKENS))

    def _estimate(self, request: ApiRequest) -> RequestFacts:
        text = _text(request)
        names = block_names(text, _salt(request))
        tokens = max(1, round(len(text) / max(self.characters_per_token, 0.1)))
        return self._facts_of(request, tokens, names, tokens / len(names) if names else 0.0)

    def _facts_of(
        self, request: ApiRequest, tokens: int, names: tuple[int, ...], tokens_per_block: float
    ) -> RequestFacts:
        session, turn = self._session(request)
        return RequestFacts(
            request_id=str(next(self._numbers)),
            prompt_tokens=tokens,
            prompt_blocks=names,
            tokens_per_block=tokens_per_block,
            predicted_output_tokens=0.0,
            priority=request.priority,
            session=session,
            turn=turn,
            arrived_s=time.monotonic(),
        )

    def _session(self, request: ApiRequest) -> tuple[int, int]:
        """Number of the client's session, and the turn within it; -1 and 0 for none."""
        name = request.fields.get("session_id")
        if not isinstance(name, str):
            return -1, 0
        if name not in self._sessions:
            self._sessions[name] = [len(self._sessions), -1]
        self._sessions[name][1] += 1
        session, turn = self._sessions[name]
        return session, turn


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
    for message in request.fields.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts += [str(part.get("text", "")) for part in content if isinstance(part, dict)]
    return "\n".join(parts)


def _flat(prompts: list[Any]) -> list[int]:
    """The tokens of several prompts in one request, as one."""
    return [token for prompt in prompts if isinstance(prompt, list) for token in prompt if isinstance(token, int)]
