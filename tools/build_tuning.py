"""Writes evaluation/tuned.json and docs/tuning.md: the parameters that come with fleetpilot, and what they gain.

    python tools/build_tuning.py [--out runs/tuning] [--validation runs/learned] [--workers N]

Every baseline of the field that has something to tune gets the same budget on every workload of ``learned.toml``.
Trials and runs that are stored already are not made again: after Ctrl-C the same command goes on. The runs on the
validation windows go where ``fleetpilot evaluate --experiment learned`` looks for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpilot.baselines import load_policy
from fleetpilot.evaluation.comparison import interval_text
from fleetpilot.evaluation.experiments import calibrate_then_route as router
from fleetpilot.evaluation.experiments import learned
from fleetpilot.evaluation.experiments.learned import VALIDATION, Size
from fleetpilot.evaluation.provenance import origin_text, to_json
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.statistics import Interval, paired_bootstrap
from fleetpilot.evaluation.tables import Table, Text, markdown
from fleetpilot.evaluation.tuned import FORMAT, OURS, read_tuned
from fleetpilot.evaluation.tuning import tune
from fleetpilot.fleet.policy import CompiledPolicy

PAGE = Path(__file__).parent.parent / "docs" / "tuning.md"
COMMAND = "python tools/build_tuning.py"


class Gain(NamedTuple):
    """What tuning did for a policy on a workload; goodput in %.

    Attributes:
        chosen: name with parameters.
        development: by default and tuned, on the windows that it was tuned on.
        validation: likewise, on others.
        gained: on these, in points, with an interval over the windows.
    """

    chosen: str
    development: tuple[float, float]
    validation: tuple[float, float]
    gained: Interval | None


Gains = dict[str, dict[str, Gain]]
"""Workload -> policy -> what tuning did."""


def search(out: Path, workers: int | None) -> None:
    """Tune all on every workload, and two for calibrate-then-route, into evaluation/tuned.json.

    A workload that the file has is left as it is: to tune it again, take it out.
    """
    of, families = learned.plan()["tuning"], read_tuned(OURS)
    policies = {**dict.fromkeys(learned.names(), learned.tunable()), router.FAMILY: [*router.TUNABLE]}
    for family in [name for name in policies if name not in families]:
        scenarios = router.tuning_scenarios() if family == router.FAMILY else learned.development(family)
        compiled = [name for name in policies[family] if isinstance(load_policy(name), CompiledPolicy)]
        in_python = [name for name in policies[family] if name not in compiled]
        for group, trials in ((compiled, of["trials"]), (in_python, of["trials_in_python"])):
            if group:
                print(family, *group, flush=True)
                tune(scenarios, group, out, family=family, trials=trials, workers=workers, command=COMMAND)
        found = read_tuned(out / "tuned.json")[family]
        families[family] = {policy: found[policy] for policy in policies[family]}
    OURS.write_text(to_json({"format": FORMAT, "families": {name: families[name] for name in policies}}) + "\n")


def validate(out: Path, workers: int | None) -> Gains:
    """With and without the parameters found, on the validation windows."""
    found = read_tuned(OURS)
    return {
        name: _gains(found[name], learned.cells(name, VALIDATION, Size()), out, workers) for name in learned.names()
    }


def _gains(
    found: Mapping[str, Mapping[str, Any]], scenarios: Sequence[Scenario], out: Path, workers: int | None
) -> dict[str, Gain]:
    policies = [*dict.fromkeys(name for policy, record in found.items() for name in (policy, record["chosen"]))]
    runs = evaluate(scenarios, policies, out, seeds=(0,), workers=workers, command=COMMAND)
    shares = np.array([100 * run.summary["metrics"]["goodput"]["share"] for run in runs])
    by_window = shares.reshape(len(scenarios), -1, len(policies)).mean(axis=0)  # (windows, policies)
    met = dict(zip(policies, by_window.T, strict=True))
    gains = {}
    for policy, record in found.items():
        default, tuned = met[policy], met[record["chosen"]]
        gains[policy] = Gain(
            record["chosen"],
            (100 * record["default_goodput"], 100 * record["goodput"]),
            (float(default.mean()), float(tuned.mean())),
            paired_bootstrap(tuned - default),
        )
    return gains


def overview(gains: Gains) -> Table:
    """What was gained of each policy on each workload, on the validation windows."""
    rows = []
    for policy in next(iter(gains.values())):
        of = [gains[name][policy] for name in gains]
        pairs = [each.validation for each in of], [each.development for each in of]
        means = [np.mean([tuned - default for default, tuned in each]) for each in pairs]
        rows.append(
            [policy, *(f"{after - before:+.1f}" for before, after in pairs[0]), *(f"{of:+.1f}" for of in means)]
        )
    return Table(
        "Points of goodput gained on the validation windows",
        ["policy", *gains, "mean", "on development windows"],
        [[Text(text) for text in row] for row in rows],
        "The last column is the mean on the windows that the parameters were chosen on: what it is above the one "
        "before was not gained, but fitted.",
    )


def of_workload(name: str, gains: Mapping[str, Gain]) -> Table:
    """What was chosen for a workload, and what it reaches."""
    rows = [
        [
            f"`{gain.chosen}`",
            *(f"{met:.2f}" for met in (*gain.development, *gain.validation)),
            interval_text(gain.gained),
        ]
        for gain in gains.values()
    ]
    header = ["policy", "development, default", "tuned", "validation, default", "tuned", "gained"]
    return Table(name, header, [[Text(text) for text in row] for row in rows])


HEAD = """\
# Tuned baselines

