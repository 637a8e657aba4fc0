"""The demonstration: the baselines that only dispatch on two small workloads, on one a policy trained on the spot."""

from __future__ import annotations

from pathlib import Path

from fleetpilot.baselines import BASELINES
from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation.experiments.learned import Size, cells
from fleetpilot.evaluation.report import Report, write_report
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.segments import at_load, cut
from fleetpilot.fleet.policy import only_places
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload
from fleetpilot.workloads.selection import within_length

LOAD = 0.8
INSTANCES = 12
SEGMENTS = 10
SHARE = 0.5
"""Of the experiment's windows of bursts."""


def demo(out: Path, trained: Path | None = None) -> Report:
    """Compare the baselines that only dispatch on the twin of the Azure 2023 conversation trace.

    It is served by A10s at 0.8 of their capacity. The trace's rate is half as high again in the middle of its hour, so
    the fleet is overloaded for a while. Output lengths are predicted with an error, log-normal of sigma 0.5.

    Args:
        out: folder for runs and report.
        trained: folder of a policy trained with the configuration ``quick``: it competes on what it was trained for,
            bursts on eight H100s.
    """
    policies = [name for name, make in BASELINES.items() if only_places(make())]
    runs = evaluate([_conversation()], policies, out, seeds=(0,))
    if trained is not None:
        bursts = cells("bursty", "development", Size(share=SHARE, loads=(LOAD,)))
        runs += evaluate(bursts, [*policies, str(trained)], out, seeds=(0,))
    return write_report(runs, out, baseline="round-robin")


def _conversation() -> Scenario:
    profile = load_profile("a10-llama-7b")
    fleet = FleetConfig.of(profile, INSTANCES)
    table = at_load(within_length(workload("twin/azure-conv?predict=error:0.5"), profile.max_model_len), fleet, LOAD)
    return Scenario(f"Azure conversation twin, {INSTANCES} x A10, load {LOAD:g}", cut(table, SEGMENTS), fleet)
