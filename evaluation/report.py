"""The report of an evaluation, made from its stored runs alone: Markdown, a self-contained HTML page, plots, a CSV."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpilot.evaluation.comparison import (
    COLUMNS,
    LIFE_COLUMNS,
    ScenarioResult,
    collect,
    differences_table,
    fallback_share,
    notes,
    rescored_table,
    values_table,
)
from fleetpilot.evaluation.metrics import STATUSES
from fleetpilot.evaluation.overview import common_policies, leaders_table, overview_table
from fleetpilot.evaluation.plots import Plot, legend, overview_plots, plots
from fleetpilot.evaluation.runs import StoredRun, write_atomically
from fleetpilot.evaluation.tables import Table, Text, markdown, number, plain

if TYPE_CHECKING:
    from fleetpilot.cluster import FleetConfig


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        text: the tables for a terminal.
        markdown: path of the Markdown file.
        html: path of the HTML page, which needs no other file.
        csv: path of the table of runs, one row each.
        plots: paths of the PNG files.
    """

    text: str
    markdown: Path
    html: Path
    csv: Path
    plots: list[Path]


def write_report(runs: Iterable[StoredRun], out: Path, *, baseline: str | None = None) -> Report:
    """Compare the policies of an evaluation and write the report into its folder.

    Args:
        runs: what `fleetpilot.evaluation.evaluate` returned.
        out: the folder.
        baseline: the policy to compare with; by default the first one.
    """
    runs = list(runs)
    results = collect(runs, baseline)
    overview = _Overview(results)
    sections = [_Section(result) for result in results]
    out.mkdir(parents=True, exist_ok=True)
    written = []
    parts: list[_Overview | _Section] = [overview, *sections]
    for part in parts:
        for plot in part.plots:
            path = out / _file_name(part, plot)
            path.write_bytes(plot.png)
            written.append(path)
    report = Report(
        "\n".join([*(section.text() for section in sections), *map(plain, overview.tables)]),
        out / "report.md",
        out / "report.html",
        out / "runs.csv",
        written,
    )
    origin = _origin(runs)
    write_atomically(report.markdown, _markdown(overview, sections, origin))
    write_atomically(report.html, _html(overview, sections, origin))
    _write_csv(report.csv, runs)
    return report


def run_text(summary: dict[str, Any], fleet: FleetConfig) -> str:
    """One run's summary for a terminal."""
    metrics = summary["metrics"]
    counts, goodput, used = metrics["requests"], metrics["goodput"], metrics["fleet"]
    names = [profile.name for profile in fleet.profiles]
    if fleet.pools is not None:
        names = [f"{name} ({role})" for name, role in zip(names, fleet.pools.roles, strict=True)]
    kinds = Counter(names)
    columns = ("mean", "p50", "p90", "p95", "p99")
    rows = [
        [Text(title), *(Text(number(_scaled(metrics["latency"][name][column], factor))) for column in columns)]
        for title, name, factor in (
            ("TTFT s", "ttft_s", 1.0),
            ("TPOT ms", "tpot_s", 1e3),
            ("ITL ms", "itl_s", 1e3),
            ("E2E s", "e2e_s", 1.0),
            ("queueing s", "queueing_s", 1.0),
        )
    ]
    classes = ", ".join(f"{name} {number(_scaled(share, 100))} %" for name, share in goodput["by_class"].items())
    share = fallback_share([summary])
    statuses = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in STATUSES)
    lines = [
        f"scored: {counts['offered']:,} requests, of them {statuses}",
        f"goodput {number(_scaled(goodput['share'], 100))} % ({classes})",
        f"preempted {number(_scaled(counts['preempted_share'], 100))} %, fragmentation "
        f"{number(_scaled(used['fragmentation'], 100))} %, KV use {number(_scaled(used['kv_use'], 100))} %, "
        f"batch {number(used['batch_size'])}, load max/mean {number(used['load_max_over_mean'])}",
        *_moves(metrics["migrations"], fleet, used["run_instance_seconds"] / max(summary["simulated_s"], 1e-9)),
        *([f"decided by its fallback, out of its trained range: {share:.1%}"] if share else []),
        f"simulated {summary['simulated_s']:,.0f} s in {summary['wall_s']:.2f} s",
    ]
    title = f"{summary['label']} on {summary['workload']}, {', '.join(f'{n} x {name}' for name, n in kinds.items())}"
    return plain(Table(title, ["", *columns], rows)) + "\n".join(lines)


