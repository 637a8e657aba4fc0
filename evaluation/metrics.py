"""What is measured on a run's log: pure functions on its arrays.

Times are seconds, percentiles are numpy's ``linear`` method (as in vLLM's benchmark). A quantity that a request does
not have (no first token, a single output token) is NaN in the arrays, left out of the statistics and counted as
``undefined``; a statistic of nothing is None. Latencies are those of finished requests; goodput counts every request
that was offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.state import (
    COMPLETED,
    CUT,
    FAILED,
    FINISHED,
    MIGRATION_OUTCOMES,
    NEVER_ARRIVED,
    REJECTED,
)

if TYPE_CHECKING:
    from fleetpilot.cluster import RunLog
    from fleetpilot.fleet.slo import SLOClass
    from fleetpilot.workloads import RequestTable

Distribution = dict[str, float | int | None]

PERCENTILES = (50, 90, 95, 99)
SLO_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
STATUSES = {
    "finished": FINISHED,
    "failed": FAILED,
    "rejected": REJECTED,
    "cut": CUT,
    "never_arrived": NEVER_ARRIVED,
}


@dataclass(frozen=True)
class Window:
    """The scored part of a run: requests offered, and samples taken, in ``start_s <= t <= end_s``."""

    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.start_s <= self.end_s < np.inf:
            raise ValueError(f"window = ({self.start_s}, {self.end_s}): expected 0 <= start_s <= end_s, both finite")

    @property
    def length_s(self) -> float:
        """Seconds scored."""
        return self.end_s - self.start_s

    def contains(self, time_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """(n,) which times lie in it; NaN does not."""
        return (self.start_s <= time_s) & (time_s <= self.end_s)


def window_after_warmup(table: RequestTable, warmup_share: float = 0.1) -> Window:
    """From the end of the warm-up, a share of the arrivals' span, to the last open-loop arrival."""
    if not 0 <= warmup_share < 1:
        raise ValueError(f"warmup_share = {warmup_share}: expected 0 <= warmup_share < 1")
    return Window(warmup_share * table.span_s, table.span_s)


# --- one value per request ---------------------------------------------------------------------------------------


def request_metrics(requests: NDArray[np.void]) -> dict[str, NDArray[np.float64]]:
    """The latencies of each request, NaN where undefined.

    Args:
        requests: (n,) ``RunLog.requests``.

    Returns:
        (n,) arrays by name:

        - ``ttft_s``: first token - intended arrival.
        - ``tpot_s``: (last - first token) / (generated - 1); undefined where one token or none was generated.
        - ``e2e_s``: last token - intended arrival.
        - ``queueing_s``: first admission to a batch - intended arrival.
        - ``dispatch_delay_s``: dispatch - intended arrival (the time held at the dispatcher).
        - ``normalised_latency_s``: E2E / generated tokens; undefined where none was generated.
        - ``preemption_loss_s``: re-prefill wait + recompute - one decode step, summed over its preemptions (Llumnix);
          as a difference it may be negative, where a prefix cache kept what was computed.

    Raises:
        ValueError: a duration is negative or the first token comes after the last.
    """
    arrival, first, finish = requests["arrival_s"], requests["first_token_s"], requests["finish_s"]
    generated = requests["generated"].astype(np.float64)
    many = np.where(generated > 1, generated, np.nan)
    some = np.where(generated > 0, generated, np.nan)
    metrics = {
        "ttft_s": first - arrival,
        "tpot_s": (finish - first) / (many - 1),
        "e2e_s": finish - arrival,
        "queueing_s": requests["admitted_s"] - arrival,
        "dispatch_delay_s": requests["dispatch_s"] - arrival,
        "normalised_latency_s": (finish - arrival) / some,
    }
    for name, values in metrics.items():
        if np.any(values < 0):
            row = int(np.argmax(values < 0))
            raise ValueError(f"{name} of request {requests['row'][row]} = {values[row]}: expected >= 0")
    return {**metrics, "preemption_loss_s": requests["preemption_loss_s"].astype(np.float64)}


