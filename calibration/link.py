"""The link between two engines: KV blocks are pinned at one and copied by the other, as a migration does."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetpilot.calibration.live import LiveEngine, MeasureError, random_prompt

_BYTES = re.compile(r"^vllm:nixl_bytes_transferred_sum(?:{.*})? (\S+)", re.MULTILINE)
SHARES = (1 / 16, 1 / 4, 1 / 2, 1.0)
"""Of the longest prompt, the lengths that are copied."""


@dataclass(frozen=True)
class Copy:
    """One copy of a prompt's KV blocks.

    Attributes:
        tokens: of the prompt.
        probe_s: from asking the source until it had pinned the blocks.
        copy_s: from asking the destination until it had them and had computed a token.
        cached_s: the same request when it had them already.
        bytes: that the destination counted; NaN where it counts none.
    """

    tokens: int
    probe_s: float
    copy_s: float
    cached_s: float
    bytes: float


@dataclass(frozen=True)
class Link:
    """What moving KV blocks costs.

    Attributes:
        round_trip_s: a copy of nothing, and the way of its request.
        bandwidth_bytes_per_s: of the blocks; where longer copies took no longer, what the noise leaves room for.
        kv_bytes_per_token: that the copies moved.
        probe_s: median time to pin blocks.
        error: median relative error of the line through the copies' times.
    """

    round_trip_s: float
    bandwidth_bytes_per_s: float
    kv_bytes_per_token: float
    probe_s: float
    error: float


async def copy(source: LiveEngine, destination: LiveEngine, tokens: int) -> Copy:
    """Measure one copy between two idle engines.

    Raises:
        MeasureError: the source exports nothing, or the destination fails.
    """
    prompt = random_prompt(np.random.default_rng(), tokens)
    await source.one_token(prompt)
    start_s = time.perf_counter()
    answer = await source.one_token(prompt, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    probe_s = time.perf_counter() - start_s
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise MeasureError(f"{source.url}: it exported no KV blocks; expected an engine with a KV connector")
    bytes_before = _transferred_bytes(await destination.metrics_text())
    start_s = time.perf_counter()
    await destination.one_token(prompt, kv_transfer_params=params)
    copy_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    await destination.one_token(prompt)
    cached_s = time.perf_counter() - start_s
    moved = _transferred_bytes(await destination.metrics_text()) - bytes_before
    return Copy(tokens, probe_s, copy_s, cached_s, moved)


def _transferred_bytes(text: str) -> float:
    found = _BYTES.findall(text)
    return sum(map(float, found)) if found else float("nan")


def fit_link(copies: Sequence[Copy], kv_bytes_per_token: int, step_s: float) -> Link:
    """A line through the times of the copies.

    Args:
        copies: of several lengths.
        kv_bytes_per_token: where the engines counted no bytes.
        step_s: an iteration of one token, which the destination's answer contains and the simulator has of its own.

    Raises:
        ValueError: fewer than two lengths, or two of which the longer takes no longer.
    """
    lengths = sorted({copy.tokens for copy in copies})
    if len(lengths) < 2:
        raise ValueError(f"copies of {len(lengths)} lengths: expected at least 2")
    times_s = [float(np.median([copy.copy_s for copy in copies if copy.tokens == n])) for n in lengths]
    weights = 1 / np.asarray(times_s)
    slope, constant = np.polyfit(lengths, times_s, 1, w=weights)
    if not slope > 0 and len(lengths) > 2:
        _, covariance = np.polyfit(lengths, times_s, 1, w=weights, cov=True)
        slope = np.sqrt(covariance[0, 0])
        constant = np.average(times_s - slope * np.asarray(lengths), weights=weights)
    if not slope > 0:
        raise ValueError(f"copies of {lengths} tokens took {times_s} s: expected longer ones to take longer")
    per_token = [copy.bytes / copy.tokens for copy in copies if copy.bytes > 0]
    kv_bytes = float(np.median(per_token)) if per_token else float(kv_bytes_per_token)
    errors = np.abs((slope * np.asarray(lengths) + constant) * weights - 1)
    return Link(
        round_trip_s=max(0.0, float(constant) - step_s),
        bandwidth_bytes_per_s=kv_bytes / float(slope),
        kv_bytes_per_token=kv_bytes,
        probe_s=float(np.median([copy.probe_s for copy in copies])),
        error=float(np.median(errors)),
    )
