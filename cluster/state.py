"""The arrays that hold a batch of clusters: shapes, units, allocation.

Everything is one-dimensional and global over the batch: with ``E`` environments of at most ``N`` instances, instance
``i`` of environment ``e`` is ``g = e * N + i``; slot, row and node indices are laid out the same way. So kernels pass
one index, and the whole state can be copied, saved and restored as plain arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.cost_model import COST
from fleetpilot.fleet.jit import kernel_array
from fleetpilot.fleet.view import FLEET_VIEW, INSTANCE_VIEW, REQUEST_VIEW

NIL = -1
NEVER = np.iinfo(np.int32).max

MODE_CHUNKED, MODE_PREFILL_FIRST = range(2)
IDLE, DECODE, MIXED = range(3)
"""What an instance is doing: nothing, iterations of decodes alone (a leap), one iteration with prefill in it."""

NEED_DECISION, NEED_ROWS, NEED_SLOTS, NEED_FLUSH, ENDED, STUCK = range(6)
"""Why `advance` returned."""

FINISHED, FAILED, REJECTED, CUT, NEVER_ARRIVED = range(5)
"""Status of a request in the log."""

SHARED_CACHE = -2
"""In place of the instance that KV comes from: the store that all instances share (shared_cache.py)."""

UNDECIDED = -2
"""In place of the instance that decodes a request, which the policy says after its prefill."""

COPYING, STOPPING, HANDING_OVER, PROBING, PROBED = range(5)
"""A migration's phase: stages are copied while decoding goes on, the request waits for its last boundary, the rest.

With protocol `vllm` each stage begins with a probe at a boundary, and the copy at the next.
"""

PROTOCOL_LLUMNIX, PROTOCOL_VLLM = range(2)

MIGRATION_OUTCOMES = (
    "completed",
    "moved",
    "no_space",
    "finished",
    "preempted",
    "too_long",
    "source_died",
    "destination_died",
)
COMPLETED, MOVED, NO_SPACE, LEFT, PREEMPTED, TOO_LONG, SOURCE_DIED, DESTINATION_DIED = range(len(MIGRATION_OUTCOMES))
"""How a migration ended: a waiting request is moved; `LEFT` is called finished."""

ROW = np.dtype(  # one row of a RequestTable, as the kernel reads it
    [
        ("arrival_s", "f8"),
        ("think_s", "f8"),
        ("session", "i8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("predicted_output_tokens", "f4"),
        ("priority", "i4"),
        ("slo_class", "i4"),
        ("turn", "i4"),
        ("prefix_node", "i4"),
        ("own_node", "i4"),
        ("first_child", "i4"),  # first row released by this one's last token
        ("next_sibling", "i4"),
        ("closed", "i4"),  # 1: released by its parent
    ],
    align=True,
)

NODE = np.dtype([("parent", "i4"), ("end_tokens", "i8")], align=True)

SLOT = np.dtype(  # a request between its arrival and its end; in the order of use, to touch few cache lines at a time
    [
        # at its arrival and dispatch
        ("row", "i8"),
        ("session", "i8"),
        ("arrival_s", "f8"),
        ("due_s", "f8"),  # when it came to the dispatcher: its arrival, or its return
        ("dispatch_s", "f8"),
        ("admitted_s", "f8"),
        ("predicted_output_tokens", "f4"),
        ("turn", "i4"),
        ("priority", "i4"),
        ("slo_class", "i4"),
        ("cached_tokens", "i4"),
        ("instance", "i4"),  # global
        # while it waits and prefills
        ("next", "i4"),  # waiting queue, held queue, prefilling list or free list
        ("previous", "i4"),
        ("unstarted_next", "i4"),  # in dispatch order on its instance
        ("unstarted_previous", "i4"),
        ("unstarted", "i4"),  # 1: no token since it was dispatched to its instance
        ("restart_tokens", "i4"),  # generated before it was dispatched to its instance
        ("prefill_tokens", "i4"),  # L: tokens to hold before the next token can be sampled
        ("computed_tokens", "i4"),  # while prefilling
        ("chunk_tokens", "i4"),  # prefilled in this iteration
        ("held_blocks", "i4"),  # while prefilling
        ("ttft_target_s", "f8"),
        ("started", "i4"),
        # from its first token to its end
        ("joined_s", "f8"),  # last token before the request (re)joined the decodes
        ("first_token_s", "f8"),
        ("generated", "i4"),  # while decoding: generated - steps_done of its instance
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("prefix_node", "i4"),
        ("own_node", "i4"),
        ("node_blocks", "i4"),  # of those it holds, the ones that belong to nodes
        ("first_child", "i4"),
        ("indexed_match_tokens", "i4"),  # what the prefix index said at dispatch
        ("tpot_target_s", "f8"),
        ("sat_out", "i4"),  # 1: missed the last decode step, so joined_s is its last token
        ("missed", "i4"),  # 1: has missed a target
        # when it is preempted
        ("preemptions", "i4"),
        ("preempted_s", "f8"),  # NaN unless preempted and not yet prefilled again
        ("preempted_step_s", "f8"),  # what a step of the decodes would have taken then
        ("preemption_loss_s", "f8"),
        # when it moves
        ("migrations", "i4"),
        ("restarts", "i4"),
        ("downtime_s", "f8"),
        ("stopped_s", "f8"),
        ("lru_next", "i4"),
        ("lru_previous", "i4"),
        ("resident_blocks", "i4"),  # preempted: private tail still in memory
        ("dead_blocks", "i4"),  # blocks behind it in the free list that nobody can match
    ],
    align=True,
)

BATCH_ENTRY = np.dtype([("finish_step", "i4"), ("slot", "i4")], align=True)

RESIDENCY = np.dtype(  # of one node on one instance
    [
        ("next", "i4"),
        ("previous", "i4"),
        ("blocks", "i4"),
        ("dead_blocks", "i4"),
        ("pins", "i4"),
    ],
    align=True,
)

INDEXED = np.dtype([("next", "i4"), ("previous", "i4"), ("present", "i4")], align=True)
"""One node in one instance's prefix index (fleet/prefix_index.py)."""

