"""The emulated model: the next token is a function of all tokens before it, and of nothing else.

So a request that goes on elsewhere from its prompt and what it had generated gets the tokens that it would have got.
Answers end by chance, the same chance at every token: lengths are geometric.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.dispatcher.emulator.vocabulary import END, FIRST_WORD, WORDS, open_character
from fleetpilot.fleet.jit import kernel

_SEED = 0x243F6A8885A308D3
_BEYOND_ASCII = 24
"""One in so many tokens begins a character beyond ASCII."""


class Answer(NamedTuple):
    """What the model generates after a prompt.

    Attributes:
        tokens: (n,) the tokens, the end included where it came.
        keys: (n,) the random number that each was drawn by.
    """

    tokens: NDArray[np.int32]
    keys: NDArray[np.uint64]


def answer(
    prompt: NDArray[np.int32],
    limit: int,
    *,
    mean_tokens: float,
    min_tokens: int = 0,
    ignore_end: bool = False,
    stop_tokens: NDArray[np.int32] | None = None,
    stream: int = 0,
) -> Answer:
    """Generate until the answer ends.

    Args:
        prompt: the tokens before, at least one.
        limit: most tokens.
        mean_tokens: mean length of answers.
        ignore_end: the answer goes on behind an end.
        min_tokens: neither the end nor a stop token comes before so many.
        stop_tokens: further tokens that end the answer.
        stream: answers of different streams differ.
    """
    tokens = np.empty(limit, np.int32)
    keys = np.empty(limit, np.uint64)
    end_below = np.uint64(min(1.0 / mean_tokens, 1.0) * (2.0**64 - 2.0**12))
    stops = np.empty(0, np.int32) if stop_tokens is None else stop_tokens
    opened = open_character(prompt)
    lead = opened[0] if opened else 0
    state = np.uint64(_hash_of(prompt, np.uint64(stream & (2**64 - 1))))
    count = _generate(tokens, keys, state, lead, len(opened), end_below, min_tokens, ignore_end, stops)
    return Answer(tokens[:count], keys[:count])


@kernel
def _hash_of(tokens: Any, stream: Any) -> Any:
    state = np.uint64(_SEED) ^ (stream * np.uint64(0x9E3779B97F4A7C15))
    for i in range(len(tokens)):
        state = (state ^ np.uint64(tokens[i] + 1)) * np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(29)
    return state


@kernel
def _generate(
    tokens: Any,
    keys: Any,
    state: Any,
    lead: int,
    opened: int,
    end_below: Any,
    min_tokens: int,
    ignore_end: bool,
    stops: Any,
) -> int:
    """Fill `tokens` until the answer ends; returns how many there are.

    `lead` is the first byte of a character that is not complete, of which there are `opened` bytes.
    """
    for i in range(len(tokens)):
        key = state * np.uint64(0x94D049BB133111EB)
        key ^= key >> np.uint64(31)
        key *= np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(33)
        choice: Any = np.int64(key & np.uint64(0x7FFFFFFF))
        if i >= min_tokens and key < end_below:
            token = END
        elif opened > 0:
            if lead == 0xF0:  # an emoji
                token = 0x9F if opened == 1 else 0x98 if opened == 2 else 0x80 + choice % 64
            elif lead == 0xC3:  # a letter with an accent
                token = 0xA0 + choice % 32
            elif lead == 0xE0 or lead == 0xF4:  # which allow some bytes only, in a prompt
                token = (0xA0 if lead == 0xE0 else 0x80) + choice % 16
            else:
                token = 0x80 + choice % 32
        elif choice % _BEYOND_ASCII == 0:
            kind = choice // _BEYOND_ASCII % 16
            token = 0xC3 if kind < 10 else 0xE5 if kind < 14 else 0xF0
        else:
            token = FIRST_WORD + choice // _BEYOND_ASCII % WORDS
        if i < min_tokens:
            for _ in range(WORDS):
                if not _holds(stops, token):
                    break
                token = FIRST_WORD + (token + 1) % WORDS
        tokens[i] = token
        keys[i] = key
        if (token == END and not ignore_end) or (i >= min_tokens and _holds(stops, token)):
            return i + 1
        if token >= 256:
            pass
        elif opened > 0:
            opened += 1
            size = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2
            if opened == size:
                opened = 0
        else:
            lead = token
            opened = 1
        state = (state ^ np.uint64(token + 1)) * np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(29)
    return len(tokens)


@kernel
def _holds(tokens: Any, token: int) -> bool:
    found = False
    for i in range(len(tokens)):
        found |= tokens[i] == token
    return found
