"""Live migration on stock vLLM (docs/dispatcher.md): pin, copy, stop, resume.

The source exports the blocks of a running request to a probe with the same tokens; the destination pulls them into its
prefix cache; then the request is aborted and goes on there. Until then nothing of it is disturbed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from fleetpilot.dispatcher.engine import PROBE_PRIORITY, Engine
from fleetpilot.dispatcher.http.client import CallError
from fleetpilot.dispatcher.requests import COMPLETIONS, KV_SOURCE

if TYPE_CHECKING:
    from fleetpilot.dispatcher.relay import Relay
    from fleetpilot.dispatcher.service import Dispatcher

_LONGEST_WAIT_FOR_A_WHOLE_CHARACTER_S = 1.0


class Aborted(Exception):
    """The migration was called off; the source goes on as if nothing had been.

    Attributes:
        outcome: in a word, for the counts.
    """

    def __init__(self, outcome: str):
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(eq=False)
class Migration:
    """A request that moves.

    Attributes:
        relay: of the request.
        source: where it runs.
        destination: where it goes.
        decision: number of the decision for it.
        stages: copies so far.
        copied_tokens: of prompt and answer that the destination holds.
        outcome: how it ended; empty while it goes on.
        begun_s: monotonic clock.
        stopped_s: when the source's last token came; 0 before.
        resumed_s: when the destination's first came; 0 before.
    """

    relay: Relay
    source: Engine
    destination: Engine
    decision: int = 0
    stages: int = 0
    copied_tokens: int = 0
    outcome: str = ""
    begun_s: float = 0.0
    stopped_s: float = 0.0
    resumed_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        """What became of it, for the decision log. Its downtime is in the request's outcome: it comes later."""
        return {
            "decision": self.decision,
            "request": self.relay.facts.request_id,
            "source": self.source.slot,
            "destination": self.destination.slot,
            "outcome": self.outcome,
            "stages": self.stages,
            "copied_tokens": self.copied_tokens,
            "duration_s": time.monotonic() - self.begun_s,
        }


async def migrate(dispatcher: Dispatcher, migration: Migration) -> None:
    """Move a request. `Migration.outcome` says how that went."""
    relay = migration.relay
    migration.begun_s = time.monotonic()
    relay.moving = True
    try:
        await _copy_stages(dispatcher, migration)
        await _whole_character(migration)
        _commit(dispatcher, migration)
        migration.outcome = "completed"
    except Aborted as abort:
        migration.outcome = abort.outcome
    finally:
        relay.moving = False


async def _copy_stages(dispatcher: Dispatcher, migration: Migration) -> None:
    config = dispatcher.config
    while True:
        token_ids = _tokens(migration)
        if migration.stages and len(token_ids) - migration.copied_tokens <= config.last_stage_tokens:
            return
        if migration.stages == config.max_stages:
            return
        params = await _pin(dispatcher, migration, token_ids)
        await _copy(dispatcher, migration, token_ids, params)
        migration.stages += 1
        migration.copied_tokens = len(token_ids)


def _tokens(migration: Migration) -> list[int]:
    """Prompt and answer so far.

    Raises:
        Aborted: the request is not there any more.
    """
    relay = migration.relay
    answer = relay.answer
    if relay.ended or answer is None or answer.reached_end or relay.slot != migration.source.slot:
        raise Aborted("left")
    return answer.prompt_ids + answer.output_ids


async def _pin(dispatcher: Dispatcher, migration: Migration, token_ids: list[int]) -> dict[str, Any]:
    """The source holds the blocks of these tokens until they are read, or a lease ends; says how to read them."""
    body = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    answer = await _one_token(
        dispatcher, migration, migration.source, token_ids, body, dispatcher.config.probe_deadline_s, "probe"
    )
    params = answer.get("kv_transfer_params")
    if not (isinstance(params, dict) and all(params.get(name) is not None for name in KV_SOURCE)):
        raise Aborted("nothing pinned")
    return params


async def _copy(dispatcher: Dispatcher, migration: Migration, token_ids: list[int], params: dict[str, Any]) -> None:
    """The destination pulls the blocks into its prefix cache."""
    await _one_token(
        dispatcher,
        migration,
        migration.destination,
        token_ids,
        {"kv_transfer_params": params},
        dispatcher.config.copy_deadline_s,
        "copy",
    )


async def _one_token(
    dispatcher: Dispatcher,
    migration: Migration,
    engine: Engine,
    token_ids: list[int],
    fields: dict[str, Any],
    deadline_s: float,
    step: str,
) -> dict[str, Any]:
    request = migration.relay.request.fields
    body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True} | fields
    body |= {name: request[name] for name in ("model", "cache_salt") if request.get(name) is not None}
    if engine.capabilities is not None and engine.capabilities.priority is not False:
        body["priority"] = PROBE_PRIORITY
    headers = dispatcher.engine_headers(migration.relay.authorization)
    try:
        answer = await engine.client.fetch("POST", COMPLETIONS, orjson.dumps(body), headers, timeout_s=deadline_s)
    except TimeoutError:
        raise Aborted(f"{step} late") from None
    except CallError:
        raise Aborted(f"{step} failed") from None
    if answer.status != 200:
        raise Aborted(f"{step} refused")
    value = orjson.loads(answer.body)
    return value if isinstance(value, dict) else {}


async def _whole_character(migration: Migration) -> None:
    """Wait until the text so far has no incomplete character, which another engine could not complete."""
    deadline_s = time.monotonic() + _LONGEST_WAIT_FOR_A_WHOLE_CHARACTER_S
    while True:
        _tokens(migration)
        answer = migration.relay.answer
        assert answer is not None
        if answer.is_whole or time.monotonic() > deadline_s:
            return
        await asyncio.sleep(0.002)


def _commit(dispatcher: Dispatcher, migration: Migration) -> None:
    """Stop at the source, go on at the destination."""
    _tokens(migration)
    relay = migration.relay
    with dispatcher.fleet.board.lock:
        if not dispatcher.fleet.may_take(migration.destination, time.monotonic()):
            raise Aborted("destination gone")
        migration.stopped_s = relay.last_token_s
        relay.detach()
        relay.moved_by = migration
        if not relay.resume_at(migration.destination.slot, copied=True):
            raise Aborted("left")
