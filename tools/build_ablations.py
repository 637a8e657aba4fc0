"""Writes docs/ablations.md: what the parts of the recipe of `learned` are worth.

    python tools/build_ablations.py [--out runs/ablations] [--workers N]

Trains the recipe, and the recipe without one part at a time, with a fifth of the decisions and three seeds each, and
runs all of them on development windows of `fleetpilot evaluate --experiment learned`. What is there is not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import Telemetry
from fleetpilot.evaluation.comparison import GOODPUT
from fleetpilot.evaluation.experiments import learned
from fleetpilot.evaluation.provenance import origin_text
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.statistics import hierarchical_bootstrap
from fleetpilot.evaluation.tables import Table, Text, markdown, number
from fleetpilot.training.config import Changes, TrainConfig, load_config, with_settings
from fleetpilot.training.sweep import Member, sweep
from fleetpilot.training.train import EXPORT

PAGE = Path(__file__).parent.parent / "docs" / "ablations.md"
RECIPE, SHARE, SEEDS, WINDOWS = "dispatch", 5, (0, 1, 2), 2
RULE = "late=0.8&cold=2"
"""Early rejection of all that are compared; `learned` has had another since."""
PRIVILEGED = {"predicted_share": 1.0, "predictor_error": 0.0, "poll_interval_s": 0.05, "poll_delay_s": 0.0}
"""Every answer's length is known, and an instance's state as it was 50 ms ago at most."""


def shortened(config: TrainConfig) -> TrainConfig:
    """A fifth of everything that is learned from; baselines alone teach, for `learned` has had the whole recipe."""
    assert config.imitation is not None
    decisions = config.decisions // SHARE
    return with_settings(
        config,
        {
            "decisions": decisions,
            "imitation.decisions": config.imitation.decisions // SHARE,
            "imitation.policies": [name for name in config.imitation.policies if not name.startswith(learned.LEARNED)],
            "ppo.critic_decisions": config.ppo.critic_decisions // SHARE,
            "validation.every": decisions,
        },
    )


def without_imitation(config: TrainConfig) -> TrainConfig:
    """As many decisions, all of PPO; faster, for it has to come further."""
    assert config.imitation is not None
    decisions = config.decisions + config.imitation.decisions
    settings = {"decisions": decisions, "validation.every": decisions // 4, "ppo.learning_rate": 5e-4}
    return replace(with_settings(config, settings), imitation=None)


def without_randomisation(config: TrainConfig) -> TrainConfig:
    """The middle of every range, and the hardware of the profile."""

    def middle(changes: Changes) -> dict[str, Any]:
        return {name: _middle(value) for name, value in changes.items()}

    scenarios = {name: middle(changes) for name, changes in config.scenarios.items()}
    return replace(config, changes={**middle(config.changes), "hardware_error": 0.0}, scenarios=scenarios)


def _middle(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    low, high = value
    return (low + high) // 2 if isinstance(low, int) else (low + high) / 2


def privileged(config: TrainConfig) -> TrainConfig:
    """With what no dispatcher knows."""
    scenarios = {name: {**changes, **PRIVILEGED} for name, changes in config.scenarios.items()}
    return replace(config, scenarios=scenarios)


WHOLE, KNOWING = "the recipe", "privileged state"
VARIANTS: Mapping[str, Callable[[TrainConfig], TrainConfig]] = {
    WHOLE: lambda config: config,
    "no imitation": without_imitation,
    "no randomisation": without_randomisation,
    KNOWING: privileged,
}


def members(variant: str, out: Path) -> list[Member]:
    """The training runs of a variant, a seed each."""
    config = VARIANTS[variant](shortened(load_config(RECIPE)))
    folder = out / variant.replace(" ", "-")
    return [
        Member(f"{variant}, seed {seed}", replace(config, seed=seed), folder / str(seed), Path(__file__).name)
        for seed in SEEDS
    ]


def cells(variant: str) -> list[Scenario]:
    """Of all workloads at all loads."""
    size = learned.Size(windows=WINDOWS)
    found = [cell for name in learned.names() for cell in learned.cells(name, learned.DEVELOPMENT, size)]
    return [knowing(cell) for cell in found] if variant == KNOWING else found


def knowing(cell: Scenario) -> Scenario:
    """The same requests; all lengths known, telemetry fresh."""
    segments = tuple(
        replace(table, predicted_output_tokens=table.output_tokens.astype(np.float32)) for table in cell.segments
    )
    telemetry = Telemetry(PRIVILEGED["poll_interval_s"], PRIVILEGED["poll_delay_s"])
    return replace(cell, segments=segments, fleet=replace(cell.fleet, telemetry=telemetry))


def misses(variant: str, out: Path, workers: int | None) -> dict[str, NDArray[np.float64]]:
    """Workload -> (seeds, loads * windows) requests that missed a target, in %."""
    exports = [f"{member.folder / EXPORT}?{RULE}" for member in members(variant, out)]
    runs = evaluate(cells(variant), exports, out, seeds=(0,), workers=workers)
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        of = found.setdefault(run.summary["config"]["family"], {export: [] for export in exports})
        of[run.summary["config"]["policy"]].append(100.0 - (GOODPUT.of(run.summary["metrics"]) or 0.0))
    return {name: np.array([of[export] for export in exports]) for name, of in found.items()}


def table(found: Mapping[str, Mapping[str, NDArray[np.float64]]], costs: Mapping[str, list[float]]) -> Table:
    """All variants, over all workloads and each."""
    whole = np.concatenate([*found[WHOLE].values()], axis=1)
    rows = []
    for variant, of in found.items():
        together = np.concatenate([*of.values()], axis=1)
        difference = hierarchical_bootstrap(together - whole)
        against = ""
        if variant != WHOLE and difference:
            both = difference.both
            against = f"{both.estimate:+.2f} [{both.low:+.2f}, {both.high:+.2f}]"
        each = [Text(number(float(values.mean()))) for values in of.values()]
        validated = "" if variant == KNOWING else " ".join(f"{cost:.3f}" for cost in costs[variant])
        rows.append([Text(variant), Text(validated), Text(number(float(together.mean()))), Text(against), *each])
    return Table(
        "Requests that missed a target, in %",
        ["variant", "cost on validation, by seed", "all", "against the recipe, points", *found[WHOLE]],
        rows,
        f"Mean over {len(SEEDS)} training seeds, three loads (0.8, 0.95, 1.05) and {WINDOWS} windows each; one seed of "
        "tie breaks. Differences are paired, with 95 % bootstrap intervals over training seeds and windows. Cost on "
        "validation is relative to the baselines that the variant itself was compared with, on episodes of its own.",
    )


def page(content: Table) -> str:
    """The page."""
    config = load_config(RECIPE)
    assert config.imitation is not None
    learning = shortened(config)
    assert learning.imitation is not None
    return f"""# What the parts of the recipe are worth

