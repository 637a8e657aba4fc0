"""A streamed answer that can go on at another engine: its tokens, its text, and the client's stream made of them.

The engine's chunks are passed on as they are, less the token ids that the client did not ask for. After a seam the
chunks come from another engine's completion of prompt and answer so far, and are made to look like those before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import orjson

from fleetpilot.dispatcher.http.sse import DONE, event
from fleetpilot.dispatcher.requests import CHAT, ApiRequest


class EngineError(Exception):
    """The engine reported an error inside a stream."""


class StopStrings:
    """Finds stop strings in an answer as vLLM does, and holds back what may become one.

    vLLM's rules (vllm/v1/engine/detokenizer.py): of several matches the one that ends first counts; the longest
    string's length less one is held back, nothing if stop strings are to be sent.
    """

    def __init__(self, stops: list[str], include: bool):
        self._stops = stops
        self._include = include
        self._held = max(map(len, stops)) - 1 if stops and not include else 0
        self._text = ""
        self._sent = 0

    def feed(self, text: str, *, last: bool) -> tuple[str, str | None]:
        """More of the answer.

        Args:
            text: what is new.
            last: it ends here.

        Returns:
            What may be sent now, and the stop string that ends the answer, if one does.
        """
        if not self._stops:
            return text, None
        self._text += text
        stop = self._match(len(text))
        end = len(self._text)
        if not (last or stop):
            end = max(self._sent, end - self._held)
        sent = self._text[self._sent : end]
        self._sent = end
        return sent, stop

    def _match(self, new: int) -> str | None:
        """The stop string that ends first in what is new; the text is cut there."""
        best, best_at, best_end = None, 0, sys.maxsize
        for stop in self._stops if new else ():
            at = self._text.find(stop, max(0, len(self._text) + 1 - new - len(stop)))
            if at >= 0 and at + len(stop) < best_end:
                best, best_at, best_end = stop, at, at + len(stop)
        if best is not None:
            self._text = self._text[: best_end if self._include else best_at]
        return best


class Answer:
    """A streamed answer.

    Args:
        request: what was asked for; it can be moved.

    Attributes:
        prompt_ids: token ids of the prompt; empty until the first chunk came.
        output_ids: of the answer so far.
        finished: nothing more comes.
        fixed: why it cannot be continued elsewhere after all; empty if it can.
        seams: how often it went on at another engine.
        reached_end: its last token came; what remains is the usage, if asked for.
        finish_reason: why it ended; empty before.
        stopped: a stop string ended it, of which the engine does not know.
        fingerprint: of the engines, which the last chunk carries.
    """

    def __init__(self, request: ApiRequest):
        self.prompt_ids: list[int] = []
        self.output_ids: list[int] = []
        self.finished = False
        self.fixed = request.fixed
        self.seams = 0
        self.reached_end = False
        self.finish_reason = ""
        self.stopped = False
        self.fingerprint: str | None = None
        self._chat = request.route == CHAT
        self._shows_ids = bool(request.fields.get("return_token_ids"))
        self._shows_tokens = request.shows_tokens
        options = request.fields.get("stream_options") or {}
        self._usage = bool(options.get("include_usage"))
        self._usage_sent = False
        self._usage_details: dict[str, Any] = {}  # fields of a chat's usage that a completion's has not
        self._stops = StopStrings(request.stops, bool(request.fields.get("include_stop_str_in_output")))
        self._head: dict[str, Any] = {}  # id, object, created and model of the client's stream
        self._whole_tokens = 0  # tokens whose text is complete, as far as is known
        self._is_sure = True  # that it is: of a chunk of several tokens the last ones may have no text yet
        self._whole_alone: set[int] = set()  # tokens that came alone and had text: they end no character halfway
        self._tokens_length = 0  # characters of the tokens that log-probabilities were sent for
        self._kept_tokens = 0  # of the answer at the last seam
        self._kept_length = 0  # `_tokens_length` then
        self._again: list[int] = []  # tokens that the client saw before the seam, to come again behind it

    @property
    def is_whole(self) -> bool:
        """Whether no character is incomplete, for certain."""
        return self._is_sure and self._whole_tokens == len(self.output_ids)

    def resume(self) -> list[int]:
        """The answer goes on at another engine: the token ids to continue, prompt and answer so far.

        Tokens of an incomplete character are left out, to be generated anew: an engine whose prompt ends inside a
        character sends the text of the whole prompt with it.
        """
        if self._shows_tokens:
            self._again = self.output_ids[self._whole_tokens :] + self._again
        del self.output_ids[self._whole_tokens :]
        self.seams += 1
        self._kept_tokens = len(self.output_ids)
        self._kept_length = self._tokens_length
        return self.prompt_ids + self.output_ids

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of an engine's event; yields the client's events.

        Raises:
            EngineError: the event is an error, or ends the answer because the engine gave it up.
        """
        if self.finished:
            return
        if data == DONE:
            self.finished = True
            yield event(DONE)
            return
        chunk = orjson.loads(data)
        if "error" in chunk:
            if self.seams or not _is_the_clients(chunk["error"]):
                raise EngineError(str(chunk["error"]))
            self.fixed = "refused"
            yield event(data)
            return
        if any(choice["finish_reason"] == "abort" for choice in chunk["choices"]):
            raise EngineError("the engine aborted the request")
        if not self._head:
            self._head = {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        if self.seams:
            chunk |= self._head
        if usage := chunk.get("usage"):
            self._make_up(usage, ends=not chunk["choices"])
        self._usage_sent = not chunk["choices"]
        stop = None
        for number, choice in enumerate(chunk["choices"]):
            chunk["choices"][number], stop = self._take(chunk, choice)
        if stop is not None and not self._usage and self.fingerprint is not None:
            chunk["system_fingerprint"] = self.fingerprint
        yield event(orjson.dumps(chunk))
        if stop is not None:
            self.stopped = True
            yield from self.conclude()

    def conclude(self) -> Iterator[bytes]:
        """What follows the last token, where the engine does not send it."""
        self.finished = True
        if self._usage and not self._usage_sent:
            last = self._head | {"choices": [], "usage": self._usage_now(len(self.output_ids))}
            if self.fingerprint is not None:
                last["system_fingerprint"] = self.fingerprint
            yield event(orjson.dumps(last))
        yield event(DONE)

    def _take(self, chunk: dict[str, Any], choice: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """Note what a choice brings: it as the client's, and the stop string that ends the answer if one does."""
        prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt_ids and not self.prompt_ids:
            self.prompt_ids = prompt_ids
        token_ids = choice.get("token_ids") or []
        text = _text_of(choice)
        if text is None:
            self.fixed = self.fixed or "reasoning or tool calls"
        self._note_tokens(token_ids, bool(text))
        if self.seams:
            self._leave_out_what_came_before(choice, token_ids)
        if logprobs := choice.get("logprobs"):
            self._note_logprobs(logprobs)
        if self.seams:
            choice = _chat_choice(choice) if self._chat else choice | {"prompt_token_ids": None}
        if not self._shows_ids:
            _hide(chunk, "prompt_token_ids")
            _hide(choice, "prompt_token_ids")
            _hide(choice, "token_ids")
        self.reached_end = choice["finish_reason"] is not None
        sent, stop = self._stops.feed(text or "", last=self.reached_end)
        if text is not None and sent != text:
            _set_text(choice, sent)
        if stop is not None:
            choice = _stopped_by(stop, choice)
        self.finish_reason = choice["finish_reason"] or ""
        return choice, stop

    def _note_tokens(self, token_ids: list[int], has_text: bool) -> None:
        if has_text and len(token_ids) == 1 and self.is_whole:
            self._whole_alone.add(token_ids[0])
        self.output_ids += token_ids
        if has_text or not token_ids:
            self._whole_tokens = len(self.output_ids)
            self._is_sure = len(token_ids) < 2 or token_ids[-1] in self._whole_alone

    def _leave_out_what_came_before(self, choice: dict[str, Any], token_ids: list[int]) -> None:
        """Tokens that the client saw before the seam are not shown again."""
        again = min(len(self._again), len(token_ids))
        if not again:
            return
        if token_ids[:again] != self._again[:again]:
            self.fixed = "tokens of an incomplete character came out differently"
            raise EngineError(self.fixed)
        del self._again[:again]
        choice["token_ids"] = token_ids[again:]
        if logprobs := choice.get("logprobs"):
            for name in logprobs:
                del logprobs[name][:again]

    def _note_logprobs(self, logprobs: dict[str, Any]) -> None:
        """Offsets of a completion's tokens: their sum of characters, from the answer's start and not the seam's."""
        if "tokens" not in logprobs:
            return
        if self.seams:
            logprobs["text_offset"] = [offset + self._kept_length for offset in logprobs["text_offset"]]
        self._tokens_length += sum(map(len, logprobs["tokens"]))

    def _make_up(self, usage: dict[str, Any], *, ends: bool) -> None:
        """Usage behind a seam is of the whole answer, with the fields that it had before."""
        if self.seams:
            usage |= self._usage_now(self._kept_tokens + usage["completion_tokens"])
            if not ends:
                usage |= self._usage_details
        elif not ends:
            self._usage_details = {name: value for name, value in usage.items() if name.endswith("_details")}

    def _usage_now(self, completion_tokens: int) -> dict[str, Any]:
        prompt_tokens = len(self.prompt_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }


def _is_the_clients(error: Any) -> bool:
    """Whether an error inside a stream says that the request is wrong, which may be found after the head was sent."""
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, int) and 400 <= code < 500


def _text_of(choice: dict[str, Any]) -> str | None:
    """The text that a chunk adds; None where it adds what is not text: reasoning, tool calls."""
    if "delta" not in choice:
        return choice["text"]  # type: ignore[no-any-return]
    delta = choice["delta"]
    if any(value for name, value in delta.items() if name not in ("role", "content")):
        return None
    return delta.get("content") or ""


def _set_text(choice: dict[str, Any], text: str) -> None:
    if "delta" in choice:
        choice["delta"]["content"] = text
    else:
        choice["text"] = text


def _hide(holder: dict[str, Any], name: str) -> None:
    if name in holder:
        holder[name] = None


def _stopped_by(stop: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The choice with the reason of its end, which a chat's has before the token ids."""
    behind = {} if "stop_reason" in choice else {"token_ids": choice.pop("token_ids", None)}
    return choice | {"finish_reason": "stop", "stop_reason": stop} | behind


def _chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A completion's choice in the shape of a chat's."""
    ends = choice["finish_reason"] is not None
    return {
        "index": choice["index"],
        "delta": {"content": choice["text"]},
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
        **({"stop_reason": choice["stop_reason"]} if ends else {}),
        "token_ids": choice["token_ids"],
    }
