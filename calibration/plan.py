"""What a calibration measures: which prompts, batches and contexts, in which order, and which only test the fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fleetpilot.calibration.fit import Measurement, prefill_iterations

STEPS = 24
"""Decode steps that are measured at a time."""
LONGEST_PROMPT = 8192
"""Tokens; longer prompts take seconds even on large accelerators."""
MOST_DECODES = 64
_SMALL_PROMPT = 64
_FILLED = 0.8
"""Share of the KV blocks that a measured batch may take."""
_PROMPTS_HELD_OUT = (96, 384, 1536, 3072, 6144)
_CONTEXTS = (64, 512, 2048)
_BATCHES_HELD_OUT = ((3, 256), (6, 1024), (12, 256), (24, 128))
_MIXED = ((4, 256, 0.25), (4, 256, 0.9), (8, 128, 0.5), (2, 512, 0.7))
_MIXED_HELD_OUT = ((6, 192, 0.4),)
"""Batch, context, and the prompt's share of an iteration's budget."""
_LONGEST_MIXED = 1024


@dataclass(frozen=True)
class Limits:
    """What an engine allows.

    Attributes:
        kv_tokens: capacity of its KV blocks.
        max_model_len: tokens of a request.
        max_num_seqs: requests in a batch.
        max_num_batched_tokens: tokens computed in an iteration.
        measured_prompt: tokens of the longest prompt that the user wants measured.
    """

    kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    measured_prompt: int = LONGEST_PROMPT

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is measured."""
        return min(self.measured_prompt, self.max_model_len - 2, int(_FILLED * self.kv_tokens))

    def fit_decodes(self, batch: int, context: int) -> bool:
        """Whether a batch can decode for long enough to be measured."""
        tokens = context + 2 * STEPS
        return (
            batch <= self.max_num_seqs
            and context <= self.longest_prompt
            and tokens + STEPS < self.max_model_len
            and batch * tokens <= _FILLED * self.kv_tokens
        )


@dataclass(frozen=True)
class Point:
    """One thing to measure.

    Attributes:
        kind: ``prefill`` (time to the first token of a lone prompt), ``decode`` (a step of a batch), ``mixed`` (an
            iteration of a batch that prefills a prompt besides).
        prompt_tokens: that are prefilled; 0 for ``decode``.
        batch: requests that decode.
        context_tokens: of each of their prompts.
        held_out: it tests the fit.
    """

    kind: str
    prompt_tokens: int
    batch: int
    context_tokens: int
    held_out: bool = False

    @property
    def key(self) -> str:
        """Its name in files and reports."""
        if self.kind == "prefill":
            return f"prefill of {self.prompt_tokens} tokens"
        step = f"decode step of {self.batch} x {self.context_tokens} tokens"
        return step if self.kind == "decode" else f"{step} with a prefill of {self.prompt_tokens}"

    def measurement(self, time_s: float, kv_tokens: float, limits: Limits) -> Measurement:
        """A measured time as what the fit takes; `kv_tokens` the batch read in an iteration."""
        n = self.prompt_tokens
        if self.kind == "prefill":
            iterations = prefill_iterations(n, limits.max_num_batched_tokens)
        else:
            iterations = np.array([(n, n * n / 2, self.batch, kv_tokens)], np.float64)
        return Measurement(time_s, iterations, self.kind == "prefill", self.held_out, self.key)


def plan(limits: Limits) -> list[Point]:
    """The points of one round."""
    return [*_prefills(limits), *_decodes(limits), *_mixed(limits)]


def _prefills(limits: Limits) -> list[Point]:
    longest = limits.longest_prompt
    lengths = {1, 16, longest}
    lengths |= {_SMALL_PROMPT << i for i in range(32) if _SMALL_PROMPT << i <= longest}
    held_out = {n for n in _PROMPTS_HELD_OUT if n < longest}
    return [Point("prefill", n, 0, 0, n in held_out) for n in sorted(lengths | held_out)]


def _decodes(limits: Limits) -> list[Point]:
    """Large batches first: the smaller ones find their prompts in the prefix cache."""
    most = min(limits.max_num_seqs, MOST_DECODES)
    batches = sorted({most, *(1 << i for i in range(12) if 1 << i <= most)}, reverse=True)
    pairs = [(batch, context, False) for context in _CONTEXTS for batch in batches]
    pairs += [(batch, context, True) for batch, context in _BATCHES_HELD_OUT]
    return [
        Point("decode", 0, batch, context, out) for batch, context, out in pairs if limits.fit_decodes(batch, context)
    ]


def _mixed(limits: Limits) -> list[Point]:
    most = min(limits.max_num_batched_tokens, _LONGEST_MIXED, limits.longest_prompt)
    points = [
        Point("mixed", int(share * most), batch, context, held_out)
        for shares, held_out in ((_MIXED, False), (_MIXED_HELD_OUT, True))
        for batch, context, share in shares
    ]
    return [
        point
        for point in points
        if 0 < point.prompt_tokens <= limits.max_num_batched_tokens - point.batch
        and point.batch < limits.max_num_seqs
        and limits.fit_decodes(point.batch, point.context_tokens + point.prompt_tokens // point.batch)
    ]
