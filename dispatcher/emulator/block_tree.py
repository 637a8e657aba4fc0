"""The contents of KV blocks: a tree in which every full block of every sequence is a node (docs/model.md).

The cluster model names blocks by the nodes of a prefix tree that it is given; an engine that serves learns its
sequences as they come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.state import NIL


class BlockTree:
    """Numbers for the full blocks of sequences: the same for the same block after the same blocks.

    Args:
        block_size: tokens of a block.
        nodes: (capacity,) `NODE` records, which are written as blocks become known.
    """

    def __init__(self, block_size: int, nodes: NDArray[np.void]):
        self.block_size = block_size
        self._uses = np.zeros(0, np.int32)  # sequences in use that go through the node
        self._number: dict[tuple[int, bytes], int] = {}
        self._key: list[tuple[int, bytes]] = []
        self._free: list[int] = []
        self.move_to(nodes)

    def move_to(self, nodes: NDArray[np.void]) -> None:
        """The records lie in a longer array now."""
        self._parent = nodes["parent"]
        self._end_tokens = nodes["end_tokens"]
        self._uses = np.concatenate([self._uses, np.zeros(len(nodes) - len(self._uses), np.int32)])

    @property
    def free(self) -> int:
        """Blocks that can become known."""
        return len(self._free) + len(self._parent) - len(self._key)

    def enter(self, tokens: NDArray[np.int32], salt: bytes = b"") -> NDArray[np.int32]:
        """The nodes of a sequence's full blocks from the first, for use until `leave`."""
        content = tokens.tobytes()
        width = self.block_size * tokens.itemsize
        nodes = np.empty(len(tokens) // self.block_size, np.int32)
        node = NIL
        for i in range(len(nodes)):
            block = content[i * width : (i + 1) * width]
            key = (node, salt + block if node == NIL else block)
            number = self._number.get(key)
            node = self._add(key, (i + 1) * self.block_size) if number is None else number
            nodes[i] = node
        self.use(nodes)
        return nodes

    def use(self, nodes: NDArray[np.int32]) -> None:
        """Another use of a sequence that was entered."""
        self._uses[nodes] += 1

    def leave(self, nodes: NDArray[np.int32]) -> None:
        """The sequence is in use no more."""
        self._uses[nodes] -= 1

    def _add(self, key: tuple[int, bytes], end_tokens: int) -> int:
        if self._free:
            node = self._free.pop()
            self._key[node] = key
        else:
            node = len(self._key)
            self._key.append(key)
        self._number[key] = node
        self._parent[node] = key[0]
        self._end_tokens[node] = end_tokens
        return node

    def forget(self, resident: NDArray[np.bool_]) -> None:
        """Blocks that are neither in memory nor in use become unknown.

        Args:
            resident: (capacity,) whether a node's block is in memory.
        """
        known = len(self._key)
        keep = (self._uses[:known] > 0) | resident[:known]
        while True:  # what is kept stands on its parents
            parents = self._parent[:known][keep]
            parents = parents[parents != NIL]
            if keep[parents].all():
                break
            keep[parents] = True
        keep[self._free] = True
        for node in np.flatnonzero(~keep).tolist():
            del self._number[self._key[node]]
            self._free.append(node)