def met_slo(requests: NDArray[np.void], slo_classes: Sequence[SLOClass], scale: float = 1.0) -> NDArray[np.bool_]:
    """(n,) which requests finished within `scale` times both targets of their class.

    A request of one token has no TPOT, so only its TTFT counts. All that did not finish are misses.
    """
    metrics = request_metrics(requests)
    met = requests["status"] == FINISHED
    classes = _classes(requests, slo_classes)
    for index, slo in enumerate(slo_classes):
        mine = classes == index
        ttft_target_s = slo.ttft_target_s(requests["prompt_tokens"][mine])  # type: ignore[arg-type]  # of each
        met[mine] &= metrics["ttft_s"][mine] <= scale * ttft_target_s
        met[mine] &= ~(metrics["tpot_s"][mine] > scale * slo.tpot_s)
    return met


def _classes(requests: NDArray[np.void], slo_classes: Sequence[SLOClass]) -> NDArray[np.int32]:
    """(n,) index of each request's class; the last one stands for larger indices, as in `FleetConfig`."""
    return np.minimum(requests["slo_class"], len(slo_classes) - 1)  # type: ignore[no-any-return]


# --- statistics of many requests ---------------------------------------------------------------------------------


def distribution(values: NDArray[np.float64]) -> Distribution:
    """Count, mean, standard deviation and percentiles of the defined values; None for each where there is none."""
    defined = values[~np.isnan(values)]
    result: Distribution = {"count": len(defined), "undefined": len(values) - len(defined)}
    names = ["mean", "std", *(f"p{q}" for q in PERCENTILES)]
    if not len(defined):
        return {**result, **dict.fromkeys(names)}
    percentiles = np.percentile(defined, PERCENTILES, method="linear")
    return {**result, **dict(zip(names, map(float, [defined.mean(), defined.std(), *percentiles]), strict=True))}


BIN = np.dtype([("low_s", "f8"), ("high_s", "f8"), ("count", "i8")])
"""One bin of a histogram, with at least one value in it."""


def itl_bins(log: RunLog) -> NDArray[np.void]:
    """(m,) `BIN` of all gaps between tokens of the whole run, pooled over requests, ascending."""
    edges, counts = log.itl
    held = np.flatnonzero(counts)
    bins = np.empty(len(held), BIN)
    bins["low_s"], bins["high_s"], bins["count"] = edges[held], edges[held + 1], counts[held]
    return bins


