"""Gymnasium environments over the simulated fleet. Importing the package registers them: `ENVIRONMENTS`."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.envs, not envs")

from typing import Any

import gymnasium

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.fleet_env import FleetEnv
from fleetpilot.envs.rewards import RewardWeights
from fleetpilot.envs.scenarios import SCENARIOS, load_scenario, scenario_rows
from fleetpilot.envs.vector_env import FleetVectorEnv

__all__ = [
    "ENVIRONMENTS",
    "SCENARIOS",
    "FleetEnv",
    "FleetVectorEnv",
    "RewardWeights",
    "Scenario",
    "load_scenario",
    "scenario_rows",
]

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "fleetpilot/Dispatch-v0": {},
    "fleetpilot/Disaggregated-v0": {"kinds": ["prefill", "decode"], "scenario": "pd_mixed_bursty"},
    "fleetpilot/Fleet-v0": {
        "kinds": ["dispatch", "prefill", "decode", "source", "destination", "scale"],
        "scenario": "tides",
    },
    "fleetpilot/Rebalance-v0": {"kinds": ["source", "destination"], "others": "llumnix", "scenario": "llumnix/M-M"},
    "fleetpilot/Scale-v0": {"kinds": ["scale"], "others": "llumnix", "scenario": "tides"},
}
"""The registered ids, and the arguments in which they differ from `FleetEnv`'s defaults."""

for _id, _arguments in ENVIRONMENTS.items():
    gymnasium.register(
        _id,
        entry_point="fleetpilot.envs.fleet_env:FleetEnv",
        vector_entry_point="fleetpilot.envs.vector_env:FleetVectorEnv",
        kwargs=_arguments,
    )
