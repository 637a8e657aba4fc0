"""A thousand short requests a second on 16 instances, each promised its first token within 175 ms."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import TIGHT
from fleetpilot.workloads.lengths import LogNormal

SCENARIO = Scenario(
    name="slo_1000rps",
    summary="1,000 short requests a second on 16 instances, all with tight targets",
    requests=RequestMix(
        kinds=(RequestKind(LogNormal(250, 0.8, high=2_000), LogNormal(74, 0.7, high=500), TIGHT),),
        prefixes=SharedPrefixes(count=16, low_tokens=200, high_tokens=1_000),
        cv=(1.0, 2.0),
    ),
)
