"""`fleetpilot tune`: parameters of policies, looked for on development windows with the same budget for all of them.

A policy's module says which parameters are looked for between which values (`fleetpilot.baselines.policy_ranges`). A
family is a group of scenarios that get parameters in common. Every trial runs the policy on all development windows;
the first has the defaults, so that nothing is chosen that is worse there. Trials are proposed in rounds, run side by
side, and are on disk as they end: the same command asks for the same ones again, finds those, and goes on from there.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fleetpilot.baselines import load_policy, policy_parameters, policy_ranges, read_name
from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.provenance import config_hash, provenance, to_json
from fleetpilot.evaluation.runner import Cell, Job, Scenario, compile_kernels, outcome_of, stderr_line
from fleetpilot.evaluation.runs import write_atomically
from fleetpilot.evaluation.tables import Table, Text
from fleetpilot.evaluation.tuned import FORMAT, read_tuned
from fleetpilot.fleet.policy import Range
from fleetpilot.fleet.view import KIND_DECODE, KIND_DESTINATION, KIND_DISPATCH, KIND_PREFILL, KIND_SCALE, KIND_SOURCE

INSTANCE_PRICE = 0.25
"""What a fleet that scales pays, in shares of goodput, for all its instances all the time."""
DIGITS = 3
"""To which parameters are rounded: a name that people can read, and trials that meet again."""
FIRST_ROUND = 10
"""Trials of a policy that are proposed before any is known: the defaults, the rest drawn at random."""
ROUND = 5
"""Trials that are proposed together from then on, by what is known."""


@dataclass(frozen=True)
class Study:
    """The search for one policy's parameters in one family.

    Attributes:
        policy: its name; parameters in it stay as they are.
        family: of the scenarios.
        scenarios: their segments are the development windows.
        seeds: tie-break seeds of every run.
        trials: at most.
        seed: of the search.
        path: of the file that trials are appended to.
    """

    policy: str
    family: str
    scenarios: tuple[Scenario, ...]
    seeds: tuple[int, ...]
    trials: int
    seed: int
    path: Path

    @property
    def ranges(self) -> dict[str, Range]:
        """Of the parameters that matter to these fleets."""
        fleets = [scenario.fleet for scenario in self.scenarios]
        asked = {KIND_DISPATCH}
        if any(fleet.pools is not None for fleet in fleets):
            asked |= {KIND_PREFILL, KIND_DECODE}
        if any(fleet.rebalancing is not None for fleet in fleets):
            asked |= {KIND_SOURCE, KIND_DESTINATION}
        if any(fleet.scaling is not None for fleet in fleets):
            asked.add(KIND_SCALE)
        policy, fixed = read_name(self.policy)
        return {
            name: allowed
            for name, allowed in policy_ranges(policy).items()
            if allowed.kind in asked and name not in fixed
        }

    def jobs(self, policy: str, command: str) -> tuple[Job, ...]:
        """The runs of a trial."""
        cells = [
            Cell(scenario, segment, policy, seed)
            for scenario in self.scenarios
            for segment, seed in itertools.product(range(len(scenario.segments)), self.seeds)
        ]
        return tuple(cell.job(cell.config(), command) for cell in cells)


@dataclass(frozen=True)
class Trial:
    """One set of parameters, tried.

    Attributes:
        policy: name with the parameters.
        value: see `objective`.
        goodput: mean share over the development runs.
    """

    policy: str
    value: float
    goodput: float


@dataclass(frozen=True)
class Tuned:
    """What came of a study.

    Attributes:
        policy: its name, without those parameters that were looked for.
        trials: in the order in which they were proposed; the first has the defaults.
    """

    policy: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The first of the highest value."""
        return max(self.trials, key=lambda trial: trial.value)


def objective(summary: dict[str, Any], fleet: FleetConfig) -> float:
    """What is maximised of a run: goodput, less the price of the instances paid for where the fleet scales."""
    value = _goodput(summary)
    if fleet.scaling is not None:
        value -= INSTANCE_PRICE * float(summary["fleet"]["run_instances"]) / len(fleet.profiles)
    return value


def _goodput(summary: dict[str, Any]) -> float:
    share = summary["goodput"]["share"]
    if share is None:
        raise ValueError("a development window has no scored request; expected fewer windows or a smaller warm-up")
    return float(share)


