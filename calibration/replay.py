"""Replays a table of requests on live engines, through a dispatcher with a policy: open loop, intended times kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from fleetpilot.calibration.live import LiveEngine, random_prompt
from fleetpilot.cluster.state import FAILED, FINISHED, REQUEST_LOG
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.http.client import CallError, HttpClient
from fleetpilot.dispatcher.http.server import Headers
from fleetpilot.dispatcher.requests import COMPLETIONS
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.policy import Policy
from fleetpilot.workloads.table import RequestTable

SAMPLE_INTERVAL_S = 0.5
_LEAD_S = 0.5
_READY_S = 60.0
_LONGEST_REQUEST_S = 600.0
_WARM_UP_REQUESTS = 4

Clock = Callable[[], float]


@dataclass(frozen=True)
class Replay:
    """What came of a replay.

    Attributes:
        requests: (n,) `REQUEST_LOG` by row, as of a simulated run; times from the replay's start. Fields that clients
            cannot see (admission, preemptions, ...) are not set.
        late_s: (n,) how much later than intended each request was sent.
        preemptions: by engine.
        kv_usage: (t, N) sampled share of KV blocks in use.
        free_blocks: (t, N).
        head_demand_blocks: (t, N) of the oldest request without a first token, where the engine says that some wait.
        kv_blocks: (N,) capacity.
        outcomes: of migrations, by word.
        downtimes_s: of migrated requests, from the source's last token to the destination's first.
        fallbacks: decisions that the policy did not make.
    """

    requests: NDArray[np.void]
    late_s: NDArray[np.float64]
    preemptions: tuple[int, ...]
    kv_usage: NDArray[np.float64]
    free_blocks: NDArray[np.float64]
    head_demand_blocks: NDArray[np.float64]
    kv_blocks: NDArray[np.float64]
    outcomes: dict[str, int]
    downtimes_s: tuple[float, ...]
    fallbacks: int


def prompts(table: RequestTable, seed: int) -> list[list[int]]:
    """Token ids of every prompt: requests that share a prefix in the table share it here, all else is random."""
    ends = table.node_end_tokens
    nodes: list[list[int]] = []
    for node, parent in enumerate(table.node_parent):
        start = int(ends[parent]) if parent >= 0 else 0
        nodes.append(random_prompt(np.random.default_rng([seed, 0, node]), int(ends[node]) - start))
    return [_prompt(table, nodes, row, seed) for row in range(len(table))]


def _prompt(table: RequestTable, nodes: Sequence[list[int]], row: int, seed: int) -> list[int]:
    path: list[int] = []
    node = int(table.own_node[row]) if table.own_node[row] >= 0 else int(table.prefix_node[row])
    while node >= 0:
        path.append(node)
        node = int(table.node_parent[node])
    ids = [token for node in reversed(path) for token in nodes[node]]
    wanted = int(table.prompt_tokens[row])
    rest = wanted - len(ids)
    return ids[:wanted] if rest <= 0 else ids + random_prompt(np.random.default_rng([seed, 1, row]), rest)


async def replay(
    table: RequestTable,
    engines: Sequence[LiveEngine],
    policy: Policy,
    config: ServeConfig,
    *,
    prompt_seed: int,
    salt: str,
) -> Replay:
    """Replay a table on engines that serve nobody else.

    Args:
        table: open loop.
        engines: asked already.
        policy: of the dispatcher.
        config: of the dispatcher; engines and port are set here.
        prompt_seed: of the prompts.
        salt: of the prefix cache, new for every replay, so that none finds what another one left.

    Raises:
        MeasureError: an engine does not answer.
        TimeoutError: the engines do not become ready, or requests do not end.
    """
    await asyncio.gather(*(engine.idle() for engine in engines))
    dispatcher = Dispatcher(config, policy)
    # What it would have learned by now from the answers before.
    dispatcher.fleet.board.mean_output_tokens[0] = table.output_tokens.mean()
    await dispatcher.start()
    try:
        await dispatcher.ready(len(engines), _READY_S)
        bodies = _bodies(table, engines, prompts(table, prompt_seed), salt)
        client = HttpClient(f"http://127.0.0.1:{dispatcher.port}")
        await _warm_up(client, bodies[0])
        before = [await engine.metrics() for engine in engines]
        exchanges, samples = await _run(dispatcher, client, table, bodies)
        after = [await engine.metrics() for engine in engines]
        client.close()
    finally:
        await dispatcher.stop()
    requests, late_s = _log(table, exchanges)
    return Replay(
        requests=requests,
        late_s=late_s,
        preemptions=tuple(int((b.preemptions or 0) - (a.preemptions or 0)) for a, b in zip(before, after, strict=True)),
        kv_usage=np.array([sample["kv_usage"] for sample in samples]),
        free_blocks=np.array([sample["free_blocks"] for sample in samples]),
        head_demand_blocks=np.array(
            [np.where(sample["waiting"] > 0, sample["head_prompt_blocks"], 0.0) for sample in samples]
        ),
        kv_blocks=np.array([metrics.kv_capacity_blocks for metrics in after], np.float64),
        outcomes={
            name.removeprefix("migrations "): count
            for name, count in dispatcher.counts.items()
            if name.startswith("migrations ")
        },
        downtimes_s=tuple(dispatcher.downtimes_s),
        fallbacks=sum(dispatcher.fleet.host.fallbacks.values()),
    )


def _bodies(
    table: RequestTable, engines: Sequence[LiveEngine], ids: Sequence[list[int]], salt: str
) -> list[dict[str, Any]]:
    capabilities = engines[0].capabilities
    assert capabilities is not None
    bodies = []
    for row in range(len(table)):
        body: dict[str, Any] = {
            "model": capabilities.models[0],
            "prompt": ids[row],
            "max_tokens": int(table.output_tokens[row]),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        if table.priority[row] and capabilities.priority:
            body["priority"] = int(table.priority[row])
        bodies.append(body)
    return bodies


async def _warm_up(client: HttpClient, body: dict[str, Any]) -> None:
    """Policies are compiled and connections made."""
    for number in range(_WARM_UP_REQUESTS):
        warm = body | {"prompt": body["prompt"][:16], "max_tokens": 4, "cache_salt": f"warm-up {number}"}
        await client.fetch("POST", COMPLETIONS, orjson.dumps(warm), timeout_s=_READY_S)


async def _run(
    dispatcher: Dispatcher, client: HttpClient, table: RequestTable, bodies: Sequence[dict[str, Any]]
) -> tuple[list[_Exchange], list[NDArray[np.void]]]:
    loop = asyncio.get_running_loop()
    encoded = [orjson.dumps(body) for body in bodies]
    start_s = time.perf_counter() + _LEAD_S
    offset_s = loop.time() - time.perf_counter()
    exchanges = [_Exchange(start_s + float(arrival_s)) for arrival_s in table.arrival_s]

    def send(row: int) -> None:
        exchange = exchanges[row]
        exchange.sent_s = time.perf_counter()
        client.call("POST", COMPLETIONS, [(b"content-type", b"application/json")], encoded[row], exchange)

    for row, exchange in enumerate(exchanges):
        loop.call_at(exchange.intended_s + offset_s, send, row)
    samples: list[NDArray[np.void]] = []
    sampler = loop.create_task(_sample(dispatcher, samples))
    try:
        async with asyncio.timeout(_LEAD_S + table.span_s + _LONGEST_REQUEST_S):
            await asyncio.gather(*(exchange.done for exchange in exchanges))
    finally:
        sampler.cancel()
    return exchanges, samples


async def _sample(dispatcher: Dispatcher, samples: list[NDArray[np.void]]) -> None:
    await asyncio.sleep(_LEAD_S)
    while True:
        samples.append(dispatcher.fleet.view.instances[0].copy())
        await asyncio.sleep(SAMPLE_INTERVAL_S)


class _Exchange:
    """A client's request, and when its answer came."""

    def __init__(self, intended_s: float):
        self.intended_s = intended_s
        self.sent_s = np.nan
        self.first_s = np.nan
        self.last_s = np.nan
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed = False
        self._status = 0
        self._tail = b""

    def on_start(self, status: int, headers: Headers) -> None:
        """See `Receiver`."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """See `Receiver`."""
        self.last_s = time.perf_counter()
        if np.isnan(self.first_s):
            self.first_s = self.last_s
        self._tail = (self._tail + data)[-1024:]

    def on_end(self) -> None:
        """See `Receiver`."""
        self.failed = self._status != 200 or b'"completion_tokens":' not in self._tail
        self._finish()

    def on_error(self, error: CallError) -> None:
        """See `Receiver`."""
        self.failed = True
        self._finish()

    @property
    def generated(self) -> int:
        """Tokens of the answer, as its usage says."""
        _, _, rest = self._tail.rpartition(b'"completion_tokens":')
        digits = rest[: len(rest) - len(rest.lstrip(b"0123456789"))]
        return int(digits) if digits else 0

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _log(table: RequestTable, exchanges: Sequence[_Exchange]) -> tuple[NDArray[np.void], NDArray[np.float64]]:
    log = np.zeros(len(table), REQUEST_LOG)
    start_s = exchanges[0].intended_s - table.arrival_s[0]
    log["row"] = np.arange(len(table))
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "predicted_output_tokens", "priority", "slo_class"):
        log[name] = getattr(table, name)
    log["dispatch_s"] = log["admitted_s"] = np.nan
    log["instance"] = -1
    log["first_token_s"] = [exchange.first_s - start_s for exchange in exchanges]
    log["finish_s"] = [exchange.last_s - start_s for exchange in exchanges]
    log["generated"] = [exchange.generated for exchange in exchanges]
    whole = log["generated"] == log["output_tokens"]
    failed = np.array([exchange.failed for exchange in exchanges]) | ~whole
    log["status"] = np.where(failed, FAILED, FINISHED)
    late_s = np.array([exchange.sent_s - exchange.intended_s for exchange in exchanges])
    return log, late_s