ENGINE = np.dtype(  # one instance's configuration
    [
        ("cost", COST),
        ("mode", "i8"),
        ("kv_blocks", "i8"),
        ("block_size", "i8"),
        ("max_num_seqs", "i8"),
        ("max_num_batched_tokens", "i8"),
        ("watermark_blocks", "i8"),
        ("prefix_cache", "i8"),
        ("priority_order", "i8"),
        ("kv_bytes_per_block", "i8"),
        ("profile", "i8"),  # the same number for instances of one profile
        ("index_tokens", "i8"),  # bound of the dispatcher's prefix index for it
    ],
    align=True,
)

LOAD = np.dtype(
    [
        ("free_blocks", "i4"),
        ("waiting_blocks", "i4"),
        ("head_blocks", "i4"),
        ("waiting", "i4"),
        ("in_batch", "i4"),
        ("preempted", "i4"),
    ],
    align=True,
)

MIGRATION = np.dtype(  # of the source with this index
    [
        ("end_s", "f8"),  # of the stage that is copied, inf while the request stops
        ("slot", "i8"),
        ("row", "i8"),
        ("destination", "i8"),  # global
        ("shadow", "i8"),  # slot of the copy (protocol vllm), the one with the source's index, or NIL
        ("sent_blocks", "i8"),  # over all stages
        ("phase", "i8"),
        ("stages", "i8"),  # begun
        ("copied_blocks", "i8"),
        ("stage_blocks", "i8"),  # of the stage in progress
        ("preemptions", "i8"),  # of the request at the start
        ("start_s", "f8"),
        ("stop_s", "f8"),
    ],
    align=True,
)

