"""Open-loop workloads: requests that come whatever became of those before, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.arrivals import ArrivalProcess, Times
from fleetpilot.workloads.checks import require, require_positive
from fleetpilot.workloads.lengths import Lengths, Tokens
from fleetpilot.workloads.seeding import Purpose, random_stream
from fleetpilot.workloads.table import NO_SESSION, RequestTable, make_table

BLOCK_ROWS = 65_536
"""Lengths are drawn in blocks of this many rows, each from its own stream, so that parts need not hold the whole."""


@dataclass(frozen=True)
class Client:
    """One source of requests.

    Attributes:
        arrivals: when its requests come.
        lengths: prompt and output lengths of its requests.
        priority: lower is earlier.
        slo_class: index into the run's SLO classes.
    """

    arrivals: ArrivalProcess
    lengths: Lengths
    priority: int = 0
    slo_class: int = 0


@dataclass(frozen=True)
class OpenLoop:
    """The superposition of clients, each with its own arrivals, lengths and priority.

    Burstiness is a property of clients and evens out when many are superposed; one process over the whole service is
    the special case of one client.

    Attributes:
        clients: at least one. With more than one, the table's ``session`` is the client's index.
        rate_rps: if given, ``n`` requests take exactly ``n / rate_rps`` seconds: the clients' own rates then count in
            proportion only, and a rate that changes with time keeps its course in seconds. If None, the clients' rates
            hold.
        meta: provenance that goes into the table's ``meta``, JSON-serialisable pairs.
    """

    clients: tuple[Client, ...]
    rate_rps: float | None = None
    meta: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        require(len(self.clients) >= 1, self, "clients", self.clients, "at least one")
        if self.rate_rps is not None:
            require_positive(self, "rate_rps", self.rate_rps)

    def span_s(self, n: int) -> float:
        """Seconds that ``n`` requests take."""
        if self.rate_rps is not None:
            return n / self.rate_rps
        if len(self.clients) == 1:
            return self.clients[0].arrivals.span_s(n)
        low, high = 0.0, n / sum(client.arrivals.mean_rps for client in self.clients)
        while self._expected(high).sum() < n:
            low, high = high, 2 * high
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self._expected(middle).sum() < n else (low, middle)
        return high

    def table(self, n: int, seed: int, name: str = "open-loop") -> RequestTable:
        """All ``n`` requests.

        Args:
            n: >= 1.
            seed: >= 0. Arrivals and lengths come from separate streams of it.
            name: of the table.
        """
        return next(self.parts(n, n, seed, name))

    def parts(self, n: int, rows_per_part: int, seed: int, name: str = "open-loop") -> Iterator[RequestTable]:
        """The same requests as `table`, in consecutive tables that name their rows by ``source_row``.

        Only the arrival times of all requests are held (8 bytes each, 12 with several clients). Every request is
        predicted the mean output length of the first ``BLOCK_ROWS`` rows.
        """
        require(n >= 1, self, "n", n, ">= 1")
        require(rows_per_part >= 1, self, "rows_per_part", rows_per_part, ">= 1")
        arrival_s, client = self._arrivals(n, seed)
        lengths = self._length_blocks(client, seed)
        predicted = float(lengths(0)[1].mean())
        meta = {"format": "generated", "generator": type(self).__name__, "requests": n, "seed": seed, **dict(self.meta)}
        for start in range(0, n, rows_per_part):
            stop = min(start + rows_per_part, n)
            blocks = range(start // BLOCK_ROWS, (stop - 1) // BLOCK_ROWS + 1)
            pieces = [[side[_within(block, start, stop)] for side in lengths(block)] for block in blocks]
            prompt, output = (np.concatenate(side) for side in zip(*pieces, strict=True))
            rows = slice(start, stop)
            yield make_table(
                name,
                arrival_s[rows],
                prompt,
                output,
                predicted_output_tokens=np.full(stop - start, predicted),
                priority=self._of_clients("priority")[client[rows]],
                slo_class=self._of_clients("slo_class")[client[rows]],
                session=client[rows] if len(self.clients) > 1 else np.full(stop - start, NO_SESSION),
                source_row=np.arange(start, stop),
                meta=meta,
            )

    def _expected(self, horizon_s: float) -> NDArray[np.float64]:
        return np.array([client.arrivals.expected(horizon_s) for client in self.clients])

    def _of_clients(self, field: str) -> NDArray[np.int32]:
        return np.array([getattr(client, field) for client in self.clients], np.int32)

    def _arrivals(self, n: int, seed: int) -> tuple[Times, NDArray[np.int32]]:
        """Sorted times of all requests and the client of each, clients having their expected shares on average."""
        horizon_s = self.span_s(n)
        expected = self._expected(horizon_s)
        require(
            expected.sum() > 0, self, "n", n, f"a client with a rate > 0 in the {horizon_s:g} s that n requests take"
        )
        counts = random_stream(seed, Purpose.CLIENTS).multinomial(n, expected / expected.sum())
        times = [
            client.arrivals.draw_in(int(count), horizon_s, random_stream(seed, Purpose.ARRIVALS, index))
            for index, (client, count) in enumerate(zip(self.clients, counts, strict=True))
        ]
        if len(times) == 1:
            return times[0], np.broadcast_to(np.int32(0), n)
        arrival_s = np.concatenate(times)
        del times
        order = np.argsort(arrival_s, kind="stable")
        return arrival_s[order], np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]

    def _length_blocks(self, client: NDArray[np.int32], seed: int) -> Callable[[int], tuple[Tokens, Tokens]]:
        """A function from a block's index to the lengths of its rows."""

        @lru_cache(maxsize=2)
        def block(index: int) -> tuple[Tokens, Tokens]:
            rows = client[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS]
            prompt, output = np.empty((2, len(rows)), np.int64)
            for which in np.unique(rows):
                mine = rows == which
                rng = random_stream(seed, Purpose.LENGTHS, int(which), index)
                prompt[mine], output[mine] = self.clients[which].lengths.draw(int(mine.sum()), rng)
            return prompt, output

        return block


def _within(block: int, start: int, stop: int) -> slice:
    """The rows of a block that lie in [start, stop)."""
    return slice(max(start - block * BLOCK_ROWS, 0), max(stop - block * BLOCK_ROWS, 0))
