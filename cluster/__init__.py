"""The cluster model: given requests and decisions, what happens when (docs/model.md).

Knows nothing of Gymnasium, torch or HTTP.
"""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.cluster, not cluster")

from fleetpilot.cluster.batch import ClusterBatch
from fleetpilot.cluster.config import (
    Failures,
    FleetConfig,
    Pools,
    Rebalancing,
    Scaling,
    SharedCache,
    Telemetry,
    fleet_of,
)
from fleetpilot.cluster.simulation import RunLog, simulate, simulate_stream

__all__ = [
    "ClusterBatch",
    "Failures",
    "FleetConfig",
    "Pools",
    "Rebalancing",
    "RunLog",
    "Scaling",
    "SharedCache",
    "Telemetry",
    "fleet_of",
    "simulate",
    "simulate_stream",
]
