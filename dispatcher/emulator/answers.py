"""What an emulated engine answers with: the text of its tokens, and chunks and bodies in vLLM's shape."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from fleetpilot.dispatcher.emulator import language_model
from fleetpilot.dispatcher.emulator.protocol import Generation
from fleetpilot.dispatcher.emulator.vocabulary import END, FIRST_WORD, NAMES, WORDS, Detokenizer
from fleetpilot.dispatcher.http.server import Exchange

FINGERPRINT = "vllm-0.32.0-emulated"
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"
_FINGERPRINT_FIELD = b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"'


class Choice:
    """One answer to one prompt: all of it is known from the start, and told as its tokens come.

    Attributes:
        index: among the request's answers.
        tokens: (n,) of the answer.
        came: how many of them have come.
        finish_reason: ``stop`` or ``length``, or why it ended before.
        stop_reason: what it stopped at: a string, a token, or None for the end and for ``length``.
    """

    def __init__(
        self, generation: Generation, index: int, prompt: NDArray[np.int32], limit: int, *, mean_tokens: float
    ):
        answer = language_model.answer(
            prompt,
            limit,
            mean_tokens=mean_tokens,
            min_tokens=generation.min_tokens,
            ignore_end=generation.ignore_eos,
            stop_tokens=np.array(generation.stop_tokens, np.int32) if generation.stop_tokens else None,
            stream=generation.seed + index % generation.choices * 0x9E3779B9,
        )
        self.index = index
        self.prompt = prompt
        self.came = 0
        self.tokens, self._keys = answer
        self._silent_last = self._say_why(generation)
        self._detokenizer = Detokenizer(prompt)
        self._text: str | None = None  # where stop strings are looked for, all of it
        self._ends: list[int] = []  # how much of it there is after each token
        self._held_back = 0
        self._told = 0
        if generation.stop:
            self._look_for(generation)
        self._names = Detokenizer() if generation.logprobs is not None else None
        self._offset = 0

    def _say_why(self, generation: Generation) -> bool:
        """Why the answer ends, as far as tokens say; whether its last token has no text."""
        last = int(self.tokens[-1])
        self.stop_reason: str | int | None = None
        self.finish_reason = "length"
        if last == END and not generation.ignore_eos:
            self.finish_reason = "stop"
            return True
        if last in generation.stop_tokens and len(self.tokens) > generation.min_tokens:
            self.finish_reason, self.stop_reason = "stop", last
            return not generation.include_stop
        return False

    def _look_for(self, generation: Generation) -> None:
        """Cut the answer where the first stop string is complete."""
        parts = [self._detokenizer.add((token,)) for token in self.tokens.tolist()]
        if self._silent_last:
            parts[-1] = ""
        self._ends = np.cumsum([len(part) for part in parts]).tolist()
        self._text = "".join(parts)
        unheard = self._ends[generation.min_tokens - 1] if 0 < generation.min_tokens <= len(parts) else 0
        found: tuple[int, str] | None = None
        for stop in generation.stop:
            at = self._text.find(stop, max(0, unheard + 1 - len(stop)))
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = at + len(stop), stop
        if not generation.include_stop:
            self._held_back = max(len(stop) for stop in generation.stop) - 1
        if found is None:
            return
        end, stop = found
        count = next(i for i, told in enumerate(self._ends, 1) if told >= end)
        self.tokens = self.tokens[:count]
        self._text = self._text[: end if generation.include_stop else end - len(stop)]
        self.finish_reason, self.stop_reason = "stop", stop
        self._silent_last = False

    @property
    def ended(self) -> bool:
        """Whether all tokens have come."""
        return self.came == len(self.tokens)

    def advance(self, last: int) -> tuple[list[int], str]:
        """Tokens until `last` have come; the new ones and the text that may be told now."""
        tokens: list[int] = self.tokens[self.came : last].tolist()
        self.came = last
        if self._text is None:
            heard = tokens[:-1] if self._silent_last and self.ended else tokens
            return tokens, self._detokenizer.add(heard)
        if self.ended:
            return tokens, self.rest()
        until = self._ends[last - 1] - self._held_back
        text = self._text[self._told : until] if until > self._told else ""
        self._told = max(self._told, until)
        return tokens, text

    def rest(self) -> str:
        """The text that was held back."""
        if self._text is None:
            return ""
        until = len(self._text) if self.ended else self._ends[self.came - 1] if self.came else 0
        text = self._text[self._told : until]
        self._told = max(self._told, until)
        return text

    def scored(self, tokens: list[int], alternatives: int) -> list[tuple[str, float, list[tuple[str, float]]]]:
        """Name and log-probability of the tokens that came last, and of the alternatives to each."""
        assert self._names is not None
        scored = []
        for token, key in zip(tokens, self._keys[self.came - len(tokens) : self.came].tolist(), strict=True):
            name = self._names.add((token,)) if token < END else NAMES[token]
            score = -((key >> 40) % 4096) / 1024
            best = [(name, score)]
            for k in range(1, alternatives):
                best.append((NAMES[FIRST_WORD + (token + k) % WORDS], score - k / 2))
            scored.append((name, score, best))
        return scored

    def completion_logprobs(self, tokens: list[int], alternatives: int) -> dict[str, Any]:
        """As ``/v1/completions`` has them."""
        scored = self.scored(tokens, alternatives)
        offsets = []
        for name, _, _ in scored:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [score for _, score, _ in scored],
            "tokens": [name for name, _, _ in scored],
            "top_logprobs": [dict(best) for _, _, best in scored],
        }

    def chat_logprobs(self, tokens: list[int], alternatives: int) -> dict[str, Any]:
        """As ``/v1/chat/completions`` has them."""

        def shown(name: str, score: float) -> dict[str, Any]:
            return {"token": name, "logprob": score, "bytes": list(name.encode())}

        return {
            "content": [
                {**shown(name, score), "top_logprobs": [shown(*one) for one in best[:alternatives]]}
                for name, score, best in self.scored(tokens, max(alternatives, 1))
            ]
        }


class Answer:
    """The answer to one request of a client, streamed or whole; `on_end` is called when it is complete."""

    def __init__(self, exchange: Exchange, generation: Generation, *, mean_tokens: float):
        self.exchange = exchange
        self.generation = generation
        self.created = int(time.time())
        self.choices = [
            Choice(generation, i * generation.choices + k, prompt, limit, mean_tokens=mean_tokens)
            for i, (prompt, limit) in enumerate(zip(generation.prompts, generation.max_tokens, strict=True))
            for k in range(generation.choices)
        ]
        self.open = len(self.choices)
        self.kv_transfer_params: dict[str, Any] | None = None
        kind = "chat.completion.chunk" if generation.chat else "text_completion"
        self._head = orjson.dumps(
            {"id": generation.id, "object": kind, "created": self.created, "model": generation.model}
        )[:-1]
        self._greeted = False
        self._texts = ["" for _ in self.choices]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in self.choices]

    def advance(self, choice: Choice, last: int) -> None:
        """More tokens of a choice have come."""
        tokens, text = choice.advance(last)
        self._tell(choice, tokens, text, choice.finish_reason if choice.ended else None)

    def abort(self, choice: Choice) -> None:
        """The choice ends here."""
        choice.finish_reason, choice.stop_reason = "abort", None
        self._tell(choice, [], choice.rest(), "abort")

    def fail(self, message: str) -> None:
        """The answer ends in an error: inside the stream, or instead of a body."""
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        if not self.generation.stream:
            self.exchange.respond(500, orjson.dumps({"error": error}))
            return
        if not self._greeted:
            self.exchange.start(200, EVENT_STREAM)
        self.exchange.write(b"data: %b\n\n%b" % (json.dumps({"error": error}).encode(), DONE))
        self.exchange.finish()

    def _tell(self, choice: Choice, tokens: list[int], text: str, finish: str | None) -> None:
        generation = self.generation
        logprobs = None
        if generation.logprobs is not None:
            tell = choice.chat_logprobs if generation.chat else choice.completion_logprobs
            logprobs = tell(tokens, generation.logprobs)
        if finish is not None:
            self.open -= 1
        if generation.stream:
            self._stream(choice, tokens, text, logprobs, finish)
        else:
            self._texts[choice.index] += text
            if logprobs is not None:
                self._logprobs[choice.index].append(logprobs)
        if self.open == 0:
            self._complete()

    # --- streamed ----------------------------------------------------------------------------------------------------

    def _stream(
        self, choice: Choice, tokens: list[int], text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> None:
        generation = self.generation
        parts = []
        if not self._greeted:
            self.exchange.start(200, EVENT_STREAM)
            if generation.chat:
                parts += [self._greeting(k) for k in range(len(self.choices))]
            self._greeted = True
        first = choice.came == len(tokens)
        ids = orjson.dumps(tokens) if generation.return_token_ids and (tokens or not generation.chat) else b"null"
        said = orjson.dumps(text)
        scores = b"null" if logprobs is None else orjson.dumps(logprobs)
        if generation.chat:
            ending = (
                b"null"
                if finish is None
                else b'"%b","stop_reason":%b'
                % (
                    finish.encode(),
                    orjson.dumps(choice.stop_reason),
                )
            )
            body = (
                b'%b,"choices":[{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":%b,"token_ids":%b}]'
                % (self._head, choice.index, said, scores, ending, ids)
            )
        else:
            prompt = b"null"
            if first and generation.return_token_ids:
                prompt = orjson.dumps(choice.prompt.tolist())
            body = (
                b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b,'
                b'"prompt_token_ids":%b,"token_ids":%b}]'
                % (
                    self._head,
                    choice.index,
                    said,
                    scores,
                    b"null" if finish is None else b'"%b"' % finish.encode(),
                    b"null" if finish is None else orjson.dumps(choice.stop_reason),
                    prompt,
                    ids,
                )
            )
        if generation.continuous_usage:
            body += b',"usage":' + orjson.dumps(self._usage(len(choice.prompt), choice.came, details=generation.chat))
        if finish is not None and not generation.include_usage:
            body += _FINGERPRINT_FIELD
        if choice.came > 0:
            parts.append(b"data: %b}\n\n" % body)
        if self.open == 0:
            if generation.include_usage:
                usage = orjson.dumps(self._total_usage())
                parts.append(b'data: %b,"choices":[],"usage":%b%b}\n\n' % (self._head, usage, _FINGERPRINT_FIELD))
            parts.append(DONE)
        self.exchange.write(b"".join(parts))

    def _greeting(self, index: int) -> bytes:
        """The first event of each answer in a chat."""
        generation = self.generation
        usage = b""
        prompt = self.choices[0].prompt
        if generation.continuous_usage:
            usage = b',"usage":' + orjson.dumps(self._usage(len(prompt), 0, details=True))
        return (
            b'data: %b,"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b,"prompt_token_ids":%b,"prompt_text":null}\n\n'
            % (
                self._head,
                index,
                usage,
                orjson.dumps(prompt.tolist()) if generation.return_token_ids else b"null",
            )
        )

    @staticmethod
    def _usage(prompt_tokens: int, completion_tokens: int, *, details: bool = False) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        if details:
            usage["completion_tokens_details"] = None
        return usage

    def _total_usage(self) -> dict[str, Any]:
        prompts = sum(len(prompt) for prompt in self.generation.prompts)
        return self._usage(prompts, sum(choice.came for choice in self.choices))

    # --- whole -------------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        if self.generation.stream:
            self.exchange.finish()
            return
        usage = {**self._total_usage(), "prompt_tokens_details": None, "completion_tokens_details": None}
        body = {
            "id": self.generation.id,
            "object": "chat.completion" if self.generation.chat else "text_completion",
            "created": self.created,
            "model": self.generation.model,
            "choices": [self._whole(choice) for choice in self.choices],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
        }
        if self.generation.chat:
            ids = self.generation.prompts[0].tolist() if self.generation.return_token_ids else None
            body.update(prompt_logprobs=None, prompt_token_ids=ids, prompt_text=None)
        body.update(kv_transfer_params=self.kv_transfer_params, ec_transfer_params=None, metrics=None)
        self.exchange.respond(200, orjson.dumps(body))

    def _whole(self, choice: Choice) -> dict[str, Any]:
        """One of the choices of a body."""
        generation = self.generation
        ids = choice.tokens[: choice.came].tolist() if generation.return_token_ids else None
        logprobs: dict[str, Any] | None = None
        if generation.logprobs is not None:
            told = self._logprobs[choice.index]
            logprobs = {name: [one for part in told for one in part[name]] for name in told[0]} if told else None
        text = self._texts[choice.index]
        shown: dict[str, Any] = {"index": choice.index}
        if generation.chat:
            shown["message"] = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
        else:
            shown["text"] = text
        shown.update(
            logprobs=logprobs, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason, token_ids=ids
        )
        if not generation.chat:
            shown.update(
                prompt_logprobs=None, prompt_token_ids=choice.prompt.tolist() if generation.return_token_ids else None
            )
        shown["routed_experts"] = None
        return shown
