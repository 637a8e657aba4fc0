"""Which prefixes each instance probably holds, by the dispatches so far: `fleet.prefix_index` for a live fleet.

The rule is the simulator's: per instance the most recently used blocks up to its KV capacity, the deepest of a prompt
going first. The simulator knows all content beforehand and names it by dense indices; here blocks are named by hashes
of all content up to their end, as they come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK_TOKENS = 32
"""Tokens of a block where prompts are tokenised."""
BLOCK_CHARACTERS = 128
"""Characters of a block where they are not."""


def block_names(content: Sequence[int] | str, salt: Hashable = None) -> tuple[int, ...]:
    """Names of the full blocks of a prompt, each standing for all content up to its end.

    Args:
        content: token ids, or text.
        salt: what parts contents that must not be shared (model, cache salt).
    """
    size = BLOCK_CHARACTERS if isinstance(content, str) else BLOCK_TOKENS
    names = []
    name = hash((salt, size))
    for end in range(size, len(content) + 1, size):
        part = content[end - size : end]
        name = hash((name, part if isinstance(part, str) else tuple(part)))
        names.append(name)
    return tuple(names)


class PrefixIndex:
    """Blocks by instance.

    Attributes:
        tokens: that each instance is held to have.
    """

    def __init__(self, instances: int):
        self._blocks: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(instances)]
        self.tokens = [0.0] * instances

    def match(self, blocks: Sequence[int], block_tokens: float) -> list[float]:
        """Tokens of a prompt that each instance holds from its start."""
        return [_matched(held, blocks) * block_tokens for held in self._blocks]

    def insert(self, slot: int, blocks: Sequence[int], block_tokens: float, most_tokens: float) -> None:
        """A prompt was sent to an instance, which holds `most_tokens` at most."""
        held = self._blocks[slot]
        for name in reversed(blocks):
            if name in held:
                held.move_to_end(name)
            else:
                held[name] = block_tokens
                self.tokens[slot] += block_tokens
        while self.tokens[slot] > most_tokens and held:
            self.tokens[slot] -= held.popitem(last=False)[1]

    def grow(self) -> None:
        """One more instance."""
        self._blocks.append(OrderedDict())
        self.tokens.append(0.0)

    def forget(self, slot: int) -> None:
        """The instance holds nothing any more."""
        self._blocks[slot].clear()
        self.tokens[slot] = 0.0


def _matched(held: OrderedDict[int, float], blocks: Sequence[int]) -> int:
    """How many blocks from the first are held: all before a held one are held too, so the last held one is searched."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
