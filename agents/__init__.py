"""Learned policies: the network, its Stable-Baselines3 policy, exports, and the runtime that loads one without PyTorch.

`load_policy` is how the rest of fleetpilot gets any policy by name: a baseline's, one that comes with
fleetpilot, or the folder of an export.
"""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.agents, not agents")

from fleetpilot.agents.runtime import SHIPPED, LearnedPolicy, is_export_name, load_export, load_policy

__all__ = ["SHIPPED", "LearnedPolicy", "is_export_name", "load_export", "load_policy"]
