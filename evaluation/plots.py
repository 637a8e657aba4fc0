"""Plots of a scenario's results. Colours by Okabe and Ito; lines are told apart by their style too."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.state import FINISHED
from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.comparison import COMPARED, Metric, PolicyResult, ScenarioResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":")
_CDF_POINTS = np.linspace(0, 1, 201)


@dataclass(frozen=True)
class Plot:
    """A drawing, as SVG text for a page and as PNG for a file."""

    title: str
    svg: str
    png: bytes


def plots(result: ScenarioResult) -> list[Plot]:
    """Latency distributions, KV use over time and, where there is something to compare, differences to the baseline."""
    drawn: dict[str, Callable[[ScenarioResult], Figure]] = {"Latency": _latencies, "KV use": _kv_use}
    if len(result.policies) > 1 and len(result.baseline.segments) > 1:
        drawn["Differences"] = _differences
    figures = {title: draw(result) for title, draw in drawn.items()}
    return [Plot(title, _svg(figure), _png(figure)) for title, figure in figures.items()]


def over_time(
    title: str,
    curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
    ylabel: str,
    *,
    shaded_s: tuple[float, float] | None = None,
) -> Plot:
    """Curves over time.

    Args:
        title: of the drawing.
        curves: by name: (n,) times in seconds and (n,) values.
        ylabel: what the values are.
        shaded_s: from and to where the background is shaded.
    """
    figure, (axis,) = _figure(1)
    if shaded_s is not None:
        axis.axvspan(*shaded_s, color="#eeeeee")
    for index, (name, (time_s, values)) in enumerate(curves.items()):
        axis.plot(time_s, values, **_line(index), label=name)
    axis.set(xlabel="time (s)", ylabel=ylabel)
    axis.set_ylim(bottom=0)
    _with_legend(figure, axis)
    return Plot(title, _svg(figure), _png(figure))


class Column(NamedTuple):
    """One of several situations side by side.

    Attributes:
        title: of the situation.
        ylabel: what the curves show.
        curves: by name: (n,) times in seconds and (n,) values.
        shaded_s: from and to where the background is shaded.
        values: by name, drawn below the curves.
    """

    title: str
    ylabel: str
    curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    shaded_s: tuple[float, float] | None
    values: Mapping[str, float]


def small_multiples(title: str, columns: Sequence[Column], xlabel: str) -> Plot:
    """Situations side by side: curves over time above, a value for each of the same names and others below.

    Args:
        title: of the drawing.
        columns: the situations; all have the same names in `values`.
        xlabel: what the values are.
    """
    from matplotlib.figure import Figure

    most = max(value for column in columns for value in column.values.values())
    figure = Figure(figsize=(3 * len(columns), 6))
    rows = figure.subplots(2, len(columns), squeeze=False)
    for place, (column, above, below) in enumerate(zip(columns, *rows, strict=True)):
        if column.shaded_s is not None:
            above.axvspan(*column.shaded_s, color="#eeeeee")
        for index, (name, (time_s, values)) in enumerate(column.curves.items()):
            above.plot(time_s, values, **_line(index), label=name)
        above.set(title=column.title, xlabel="time (s)", ylabel=column.ylabel)
        above.set_ylim(bottom=0)
        names = list(column.values)
        below.barh(range(len(names)), list(column.values.values()), color=COLOURS[0], height=0.6)
        below.set(xlabel=xlabel, xlim=(0, most), ylim=(len(names) - 0.5, -0.5))
        below.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return Plot(title, _svg(figure), _png(figure))


def _latencies(result: ScenarioResult) -> Figure:
    figure, axes = _figure(2)
    for axis, (name, title) in zip(axes, {"ttft_s": "TTFT", "e2e_s": "E2E"}.items(), strict=True):
        for index, policy in enumerate(result.policies):
            finished = policy.requests["status"] == FINISHED
            values = metrics.request_metrics(policy.requests[finished])[name]
            if len(values):
                # requests that never finished have an infinite latency: the curve ends below 1
                share = len(values) / len(policy.requests)
                axis.plot(np.quantile(values, _CDF_POINTS), share * _CDF_POINTS, **_line(index), label=policy.policy)
        axis.set(xscale="log", xlabel=f"{title} (s)", ylabel="share of offered requests", ylim=(0, 1))
    return _with_legend(figure, axes[-1])


def _kv_use(result: ScenarioResult) -> Figure:
    figure, (axis,) = _figure(1)
    for index, policy in enumerate(result.policies):
        time_s, use = _kv_use_of(policy)
        axis.plot(time_s, 100 * use, **_line(index), label=policy.policy)
    seed = result.baseline.runs[0].summary["seed"]
    axis.set(xlabel=f"time (s), first segment, seed {seed}", ylabel="KV use of the fleet (%)", ylim=(0, 100))
    return _with_legend(figure, axis)


def _kv_use_of(policy: PolicyResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    run = policy.runs[0]
    samples = metrics.samples_by_time(run.samples(), len(run.summary["config"]["fleet"]["instances"]))
    used = samples["used_blocks"].sum(axis=1)
    return samples["time_s"][:, 0], used / (used + samples["free_blocks"].sum(axis=1))


def _differences(result: ScenarioResult) -> Figure:
    figure, axes = _figure(len(COMPARED))
    for axis, metric in zip(axes, COMPARED, strict=True):
        _draw_intervals(axis, result, metric)
    for axis in axes[1:]:
        axis.set_yticklabels([])
    figure.tight_layout()
    return figure


def _draw_intervals(axis: Axes, result: ScenarioResult, metric: Metric) -> None:
    others, baseline = result.policies[1:], result.baseline
    for place, policy in enumerate(others):
        interval = result.differences[policy.policy, metric.title].interval
        if interval is not None:
            colour = COLOURS[0] if interval.excludes_zero else "#777777"
            axis.plot([interval.low, interval.high], [place, place], color=colour)
            axis.plot(interval.estimate, place, "o", color=colour)
    better = "lower" if metric.lower_is_better else "higher"
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlabel=f"{metric.title}, less {baseline.policy}'s ({better} is better)", ylim=(len(others) - 0.5, -0.5))
    axis.set_yticks(range(len(others)), [policy.policy for policy in others])
    axis.xaxis.label.set_fontsize("small")


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4))
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _line(index: int) -> dict[str, Any]:
    style = LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style, "linewidth": 1.5}


def _with_legend(figure: Figure, axis: Axes) -> Figure:
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.tight_layout()
    return figure


def _svg(figure: Figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    # a fixed salt: the same figure is the same text
    with matplotlib.rc_context({"svg.hashsalt": "fleetpilot", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