Written by `{command}`; do not edit. {origin}

Every dispatch policy with something to tune had the same budget on each workload of
`evaluation/experiments/learned.toml`: at most {trials} trials, the first with the defaults, on {windows} development
windows at loads of {loads}, seed 0 ([how](evaluation.md#parameters)). One with two parameters has as many trials as
one with eight; `preble` and `polyserve`, which are plain Python, have {trials_in_python}. Goodput is the mean over
loads and windows, in %. The {count} validation windows were not looked at by the search; intervals are of 95 % over
them. `evaluation/tuned.json` has the parameters, with command, commit, seed and windows. As opponents, `fleetpilot
evaluate --experiment learned` takes the better of default and tuned, by the validation windows.

To evaluate policies with these parameters, name no file behind `--tuned`:

```
fleetpilot evaluate --tuned --family azure-conv --workload twin/azure-conv --drop-over-length --load 0.95
```

For a workload of your own, tune on every other window of it and compare on the rest:

```
fleetpilot tune --family mine --policies calibrated,dynamo-kv --workload trace.csv --load 0.8,0.95
fleetpilot evaluate --tuned runs/tuning/tuned.json --family mine --windows test --workload trace.csv --load 0.8,0.95
```
"""


def page(gains: Gains) -> str:
    """The page."""
    of = learned.plan()
    head = HEAD.format(
        command=COMMAND,
        origin=origin_text(),
        **of["tuning"],
        count=of["windows"]["count"],
        loads=", ".join(f"{load:g}" for load in of["fleet"]["loads"]),
    )
    tables = [overview(gains), *(of_workload(name, each) for name, each in gains.items())]
    return "\n".join([head, *map(markdown, tables)]).replace("\n\n\n", "\n")


def main() -> None:
    """Tune, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"), help="folder of the trials")
    parser.add_argument("--validation", type=Path, default=Path("runs/learned"), help="folder of the validation runs")
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    arguments = parser.parse_args()
    search(arguments.out, arguments.workers)
    PAGE.write_text(page(validate(arguments.validation, arguments.workers)), encoding="utf-8")
    print(OURS, PAGE, sep="\n")


if __name__ == "__main__":
    main()
