"""Statistical twins of public traces: Azure's conversations and code completions, Mooncake's conversations."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import TwinRequests

SCENARIOS = (
    Scenario(
        name="azure-conv",
        summary="conversations as in Azure's trace of 2023, on A10 GPUs",
        requests=TwinRequests("twin/azure-conv?n=100000", max_tokens=12_288),
        profile="a10-llama-7b",
        capacity_factor=0.94,
        ranges={"scored_requests": 300, "warmup_requests": 20},
    ),
    Scenario(
        name="azure-code",
        summary="code completions as in Azure's trace of 2023: prompts of 2,000 tokens, short answers, bursts",
        requests=TwinRequests("twin/azure-code?n=200000", parts=34),
        ranges={"scored_requests": 700, "warmup_requests": 50},
    ),
    Scenario(
        name="mooncake-conv",
        summary="conversations as in Mooncake's trace: prompts of 12,000 tokens, a third of them cacheable",
        requests=TwinRequests("twin/mooncake-conv?n=100000"),
        profile="l40s-llama-3.1-8b",
        capacity_factor=0.76,  # a cache of the whole fleet's size, over and over again
        ranges={"scored_requests": 300, "warmup_requests": 20},
    ),
)
