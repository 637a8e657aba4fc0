"""What an engine is and allows: asked where it says so, given by the user where it does not, measured else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from fleetpilot.calibration.live import LiveEngine, MeasureError, TokenStream, random_prompt
from fleetpilot.calibration.plan import LONGEST_PROMPT, Limits

DEFAULT_KV_BYTES_PER_TOKEN = 131_072
"""Of Llama-3.1-8B in 16 bits; matters to transfers alone."""
_MOST_SEQS = 1024
_SETTLE_S = 0.2
_PREFIX_CACHING = re.compile(r'[{,]enable_prefix_caching="(\w+)"')


@dataclass(frozen=True)
class Given:
    """What stock vLLM does not say, as the user knows it; None for what he does not."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_bytes_per_token: int | None = None


@dataclass(frozen=True)
class Facts:
    """An engine's limits.

    Attributes:
        version: of vLLM.
        model: as served.
        block_size: tokens per KV block.
        kv_blocks: usable KV blocks.
        max_model_len: tokens of a request.
        max_num_seqs: requests in a batch.
        max_num_batched_tokens: tokens computed in an iteration.
        kv_bytes_per_token: what a transfer moves per token.
        tp: tensor-parallel size.
        prefix_cache: whether blocks are reused.
        priority: whether it schedules by priority.
        kv_transfer: whether it exports KV blocks.
        sources: by name, how it is known.
    """

    version: str
    model: str
    block_size: int
    kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    tp: int
    prefix_cache: bool
    priority: bool
    kv_transfer: bool
    sources: dict[str, str]

    def limits(self, measured_prompt: int) -> Limits:
        """What the plan of points needs."""
        return Limits(
            self.kv_blocks * self.block_size,
            self.max_model_len,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            measured_prompt,
        )


async def learn(engine: LiveEngine, given: Given) -> Facts:
    """Ask an idle engine, and measure what it does not say.

    Raises:
        MeasureError: it does not answer as vLLM does, or serves others.
    """
    capabilities = await engine.ask()
    await engine.idle()
    text = await engine.metrics_text()
    metrics = await engine.metrics()
    if metrics.kv_capacity_blocks is None or metrics.block_size is None:
        raise MeasureError(f"{engine.url}: /metrics has no vllm:cache_config_info; expected a vLLM server")
    capacity_tokens = int(metrics.kv_capacity_blocks * metrics.block_size)
    longest = min(capabilities.max_model_len or capacity_tokens, capacity_tokens)
    said = await _server_info(engine)
    sources: dict[str, str] = {}

    async def find(name: str, measure: Any) -> int:
        if getattr(given, name) is not None:
            sources[name] = "given"
            return int(getattr(given, name))
        if name in said:
            sources[name] = "from /server_info"
            return int(said[name])
        value, sources[name] = await measure(engine, longest)
        return int(value)

    max_num_seqs = await find("max_num_seqs", _measure_max_num_seqs)
    budget = await find("max_num_batched_tokens", _measure_budget)
    if given.kv_bytes_per_token is not None:
        kv_bytes, sources["kv_bytes_per_token"] = given.kv_bytes_per_token, "given"
    else:
        kv_bytes, sources["kv_bytes_per_token"] = DEFAULT_KV_BYTES_PER_TOKEN, "not measured, that of Llama-3.1-8B"
    sources["tp"] = "from /server_info" if "tp" in said else "not exposed, taken to be 1"
    return Facts(
        version=capabilities.version,
        model=capabilities.models[0],
        block_size=int(metrics.block_size),
        kv_blocks=int(metrics.kv_capacity_blocks),
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs + 1),
        kv_bytes_per_token=kv_bytes,
        tp=int(said.get("tp", 1)),
        prefix_cache=_PREFIX_CACHING.findall(text) != ["False"],
        priority=capabilities.priority is True,
        kv_transfer=capabilities.kv_transfer,
        sources=sources,
    )


async def _server_info(engine: LiveEngine) -> Mapping[str, int]:
    """What ``/server_info`` says; it is open in vLLM's development mode alone."""
    try:
        config = orjson.loads(await engine.fetch("GET", "/server_info?config_format=json"))["vllm_config"]
        scheduler, parallel = config["scheduler_config"], config["parallel_config"]
        return {
            "max_num_seqs": int(scheduler["max_num_seqs"]),
            "max_num_batched_tokens": int(scheduler["max_num_batched_tokens"]),
            "tp": int(parallel["tensor_parallel_size"]),
        }
    except (MeasureError, ValueError, LookupError, TypeError):
        return {}


async def _measure_max_num_seqs(engine: LiveEngine, longest: int) -> tuple[int, str]:
    """More and more requests, until some wait although there is memory."""
    streams: list[TokenStream] = []
    random = np.random.default_rng()
    try:
        for most in (64, 256, _MOST_SEQS):
            answer = min(longest - 16, 512)
            streams += [engine.start(random_prompt(random, 8), answer) for _ in range(most - len(streams))]
            await streams[0].reached(2)
            await asyncio.sleep(_SETTLE_S)
            metrics = await engine.metrics()
            if metrics.waiting and metrics.kv_usage < 0.9:
                return int(metrics.running), f"measured: {metrics.running:.0f} ran while others waited"
            if metrics.waiting:
                break
        running = int(metrics.running)
        return running, f"at least so many: {running} ran, none waited for a place"
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.sleep(_SETTLE_S)
        await engine.idle()


async def _measure_budget(engine: LiveEngine, longest: int) -> tuple[int, str]:
    """A long prompt beside a request that decodes, which gets a token in every iteration: as many as chunks."""
    random = np.random.default_rng()
    # The share keeps multiples of powers of two away: the request that decodes takes a token of the budget.
    tokens = int(0.93 * min(LONGEST_PROMPT, longest - 2))
    companion = engine.start(random_prompt(random, 8), min(longest - 16, 1024))
    try:
        await companion.reached(4)
        passed = [
            float(np.median([await _iterations(engine, companion, random_prompt(random, n)) for _ in range(3)]))
            for n in (1, tokens)
        ]
    finally:
        companion.cancel()
    chunks = max(1, round(passed[1] - passed[0]) + 1)
    if chunks == 1:
        return tokens, f"at least so many: {tokens} tokens were computed in one iteration"
    budget = 1 << int(np.ceil(np.log2(tokens / chunks)))
    return budget, f"measured: {tokens} tokens took {chunks} iterations, and a power of two was assumed"


async def _iterations(engine: LiveEngine, companion: TokenStream, prompt: list[int]) -> int:
    """Tokens that the companion gets from the sending of a prompt to its first token."""
    before = len(companion.times_s)
    stream = engine.start(prompt, 1)
    await stream.reached(1)
    return sum(1 for time_s in companion.times_s[before:] if time_s <= stream.times_s[0])
