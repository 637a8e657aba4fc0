"""Short urgent chats share the fleet with long patient batch jobs; engines serve chats first."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import TIGHT, SLOClass
from fleetpilot.workloads.lengths import LogNormal

BATCH = SLOClass("batch", ttft_s=30.0, tpot_s=0.5)

SCENARIO = Scenario(
    name="chat_and_batch",
    summary="short urgent chats and long patient batch jobs; engines serve chats first",
    requests=RequestMix(
        kinds=(
            RequestKind(LogNormal(300, 0.9, high=4_000), LogNormal(150, 0.8, high=1_000), TIGHT, priority=-1),
            RequestKind(LogNormal(4_000, 0.8, high=32_000), LogNormal(300, 0.8, high=4_000), BATCH, priority=0),
        ),
        prefixes=SharedPrefixes(count=16, low_tokens=200, high_tokens=1_400),
        mix=(0.1, 0.3),
    ),
    priority_order=True,
)
