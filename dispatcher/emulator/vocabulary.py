"""The tokens of emulated engines: bytes, a few words, and an end.

Text is tokenised into its UTF-8 bytes; what the engines generate is mostly whole words, and now and then the bytes of a
letter beyond ASCII, one token each, so that a token can end inside a character as with a real tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

END = 256
"""Ends an answer; has no text."""

FIRST_WORD = 257

_TEXT = (
    "the of and to in is that it for as with on be at by this have from or one had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around another came come work "
    "three word must because does part even place well such here take why things help put years different away again "
    "off went old number great tell men say small every found still between name should home big give air line set "
    "own under read last never us left end along while might next sound below saw something thought both few those "
    "always looked show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took four head above kind began almost live page "
    "got earth need far hand high year mother "
)
_MARKS = [".", ",", ";", ":", "?", "!", "\n", " -", " (", ")"]

PIECES: list[bytes] = [bytes([byte]) for byte in range(256)]
PIECES += [b""]
PIECES += [f" {word}".encode() for word in _TEXT.split()]
PIECES += [mark.encode() for mark in _MARKS]
"""By token."""

VOCABULARY = len(PIECES)
WORDS = VOCABULARY - FIRST_WORD

NAMES: list[str] = [piece.decode("utf-8", "replace") for piece in PIECES]
"""Tokens shown one by one."""
NAMES[END] = "</s>"


def tokenize(text: str) -> NDArray[np.int32]:
    """The tokens of a text: its UTF-8 bytes (half a surrogate pair has none and becomes a question mark)."""
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)


def detokenize(tokens: Iterable[int]) -> str:
    """The text of tokens; bytes that are no character are shown as U+FFFD."""
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")


class Detokenizer:
    """The text of tokens as they come; holds back characters that are not complete.

    Args:
        before: the tokens that the text follows. As with vLLM, where they end inside a character, the text that
            completes it is the whole text from their start.
    """

    def __init__(self, before: Sequence[int] | NDArray[np.int32] = ()):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = self._decode(before) if open_character(before) else ""

    def _decode(self, tokens: Iterable[int]) -> str:
        return self._decoder.decode(b"".join([PIECES[token] for token in tokens]))

    def add(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        text = self._decode(tokens)
        if text and self._pending:
            text, self._pending = self._pending + text, ""
        return text


def open_character(tokens: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """The last tokens, where they are the first bytes of a character."""
    tail = [int(token) for token in tokens[-3:]]
    for length, lead in enumerate(reversed(tail), 1):
        if 0x80 <= lead < 0xC0:
            continue
        size = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 0
        return tail[-length:] if length < size else []
    return []
