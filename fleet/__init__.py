"""What simulator and dispatcher share: views and decisions, policies, the cost model, hardware profiles."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.fleet, not fleet")
