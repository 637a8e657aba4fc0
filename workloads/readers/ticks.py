"""Clocks that tick too slowly: requests that a trace puts at one instant, because its clock had not moved."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.seeding import Purpose, random_stream

Ticks = Literal["spread", "raw"]


def tick_width(ticks: Ticks, width_s: float) -> float | None:
    """The tick to spread equal times over, None to leave them as they are.

    Raises:
        ValueError: if ``ticks`` is neither "spread" nor "raw".
    """
    if ticks not in ("spread", "raw"):
        raise ValueError(f"ticks = {ticks!r}: expected 'spread' or 'raw'")
    return width_s if ticks == "spread" else None


def spread_ticks(time_s: NDArray[np.float64], tick_s: float) -> NDArray[np.float64]:
    """Place requests that share an instant uniformly at random between it and the next one, at most ``tick_s`` later.

    Requests that are alone at their instant stay there, so a trace without ties is returned unchanged; those of one
    tick keep their order. The draws are fixed: the same trace always gives the same times.

    Args:
        time_s: (n,) seconds, in any order.
        tick_s: width of the clock's ticks.

    Returns:
        (n,) seconds.
    """
    instants, tick, size = np.unique(time_s, return_inverse=True, return_counts=True)
    width = np.append(np.minimum(np.diff(instants), tick_s), tick_s)[: len(instants)]
    draws = random_stream(0, Purpose.ARRIVALS).random(len(time_s))
    # Within a tick the smallest draw goes to the row that comes first.
    in_file_order = np.argsort(tick, kind="stable")
    in_time_order = np.lexsort((draws, tick))
    offset = np.empty(len(time_s))
    offset[in_file_order] = draws[in_time_order]
    return np.where(size[tick] > 1, time_s + offset * width[tick], time_s)