INSTANCE = np.dtype(
    [
        # where its parts of the other arrays begin
        ("env", "i4"),
        ("batch0", "i4"),
        ("residues0", "i4"),
        ("residency0", "i4"),
        ("node0", "i4"),
        ("poll0", "i4"),
        ("polls", "i4"),
        # the iteration, or the leap, in progress
        ("doing", "i4"),
        ("anchor_s", "f8"),
        ("base_s", "f8"),
        ("kv_tokens", "f8"),  # read by the first iteration since the anchor
        ("decodes_in_leap", "i4"),
        ("steps", "i4"),  # iterations since the anchor that are accounted for
        ("planned", "i4"),  # iterations since the anchor at the next boundary
        ("jitter", "f8"),
        # the batch
        ("in_batch", "i4"),
        ("decodes", "i4"),
        ("steps_done", "i8"),  # decode steps since the start
        ("decode_tokens", "i8"),  # sum of prompt + generated over the decodes
        ("first_finish_step", "i4"),
        ("first_finish_slot", "i4"),  # whose it probably is: for prefetching
        ("prefilling", "i4"),  # list of slots prefilled in this iteration
        ("changed", "i4"),
        ("preempted", "i4"),  # the last boundary preempted
        ("uneven", "i4"),  # some request sat out the last decode step
        ("sitting_out", "i4"),  # position in the batch from which on requests miss this iteration
        # the waiting queue
        ("head", "i4"),
        ("tail", "i4"),
        ("waiting", "i4"),
        ("waiting_blocks", "i4"),
        # KV blocks
        ("free_blocks", "i4"),  # hold nothing
        ("lru_blocks", "i4"),  # unpinned, in the list below
        ("lru_head", "i4"),
        ("lru_tail", "i4"),
        # the dispatcher's knowledge of it
        ("unstarted_head", "i4"),
        ("unstarted_tail", "i4"),
        ("streamed_tokens", "i8"),
        ("next_poll", "i4"),
        ("index_head", "i4"),
        ("index_tail", "i4"),
        # migration and lifecycle
        ("migration", "i4"),  # the source of the one it takes part in, or NIL
        ("stopping", "i4"),  # 1: the next boundary is one of its migration: a probe, or its request stops
        ("guest_tokens", "i4"),  # that the next iteration computes for probes and copies
        ("guest_attention", "f8"),
        ("incoming", "i4"),  # list of slots that join the batch at the next boundary
        ("role", "i4"),  # a ROLE of fleet/view.py
        ("exports", "i4"),  # requests whose KV it holds until another instance has pulled it
        ("remote", "i4"),  # requests in its waiting queue whose KV another instance holds
        ("pulls", "i4"),  # requests whose KV it pulls, or has pulled and that have not joined the batch yet
        ("pulled", "i4"),  # list of the latter
        ("transfers", "i4"),  # list of what is being copied to it (links.py)
        ("inbound", "i4"),  # how many these are
        ("outgoing", "i4"),  # transfers from it
        ("reserved_blocks", "i4"),  # for the request that is copied here, or has come and not joined yet
        ("preempted_waiting", "i4"),
        # what the engine reports of its load (papers' experiments): of the last iteration, and of that in progress
        ("reported", LOAD),
        ("scheduled", LOAD),
        ("life", "i4"),  # a STATE of fleet/view.py
        ("due_s", "f8"),  # ready, or drained by force, then
        ("notices", "i4"),  # failures to come that have been announced
        ("failures", "i4"),
        ("fail_s", "f8"),  # the next failure drawn
        ("source_tick", "i8"),  # the last tick that asked for it
        ("scale_tick", "i8"),
        ("billed_from_s", "f8"),  # NaN while it is not billed
        ("alive_s", "f8"),
        # counters
        ("last_decode_s", "f8"),  # end of the last decode step
        ("busy_s", "f8"),
        ("iterations", "i8"),
        ("decode_steps", "i8"),
        ("preemptions", "i4"),
        ("prefix_queries_tokens", "i8"),
        ("prefix_hits_tokens", "i8"),
        ("dispatched", "i4"),
    ],
    align=True,
)

POLL = np.dtype(
    [
        ("running", "i4"),
        ("waiting", "i4"),
        ("used_blocks", "i4"),
        ("preemptions", "i4"),
        ("prefix_queries_tokens", "i8"),
        ("prefix_hits_tokens", "i8"),
    ],
    align=True,
)

