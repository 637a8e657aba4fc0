"""What a table of requests is like: rate, burstiness, lengths, sessions, shared prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.evaluation.metrics import distribution
from fleetpilot.evaluation.tables import Table, Text, number, plain

if TYPE_CHECKING:
    from fleetpilot.workloads import RequestTable


def workload_summary(table: RequestTable) -> dict[str, object]:
    """Statistics of a table as plain JSON values; those of arrivals are of the open-loop ones.

    ``gap_cv`` is the coefficient of variation of the gaps between arrivals, ``idc_1s`` and ``idc_60s`` the index of
    dispersion (variance / mean) of the counts in bins of 1 s and 60 s; all three are 1 for a Poisson process.
    """
    from fleetpilot.workloads import infinite_cache_hit

    arrival_s = table.arrival_s[~np.isnan(table.arrival_s)]
    gaps_s = np.diff(arrival_s)
    return {
        "name": table.name,
        "requests": len(table),
        "closed_loop_requests": len(table) - len(arrival_s),
        "span_s": table.span_s,
        "rate_rps": len(arrival_s) / table.span_s if table.span_s else None,
        "gap_cv": float(gaps_s.std() / gaps_s.mean()) if table.span_s else None,
        "idc_1s": _index_of_dispersion(arrival_s, 1.0),
        "idc_60s": _index_of_dispersion(arrival_s, 60.0),
        "prompt_tokens": distribution(table.prompt_tokens.astype(np.float64)),
        "output_tokens": distribution(table.output_tokens.astype(np.float64)),
        "sessions": len(np.unique(table.session[table.session >= 0])),
        "infinite_cache_hit": infinite_cache_hit(table) if len(table) else None,
    }


def _index_of_dispersion(arrival_s: NDArray[np.float64], bin_s: float) -> float | None:
    """Variance / mean of the counts in the whole bins of the span; None for fewer than two."""
    bins = int(arrival_s[-1] // bin_s) if len(arrival_s) else 0
    if bins < 2:
        return None
    within = arrival_s[arrival_s <= bins * bin_s]
    # Only bins with arrivals are held: a span may have any number of others.
    counts = np.unique(np.minimum(within // bin_s, bins - 1), return_counts=True)[1]
    mean = len(within) / bins
    variance = (np.square(counts - mean).sum() + (bins - len(counts)) * mean**2) / bins
    return float(variance / mean)


def workload_text(summary: dict[str, Any]) -> str:
    """A summary for a terminal."""
    columns = ("mean", "p50", "p90", "p95", "p99")
    rows = [
        [Text(name.replace("_", " ")), *(Text(number(summary[name][column])) for column in columns)]
        for name in ("prompt_tokens", "output_tokens")
    ]
    hit = summary["infinite_cache_hit"]
    lines = [
        f"{summary['requests']:,} requests ({summary['closed_loop_requests']:,} released by the one before) "
        f"in {summary['span_s']:,.1f} s: {number(summary['rate_rps'])} arrivals/s",
        f"gaps: coefficient of variation {number(summary['gap_cv'])}; counts: index of dispersion "
        f"{number(summary['idc_1s'])} in 1 s, {number(summary['idc_60s'])} in 60 s",
        f"{summary['sessions']:,} sessions; prefix hits with an infinite cache "
        f"{number(None if hit is None else 100 * hit)} %",
    ]
    return plain(Table(summary["name"], ["", *columns], rows)) + "\n".join(lines)
