"""Writes docs/scaling_policies.md: learned scaling beside the best that tuned baselines reach.

    python tools/build_scaling.py [EXPORT ...] [--all-kinds EXPORT ...] [--ablations FOLDER ...] [--out runs/scaling]
        [--workers N]

EXPORT are folders of policies that scale, each one a point; those of ``--all-kinds`` dispatch and migrate as well. A
FOLDER holds exports ``full-0``, ``full-1``, ... of a recipe with several seeds, and ``VARIANT-SEED`` of its ablations
with the same. Runs what is not stored yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.agents import load_policy
from fleetpilot.envs.scenarios import load_scenario
from fleetpilot.evaluation.provenance import origin_text
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.runs import StoredRun
from fleetpilot.evaluation.statistics import Interval, hierarchical_bootstrap, stratified_bootstrap
from fleetpilot.evaluation.tables import Table, Text, markdown, number
from fleetpilot.training.config import TrainConfig, load_config
from fleetpilot.training.validation import validate

PAGE = Path(__file__).parent.parent / "docs" / "scaling_policies.md"

EPISODES = range(40_000, 40_012)
"""Seeds; those of validation begin at 1,000, of training at 1,000,000."""
RESAMPLES = 2_000
SAMPLE_INTERVAL_S = 10.0

LOWS = (80, 120, 160, 240, 320, 480, 640, 960, 1920)
RATIOS = (1.5, 2.0, 3.0)
PUBLISHED = (
    *(f"llumnix?low={low}&high={low * ratio:g}" for low in LOWS for ratio in RATIOS),
    "hpa-kv?target=0.3&stabilization_s=60&dispatch=llumnix",
)
"""Others' rules. With the autoscaler's own 300 s next to nothing is drained in episodes of 400 s."""
OURS = tuple(
    f"llumnix-surge?low={low}&high={high}"
    for low, high in ((120, 240), (120, 360), (160, 320), (160, 480), (200, 600), (240, 720), (320, 960), (640, 1920))
)
"""Our rule; most learned policies are taught by it."""
RULES = (*PUBLISHED, *OURS)

SCENARIO = "tides"
NO_SCALING = "llumnix?low=0&high=1e9"
TRAINING_EPISODES = 48
"""Of the tables on what training makes."""
SIZES = (8, 16)


FINDINGS = """\
- `scale` is what `fleetpilot train --config scale` makes: trained on L40S engines and rising and falling loads alone,
  at home there and nowhere else. `scale-before` is from that configuration as it was first: it keeps nearly all on.
- Most of what is saved is a rule's: Llumnix's corridor starts what the load of the moment needs and is late while a
  load rises; `llumnix-surge`, which `scale` imitated first, starts more at once. What learning added: the last column.
- Learning takes care: the cost of these policies differs by a few per cent, and with advantages that trust the critic
  after one to two minutes most runs drifted towards more instances; with those that do not, both got better. The reason
  may be that few ready instances are a sign of a rising load, which the critic takes for the cause.
- On 48 episodes drawn as for training (load to 0.65, start-up to 60 s, hardware that is off its profile) the cost of
  `scale` and that of the rules do not differ by more than chance.
- `fleet`, one policy over all kinds of decision, is a clone of `llumnix-surge` and no better: with 8 slots it costs
  more by more than chance. PPO behind it, tried once, made it worse; perhaps since a rollout of 128 decisions, most of
  them dispatches, is over in seconds, so that what starting an instance is good for is left to the critic.
- With a fifth of the decisions `scale` costs more than the rules that it imitates: it keeps more instances. Without
  imitation it never learns to start one. Without randomisation it is at a loss in some fleets. Whether requests migrate
  makes no difference beyond chance.
