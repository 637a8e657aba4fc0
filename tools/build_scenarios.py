"""Writes docs/scenarios.md: what happens in each of five scenarios, and what solved it.

    python tools/build_scenarios.py [--out runs/five-scenarios] [--workers N]

Runs what is not stored yet (``fleetpilot evaluate --experiment five-scenarios`` stores to the same place). The picture
goes beside the page.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
from pathlib import Path

from fleetpilot.envs.scenarios import load_scenario
from fleetpilot.evaluation.experiments import five_scenarios
from fleetpilot.evaluation.experiments.five_scenarios import CASES, PLOT, SITUATIONS
from fleetpilot.evaluation.provenance import origin_text
from fleetpilot.evaluation.tables import Table, markdown

PAGE = Path(__file__).parent.parent / "docs" / "scenarios.md"


def section(name: str, tables: list[Table]) -> str:
    """A scenario's part of the page."""
    situation = SITUATIONS[name]
    summary = load_scenario(name).summary
    return (
        f"## {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n**Why it is hard.** {situation.hard}\n\n"
        f"**What solves it.** {situation.findings}\n\n" + "\n".join(map(markdown, tables))
    )


def page(tables: list[Table]) -> str:
    """The page."""
    answers, differences, *of_cases = tables
    _, _, about = (inspect.getdoc(five_scenarios) or "").partition("\n")
    head = f"""# Five scenarios, and what migration solves of them

Written by `python tools/build_scenarios.py`; do not edit. {origin_text()}
`fleetpilot evaluate --experiment five-scenarios`; episodes of the seeds 0 to {five_scenarios.Size().segments - 1}.
{about}

![Above: requests over time; below: requests within their targets]({PLOT})

Above, the first episode at the higher load: requests in all queues, or on the instance that goes first, shaded from the
announcement until it goes. Below, all episodes at that load.
"""
    sections = [section(name, [table for table in of_cases if CASES[table.title][0] == name]) for name in SITUATIONS]
    return "\n".join([head, markdown(answers), *sections, markdown(differences)]).replace("\n\n\n", "\n\n")


def main() -> None:
    """Run it and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/five-scenarios"), help="folder of the runs")
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    arguments = parser.parse_args()
    tables = five_scenarios.run(arguments.out, workers=arguments.workers)
    shutil.copy(arguments.out / PLOT, PAGE.with_name(PLOT))
    PAGE.write_text(page(tables), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
