"""Two policies of one's own against two baselines, on the same requests.

python examples/own_policy.py

One is a function of what the dispatcher sees: compiled, it runs inside the simulator. The other is an object with a
memory of its own, in plain Python, which is slower and may do anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation import run_one
from fleetpilot.fleet.policy import CompiledPolicy
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.view import Decision, FleetView
from fleetpilot.workloads import workload

INSTANCES = 12
WORKLOAD = "twin/azure-conv?n=3000"  # or a trace of yours: file:trace.csv


def fewest_prompt_tokens(instances: Any, requests: Any, fleets: Any) -> int:
    best = -1  # none: hold the request
    for slot in range(len(instances)):
        if instances[slot].candidate and (
            best < 0 or instances[slot].unstarted_prompt_tokens < instances[best].unstarted_prompt_tokens
        ):
            best = slot
    return best


class FewestTokensSent:
    """The instance that was sent the fewest tokens so far, prompts and predicted answers."""

    name = "fewest-tokens-sent"

    def reset(self, batch: int, seed: int) -> None:
        """Forget everything; so many fleets follow."""
        self.sent_tokens = np.zeros((batch, INSTANCES))

    def decide(self, view: FleetView) -> Decision:
        """Choose an instance for each fleet's request."""
        choice = np.where(view.candidates, self.sent_tokens, np.inf).argmin(axis=1)
        tokens = view.request["prompt_tokens"] + view.request["predicted_output_tokens"]
        self.sent_tokens[np.arange(len(choice)), choice] += tokens
        return Decision(choice)


def main() -> None:
    requests = workload(WORKLOAD)
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), INSTANCES)
    own = CompiledPolicy("fewest-prompt-tokens", fewest_prompt_tokens), FewestTokensSent()
    for policy in (*own, load_policy("round-robin"), load_policy("lmetric")):
        metrics = run_one(requests, fleet, policy).summary["metrics"]
        ttft_s = metrics["latency"]["ttft_s"]["p99"]
        print(f"{policy.name:22s} goodput {metrics['goodput']['share']:6.1%}, TTFT P99 {ttft_s:6.2f} s")


if __name__ == "__main__":
    main()