- The course of the load is always that of the scenario. On another one all of this would have to be measured again.
"""
"""What came out, in words."""


class Case(NamedTuple):
    """Episodes to be tested on.

    Attributes:
        scenario: of `fleetpilot.envs.scenarios`.
        slots: most instances.
        changes: of the scenario.
    """

    scenario: str
    slots: int
    changes: dict[str, Any]


_CASES = ((8, 0.5, 30.0, 2.0), (16, 0.5, 30.0, 2.0), (16, 0.35, 30.0, 2.0), (16, 0.5, 10.0, 2.0), (16, 0.5, 60.0, 2.0))
CASES = {
    f"{slots} slots, load {load:g}, start-up {start_up_s:g} s": Case(
        "tides", slots, {"load": load, "start_up_s": start_up_s, "cv": cv}
    )
    for slots, load, start_up_s, cv in _CASES
}
FIXED = {
    "hardware_error": 0.0,
    "poll_interval_s": 0.1,
    "poll_delay_s": 0.0,
    "scored_requests": 500,
    "warmup_requests": 30,
}


class Points(NamedTuple):
    """What policies come to, (policies, episodes) each.

    Attributes:
        instance_s: paid for.
        p99_s: of the time to the first token.
        missed: share of the requests that miss a target.
    """

    instance_s: NDArray[np.float64]
    p99_s: NDArray[np.float64]
    missed: NDArray[np.float64]

    def of(self, rows: Any) -> Points:
        """Those of some policies."""
        return Points(*(values[rows] for values in self))


def scenario(name: str, case: Case) -> Scenario:
    """The episodes of a case."""
    drawn_from = load_scenario(case.scenario).with_changes(**FIXED, **case.changes)
    limits = drawn_from.limits(case.slots)
    episodes = [drawn_from.draw(np.random.default_rng(seed), limits, {}, 1.0) for seed in EPISODES]
    return Scenario(
        name, tuple(episode.table for episode in episodes), episodes[0].fleet, sample_interval_s=SAMPLE_INTERVAL_S
    )


def points(runs: Sequence[StoredRun], policies: Sequence[str]) -> Points:
    """Of one case, the policies in this order."""
    values = {}
    for run in runs:
        config, metrics = run.summary["config"], run.summary["metrics"]
        values[config["policy"], config["segment"]] = (
            metrics["fleet"]["run_instance_seconds"],
            metrics["latency"]["ttft_s"]["p99"],
            1.0 - metrics["goodput"]["share"],
        )
    table = np.array([[values[policy, k] for k in range(len(EPISODES))] for policy in policies], np.float64)
    return Points(*np.moveaxis(table, -1, 0))


def frontier(costs: NDArray[np.float64], waits: NDArray[np.float64]) -> NDArray[np.int64]:
    """The policies that no other one beats in both, by falling cost."""
    order = np.lexsort((waits, costs))
    least, kept = np.inf, []
    for policy in order:
        if waits[policy] < least:
            least = waits[policy]
            kept.append(policy)
    return np.array(kept[::-1])


def cost_at(wait: float, costs: NDArray[np.float64], waits: NDArray[np.float64]) -> float:
    """What the frontier costs at a wait, linear in its logarithm between two policies; NaN beyond its ends."""
    ends = frontier(costs, waits)
    return float(np.interp(np.log(wait), np.log(waits[ends]), costs[ends], left=np.nan, right=np.nan))


def saved(ours: Points, theirs: Points, by: str) -> Interval | None:
    """Share of the instance-seconds that one policy saves against the frontier of others at its own wait.

    The interval is a bootstrap of the episodes, the same for all policies; None where the frontier does not reach.

    Args:
        ours: of one policy.
        theirs: of the others.
        by: the wait: ``p99_s`` or ``missed``.
    """

    def share(episodes: NDArray[Any]) -> float:
        costs, waits = (values[:, episodes].mean(axis=1) for values in (theirs.instance_s, getattr(theirs, by)))
        wait = float(getattr(ours, by)[0, episodes].mean())
        return 1.0 - float(ours.instance_s[0, episodes].mean()) / cost_at(
            max(wait, 1e-9), costs, np.maximum(waits, 1e-9)
        )

    count = ours.p99_s.shape[1]
    estimate = share(np.arange(count))
    rng = np.random.default_rng(0)
    drawn = np.array([share(rng.integers(0, count, count)) for _ in range(RESAMPLES)])
    if np.isnan(estimate) or np.isnan(drawn).mean() > 0.05:
        return None
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return Interval(estimate, float(low), float(high))


def all_cases(of_cases: Sequence[Points], slots: Sequence[int]) -> Points:
    """One policy for all cases: means over them, of the fleet's seconds per slot, of the P99's logarithm, of misses."""
    return Points(
        np.mean([of.instance_s / count for of, count in zip(of_cases, slots, strict=True)], axis=0),
        np.exp(np.mean([np.log(of.p99_s) for of in of_cases], axis=0)),
        np.mean([of.missed for of in of_cases], axis=0),
    )


# --- the page --------------------------------------------------------------------------------------------------------


def percent(interval: Interval | None) -> str:
    """A share with its interval, in per cent."""
    if interval is None:
        return "-"
    return f"{100 * interval.estimate:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def answers(measured: dict[str, Points], policies: Sequence[str]) -> Table:
    """What each policy that is not published saves in each case."""
    field, rule = slice(0, len(PUBLISHED)), slice(len(PUBLISHED), len(RULES))
    rows = []
    for name, of in measured.items():
        for k, policy in enumerate(policies[len(PUBLISHED) :], len(PUBLISHED)):
            ours = of.of([k])
            cells = [
                *values_of(of, k),
                *(percent(saved(ours, of.of(field), by)) for by in ("p99_s", "missed")),
                "" if policy in OURS else percent(saved(ours, of.of(rule), "p99_s")),
            ]
            rows.append([Text(f"{name}: {label(policy)}"), *map(Text, cells)])
    return Table(
        "Instance-seconds saved",
        [
            "case, policy",
            "instance-seconds",
            "TTFT P99 s",
            "missed %",
            "saved at equal P99 %",
            "at equal misses %",
            "against `llumnix-surge` %",
        ],
        rows,
        "At equal P99 and misses: against the frontier of the published rules on the same episodes, tuned on them, "
        "linear in the logarithm of the P99 (the misses) between two of its points; in the last column, at equal P99, "
        f"against that of our rule. In brackets 95 % bootstrap intervals over the {len(EPISODES)} episodes. A dash: "
        "beyond an end of the frontier. All cases: one policy for all of them, in seconds per slot.",
    )


def frontier_table(name: str, of: Points, policies: Sequence[str]) -> Table:
    """The published rules that none of them beats in both."""
    kept = frontier(*(values[: len(PUBLISHED)].mean(axis=1) for values in (of.instance_s, of.p99_s)))
    return Table(
        f"Frontier of published rules: {name}",
        ["policy", "instance-seconds", "TTFT P99 s", "missed %"],
        [[Text(label(policies[k])), *map(Text, values_of(of, k))] for k in kept],
    )


def values_of(of: Points, policy: int) -> list[str]:
    """Instance-seconds, P99 in s, misses in %."""
    means = of.instance_s[policy].mean(), of.p99_s[policy].mean(), 100 * of.missed[policy].mean()
    return [number(float(mean)) for mean in means]


def label(policy: str) -> str:
    """A policy's name without its folder."""
    return f"`{policy}`" if policy in RULES else f"`{Path(policy).name}`"


