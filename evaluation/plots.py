"""Plots of an evaluation's results. Colours by Okabe and Ito; lines are told apart by their dashes too."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.state import COMPLETED, FINISHED
from fleetpilot.evaluation import metrics
from fleetpilot.evaluation.comparison import COMPARED, GOODPUT, Metric, PolicyResult, ScenarioResult
from fleetpilot.evaluation.overview import common_policies, goodputs, policies_of
from fleetpilot.evaluation.statistics import performance_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fleetpilot.evaluation.runs import StoredRun

INK = "#222222"
"""Of text, axes and the lines of the last colour; on a page it is the page's own."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
DASHES = ((), (6, 3), (1.5, 2.5), (9, 2.5, 1.5, 2.5), (12, 4, 4, 4), (6, 2, 1.5, 2, 1.5, 2))
"""Lengths of lines and gaps in points: with each all colours, before the next."""
MOST_LETTERS = 24
"""Of a policy's name in a plot."""
MAX_TIMELINES = 4
"""Policies whose instances are drawn over time."""
_CDF_POINTS = np.linspace(0, 1, 201)
_PROFILE_POINTS = np.linspace(0, 100, 201)
_PANEL_INCHES = (5.2, 3.5)
_ROW_INCHES = 0.17
"""Of a policy where each has a row of its own."""
_LINE_WIDTH = 1.5
_LEGEND_ROWS = 21
_TIMELINE_COLUMNS = 600
_PNG_COLUMNS = 3


Panel = Callable[["Axes"], None]
"""Draws into one pair of axes."""


@dataclass(frozen=True)
class Plot:
    """A drawing of one or more panels side by side.

    Attributes:
        title: of the drawing.
        caption: what is to be seen, in a sentence.
        panels: SVG texts for a page that has its own legend and colour of text.
        png: all panels and the legend, for a file.
    """

    title: str
    caption: str
    panels: tuple[str, ...]
    png: bytes


class Key(NamedTuple):
    """A policy's line in a page's legend: its name, that in plots, and the stroke in SVG's words."""

    policy: str
    label: str
    colour: str
    dashes: str


def legend(policies: Sequence[str]) -> list[Key]:
    """The lines of policies, in their order; their curves on a page have the class ``line-<place>``."""
    return [
        Key(
            name,
            label,
            "currentColor" if _colour(index) == INK else _colour(index),
            " ".join(map(str, _dashes(index))),
        )
        for index, (name, label) in enumerate(zip(policies, labels(policies), strict=True))
    ]


def labels(policies: Sequence[str]) -> list[str]:
    """What the policies of a table are called in its plots: a long name ends with its parameters, and its row follows.

    Of a folder the end is kept.
    """
    return [
        name if len(name) <= MOST_LETTERS else f"{name.partition('?')[0].rstrip('/')[-MOST_LETTERS:]} (row {row})"
        for row, name in enumerate(policies, 1)
    ]


def _labels(result: ScenarioResult) -> dict[str, str]:
    """Of a scenario's policies, by name."""
    names = [policy.policy for policy in result.policies]
    return dict(zip(names, labels(names), strict=True))


def plots(result: ScenarioResult) -> list[Plot]:
    """A scenario: latency distributions, KV use of fleet and instances over time, and differences to the baseline."""
    drawn = [
        _plot(
            "Latency",
            "Share of the offered requests that took at most so long. What never finished is missing at the top.",
            [
                _cdf(result, "ttft_s", "TTFT (s)"),
                _cdf(result, "tpot_s", "TPOT (s)"),
                _cdf(result, "e2e_s", "E2E (s)"),
            ],
        ),
        _plot(
            "KV use",
            f"KV memory in use over time, first segment, seed {result.baseline.runs[0].summary['seed']}: in the whole "
            "fleet (ticks: a running request moved), and on every instance with the baseline, with the policy of the "
            "best goodput and with those that move requests (white: from source to destination, which has the dot).",
            [_kv_use(result), *(_timeline(policy, _labels(result)[policy.policy]) for policy in _timelines(result))],
        ),
    ]
    if len(result.policies) > 1 and len(result.baseline.segments) > 1:
        caption = "Mean over segments with its 95 % interval; grey where it includes zero."
        panels = [_intervals(result, metric) for metric in COMPARED]
        height = max(_PANEL_INCHES[1], _ROW_INCHES * len(result.policies))
        drawn.append(_plot("Differences", caption, panels, legend=False, height=height))
    return drawn


def overview_plots(results: Sequence[ScenarioResult]) -> list[Plot]:
    """All scenarios: goodput over the load, where a family has several, and the performance profile."""
    families: dict[str, list[ScenarioResult]] = {}
    for result in results:
        if result.load is not None:
            families.setdefault(result.family, []).append(result)
    curves = [family for family in families.values() if len(family) > 1]
    drawn = []
    if curves:
        caption = "Share of the offered requests within both targets, over the load as a share of the fleet's capacity."
        drawn.append(_plot("Goodput over load", caption, [_goodput_over_load(family) for family in curves]))
    if len(results) > 1:
        caption = "Share of all segments with more than that goodput, mean over scenarios, with its 95 % interval."
        drawn.append(_plot("Performance profile", caption, [_profile(results)]))
    return drawn


