"""Coding agents in closed loops: long system prompts, growing contexts, a second or two between turns."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import SessionRequests
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.workloads.arrivals import Poisson
from fleetpilot.workloads.lengths import Geometric, LogNormal, Uniform
from fleetpilot.workloads.sessions import Sessions

AGENT = SLOClass("agent", ttft_s=0.5, tpot_s=0.05, ttft_s_per_prompt_token=20e-6)

SCENARIO = Scenario(
    name="agents",
    summary="coding agents in closed loops: long system prompts, growing contexts, seconds between turns",
    requests=SessionRequests(
        # Lengths and think times of the named workload sessions/agent (docs/generators.md); fewer turns, so that
        # sessions are short against an episode.
        Sessions(
            arrivals=Poisson(1.0),
            turns=Geometric(6.0),
            user_tokens=LogNormal(150, 1.3, high=8_000),
            output_tokens=LogNormal(96, 1.05, high=6_322),
            think_s=LogNormal(1.0, 1.09, high=131.0),
            system_prompts=4,
            system_tokens=Uniform(20_000, 30_000),
        ),
        slo_classes=(AGENT,),
    ),
    profile="h100-llama-3.1-70b-tp4",
    ranges={"scored_requests": 300, "warmup_requests": 60},
)
