"""The requests of `steady`; at some time one instance fails, and comes back a minute later, with an empty cache."""

from dataclasses import replace

from fleetpilot.envs.scenarios import steady

SCENARIO = replace(
    steady.SCENARIO,
    name="node_loss",
    summary="the requests of steady; at some time an instance fails, and comes back 20 to 60 s later",
    ranges={"load": 0.7, "losses": 1, "repair_s": (20.0, 60.0)},
)
