"""The prefix tree against its definition, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads import infinite_cache_hit, make_table
from fleetpilot.workloads.prefix_tree import prefix_tree

BLOCK = 16
Requests = list[tuple[list[int], int]]  # content ids and prompt tokens


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    """Few different ids, so that much is shared; the last block often partial, and sometimes not in the list at all."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        ids = draw(st.lists(st.integers(0, 2), max_size=5))
        prompt = max(len(ids) * BLOCK + draw(st.sampled_from([0, 0, -4, -4, -8, 20])), 1)
        found.append((ids[: -(-prompt // BLOCK)], prompt))
    return found


def tree(found: Requests) -> tuple[list[int], list[int], list[int], list[int]]:
    offsets = np.cumsum([0] + [len(ids) for ids, _ in found])
    flat = np.array([key for ids, _ in found for key in ids], np.int64)
    parts = prefix_tree(offsets, flat, BLOCK, np.array([prompt for _, prompt in found], np.int64))
    return tuple(part.tolist() for part in parts)  # type: ignore[return-value]


def path(node: int, parents: list[int]) -> list[int]:
    """From the root down."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def tokens_in_common(a: tuple[list[int], int], b: tuple[list[int], int]) -> int:
    tokens = 0
    for number, (left, right) in enumerate(zip(a[0], b[0], strict=False)):
        ends = [min((number + 1) * BLOCK, prompt) for _, prompt in (a, b)]
        if left != right or ends[0] != ends[1]:
            break
        tokens = ends[0]
    return tokens


@given(requests())
def test_two_prompts_have_in_common_what_their_paths_have(found: Requests) -> None:
    parents, ends, prefix, own = tree(found)
    paths = [path(node, parents) for node in prefix]
    for a in range(len(found)):
        for b in range(a):
            common = [x for x, y in zip(paths[a], paths[b], strict=False) if x == y]
            assert (ends[common[-1]] if common else 0) == tokens_in_common(found[a], found[b])
    assert own == [-1] * len(found)


@given(requests())
def test_no_node_is_superfluous_and_parents_come_first(found: Requests) -> None:
    parents, ends, prefix, _ = tree(found)
    paths = [path(node, parents) for node in prefix]
    first_rows = []
    for node in range(len(ends)):
        through = [row for row, nodes in enumerate(paths) if node in nodes]
        assert len(through) >= 2  # only what is shared
        below = {nodes[nodes.index(node) + 1] for nodes in (paths[row] for row in through) if nodes[-1] != node}
        assert len(below) != 1 or any(prefix[row] == node for row in through)  # it ends where paths part or stop
        assert parents[node] < node
        first_rows.append((through[0], ends[node]))
    assert first_rows == sorted(first_rows)  # numbered by first appearance, then by depth


@given(requests(), st.permutations(range(3)))
def test_the_tree_depends_on_what_is_shared_not_on_the_ids(found: Requests, new_ids: list[int]) -> None:
    renamed = [([new_ids[key] * 2**40 + 7 for key in ids], prompt) for ids, prompt in found]
    assert tree(renamed) == tree(found)


@given(requests(), st.sampled_from([1, 4, BLOCK]))
def test_an_infinite_cache_hits_the_longest_prefix_seen_before(found: Requests, block_tokens: int) -> None:
    parents, ends, prefix, _ = tree(found)
    prompts = [prompt for _, prompt in found]
    table = make_table(
        "t",
        np.arange(len(found)),
        prompts,
        np.ones(len(found)),
        node_parent=parents,
        node_end_tokens=ends,
        prefix_node=prefix,
    )
    blocks = hits = 0
    for row, request in enumerate(found):
        seen = max((tokens_in_common(request, earlier) for earlier in found[:row]), default=0)
        blocks += -(-request[1] // block_tokens)
        hits += -(-seen // block_tokens) if seen == request[1] else seen // block_tokens
    assert infinite_cache_hit(table, block_tokens) == (hits / blocks if blocks else 0.0)


def test_what_a_continued_sequence_generated_is_in_the_infinite_cache() -> None:
    table = make_table(
        "t",
        [0.0, 1.0],
        [100, 250],
        [60, 10],
        node_parent=[-1],
        node_end_tokens=[160],
        own_node=[0, -1],
        prefix_node=[-1, 0],
    )
    assert infinite_cache_hit(table) == 160 / 350


def test_a_partial_block_is_shared_only_at_equal_length() -> None:
    ids = [7, 8]
    same = tree([(ids, 20), (ids, 20)])
    assert same[1] == [20]
    longer = tree([(ids, 20), (ids, 24)])
    assert longer[1] == [16]
    full = tree([(ids, 20), ([*ids, 9], 40)])
    assert full[1] == [16]


def test_a_prompt_that_is_the_prefix_of_others_ends_a_node() -> None:
    parents, ends, prefix, _ = tree([([1, 2], 32), ([1, 2, 3], 48), ([1, 2, 3, 4], 64)])
    assert (parents, ends, prefix) == ([-1, 0], [32, 48], [0, 1, 1])


def test_more_blocks_than_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match=r"request 1: 2 blocks of 16 tokens: expected at most 1 for its 16"):
        tree([([1], 16), ([1, 2], 16)])


def test_a_trace_of_paper_size() -> None:
    """12,000 prompts of 24 blocks, against a set of all blocks seen (an id of this trace implies those before it)."""
    rng = np.random.default_rng(1)
    lists: list[list[int]] = []
    fresh = iter(range(12_000 * 24))
    for _ in range(12_000):
        head = lists[rng.integers(len(lists))][: rng.integers(24)] if lists else []
        lists.append([*head, *(next(fresh) for _ in range(24 - len(head)))])
    parents, ends, prefix, _ = tree([(ids, 24 * BLOCK) for ids in lists])
    table = make_table(
        "t",
        np.arange(12_000),
        np.full(12_000, 24 * BLOCK),
        np.ones(12_000),
        node_parent=parents,
        node_end_tokens=ends,
        prefix_node=prefix,
    )
    seen: set[int] = set()
    hits = 0
    for ids in lists:
        hits += sum(key in seen for key in ids)
        seen.update(ids)
    assert infinite_cache_hit(table, BLOCK) == hits / (12_000 * 24)