ENV = np.dtype(
    [
        ("time_s", "f8"),
        # where its parts of the other arrays begin
        ("instances", "i8"),
        ("instance0", "i8"),
        ("row0", "i8"),
        ("slot0", "i8"),
        ("slots", "i8"),
        ("node0", "i8"),
        ("released0", "i8"),
        ("deadline0", "i8"),
        ("target0", "i8"),
        # requests to come
        ("rows", "i8"),
        ("cursor", "i8"),
        ("row_base", "i8"),  # number of the first row in memory
        ("more_rows", "i8"),  # 1: ask for more instead of ending
        ("released", "i8"),  # entries in the heap of released turns
        ("closed_loop", "i8"),
        ("completion_s", "f8"),  # the last boundary that may have brought a decision forward
        ("completion_instance", "i8"),
        ("nodes", "i8"),
        ("free_slot", "i8"),  # list of slots that were used and are free again
        ("used_slots", "i8"),  # slots that were ever used: the first ones
        ("active", "i8"),
        # the decision
        ("decision_slot", "i8"),
        ("decision_held", "i8"),  # 1: it is the head of the held queue
        ("decision_kind", "i8"),
        ("candidates_kind", "i8"),  # what the view's candidates are for; NIL: to be found out
        ("returned_head", "i8"),  # list of requests that came back and have not been asked for
        ("returned_tail", "i8"),
        ("held_head", "i8"),
        ("held_tail", "i8"),
        ("held", "i8"),
        ("next_hold_s", "f8"),
        ("matched_dirty", "i8"),
        ("decisions", "i8"),
        ("asked", "i8"),
        ("forced", "i8"),
        ("invalid", "i8"),
        ("held_s", "f8"),
        ("deadlines", "i8"),  # entries in the heap of first-token targets
        # costs since the start, for rewards
        ("unstarted", "i8"),  # requests without a first token
        ("unstarted_since_s", "f8"),
        ("unstarted_area_s", "f8"),  # what they and those before them had waited then
        ("misses", "i8"),
        ("preemption_loss_s", "f8"),
        ("finished", "i8"),
        ("last_finish_s", "f8"),
        ("failed", "i8"),
        ("generated_tokens", "i8"),
        ("migrations_ended", "i8"),
        ("migrations_completed", "i8"),
        # configuration
        ("seed", "u8"),
        ("leap", "i8"),
        ("stop_s", "f8"),
        ("hold_interval_s", "f8"),
        ("max_hold_s", "f8"),
        ("polls_taken", "i8"),  # so many are recorded for every instance
        ("polls_visible", "i8"),  # the view shows the last one of so many
        ("poll_interval_s", "f8"),
        ("poll_delay_s", "f8"),
        ("engine_reported", "i8"),
        # migration and lifecycle
        ("next_event_s", "f8"),  # a copy, a start-up or a drain ends, or a failure is announced or happens
        ("ready_to_prefill", "i8"),  # instances that are
        ("ready_to_decode", "i8"),
        ("stopping", "i8"),  # instances whose next boundary is one of their migration
        ("source", "i8"),  # chosen, for the DESTINATION that follows
        ("rebalance_interval_s", "f8"),  # inf: never
        ("rebalance_tick", "i8"),  # the one in progress, or the last
        ("pairs", "i8"),  # answered in it
        ("rebalance_open", "i8"),  # 1: more of it may be asked
        ("max_pairs", "i8"),
        ("request_choice", "i8"),
        ("protocol", "i8"),
        ("round_trip_s", "f8"),
        ("bandwidth_bytes_per_s", "f8"),
        ("slowdown", "f8"),
        ("max_stages", "i8"),
        ("last_stage_blocks", "i8"),
        ("scale_interval_s", "f8"),  # inf: never
        ("scale_first_s", "f8"),
        ("scale_tick", "i8"),  # the next one
        ("scale_open", "i8"),
        ("min_instances", "i8"),
        ("max_instances", "i8"),
        ("start_up_s", "f8"),
        ("drain_deadline_s", "f8"),
        ("failure0", "i8"),  # failures at given times
        ("failures", "i8"),
        ("next_announcement", "i8"),
        ("next_failure", "i8"),
        ("mtbf_s", "f8"),  # inf: none are drawn
        ("repair_s", "f8"),
        ("restart", "i8"),  # 0: requests of a failed instance fail
        ("max_restarts", "i8"),
        ("transfers", "i8"),  # 0: nobody keeps account of links, and the array is empty
        # the shared cache
        ("shared_cache", "i8"),
        ("shared_capacity_blocks", "i8"),
        ("shared_held_blocks", "i8"),
        ("shared_head", "i8"),  # the node that is unused for longest
        ("shared_tail", "i8"),
        ("shared_loads", "i8"),  # in progress
        ("shared_ttl_s", "f8"),
        ("shared_round_trip_s", "f8"),
        ("shared_bandwidth_bytes_per_s", "f8"),
        ("update0", "i8"),  # times of model updates
        ("updates", "i8"),
        ("next_update", "i8"),
        # pools
        ("pools", "i8"),
        ("knows_prefill", "i8"),  # 0: nobody answers PREFILL by its name: it is asked as a DISPATCH
        ("knows_decode", "i8"),
        ("first_token_from_prefill", "i8"),
        ("decode_after_prefill", "i8"),  # 1: DECODE is asked when the prefill is done
        ("pull_round_trip_s", "f8"),
        ("pull_bandwidth_bytes_per_s", "f8"),
        ("prefill_choice", "i8"),  # chosen, for the DECODE that follows at once
        ("decode_decisions", "i8"),
        ("prefilled_head", "i8"),  # list of requests whose prefill ended with the last boundary
        ("prefilled_tail", "i8"),
        ("sample_interval_s", "f8"),  # inf: no samples
        ("next_sample", "i8"),
        ("track_log", "i8"),
        ("track_targets", "i8"),
        ("classes", "i8"),
    ],
    align=True,
)

