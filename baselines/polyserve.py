"""The fullest instance of the request's TPOT class that still meets its targets; else an idle one, else a tighter.

Source: PolyServe, arXiv 2507.17769: requests are binned by their target of time per output token, each bin has servers
    of its own, and a request goes to the one of highest load that still attains the SLO, so that a gradient of load
    forms and the last servers empty. A bin that is full takes an idle server, then a tighter bin's.
Reads: instance.kv_capacity_blocks, instance.batched, instance.predicted_output_tokens, instance.streamed_tokens,
    instance.block_size, instance.free_blocks, instance.queued_demand_blocks, instance.unstarted_uncached_tokens,
    instance.prefill_s_per_token, instance.decode_step_s, instance.decode_s_per_seq, instance.in_flight,
    instance.matched_tokens, request.prompt_tokens, request.ttft_target_s, request.tpot_target_s
Notes: It remembers which bin an instance serves, until it is idle. The predictions are those of the profile's constants
    (`fleet/latency.py`), the source's come from profiles of chunked iterations. Load is the predicted step time, then
    free memory. Memory has to fit too. Where nothing meets the SLO, the least TTFT of all that are not tighter wins;
    the source scales out instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.latency import tpot_s, ttft_s
from fleetpilot.fleet.policy import Range
from fleetpilot.fleet.view import NONE, Decision, FleetView

RANGES = {"margin": Range(0.5, 1.2)}
IDLE = -1.0
"""Of an instance that serves no bin."""
OWN_BIN, NEW_BIN, TIGHTER_BIN, NO_ROOM, NO_ROOM_TIGHTER = range(5)
"""In what order instances are taken."""


@kernel
def rank(instance: Any, request: Any, bin_s: float, margin: float) -> int:
    """Which of `OWN_BIN`, ... the instance is for the request."""
    allowed_s = request.tpot_target_s if bin_s == IDLE else min(bin_s, request.tpot_target_s)
    in_time = ttft_s(instance, request) <= margin * request.ttft_target_s and tpot_s(instance) <= margin * allowed_s
    blocks = np.ceil(request.prompt_tokens / instance.block_size)
    tighter = bin_s != IDLE and bin_s < request.tpot_target_s
    if not in_time or instance.free_blocks - instance.queued_demand_blocks < blocks:
        return NO_ROOM_TIGHTER if tighter else NO_ROOM
    if bin_s == IDLE:
        return NEW_BIN
    if tighter:
        return TIGHTER_BIN
    return OWN_BIN if bin_s == request.tpot_target_s else NO_ROOM  # a looser bin's steps may grow too long


@kernel
def fullest_that_fits(instances: Any, requests: Any, bins_s: Any, margin: float) -> int:
    """The candidate of the first rank that there is, and of the highest load in it."""
    request = requests[0]
    best, least = NONE, (0, 0.0, 0.0)
    for slot in range(len(instances)):
        instance = instances[slot]
        if instance.candidate != 0:
            order = rank(instance, request, bins_s[slot], margin)
            if order >= NO_ROOM:
                key = (order, ttft_s(instance, request), 0.0)
            else:
                key = (order, -tpot_s(instance), instance.free_blocks)
            if best == NONE or key < least:
                best, least = slot, key
    return best


class PolyServe:
    """The policy, which remembers the bins that instances serve.

    Args:
        margin: share of the targets that predictions may take.
    """

    def __init__(self, margin: float):
        self.name = "polyserve"
        self.margin = margin
        self.reset(1, 0)

    def reset(self, batch: int, seed: int) -> None:
        """Forget everything."""
        self._bins_s = np.full((batch, 0), IDLE)

    def decide(self, view: FleetView) -> Decision:
        """Choose for each row of the view."""
        more = view.instances.shape[1] - self._bins_s.shape[1]
        if more > 0:
            self._bins_s = np.pad(self._bins_s, ((0, 0), (0, more)), constant_values=IDLE)
        self._bins_s[view.instances["in_flight"] == 0] = IDLE
        return Decision(np.array([self._choose(view, row) for row in range(len(view))], np.int64))

    def _choose(self, view: FleetView, row: int) -> int:
        request, bins_s = view.request[row : row + 1], self._bins_s[row]
        choice = int(fullest_that_fits(view.instances[row], request, bins_s, self.margin))
        if choice != NONE:
            target_s = request["tpot_target_s"][0]
            bins_s[choice] = target_s if bins_s[choice] == IDLE else min(bins_s[choice], target_s)
        return choice


def make(margin: float = 1.0) -> PolyServe:
    """The policy with another margin, that of `PolyServe`."""
    return PolyServe(margin)


POLICY = make()