class Trained(NamedTuple):
    """What the policies of one recipe come to on the same episodes.

    Attributes:
        cost: (seeds, episodes) minus the return.
        goodput: share of the requests.
        instances: on average.
        migrations: per request.
        fallback: share of a learned policy's decisions, those that its fallback made.
    """

    cost: NDArray[np.float64]
    goodput: float
    instances: float
    migrations: float
    fallback: float


def trained(names: Sequence[str], environment: str, arguments: dict[str, Any]) -> Trained:
    """Run policies on the episodes of an environment."""
    found = [
        validate(load_policy(name), environment, {SCENARIO: arguments}, TRAINING_EPISODES, EPISODES[0])[SCENARIO]
        for name in names
    ]
    sums = {name: sum(float(one.metrics[name].sum()) for one in found) for name in found[0].metrics}
    return Trained(
        -np.array([one.metrics["return"] for one in found]),
        1.0 - sums["misses"] / sums["requests"],
        sums["instance_s"] / sums["duration_s"],
        sums["migrations"] / sums["requests"],
        float(np.mean([one.fallback_share for one in found])),
    )


def difference(of: Trained, to: Trained) -> Interval | None:
    """Of the cost, as a share; with several seeds the interval is over these and the episodes."""
    shares = (of.cost - to.cost) / to.cost.mean()
    if len(shares) == 1:
        return stratified_bootstrap([shares[0]], np.mean)
    found = hierarchical_bootstrap(shares)
    return found.both if found else None


COLUMNS = ("cost", "goodput %", "instances", "migrations per 1,000 requests", "fallback %")
"""Of the tables of `rows_beside`, between the name and the difference."""


def rows_beside(found: dict[str, Trained], reference: str, prefix: str = "") -> list[list[Text]]:
    """By rising cost, each beside the reference."""
    rows = []
    for name, of in sorted(found.items(), key=lambda item: float(item[1].cost.mean())):
        numbers = (float(of.cost.mean()), 100 * of.goodput, of.instances, 1000 * of.migrations, 100 * of.fallback)
        against = "" if name == reference else percent(difference(of, found[reference]))
        rows.append([Text(prefix + name), *map(Text, map(number, numbers)), Text(against)])
    return rows