def _moves(migrations: dict[str, Any], fleet: FleetConfig, instances: float) -> list[str]:
    """What there is to say of migrations, of instances that come and go, and of restarts."""
    lines = []
    if fleet.rebalancing is not None:
        outcomes = {name: count for name, count in migrations["outcomes"].items() if count}
        named = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in outcomes.items()) or "none"
        downtime = number(_scaled(migrations["downtime_s"]["mean"], 1e3))
        lines.append(f"migrations begun: {named}; downtime {downtime} ms on average")
    if fleet.scaling is not None or fleet.failures is not None:
        lines.append(f"{number(instances)} instances on average, {migrations['restarts']:,} restarts of requests")
    return lines


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


class _Section:
    """One scenario's part of a report."""

    def __init__(self, result: ScenarioResult):
        self.name = result.name
        self.legend = legend([policy.policy for policy in result.policies])
        compared = [differences_table(result)] if len(result.policies) > 1 else []
        self.brief: list[Table] = [values_table(result), *compared]
        self.tables: list[Table] = [*self.brief, rescored_table(result)]
        self.notes = notes(result)
        self.plots = plots(result)

    def text(self) -> str:
        return "\n".join([*map(plain, self.brief), *(f"note: {note}" for note in self.notes)]) + "\n"


class _Overview:
    """What is said of all scenarios together."""

    name = "All scenarios"

    def __init__(self, results: list[ScenarioResult]):
        policies = common_policies(results)
        compared = len(policies) > 1
        self.legend = legend(policies)
        self.policies = policies
        self.tables: list[Table] = [leaders_table(results)] if compared else []
        if compared and len(results) > 1:
            self.tables.append(overview_table(results))
        self.plots = overview_plots(results)


def _origin(runs: list[StoredRun]) -> dict[str, Any]:
    """What the runs came from; they may be of several commands where an evaluation was resumed."""
    first = runs[0].summary
    return {
        "commands": sorted({run.summary["command"] for run in runs}),
        "commits": sorted({run.summary["commit"] or "none" for run in runs}),
        "versions": first["versions"],
        "runs": len(runs),
        "dates": sorted({run.summary["date"][:10] for run in runs}),
    }


def _markdown(overview: _Overview, sections: list[_Section], origin: dict[str, Any]) -> str:
    parts = ["# Comparison of policies", ""]
    parts += [f"    {command}" for command in origin["commands"]]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    parts += ["", f"{origin['runs']} runs; {versions}; commit {', '.join(origin['commits'])}.", ""]
    parts += [*map(markdown, overview.tables), *_images(overview), ""]
    for section in sections:
        parts += [f"## {section.name}", "", *map(markdown, section.tables)]
        parts += [*(f"- {note}" for note in section.notes), ""]
        parts += [*_images(section), ""]
    return "\n".join(parts)


def _images(part: _Overview | _Section) -> list[str]:
    return [f"![{plot.title}]({_file_name(part, plot)})" for plot in part.plots]


def _html(overview: _Overview, sections: list[_Section], origin: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text())
    return template.render(overview=overview, sections=sections, origin=origin)


def _write_csv(path: Path, runs: list[StoredRun]) -> None:
    keys = ("scenario", "segment", "policy", "seed")
    rows: list[list[Any]] = [[*keys, *(metric.title for metric in (*COLUMNS, *LIFE_COLUMNS)), "file"]]
    for run in runs:
        values = [metric.of(run.summary["metrics"]) for metric in (*COLUMNS, *LIFE_COLUMNS)]
        rows.append([*(run.summary["config"][key] for key in keys), *values, run.stem.name])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(["" if value is None else value for value in row] for row in rows)


def _file_name(part: _Overview | _Section, plot: Plot) -> str:
    return re.sub(r"[^a-z0-9.=]+", "-", f"{part.name[:120]} {plot.title}".lower()).strip("-") + ".png"
