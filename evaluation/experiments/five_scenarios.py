"""Five scenarios with migration and without: a morning peak, priorities, long prefixes, maintenance, a lost node.

The scenarios are those of `fleetpilot.envs.scenarios`, their episodes drawn as for training, but with the hardware of
the profile, stock telemetry polled ten times a second and a fleet that does not scale: eight instances. Three policies
that move requests run beside the same dispatch without migration: `infaas++` for `llumnix`, `freeness` for
`llumnix-base`, and `llumnix-paper` with a threshold that no destination has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import Rebalancing
from fleetpilot.envs.episodes import Episode
from fleetpilot.envs.scenarios import load_scenario
from fleetpilot.evaluation.comparison import (
    E2E_P99,
    GOODPUT,
    INSTANCES,
    MIGRATIONS,
    PREEMPTED,
    RESTARTS,
    TTFT_P99,
    Metric,
    PolicyResult,
    ScenarioResult,
    collect,
    column,
    interval_text,
)
from fleetpilot.evaluation.metrics import samples_by_time
from fleetpilot.evaluation.plots import Column, small_multiples
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.runs import StoredRun
from fleetpilot.evaluation.statistics import Interval, paired_bootstrap
from fleetpilot.evaluation.tables import Table, Text, number

INSTANCES_READY = 8
CLAIMED = 4
"""Of the five, solved by migration, as a talk on Llumnix has it."""
PLOT = "five-scenarios.svg"

STAYS = "llumnix-paper?above=1e9"
PAIRS = {"llumnix": "infaas++", "llumnix-base": "freeness", "llumnix-paper": STAYS}
"""Policies that move requests, and the same dispatch without."""
BY_ARTIFACT = (
    "round-robin",
    "join-shortest-queue",
    "cache-aware",
    "infaas++",
    "llumnix",
    "freeness",
    "llumnix-base",
)
"""Policies that run where the last of the running list is the one that moves."""
BY_PAPER = (STAYS, "llumnix-paper")
"""Policies that run where one of the lowest priority is."""
LABELS = {STAYS: "llumnix-paper, moves none"}
DRAWN = ("infaas++", "llumnix", "cache-aware")
"""Policies whose course is drawn."""
POINTS = 200
"""Of a drawn course, at most."""

COLUMNS = (
    GOODPUT,
    TTFT_P99,
    E2E_P99,
    PREEMPTED,
    Metric("fragmentation %", ("fleet", "fragmentation"), 100),
    RESTARTS,
    Metric("failed", ("requests", "failed")),
    MIGRATIONS,
    INSTANCES,
    Metric("instance-seconds", ("fleet", "run_instance_seconds")),
)

Measure = Callable[[dict[str, Any]], float]
"""Of a segment's metrics; less is better."""


def missed(metrics: dict[str, Any]) -> float:
    """Per cent of the requests that miss a target."""
    return 100.0 * (1.0 - metrics["goodput"]["share"])


def restarts(metrics: dict[str, Any]) -> float:
    """Times that a request lost its instance and began again, per run."""
    return float(metrics["migrations"]["restarts"])


class Situation(NamedTuple):
    """A scenario as it is measured here.

    Attributes:
        loads: offered, over what the fleet gets through: a high one, and that of the environments.
        requests: per instance and segment, after the warm-up: a segment lasts some twenty lifetimes of a request.
        trouble: what migration would have to take away.
        unit: of the trouble.
        hard: why the scenario is hard.
        findings: what came out.
    """

    loads: tuple[float, ...]
    requests: int
    trouble: Measure
    unit: str
    hard: str
    findings: str