def ablations(folder: Path) -> Table:
    """What is lost without parts of a recipe."""
    variants: dict[str, list[str]] = {}
    for export in sorted(folder.glob("*-*")):
        variants.setdefault(export.name.rpartition("-")[0], []).append(str(export))
    config = training_of(variants["full"][0])
    arguments = config.environments()[SCENARIO]
    found = {
        name: trained(exports, config.environment, own_part(arguments, exports)) for name, exports in variants.items()
    }
    assert config.imitation is not None
    found |= {label(rule): trained([rule], config.environment, arguments) for rule in config.imitation.policies}
    found["no scaling: all on"] = trained([NO_SCALING], config.environment, {**arguments, "ready_share": 1.0})
    kind = config.environment.rpartition("/")[2]
    return Table(
        f"Ablations, {kind}",
        ["recipe, or rule", *COLUMNS, "cost against full %"],
        rows_beside(found, "full"),
        f"{config.decisions:,} decisions of training with {len(variants['full'])} seeds each; {TRAINING_EPISODES} "
        f"episodes of the seeds from {EPISODES[0]:,}, which differ as those of the full recipe's training do. Cost is "
        "minus the return of an episode, differences are against the full recipe with the same seed, with 95 % "
        "bootstrap intervals over training seeds and episodes. Where a policy is not at home its fallback decides.",
    )


def training_of(export: str) -> TrainConfig:
    """The configuration that an export was trained with."""
    return load_config(str(Path(export) / "training.toml"))


def own_part(arguments: dict[str, Any], exports: Sequence[str]) -> dict[str, Any]:
    """Arguments of an environment in which who decides what is as it was in the training of some exports."""
    own = training_of(exports[0]).environments()[SCENARIO]
    return {**arguments, **{name: own[name] for name in ("kinds", "others") if name in own}}


def all_kinds(export: str) -> Table:
    """A policy over all kinds of decision beside the rules that it might have imitated."""
    config = training_of(export)
    assert config.imitation is not None
    rows = []
    for slots in SIZES:
        arguments = {**config.environments()[SCENARIO], "fleet_size": slots}
        found = {
            label(name): trained([name], config.environment, arguments) for name in (*config.imitation.policies, export)
        }
        best = min((label(name) for name in config.imitation.policies), key=lambda name: float(found[name].cost.mean()))
        rows += rows_beside(found, best, f"{slots} slots: ")
    return Table(
        "One policy over all kinds",
        ["policy", *COLUMNS, "cost against the best rule %"],
        rows,
        f"`{Path(export).name}` dispatches, migrates and scales. {TRAINING_EPISODES} episodes of the seeds from "
        f"{EPISODES[0]:,}, which differ as those of training do but for the size of the fleet; of the rules, those "
        "that were to be imitated. Cost is minus the return of an episode, in brackets 95 % bootstrap intervals over "
        "the episodes.",
    )


def page(measured: dict[str, Points], policies: Sequence[str], more: Sequence[Table]) -> str:
    """The page."""
    head = f"""# Learned scaling

Written by `python tools/build_scaling.py`; do not edit. {origin_text()}

Instances started and drained by learned policies, beside {len(PUBLISHED)} published rules - Llumnix's corridor of
freeness, `low` of {LOWS[0]} to {LOWS[-1]} blocks per request and `high` {RATIOS[0]:g} to {RATIOS[-1]:g} times that, and
Kubernetes' autoscaler with Llumnix's dispatch - and our own `llumnix-surge`. Episodes of the scenario `tides` with the
seeds {EPISODES[0]:,} to {EPISODES[-1]:,}, none of which is in training or validation, drawn as for training
([how](environment.md)), but with the hardware of the profile and stock telemetry polled ten times a second.
Instance-seconds are those of a whole run: starting, ready and draining. The P99 of the time to the first token is the
mean of the episodes'.

{FINDINGS}"""
    tables = [
        answers(measured, policies),
        *more,
        *(frontier_table(name, of, policies) for name, of in measured.items()),
    ]
    return "\n".join([head, *map(markdown, tables)]).replace("\n\n\n", "\n\n")


def main() -> None:
    """Run it and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", metavar="EXPORT", nargs="*")
    parser.add_argument("--all-kinds", metavar="EXPORT", nargs="*", default=[], help="policies over all kinds")
    parser.add_argument("--ablations", metavar="FOLDER", type=Path, nargs="*", default=[], help="recipes and seeds")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), help="folder of the runs")
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    arguments = parser.parse_args()
    policies = [*RULES, *arguments.exports]
    measured = {}
    for name, case in CASES.items():
        runs = evaluate([scenario(name, case)], policies, arguments.out, seeds=(0,), workers=arguments.workers)
        measured[name] = points(runs, policies)
    slots = [case.slots for case in CASES.values()]
    measured["all cases"] = all_cases(list(measured.values()), slots)
    more = [*map(all_kinds, arguments.all_kinds), *map(ablations, arguments.ablations)]
    PAGE.write_text(page(measured, policies, more), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
