"""SLO classes: what a request is promised for its first token and for each token after it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SLOClass:
    """Targets for the time to the first token and the time per output token.

    Attributes:
        name: How workloads and results call the class.
        ttft_s: Target for the first token; inf for none.
        tpot_s: Target for the mean time per output token after the first; inf for none.
        ttft_s_per_prompt_token: What each prompt token adds to the target for the first token.
    """

    name: str
    ttft_s: float
    tpot_s: float
    ttft_s_per_prompt_token: float = 0.0

    def __post_init__(self) -> None:
        """Refuse targets that cannot be met or compared.

        Raises:
            ValueError: Naming the field, its value and what was expected.
        """
        for field in ("ttft_s", "tpot_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"SLO class {self.name!r}: {field} = {value!r}: expected a time > 0 (inf for none)")
        slope = self.ttft_s_per_prompt_token
        if not (slope >= 0 and math.isfinite(slope)):
            raise ValueError(
                f"SLO class {self.name!r}: ttft_s_per_prompt_token = {slope!r}: expected a finite time >= 0"
            )

    def ttft_target_s(self, prompt_tokens: int) -> float:
        """The target for the first token of a request with a prompt of `prompt_tokens`."""
        return self.ttft_s + self.ttft_s_per_prompt_token * prompt_tokens


TIGHT = SLOClass("tight", ttft_s=0.175, tpot_s=0.0397)
"""The tight class of "Calibrate, Then Route" (arXiv 2609.16206): 175 ms and 39.7 ms."""

LOOSE = SLOClass("loose", ttft_s=3 * TIGHT.ttft_s, tpot_s=3 * TIGHT.tpot_s)
"""The loose class of the same paper: three times the tight targets."""

LENGTH_SCALED = SLOClass("length-scaled", ttft_s=1.0, tpot_s=0.020, ttft_s_per_prompt_token=62.5e-3 / 1000)
"""SMetric's form: 1 s + 62.5 ms per 1,000 prompt tokens, 20 ms per output token.

A fixed target condemns every long prompt and lets short ones wait for nothing; this one asks the same of both.
"""

CHAT = SLOClass("chat", ttft_s=2.0, tpot_s=0.100)
"""MLPerf Inference v5.1, Llama-3.1-8B, server scenario: 2 s and 100 ms.

The default: a published target, one that even an A10 meets until it is overloaded, while ten tokens a second is still
faster than people read. (MLPerf asks it of the 99th percentile of a run; here each request is held to it.)
"""

SLO_CLASSES: dict[str, SLOClass] = {slo.name: slo for slo in (CHAT, TIGHT, LOOSE, LENGTH_SCALED)}
"""The preset classes by name."""
