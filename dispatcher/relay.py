"""One client's request, from its arrival to the last byte of its answer."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fleetpilot.dispatcher.answer import Answer, EngineError
from fleetpilot.dispatcher.engine import Engine
from fleetpilot.dispatcher.fleet import RequestFacts
from fleetpilot.dispatcher.http.client import Call, CallError
from fleetpilot.dispatcher.http.server import Exchange, Headers, error_body
from fleetpilot.dispatcher.http.sse import EventReader, event
from fleetpilot.dispatcher.requests import COMPLETIONS, ApiRequest
from fleetpilot.fleet.view import NONE, REJECT

if TYPE_CHECKING:
    from fleetpilot.dispatcher.migration import Migration
    from fleetpilot.dispatcher.service import Dispatcher
    from fleetpilot.dispatcher.tracing import RequestSpan

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-vllm-priority", b"x-request-id"}
_RETRIED = frozenset((500, 502, 503, 504))
"""Answers of an engine in trouble, or of one that admits no more (503): another may do better."""


class Relay:
    """A request on its way through the dispatcher.

    Args:
        dispatcher: whose fleet serves it.
        exchange: with the client.
        request: what it asks for.
        facts: what policies read of it.
        span: of its trace; None for none.

    Attributes:
        answer: the streamed answer where it can go on elsewhere, else None.
        slot: of the engine that serves it, `NONE` for none.
        moving: it takes part in a migration.
        ended: nothing more happens.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        exchange: Exchange,
        request: ApiRequest,
        facts: RequestFacts,
        span: RequestSpan | None = None,
    ):
        self.dispatcher = dispatcher
        self.exchange = exchange
        self.request = request
        self.facts = facts
        self.span = span
        self.answer = Answer(request) if request.streamed and not request.fixed and dispatcher.tracks else None
        self.slot = NONE
        self.moving = False
        self.ended = False
        self.tokens = 0  # streamed, as the ledger counts them
        self.first_token_s = 0.0  # when the first came, monotonic clock
        self.last_token_s = 0.0  # when its engine last sent some
        self.migrations = 0  # that it was taken up after
        self.downtime_s = 0.0  # of all of them
        self.moved_by: Migration | None = None  # until its destination's first token
        self.homeless_since_s = 0.0
        self._attempt: _Attempt | None = None
        self._tried: set[int] = set()
        self._failovers = 0
        exchange.on_closed = self._client_left
        exchange.on_drain = self._client_reads_again

    @property
    def engine(self) -> Engine:
        """That serves it now."""
        return self.dispatcher.fleet.engines[self.slot]

    @property
    def authorization(self) -> Headers:
        """The client's, for what is asked of engines on its behalf."""
        return [(name, value) for name, value in self.exchange.headers if name == b"authorization"]

    @property
    def movable(self) -> bool:
        """Whether it decodes, and could go on elsewhere."""
        answer = self.answer
        return (
            answer is not None
            and not (self.moving or self.ended or answer.reached_end or answer.finished or answer.fixed)
            and len(answer.output_ids) > 0
            and bool(answer.prompt_ids)
        )

    @property
    def can_go_elsewhere(self) -> bool:
        """Whether its engine could be left now: it does not move, and more than the end of its answer is to come."""
        return not self.moving and (self.answer is None or not self.answer.reached_end)

    # placing

    def place(self) -> bool:
        """Ask the policy and send the request; False if it must wait for an engine."""
        dispatcher = self.dispatcher
        overdue = time.monotonic() - self.facts.arrived_s >= dispatcher.config.max_hold_s
        first = not self._tried
        slot = dispatcher.fleet.choose_dispatch(self.facts, not overdue, frozenset(self._tried), may_reject=first)
        if slot == REJECT:
            self.fail(429, "the policy rejects the request: it would miss its latency targets", "rejected")
            return True
        if slot == NONE and self._tried:
            slot = dispatcher.fleet.choose_dispatch(self.facts, not overdue)
        if slot != NONE:
            self._send(slot)
            return True
        if overdue:
            self.fail(503, f"no engine could take the request within {dispatcher.config.max_hold_s:g} s")
            return True
        return False

    def _send(self, slot: int) -> None:
        """Send it, booked there, for the first time, or again to another engine while the client has nothing yet."""
        engine = self.dispatcher.fleet.engines[slot]
        if self.answer is not None and engine.capabilities is not None:
            self.answer.fingerprint = engine.capabilities.fingerprint
        knows_priorities = engine.capabilities is not None and engine.capabilities.priority is not False
        body = self.request.engine_body(tracked=self.answer is not None, priority=knows_priorities)
        self.dispatcher.counts["dispatched"] += 1
        self._serve_at(slot, self.request.route, body)

    def _serve_at(self, slot: int, route: str, body: bytes, *, resumes: bool = False, streamed_tokens: int = 0) -> None:
        self.slot = slot
        self._tried.add(slot)
        self._note("sent")
        self.dispatcher.serves(self, streamed_tokens)
        self._attempt = _Attempt(self, self.dispatcher.fleet.engines[slot], route, body, resumes=resumes)

    def _forward_headers(self) -> Headers:
        headers = [(name, value) for name, value in self.exchange.headers if name not in _NOT_FORWARDED]
        headers.append((b"x-request-id", self.request.request_id.encode()))
        if self.span is not None:
            headers = list(self.span.forwarded(headers))
        return self.dispatcher.engine_headers(headers)

    def _note(self, what: str) -> None:
        if self.span is not None:
            self.span.note(what, self.slot)

    # the answer comes

    def on_start(self, status: int, headers: Headers) -> bool:
        """The engine's head; False if its answer is not the client's."""
        if self.exchange.started:
            if status != 200:
                self.engine_broke(f"answered {status} to a request that was sent again")
            return status == 200
        if status in _RETRIED:
            self.engine_failed(f"answered {status}", admission=status == 503, headers=headers)
            if self._retry():
                return False
        if status != 200:
            self.answer = None
        kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP]
        if self.answer is not None:
            kept = [(name, value) for name, value in kept if name != b"content-length"]
        self.exchange.start(status, kept)
        return True

    def on_data(self, data: bytes, events: EventReader | None) -> None:
        """A part of the engine's body."""
        if events is None:
            self._count(self.tokens + data.count(b"data: ") if self.request.streamed else 0)
            self.exchange.write(data)
        else:
            self._on_events(data, events)
        if self.exchange.paused and self._attempt is not None:
            self._attempt.call.pause()

    def _on_events(self, data: bytes, events: EventReader) -> None:
        answer = self.answer
        assert answer is not None
        out: list[bytes] = []
        trouble = ""
        try:
            for text in events.feed(data):
                out += answer.feed(text)
        except (EngineError, ValueError, KeyError, TypeError) as error:
            trouble = f"stream: {type(error).__name__}: {error}"
        self.exchange.write(b"".join(out))
        self._count(len(answer.output_ids))
        if trouble:
            self.engine_broke(trouble)
            return
        if answer.finished and not self.ended:
            if answer.stopped and self._attempt is not None:
                self._attempt.call.cancel()  # the engine does not know of the stop string
            self._finish()

    def _count(self, tokens: int) -> None:
        """So many tokens of the answer have come."""
        fleet = self.dispatcher.fleet
        self.last_token_s = time.monotonic()
        fleet.heard_s[self.slot] = self.last_token_s
        if self.moved_by is not None:
            self.dispatcher.on_resumed(self, self.moved_by)
            self._note("moved")
        if tokens > self.tokens:
            if not self.tokens:
                self.first_token_s = self.last_token_s
                self._note("first token")
            fleet.ledger.tokens(self.facts.request_id, tokens - self.tokens)
            self.tokens = tokens

    def on_end(self) -> None:
        """The engine's answer is complete."""
        if self.answer is not None and not self.answer.finished:
            self.engine_broke("the stream ended before the answer")
            return
        self._finish()

    def _finish(self) -> None:
        self.engine.failures = 0
        self.exchange.finish()
        self._end("finished")

    def outcome(self) -> dict[str, Any]:
        """What became of it, for the decision log."""
        answer = self.answer
        streamed = self.request.streamed and self.tokens > 0
        between_s = (self.last_token_s - self.first_token_s) / (self.tokens - 1) if self.tokens > 1 else None
        return {
            "request": self.facts.request_id,
            "request_id": self.request.request_id,
            "instance": None if self.slot == NONE else self.slot,
            "ttft_s": self.first_token_s - self.facts.arrived_s if streamed else None,
            "tpot_s": between_s if streamed else None,
            "duration_s": time.monotonic() - self.facts.arrived_s,
            "prompt_tokens": len(answer.prompt_ids) if answer and answer.prompt_ids else self.facts.prompt_tokens,
            "output_tokens": self.tokens if streamed else None,
            "finish_reason": (answer.finish_reason or None) if answer else None,
            "migrations": self.migrations,
            "downtime_s": self.downtime_s,
            "failovers": self._failovers,
        }

    def facts_now(self) -> RequestFacts:
        """What policies read of it when it is to go on elsewhere: a request with a prompt of all it has so far."""
        if self.answer is None or not self.answer.prompt_ids:
            return self.facts
        tokens = len(self.answer.prompt_ids) + len(self.answer.output_ids)
        left = max(1.0, self.facts.predicted_output_tokens - self.tokens)
        return replace(self.facts, prompt_tokens=tokens, predicted_output_tokens=left)

    # trouble

    def engine_broke(self, reason: str) -> None:
        """The engine gave no whole answer."""
        self.engine_failed(reason)
        if self._attempt is not None:
            self._attempt.call.cancel()
        if self.answer is not None and self.answer.reached_end:
            self.exchange.write(b"".join(self.answer.conclude()))
            self.exchange.finish()
            self._end("finished")
        elif not self.fail_over():
            self.fail(502, f"the engine gave no answer: {reason}")

    def engine_failed(self, reason: str, *, admission: bool = False, headers: Headers = ()) -> None:
        """Tell the dispatcher what its engine did."""
        self.dispatcher.on_engine_failure(self.engine, reason, admission=admission, headers=headers)

    def _retry(self) -> bool:
        """Send it to another engine: the client has nothing yet."""
        if len(self._tried) > 1 or not self.dispatcher.may_retry():
            return False
        fleet = self.dispatcher.fleet
        self.dispatcher.leaves(self)
        slot = fleet.choose_dispatch(self.facts, False, frozenset(self._tried))
        if slot == NONE:
            fleet.book(self.facts, self.slot)
            self.dispatcher.serves(self, 0)
            return False
        self.dispatcher.counts["retries"] += 1
        if self._attempt is not None:
            self._attempt.call.cancel()
        self._send(slot)
        return True

    def fail_over(self) -> bool:
        """Go on elsewhere: from the tokens so far, or from the start if there are none. False if that cannot be."""
        if self.ended or self._failovers >= self.dispatcher.config.max_failovers:
            return False
        if self.exchange.started and (self.answer is None or self.answer.fixed):
            return False
        self._failovers += 1
        if self.moved_by is not None:
            self.dispatcher.counts["migrations not taken up"] += 1
        failed = self.slot
        self.detach()
        self.dispatcher.go_on_elsewhere(self, failed)
        return True

    def wait_for_descriptors(self, reason: str) -> None:
        """The dispatcher could not ask the engine, and tries again soon."""
        self.detach()
        self.dispatcher.go_on_later(self, reason)

    def go_on_at(self, slot: int) -> bool:
        """Go on at this engine, where it is booked, after `detach`. False if the answer is at its end."""
        if self.answer is not None and self.answer.prompt_ids:
            return self.resume_at(slot, copied=False)
        self._send(slot)
        return True

    def detach(self) -> None:
        """Leave the engine: its request is aborted, what it still sends is not read."""
        if self._attempt is not None:
            self._attempt.call.cancel()
            self._attempt = None
        self.dispatcher.leaves(self)
        self.slot = NONE

    def resume_at(self, slot: int, *, copied: bool) -> bool:
        """Go on at this engine from the tokens so far, after `detach`. False if the answer is at its end.

        Args:
            slot: of the engine.
            copied: it holds the KV cache of what there is, and nothing is booked there yet; else what there is is a
                prompt to it as any other, and booked.
        """
        assert self.answer is not None
        engine = self.dispatcher.fleet.engines[slot]
        capabilities = engine.capabilities
        token_ids = self.answer.resume()
        body = self.request.resumed_body(
            token_ids,
            len(self.answer.output_ids),
            capabilities.max_model_len if capabilities else None,
            priority=capabilities is not None and capabilities.priority is not False,
        )
        if body is None:
            return False
        if copied:
            self.dispatcher.fleet.book(self.facts, slot)
        else:
            self.facts = self.facts_now()
        self._serve_at(slot, COMPLETIONS, body, resumes=True, streamed_tokens=self.tokens if copied else 0)
        return True

    def fail(self, status: int, message: str, outcome: str = "failed") -> None:
        """There will be no answer."""
        if self.exchange.started:
            self._cut(message)
            return
        headers = [(b"retry-after", b"1")] if status in (429, 503) else []
        self.exchange.respond(status, error_body(message, "ServiceUnavailable", status), headers=headers)
        self._end(outcome)

    def _cut(self, reason: str) -> None:
        """The client has a part of an answer whose rest will not come."""
        if self.request.streamed:
            self.exchange.write(event(error_body(reason, "ServiceUnavailable", 502)))
        self.exchange.abort()
        self._end("failed")

    def _client_left(self) -> None:
        if self._attempt is not None:
            self._attempt.call.cancel()
        self._end("failed" if self.dispatcher.cuts else "client left")

    def _client_reads_again(self) -> None:
        if self._attempt is not None:
            self._attempt.call.resume()

    def _end(self, outcome: str) -> None:
        if not self.ended:
            self.ended = True
            self._attempt = None
            self.dispatcher.on_end(self, outcome)


