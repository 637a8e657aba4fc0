"""Gymnasium environments over the simulated fleet. Importing the package registers them: ``fleetpilot/Dispatch-v0``."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.envs, not envs")

import gymnasium

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.fleet_env import FleetEnv
from fleetpilot.envs.rewards import RewardWeights
from fleetpilot.envs.scenarios import SCENARIOS, load_scenario, scenario_rows
from fleetpilot.envs.vector_env import FleetVectorEnv

__all__ = [
    "SCENARIOS",
    "FleetEnv",
    "FleetVectorEnv",
    "RewardWeights",
    "Scenario",
    "load_scenario",
    "scenario_rows",
]

gymnasium.register(
    "fleetpilot/Dispatch-v0",
    entry_point="fleetpilot.envs.fleet_env:FleetEnv",
    vector_entry_point="fleetpilot.envs.vector_env:FleetVectorEnv",
)
