"""What a policy sees and says: `FleetView` and `Decision`.

A view is three structured arrays with a leading batch dimension (one row per environment; the dispatcher is a batch of
one). A *record* of them - one instance, one request, one fleet - is what a compiled policy's score function gets, in
the simulator's kernel and in the dispatcher alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

NONE = -1
"""The choice "no instance": hold the request at the dispatcher."""

REJECT = -2
"""The choice "turn the request away", of policies that reject early. It is legal when a request is placed of whose
answer nothing has come yet; the action space of the environments does not have it."""

KIND_DISPATCH, KIND_PREFILL, KIND_DECODE, KIND_SOURCE, KIND_DESTINATION, KIND_SCALE = range(6)
"""What a decision is about, in `FleetView.fleet["kind"]`: where a request goes; with pools, where its prompt is
processed and where it decodes then; whence one moves and where to; which instance is started, drained or kept."""

STATE_ABSENT, STATE_STARTING, STATE_READY, STATE_DRAINING, STATE_FAILED = range(5)

ROLES = ("mixed", "prefill", "decode")
ROLE_MIXED, ROLE_PREFILL, ROLE_DECODE = range(len(ROLES))
"""What an instance does: both, or one of the two of requests that go from one pool to the other."""

Source = Literal["profile", "poll", "ledger", "prefix index", "dispatcher", "request"]


class Field(NamedTuple):
    """One field of a view: its name, where a dispatcher gets it from, its unit and its meaning."""

    name: str
    dtype: str
    source: Source
    unit: str
    meaning: str


INSTANCE_FIELDS: tuple[Field, ...] = (
    Field("slot", "i8", "dispatcher", "", "index of the instance in the fleet"),
    Field("candidate", "i8", "dispatcher", "0/1", "whether this decision may choose the instance"),
    Field("state", "i8", "dispatcher", "", "STATE_READY, ... (lifecycle)"),
    Field("role", "i8", "dispatcher", "", "ROLE_MIXED, ROLE_PREFILL or ROLE_DECODE (pools)"),
    Field("kv_capacity_blocks", "f8", "profile", "blocks", "usable KV blocks"),
    Field("block_size", "f8", "profile", "tokens", "tokens per KV block"),
    Field("max_num_seqs", "f8", "profile", "requests", "most requests in one batch"),
    Field("max_num_batched_tokens", "f8", "profile", "tokens", "token budget of one iteration"),
    Field(
        "prefill_s_per_token", "f8", "profile", "s/token", "calibrated prefill time per token of a 1,024-token prompt"
    ),
    Field("decode_step_s", "f8", "profile", "s", "calibrated decode step with a batch of one, 1,024 tokens of context"),
    Field("decode_s_per_seq", "f8", "profile", "s/request", "calibrated growth of the decode step with the batch"),
    Field("poll_age_s", "f8", "poll", "s", "age of the last visible poll; inf before the first"),
    Field("running", "f8", "poll", "requests", "vllm:num_requests_running"),
    Field("waiting", "f8", "poll", "requests", "vllm:num_requests_waiting"),
    Field("kv_usage", "f8", "poll", "fraction", "vllm:kv_cache_usage_perc"),
    Field("preemptions", "f8", "poll", "count", "vllm:num_preemptions_total"),
    Field("prefix_queries_tokens", "f8", "poll", "tokens", "vllm:prefix_cache_queries_total"),
    Field("prefix_hits_tokens", "f8", "poll", "tokens", "vllm:prefix_cache_hits_total"),
    Field("migrating", "i8", "dispatcher", "0/1", "whether it takes part in a migration, as source or destination"),
    Field(
        "origin",
        "i8",
        "dispatcher",
        "0/1",
        "whether this request comes from it: source of a DESTINATION, instance of the prefill of a DECODE",
    ),
    Field("dispatched", "f8", "ledger", "requests", "requests dispatched to it so far"),
    Field("in_flight", "f8", "ledger", "requests", "dispatched and not ended"),
    Field("urgent", "f8", "ledger", "requests", "in flight with a priority before the default, 0"),
    Field("unstarted", "f8", "ledger", "requests", "in flight without a first token"),
    Field("unstarted_prompt_tokens", "f8", "ledger", "tokens", "prompt tokens of the unstarted requests"),
    Field("unstarted_prompt_blocks", "f8", "ledger", "blocks", "KV blocks for the prompts of the unstarted requests"),
    Field(
        "unstarted_uncached_tokens",
        "f8",
        "ledger",
        "tokens",
        "the same prompt tokens less what the prefix index matched",
    ),
    Field("head_prompt_blocks", "f8", "ledger", "blocks", "KV blocks for the prompt of the oldest unstarted request"),
    Field("started_prompt_tokens", "f8", "ledger", "tokens", "prompt tokens of the started requests in flight"),
    Field("streamed_tokens", "f8", "ledger", "tokens", "tokens streamed so far by the requests in flight"),
    Field(
        "predicted_output_tokens", "f8", "ledger", "tokens", "predicted output of the requests in flight, whole answers"
    ),
    Field(
        "free_blocks",
        "f8",
        "poll",
        "blocks",
        "free KV blocks: capacity x (1 - kv_usage); engine-reported mode: as reported",
    ),
    Field(
        "queued_demand_blocks",
        "f8",
        "ledger",
        "blocks",
        "KV demand of queued requests: unstarted_prompt_blocks; engine-reported mode: as reported",
    ),
    Field(
        "head_demand_blocks",
        "f8",
        "ledger",
        "blocks",
        "KV demand of the head of line: head_prompt_blocks; engine-reported mode: as reported",
    ),
    Field("queued", "f8", "ledger", "requests", "queued requests: unstarted; engine-reported mode: as reported"),
    Field(
        "batched",
        "f8",
        "ledger",
        "requests",
        "requests in the batch: in_flight - unstarted; engine-reported mode: as reported",
    ),
    Field(
        "preempted",
        "f8",
        "poll",
        "requests",
        "preempted requests that wait to be admitted again; 0 but in engine-reported mode",
    ),
    Field(
        "matched_tokens", "f8", "prefix index", "tokens", "tokens of this request's prompt that the index holds for it"
    ),
    Field("indexed_tokens", "f8", "prefix index", "tokens", "tokens the index holds for it"),
)

REQUEST_FIELDS: tuple[Field, ...] = (
    Field("prompt_tokens", "f8", "request", "tokens", "exact prompt length"),
    Field("streamed_tokens", "f8", "ledger", "tokens", "tokens of its answer streamed so far; 0 for a new request"),
    Field("predicted_output_tokens", "f8", "request", "tokens", "a length predictor's answer"),
    Field("priority", "f8", "request", "", "lower is earlier, as in vLLM"),
    Field("slo_class", "i8", "request", "", "index of the SLO class"),
    Field("ttft_target_s", "f8", "request", "s", "its class's target for the first token; inf for none"),
    Field("tpot_target_s", "f8", "request", "s", "its class's target for time per output token; inf for none"),
    Field("waited_s", "f8", "dispatcher", "s", "time since it arrived"),
    Field("session", "i8", "request", "", "session or client, -1 for none"),
    Field("turn", "f8", "request", "", "turn within the session"),
)

FLEET_FIELDS: tuple[Field, ...] = (
    Field("time_s", "f8", "dispatcher", "s", "now"),
    Field("kind", "i8", "dispatcher", "", "what the decision is about: KIND_DISPATCH, ..."),
    Field("may_hold", "i8", "dispatcher", "0/1", "whether NONE is a legal choice: hold; no migration; no scaling"),
    Field("held", "f8", "dispatcher", "requests", "requests held at the dispatcher"),
    Field(
        "decisions", "i8", "dispatcher", "count", "dispatches answered with an instance so far; of a DECODE, decodes"
    ),
    Field("random_key", "u8", "dispatcher", "", "fresh random bits for this decision, from the run's tie-break seed"),
    Field(
        "engine_reported",
        "i8",
        "dispatcher",
        "0/1",
        "1 where engines report their load fields at every iteration (papers' experiments only)",
    ),
)


def _dtype(table: tuple[Field, ...]) -> np.dtype[np.void]:
    return np.dtype([(f.name, f.dtype) for f in table], align=True)


INSTANCE_VIEW = _dtype(INSTANCE_FIELDS)
REQUEST_VIEW = _dtype(REQUEST_FIELDS)
FLEET_VIEW = _dtype(FLEET_FIELDS)


@dataclass(frozen=True)
class FleetView:
    """What a dispatcher can know when a decision is due, for a batch of ``B`` fleets of at most ``N`` instances.

    Attributes:
        instances: (B, N) records of `INSTANCE_VIEW`.
        request: (B,) records of `REQUEST_VIEW`: the request that the decision is about.
        fleet: (B,) records of `FLEET_VIEW`.
    """

    instances: NDArray[np.void]
    request: NDArray[np.void]
    fleet: NDArray[np.void]

    @property
    def candidates(self) -> NDArray[np.bool_]:
        """(B, N) instances that may be chosen."""
        return self.instances["candidate"] != 0

    @property
    def may_hold(self) -> NDArray[np.bool_]:
        """(B,) whether `NONE` may be chosen."""
        return self.fleet["may_hold"] != 0

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True)
class Decision:
    """The answer to a `FleetView`: one instance per batch row, or `NONE`.

    Attributes:
        choice: (B,) int64 index of the chosen instance, `NONE` or `REJECT`.
    """

    choice: NDArray[np.int64]


def empty_view(batch: int, instances: int) -> FleetView:
    """A view of zeros: all instances ready candidates, holding not allowed, no poll seen yet."""
    view = FleetView(
        np.zeros((batch, instances), INSTANCE_VIEW), np.zeros(batch, REQUEST_VIEW), np.zeros(batch, FLEET_VIEW)
    )
    view.instances["slot"] = np.arange(instances)
    view.instances["candidate"] = 1
    view.instances["state"] = STATE_READY
    view.instances["poll_age_s"] = np.inf
    view.request["ttft_target_s"] = np.inf
    view.request["tpot_target_s"] = np.inf
    view.request["session"] = -1
    return view
