"""Named situations to train and measure on, one short file each."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import TraceRequests
from fleetpilot.envs.scenarios import (
    agents,
    bursty,
    chat_and_batch,
    llumnix,
    long_prefix,
    maintenance,
    morning_peak,
    node_loss,
    pd_mixed_bursty,
    slo_1000rps,
    steady,
    tides,
    twins,
)
from fleetpilot.workloads import list_workloads, workload

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        steady.SCENARIO,
        bursty.SCENARIO,
        morning_peak.SCENARIO,
        chat_and_batch.SCENARIO,
        long_prefix.SCENARIO,
        agents.SCENARIO,
        slo_1000rps.SCENARIO,
        tides.SCENARIO,
        maintenance.SCENARIO,
        node_loss.SCENARIO,
        pd_mixed_bursty.SCENARIO,
        *llumnix.SCENARIOS,
        *twins.SCENARIOS,
    )
}
"""All scenarios by name."""


def load_scenario(name: str) -> Scenario:
    """The scenario of this name, or that of a trace file or an open-loop workload (`fleetpilot.workloads.workload`).

    Raises:
        ValueError: there is none.
    """
    if name in SCENARIOS:
        return SCENARIOS[name]
    base = name.partition("?")[0]
    if Path(base).is_file():
        return _of_workload(name, f"file:{name}")
    if ":" in base or base in (info.name for info in list_workloads()):
        return _of_workload(name, name)
    raise ValueError(
        f"scenario {name!r} is not known; expected one of {', '.join(SCENARIOS)}, a trace file or a workload"
    )


@lru_cache(maxsize=8)
def _of_workload(name: str, uri: str) -> Scenario:
    """Kept, for a training asks for it again and again."""
    return Scenario(name=name, summary="parts of a trace or a workload", requests=TraceRequests(workload(uri)))


def scenario_rows() -> list[tuple[str, str]]:
    """Name and summary of every scenario, for ``fleetpilot list scenarios``."""
    return [(scenario.name, scenario.summary) for scenario in SCENARIOS.values()]
