"""Writes docs/reproductions.md: every published experiment, its figures beside ours.

    python tools/build_reproductions.py [--experiments NAME ...] [--out runs] [--workers N]

Runs what is not stored yet (``fleetpilot evaluate --experiment NAME`` stores to the same place) and lays the tables of
all experiments one after the other, with a summary of the bounds and the plots, which go beside the page. With
``--experiments`` only these are run, and the others stay as the page has them; each says by which commit it was made.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from fleetpilot.evaluation.experiments import PUBLISHED, load_experiment
from fleetpilot.evaluation.provenance import origin_text
from fleetpilot.evaluation.tables import Table, Text, markdown
from fleetpilot.workloads.llumnix import PAPER_SEED

PAGE = Path(__file__).parent.parent / "docs" / "reproductions.md"


def judged(tables: Iterable[Table]) -> dict[str, int]:
    """How many bounds are met and how many are not, by the answer."""
    answers = [row[-1].text for table in tables if table.header[-1] == "within" for row in table.rows]
    return {answer: answers.count(answer) for answer in ("yes", "no")}


def section(name: str, tables: list[Table], plot: str | None) -> str:
    """An experiment's part of the page."""
    title, _, about = (inspect.getdoc(load_experiment(name)) or "").partition("\n")
    picture = [f"![{title}]({plot})\n"] if plot else []
    shown = [markdown(table).replace("\n\n\n", "\n") for table in tables]
    return "\n".join(
        [
            f"## {title.rstrip('.')}",
            "",
            f"`fleetpilot evaluate --experiment {name}`",
            about,
            "",
            origin_text(),
            "",
            *shown,
            *picture,
        ]
    )


def page(sections: dict[str, str], counts: dict[str, dict[str, int]]) -> str:
    """The page."""
    rows = [[Text(name), Text(str(counts[name]["yes"])), Text(str(counts[name]["no"]))] for name in sections]
    summary = Table("Bounds", ["experiment", "met", "missed"], rows, "Each is judged in the experiment's own tables.")
    head = f"""# Published experiments, repeated

Written by `python tools/build_reproductions.py`; do not edit. The seed of the Llumnix paper's artifact,
{PAPER_SEED:#x}, gives its generated traces; engine noise has the seeds 0, 1, ....
"""
    return "\n".join([head, markdown(summary), *sections.values()])


def read_page(text: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """The sections of a page and their counts of bounds, by experiment."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    sections = {re.findall(r"^`fleetpilot evaluate --experiment (.+)`$", part, re.MULTILINE)[0]: part for part in parts}
    counts = {}
    for name in sections:
        yes, no = re.findall(rf"^\| {name} \| (\d+) \| (\d+) \|$", text, re.MULTILINE)[0]
        counts[name] = {"yes": int(yes), "no": int(no)}
    return sections, counts


def main() -> None:
    """Run all, or some, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=PUBLISHED, default=PUBLISHED, help="to run (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the experiments' folders")
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    arguments = parser.parse_args()
    sections, counts = read_page(PAGE.read_text(encoding="utf-8"))
    for name in arguments.experiments:
        print(name, flush=True)
        folder = arguments.out / name
        tables = load_experiment(name).run(folder, workers=arguments.workers)
        counts[name] = judged(tables)
        plot = getattr(load_experiment(name), "PLOT", None)
        if plot:
            shutil.copy(folder / plot, PAGE.with_name(plot))
        sections[name] = section(name, tables, plot)
    shown = {name: sections[name].rstrip("\n") + "\n" for name in PUBLISHED if name in sections}
    PAGE.write_text(page(shown, counts), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
