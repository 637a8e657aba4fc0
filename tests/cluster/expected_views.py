"""Every view of a run a second time: from the oracle's engines, and from a prefix index written as a plain list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import oracle
from comparison import fleet_of_oracle
from numpy.typing import NDArray
from oracle import Engine, OracleBoundary
from strategies import Cluster

from fleetpilot.cluster import Telemetry
from fleetpilot.fleet.policy import Policy
from fleetpilot.fleet.view import STATE_READY, Decision, FleetView, empty_view
from fleetpilot.workloads.table import NO_NODE, RequestTable

NOTHING_YET = OracleBoundary(-math.inf, 0, 0, 0, 0, 0, 0)


class Recorder:
    """A policy that keeps a copy of every view that another policy is asked about."""

    def __init__(self, policy: Policy):
        self.name = policy.name
        self.policy = policy
        self.views: list[FleetView] = []

    def reset(self, batch: int, seed: int) -> None:
        self.policy.reset(batch, seed)

    def decide(self, view: FleetView) -> Decision:
        self.views.append(FleetView(view.instances.copy(), view.request.copy(), view.fleet.copy()))
        return self.policy.decide(view)


class PrefixIndex:
    """The nodes that were dispatched to one instance, the longest unused first."""

    def __init__(self, table: RequestTable, most_tokens: int):
        self.table = table
        self.most_tokens = most_tokens
        self.nodes: list[int] = []

    def path(self, node: int) -> list[int]:
        """From the node up to its root."""
        return [] if node == NO_NODE else [node, *self.path(int(self.table.node_parent[node]))]

    def tokens(self) -> int:
        ends = [*self.table.node_end_tokens.tolist(), 0]  # index -1 is the empty prefix
        return sum(ends[node] - ends[self.table.node_parent[node]] for node in self.nodes)

    def dispatch(self, row: int) -> None:
        leaf = self.table.own_node[row] if self.table.own_node[row] != NO_NODE else self.table.prefix_node[row]
        path = self.path(int(leaf))
        self.nodes = [node for node in self.nodes if node not in path] + path
        while self.tokens() > self.most_tokens:
            self.nodes.pop(0)

    def matched_tokens(self, row: int) -> int:
        matched = 0
        for node in reversed(self.path(int(self.table.prefix_node[row]))):
            if node not in self.nodes:
                break
            matched = int(self.table.node_end_tokens[node])
        return matched


class Dispatcher:
    """What a dispatcher knows at each decision of a round-robin run; fills `views` (all but `random_key`)."""

    def __init__(self, cluster: Cluster, telemetry: Telemetry):
        self.table, self.instances = cluster
        self.telemetry = telemetry
        self.fleet = fleet_of_oracle(self.instances, telemetry=telemetry)
        self.indices = [PrefixIndex(self.table, c.kv_blocks * c.block_size) for c in self.instances]
        self.matched_at_dispatch: dict[int, float] = {}
        self.dispatched: list[list[tuple[float, int]]] = [[] for _ in self.instances]  # (time, boundaries before it)
        self.engines: Sequence[Engine] = ()
        self.views: list[FleetView] = []

    def observe(self, now_s: float, row: int, engines: Sequence[Engine]) -> None:
        self.engines = engines
        view = empty_view(1, len(engines))
        for i, engine in enumerate(engines):
            self.fill_instance(view.instances[0, i], i, engine, now_s, row)
        request = view.request[0]
        for name in ("prompt_tokens", "predicted_output_tokens", "priority", "slo_class", "session", "turn"):
            request[name] = getattr(self.table, name)[row]
        slo = self.fleet.slo_classes[0]
        request["ttft_target_s"] = slo.ttft_target_s(int(self.table.prompt_tokens[row]))
        request["tpot_target_s"] = slo.tpot_s
        view.fleet["time_s"] = now_s
        view.fleet["may_hold"] = 1
        view.fleet["decisions"] = len(self.views)
        view.fleet["engine_reported"] = self.telemetry.engine_reported
        self.views.append(view)

    def choose(self, decision: int, row: int) -> int:
        chosen = decision % len(self.instances)
        view = self.views[-1]
        self.matched_at_dispatch[row] = view.instances[0, chosen]["matched_tokens"]
        self.dispatched[chosen].append((view.fleet["time_s"][0], len(self.engines[chosen].history)))
        self.indices[chosen].dispatch(row)
        return chosen

    def fill_instance(self, view: NDArray[np.void], i: int, engine: Engine, now_s: float, row: int) -> None:
        self.fill_profile(view, i)
        self.fill_poll(view, i, engine, now_s)
        self.fill_ledger(view, i, engine)
        if self.telemetry.engine_reported:
            self.fill_reported_load(view, engine)
        view["matched_tokens"] = self.indices[i].matched_tokens(row)
        view["indexed_tokens"] = self.indices[i].tokens()

    def fill_profile(self, view: NDArray[np.void], i: int) -> None:
        profile = self.fleet.profiles[i]
        view["slot"], view["candidate"], view["state"] = i, 1, STATE_READY
        view["kv_capacity_blocks"] = profile.kv_blocks
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            view[name] = getattr(profile, name)
        for name in ("prefill_s_per_token", "decode_step_s", "decode_s_per_seq"):
            view[name] = getattr(profile, name)

    def fill_poll(self, view: NDArray[np.void], i: int, engine: Engine, now_s: float) -> None:
        polls = np.arange(int(now_s / self.telemetry.poll_interval_s) + 2) * self.telemetry.poll_interval_s
        visible = polls[polls + self.telemetry.poll_delay_s <= now_s]
        if len(visible) == 0:
            view["poll_age_s"] = math.inf
            return
        poll_s = visible[-1]
        past = [boundary for boundary in engine.history if boundary.time_s < poll_s]
        boundary = past[-1] if past else NOTHING_YET
        view["poll_age_s"] = now_s - poll_s
        view["running"] = boundary.running
        view["waiting"] = boundary.waiting + sum(b == len(past) and t < poll_s for t, b in self.dispatched[i])
        view["kv_usage"] = boundary.used_blocks / engine.config.kv_blocks
        for name in ("preemptions", "prefix_queries_tokens", "prefix_hits_tokens"):
            view[name] = getattr(boundary, name)

    def fill_ledger(self, view: NDArray[np.void], i: int, engine: Engine) -> None:
        in_flight = engine.running + engine.waiting
        order = {row: n for n, row in enumerate(self.matched_at_dispatch)}
        unstarted = sorted((job for job in in_flight if job.generated == 0), key=lambda job: order[job.row])
        block_size = engine.config.block_size
        view["dispatched"] = len(self.dispatched[i])
        view["in_flight"] = len(in_flight)
        view["urgent"] = sum(self.table.priority[job.row] < 0 for job in in_flight)
        view["unstarted"] = len(unstarted)
        view["unstarted_prompt_tokens"] = sum(job.prompt for job in unstarted)
        view["unstarted_prompt_blocks"] = sum(math.ceil(job.prompt / block_size) for job in unstarted)
        view["unstarted_uncached_tokens"] = sum(job.prompt - self.matched_at_dispatch[job.row] for job in unstarted)
        view["head_prompt_blocks"] = math.ceil(unstarted[0].prompt / block_size) if unstarted else 0
        view["started_prompt_tokens"] = sum(job.prompt for job in in_flight if job.generated > 0)
        view["streamed_tokens"] = sum(job.generated for job in in_flight)
        view["predicted_output_tokens"] = sum(float(self.table.predicted_output_tokens[job.row]) for job in in_flight)
        view["free_blocks"] = engine.config.kv_blocks * (1 - view["kv_usage"])
        view["queued_demand_blocks"] = view["unstarted_prompt_blocks"]
        view["head_demand_blocks"] = view["head_prompt_blocks"]
        view["queued"] = len(unstarted)
        view["batched"] = len(in_flight) - len(unstarted)

    def fill_reported_load(self, view: NDArray[np.void], engine: Engine) -> None:
        """As of the scheduling of the last iteration that has ended."""
        iterations = [boundary for boundary in engine.history if boundary.running > 0]
        if engine.running:
            del iterations[-1]
        last = iterations[-1] if iterations else NOTHING_YET
        view["free_blocks"] = engine.config.kv_blocks - last.used_blocks
        view["queued_demand_blocks"] = last.waiting_blocks
        view["head_demand_blocks"] = last.head_blocks
        view["queued"] = last.waiting
        view["batched"] = last.running
        view["preempted"] = last.preempted


def expected_views(cluster: Cluster, telemetry: Telemetry) -> list[FleetView]:
    """The view of each decision of a round-robin run."""
    dispatcher = Dispatcher(cluster, telemetry)
    oracle.simulate(*cluster, dispatcher.choose, dispatcher.observe)
    return dispatcher.views


def assert_same_views(seen: Sequence[FleetView], expected: Sequence[FleetView]) -> None:
    """Field by field; times and sums of predictions to rounding."""
    assert len(seen) == len(expected)
    for part in ("instances", "request", "fleet"):
        ours = np.concatenate([getattr(view, part) for view in seen])
        theirs = np.concatenate([getattr(view, part) for view in expected])
        for name in sorted(set(ours.dtype.names) - {"random_key"}):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-9, err_msg=f"{part}.{name}")
