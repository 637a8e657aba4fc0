"""Questions about documents of 40,000 tokens at a 70B model: 13 GB of KV each, and seconds of prefill."""

from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.workloads.lengths import LogNormal

DOCUMENT = SLOClass("document", ttft_s=1.0, tpot_s=0.1, ttft_s_per_prompt_token=62.5e-6)

SCENARIO = Scenario(
    name="long_prefix",
    summary="questions about documents of 40,000 tokens at a 70B model; a miss costs seconds of prefill",
    requests=RequestMix(
        kinds=(RequestKind(LogNormal(60, 0.8, high=2_000), LogNormal(150, 0.7, high=2_000), DOCUMENT),),
        prefixes=SharedPrefixes(count=32, low_tokens=30_000, high_tokens=50_000, popularity=0.6, share=0.9),
    ),
    profile="h100-llama-3.1-70b-tp4",
    warm_up="cache-aware",
    ranges={"load": 0.5, "scored_requests": 200, "warmup_requests": 40},
)
