"""A validation's report: Markdown to read, JSON to go on with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import fleetpilot
from fleetpilot.calibration.compare import METRICS, STATISTICS, Compared, Pair
from fleetpilot.calibration.validation import Fleet, Validation
from fleetpilot.evaluation.provenance import provenance, to_json
from fleetpilot.evaluation.tables import Table, Text, markdown, number

_NOTHING_TO_GAIN = 0.01
"""Fewer preemptions per request, and less fragmentation, than this: migration has nothing to remove."""


def write_validation(found: Validation, folder: Path, command: str) -> Path:
    """Write ``report.md`` and ``validation.json``; the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    rows = [
        {**dataclasses.asdict(row), "ratio": row.ratio, "allowed": row.allowed, "is_met": row.is_met}
        for row in found.rows
    ]
    ranked = [{**dataclasses.asdict(pair), "separates": pair.separates, "agrees": pair.agrees} for pair in found.pairs]
    record = {**plain, "rows": rows, "pairs": ranked, "command": command, **provenance()}
    (folder / "validation.json").write_text(to_json(record) + "\n", encoding="utf-8")
    report = folder / "report.md"
    report.write_text(validation_markdown(found, command), encoding="utf-8")
    return report


def validation_markdown(found: Validation, command: str) -> str:
    """The report."""
    setup = found.setup
    commit = provenance()["commit"]
    head = [
        f"# {setup['workload']}: engines and simulator",
        "",
        f"`{command}`, fleetpilot {fleetpilot.__version__}"
        + (f", commit {commit}" if commit else "")
        + f", seed {setup['seed']}.",
        "",
        f"{setup['requests']} requests in {setup['span_s']:.0f} s, mean prompt {setup['mean_prompt_tokens']:.0f} and "
        f"answer {setup['mean_output_tokens']:.0f} tokens; {len(setup['engines'])} engines with KV blocks "
        f"{setup['kv_blocks']} and max_num_seqs {setup['max_num_seqs']}; {setup['repeats']} repeats of each policy, "
        f"{setup['simulated_runs']} simulated runs. "
        f"Requests were sent at most {found.late_p99_s * 1e3:.1f} ms late (P99). "
        f"Load average {found.load[0]:.1f} before, {found.load[1]:.1f} after; {found.seconds:.0f} s. "
        f"To the simulator's latencies {found.request_s * 1e3:.3g} ms are added, a request's way to the engine and "
        "back.",
        "",
    ]
    failed = {name: count for name, count in found.failed.items() if count}
    if failed:
        head += [f"Without a whole answer: {', '.join(f'{n} under {name}' for name, n in failed.items())}.", ""]
    if found.fallbacks:
        head += [f"{found.fallbacks} decisions were made by the dispatcher's fallback.", ""]
    tables = [*_distributions(found.rows), _ranking(found.pairs), _fleet_table(found)]
    return "\n".join([*head, *map(markdown, tables), _migration(found)])


def verdict(found: Validation) -> str:
    """Targets and rankings in a few lines."""
    lines = []
    for statistic in ("mean", "p95"):
        judged = [row for row in found.rows if row.statistic == statistic]
        missed = [row for row in judged if not row.is_met]
        words = ", ".join(f"{METRICS[row.metric]} under {row.policy} ({row.ratio:.2f})" for row in missed)
        lines.append(
            f"{statistic}: {len(judged) - len(missed)} of {len(judged)} within the target"
            + (f"; not {words}" if words else "")
        )
    for metric, name in METRICS.items():
        apart = [pair for pair in found.pairs if pair.metric == metric and pair.separates]
        wrong = [f"{pair.first} / {pair.second}" for pair in apart if not pair.agrees]
        lines.append(
            f"ranking by {name}: {len(apart)} pairs separate on the engines, {len(apart) - len(wrong)} of them in the "
            "same order in the simulator" + (f"; not {', '.join(wrong)}" if wrong else "")
        )
    return "\n".join(lines)


def _distributions(rows: Sequence[Compared]) -> list[Table]:
    tables = []
    header = [
        "policy",
        *(f"{s} {where}" for s in STATISTICS for where in ("engines", "simulator", "ratio")),
        "spread",
        "met",
    ]
    for metric, name in METRICS.items():
        found: dict[str, dict[str, Compared]] = {}
        for row in rows:
            if row.metric == metric:
                found.setdefault(row.policy, {})[row.statistic] = row
        body = []
        for policy, by in found.items():
            cells = [Text(policy)]
            for statistic in STATISTICS:
                row = by[statistic]
                cells += [Text(number(row.engines * 1e3)), Text(number(row.simulator * 1e3)), Text(f"{row.ratio:.2f}")]
            spread = by["mean"].spread
            met = {True: "yes", False: "no", None: "-"}
            cells.append(Text("-" if spread is None else f"{spread:.0%}"))
            cells.append(Text(f"{met[by['mean'].is_met]} / {met[by['p95'].is_met]}"))
            body.append(cells)
        note = (
            "Milliseconds, pooled over repeats; ratio: simulator over engines; spread: standard deviation of the "
            "repeats' means; "
            "met: mean within max(15 %, 2 x spread) / P95 within 25 %."
        )
        tables.append(Table(name, header, body, note))
    return tables