def pooled_bins(histograms: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    """The sum of histograms over the same edges."""
    together = np.concatenate([np.empty(0, BIN), *histograms])
    low, first, place = np.unique(together["low_s"], return_index=True, return_inverse=True)
    bins = together[first]
    bins["count"] = np.bincount(place, together["count"], minlength=len(low))
    return bins


def bins_distribution(bins: NDArray[np.void]) -> Distribution:
    """As `distribution`, of values known by their bins: linear inside a bin, so exact to a bin's width."""
    counts = bins["count"]
    total = int(counts.sum())
    result: Distribution = {"count": total, "undefined": 0}
    names = ["mean", "std", *(f"p{q}" for q in PERCENTILES)]
    if not total:
        return {**result, **dict.fromkeys(names)}
    middle = (bins["low_s"] + bins["high_s"]) / 2
    mean = float(middle @ counts) / total
    std = float(np.sqrt(((middle - mean) ** 2) @ counts / total))
    cumulative = np.cumsum(counts)
    ranks = np.asarray(PERCENTILES) / 100 * total
    place = np.searchsorted(cumulative, ranks)
    inside = 1 - (cumulative[place] - ranks) / counts[place]
    percentiles = bins["low_s"][place] + inside * (bins["high_s"] - bins["low_s"])[place]
    return {**result, **dict(zip(names, map(float, [mean, std, *percentiles]), strict=True))}


def status_counts(requests: NDArray[np.void]) -> dict[str, int]:
    """How many requests were offered, and how many ended in each status."""
    counts = {name: int(np.sum(requests["status"] == status)) for name, status in STATUSES.items()}
    return {"offered": len(requests), **counts}


def goodput(
    requests: NDArray[np.void], slo_classes: Sequence[SLOClass], scales: Sequence[float] = SLO_SCALES
) -> dict[str, object]:
    """Requests that met both their SLO targets, as a share of all that were offered (None where none was).

    Returns:
        ``share`` and ``met`` (a count), ``by_class`` (share by class name, of the classes that were offered) and
        ``by_scale`` (share with all targets multiplied).
    """
    met = met_slo(requests, slo_classes)
    classes = _classes(requests, slo_classes)
    return {
        "share": _share(met),
        "met": int(met.sum()),
        "by_class": {
            slo.name: _share(met[classes == index]) for index, slo in enumerate(slo_classes) if np.any(classes == index)
        },
        "by_scale": {f"{scale:g}": _share(met_slo(requests, slo_classes, scale)) for scale in scales},
    }


def request_summary(
    requests: NDArray[np.void], itl: NDArray[np.void], slo_classes: Sequence[SLOClass]
) -> dict[str, object]:
    """Counts, latency distributions of the finished, goodput of all; for one run, or for the pooled requests of many.

    Args:
        requests: (n,) the scored requests.
        itl: (m,) `BIN` of the gaps between tokens.
        slo_classes: by index.
    """
    finished = requests[requests["status"] == FINISHED]
    return {
        "requests": {
            **status_counts(requests),
            "preempted": int(np.sum(requests["preemptions"] > 0)),
            "preempted_share": _share(requests["preemptions"] > 0),
        },
        "latency": {
            **{name: distribution(values) for name, values in request_metrics(finished).items()},
            "itl_s": bins_distribution(itl),
        },
        "goodput": goodput(requests, slo_classes),
    }


# --- the fleet over time -----------------------------------------------------------------------------------------


def fragmented_blocks(free: NDArray[np.int64], demand: NDArray[np.int64]) -> NDArray[np.int64]:
    """(t,) blocks that are free in the fleet while head-of-line requests that they could hold are blocked.

    At each sample, the heads that are *blocked* are those whose demand exceeds the free blocks of their own instance,
    ``demand[i] > free[i]``. The fleet's free blocks ``F = sum(free)`` are given to them whole, smallest first, while
    they last; what was given away is fragmented:

        max over k of sum(d_1..d_k), such that d_1 <= d_2 <= ... are the blocked demands and d_1 + ... + d_k <= F.

    Over the fleet's capacity this is the fragmentation of Llumnix (OSDI'24, Fig. 12): memory that would do, if only it
    were in one place.

    Args:
        free: (t, n) free blocks per sample and instance.
        demand: (t, n) blocks that the head of the waiting queue needs, 0 for an empty queue.
    """
    blocked = np.sort(np.where(demand > free, demand, 0), axis=1).astype(np.int64)
    given = np.cumsum(blocked, axis=1)
    return np.where(given <= free.sum(axis=1, keepdims=True), given, 0).max(axis=1, initial=0)


def samples_by_time(samples: NDArray[np.void], instances: int) -> NDArray[np.void]:
    """(t, n) the samples, one row per time."""
    return samples[np.lexsort((samples["instance"], samples["time_s"]))].reshape(-1, instances)


def fleet_summary(log: RunLog, requests: NDArray[np.void], window: Window) -> dict[str, float | int | None]:
    """How the fleet was used: samples in the window; counters of engines over the whole run (``run_*``).

    Args:
        log: the run.
        requests: the scored ones.
        window: the scored part.
    """
    instances = log.instances
    samples = samples_by_time(log.samples, len(instances))
    samples = samples[window.contains(samples["time_s"][:, 0])] if len(samples) else samples
    kv_blocks = int(instances["kv_blocks"].sum())
    fragmented = fragmented_blocks(samples["free_blocks"], samples["head_demand_blocks"])
    used = samples["used_blocks"].sum(axis=1)
    tokens = np.bincount(
        requests["instance"][requests["instance"] >= 0],
        (requests["prompt_tokens"] + requests["generated"])[requests["instance"] >= 0],
        minlength=len(instances),
    )
    return {
        "kv_use": _mean(used / kv_blocks),
        "kv_use_max": float(used.max() / kv_blocks) if len(used) else None,
        "fragmentation": _mean(fragmented / kv_blocks),
        "batch_size": _mean(samples["running"][samples["running"] > 0]),
        "waiting_per_instance": _mean(samples["waiting"]),
        "load_max_over_mean": _ratio(tokens.max(initial=0.0), tokens.mean()) if len(tokens) else None,
        "run_busy_share": _ratio(instances["busy_s"].sum(), instances["alive_s"].sum()),
        "run_prefix_hit_ratio": _ratio(instances["prefix_hits_tokens"].sum(), instances["prefix_queries_tokens"].sum()),
        "run_preemptions": int(instances["preemptions"].sum()),
        "run_instance_seconds": float(instances["alive_s"].sum()),
        "run_instances": _ratio(instances["alive_s"].sum(), log.end_s),
        "run_held_s": float(log.held_s),
    }


def migration_summary(log: RunLog) -> dict[str, object]:
    """The migrations of a whole run: how they ended, what was copied, how long requests stood still."""
    migrations, requests = log.migrations, log.requests
    moved = requests[requests["downtime_s"] > 0]
    return {
        "outcomes": dict(
            zip(
                MIGRATION_OUTCOMES,
                np.bincount(migrations["outcome"], minlength=len(MIGRATION_OUTCOMES)).tolist(),
                strict=True,
            )
        ),
        "copied_blocks": int(migrations["blocks"].sum()),
        "stages": distribution(migrations["stages"][migrations["stages"] > 0].astype(np.float64)),
        "duration_s": distribution((migrations["end_s"] - migrations["start_s"])[migrations["outcome"] == COMPLETED]),
        "downtime_s": distribution(moved["downtime_s"] / np.maximum(moved["migrations"], 1)),
        "restarts": int(requests["restarts"].sum()),
    }


# --- a whole run -------------------------------------------------------------------------------------------------


def summary(
    log: RunLog, scored: NDArray[np.bool_], window: Window, slo_classes: Sequence[SLOClass]
) -> dict[str, object]:
    """Everything measured on one run, as plain JSON values.

    Args:
        log: the run.
        scored: (n,) which requests were offered in the window (`offered_s`).
        window: what is scored.
        slo_classes: the run's classes, by index.
    """
    requests = log.requests[scored]
    result = request_summary(requests, itl_bins(log), slo_classes)
    return {
        "window": {"start_s": window.start_s, "end_s": window.end_s},
        **result,
        "fleet": fleet_summary(log, requests, window),
        "migrations": migration_summary(log),
    }


def vllm_bench_result(
    log: RunLog, scored: NDArray[np.bool_], window: Window, slo_classes: Sequence[SLOClass]
) -> dict[str, float | int | None]:
    """The scored requests under the result names of ``vllm bench serve``, so that the same tools read both.

    ``duration`` runs from the start of the window to the last finish, as there; ``failed`` is all that did not finish.
    """
    requests = log.requests[scored]
    finished = requests[requests["status"] == FINISHED]
    metrics = request_metrics(finished)
    duration = float(finished["finish_s"].max()) - window.start_s if len(finished) else None
    prompt, output = int(finished["prompt_tokens"].sum()), int(finished["generated"].sum())
    result: dict[str, float | int | None] = {
        "num_prompts": len(requests),
        "completed": len(finished),
        "failed": len(requests) - len(finished),
        "duration": duration,
        "request_rate": _ratio(len(requests), window.length_s),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _ratio(len(finished), duration),
        "request_goodput": _ratio(int(met_slo(requests, slo_classes).sum()), duration),
        "output_throughput": _ratio(output, duration),
        "total_token_throughput": _ratio(prompt + output, duration),
        "max_concurrent_requests": _max_concurrent(finished),
    }
    distributions: Mapping[str, Distribution] = {
        "ttft": distribution(metrics["ttft_s"]),
        "tpot": distribution(metrics["tpot_s"]),
        "itl": bins_distribution(itl_bins(log)),
        "e2el": distribution(metrics["e2e_s"]),
    }
    for name, values in distributions.items():
        for theirs, ours in {
            "mean": "mean",
            "median": "p50",
            "std": "std",
            **{f"p{q}": f"p{q}" for q in PERCENTILES},
        }.items():
            value = values[ours]
            result[f"{theirs}_{name}_ms"] = None if value is None else 1e3 * value
    return result


def _max_concurrent(requests: NDArray[np.void]) -> int:
    """Most requests between arrival and finish at one time; one that ends as another arrives is not counted with it."""
    times = np.concatenate([requests["finish_s"], requests["arrival_s"]])
    steps = np.repeat([-1, 1], len(requests))
    return int(np.cumsum(steps[np.lexsort((steps, times))]).max(initial=0))


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _ratio(part: float, whole: float | None) -> float | None:
    return float(part / whole) if whole else None
