"""The rate falls and rises threefold, and half of the instances are ready: the one for starting and draining them."""

from fleetpilot.cluster.config import Scaling
from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import CHAT
from fleetpilot.workloads.lengths import LogNormal

SCENARIO = Scenario(
    name="tides",
    summary="the rate falls and rises threefold; half of the instances are ready at the start",
    requests=RequestMix(
        kinds=(RequestKind(LogNormal(1_000, 1.0, high=16_000), LogNormal(250, 1.0, high=4_000), CHAT),),
        prefixes=SharedPrefixes(count=8, low_tokens=200, high_tokens=1_000),
        cv=(1.0, 2.0),
        course=(0.8, 0.5, 0.9, 1.5, 1.5, 0.8),
    ),
    profile="l40s-llama-3.1-8b",
    scaling=Scaling(interval_s=5.0, first_s=5.0),
    ranges={"load": 0.5, "ready_share": 0.5, "scored_requests": 500, "warmup_requests": 30, "start_up_s": (5.0, 30.0)},
)
