"""Documents and reasoning in bursts, on engines that prefill and others that decode: two of six, and four."""

from fleetpilot.cluster.config import Pools
from fleetpilot.envs.episodes import Scenario
from fleetpilot.envs.requests import RequestKind, RequestMix, SharedPrefixes
from fleetpilot.fleet.slo import SLOClass
from fleetpilot.workloads.lengths import LogNormal

# Targets of "Calibrate, Then Route" (arXiv 2609.16206), tight, and loose: three times as long.
TIGHT = SLOClass("tight", ttft_s=0.175, tpot_s=0.0397)
LOOSE = SLOClass("loose", ttft_s=0.525, tpot_s=0.1191)

SCENARIO = Scenario(
    name="pd_mixed_bursty",
    summary="documents and reasoning in bursts on 2 prefill and 4 decode engines of six, as often as there is room",
    requests=RequestMix(
        kinds=(
            RequestKind(LogNormal(250, 0.8, high=2_000), LogNormal(400, 0.7, high=2_000), TIGHT),
            RequestKind(LogNormal(1_500, 0.6, high=4_000), LogNormal(80, 0.7, high=500), LOOSE),
        ),
        prefixes=SharedPrefixes(count=16, low_tokens=100, high_tokens=400),
        cv=(2.0, 4.0),
        mix=(0.2, 0.5),
    ),
    profile="a40-qwen2.5-3b",
    pools=Pools(("prefill", "decode", "decode")),
    ranges={"load": 0.7},
)
