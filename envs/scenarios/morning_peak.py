"""The rate climbs past what the fleet can serve and falls again, and answers are sometimes very long.

KV memory fills up unpredictably: where to put a request now decides who preempts in a minute.
"""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import CHAT
from fleetpilot.workloads.lengths import LogNormal

SCENARIO = Scenario(
    name="morning_peak",
    summary="the rate climbs past the fleet's capacity and falls again; answers are sometimes very long",
    requests=RequestMix(
        kinds=(RequestKind(LogNormal(1_000, 1.0, high=16_000), LogNormal(250, 1.3, high=8_000), CHAT),),
        prefixes=SharedPrefixes(count=8, low_tokens=200, high_tokens=1_000),
        cv=(1.0, 2.0),
        course=(0.5, 0.8, 1.2, 1.5, 1.3, 0.7),
    ),
    profile="l40s-llama-3.1-8b",
    capacity_factor=0.9,  # answers of very different lengths preempt each other at full memory
    ranges={"scored_requests": 500, "warmup_requests": 50},
)
