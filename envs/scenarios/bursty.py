"""The requests of `steady` in bursts: gaps between arrivals with a coefficient of variation of 2 to 5."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.envs.scenarios.steady import OUTPUT, PROMPT
from fleetpilot.fleet.slo import LOOSE, TIGHT

SCENARIO = Scenario(
    name="bursty",
    summary="the requests of steady in bursts: gaps with a coefficient of variation of 2 to 5",
    requests=RequestMix(
        kinds=(RequestKind(PROMPT, OUTPUT, TIGHT), RequestKind(PROMPT, OUTPUT, LOOSE)),
        prefixes=SharedPrefixes(count=16, low_tokens=200, high_tokens=1_400),
        cv=(2.0, 5.0),
        scale=(0.7, 1.4),
    ),
)
