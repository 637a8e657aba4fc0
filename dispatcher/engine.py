"""One vLLM engine as the dispatcher knows it: where it is, what it can do, how it fares."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass
from typing import Any

import orjson

from fleetpilot.dispatcher.http.client import Answer, CallError, HttpClient
from fleetpilot.fleet.view import STATE_ABSENT, STATE_DRAINING, STATE_FAILED, STATE_READY, STATE_STARTING

PROBE_PRIORITY = -(2**31)
"""Priority of what must not queue: before all requests of clients."""
NOWHERE = "http://nowhere.invalid"
"""URL of a slot that no engine has."""


class EngineState(enum.IntEnum):
    """Where an engine stands; the values are those of a view's ``state``."""

    ABSENT = STATE_ABSENT
    STARTING = STATE_STARTING
    READY = STATE_READY
    DRAINING = STATE_DRAINING
    FAILED = STATE_FAILED


@dataclass(frozen=True)
class Capabilities:
    """What an engine said and showed when it was asked.

    Attributes:
        version: of vLLM; empty if it does not say.
        models: served names.
        max_model_len: most tokens of a request, prompt and answer; None if it does not say.
        kv_transfer: it exports KV blocks (a KV connector such as NIXL is configured): live migration works.
        priority: it schedules by priority; None if it does not say. Without ``--scheduling-policy priority`` vLLM takes
            any priority and ignores it, and only ``/server_info`` of its development mode tells.
        scale_out: ``/inference/v1/...`` is open (``--enable-scale-out``).
        tokenize: ``/tokenize`` answers.
        fingerprint: ``system_fingerprint`` of its answers; None if they have none.
    """

    version: str
    models: tuple[str, ...]
    max_model_len: int | None
    kv_transfer: bool
    priority: bool | None
    scale_out: bool
    tokenize: bool
    fingerprint: str | None


class Engine:
    """An engine in a slot of the fleet.

    Attributes:
        slot: index in the view.
        url: of its HTTP server.
        client: for calls to it.
        state: see `EngineState`.
        state_since_s: when it came into it (monotonic clock).
        watcher: the task that polls it.
        capabilities: None until it has been asked.
        failures: calls in a row that it failed (`Breaker`).
        leaving: it drains for good.
        idle_s: when it last had no requests, as far as was looked (monotonic clock).
    """

    def __init__(self, slot: int, url: str):
        self.slot = slot
        self.url = url.rstrip("/")
        self.client = HttpClient(url)
        self.state = EngineState.STARTING
        self.state_since_s = time.monotonic()
        self.watcher: asyncio.Task[None] | None = None
        self.capabilities: Capabilities | None = None
        self.failures = 0
        self.leaving = False
        self.idle_s = time.monotonic()

    @property
    def serves(self) -> bool:
        """Whether its requests go on."""
        return self.state in (EngineState.READY, EngineState.DRAINING)

    @property
    def has_address(self) -> bool:
        """Whether it is anywhere: not so in a slot that is free, or whose instance was ordered and is not there yet."""
        return self.url != NOWHERE

    def __repr__(self) -> str:
        return f"Engine({self.slot}, {self.url!r}, {self.state.name})"


async def ask_capabilities(engine: Engine, headers: list[tuple[bytes, bytes]], timeout_s: float = 30.0) -> Capabilities:
    """Ask an engine what it can do, by requests of one token: flags cannot be read from outside.

    Raises:
        CallError, TimeoutError: it does not answer.
        ValueError: it answers what no OpenAI-compatible server would.
    """

    async def ask(method: str, target: str, body: Any = None) -> Answer:
        data = b"" if body is None else orjson.dumps(body)
        return await engine.client.fetch(method, target, data, headers, timeout_s=timeout_s)

    listing = await ask("GET", "/v1/models")
    models = _models(engine, listing)
    version = await ask("GET", "/version")
    one_token: dict[str, Any] = {"model": models[0]["id"], "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
    export = await ask(
        "POST",
        "/v1/completions",
        one_token | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    )
    if export.status != 200:
        raise ValueError(f"engine {engine.url}: a request of one token was answered {export.status}, expected 200")
    info = await ask("GET", "/server_info?config_format=json")
    abort = await ask("POST", "/inference/v1/abort_requests", {"request_ids": []})
    tokenize = await ask("POST", "/tokenize", {"model": models[0]["id"], "prompt": "a"})
    return Capabilities(
        version=str(_json(version).get("version", "")) if version.status == 200 else "",
        models=tuple(str(model["id"]) for model in models),
        max_model_len=models[0].get("max_model_len"),
        kv_transfer=bool(_json(export).get("kv_transfer_params")),
        priority=_schedules_by_priority(info),
        scale_out=abort.status == 200,
        tokenize=tokenize.status == 200,
        fingerprint=_json(export).get("system_fingerprint"),
    )


def _schedules_by_priority(info: Answer) -> bool | None:
    config = _json(info).get("vllm_config")
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    policy = scheduler.get("policy") if isinstance(scheduler, dict) else None
    return None if policy is None else policy == "priority"


def _models(engine: Engine, listing: Answer) -> list[dict[str, Any]]:
    if listing.status != 200:
        raise ValueError(f"engine {engine.url}: GET /v1/models was answered {listing.status}, expected 200")
    models = _json(listing).get("data")
    if not isinstance(models, list) or not models or not all(isinstance(m, dict) and "id" in m for m in models):
        raise ValueError(f"engine {engine.url}: GET /v1/models lists no model")
    return models


def _json(answer: Answer) -> dict[str, Any]:
    try:
        value = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


__all__ = ["NOWHERE", "PROBE_PRIORITY", "CallError", "Capabilities", "Engine", "EngineState", "ask_capabilities"]