SHARED = np.dtype([("next", "i4"), ("previous", "i4"), ("blocks", "i4"), ("used_s", "f8")], align=True)
"""One node in the store that all instances share."""

UPDATE = np.dtype([("time_s", "f8")])

TRANSFER = np.dtype(  # KV on its way between two instances: of the request in this slot, or a shadow's migration
    [
        # while it is copied (links.py)
        ("end_s", "f8"),
        ("since_s", "f8"),  # what is left, is left then
        ("left_s", "f8"),  # of the round trip
        ("left_bytes", "f8"),
        ("bandwidth_bytes_per_s", "f8"),  # of the link, if nothing else is copied over it
        ("share", "i8"),  # transfers that share its link
        ("source", "i8"),  # global, or SHARED_CACHE: holds the KV; NIL without one
        ("destination", "i8"),
        ("next", "i8"),  # to the same destination
        # the hand-over from prefill to decode (handover.py)
        ("decode_instance", "i8"),  # until the prefill is done; NIL: it decodes where it is
        ("prefill_instance", "i8"),  # the last one, or NIL
        ("loaded_blocks", "i8"),  # that come from the shared cache
        ("loaded_tokens", "i8"),  # that have come from there, in all
        ("held_blocks", "i8"),  # of the source
        ("node_blocks", "i8"),
        ("computed_tokens", "i8"),
        ("prefilled_s", "f8"),
        ("handover_s", "f8"),  # from prefills to batches of decode instances, in all
    ],
    align=True,
)

TIMED = np.dtype([("time_s", "f8"), ("index", "i8"), ("row", "i8")], align=True)

TARGET = np.dtype([("ttft_s", "f8"), ("ttft_s_per_token", "f8"), ("tpot_s", "f8")], align=True)

