"""Sessions: chains of growing context that the table accepts, in a closed and in an open loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.workloads.arrivals import Gamma, Poisson
from fleetpilot.workloads.lengths import Fixed, Geometric, LogNormal, Uniform, Zipf
from fleetpilot.workloads.prefix_tree import infinite_cache_hit
from fleetpilot.workloads.sessions import Sessions
from fleetpilot.workloads.table import NO_NODE, NO_PARENT, RequestTable, validated

CHAT = Sessions(
    arrivals=Poisson(0.5),
    turns=Geometric(4),
    user_tokens=LogNormal(80, 1.0),
    output_tokens=Geometric(200),
    think_s=LogNormal(30, 1.0),
    system_prompts=5,
    system_tokens=Uniform(100, 900),
)


@st.composite
def generators(draw: st.DrawFn) -> Sessions:
    system_prompts = draw(st.integers(0, 4))
    return Sessions(
        arrivals=draw(st.sampled_from([Poisson(1.0), Gamma(3.0, 4.0)])),
        turns=draw(st.sampled_from([Fixed(1), Geometric(3), Zipf(1.5, 20), Uniform(1, 9)])),
        user_tokens=draw(st.sampled_from([Fixed(1), LogNormal(50, 2), Uniform(1, 300)])),
        output_tokens=draw(st.sampled_from([Fixed(1), Geometric(100)])),
        think_s=draw(st.sampled_from([Fixed(1e-9), Fixed(10), LogNormal(5, 2)])),
        system_prompts=system_prompts,
        system_tokens=Uniform(1, 400) if system_prompts else None,
        popularity=draw(st.sampled_from([0.0, 1.0, 2.5])),
        max_context_tokens=draw(st.sampled_from([None, 2_000, 5_000])),
        closed_loop=draw(st.booleans()),
    )


def ends(table: RequestTable) -> np.ndarray:
    """The end of each node, and 0 for no node."""
    return np.append(table.node_end_tokens, 0)


@given(generators(), st.integers(1, 300), st.integers(0, 2**40))
def test_every_generator_makes_valid_chains(generator: Sessions, n: int, seed: int) -> None:
    table = generator.table(n, seed)
    assert len(validated(table)) == n
    later = table.turn > 0
    parent = table.parent
    assert np.array_equal(later, parent != NO_PARENT)
    assert np.array_equal(table.turn[later], table.turn[parent[later]] + 1)
    assert np.array_equal(table.session[later], table.session[parent[later]])
    # The next turn's prompt is the whole context of the turn before, and something new.
    assert np.array_equal(table.prefix_node[later], table.own_node[parent[later]])
    context = table.prompt_tokens + table.output_tokens
    assert np.array_equal(ends(table)[table.prefix_node[later]], context[parent[later]])
    assert np.all(table.prompt_tokens[later] > context[parent[later]])
    # A node for each turn that is continued, and no other.
    continued = np.isin(np.arange(n), parent)
    assert np.array_equal(table.own_node != NO_NODE, continued)
    own = table.own_node[continued]
    assert len(np.unique(own)) == len(own)
    assert len(table.node_parent) == generator.system_prompts + len(own)
    assert np.array_equal(ends(table)[own], context[continued])
    # First turns start with a system prompt.
    roots = table.prefix_node[~later]
    if generator.system_prompts:
        assert np.all((roots >= 0) & (roots < generator.system_prompts))
    else:
        assert np.all(roots == NO_NODE)
    if generator.max_context_tokens is not None:
        assert context.max() <= generator.max_context_tokens
    # Released by the turn before, or at a time of its own.
    assert np.array_equal(np.isnan(table.arrival_s), later & generator.closed_loop)
    assert np.array_equal(np.isnan(table.think_s), ~(later & generator.closed_loop))
    if not generator.closed_loop:
        assert np.all(table.arrival_s[later] >= table.arrival_s[parent[later]])


def test_statistics_of_a_chat() -> None:
    table = CHAT.table(100_000, 2)
    assert table.turn.max() > 10
    assert len(table) / len(np.unique(table.session)) == pytest.approx(4.0, rel=0.02)
    assert table.output_tokens.mean() == pytest.approx(200, rel=0.02)
    later = table.turn > 0
    added = table.prompt_tokens[later] - ends(table)[table.prefix_node[later]]
    assert np.median(added) == pytest.approx(80, rel=0.03)
    assert np.median(table.think_s[later]) == pytest.approx(30, rel=0.03)
    starts = table.arrival_s[~later]
    assert len(starts) / starts[-1] == pytest.approx(0.5, rel=0.01)


def test_system_prompts_follow_zipf() -> None:
    table = CHAT.table(50_000, 2)
    first = table.turn == 0
    counts = np.bincount(table.prefix_node[first], minlength=5)
    weights = 1 / np.arange(1, 6)
    assert counts / counts.sum() == pytest.approx(weights / weights.sum(), rel=0.05)


def test_infinite_cache_finds_all_but_the_new_tokens() -> None:
    """All of the context before is shared; misses are what users add, and the system prompts once each."""
    table = CHAT.table(5_000, 2)
    prompt = table.prompt_tokens.sum()
    new = (table.prompt_tokens - ends(table)[table.prefix_node]).sum() + ends(table)[:5].sum()
    assert infinite_cache_hit(table) == pytest.approx(1 - new / prompt, abs=1e-3)


def test_closed_and_open_loop_have_the_same_sessions() -> None:
    """Only when turns come differs. The rows are in the same order: that of session start plus thinking."""
    closed = CHAT.table(3_000, 9)
    opened = Sessions(**{**vars(CHAT), "closed_loop": False}).table(3_000, 9)
    for column in ("prompt_tokens", "output_tokens", "session", "turn", "parent", "prefix_node", "own_node"):
        assert np.array_equal(getattr(closed, column), getattr(opened, column))
    later = opened.turn > 0
    gaps = opened.arrival_s[later] - opened.arrival_s[opened.parent[later]]
    assert gaps == pytest.approx(closed.think_s[later], abs=1e-6)


def test_one_kind_of_draw_does_not_move_another() -> None:
    base = CHAT.table(2_000, 9)
    longer = Sessions(**{**vars(CHAT), "output_tokens": Geometric(500), "arrivals": Gamma(0.5, 3.0)}).table(2_000, 9)
    by_turn = np.lexsort((base.turn, base.session))
    by_turn_longer = np.lexsort((longer.turn, longer.session))
    added = [
        (table.prompt_tokens - ends(table)[table.prefix_node])[order]
        for table, order in ((base, by_turn), (longer, by_turn_longer))
    ]
    assert np.array_equal(*added)
    assert np.array_equal(base.think_s[by_turn], longer.think_s[by_turn_longer], equal_nan=True)


def test_same_seed_same_sessions() -> None:
    first, second, other = CHAT.table(500, 1), CHAT.table(500, 1), CHAT.table(500, 2)
    assert np.array_equal(first.arrival_s, second.arrival_s, equal_nan=True)
    assert np.array_equal(first.prompt_tokens, second.prompt_tokens)
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens)


def test_turns_beyond_the_context_limit_are_cut_and_counted() -> None:
    generator = Sessions(Poisson(1.0), Fixed(10), Fixed(60), Fixed(40), Fixed(1), max_context_tokens=350)
    table = generator.table(300, 0)
    assert table.turn.max() == 2  # 100 tokens a turn
    assert table.meta["sessions"] == 100
    assert table.meta["turns_cut_by_max_context_tokens"] == 700


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system_prompts": -1}, "Sessions: system_prompts = -1: expected >= 0"),
        ({"system_prompts": 0}, "Sessions: system_tokens = .* expected given with system_prompts > 0"),
        ({"popularity": -1.0}, r"Sessions: popularity = -1\.0: expected >= 0"),
        ({"max_context_tokens": 1}, "Sessions: max_context_tokens = 1: expected >= 2 or None"),
        ({"max_context_tokens": 50}, "max_context_tokens = 50: expected room for a session's first turn"),
    ],
)
def test_errors_name_parameter_value_and_expectation(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sessions(**{**vars(CHAT), **change}).table(10, 0)  # type: ignore[arg-type]


def test_no_requests_is_an_error() -> None:
    with pytest.raises(ValueError, match="Sessions: n = 0: expected >= 1"):
        CHAT.table(0, 0)
