"""Writes docs/learned.md: the policy that comes with fleetpilot - how it was trained, what it reaches, where it loses.

    fleetpilot evaluate --experiment learned --policies 'learned,learned?admission=none'
    python tools/build_learned.py [RUNS]

RUNS is the experiment's folder, ``runs/learned`` by default: its report and what its runs say of their origin are
filled, with the card of the export, into ``tools/learned.md``, the part of the page that people write. A place there is
``[[name]]``, of the names of `parts`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetpilot.agents import SHIPPED
from fleetpilot.agents.runtime import CARD, read_card
from fleetpilot.evaluation.tables import Table, Text, markdown
from fleetpilot.training.config import Changes, TrainConfig, load_config

PAGE = Path(__file__).parent.parent / "docs" / "learned.md"
PROSE = Path(__file__).parent / "learned.md"
NAME = "learned"
CURVE, REPORT = "validation.csv", "report.md"


def curve(rows: Sequence[Sequence[str]]) -> Table:
    """The rows of a run's ``validation.csv``."""
    header, *found = rows
    best = min(range(len(found)), key=lambda number: float(found[number][1]))
    cells = [
        [
            Text(f"{int(decisions):,}"),
            Text(cost, best=number == best),
            *(Text(f"{float(share):.2%}") for share in goodput),
        ]
        for number, (decisions, cost, *goodput) in enumerate(found)
    ]
    note = (
        "Cost relative to the best baseline of each scenario on the same episodes (1 is as good, less is better), and "
        "goodput. The first row is after imitation. The best of these is what comes with fleetpilot."
    )
    return Table("Validation during training", header, cells, note)


def ranges(config: TrainConfig) -> Table:
    """What differed from episode to episode."""
    rows = [
        [Text(where), Text(described(changes) or "as the scenario has it")]
        for where, changes in {"all": config.changes, **config.scenarios}.items()
    ]
    return Table("What differs from episode to episode", ["scenario", "drawn for every episode"], rows)


def described(changes: Changes) -> str:
    """Parameters and their values or ranges."""
    return ", ".join(f"{name} {_text(value)}" for name, value in changes.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return described(value)
    if isinstance(value, list | tuple):
        return " to ".join(f"{end:g}" for end in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def run_of(runs: Path, export: Path) -> dict[str, Any]:
    """The summary of a run of the export in the experiment's folder.

    Raises:
        ValueError: there is none: another export was judged, or nothing was.
    """
    digest = hashlib.sha256((export / CARD).read_bytes()).hexdigest()[:16]
    for path in sorted((runs / "runs").glob(f"*-{NAME}-*.json")):
        summary: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if summary["config"].get("policy_digest") == digest:
            return summary
    raise ValueError(f"{runs}: no run of the export {export}; expected the folder of an evaluation of it")


def experiment_command(command: str) -> str:
    """The command of a run without what is one machine's: where to, and in how many processes."""
    words = shlex.split(command)
    kept = ["fleetpilot", "evaluate", "--experiment", NAME]
    if "--policies" in words:
        kept += words[words.index("--policies") :][:2]
    return shlex.join(kept)


def parts(export: Path, run: Mapping[str, Any], report: str) -> dict[str, str]:
    """What is filled in, by name: of the export's folder, a run's summary, and the experiment's report."""
    card, config = read_card(export), load_config(str(export / "training.toml"))
    origin, admission = card["provenance"], card.get("admission")
    rows = list(csv.reader((export / CURVE).read_text("utf-8").splitlines()))
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return {
        "admission": "none" if admission is None else ", ".join(f"`{name}` {v:g}" for name, v in admission.items()),
        "training command": origin["command"],
        "training commit": origin["commit"],
        "seed": str(origin["seed"]),
        "decisions": f"{origin['decisions']:,}",
        "fleets": _text(config.changes["fleet_size"]),
        "imitated": ", ".join(f"`{name}`" for name in config.imitation.policies) if config.imitation else "none",
        "imitation decisions": f"{config.imitation.decisions:,}" if config.imitation else "0",
        "fallback": card["fallback"],
        "ranges": markdown(ranges(config)),
        "curve": markdown(curve(rows)),
        "command": experiment_command(run["command"]),
        "origin": f"Commit {run['commit']}; {versions}.",
        "results": report,
    }


def filled(prose: str, given: Mapping[str, str]) -> str:
    """The page.

    Raises:
        ValueError: the prose has a place for what is not given.
    """

    def value(place: re.Match[str]) -> str:
        if place[1] not in given:
            raise ValueError(f"[[{place[1]}]]: expected one of {', '.join(given)}")
        return given[place[1]]

    text = re.sub(r"\[\[(.+?)\]\]", value, prose)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="?", default=Path("runs/learned"))
    runs = parser.parse_args().runs
    given = parts(SHIPPED[NAME], run_of(runs, SHIPPED[NAME]), (runs / REPORT).read_text("utf-8"))
    PAGE.write_text(filled(PROSE.read_text("utf-8"), given), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