REQUEST_LOG = np.dtype(
    [
        ("row", "i8"),
        ("status", "i1"),
        ("instance", "i4"),
        ("arrival_s", "f8"),
        ("dispatch_s", "f8"),
        ("admitted_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("generated", "i4"),
        ("predicted_output_tokens", "f4"),
        ("priority", "i4"),
        ("slo_class", "i4"),
        ("preemptions", "i4"),
        ("preemption_loss_s", "f8"),
        ("cached_tokens", "i4"),
        ("migrations", "i4"),
        ("restarts", "i4"),
        ("downtime_s", "f8"),
        ("prefill_instance", "i4"),  # pools: where its last prefill was handed over from, or -1
        ("handover_s", "f8"),  # pools: from the ends of its prefills to the batch of the decode instance, in all
        ("loaded_tokens", "i4"),  # of the cached ones, from the shared cache
    ],
    align=True,
)

MIGRATION_LOG = np.dtype(
    [
        ("row", "i8"),
        ("source", "i4"),
        ("destination", "i4"),
        ("start_s", "f8"),
        ("stop_s", "f8"),  # NaN: the request never stopped
        ("end_s", "f8"),
        ("stages", "i4"),
        ("blocks", "i4"),  # copied, or being copied
        ("outcome", "i1"),  # index into MIGRATION_OUTCOMES
    ],
    align=True,
)

FAILURE = np.dtype([("time_s", "f8"), ("announced_s", "f8"), ("instance", "i8")], align=True)

SAMPLE = np.dtype(
    [
        ("time_s", "f8"),
        ("instance", "i4"),
        ("running", "i4"),
        ("waiting", "i4"),
        ("used_blocks", "i4"),
        ("free_blocks", "i4"),
        ("head_demand_blocks", "i4"),
    ],
    align=True,
)

ITL_OCTAVES = 32
ITL_BINS_PER_OCTAVE = 64
ITL_LOWEST_EXPONENT = -19
ITL_BINS = ITL_OCTAVES * ITL_BINS_PER_OCTAVE


NEXT_BOUNDARY = np.dtype(
    [
        ("time_s", "f8"),
        ("streamed_until_s", "f8"),  # the view's streamed_tokens are right until then, or until a boundary
    ]
)
RESIDUE = np.dtype([("decodes", "i4")])
GAPS = np.dtype([("count", "i8")])

COUNTS = np.dtype(
    [
        ("log", "i8"),  # entries in the log
        ("log_size", "i8"),
        ("samples", "i8"),
        ("samples_size", "i8"),
        ("migrations", "i8"),  # entries in the log of migrations
        ("migrations_size", "i8"),  # 0: it is not kept
        ("itl_bins", "i8"),  # 0: gaps are not counted
    ]
)


class State(NamedTuple):
    """All arrays of a batch of clusters. `E` environments, `N` instances each, `R` rows, `S` slots, `M` nodes."""

    env: NDArray[np.void]  # (E,) ENV
    row: NDArray[np.void]  # (E * R,) ROW
    node: NDArray[np.void]  # (E * M,) NODE
    slot: NDArray[np.void]  # (E * N + E * S,) SLOT: the shadows of migrations (stock_migration.py), then the requests
    engine: NDArray[np.void]  # (E * N,) ENGINE
    instance: NDArray[np.void]  # (E * N,) INSTANCE
    next_boundary: NDArray[np.void]  # (E * N,) NEXT_BOUNDARY, inf when idle
    batch: NDArray[np.void]  # (E * N * max_num_seqs,) BATCH_ENTRY
    residues: NDArray[np.void]  # (E * N * max block size,) RESIDUE: decodes by (computed - steps_done) mod block_size
    residency: NDArray[np.void]  # (E * N * M,) RESIDENCY
    indexed: NDArray[np.void]  # (E * N * M,) INDEXED
    poll: NDArray[np.void]  # (E * N * polls,) POLL, a ring
    released: NDArray[np.void]  # (E * closed rows,) TIMED heap
    deadline: NDArray[np.void]  # (E * R,) TIMED heap
    target: NDArray[np.void]  # (E * classes,) TARGET
    view_instance: NDArray[np.void]  # (E * N,) INSTANCE_VIEW
    view_request: NDArray[np.void]  # (E,) REQUEST_VIEW
    view_fleet: NDArray[np.void]  # (E,) FLEET_VIEW
    log: NDArray[np.void]  # REQUEST_LOG of ended requests (single runs)
    sample: NDArray[np.void]  # SAMPLE (single runs)
    migration: NDArray[np.void]  # (E * N,) MIGRATION
    failure: NDArray[np.void]  # (failures,) FAILURE
    transfer: NDArray[np.void]  # as slot: TRANSFER, with pools or a shared cache; else empty
    shared: NDArray[np.void]  # (E * M,) SHARED, with a shared cache
    update: NDArray[np.void]  # (updates,) UPDATE
    migration_log: NDArray[np.void]  # MIGRATION_LOG of ended migrations (single runs)
    counts: NDArray[np.void]  # (1,) COUNTS
    itl: NDArray[np.void]  # (ITL_BINS,) GAPS: histogram of gaps between tokens (single runs), or empty


ARRAY_DTYPES: dict[str, np.dtype[np.void]] = {
    "env": ENV,
    "row": ROW,
    "node": NODE,
    "slot": SLOT,
    "engine": ENGINE,
    "instance": INSTANCE,
    "next_boundary": NEXT_BOUNDARY,
    "batch": BATCH_ENTRY,
    "residues": RESIDUE,
    "residency": RESIDENCY,
    "indexed": INDEXED,
    "poll": POLL,
    "released": TIMED,
    "deadline": TIMED,
    "target": TARGET,
    "view_instance": INSTANCE_VIEW,
    "view_request": REQUEST_VIEW,
    "view_fleet": FLEET_VIEW,
    "log": REQUEST_LOG,
    "sample": SAMPLE,
    "migration": MIGRATION,
    "failure": FAILURE,
    "transfer": TRANSFER,
    "shared": SHARED,
    "update": UPDATE,
    "migration_log": MIGRATION_LOG,
    "counts": COUNTS,
    "itl": GAPS,
}


@dataclass(frozen=True)
class Capacity:
    """Sizes of a `State`."""

    environments: int
    instances: int
    rows: int
    slots: int
    nodes: int
    max_num_seqs: int
    max_block_size: int
    polls: int
    closed_rows: int
    classes: int
    log: int = 0
    samples: int = 0
    itl: bool = False
    track_targets: bool = False
    failures: int = 0
    migrations: int = 0
    transfers: bool = False
    shared_cache: bool = False
    updates: int = 0


def allocate(size: Capacity) -> State:
    """A state of zeros."""
    e = size.environments
    g = e * size.instances
    lengths = {
        "env": e,
        "row": e * size.rows,
        "node": e * size.nodes,
        "slot": g + e * size.slots,
        "engine": g,
        "instance": g,
        "next_boundary": g,
        "batch": g * size.max_num_seqs,
        "residues": g * size.max_block_size,
        "residency": g * size.nodes,
        "indexed": g * size.nodes,
        "poll": g * size.polls,
        "released": e * size.closed_rows,
        "deadline": e * size.rows if size.track_targets else 0,
        "target": e * size.classes,
        "view_instance": g,
        "view_request": e,
        "view_fleet": e,
        "log": size.log,
        "sample": size.samples,
        "migration": g,
        "failure": e * size.failures,
        "transfer": g + e * size.slots if size.transfers else 0,
        "shared": e * size.nodes if size.shared_cache else 0,
        "update": e * size.updates,
        "migration_log": size.migrations,
        "counts": 1,
        "itl": ITL_BINS if size.itl else 0,
    }
    state = State(**{name: kernel_array(lengths[name], dtype) for name, dtype in ARRAY_DTYPES.items()})
    state.slot["row"] = NIL
    state.transfer["source"] = NIL
    state.counts["log_size"] = size.log
    state.counts["samples_size"] = size.samples
    state.counts["migrations_size"] = size.migrations
    state.counts["itl_bins"] = len(state.itl)
    return state


def copy_state(state: State) -> State:
    """A deep copy: what `save` keeps."""
    return State(*(array.copy() for array in state))


def restore_state(state: State, saved: State) -> None:
    """Write a saved copy back into the same arrays.

    Raises:
        ValueError: if the copy has other sizes.
    """
    for name, array, source in zip(State._fields, state, saved, strict=True):
        if array.shape != source.shape:
            raise ValueError(f"{name}: saved with shape {source.shape}, expected {array.shape}")
        array[...] = source


def grown(records: NDArray[np.void], length: int) -> NDArray[np.void]:
    """A longer array that begins with these records, to the byte."""
    grown = kernel_array(length, records.dtype)
    grown.view(np.uint8)[: records.nbytes] = records.view(np.uint8)
    return grown


def as_records(state: State) -> State:
    """The same memory with attribute access to fields in plain Python (for running the kernels uncompiled)."""
    views: list[Any] = [a.view(np.recarray) if a.dtype.names else a for a in state]
    return State(*views)
