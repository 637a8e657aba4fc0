"""Sessions: turns that continue one another's context, with time to think in between.

The prompt of a turn is all that was said before (system prompt, earlier prompts and answers) and what the user adds. In
the prefix tree a session is a chain: a turn's ``own_node`` ends with its answer, and is the next turn's
``prefix_node``; system prompts are roots that sessions share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.arrivals import ArrivalProcess
from fleetpilot.workloads.checks import require
from fleetpilot.workloads.lengths import Distribution, Tokens, Zipf, draw_tokens
from fleetpilot.workloads.seeding import Purpose, random_stream
from fleetpilot.workloads.table import MAX_REQUESTS, NO_NODE, NO_PARENT, RequestTable, make_table

_LONGEST_THINK_S = 1e12
_THINK_EXPECTED = f"times of at most {_LONGEST_THINK_S:g} s"

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True)
class Sessions:
    """A workload of sessions.

    Attributes:
        arrivals: when sessions start (sessions per second, not requests).
        turns: turns of a session.
        user_tokens: tokens that the user (or a tool) adds in each turn.
        output_tokens: tokens of each answer.
        think_s: seconds, see ``closed_loop``.
        system_prompts: number of different system prompts; 0 for none.
        system_tokens: tokens of each system prompt, drawn once per prompt.
        popularity: Zipf exponent of how often each system prompt is used; 0 for equally often.
        max_context_tokens: a session ends before the first turn whose prompt and answer would exceed this; None for no
            limit.
        closed_loop: if True a turn comes ``think_s`` after the last token of the turn before; if False at a fixed time,
            ``think_s`` after the *arrival* of the turn before, whether or not that one has been answered.
    """

    arrivals: ArrivalProcess
    turns: Distribution
    user_tokens: Distribution
    output_tokens: Distribution
    think_s: Distribution
    system_prompts: int = 0
    system_tokens: Distribution | None = None
    popularity: float = 1.0
    max_context_tokens: int | None = None
    closed_loop: bool = True

    def __post_init__(self) -> None:
        require(self.system_prompts >= 0, self, "system_prompts", self.system_prompts, ">= 0")
        given = self.system_tokens is not None
        require(
            given == (self.system_prompts > 0),
            self,
            "system_tokens",
            self.system_tokens,
            "given with system_prompts > 0",
        )
        require(self.popularity >= 0, self, "popularity", self.popularity, ">= 0")
        limit = self.max_context_tokens
        require(limit is None or limit >= 2, self, "max_context_tokens", limit, ">= 2 or None")

    def table(self, n: int, seed: int, name: str = "sessions") -> RequestTable:
        """As many whole sessions as it takes for ``n`` requests; the last one is cut to fit.

        Rows are in the order of session start plus thinking, so a turn follows the turn before. ``meta`` counts the
        turns that ``max_context_tokens`` cut off.

        Args:
            n: >= 1.
            seed: >= 0; each kind of draw has a stream of its own.
            name: of the table.

        Raises:
            ValueError: if ``max_context_tokens`` leaves (almost) no session a first turn.
        """
        require(n >= 1, self, "n", n, ">= 1")
        turns = draw_tokens(self.turns, n, random_stream(seed, Purpose.TURNS))
        sessions = int(np.searchsorted(np.cumsum(turns), n)) + 1
        while True:
            drawn = self._draw(turns[:sessions], seed)
            if len(drawn.chain.session) >= n:
                break
            require(
                sessions < 64 * n,
                self,
                "max_context_tokens",
                self.max_context_tokens,
                "room for a session's first turn",
            )
            sessions *= 2
            if sessions > len(turns):
                turns = draw_tokens(self.turns, sessions, random_stream(seed, Purpose.TURNS))
        started = int(drawn.chain.session[n - 1]) + 1
        starts_s = self.arrivals.draw(started, random_stream(seed, Purpose.ARRIVALS))
        chain = drawn.chain.head(n)
        return chain.table(
            name,
            starts_s[chain.session] + running_sum(chain.gap_s, chain.turn),
            closed_loop=self.closed_loop,
            system_end_tokens=drawn.system_end_tokens,
            meta={
                "format": "generated",
                "generator": type(self).__name__,
                "requests": n,
                "seed": seed,
                "sessions": started,
                "turns_cut_by_max_context_tokens": int(drawn.turns_cut[:started].sum()),
            },
        )

    def _draw(self, turns: Tokens, seed: int) -> _Drawn:
        """All turns of these sessions."""
        most = f"at most {MAX_REQUESTS:,} turns in all, those that max_context_tokens cuts off included"
        require(int(turns.sum()) <= MAX_REQUESTS, self, "turns", self.turns, most)
        session = np.repeat(np.arange(len(turns)), turns)
        turn = np.arange(len(session)) - np.repeat(np.cumsum(turns) - turns, turns)
        rows = len(session)
        user = draw_tokens(self.user_tokens, rows, random_stream(seed, Purpose.USER_TOKENS))
        output = draw_tokens(self.output_tokens, rows, random_stream(seed, Purpose.OUTPUT_TOKENS))
        think_s = self.think_s.draw(rows, random_stream(seed, Purpose.THINK_TIMES))
        require(think_s.max(initial=0.0) <= _LONGEST_THINK_S, self, "think_s", self.think_s, _THINK_EXPECTED)
        root = np.full(len(turns), NO_NODE)
        system_end_tokens = np.empty(0, np.int64)
        if self.system_tokens is not None:
            rng = random_stream(seed, Purpose.SYSTEM_PROMPTS)
            system_end_tokens = draw_tokens(self.system_tokens, self.system_prompts, rng)
            root = Zipf(self.popularity, self.system_prompts).draw(len(turns), rng).astype(np.int64) - 1
        context = np.append(system_end_tokens, 0)[root][session] + running_sum(user + output, turn)
        kept = context <= (self.max_context_tokens or np.iinfo(np.int64).max)
        chain = Chain(
            session=session[kept],
            turn=turn[kept],
            prompt_tokens=(context - output)[kept],
            output_tokens=output[kept],
            gap_s=np.where(turn > 0, think_s, 0.0)[kept],
            root=root[session][kept],
        )
        return _Drawn(chain, system_end_tokens, turns_cut=turns - np.bincount(chain.session, minlength=len(turns)))


@dataclass(frozen=True)
class _Drawn:
    """Turns of some sessions, the system prompts, and how many turns of each session the context limit cut."""

    chain: Chain
    system_end_tokens: Tokens
    turns_cut: Tokens


@dataclass(frozen=True)
class Chain:
    """Turns session by session, each session's in order from turn 0; all columns (n,).

    Attributes:
        session: identity of the session.
        turn: from 0.
        prompt_tokens: growing within a session.
        output_tokens: >= 1.
        gap_s: time since the turn before, 0 for turn 0.
        root: the prefix node that the session's first prompt starts with, -1 for none.
    """

    session: Tokens
    turn: Tokens
    prompt_tokens: Tokens
    output_tokens: Tokens
    gap_s: NDArray[np.float64]
    root: Tokens

    def head(self, n: int) -> Chain:
        """The first ``n`` rows."""
        return Chain(**{name: column[:n] for name, column in vars(self).items()})

    def table(
        self,
        name: str,
        time_s: NDArray[np.float64],
        *,
        closed_loop: bool,
        system_end_tokens: Tokens,
        meta: dict[str, object],
    ) -> RequestTable:
        """The table with its prefix tree, rows in the order of ``time_s``.

        A turn's node ends with its answer, or where the next prompt ends if that is shorter (which keeps only a part).

        Args:
            name: of the table.
            time_s: (n,) not descending within a session; the arrival of all open-loop rows.
            closed_loop: whether a turn after the first is released by the one before, after ``gap_s``.
            system_end_tokens: (roots,) the lengths of the shared roots, nodes ``0 .. roots - 1``.
            meta: of the table.
        """
        later = self.turn > 0
        continued = np.append(later[1:], False)
        next_prompt = np.append(self.prompt_tokens[1:], 0)
        own_end = np.minimum(self.prompt_tokens + self.output_tokens, next_prompt)[continued]
        own_node = np.full(len(self.turn), NO_NODE)
        own_node[continued] = len(system_end_tokens) + np.arange(len(own_end))
        before = np.append(NO_NODE, own_node[:-1])
        prefix_node = np.where(later, before, self.root)

        order = np.argsort(time_s, kind="stable")
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        parent = np.where(later, np.append(NO_PARENT, position[:-1]), NO_PARENT)
        released = later & closed_loop
        return make_table(
            name,
            np.where(released, np.nan, time_s)[order],
            self.prompt_tokens[order],
            self.output_tokens[order],
            session=self.session[order],
            turn=self.turn[order],
            parent=parent[order],
            think_s=np.where(released, self.gap_s, np.nan)[order],
            prefix_node=prefix_node[order],
            own_node=own_node[order],
            node_parent=np.append(np.full(len(system_end_tokens), NO_NODE), prefix_node[continued]),
            node_end_tokens=np.append(system_end_tokens, own_end),
            meta=meta,
        )


def running_sum(values: NDArray[_Number], turn: Tokens) -> NDArray[_Number]:
    """The sum of a session's values up to each turn."""
    total = np.cumsum(values)
    first = turn == 0
    return total - (total - values)[first][np.cumsum(first) - 1]