def with_parameters(policy: str, values: dict[str, float]) -> str:
    """A policy's name with more parameters; those at their defaults are left out."""
    base, fixed = read_name(policy)
    defaults = policy_parameters(base)
    said = {name: _rounded(value) for name, value in values.items() if value != defaults[name]}
    text = "&".join(f"{name}={value}" for name, value in {**fixed, **said}.items())
    return f"{base}?{text}" if text else base


def _rounded(value: float) -> str:
    return np.format_float_positional(value, precision=DIGITS, unique=False, fractional=False, trim="-")


def tune(
    scenarios: Sequence[Scenario],
    policies: Sequence[str],
    out: Path,
    *,
    family: str,
    trials: int = 30,
    seeds: Sequence[int] = (0,),
    seed: int = 0,
    workers: int | None = None,
    backend: str = "local",
    command: str | None = None,
) -> list[Tuned]:
    """Look for the parameters of each policy, and write those found into ``out/tuned.json``.

    Args:
        scenarios: of the family; their segments are the development windows.
        policies: names; parameters in them stay as they are, and those that have none to look for get one trial.
        out: folder of the file and of the trials.
        family: name of the scenarios together.
        trials: for each policy, at most.
        seeds: tie-break seeds.
        seed: of the search.
        workers: processes; the machine's cores by default. With 1 all happens in this process.
        backend: where they are, see `fleetpilot.evaluation.backends.map_over_workers`.
        command: the command line for the record; this process's by default.

    Raises:
        ValueError: a policy is not known; nothing to try.
        ChildProcessError: a worker died.
        KeyboardInterrupt: after Ctrl-C; trials in progress are finished first, and all that have ended are kept.
    """
    for policy in policies:
        load_policy(policy)
    if not (scenarios and policies and seeds and trials > 0):
        raise ValueError("tune: expected at least one scenario, policy, seed and trial")
    folder = out / "trials"
    folder.mkdir(parents=True, exist_ok=True)
    studies = [
        Study(policy, family, tuple(scenarios), tuple(seeds), trials, seed, _path(folder, family, policy))
        for policy in policies
    ]
    command = shlex.join(sys.argv) if command is None else command
    compile_kernels(policies, stderr_line)
    found = run_studies(studies, command, workers=workers, backend=backend)
    _write(out / "tuned.json", studies, found, command)
    return found


def _path(folder: Path, family: str, policy: str) -> Path:
    name = "-".join(re.sub(r"[^a-zA-Z0-9.=_+-]+", "-", part)[:80] for part in (family, policy))
    return folder / f"{name}.jsonl"


def run_studies(
    studies: Sequence[Study],
    command: str,
    *,
    workers: int | None = None,
    backend: str = "local",
    say: Callable[[str], None] = stderr_line,
) -> list[Tuned]:
    """Make the trials of studies side by side, or find them on disk; see `tune`."""
    searches = [_Search(study, command) for study in studies]
    while proposals := [proposal for search in searches for proposal in search.propose()]:
        missing = list({(each.search.study.path, each.key): each for each in proposals if each.trial is None}.values())
        jobs = [each.jobs for each in missing]
        map_over_workers(run_trial, jobs, partial(_keep, missing, say), backend=backend, workers=workers, say=say)
        for each in proposals:
            each.search.tell(each)
    return [Tuned(search.study.policy, tuple(search.trials)) for search in searches]


def run_trial(jobs: tuple[Job, ...]) -> Trial:
    """Make the runs of one set of parameters."""
    runs = [(outcome_of(job).summary["metrics"], job.fleet) for job in jobs]
    return Trial(
        jobs[0].policy,
        float(np.mean([objective(summary, fleet) for summary, fleet in runs])),
        float(np.mean([_goodput(summary) for summary, _ in runs])),
    )


def _keep(missing: list[_Proposal], say: Callable[[str], None], place: int, trial: Trial) -> None:
    missing[place].search.keep(missing[place].key, trial)
    study, known = missing[place].search.study, missing[place].search.known
    best = max(each.value for each in known.values())
    say(f"{study.family} {study.policy}: {len(known)} of at most {study.trials} trials, best {best:.4f}")


