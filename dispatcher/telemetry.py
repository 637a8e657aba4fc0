"""Watches engines: reads their metrics, sees them come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from fleetpilot.dispatcher.engine import Engine, EngineState, ask_capabilities
from fleetpilot.dispatcher.http.client import CallError
from fleetpilot.fleet.vllm_metrics import read_metrics

if TYPE_CHECKING:
    from fleetpilot.dispatcher.service import Dispatcher

_LOG = logging.getLogger("fleetpilot.dispatcher")
_POLL_TIMEOUT_S = 5.0
_FAILED_POLLS = 3
"""Polls in a row without an answer until an engine has failed; a refused connection counts as all of them."""
_RETRY_S = 1.0
_PATIENCE_S = 5.0
"""Until an engine that does not come up is warned of."""
_REMIND_S = 60.0


async def watch(dispatcher: Dispatcher, engine: Engine) -> None:
    """Poll an engine until it is gone."""
    failed = 0
    warn_s = time.monotonic() + _PATIENCE_S
    while engine.state != EngineState.ABSENT:
        start_s = time.monotonic()
        try:
            if engine.state in (EngineState.STARTING, EngineState.FAILED):
                await _start(dispatcher, engine)
            await _poll(dispatcher, engine)
            failed = 0
        except (CallError, TimeoutError, ValueError) as error:
            dispatcher.counts["failed_polls"] += 1
            if not (isinstance(error, CallError) and error.local):
                refused = isinstance(error, CallError) and error.refused
                failed += _FAILED_POLLS if refused else 1
            if engine.state == EngineState.STARTING and time.monotonic() >= warn_s:
                _LOG.warning("engine %d (%s) is not up, still asking: %s", engine.slot, engine.url, _said(error))
                warn_s = time.monotonic() + _REMIND_S
            if failed >= _FAILED_POLLS and engine.serves:
                dispatcher.engine_is_gone(engine, _said(error))
        if engine.leaving and not (engine.serves and dispatcher.fleet.in_flight(engine.slot)):
            dispatcher.engine_left(engine)
            return
        interval_s = dispatcher.config.poll_interval_s if engine.serves else _RETRY_S
        await asyncio.sleep(max(0.0, start_s + interval_s - time.monotonic()))


def _said(error: Exception) -> str:
    return str(error) or "no answer to a poll in time"


async def _start(dispatcher: Dispatcher, engine: Engine) -> None:
    health = await engine.client.fetch(
        "GET", "/health", headers=dispatcher.engine_headers(()), timeout_s=_POLL_TIMEOUT_S
    )
    if health.status != 200:
        raise ValueError(f"GET /health was answered {health.status}")
    engine.capabilities = await ask_capabilities(engine, list(dispatcher.engine_headers(())))
    dispatcher.fleet.forget_poll(engine)
    await _poll(dispatcher, engine)
    engine.failures = 0
    dispatcher.fleet.set_state(engine, EngineState.READY)
    _LOG.info("engine %d (%s) is ready: %s", engine.slot, engine.url, engine.capabilities)
    dispatcher.place_held()


async def _poll(dispatcher: Dispatcher, engine: Engine) -> None:
    sent_s = time.monotonic()
    answer = await engine.client.fetch(
        "GET", "/metrics", headers=dispatcher.engine_headers(()), timeout_s=_POLL_TIMEOUT_S
    )
    if answer.status != 200:
        raise ValueError(f"GET /metrics was answered {answer.status}")
    try:
        dispatcher.fleet.polled(engine, read_metrics(answer.body.decode()), sent_s)
    except ValueError as error:  # an engine whose metrics cannot be is still an engine: the ledger knows its load
        dispatcher.counts["unreadable_polls"] += 1
        if dispatcher.counts["unreadable_polls"] == 1:
            _LOG.warning("metrics of engine %d (%s): %s", engine.slot, engine.url, error)
    _check_progress(dispatcher, engine, sent_s)


def _check_progress(dispatcher: Dispatcher, engine: Engine, now_s: float) -> None:
    """An engine may answer polls and have stopped all the same."""
    fleet = dispatcher.fleet
    if not fleet.in_flight(engine.slot):
        engine.idle_s = now_s
    elif now_s - max(engine.idle_s, fleet.last_token_s(engine.slot)) > dispatcher.config.stalled_s:
        dispatcher.engine_is_gone(engine, f"sent nothing for {dispatcher.config.stalled_s:g} s with requests on it")
