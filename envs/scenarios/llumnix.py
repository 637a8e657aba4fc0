"""The workloads of the Llumnix paper (OSDI'24) on LLaMA-7B and A10 GPUs: ``llumnix/M-M``, ``llumnix/ShareGPT``, ..."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import LlumnixRequests

NAMES = ("ShareGPT", "BurstGPT", "S-S", "M-M", "L-L", "S-L", "L-S")

SCENARIOS = tuple(
    Scenario(
        name=f"llumnix/{name}",
        summary=f"{name} lengths of the Llumnix paper, on A10 GPUs with vLLM's first scheduler",
        requests=LlumnixRequests(name),
        profile="a10-llama-7b",
        capacity_factor=0.9,  # answers of very different lengths preempt each other at full memory
        ranges={"scored_requests": 200, "warmup_requests": 20},
    )
    for name in NAMES
)
