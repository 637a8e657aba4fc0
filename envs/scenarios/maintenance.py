"""Two instances are taken away for maintenance, each announced half a minute before, under chats with long answers."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import CHAT
from fleetpilot.workloads.lengths import LogNormal

SCENARIO = Scenario(
    name="maintenance",
    summary="two instances go for maintenance, announced 30 s before, and come back minutes later; answers are long",
    requests=RequestMix(
        kinds=(RequestKind(LogNormal(1_000, 1.0, high=16_000), LogNormal(500, 1.0, high=8_000), CHAT),),
        prefixes=SharedPrefixes(count=8, low_tokens=200, high_tokens=1_000),
    ),
    profile="l40s-llama-3.1-8b",
    capacity_factor=0.9,  # answers of very different lengths preempt each other at full memory
    ranges={"load": 0.7, "losses": 2, "notice_s": 30.0, "repair_s": (60.0, 180.0), "scored_requests": 500},
)