SITUATIONS = {
    "morning_peak": Situation(
        (0.9, 0.8),
        1_000,
        missed,
        "missed %",
        "For a third of the time more comes than the fleet gets through, and nobody knows which answer grows to "
        "thousands of tokens: memory fills up in one place while there is room in another, and what is dispatched "
        "now decides who preempts in a minute.",
        "Nothing here, least of all migration: at the top of the peak all instances are full at once, and of the "
        "memory only half a per cent is fragmented, so there is no better place. It makes `llumnix` half a point "
        "worse, one at a load of 0.8. On the paper's own A10s, which hold a fifteenth of the tokens, it gains: "
        "reproductions.md.",
    ),
    "chat_and_batch": Situation(
        (0.9, 0.8),
        2_000,
        missed,
        "missed %",
        "A batch job with a long prompt takes memory and iterations from the chats beside it, and most requests are "
        "chats: there is no room to keep free for them everywhere.",
        "Dispatch by freeness, with engines that serve chats first. Migration has next to nothing to do, since memory "
        "is never short. A regard for priorities is worth little to the chats and costs the batch jobs seconds: its "
        "headroom is made for one urgent request in ten, here they are seven to nine in ten. By the paper's freeness "
        "every instance with one is over-full, and the more so per request the smaller its batch is: requests gather "
        "where most are.",
    ),
    "long_prefix": Situation(
        (0.5,),
        450,
        missed,
        "missed %",
        "A question that meets its document in the cache is answered at once; one that does not waits for seconds of "
        "prefill, and the document takes 13 GB of memory. The fleet carries the load only if most questions meet "
        "their document.",
        "Dispatch by cached prefix, nearly all of it. Every other policy spends the fleet on prefills that were done "
        "already, and its queues grow without end. A request that moves takes its own blocks along, not the document "
        "to the next question.",
    ),
    "maintenance": Situation(
        (0.9, 0.7),
        1_000,
        restarts,
        "restarts",
        "Answers take half a minute on average and minutes at worst, the notice is 30 s: an instance that merely "
        "gets no new requests still holds many when it goes. They begin again elsewhere, on a fleet that is short of "
        "an instance or two.",
        "Migration, at a high load at a price: no request of the instances that go begins again, where 42 did. But an "
        "instance is empty after 12 of the 30 s, idles for the rest, which dispatch alone still uses, and meanwhile "
        "its requests fill the others: half a point more misses or so. At a load of 0.7 there is room: 21 restarts "
        "become 0, and misses do not rise.",
    ),
    "node_loss": Situation(
        (0.9, 0.7),
        2_400,
        restarts,
        "restarts",
        "Nobody knows before. All that the instance held begins again elsewhere at once, and what comes back is an "
        "empty cache.",
        "Nothing that moves: there is no notice and, with memory to spare, no other cause. Who has the fewest misses "
        "has them by dispatch; half of the requests have tight targets, and there is an instance too few for a while.",
    ),
}


CASES = {f"{name}, load {load:g}": (name, load) for name, of in SITUATIONS.items() for load in of.loads}
"""Scenario and load."""


class Size(NamedTuple):
    """How much to run.

    Attributes:
        segments: episodes of each scenario.
        seeds: of tie-breaks, each.
        length: of an episode, over what `SITUATIONS` has.
    """

    segments: int = 10
    seeds: int = 3
    length: float = 1.0


class Verdict(NamedTuple):
    """What migration did to the trouble of a scenario.

    Attributes:
        without: the trouble, on average over segments.
        moving: the same with migration.
        difference: of the segments' troubles.
        misses: difference in per cent of requests that miss a target.
    """

    without: float
    moving: float
    difference: Interval | None
    misses: Interval | None

    @property
    def text(self) -> str:
        """In words: solved is half of the trouble gone, beyond chance."""
        if self.difference is None or not self.difference.excludes_zero:
            return "no difference"
        if self.difference.low > 0:
            return "worse"
        answer = "solved" if self.moving <= self.without / 2 else "less"
        return answer if self.misses is None or self.misses.low <= 0 else f"{answer}, but more misses"