class _Attempt:
    """A request at an engine: hands its answer to the relay as long as the relay wants it."""

    def __init__(self, relay: Relay, engine: Engine, route: str, body: bytes, *, resumes: bool):
        self.relay = relay
        self.resumes = resumes
        self.wanted = False
        self.events = EventReader() if relay.answer is not None else None
        self.call: Call = engine.client.call("POST", route, relay._forward_headers(), body, self)

    def on_start(self, status: int, headers: Headers) -> None:
        if self.resumes:
            self.wanted = status == 200
            if not self.wanted:
                self.relay.engine_broke(f"answered {status} to a request that goes on there")
            return
        self.wanted = self.relay.on_start(status, headers)
        if self.relay.answer is None:
            self.events = None

    def on_data(self, data: bytes) -> None:
        if self.wanted and not self.relay.ended:
            self.relay.on_data(data, self.events)

    def on_end(self) -> None:
        if self.wanted and not self.relay.ended:
            self.relay.on_end()

    def on_error(self, error: CallError) -> None:
        relay = self.relay
        if relay.ended:
            return
        if error.local:
            relay.wait_for_descriptors(str(error))
        elif error.refused and relay.engine.serves:
            relay.dispatcher.engine_is_gone(relay.engine, str(error))  # tells this relay too
        else:
            relay.engine_broke(str(error))
