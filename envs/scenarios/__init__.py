"""Named situations to train and measure on, one short file each."""

from __future__ import annotations

from fleetpilot.envs.episodes import Scenario
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
)

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
    )
}
"""All scenarios by name."""


def load_scenario(name: str) -> Scenario:
    """The scenario of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in SCENARIOS:
        raise ValueError(f"scenario {name!r} is not known; expected one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def scenario_rows() -> list[tuple[str, str]]:
    """Name and summary of every scenario, for ``fleetpilot list scenarios``."""
    return [(scenario.name, scenario.summary) for scenario in SCENARIOS.values()]