Written by `python tools/build_ablations.py`; do not edit. {origin_text()}

The recipe of [`learned`](learned.md), which is imitation alone, with {learning.imitation.decisions:,}
decisions, a fifth of what it has, and three seeds; and the same without one part. Baselines alone teach:
`learned` itself has had the whole recipe. All of them decide with one rule (`{RULE}`), and with
its fallback where they have not been trained: node loss, maintenance and pools.

- *no imitation*: all {learning.imitation.decisions + learning.decisions:,} decisions are of PPO, with a learning rate
  of 0.0005;
- *no randomisation*: what is drawn from a range is the middle of the range, and hardware is that of the profile;
- *privileged state*: every answer's length is known and telemetry is 50 ms old at most, in training and in the test:
  an upper bound of what better predictions and telemetry could bring. Early rejection knows it too.

Imitation is what teaches to hold requests back (`azure-code`) and to keep sessions where their caches are (`agents`);
PPO alone does neither, but places better where memory binds (`llumnix/...`). Without randomisation `azure-code` and
`chat_and_batch` are lost: their policies change with the load. Knowing the lengths helps on `azure-code`, and over all
by no more than chance.

Migration and scaling are no part of it; [learned scaling](scaling_policies.md) has its own ablations.

{markdown(content)}"""


def main() -> None:
    """Train, run, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"), help="folder of the runs")
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    arguments = parser.parse_args()
    costs = {}
    for variant in VARIANTS:
        trained = sweep(
            members(variant, arguments.out),
            lambda member, trained: print(f"{member.name}: cost {trained.cost:.3f}", flush=True),
            workers=arguments.workers,
        )
        costs[variant] = [each.cost for each in trained]
    found = {variant: misses(variant, arguments.out, arguments.workers) for variant in VARIANTS}
    PAGE.write_text(page(table(found, costs)), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
