"""Gymnasium environments over the simulated fleet: spaces, rewards, scenarios, rendering, adapters."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.envs, not envs")