def _ranking(found: Sequence[Pair]) -> Table:
    rows = []
    for pair in found:
        interval = pair.engines
        same = ("yes" if pair.agrees else "NO") if pair.separates else "-"
        rows.append(
            [
                Text(f"{pair.second} less {pair.first}, {METRICS[pair.metric]}"),
                Text(f"{interval.estimate:+.1%} [{interval.low:+.1%}, {interval.high:+.1%}]"),
                Text(f"{pair.simulator:+.1%}"),
                Text("yes" if pair.separates else "no"),
                Text(same),
            ]
        )
    note = (
        "Differences of means, relative to the first policy's; 95 % interval by a paired bootstrap over blocks of ten "
        "requests of "
        "every repeat. A pair separates where it excludes 0."
    )
    header = ["pair", "engines", "simulator", "separates", "same order"]
    return Table("Ranking of policies", header, rows, note)


def _fleet_table(found: Validation) -> Table:
    rows = []
    for policy in found.engines:
        for where, used in (("engines", found.engines[policy]), ("simulator", found.simulator[policy])):
            rows.append([Text(f"{policy}, {where}"), *map(Text, _fleet_cells(used))])
    header = [
        "",
        "KV use",
        "preemptions per request",
        "fragmentation",
        "goodput",
        "migrations per request",
        "downtime (ms)",
    ]
    slo = found.setup["slo"]
    note = f"Goodput: TTFT within {slo.ttft_s:g} s and TPOT within {slo.tpot_s * 1e3:g} ms."
    return Table("The fleet", header, rows, note)


def _fleet_cells(used: Fleet) -> list[str]:
    return [
        f"{used.kv_use:.0%}",
        f"{used.preemptions_per_request:.3f}",
        f"{used.fragmentation:.2%}",
        f"{used.goodput:.1%}",
        f"{used.migrations:.3f}",
        "-" if used.downtime_s is None else number(used.downtime_s * 1e3),
    ]


def _migration(found: Validation) -> str:
    """What to know before migration is switched on."""
    still = {name: used for name, used in found.engines.items() if not used.migrations} or found.engines
    name, best = min(still.items(), key=lambda item: -item[1].goodput)
    lines = [
        "### Before switching migration on",
        "",
        f"- Preemptions: {best.preemptions_per_request:.3f} per request under {name} (the policy of the highest "
        "goodput that "
        "moved nothing). A preempted request computes its context again; migration can only save what is lost so.",
        f"- Fragmentation: {best.fragmentation:.2%} of the fleet's memory would have held blocked requests, were it "
        "in one place; "
        f"KV use {best.kv_use:.0%}.",
    ]
    setup = found.setup
    context = setup["mean_prompt_tokens"] + setup["mean_output_tokens"] / 2
    if found.link is None:
        lines.append("- Cost of a copy: not measured (calibrate with two URLs of engines that have a KV connector).")
    else:
        link = found.link
        copy_bytes = context * link.kv_bytes_per_token
        copy_s = link.round_trip_s + copy_bytes / link.bandwidth_bytes_per_s
        lines.append(
            f"- Cost of a copy: {copy_s * 1e3:.3g} ms for a mean context of {context:.0f} tokens "
            f"({copy_bytes / 1e6:.3g} MB at "
            f"{link.bandwidth_bytes_per_s / 1e6:.3g} MB/s, {link.round_trip_s * 1e3:.3g} ms round trip), after "
            f"{link.probe_s * 1e3:.3g} ms to pin the blocks; the request goes on meanwhile."
        )
    moved = [used.downtime_s for used in found.engines.values() if used.downtime_s is not None]
    ours = [used.downtime_s for used in found.simulator.values() if used.downtime_s is not None]
    if moved:
        lines.append(
            f"- Downtime: {max(moved) * 1e3:.3g} ms on the mean of the requests that were moved on these engines."
        )
    elif ours:
        lines.append(
            f"- Downtime: none was moved on the engines; {max(ours) * 1e3:.3g} ms on the mean in the simulator."
        )
    else:
        lines.append(
            "- Downtime: not measured, as no policy compared moved a request (give one that does, such as llumnix)."
        )
    idle = best.preemptions_per_request < _NOTHING_TO_GAIN and best.fragmentation < _NOTHING_TO_GAIN
    lines.append(
        "- So: at this load there is nothing for migration to remove but imbalance; leave it off unless requests "
        "differ much "
        "in length."
        if idle
        else "- So: there is something to gain; compare a policy that moves requests with one that does not on this "
        "trace."
    )
    return "\n".join(lines) + "\n"
