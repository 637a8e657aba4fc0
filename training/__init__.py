"""Training of policies: imitation, PPO with a discount by time, randomised scenarios, curricula, run folders."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.training, not training")
