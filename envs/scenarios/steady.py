"""Poisson arrivals of ordinary requests at a constant load: the one to start with."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import LOOSE, TIGHT
from fleetpilot.workloads.lengths import LogNormal

# Means near those of the Azure conversation trace of 2023: prompts of 1,155 tokens, answers of 211.
PROMPT = LogNormal(median=550, sigma=0.9, high=8_000)
OUTPUT = LogNormal(median=150, sigma=0.8, high=2_000)

SCENARIO = Scenario(
    name="steady",
    summary="Poisson arrivals at a constant load; half tight, half loose targets; half with a shared system prompt",
    requests=RequestMix(
        kinds=(RequestKind(PROMPT, OUTPUT, TIGHT), RequestKind(PROMPT, OUTPUT, LOOSE)),
        prefixes=SharedPrefixes(count=16, low_tokens=200, high_tokens=1_400),
        scale=(0.7, 1.4),
    ),
)
