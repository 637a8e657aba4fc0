"""The demonstration: all dispatch policies on an hour's worth of conversation, small enough to watch."""

from __future__ import annotations

from pathlib import Path

from fleetpilot.baselines import BASELINES
from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation.report import Report, write_report
from fleetpilot.evaluation.runner import Scenario, evaluate
from fleetpilot.evaluation.segments import at_load, cut, within_length
from fleetpilot.fleet.policy import kinds_of
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import KIND_DISPATCH
from fleetpilot.workloads import workload

LOAD = 0.8
INSTANCES = 12
SEGMENTS = 10


def demo(out: Path) -> Report:
    """Compare the policies that only dispatch on the twin of the Azure 2023 conversation trace.

    It is served by A10s at 0.8 of their capacity. The trace's rate is half as high again in the middle of its hour, so
    the fleet is overloaded for a while. Output lengths are predicted with an error, log-normal of sigma 0.5.

    Args:
        out: folder for runs and report.
    """
    profile = load_profile("a10-llama-7b")
    fleet = FleetConfig.of(profile, INSTANCES)
    table = at_load(within_length(workload("twin/azure-conv?predict=error:0.5"), profile.max_model_len), fleet, LOAD)
    scenario = Scenario(f"Azure conversation twin, {INSTANCES} x A10, load {LOAD:g}", cut(table, SEGMENTS), fleet)
    policies = [name for name, make in BASELINES.items() if kinds_of(make()) == (KIND_DISPATCH,)]
    return write_report(evaluate([scenario], policies, out, seeds=(0,)), out, baseline="round-robin")
