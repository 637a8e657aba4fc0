"""max(weighted sum of scores in [0, 1]: cached prefix, waiting queue, free KV memory and load); ties are drawn.

Source: llm-d inference scheduler, the scorers of pkg/epp/framework/plugins/scheduling/scorer and the max-score picker:
    prefix = matched / total blocks of the prompt, queue = (max - waiting) / (max - min), kv = 1 - usage,
    load = 0.5 x (1 - waiting / 128), active = (max - in flight) / (max - min), tokens = 1 - tokens in flight / 4 Mi.
    The weights 2 : 1 : 1 of the first three are those of BLIS' precise-prefix profile, the others are off.
Reads: instance.waiting, instance.kv_usage, instance.in_flight, instance.block_size, instance.matched_tokens,
    instance.unstarted_prompt_tokens, instance.started_prompt_tokens, instance.streamed_tokens, request.prompt_tokens,
    fleet.random_key
Notes: Queue and KV usage are those of the last poll, as in the source. A scorer whose candidates are all equal gives
    all 1. Left out are scorers of what a fleet does not have here: LoRA, topology, no-hit-LRU's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import held_tokens
from fleetpilot.fleet.policy import CompiledPolicy, Range, random_unit
from fleetpilot.fleet.view import NONE

RANGES = {
    "prefix": Range(0.0, 4.0),
    "queue": Range(0.0, 4.0),
    "kv": Range(0.0, 4.0),
    "load": Range(0.0, 4.0),
    "active": Range(0.0, 4.0),
    "tokens": Range(0.0, 4.0),
}
LOAD_THRESHOLD = 128.0
TOKEN_THRESHOLD = 4.0 * 1024 * 1024


@kernel
def from_most(value: float, least: float, most: float) -> float:
    """1 for the least of the candidates, 0 for the most."""
    return 1.0 if most == least else (most - value) / (most - least)


@kernel
def prefix_score(instance: Any, request: Any) -> float:
    """Whole blocks matched over whole blocks of the prompt; 0 for a prompt shorter than one."""
    blocks = np.floor(request.prompt_tokens / instance.block_size)
    return float(min(1.0, np.floor(instance.matched_tokens / instance.block_size) / blocks)) if blocks > 0 else 0.0


@kernel
def load_score(instance: Any) -> float:
    """Half for an empty queue, 0 from the threshold on."""
    return float(0.5 * (1.0 - min(instance.waiting / LOAD_THRESHOLD, 1.0)))


@kernel
def token_score(instance: Any) -> float:
    """1 without a token in flight, 0 from the threshold on."""
    return 1.0 - min(held_tokens(instance) / TOKEN_THRESHOLD, 1.0)


def make(
    prefix: float = 2.0,
    queue: float = 1.0,
    kv: float = 1.0,
    load: float = 0.0,
    active: float = 0.0,
    tokens: float = 0.0,
) -> CompiledPolicy:
    """The policy with other weights, one for each scorer."""

    def choose(instances: Any, requests: Any, fleets: Any) -> int:
        least_waiting, most_waiting, least_active, most_active = np.inf, -np.inf, np.inf, -np.inf
        for slot in range(len(instances)):
            if instances[slot].candidate != 0:
                waiting, in_flight = instances[slot].waiting, instances[slot].in_flight
                least_waiting, most_waiting = min(least_waiting, waiting), max(most_waiting, waiting)
                least_active, most_active = min(least_active, in_flight), max(most_active, in_flight)
        best, most, most_tie = NONE, -np.inf, -1.0
        for slot in range(len(instances)):
            instance = instances[slot]
            if instance.candidate != 0:
                score = prefix * prefix_score(instance, requests[0])
                score += queue * from_most(instance.waiting, least_waiting, most_waiting)
                score += kv * (1.0 - instance.kv_usage) + load * load_score(instance) + tokens * token_score(instance)
                score += active * from_most(instance.in_flight, least_active, most_active)
                tie = random_unit(fleets[0].random_key, slot)
                if best == NONE or score > most or (score == most and tie > most_tie):
                    best, most, most_tie = slot, score, tie
        return best

    return CompiledPolicy("llm-d", choose)


POLICY = make()