def run(out: Path, *, workers: int | None = None, size: Size = Size()) -> list[Table]:  # noqa: B008 (immutable)
    """Run it, judge what migration solves, and draw the first segments as `PLOT` in the folder.

    Args:
        out: folder for the runs.
        workers: processes; the machine's cores by default.
        size: segments, seeds and length.

    Returns:
        The verdicts, the differences behind them, then a table per case.
    """
    episodes = {case: draw(case, size) for case in CASES}
    runs: list[StoredRun] = []
    for policies, choice in ((BY_ARTIFACT, "last"), (BY_PAPER, "lowest_priority")):
        scenarios = [scenario(case, of, Rebalancing(choice=choice)) for case, of in episodes.items()]
        runs += evaluate(scenarios, policies, out, seeds=range(size.seeds), workers=workers)
    verdicts, tables, drawn = {}, [], []
    for case, of in episodes.items():  # one at a time: all requests of all cases are gigabytes
        (result,) = collect(run for run in runs if run.summary["config"]["scenario"] == case)
        verdicts[case] = {moving: verdict(result, moving) for moving in PAIRS}
        tables.append(values(result))
        if is_high(case):
            drawn.append(drawing(result, of[0]))
    (out / PLOT).write_text(small_multiples(drawn, "requests within their targets (%)"))
    return [answers(verdicts), differences(verdicts), *tables]


def situation_of(case: str) -> Situation:
    """Of one of `CASES`."""
    return SITUATIONS[CASES[case][0]]


def is_high(case: str) -> bool:
    """Whether the load is the scenario's highest here."""
    return CASES[case][1] == situation_of(case).loads[0]


def draw(case: str, size: Size) -> list[Episode]:
    """A scenario's episodes, of the seeds 0, 1, ....; at two loads they have the same requests."""
    name, load = CASES[case]
    situation = SITUATIONS[name]
    scenario = load_scenario(name).with_changes(
        load=load,
        scored_requests=situation.requests,
        hardware_error=0.0,
        poll_interval_s=0.1,
        poll_delay_s=0.0,
        scaling=None,
    )
    limits = scenario.limits(INSTANCES_READY)
    return [scenario.draw(np.random.default_rng(seed), limits, {}, size.length) for seed in range(size.segments)]


def scenario(case: str, episodes: list[Episode], rebalancing: Rebalancing) -> Scenario:
    """The episodes as segments of one scenario."""
    return Scenario(
        case,
        tuple(episode.table for episode in episodes),
        replace(episodes[0].fleet, failures=None, rebalancing=rebalancing),
        failures=tuple(episode.fleet.failures for episode in episodes),
    )


def policy_of(result: ScenarioResult, name: str) -> PolicyResult:
    """The results of a policy."""
    return next(policy for policy in result.policies if policy.policy == name)


def verdict(result: ScenarioResult, moving: str) -> Verdict:
    """A policy that moves requests against the same dispatch without."""
    segments = policy_of(result, PAIRS[moving]).segments, policy_of(result, moving).segments
    without, with_it = (np.array([situation_of(result.name).trouble(of) for of in policy]) for policy in segments)
    misses_without, misses_with = (np.array([missed(of) for of in policy]) for policy in segments)
    return Verdict(
        float(without.mean()),
        float(with_it.mean()),
        paired_bootstrap(with_it - without),
        paired_bootstrap(misses_with - misses_without),
    )


def overall(verdicts: Iterable[Verdict]) -> str:
    """Whether migration solves it: yes, if it does for every pair of policies; partly, if for some it is less."""
    texts = [verdict.text for verdict in verdicts]
    if all(text == "solved" for text in texts):
        return "yes"
    return "partly" if any(text.startswith(("solved", "less")) for text in texts) else "no"