@dataclass(frozen=True)
class _Proposal:
    """Parameters that a search wants to know the value of."""

    search: _Search
    asked: Any  # optuna's trial
    jobs: tuple[Job, ...]
    key: str

    @property
    def trial(self) -> Trial | None:
        """What came of it, if it is known."""
        return self.search.known.get(self.key)


class _Search:
    """Optuna's side of a study, and what is known of it on disk."""

    def __init__(self, study: Study, command: str):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = study
        self.command = command
        self.known = _read(study.path)
        self.trials: list[Trial] = []
        self.ranges = study.ranges
        self._distributions: dict[str, Any] = {
            name: optuna.distributions.IntDistribution(int(allowed.low), int(allowed.high), log=allowed.log)
            if allowed.whole
            else optuna.distributions.FloatDistribution(allowed.low, allowed.high, log=allowed.log)
            for name, allowed in self.ranges.items()
        }
        sampler = optuna.samplers.TPESampler(seed=study.seed, n_startup_trials=FIRST_ROUND, constant_liar=True)
        self._optuna = optuna.create_study(direction="maximize", sampler=sampler)
        defaults = policy_parameters(read_name(study.policy)[0])
        self._optuna.enqueue_trial({name: defaults[name] for name in self.ranges})

    def propose(self) -> list[_Proposal]:
        """The next round; empty once the budget is spent."""
        left = (self.study.trials if self.ranges else 1) - len(self.trials)
        return [self._proposal() for _ in range(min(left, ROUND if self.trials else FIRST_ROUND))]

    def _proposal(self) -> _Proposal:
        asked = self._optuna.ask(self._distributions)
        policy = with_parameters(self.study.policy, {name: asked.params[name] for name in self.ranges})
        jobs = self.study.jobs(policy, self.command)
        return _Proposal(self, asked, jobs, config_hash({"runs": [config_hash(job.config) for job in jobs]}))

    def tell(self, proposal: _Proposal) -> None:
        """Let the search know what came of a proposal; in the order of `propose`."""
        trial = self.known[proposal.key]
        self._optuna.tell(proposal.asked, trial.value)
        self.trials.append(trial)

    def keep(self, key: str, trial: Trial) -> None:
        """Know a trial, and write it down."""
        self.known[key] = trial
        with self.study.path.open("a") as file:
            file.write("\n" + json.dumps({"key": key, **vars(trial)}))  # a line that was cut off ends here


def _read(path: Path) -> dict[str, Trial]:
    """Trials on disk by their keys; a last line that was cut off is left out."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = fields.pop("key")
        known[key] = Trial(**fields)
    return known


# --- the file of chosen parameters -------------------------------------------------------------------------------


def _write(path: Path, studies: list[Study], found: list[Tuned], command: str) -> None:
    """Add what was found to the file; other families and policies in it stay."""
    families = read_tuned(path) if path.exists() else {}
    for study, tuned in zip(studies, found, strict=True):
        families.setdefault(study.family, {})[study.policy] = {
            "chosen": tuned.best.policy,
            "value": tuned.best.value,
            "goodput": tuned.best.goodput,
            "default_value": tuned.trials[0].value,
            "default_goodput": tuned.trials[0].goodput,
            "trials": len(tuned.trials),
            "seed": study.seed,
            "seeds": list(study.seeds),
            "development_windows": {scenario.name: len(scenario.segments) for scenario in study.scenarios},
            "command": command,
            "commit": provenance()["commit"],
        }
    write_atomically(path, to_json({"format": FORMAT, "families": families}) + "\n")


def tuned_table(family: str, found: Sequence[Tuned]) -> Table:
    """What was chosen, and what the defaults reach on the same windows."""
    rows = [
        [
            Text(tuned.best.policy),
            Text(f"{100 * tuned.best.goodput:.2f}"),
            Text(f"{100 * tuned.trials[0].goodput:.2f}"),
            Text(f"{tuned.best.value:.4f}"),
            Text(f"{tuned.trials[0].value:.4f}"),
            Text(str(len(tuned.trials))),
        ]
        for tuned in found
    ]
    return Table(
        f"{family}: parameters chosen on the development windows",
        ["policy", "goodput %", "by default", "value", "by default", "trials"],
        rows,
    )
