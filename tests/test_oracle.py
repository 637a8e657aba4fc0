"""The oracle against small cases worked out by hand from docs/model.md (the numbers are derived in the comments).

Unless a test says otherwise an iteration takes exactly 1 s (`a_s = 1`, all other terms 0): boundaries are 0, 1, 2, ...
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from oracle import OracleInstance, OracleResult, simulate
from strategies import clusters

from fleetpilot.workloads.table import RequestTable, make_table

CHUNKED = OracleInstance("chunked", kv_blocks=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, a_s=1.0)
PREFILL_FIRST = replace(CHUNKED, scheduler="prefill_first")
NAN = float("nan")


def run(
    instance: OracleInstance, arrival_s: list[float], prompt: list[int], output: list[int], **columns: object
) -> OracleResult:
    return simulate(make_table("by hand", arrival_s, prompt, output, **columns), [instance], lambda decision, row: 0)


def used_blocks(result: OracleResult) -> list[tuple[float, int]]:
    return [(boundary.time_s, boundary.used_blocks) for boundary in result.history[0]]


# --- time of an iteration ---------------------------------------------------------------------------------------------


def test_single_request() -> None:
    instance = replace(
        CHUNKED,
        kv_blocks=3,
        w_s=2,
        b_s=1 / 2,
        c_s=1 / 64,
        d_s=1 / 4,
        e_s=1 / 128,
        host_step_s=1 / 8,
        host_per_seq_s=1 / 16,
    )
    result = run(instance, [2.0], [8], [3])
    request = result.requests[0]
    # Prefill of 8 tokens: 1 + max(2, 8/2) + (8 * (0 + 8/2)) / 64 + 1/8                   = 5.625
    # Decode that reads 8 + 1 tokens: 1 + max(2, 1/2) + 1/4 + 9/128 + 1/8 + 1/16           = 3.5078125
    # Decode that reads 8 + 2 tokens: the same with 10/128                                 = 3.515625
    assert request.token_times == [7.625, 11.1328125, 14.6484375]
    assert (request.arrival_s, request.dispatch_s, request.admitted_s) == (2, 2, 2)
    assert (request.first_token_s, request.finish_s, request.generated) == (7.625, 14.6484375, 3)
    # 8 tokens are 2 blocks of 4; with the first decode there are 9, with the second 10: 3 blocks.
    assert used_blocks(result) == [(2, 2), (7.625, 3), (11.1328125, 3), (14.6484375, 0)]
    assert [result.used_blocks_at(0, t) for t in (0, 2, 7, 8, 20)] == [0, 2, 2, 3, 0]
    assert result.iterations == [3]


def test_expert_term_saturates() -> None:
    # 4 (1 - (1 - 1/2)^tokens): 3 for the 2 prompt tokens, 2 for the one decode.
    result = run(replace(CHUNKED, w_e_s=4.0, expert_share=0.5), [0.0], [2], [2])
    assert result.requests[0].token_times == [4.0, 7.0]


def test_two_requests_that_arrive_together_enter_one_batch() -> None:
    result = run(replace(CHUNKED, b_s=1 / 4, d_s=1 / 2, e_s=1 / 8), [0.0, 0.0], [4, 6], [2, 3])
    # Prefill of 10 tokens: 1 + 10/4 = 3.5. Two decodes that read 5 + 7 tokens: 1 + 2/4 + 2/2 + 12/8 = 4.
    # One that reads 8: 1 + 1/4 + 1/2 + 8/8 = 2.75.
    assert result.requests[0].token_times == [3.5, 7.5]
    assert result.requests[1].token_times == [3.5, 7.5, 10.25]


def test_arrival_at_a_boundary_is_in_time_for_it() -> None:
    result = run(CHUNKED, [0.0, 1.0, 1.5], [4, 4, 4], [4, 1, 1])
    assert [request.admitted_s for request in result.requests] == [0, 1, 2]


def test_chunked_prefill_beside_a_decode() -> None:
    instance = replace(CHUNKED, max_num_seqs=2, max_num_batched_tokens=4, c_s=1 / 16)
    result = run(instance, [0.0, 0.5], [2, 9], [5, 2])
    # [0]        2 prompt tokens: 1 + (2 * 1)/16               -> 1.125    request 0: token 1
    # [1.125]    decode + 3 tokens after 0: 1 + (3 * 1.5)/16   -> 2.40625  token 2
    # [2.40625]  decode + 3 tokens after 3: 1 + (3 * 4.5)/16   -> 4.25     token 3
    # [4.25]     decode + 3 tokens after 6: 1 + (3 * 7.5)/16   -> 6.65625  token 4; request 1: token 1
    # [6.65625]  two decodes: 1                                -> 7.65625  token 5; request 1: token 2
    assert result.requests[0].token_times == [1.125, 2.40625, 4.25, 6.65625, 7.65625]
    assert result.requests[1].token_times == [6.65625, 7.65625]
    assert result.requests[1].admitted_s == 1.125
    # Blocks of 4: request 0 holds 2, 3, 4, 5, 6 tokens, request 1 holds 0, 3, 6, 9, 10.
    assert [used for _, used in used_blocks(result)] == [1, 1 + 1, 1 + 2, 2 + 3, 2 + 3, 0]


# --- admission --------------------------------------------------------------------------------------------------------


def test_head_of_line_blocking() -> None:
    # Request 0 takes 3 of 6 blocks. Request 1 needs 4 and waits until 0 has left; 2 needs 1 and waits behind it.
    result = run(replace(CHUNKED, kv_blocks=6), [0.0, 0.0, 0.0], [12, 16, 4], [6, 1, 1])
    assert [request.admitted_s for request in result.requests] == [0, 6, 6]
    assert result.blocked_boundaries == [6]  # at 0, 1, ..., 5


def test_chunked_admission_wants_room_for_the_whole_prefill() -> None:
    # Request 0 holds 2 of 6 blocks, later 3. Request 1 computes chunks of 2 blocks, but its 5 blocks fit only at 4.
    result = run(replace(CHUNKED, kv_blocks=6, max_num_batched_tokens=9), [0.0, 0.0], [8, 20], [4, 1])
    assert [request.admitted_s for request in result.requests] == [0, 4]
    assert result.requests[1].finish_s == 7  # chunks of 9, 9 and 2


def test_max_num_seqs() -> None:
    result = run(replace(CHUNKED, max_num_seqs=2), [0.0, 0.0, 0.0], [4, 4, 4], [1, 2, 1])
    assert [request.admitted_s for request in result.requests] == [0, 0, 1]


@pytest.mark.parametrize(("watermark_blocks", "admitted_s"), [(0, 0.0), (1, 2.0)])
def test_watermark_of_prefill_first(watermark_blocks: int, admitted_s: float) -> None:
    # 3 + 3 blocks fill all 6. With one block to be kept free the second waits until the first has left at 2.
    instance = replace(PREFILL_FIRST, kv_blocks=6, watermark_blocks=watermark_blocks)
    assert run(instance, [0.0, 0.0], [12, 12], [2, 1]).requests[1].admitted_s == admitted_s


@pytest.mark.parametrize(
    ("instance", "request_0", "request_1"),
    [
        # [0] 4 prompt tokens: 1 + 4/4 -> 2. [2] the 8 of request 1 alone: 1 + 8/4 -> 5. Then decodes of 1 + 1/4.
        (PREFILL_FIRST, [2, 6.25, 7.5], [5]),
        # [2] the 8 tokens and a decode: 1 + 9/4 -> 5.25. Then a decode of 1 + 1/4.
        (CHUNKED, [2, 5.25, 6.5], [5.25]),
    ],
)
def test_decodes_wait_for_prefill_in_prefill_first_only(
    instance: OracleInstance, request_0: list[float], request_1: list[float]
) -> None:
    result = run(replace(instance, b_s=1 / 4), [0.0, 0.5], [4, 8], [3, 1])
    assert result.requests[0].token_times == request_0
    assert result.requests[1].token_times == request_1


def test_prefill_first_keeps_whole_prompts_within_the_token_budget() -> None:
    result = run(replace(PREFILL_FIRST, max_num_batched_tokens=12), [0.0, 0.0, 0.0], [6, 6, 1], [1, 1, 1])
    assert [request.finish_s for request in result.requests] == [1, 1, 2]


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["chunked", "prefill_first"])
@pytest.mark.parametrize(
    ("prefix_cache", "finish_s", "loss_s", "cached_tokens"), [(False, 12.5, 4.25, 0), (True, 12.0, 3.75, 4)]
)
def test_preemption_recomputes_what_is_no_longer_resident(
    scheduler: str, prefix_cache: bool, finish_s: float, loss_s: float, cached_tokens: int
) -> None:
    instance = replace(CHUNKED, scheduler=scheduler, kv_blocks=4, prefix_cache=prefix_cache, b_s=1 / 8)
    result = run(instance, [0.0, 0.0], [4, 4], [8, 6])
    # [0]      both prefills, 1 block each: 1 + 8/8 -> 2.
    # [2]      four decodes of both, 2 blocks each: 1 + 2/8 each -> 3.25, 4.5, 5.75, 7. Each has 5 tokens, 8 computed.
    # [7]      request 0 needs a third block: request 1 goes. Its 2 full blocks become free, the last of them first,
    #          and that one is taken. Request 0 decodes alone: 1 + 1/8 each -> 8.125, 9.25, 10.375, and is done.
    #          Meanwhile request 1 wants 3 blocks (2 beside the one still resident) and there is but one.
    # [10.375] request 1 is back with 5 + 4 tokens, 4 of them still cached: 1 + 5/8 -> 12 (uncached: 1 + 9/8 -> 12.5).
    assert result.requests[0].token_times == [2, 3.25, 4.5, 5.75, 7, 8.125, 9.25, 10.375]
    assert result.requests[1].token_times == [2, 3.25, 4.5, 5.75, 7, finish_s]
    assert result.requests[1].preemptions == 1
    assert result.requests[1].preempted_loss_s == loss_s  # finish - 7 - the decode step of 1.25
    assert result.requests[1].cached_tokens == cached_tokens
    assert result.requests[1].admitted_s == 0
    assert result.preemptions == [1]
    assert result.used_blocks_at(0, 7) == 3


def test_boundary_that_preempts_admits_nobody() -> None:
    # As above with 1 s a step: at 5 request 0 takes one of the two blocks of request 1. The other would do for request
    # 2, the head of the queue by priority, but it has to wait for the next boundary.
    instance = replace(CHUNKED, kv_blocks=4, priority_order=True)
    result = run(instance, [0.0, 0.0, 3.5], [4, 4, 4], [8, 6, 1], priority=[0, 2, 1])
    assert result.requests[1].preemptions == 1
    assert (result.requests[2].admitted_s, result.requests[2].finish_s) == (6, 7)
    assert [(b.running, b.waiting) for b in result.history[0] if 4 <= b.time_s <= 6] == [(2, 1), (1, 2), (2, 1)]


def test_fcfs_ignores_the_priority_column() -> None:
    for scheduler in ("chunked", "prefill_first"):
        instance = replace(CHUNKED, scheduler=scheduler, kv_blocks=4)
        result = run(instance, [0.0, 0.0], [4, 4], [8, 6], priority=[2, 0])
        assert [request.preemptions for request in result.requests] == [0, 1]


def test_last_victims_are_first_in_the_queue() -> None:
    # Three requests of 2 blocks each fill 6. At 5 all want a third: request 0 takes it from request 2, request 1 takes
    # the other block of request 2. At 9 both want a fourth (12 tokens held): request 0 takes it from request 1.
    # The queue is then 1, 2. Request 1, 13 tokens or 4 blocks by now, is admitted when 0 has left at 12.
    result = run(replace(CHUNKED, kv_blocks=6), [0.0, 0.0, 0.0], [4, 4, 4], [12, 10, 6])
    assert [request.preemptions for request in result.requests] == [0, 1, 1]
    assert result.requests[0].finish_s == 12
    assert result.requests[1].finish_s == 13
    assert result.requests[2].finish_s == 14  # 9 tokens are 3 blocks, and 4 + 3 > 6


def test_waiting_queue_in_priority_order() -> None:
    instance = replace(CHUNKED, max_num_seqs=1, priority_order=True)
    result = run(instance, [0.0, 0.25, 0.5, 0.75], [4, 4, 4, 4], [2, 1, 1, 1], priority=[5, 1, 0, 0])
    assert [request.admitted_s for request in result.requests] == [0, 4, 2, 3]


def test_victim_by_priority_is_the_request_itself() -> None:
    # At 5 request 0, first in the list, needs a block and is itself the victim. The pass ends with nothing scheduled:
    # the scheduler runs again at once, in the same boundary. Request 1 takes a block and never misses a step.
    result = run(replace(CHUNKED, kv_blocks=4, priority_order=True), [0.0, 0.0], [4, 4], [6, 8], priority=[1, 0])
    assert result.requests[1].token_times == [1, 2, 3, 4, 5, 6, 7, 8]
    assert result.requests[0].token_times == [1, 2, 3, 4, 5, 9]
    assert [(b.running, b.waiting) for b in result.history[0] if b.time_s == 5] == [(1, 1)]


def test_victim_by_priority_gives_its_token_back() -> None:
    # In the fifth step request 0 (7 tokens computed) gets its token without a new block. Then request 1 (8 computed)
    # needs a block and takes it from request 0, which loses the token too.
    instance = replace(CHUNKED, kv_blocks=4, priority_order=True, d_s=1 / 2)
    result = run(instance, [0.0, 0.0], [3, 4], [6, 8], priority=[1, 0])
    # [0] 1 s, then four steps of two decodes, 1 + 2/2 each: 3, 5, 7, 9. Then request 1 alone, 1 + 1/2 each.
    assert result.requests[1].token_times == [1, 3, 5, 7, 9, 10.5, 12, 13.5]
    # Request 0 is back with 8 tokens, 2 blocks: it has to wait for request 1 (3 of 4) to leave.
    assert result.requests[0].token_times == [1, 3, 5, 7, 9, 14.5]


def test_those_behind_a_victim_sit_the_iteration_out() -> None:
    # [0] requests 0 and 1 (1 and 3 tokens, a block each). [1] request 2 (3 tokens) takes the third and last block.
    # [2] request 0 decodes, request 1 (5 tokens) needs a block and is the largest key: it goes, the pass ends, and
    #     request 2 sits out though its 4 tokens need no block.
    # [3] request 0 has left, request 2 decodes, request 1 is back with 5 tokens in the two free blocks.
    instance = replace(CHUNKED, kv_blocks=3, priority_order=True)
    result = run(instance, [0.0, 0.0, 0.5], [1, 3, 3], [3, 3, 2], priority=[0, 2, 0])
    assert result.requests[0].token_times == [1, 2, 3]
    assert result.requests[1].token_times == [1, 2, 4]
    assert result.requests[2].token_times == [2, 4]


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_end", "prompt", "cached_tokens"),
    [
        (10, 12, 8),  # 10 // 4 = 2 blocks belong to the node
        (10, 20, 8),
        (8, 9, 8),
        (8, 8, 4),  # one token must be computed: at most (8 - 1) // 4 blocks
        (3, 12, 0),  # no block ends in the node
    ],
)
def test_prefix_hit(node_end: int, prompt: int, cached_tokens: int) -> None:
    tree = {"node_parent": [-1], "node_end_tokens": [node_end], "prefix_node": [0, 0]}
    instance = replace(CHUNKED, prefix_cache=True, b_s=1.0)
    result = run(instance, [0.0, 100.0], [prompt, prompt], [1, 1], **tree)
    assert [request.cached_tokens for request in result.requests] == [0, cached_tokens]
    assert result.requests[1].finish_s == 100 + 1 + (prompt - cached_tokens)
    assert result.used_blocks_at(0, 100) == -(-prompt // 4)
    assert run(replace(instance, prefix_cache=False), [0.0, 9.0], [12, 12], [1, 1]).requests[1].cached_tokens == 0


def test_prefix_hit_on_blocks_scheduled_in_the_same_pass() -> None:
    tree = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0]}
    result = run(replace(CHUNKED, prefix_cache=True, c_s=1 / 8), [0.0, 0.0], [12, 10], [1, 1], **tree)
    assert result.requests[1].cached_tokens == 8
    # 12 tokens after 0: 72; 2 tokens after 8: 18. 1 + 90/8. Blocks: 3 of the first, 2 shared and 1 of the second.
    assert result.requests[1].finish_s == 12.25
    assert result.used_blocks_at(0, 0) == 3 + 1


def test_block_beyond_the_cap_of_a_pinned_node_is_computed_privately() -> None:
    # At 1 request 0 holds 9 tokens, 3 blocks, the first 2 of them the node's. Request 1 matches the first and computes
    # a second of its own.
    tree = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0]}
    result = run(replace(CHUNKED, prefix_cache=True), [0.0, 0.5], [8, 8], [9, 1], **tree)
    assert result.requests[1].cached_tokens == 4
    assert used_blocks(result)[:3] == [(0, 2), (1, 4), (2, 3)]


def test_match_ends_at_the_first_node_that_is_not_complete() -> None:
    # Request 0, the later turn, runs first and leaves nodes 0 (4 blocks) and 1 (2) resident. Request 1, whose own
    # node is node 0, has 8 prompt tokens: it matches 1 block, drops 3 and fills the second again. Request 2 finds two.
    tree = {"node_parent": [-1, 0], "node_end_tokens": [16, 24], "prefix_node": [1, -1, 1], "own_node": [-1, 0, -1]}
    result = run(replace(CHUNKED, prefix_cache=True), [0.0, 2.0, 2.5], [25, 8, 25], [1, 9, 1], **tree)
    assert [request.cached_tokens for request in result.requests] == [0, 4, 8]


def test_dropped_block_is_taken_before_any_cached_one() -> None:
    # Requests 0 and 1 fill all 4 blocks with nodes 0 and 1. Request 2 matches one block of node 1, drops the other and
    # takes it for its own second block: node 0, though used longer ago, is still complete for request 3.
    tree = {"node_parent": [-1, -1], "node_end_tokens": [8, 8], "prefix_node": [0, 1, 1, 0]}
    instance = replace(CHUNKED, prefix_cache=True, kv_blocks=4)
    result = run(instance, [0.0, 2.0, 4.0, 6.0], [8, 8, 8, 9], [1, 1, 1, 1], **tree)
    assert [request.cached_tokens for request in result.requests] == [0, 0, 4, 8]


def test_matched_blocks_do_not_count_as_free_for_the_rest() -> None:
    # At 2 request 1 takes 2 of the 3 never-used blocks. Request 2 matches the 2 free ones that request 0 left and needs
    # 2 more, but only 1 is free besides. Request 1 leaves at 6, having taken the third never-used block.
    tree = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, -1, 0]}
    result = run(replace(CHUNKED, prefix_cache=True, kv_blocks=5), [0.0, 2.0, 2.0], [8, 8, 16], [1, 4, 1], **tree)
    assert result.requests[2].admitted_s == 6
    assert result.requests[2].cached_tokens == 8


def test_request_that_fits_an_empty_instance_is_admitted_whatever_is_cached() -> None:
    # Both blocks of the memory hold the prompt, the match is capped at one: the other is dropped and computed again.
    tree = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0]}
    result = run(replace(CHUNKED, prefix_cache=True, kv_blocks=2), [0.0, 10.0], [8, 8], [1, 1], **tree)
    assert result.requests[1].finish_s == 11
    assert result.requests[1].cached_tokens == 4
    assert result.evicted_blocks == [0]


@pytest.mark.parametrize(("other_prompt", "cached_tokens"), [(4, 16), (8, 16), (12, 12), (16, 8), (20, 4), (24, 0)])
def test_last_block_of_the_deepest_node_is_evicted_first(other_prompt: int, cached_tokens: int) -> None:
    # Request 0 leaves 2 never-used blocks, then the two of node 1 and the two of node 0, last ones first. Request 1
    # takes from there.
    tree = {"node_parent": [-1, 0], "node_end_tokens": [8, 16], "prefix_node": [1, -1, 1]}
    instance = replace(CHUNKED, prefix_cache=True, kv_blocks=6)
    result = run(instance, [0.0, 2.0, 4.0], [16, other_prompt, 17], [1, 1, 1], **tree)
    assert result.requests[2].cached_tokens == cached_tokens
    assert result.evicted_blocks[0] >= (16 - cached_tokens) // 4


@pytest.mark.parametrize(("order", "cached_tokens"), [([0, 1], [0, 8]), ([0, 1, 0], [8, 0])])
def test_eviction_is_least_recently_used_across_nodes(order: list[int], cached_tokens: list[int]) -> None:
    # Two roots of 2 blocks in 5; a stranger of 3 blocks takes the free one and the node used longest ago.
    count = len(order)
    tree = {"node_parent": [-1, -1], "node_end_tokens": [8, 8]}
    for node in (0, 1):
        result = run(
            replace(CHUNKED, prefix_cache=True, kv_blocks=5, max_num_seqs=1),
            [2.0 * i for i in range(count + 2)],
            [*[9] * count, 12, 9],
            [1] * (count + 2),
            prefix_node=[*order, -1, node],
            **tree,
        )
        assert result.requests[-1].cached_tokens == cached_tokens[node]


def test_preempted_request_finds_its_own_node_again() -> None:
    # As for the private tail in test_preemption_recomputes_what_is_no_longer_resident: one of two blocks is left.
    tree = {"node_parent": [-1], "node_end_tokens": [10], "own_node": [-1, 0]}
    result = run(replace(CHUNKED, kv_blocks=4, prefix_cache=True), [0.0, 0.0], [4, 4], [8, 6], **tree)
    assert result.requests[1].cached_tokens == 4
    assert result.requests[1].token_times == [1, 2, 3, 4, 5, 9]


# --- the fleet --------------------------------------------------------------------------------------------------------


def test_closed_loop_turn_finds_what_its_predecessor_generated() -> None:
    tree = {"node_parent": [-1], "node_end_tokens": [10], "own_node": [0, -1], "prefix_node": [-1, 0]}
    session = {"parent": [-1, 0], "think_s": [NAN, 0.5]}
    result = run(replace(CHUNKED, prefix_cache=True), [1.0, NAN], [6, 12], [4, 2], **tree, **session)
    # Tokens at 2, 3, 4, 5. The last one's KV was never computed: 9 tokens, 2 full blocks.
    assert result.requests[0].finish_s == 5
    assert result.requests[1].arrival_s == 5.5
    assert result.requests[1].cached_tokens == 8
    assert result.requests[1].token_times == [6.5, 7.5]


@pytest.mark.parametrize(("other_output", "admitted_s"), [(1, 2.0), (5, 3.0)])
def test_turn_without_think_time_arrives_after_the_boundary_that_released_it(
    other_output: int, admitted_s: float
) -> None:
    # Request 0 is done at 2. If that leaves the instance idle the next turn gets a boundary at 2, else the one at 3.
    result = run(CHUNKED, [0.0, 0.0, NAN], [4, 4, 4], [2, other_output, 1], parent=[-1, -1, 0], think_s=[NAN, NAN, 0.0])
    assert result.requests[2].arrival_s == 2
    assert result.requests[2].admitted_s == admitted_s


def test_decisions_are_numbered_in_the_order_of_arrival() -> None:
    table = make_table(
        "by hand",
        [0.0, 0.0, NAN, 1.5],
        [4, 4, 4, 4],
        [1, 1, 1, 1],
        parent=[-1, -1, 0, -1],
        think_s=[NAN, NAN, 0.25, NAN],
    )
    asked: list[tuple[int, int]] = []

    def choose(decision: int, row: int) -> int:
        asked.append((decision, row))
        return decision % 2

    result = simulate(table, [CHUNKED, replace(CHUNKED, a_s=3.0)], choose)
    # Request 0 is done at 1 on instance 0; its next turn arrives at 1.25 and goes there. Request 3 goes to instance 1,
    # which is busy until 3.
    assert asked == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [request.instance for request in result.requests] == [0, 1, 0, 1]
    assert [request.finish_s for request in result.requests] == [1, 3, 2.25, 6]
    assert result.iterations == [2, 2]


# --- all of it together -----------------------------------------------------------------------------------------------


@given(clusters())
def test_every_request_gets_all_its_tokens(cluster: tuple[RequestTable, list[OracleInstance]]) -> None:
    """Conservation, order in time and the end of every run are asserted inside the oracle."""
    table, instances = cluster
    result = simulate(table, instances, lambda decision, row: decision % len(instances))
    for request in result.requests:
        assert request.generated == len(request.token_times) == table.output_tokens[request.row]
        assert np.all(np.diff(request.token_times) > 0)
        assert request.arrival_s <= request.dispatch_s <= request.admitted_s < request.first_token_s
        assert request.finish_s == request.token_times[-1]
    assert sum(result.preemptions) == sum(request.preemptions for request in result.requests)
    assert all(history[-1].used_blocks == 0 for history in result.history if history)