def over_time(
    curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
    ylabel: str,
    *,
    shaded_s: tuple[float, float] | None = None,
) -> str:
    """Curves over time, as an SVG.

    Args:
        curves: by name: (n,) times in seconds and (n,) values.
        ylabel: what the values are.
        shaded_s: from and to where the background is shaded.
    """
    figure, axis = _figure((11, 4))
    if shaded_s is not None:
        axis.axvspan(*shaded_s, color="#eeeeee")
    for index, (name, (time_s, values)) in enumerate(curves.items()):
        axis.plot(time_s, values, **_line(index), label=name)
    axis.set(xlabel="time (s)", ylabel=ylabel)
    axis.set_ylim(bottom=0)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.tight_layout()
    return _svg(figure)


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


def small_multiples(columns: Sequence[Column], xlabel: str) -> str:
    """Situations side by side, as an SVG: curves over time above, a value for each of the same names and others below.

    Args:
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
    return _svg(figure)


# --- panels ------------------------------------------------------------------------------------------------------


def _cdf(result: ScenarioResult, name: str, xlabel: str) -> Panel:
    from matplotlib.ticker import LogLocator

    def draw(axis: Axes) -> None:
        for index, (policy, label) in enumerate(zip(result.policies, _labels(result).values(), strict=True)):
            finished = policy.requests["status"] == FINISHED
            values = metrics.request_metrics(policy.requests[finished])[name]
            defined = values[~np.isnan(values)]
            if len(defined):
                # requests that never finished have an infinite latency: the curve ends below 1
                share = len(defined) / (len(policy.requests) - (len(values) - len(defined)))
                axis.plot(np.quantile(defined, _CDF_POINTS), share * _CDF_POINTS, **_line(index), label=label)
        axis.set(xscale="log", xlabel=xlabel, ylabel="share of offered requests", ylim=(0, 1))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")

    return draw


def _kv_use(result: ScenarioResult) -> Panel:
    def draw(axis: Axes) -> None:
        for index, (policy, label) in enumerate(zip(result.policies, _labels(result).values(), strict=True)):
            samples = _samples(policy.runs[0])
            used, free = samples["used_blocks"].sum(axis=1), samples["free_blocks"].sum(axis=1)
            time_s, use = samples["time_s"][:, 0], 100 * used / (used + free)
            axis.plot(time_s, use, **_line(index), label=label)
            moved_s = _completed(policy.runs[0])["start_s"]
            axis.plot(moved_s, np.interp(moved_s, time_s, use), "|", color=_colour(index), markersize=7, alpha=0.6)
        axis.set(xlabel="time (s)", ylabel="KV use of the fleet (%)", ylim=(0, 100))

    return draw


def _timelines(result: ScenarioResult) -> list[PolicyResult]:
    """The baseline, the best, and of those that move requests the best ones."""
    by_goodput = sorted(result.policies, key=lambda policy: -(GOODPUT.of(policy.pooled) or 0.0))
    moving = [policy for policy in by_goodput if len(_completed(policy.runs[0]))]
    chosen = {policy.policy: policy for policy in (result.baseline, by_goodput[0], *moving)}
    return list(chosen.values())[:MAX_TIMELINES]


def _timeline(policy: PolicyResult, label: str) -> Panel:
    from matplotlib.ticker import MaxNLocator

    def draw(axis: Axes) -> None:
        run = policy.runs[0]
        samples = _samples(run)
        rows = np.array_split(np.arange(len(samples)), min(len(samples), _TIMELINE_COLUMNS))
        use = samples["used_blocks"] / np.maximum(samples["used_blocks"] + samples["free_blocks"], 1)
        image = np.array([use[row].mean(axis=0) for row in rows]).T
        time_s, instances = samples["time_s"][:, 0], samples.shape[1]
        drawn = axis.imshow(
            100 * image,
            extent=(time_s[0], time_s[-1], instances - 0.5, -0.5),
            aspect="auto",
            interpolation="nearest",
            cmap="cividis",
            vmin=0,
            vmax=100,
        )
        moved = _completed(run)
        thin: dict[str, Any] = {"color": "white", "alpha": 0.6, "rasterized": True}
        axis.vlines(moved["start_s"], moved["source"], moved["destination"], linewidth=0.5, **thin)
        axis.plot(moved["start_s"], moved["destination"], "o", markersize=1.8, **thin)
        axis.figure.colorbar(drawn, ax=axis, label="KV use (%)")
        axis.set(xlabel="time (s)", ylabel="instance", title=f"{label}: {len(moved):,} migrations")
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))

    return draw


def _samples(run: StoredRun) -> NDArray[np.void]:
    """(t, instances) of a run."""
    return metrics.samples_by_time(run.samples(), len(run.summary["config"]["fleet"]["instances"]))


def _completed(run: StoredRun) -> NDArray[np.void]:
    """The migrations that came to their end."""
    migrations = run.migrations()
    return migrations[migrations["outcome"] == COMPLETED]


def _intervals(result: ScenarioResult, metric: Metric) -> Panel:
    others = result.policies[1:]
    baseline, *names = _labels(result).values()

    def draw(axis: Axes) -> None:
        for place, policy in enumerate(others):
            interval = result.differences[policy.policy, metric.title].interval
            if interval is not None:
                colour = COLOURS[0] if interval.excludes_zero else "#888888"
                axis.plot([interval.low, interval.high], [place, place], color=colour)
                axis.plot(interval.estimate, place, "o", color=colour)
        better = "lower" if metric.lower_is_better else "higher"
        axis.axvline(0, color=INK, linewidth=0.8)
        axis.set(
            xlabel=f"{metric.title}, less {baseline}'s ({better} is better)",
            ylim=(len(others) - 0.5, -0.5),
        )
        axis.set_yticks(range(len(others)), names)
        axis.locator_params("x", nbins=6)

    return draw


def _goodput_over_load(family: Sequence[ScenarioResult]) -> Panel:
    ordered = sorted(family, key=lambda result: result.load or 0.0)
    loads = np.array([result.load for result in ordered], np.float64)

    def draw(axis: Axes) -> None:
        for index, (name, label) in enumerate(_labels(ordered[0]).items()):
            values = np.array([GOODPUT.of(policy.pooled) for policy in policies_of(ordered, name)], np.float64)
            axis.plot(loads, values, **_line(index), marker="o", markersize=3, label=label)
        axis.set(xlabel="load", ylabel="goodput (%)", title=ordered[0].family)
        axis.set_ylim(top=min(100.0, axis.get_ylim()[1]))

    return draw


def _profile(results: Sequence[ScenarioResult]) -> Panel:
    names = common_policies(results)

    def draw(axis: Axes) -> None:
        for index, (name, label) in enumerate(zip(names, labels(names), strict=True)):
            profile = performance_profile(goodputs(results, name), _PROFILE_POINTS)
            axis.plot(_PROFILE_POINTS, profile.share, **_line(index), label=label)
            axis.fill_between(_PROFILE_POINTS, profile.low, profile.high, color=_colour(index), alpha=0.1, linewidth=0)
        axis.set(xlabel="goodput (%)", ylabel="share of segments above it", ylim=(0, 1))

    return draw


# --- drawing -----------------------------------------------------------------------------------------------------


def _plot(
    title: str, caption: str, panels: Sequence[Panel], *, legend: bool = True, height: float = _PANEL_INCHES[1]
) -> Plot:
    inches = (_PANEL_INCHES[0], height)
    pages = tuple(_page_svg(panel, inches) for panel in panels)
    return Plot(title, caption, pages, _panels_png(panels, inches, legend=legend))


def _figure(inches: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches)
    return figure, figure.subplots()


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _dashes(index: int) -> tuple[float, ...]:
    return DASHES[index // len(COLOURS) % len(DASHES)]


def _line(index: int) -> dict[str, Any]:
    dashes = [length / _LINE_WIDTH for length in _dashes(index)]
    return {
        "color": _colour(index),
        "linestyle": (0, dashes) if dashes else "solid",
        "linewidth": _LINE_WIDTH,
        "gid": f"line-{index}",
    }


def _panels_png(panels: Sequence[Panel], inches: tuple[float, float], *, legend: bool) -> bytes:
    from matplotlib.figure import Figure

    width, height = inches
    columns = min(len(panels), _PNG_COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(width * columns, height * rows))
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(len(panels))]
    for panel, axis in zip(panels, axes, strict=True):
        panel(axis)
    figure.tight_layout()
    if legend:
        lines, names = axes[0].get_legend_handles_labels()
        figure.legend(
            lines,
            names,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            ncols=-(-len(names) // _LEGEND_ROWS),
            handlelength=3,
            frameon=False,
            fontsize="small",
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return buffer.getvalue()


def _page_svg(panel: Panel, inches: tuple[float, float]) -> str:
    """One panel for a page: its text and axes have the page's colour, its curves a class, its ids are its own."""
    import matplotlib

    ink: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    )
    with matplotlib.rc_context({**ink, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axis = _figure(inches)
        panel(axis)
        figure.tight_layout()
        svg = _svg(figure, transparent=True)
    svg = re.sub(r'id="(line-\d+)"', r'class="\1"', svg.replace(INK, "currentColor"))
    used = set(re.findall(r"#([\w.-]+)", svg))
    return re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", svg)


def _svg(figure: Figure, *, transparent: bool = False) -> str:
    import matplotlib

    buffer = io.StringIO()
    # a fixed salt: the same figure is the same text
    with matplotlib.rc_context({"svg.hashsalt": "fleetpilot", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=transparent, dpi=150)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