def answers(verdicts: dict[str, dict[str, Verdict]]) -> Table:
    """A line for each case; a scenario is solved if all its cases are."""
    rows = []
    of_scenarios: dict[str, list[Verdict]] = {}
    for case, pairs in verdicts.items():
        of_pairs = [pairs[moving].text for moving in PAIRS]
        rows.append([Text(case), Text(situation_of(case).unit), *map(Text, of_pairs), Text(overall(pairs.values()))])
        of_scenarios.setdefault(CASES[case][0], []).extend(pairs.values())
    overalls = [overall(of) for of in of_scenarios.values()]
    return Table(
        f"Migration solves {overalls.count('yes')} of {len(overalls)}, and {overalls.count('partly')} partly",
        ["scenario", "trouble", *PAIRS, "solved by migration"],
        rows,
        f"A talk on Llumnix claims {CLAIMED} of {len(SITUATIONS)}; which, we do not know. Solved: the 95 % bootstrap "
        "interval of the difference over segments is below 0 and at least half of the trouble is gone; less: below 0.",
    )


def differences(verdicts: dict[str, dict[str, Verdict]]) -> Table:
    """What the answers rest on."""
    rows = []
    for case, pairs in verdicts.items():
        for moving, judged in pairs.items():
            cells = [
                f"{case}, {moving}",
                situation_of(case).unit,
                number(judged.without),
                number(judged.moving),
                interval_text(judged.difference),
                interval_text(judged.misses),
            ]
            rows.append([Text(cell) for cell in cells])
    return Table(
        "Differences that migration makes",
        ["scenario, policy", "trouble", "without", "with", "difference", "difference in missed %"],
        rows,
        "Means over segments, with the 95 % bootstrap interval of the paired difference. Without: the same dispatch.",
    )


def values(result: ScenarioResult) -> Table:
    """Every policy in one case."""
    columns = [column(result, metric) for metric in COLUMNS]
    names = [LABELS.get(policy.policy, policy.policy) for policy in result.policies]
    return Table(
        result.name,
        ["policy", *(metric.title for metric in COLUMNS)],
        [[Text(name), *cells] for name, *cells in zip(names, *columns, strict=True)],
        f"{len(result.baseline.requests):,} scored requests in {len(result.baseline.runs)} runs each; restarts, "
        "migrations, instances and instance-seconds: per run. The best of a column is marked.",
    )


# --- the picture -------------------------------------------------------------------------------------------------


def drawing(result: ScenarioResult, episode: Episode) -> Column:
    """The course of the first run of some policies, and the goodput of all."""
    failures = episode.fleet.failures
    lost = None if failures is None else min(failures.at)
    runs = {name: policy_of(result, name).runs[0] for name in DRAWN}
    if lost is None or failures is None:
        ylabel, shaded_s, curves = "requests waiting", None, {name: waiting(run) for name, run in runs.items()}
    else:
        time_s, instance = lost
        ylabel, shaded_s = f"requests on instance {instance}", (max(0.0, time_s - failures.notice_s), time_s)
        around_s = shaded_s[0] - 60.0, time_s + failures.repair_s + 60.0
        curves = {name: requests_on(run, instance, around_s) for name, run in runs.items()}
    goodput = {LABELS.get(policy.policy, policy.policy): GOODPUT.of(policy.pooled) or 0.0 for policy in result.policies}
    return Column(CASES[result.name][0], ylabel, curves, shaded_s, goodput)


def waiting(run: StoredRun) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Requests in the engines' queues over time, while requests arrive."""
    samples = samples_by_time(run.samples(), INSTANCES_READY)
    samples = samples[samples["time_s"][:, 0] <= run.summary["metrics"]["window"]["end_s"]]
    return thinned(samples["time_s"][:, 0], samples["waiting"].sum(axis=1))


def requests_on(
    run: StoredRun, instance: int, around_s: tuple[float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Requests on an instance over time."""
    samples = samples_by_time(run.samples(), INSTANCES_READY)[:, instance]
    low, high = around_s
    samples = samples[(samples["time_s"] >= low) & (samples["time_s"] <= high)]
    return thinned(samples["time_s"], samples["running"] + samples["waiting"])


def thinned(time_s: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every so many of them."""
    step = -(-len(time_s) // POINTS) or 1
    return time_s[::step], counts[::step].astype(np.float64)
