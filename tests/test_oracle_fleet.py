"""Migration, lifecycle and failures in the oracle against cases worked out by hand from docs/model.md.

Unless a test says otherwise an iteration takes 1 s, 1.25 s while a migration goes on, a block of 4 tokens takes 0.5 s
to copy and a stage 0.25 s more. Request A, of 8 + 10 tokens, arrives at instance 0 at 0; at 2.5 the policy is asked.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from keyed_choice import KeyedChoice
from oracle import OracleInstance
from oracle_fleet import (
    ABSENT,
    DRAINING,
    FAILED,
    READY,
    REJECT,
    FleetResult,
    Migration,
    OracleFleet,
    Question,
    simulate_fleet,
)
from strategies import fleets, fleets_on_grid, pools, pools_on_grid, shared_caches, speculating

from fleetpilot.cluster.config import Failures, Pools, Rebalancing, Scaling
from fleetpilot.workloads.table import RequestTable, make_table

NAN = math.nan
CHUNKED = OracleInstance("chunked", kv_blocks=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, a_s=1.0)
MOVES = Rebalancing(
    interval_s=2.5,
    choice="last",
    round_trip_s=0.25,
    bandwidth_bytes_per_s=8.0,
    slowdown=1.25,
    max_stages=3,
    last_stage_blocks=1,
)
SCALES = Scaling(interval_s=1.0, first_s=2.0, ready=2, min_instances=1, start_up_s=1.5)


class Script:
    """Answers by kind, in turn: an instance, or None, as all answers when they are used up (instance 0 to dispatch)."""

    def __init__(self, **answers: list[int | None]):
        self.answers = {kind: list(given) for kind, given in answers.items()}
        self.asked: list[Question] = []

    def choose(self, question: Question) -> int | None:
        self.asked.append(question)
        left = self.answers.get(question.kind, [])
        return left.pop(0) if left else {"dispatch": 0}.get(question.kind)

    def times(self, kind: str) -> list[float]:
        return [question.time_s for question in self.asked if question.kind == kind]


def run(
    script: Script,
    arrival_s: list[float],
    prompt: list[int],
    output: list[int],
    instances: list[OracleInstance],
    columns: dict[str, object] | None = None,
    **options: object,
) -> FleetResult:
    table = make_table("by hand", arrival_s, prompt, output, **(columns or {}))
    return simulate_fleet(table, OracleFleet(tuple(instances), **options), script.choose, sample_interval_s=0.25)


def used(result: FleetResult, time_s: float) -> list[int]:
    return [blocks for at_s, _, blocks in result.samples if at_s == time_s]


def described(m: Migration) -> tuple[object, ...]:
    """What happened; the time of the stop is 0 if there was none."""
    stop_s = 0.0 if math.isnan(m.stop_s) else m.stop_s
    return (m.row, m.source, m.destination, m.start_s, stop_s, m.end_s, m.stages, m.blocks, m.outcome)


def move_a(
    output: int = 10, b: int = 0, instances: list[OracleInstance] | None = None, **options: object
) -> FleetResult:
    """A is asked to move to instance 1 at 2.5. There runs B if its prompt `b` is not 0; it wants 8 tokens."""
    script = Script(dispatch=[0, 1], source=[0], destination=[1])
    return run(
        script,
        [0.0, 0.0] if b else [0.0],
        [8, b] if b else [8],
        [output, 8] if b else [output],
        instances or [CHUNKED, CHUNKED],
        **{"rebalancing": MOVES, **options},
    )


# --- a migration that completes ---------------------------------------------------------------------------------------


def test_every_time_of_a_migration() -> None:
    result = move_a()
    # Tokens at 1, 2. At 2.5 A holds 8 + 1 tokens: 2 full blocks, 0.25 + 2 x 0.5 s of copies, to 3.75. Token 3 at 3; the
    # iteration that begins then takes 1.25 s. At 3.75 A holds 10 tokens, 3 blocks: 1 is left, so it stops at 4.25, with
    # token 4 and 11 tokens. 0.25 + 0.5 s for the rest. From 5 on it decodes on instance 1.
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 4.25, 5.0, 2, 3, "completed")]
    request = result.requests[0]
    assert request.token_times == [1, 2, 3, 4.25, 6, 7, 8, 9, 10, 11]
    assert (request.instance, request.migrations, request.restarts, request.preemptions) == (1, 1, 0, 0)
    assert (request.dispatch_s, request.admitted_s, request.finish_s, request.downtime_s) == (0, 0, 11, 0.75)
    assert result.iterations == [4, 6]
    # A sample sees what was reserved at its time, and no boundary.
    assert [used(result, t) for t in (2.25, 2.5, 4.25, 4.5, 5.0, 5.25, 6.25)] == [
        [3, 0],
        [3, 2],
        [3, 2],
        [3, 3],
        [0, 3],
        [0, 3],
        [0, 4],  # 8 + 5 tokens
    ]


def test_iterations_of_the_destination_are_slower_from_start_to_end() -> None:
    result = move_a(b=8)
    # Those that begin at 3 and 4.25: that at 4.25 runs until 5.5, when A, there since 5, joins.
    assert result.requests[1].token_times == [1, 2, 3, 4.25, 5.5, 6.5, 7.5, 8.5]
    assert result.requests[0].token_times == [1, 2, 3, 4.25, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5]


def test_longer_copies_take_more_stages() -> None:
    # 2 s a block. Stage 0: 2 blocks, 2.5 to 6.75. Boundaries 3, 4.25, 5.5, 6.75: at 6.75 (copies first) 12 tokens have
    # been computed, 3 blocks, 1 left: stop at 6.75, where it is 13 tokens, 4 blocks, 2 left. 6.75 + 0.25 + 4 = 11.
    result = move_a(rebalancing=replace(MOVES, bandwidth_bytes_per_s=2.0))
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 6.75, 11.0, 2, 4, "completed")]
    # 3 s a block: to 8.75; 8: 14 tokens, 4 blocks, 2 left, 3 full: stage 1 copies 1 to 12. 11.75: 17 tokens, 5 blocks,
    # 2 left > 1.
    stages = replace(MOVES, bandwidth_bytes_per_s=4 / 3, max_stages=4)
    result = move_a(output=30, rebalancing=stages)
    first = described(result.migrations[0])
    assert first[:4] == (0, 0, 1, 2.5)
    # Stage 2 copies the fourth block, 12 to 15.25. 14.25: 19 tokens, 5 blocks, 1 left: stop at 15.5, 20 tokens.
    assert first[4:] == (15.5, 18.75, 4, 5, "completed")


def test_destination_without_a_seat() -> None:
    one_seat = replace(CHUNKED, max_num_seqs=1)
    result = move_a(b=8, instances=[CHUNKED, one_seat])
    # B is done at 8.5. The blocks of A are there from 5 on.
    assert result.requests[1].finish_s == 8.5
    assert result.requests[0].token_times == [1, 2, 3, 4.25, 9.5, 10.5, 11.5, 12.5, 13.5, 14.5]
    assert result.requests[0].downtime_s == 8.5 - 4.25
    assert used(result, 6.0) == [0, 7]  # 3 of A, 8 + 6 tokens of B


def test_request_takes_the_seat_of_one_that_preempts_itself() -> None:
    # Of 7 blocks A holds 3. B, of 10 tokens, is alone in the batch and wants a fifth at 7.5, with token 7: it leaves,
    # and the scheduler, which has nothing, runs again with A.
    one_seat = replace(CHUNKED, kv_blocks=7, max_num_seqs=1)
    result = move_a(b=10, instances=[CHUNKED, one_seat])
    assert result.requests[0].token_times == [1, 2, 3, 4.25, 8.5, 9.5, 10.5, 11.5, 12.5, 13.5]
    assert result.requests[1].token_times == [1, 2, 3, 4.25, 5.5, 6.5, 7.5, 14.5]
    assert result.requests[1].preemptions == 1


def test_request_joins_before_one_that_is_partly_prefilled() -> None:
    # B's 60 tokens in chunks of 9; at 5.5 it has had 5: 0, 1, 2, 3, 4.25. A takes 1 of the budget from then on.
    chunks = replace(CHUNKED, max_num_seqs=8, max_num_batched_tokens=9)
    result = move_a(b=60, instances=[CHUNKED, chunks])
    assert result.requests[0].token_times[4:6] == [6.5, 7.5]
    # 45 done, then 8, then the last 7.
    assert result.requests[1].first_token_s == 7.5


def test_cache_of_source_and_destination() -> None:
    """A's prompt is a shared prefix of 8 tokens; so is that of C, at the source after the COMMIT, and D, where A is."""
    cached = replace(CHUNKED, prefix_cache=True)
    script = Script(dispatch=[0, 0, 1], source=[0], destination=[1])
    prefixes = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0, 0]}
    result = run(script, [0.0, 5.5, 6.5], [8, 12, 12], [10, 1, 1], [cached, cached], prefixes, rebalancing=MOVES)
    assert [request.cached_tokens for request in result.requests] == [0, 8, 8]
    assert used(result, 6.75) == [0, 4]
    assert used(result, 7.25) == [0, 5]  # D takes one block beyond the prefix that A holds


@pytest.mark.parametrize(("choice", "row"), [("last", 3), ("shortest", 1), ("longest", 2), ("lowest_priority", 3)])
def test_which_request_leaves(choice: str, row: int) -> None:
    script = Script(source=[0], destination=[1])
    columns = {"priority": [2, 0, 1, 2]}
    moves = replace(MOVES, choice=choice)
    result = run(script, [0.0] * 4, [9, 4, 9, 8], [8] * 4, [CHUNKED] * 2, columns, rebalancing=moves)
    assert [m.row for m in result.migrations] == [row]


def test_questions_of_a_tick() -> None:
    script = Script(dispatch=[0, 1, 2, 3], source=[1, 0, 2], destination=[None, 3])
    run(script, [0.0] * 4, [8] * 4, [4] * 4, [CHUNKED] * 4, rebalancing=MOVES)
    asked = [(q.kind, [i for i in range(4) if q.candidates[i]]) for q in script.asked if q.time_s == 2.5]
    assert asked == [
        ("source", [0, 1, 2, 3]),
        ("destination", [0, 2, 3]),  # none: 1 is not asked for again, but may be a destination
        ("source", [0, 2, 3]),
        ("destination", [1, 2, 3]),
        ("source", [2]),
        ("destination", [1]),
    ]


# --- migrations that do not ------------------------------------------------------------------------------------------


def test_no_space_at_the_start() -> None:
    # B holds 17 + 1 tokens at 2.5: all 5 blocks.
    result = move_a(b=16, instances=[CHUNKED, replace(CHUNKED, kv_blocks=6, max_num_batched_tokens=20)])
    assert used(result, 2.25) == [3, 5]
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 2.5, 0, 0, "no_space")]
    assert result.requests[0].token_times == list(range(1, 11))
    assert result.requests[1].token_times == list(range(1, 9))


def test_no_space_at_the_stop() -> None:
    # B, of 10 tokens, takes the block of its 13th at 3. Of 6 blocks none is left at 4.25: A stays, both at full speed.
    result = move_a(b=10, instances=[CHUNKED, replace(CHUNKED, kv_blocks=6)])
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 4.25, 1, 2, "no_space")]
    assert result.requests[0].token_times == [1, 2, 3, 4.25, 5.25, 6.25, 7.25, 8.25, 9.25, 10.25]
    assert result.requests[1].token_times == [1, 2, 3, 4.25, 5.25, 6.25, 7.25, 8.25]
    assert [used(result, t)[1] for t in (2.25, 2.5, 3.25, 4.25, 4.5)] == [3, 5, 6, 6, 4]


@pytest.mark.parametrize(("output", "end_s"), [(3, 3.75), (4, 4.25)])
def test_finished(output: int, end_s: float) -> None:
    """At 3, which the source says at the end of the stage, or at the boundary at which it was to stop."""
    # C keeps instance 0 busy.
    script = Script(source=[0], destination=[1])
    moves = replace(MOVES, choice="shortest")
    result = run(script, [0.0, 0.0], [8, 9], [output, 10], [CHUNKED] * 2, rebalancing=moves)
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, end_s, 1, 2, "finished")]
    assert used(result, 3.5) == [3 + 3 * (output == 4), 2]
    assert used(result, end_s + 0.25)[1] == 0


def test_preempted() -> None:
    # 4 s a block: stage 0 from 2.5 to 6.75. At 5.5 the first request wants a block for its 13th token: C gives its 2.
    script = Script(source=[0], destination=[1])
    small = replace(CHUNKED, kv_blocks=5)
    moves = replace(MOVES, bandwidth_bytes_per_s=1.0)
    result = run(script, [0.0, 0.0], [8, 4], [8, 8], [small, CHUNKED], rebalancing=moves)
    assert [described(m) for m in result.migrations] == [(1, 0, 1, 2.5, 0.0, 6.75, 1, 1, "preempted")]
    assert result.requests[0].token_times == [1, 2, 3, 4.25, 5.5, 6.75, 7.75, 8.75]
    assert result.requests[1].token_times == [1, 2, 3, 4.25, 5.5, 9.75, 10.75, 11.75]
    assert used(result, 6.5)[1] == 1
    assert used(result, 6.75)[1] == 0


@pytest.mark.parametrize(("max_stages", "end_s", "blocks"), [(2, 10.75, 2), (3, 19.0, 4)])
def test_too_long(max_stages: int, end_s: float, blocks: int) -> None:
    # 4 s a block. Stage 0: 8.25 s; 16 tokens then, 2 blocks left. Stage 1: 8.25 s; 22 tokens then, 2 blocks left.
    result = move_a(output=25, rebalancing=replace(MOVES, bandwidth_bytes_per_s=1.0, max_stages=max_stages))
    assert described(result.migrations[0]) == (0, 0, 1, 2.5, 0.0, end_s, max_stages - 1, blocks, "too_long")


@pytest.mark.parametrize(("failure_s", "stop_s", "stages", "generated"), [(3.5, 0.0, 1, 3), (4.5, 4.25, 2, 4)])
def test_source_dies(failure_s: float, stop_s: float, stages: int, generated: int) -> None:
    failures = Failures(at=((failure_s, 0),), repair_s=100.0)
    result = move_a(failures=failures)
    died = (0, 0, 1, 2.5, stop_s, failure_s, stages, 1 + stages, "source_died")
    assert [described(m) for m in result.migrations] == [died]
    # It begins again on the other: the prefill of 8 tokens and what it had generated gives the next.
    tokens = [1, 2, 3, 4.25][:generated]
    assert result.requests[0].token_times == tokens + [failure_s + i for i in range(1, 11 - generated)]
    assert result.requests[0].restarts == 1
    assert used(result, failure_s + 0.25) == [0, 3]
    result = move_a(failures=replace(failures, requests="fail"))
    assert result.requests[0].failed
    assert result.requests[0].token_times == tokens
    assert result.end_s == failure_s
    assert result.alive_s == [failure_s, failure_s]


@pytest.mark.parametrize(("failure_s", "stop_s", "stages"), [(3.5, 0.0, 1), (4.5, 4.25, 2)])
def test_destination_dies(failure_s: float, stop_s: float, stages: int) -> None:
    """While A decodes, or has stopped: then it rejoins the idle source at once."""
    result = move_a(failures=Failures(at=((failure_s, 1),), repair_s=1.0))
    died = (0, 0, 1, 2.5, stop_s, failure_s, stages, 1 + stages, "destination_died")
    assert described(result.migrations[0]) == died
    rejoined_s = failure_s if stages == 2 else 4.25
    assert result.requests[0].token_times[3:6] == [4.25, rejoined_s + 1, rejoined_s + 2]
    assert used(result, failure_s) == [3, 0]
    assert result.requests[0].restarts == 0
    assert result.requests[0].downtime_s == (0.25 if stages == 2 else 0)


def test_idle_instance_tries_its_head_when_a_reservation_ends() -> None:
    # Instance 1 has 5 blocks; 2 are reserved from 2.5 to 3.75, when A turns out to have finished at 3. B wants 4 at 3.
    script = Script(dispatch=[0, 1], source=[0], destination=[1])
    small = replace(CHUNKED, kv_blocks=5)
    result = run(script, [0.0, 3.0], [8, 16], [3, 1], [small] * 2, rebalancing=MOVES)
    assert result.requests[1].token_times == [4.75]


def test_waiting_request_moves_at_once() -> None:
    # A's 40 tokens in chunks of 9: no decode until 5. W waits behind it for the only seat, until it moves.
    script = Script(source=[0], destination=[1], scale=[0])
    one_seat = replace(CHUNKED, max_num_seqs=1, max_num_batched_tokens=9)
    result = run(script, [0.0, 0.0], [40, 8], [2, 2], [one_seat] * 2, rebalancing=MOVES, scaling=SCALES)
    assert [described(m) for m in result.migrations] == [(1, 0, 1, 2.5, 0.0, 2.5, 0, 0, "moved")]
    assert result.requests[1].token_times == [3.5, 4.5]
    assert result.requests[1].migrations == 1
    assert result.alive_s == [6.0, 6.0]


# --- protocol vllm ----------------------------------------------------------------------------------------------------

STOCK = replace(CHUNKED, prefix_cache=True)
ASKS = replace(MOVES, protocol="vllm")


def ask_a(
    output: int = 10, b: int = 0, instances: tuple[OracleInstance, ...] = (STOCK, STOCK), **options: object
) -> FleetResult:
    return move_a(output, b, list(instances), **{"rebalancing": ASKS, **options})


def test_every_time_of_a_migration_of_stock_engines() -> None:
    result = ask_a()
    # Tokens at 1, 2. The probe is in the iteration from 3 to 4.25. Then A has 4 tokens and 8 + 3 computed, 2 full
    # blocks: copied to 5.5, where 1 is left, so it stops at 5.5, with token 5. It is admitted at 5.75, for 13 tokens, 8
    # of them there.
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 5.5, 5.75, 1, 2, "completed")]
    request = result.requests[0]
    assert request.token_times == [1, 2, 3, 4.25, 5.5, 6.75, 7.75, 8.75, 9.75, 10.75]
    assert (request.instance, request.migrations, request.restarts, request.preemptions) == (1, 1, 0, 0)
    assert (request.dispatch_s, request.admitted_s, request.downtime_s, request.cached_tokens) == (0, 0, 0.25, 8)
    assert result.iterations == [5, 5]
    assert [used(result, t) for t in (4.25, 4.5, 5.25, 5.5, 5.75, 6.0)] == [
        [3, 0],
        [3, 2],
        [3, 2],
        [3, 0],  # cached
        [0, 0],
        [0, 4],
    ]


def test_tokens_of_the_probe_and_of_the_copy() -> None:
    # A prefill of 8 tokens takes 1 + 32 / 4 s. The probe reads 8 + 1 tokens: 1 + 9.5 / 4 s, from 10. The copy is there
    # at 13.375 + 1.25 and costs B's iteration from 15 on 8.5 / 4 s. A stops at 15.375 and gets in when that one ends.
    costly = replace(STOCK, c_s=0.25)
    result = ask_a(b=8, instances=(costly, costly), rebalancing=replace(ASKS, interval_s=9.5, slowdown=1.0))
    assert described(result.migrations[0]) == (0, 0, 1, 9.5, 15.375, 15.625, 1, 2, "completed")
    assert result.requests[0].token_times[:5] == [9, 10, 13.375, 14.375, 15.375]
    assert result.requests[1].token_times == [9, 10, 11, 12, 13, 14, 15, 18.125]
    # 5 tokens behind 8.
    assert result.requests[0].token_times[5] == 18.125 + 1 + 5 * 10.5 / 4
    assert result.requests[0].downtime_s == 18.125 - 15.375


def test_next_stage_finds_what_was_copied() -> None:
    # 2 s a block, the first two to 8.5. Then 14 tokens, 4 blocks: 2 left. Probe at 9.25. At 10.5 16 tokens: 2 blocks
    # more, to 14.75. Then 19 tokens, 5 blocks, 1 left; stop at 15.5.
    result = ask_a(output=30, rebalancing=replace(ASKS, bandwidth_bytes_per_s=2.0))
    assert described(result.migrations[0]) == (0, 0, 1, 2.5, 15.5, 15.75, 2, 4, "completed")
    assert result.requests[0].cached_tokens == 16
    assert [used(result, t)[1] for t in (8.25, 8.5, 10.5, 10.75, 14.75, 16.0)] == [2, 0, 0, 4, 0, 6]


def test_what_the_destination_has_is_not_copied() -> None:
    # Instance 1 has the first 8 tokens of A, whose first 12 are prompt, from 1 on. Probe at 4; 3 full blocks at 5.25;
    # one is copied, to 6.
    script = Script(dispatch=[1, 0], source=[0], destination=[1])
    prefixes = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0]}
    moves = replace(ASKS, interval_s=3.5)
    result = run(script, [0.0, 1.0], [12, 12], [1, 10], [STOCK] * 2, prefixes, rebalancing=moves)
    assert [described(m) for m in result.migrations] == [(1, 0, 1, 3.5, 6.5, 6.75, 1, 1, "completed")]
    assert result.requests[1].cached_tokens == 12
    assert result.requests[1].token_times == [2, 3, 4, 5.25, 6.5, 7.75, 8.75, 9.75, 10.75, 11.75]


def test_too_long_for_stock_engines() -> None:
    # At 8.5, as above. B then takes all 6 blocks of the destination; what was copied is not worth an eviction.
    script = Script(dispatch=[0, 1], source=[0], destination=[1])
    moves = replace(ASKS, bandwidth_bytes_per_s=2.0, max_stages=2)
    small = replace(STOCK, kv_blocks=6)
    result = run(script, [0.0, 9.0], [8, 21], [15, 2], [STOCK, small], rebalancing=moves)
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 8.5, 1, 2, "too_long")]
    assert used(result, 9.25)[1] == 6
    assert result.evicted_blocks == [0, 0]


@pytest.mark.parametrize(
    ("output", "end_s", "stages"),
    [(3, 3.0, 0), (4, 4.25, 0), (5, 5.5, 1)],
    ids=["before the probe", "before the copy", "before the stop"],
)
def test_finished_on_stock_engines(output: int, end_s: float, stages: int) -> None:
    script = Script(source=[0], destination=[1])  # C keeps instance 0 busy
    moves = replace(ASKS, choice="shortest")
    result = run(script, [0.0, 0.0], [8, 9], [output, 10], [STOCK] * 2, rebalancing=moves)
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, end_s, stages, 2 * stages, "finished")]


def test_finished_while_it_is_copied() -> None:
    # 2 s a block.
    script = Script(source=[0], destination=[1])
    moves = replace(ASKS, choice="shortest", bandwidth_bytes_per_s=2.0)
    result = run(script, [0.0, 0.0], [8, 9], [6, 10], [STOCK] * 2, rebalancing=moves)
    assert result.requests[0].finish_s == 6.75
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 8.5, 1, 2, "finished")]
    assert [used(result, t)[1] for t in (8.25, 8.5)] == [2, 0]


def test_no_seat_for_the_probe() -> None:
    result = ask_a(instances=(replace(STOCK, max_num_seqs=1), STOCK))
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 3.0, 0, 0, "no_space")]
    assert result.requests[0].token_times == list(range(1, 11))


def test_no_space_for_the_copy() -> None:
    # B, of 10 tokens, holds 4 of 5 blocks at 4.25.
    result = ask_a(b=10, instances=(STOCK, replace(STOCK, kv_blocks=5)))
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 4.25, 0, 0, "no_space")]


def test_source_dies_while_it_is_read() -> None:
    result = ask_a(failures=Failures(at=((5.0, 0),), repair_s=100.0))
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 0.0, 5.0, 1, 2, "source_died")]
    assert result.requests[0].cached_tokens == 0
    assert result.requests[0].token_times[3:5] == [4.25, 6]


@pytest.mark.parametrize("died", [0, 1])
def test_failures_while_nobody_has_the_request(died: int) -> None:
    # On its way from 5.5 to 5.75. The policy's next choice is instance 0.
    script = Script(dispatch=[0, 0], source=[0], destination=[1])
    failures = Failures(at=((5.625, died),), repair_s=100.0)
    result = run(script, [0.0], [8], [10], [STOCK] * 2, rebalancing=ASKS, failures=failures)
    end_s, outcome = (5.75, "completed") if died == 0 else (5.625, "destination_died")
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 5.5, end_s, 1, 2, outcome)]
    request = result.requests[0]
    assert (request.instance, request.restarts, request.downtime_s) == ((1, 0, 0.25) if died == 0 else (0, 1, 0))
    assert request.token_times[4:6] == [5.5, end_s + 1]


def test_drain_deadline_while_nobody_has_the_request() -> None:
    """The source is absent when the migration has ended."""
    script = Script(scale=[0], source=[0], destination=[1])
    scaling = replace(SCALES, drain_deadline_s=3.625)
    result = run(script, [0.0], [8], [10], [STOCK] * 2, rebalancing=ASKS, scaling=scaling)
    assert [(m.end_s, m.outcome) for m in result.migrations] == [(5.75, "completed")]
    assert result.requests[0].restarts == 0
    assert result.alive_s[0] == 5.75


# --- lifecycle -------------------------------------------------------------------------------------------------------


def test_start_up() -> None:
    script = Script(dispatch=[0, 1], scale=[1])
    result = run(script, [0.0, 3.75], [8, 8], [2, 2], [CHUNKED] * 2, scaling=replace(SCALES, ready=1))
    # One of two may be drained at 4 and at 5; none starts a second time.
    assert script.times("scale") == [2.0, 4.0, 5.0]
    assert [q.candidates for q in script.asked if q.kind == "scale"] == [[False, True], [True, True], [True, True]]
    assert [q.candidates for q in script.asked if q.kind == "dispatch"] == [[True, False], [True, True]]
    assert result.requests[1].finish_s == 5.75
    assert result.alive_s == [5.75, 3.75]


def test_absent_candidates_are_the_first_of_their_kind_while_there_may_be_more() -> None:
    script = Script(scale=[1])
    other = replace(CHUNKED, a_s=2.0)
    scaling = replace(SCALES, ready=1, max_instances=2)
    run(script, [0.0], [8], [3], [CHUNKED, CHUNKED, CHUNKED, other], scaling=scaling)
    assert [q.candidates for q in script.asked if q.kind == "scale"] == [[False, True, False, True]]


def test_drain_without_migration() -> None:
    script = Script(dispatch=[0, 1], scale=[0])
    result = run(script, [0.0, 3.0], [8, 8], [4, 4], [CHUNKED] * 2, scaling=SCALES)
    # Draining at 2, absent at 4. The second request may not go there.
    assert script.asked[-1].kind == "scale"
    assert [q.candidates for q in script.asked if q.kind == "dispatch"] == [[True, True], [False, True]]
    assert result.requests[0].token_times == [1, 2, 3, 4]
    assert result.alive_s == [4.0, 7.0]
    assert [q.state[0] for q in script.asked if q.time_s == 5.0] == [ABSENT]


def test_drain_with_migration() -> None:
    # As in the first test of this file. Absent once A has left.
    script = Script(dispatch=[0], scale=[0], source=[0], destination=[1])
    result = run(script, [0.0], [8], [10], [CHUNKED] * 2, rebalancing=MOVES, scaling=SCALES)
    assert result.requests[0].finish_s == 11
    assert result.alive_s == [5.0, 11.0]


def test_destination_that_drains_is_absent_when_the_migration_ends_at_a_boundary_of_the_source() -> None:
    # A is done at 4.25, at which it was to stop; the other request runs on.
    script = Script(scale=[1], source=[0], destination=[1])
    moves, scaling = replace(MOVES, choice="shortest"), replace(SCALES, first_s=3.0)
    result = run(script, [0.0, 0.0], [8, 9], [4, 10], [CHUNKED] * 2, rebalancing=moves, scaling=scaling)
    assert [(m.end_s, m.outcome) for m in result.migrations] == [(4.25, "finished")]
    assert result.alive_s == [10.25, 4.25]


def test_idle_instance_that_drains_is_absent_at_once() -> None:
    script = Script(scale=[1])
    result = run(script, [0.0], [8], [4], [CHUNKED] * 2, scaling=SCALES)
    assert result.alive_s == [4.0, 2.0]
    assert [q.candidates for q in script.asked if q.time_s == 2.0] == [[True, True]]  # a slot is chosen once in a tick


def test_what_drains_loses_its_cache() -> None:
    cached = replace(CHUNKED, prefix_cache=True)
    script = Script(dispatch=[0, 0], scale=[0, 0])
    prefixes = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0]}
    scaling = replace(SCALES, start_up_s=1.0)
    result = run(script, [0.0, 5.0], [8, 12], [1, 1], [cached] * 2, prefixes, scaling=scaling)
    assert result.requests[1].cached_tokens == 0
    assert result.alive_s == [2.0 + 3.0, 6.0]  # absent at 2, started at 3


def test_cancelled_drain() -> None:
    script = Script(dispatch=[0, 0], scale=[0, 0])
    scaling = replace(SCALES, drain_deadline_s=1.5)
    result = run(script, [0.0, 3.25], [8, 8], [4, 4], [CHUNKED] * 2, scaling=scaling)
    # Of the only one that is ready none may be drained.
    assert [(q.time_s, q.candidates) for q in script.asked if q.kind == "scale"][:3] == [
        (2.0, [True, True]),
        (3.0, [True, False]),
        (3.0, [False, True]),
    ]
    assert [q.state for q in script.asked if q.kind == "dispatch"][1] == [READY, READY]
    assert [request.token_times for request in result.requests] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert result.alive_s == [8.0, 8.0]
    assert result.requests[0].restarts == 0


def test_deadline() -> None:
    one_seat = replace(CHUNKED, max_num_seqs=1)
    script = Script(dispatch=[0, 0, 1, 1], scale=[0])
    scaling = replace(SCALES, drain_deadline_s=1.5)
    result = run(script, [0.0, 0.0], [8, 8], [5, 1], [one_seat] * 2, scaling=scaling)
    # 3.5: A, with 3 tokens, then the one that waits. A's next two need a prefill of 11 tokens and a decode.
    assert script.times("dispatch") == [0.0, 0.0, 3.5, 3.5]
    assert [request.token_times for request in result.requests] == [[1, 2, 3, 4.5, 5.5], [6.5]]
    assert [request.restarts for request in result.requests] == [1, 1]
    assert [request.dispatch_s for request in result.requests] == [3.5, 3.5]
    assert result.alive_s == [3.5, 6.5]


@pytest.mark.parametrize(("source", "outcome"), [(0, "source_died"), (1, "destination_died")])
def test_deadline_ends_migrations(source: int, outcome: str) -> None:
    script = Script(dispatch=[source, 1], source=[source], destination=[1 - source], scale=[0])
    # At 2.5 instance 0 drains already, and is no destination; so in the other case it drains at 3.
    scaling = replace(SCALES, first_s=2.0 + source, drain_deadline_s=1.5 - source)
    result = run(script, [0.0], [8], [10], [CHUNKED] * 2, rebalancing=MOVES, scaling=scaling)
    assert [(m.end_s, m.outcome) for m in result.migrations] == [(3.5, outcome)]
    assert result.requests[0].restarts == 1 - source
    assert result.alive_s[0] == 3.5


# --- failures --------------------------------------------------------------------------------------------------------


def test_failure_and_restart() -> None:
    script = Script(dispatch=[0, 0, 1, 1])
    one_seat = replace(CHUNKED, max_num_seqs=1)
    failures = Failures(at=((3.0, 0),), repair_s=2.0)
    result = run(script, [0.0, 0.0], [8, 8], [5, 1], [one_seat] * 2, failures=failures)
    # The iteration that would end at 3 is lost.
    assert [request.token_times for request in result.requests] == [[1, 2, 4, 5, 6], [7]]
    assert [request.restarts for request in result.requests] == [1, 1]
    assert result.iterations == [2, 4]
    assert result.alive_s == [3.0 + 2.0, 7.0]


def test_failure_for_good() -> None:
    """Its requests have failed, and the turns that they would have released never arrive."""
    columns = {"parent": [-1, -1, 0], "think_s": [NAN, NAN, 1.0]}
    failures = Failures(at=((2.5, 0),), repair_s=math.inf, requests="fail")
    result = run(Script(dispatch=[0, 1]), [0.0, 0.0, NAN], [8] * 3, [5] * 3, [CHUNKED] * 2, columns, failures=failures)
    assert [request.failed for request in result.requests] == [True, False, False]
    assert [request.generated for request in result.requests] == [2, 5, 0]
    assert math.isnan(result.requests[2].arrival_s)
    assert result.alive_s == [2.5, 5.0]


@pytest.mark.parametrize(("most", "failed"), [(1, True), (2, False)])
def test_a_request_that_loses_its_instance_too_often_fails(most: int, failed: bool) -> None:
    failures = Failures(at=((1.5, 0), (3.5, 1)), repair_s=1.0, max_restarts=most)
    result = run(Script(dispatch=[0, 1, 0]), [0.0], [8], [5], [CHUNKED] * 2, failures=failures)
    # 1 token on instance 0, 2 on the other.
    assert result.requests[0].token_times == [1, 2.5] + ([] if failed else [4.5, 5.5, 6.5])
    assert (result.requests[0].restarts, result.requests[0].failed) == (2, failed)


def test_announced_failure() -> None:
    script = Script(dispatch=[0, 1, 1])
    failures = Failures(at=((3.0, 0),), notice_s=1.0, repair_s=2.0)
    result = run(script, [0.0, 2.0, 5.5], [8, 8, 8], [5, 1, 1], [CHUNKED] * 2, failures=failures)
    asked = [(q.time_s, q.candidates, q.state[0]) for q in script.asked]
    # At 2 the notice comes before the arrival. A has 2 tokens at 3, and starts again at once.
    assert asked == [
        (0.0, [True, True], READY),
        (2.0, [False, True], DRAINING),
        (3.0, [False, True], FAILED),
        (5.5, [True, True], READY),
    ]
    assert result.requests[0].token_times == [1, 2, 4, 5, 6]
    assert [request.restarts for request in result.requests] == [1, 0, 0]
    assert result.alive_s == [3.0 + 1.5, 6.5]


def test_a_notice_from_the_start_on_and_an_instance_that_waits_for_its_failure() -> None:
    # Instance 0 never gets a request, and is billed until it fails.
    script = Script(dispatch=[1, 1])
    failures = Failures(at=((2.0, 0),), notice_s=5.0, repair_s=math.inf)
    result = run(script, [0.0, 4.0], [8, 8], [1, 1], [CHUNKED] * 2, failures=failures)
    assert [q.candidates for q in script.asked] == [[False, True], [False, True]]
    assert result.alive_s == [2.0, 5.0]


def test_requests_leave_an_instance_under_notice() -> None:
    # As in `move_a`: announced at 2.25, A leaves at 4.25, before the failure.
    result = move_a(failures=Failures(at=((6.0, 0),), notice_s=3.75, repair_s=100.0))
    assert [described(m) for m in result.migrations] == [(0, 0, 1, 2.5, 4.25, 5.0, 2, 3, "completed")]
    assert result.requests[0].restarts == 0
    assert result.alive_s[0] == 6.0
    assert move_a(failures=Failures(at=((6.0, 1),), notice_s=3.75)).migrations == []  # no destination


def test_what_is_under_notice_is_not_scaled_and_drains_when_it_is_ready() -> None:
    # Instance 1 is absent and under notice from 1.5 to 3.5; instance 0 is from 0.25 until it fails at
    # 2.25, and again from 3 to 5: it drains when it is ready again at 3.25.
    script = Script(dispatch=[0, 0])
    failures = Failures(at=((2.25, 0), (3.5, 1), (5.0, 0)), notice_s=2.0, repair_s=1.0)
    result = run(script, [0.0, 6.5], [8, 8], [1, 1], [CHUNKED] * 2, scaling=replace(SCALES, ready=1), failures=failures)
    assert [(q.time_s, q.candidates) for q in script.asked if q.kind == "scale"] == [
        (4.0, [False, True]),
        (5.0, [False, True]),
        (6.0, [False, True]),
        (7.0, [False, True]),
    ]
    assert [q.state[0] for q in script.asked if q.kind == "scale"] == [DRAINING, FAILED, READY, READY]
    assert result.alive_s == [2.25 + 1.75 + 1.5, 0.0]


@pytest.mark.parametrize("max_hold_s", [1.0, 100.0])
def test_nobody_is_ready(max_hold_s: float) -> None:
    failures = Failures(at=((0.5, 0),), repair_s=2.0)
    script = Script()
    result = run(script, [0.0], [8], [2], [CHUNKED], failures=failures, hold_interval_s=0.75, max_hold_s=max_hold_s)
    if max_hold_s == 1.0:
        assert result.requests[0].failed
        assert result.end_s == 1.5
    else:
        assert result.requests[0].token_times == [3.75, 4.75]
    assert script.times("dispatch") == [0.0] if max_hold_s == 1.0 else [0.0, 2.75]


def test_failures_of_what_is_not_ready() -> None:
    # Instance 1 starts from 2 to 3.5 and fails at 3; it fails again at 4, which changes nothing; ready from 5 on, it
    # is billed. Instance 2 is absent.
    failures = Failures(at=((3.0, 1), (4.0, 1), (1.0, 2)), repair_s=2.0)
    scaling = replace(SCALES, ready=1, max_instances=2)
    other = replace(CHUNKED, a_s=0.5)
    result = run(Script(scale=[1]), [0.0], [8], [8], [CHUNKED, CHUNKED, other], scaling=scaling, failures=failures)
    assert result.alive_s == [8.0, 1.0 + 3.0, 0.0]


# --- prefill and decode pools ----------------------------------------------------------------------------------------

PAIR = Pools(("prefill", "decode"), round_trip_s=0.25, bandwidth_bytes_per_s=8.0)  # 0.5 s a block


def hand_over(
    pools: Pools = PAIR,
    arrival_s: list[float] | None = None,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    script: Script | None = None,
    instances: list[OracleInstance] | None = None,
    columns: dict[str, object] | None = None,
    **options: object,
) -> FleetResult:
    """Requests, by default one of 8 + 4 tokens at 0, that are prefilled by instance 0 and decoded by instance 1."""
    arrival_s = arrival_s or [0.0]
    script = script or Script(prefill=[0] * len(arrival_s), decode=[1] * len(arrival_s))
    prompt, output = prompt or [8] * len(arrival_s), output or [4] * len(arrival_s)
    instances = instances or [CHUNKED] * len(pools.roles)
    return run(script, arrival_s, prompt, output, instances, columns, pools=pools, **options)


def test_every_time_of_a_hand_over() -> None:
    # Prefill to 1. Of the first 7 tokens 2 blocks are copied, 0.25 + 2 x 0.5 s, to 2.25; then the eighth is computed.
    result = hand_over()
    request = result.requests[0]
    assert request.token_times == [3.25, 4.25, 5.25, 6.25]
    assert (request.prefill_instance, request.instance, request.handover_s) == (0, 1, 1.25)
    assert (request.dispatch_s, request.admitted_s, request.cached_tokens) == (0, 0, 0)
    assert result.iterations == [1, 4]
    assert [used(result, t) for t in (0.5, 1.0, 1.25, 2.0, 2.25, 3.5)] == [
        [2, 0],
        [2, 0],
        [2, 2],
        [2, 2],
        [0, 2],
        [0, 3],
    ]


def test_first_token_of_the_prefill() -> None:
    # 8 tokens are copied, 2 blocks; the ninth takes a third.
    result = hand_over(replace(PAIR, first_token_from="prefill"))
    assert result.requests[0].token_times == [1, 3.25, 4.25, 5.25]
    assert used(result, 1.25) == [2, 3]


@pytest.mark.parametrize(("first_token_from", "instance", "token_s"), [("prefill", 0, 1.0), ("decode", 1, 3.25)])
def test_answer_of_one_token(first_token_from: str, instance: int, token_s: float) -> None:
    result = hand_over(replace(PAIR, first_token_from=first_token_from), output=[1])
    assert result.requests[0].token_times == [token_s]
    assert result.requests[0].instance == instance


@pytest.mark.parametrize("decode_choice", ["at_admission", "after_prefill"])
def test_questions_of_pools(decode_choice: str) -> None:
    roles = ("prefill", "decode", "mixed")
    script = Script(prefill=[None, 0, 2], decode=[1])
    result = hand_over(replace(PAIR, roles=roles, decode_choice=decode_choice), [0.0, 0.0625], script=script)
    decode_s = 0.0625 if decode_choice == "at_admission" else 1.0625
    asked = [(q.time_s, q.kind, q.candidates, q.may_hold, q.origin, q.in_flight) for q in script.asked]
    nobody, all_three = [False] * 3, [True, False, True]
    # The first is held and asked about again at 0.1.
    assert sorted(asked, key=lambda q: q[0])[:2] == [
        (0.0, "prefill", all_three, True, nobody, [0, 0, 0]),
        (0.0625, "prefill", all_three, True, nobody, [0, 0, 0]),
    ]
    decode = [q for q in asked if q[1] == "decode"]
    in_flight = [0, 0, 0] if decode_choice == "at_admission" else [0, 0, 1]  # the other one, mixed from 0.1 on
    assert decode == [(decode_s, "decode", [False, True, True], decode_s < 1, [True, False, False], in_flight)]
    assert [request.prefill_instance for request in result.requests] == [-1, 0]
    assert [request.instance for request in result.requests] == [2, 1]


def test_who_counts_a_request() -> None:
    """The prefill instance until its prefill is done, the decode instance from the decision on."""
    script = Script(prefill=[0, 0, 0], decode=[1, 1, 1])
    hand_over(arrival_s=[0.0, 0.5, 3.75], script=script)
    second, third = (q for q in script.asked if q.kind == "prefill" and q.time_s > 0)
    assert (second.in_flight, second.unstarted, second.unstarted_prompt_tokens) == ([1, 1], [1, 1], [8, 8])
    assert second.predicted_output_tokens == [0, 4]
    # A has its first token since 3.5, B is in the batch.
    assert (third.in_flight, third.unstarted, third.started_prompt_tokens) == ([0, 2], [0, 1], [0, 8])


def test_copies_share_their_links() -> None:
    # A and B are prefilled in one batch, and pulled by one instance: each at 4 bytes/s.
    together = hand_over(arrival_s=[0.0, 0.0])
    assert [request.token_times[0] for request in together.requests] == [4.25, 4.25]
    # By two instances: they share the way out.
    roles = ("prefill", "decode", "decode")
    apart = hand_over(replace(PAIR, roles=roles), [0.0, 0.0], script=Script(prefill=[0, 0], decode=[1, 2]))
    assert [request.token_times[0] for request in apart.requests] == [4.25, 4.25]
    # From two to two: they share nothing.
    roles = ("prefill", "decode", "prefill", "decode")
    alone = hand_over(replace(PAIR, roles=roles), [0.0, 0.0], script=Script(prefill=[0, 2], decode=[1, 3]))
    assert [request.token_times[0] for request in alone.requests] == [3.25, 3.25]
    # B's copy begins at 2, where A's round trip is over and 2 of its 8 bytes are left: they go at 4 bytes/s, to 2.5. B
    # has waited its round trip by 2.25 and has 7 bytes left at 2.5: to 3.375. A joins at 2.5, so B joins at 3.5.
    late = hand_over(arrival_s=[0.0, 1.0])
    assert [request.token_times[0] for request in late.requests] == [3.5, 4.5]


def test_migrations_share_the_links() -> None:
    # Of A, decoding on instance 1, 2 blocks are copied to instance 2 from 5 on. B, prefilled to 5, is pulled there at
    # the same time: both copies take 0.25 + 2 x 1 s, to 7.25. A stops at 7.75, the rest takes 0.25 + 0.5 s. B's
    # only iteration, that of the destination of a migration, takes 1.25 s.
    roles, moves = ("prefill", "decode", "decode"), replace(MOVES, interval_s=5.0)
    script = Script(prefill=[0, 0], decode=[1, 2], source=[1], destination=[2])
    result = hand_over(replace(PAIR, roles=roles), [0.0, 4.0], output=[9, 1], script=script, rebalancing=moves)
    assert [described(m) for m in result.migrations] == [(0, 1, 2, 5.0, 7.75, 8.5, 2, 3, "completed")]
    assert result.requests[0].token_times[:6] == [3.25, 4.25, 5.25, 6.5, 7.75, 9.5]
    assert result.requests[1].token_times == [8.5]


def test_what_the_decode_instance_has_is_not_copied() -> None:
    cached = replace(CHUNKED, prefix_cache=True)
    prefixes = {"node_parent": [-1], "node_end_tokens": [8], "prefix_node": [0, 0]}
    result = hand_over(arrival_s=[0.0, 8.0], prompt=[12, 12], instances=[cached] * 2, columns=prefixes)
    # The second finds 8 tokens at both: a prefill of 4, and a copy of one block, to 9.75.
    assert [request.cached_tokens for request in result.requests] == [0, 8]
    assert result.requests[1].handover_s == 0.75
    assert result.requests[1].token_times[0] == 10.75


def test_pull_that_does_not_fit_blocks_the_queue() -> None:
    # The decode instance has 5 blocks, A 2 of them, and a third from 3.25 on. B, of 4 blocks, waits until A is done at
    # 6.25, and so does C, of 1. Then both are pulled: C's block to 7.5, then B's faster, to 9.
    small = replace(CHUNKED, kv_blocks=5)
    result = hand_over(arrival_s=[0.0, 1.0, 1.0], prompt=[8, 16, 4], output=[4, 1, 1], instances=[CHUNKED, small])
    assert result.requests[0].finish_s == 6.25
    assert [request.handover_s for request in result.requests] == [1.25, 9.0 - 2.0, 7.5 - 2.0]
    assert [used(result, t)[0] for t in (2.25, 6.0)] == [5, 5]


def test_decode_instance_fails_before_the_prefill_is_done() -> None:
    """It is asked again."""
    roles = ("prefill", "decode", "decode")
    script = Script(prefill=[0], decode=[1, 2])
    failures = Failures(at=((0.5, 1),), repair_s=100.0)
    result = hand_over(replace(PAIR, roles=roles), script=script, failures=failures)
    asked = [(q.time_s, q.candidates, q.may_hold) for q in script.asked if q.kind == "decode"]
    assert asked == [(0.0, [False, True, True], True), (1.0, [False, False, True], False)]
    assert (result.requests[0].instance, result.requests[0].restarts) == (2, 0)
    assert result.requests[0].token_times[0] == 3.25


def test_nobody_to_decode() -> None:
    """What was prefilled comes back, and is held until somebody is ready."""
    script = Script(prefill=[0, 0], decode=[1, 1])
    failures = Failures(at=((0.5, 1),), repair_s=1.0)
    result = hand_over(script=script, failures=failures, hold_interval_s=0.25)
    assert [q.time_s for q in script.asked] == [0.0, 0.0, 1.5, 1.5]
    assert result.requests[0].restarts == 1
    assert result.requests[0].token_times[0] == 1.5 + 3.25
    assert used(result, 1.25) == [0, 0]


@pytest.mark.parametrize(("died", "failure_s"), [(0, 2.0), (1, 2.0), (1, 3.0)])
def test_failure_while_the_cache_is_pulled_or_after(died: int, failure_s: float) -> None:
    script = Script(prefill=[0, 0], decode=[1, 1])
    failures = Failures(at=((failure_s, died),), repair_s=1.0)
    result = hand_over(script=script, failures=failures, hold_interval_s=0.25)
    # It begins again when the instance is back.
    assert result.requests[0].restarts == 1
    assert result.requests[0].token_times == [failure_s + 1 + t for t in (3.25, 4.25, 5.25, 6.25)]
    assert used(result, failure_s) == [0, 0]


def test_exports_keep_a_draining_instance() -> None:
    script = Script(prefill=[0], decode=[2], scale=[0])
    scaling = replace(SCALES, first_s=1.5, interval_s=100.0, ready=3)
    roles = ("prefill", "prefill", "decode")
    result = hand_over(replace(PAIR, roles=roles), script=script, scaling=scaling)
    assert result.alive_s == [2.25, 6.25, 6.25]


def test_neither_the_last_that_prefills_nor_the_last_that_decodes_is_drained() -> None:
    script = Script(prefill=[0], decode=[1])
    roles = ("prefill", "decode", "decode", "prefill", "decode")
    hand_over(replace(PAIR, roles=roles), script=script, scaling=replace(SCALES, ready=3))
    # One of each kind that is absent, and of those that are ready the decode instances.
    assert script.asked[-1].candidates == [False, True, True, True, True]


# --- rejected requests -----------------------------------------------------------------------------------------------


def test_a_rejected_request_ends_unanswered_and_the_next_is_asked_at_once() -> None:
    # B is held from 0.5 on, C behind it; at 1 B is asked again and rejected, C dispatched at that time.
    script = Script(dispatch=[0, None, None, REJECT, 0])
    config = {"hold_interval_s": 0.5, "max_hold_s": 10.0}
    result = run(script, [0.0, 0.5, 0.75], [8, 8, 8], [3, 3, 3], [CHUNKED], **config)
    assert script.times("dispatch") == [0.0, 0.5, 0.75, 1.0, 1.0]
    assert [request.rejected for request in result.requests] == [False, True, False]
    assert result.requests[1].token_times == []
    assert result.requests[2].dispatch_s == 1.0


def test_a_request_may_be_rejected_before_its_prefill_and_never_after() -> None:
    script = Script(prefill=[0, REJECT, 0], decode=[1, REJECT])
    result = hand_over(arrival_s=[0.0, 0.25, 0.5], script=script)
    assert [request.rejected for request in result.requests] == [False, True, True]
    script = Script(prefill=[0], decode=[1])
    hand_over(replace(PAIR, decode_choice="after_prefill"), script=script)
    may_reject = {question.kind: question.may_reject for question in script.asked}
    assert may_reject == {"prefill": True, "decode": False}


def test_a_request_that_lost_its_instance_is_rejected_only_before_its_first_token() -> None:
    for failure_s, may_reject in ((0.5, True), (2.5, False)):
        script = Script(dispatch=[0, 0])
        run(script, [0.0], [8], [5], [CHUNKED], failures=Failures(at=((failure_s, 0),), repair_s=1.0))
        assert [question.may_reject for question in script.asked] == [True, may_reject]


# --- all of it together -----------------------------------------------------------------------------------------------


@given(fleets() | fleets_on_grid() | pools() | pools_on_grid() | shared_caches() | speculating())
def test_every_request_ends(drawn: tuple[RequestTable, OracleFleet]) -> None:
    """Conservation and order in time are asserted inside the oracle."""
    table, fleet = drawn
    result = simulate_fleet(table, fleet, KeyedChoice(reject_share=0.1).choose)
    drafts = max(instance.draft_tokens for instance in fleet.instances)
    for request in result.requests:
        times = request.token_times
        assert all(a <= b for a, b in pairwise(times))
        assert all(a < b for a, b in zip(times, times[1 + drafts :], strict=False))
        parent = table.parent[request.row]
        lost = (
            parent >= 0 and not math.isnan(table.think_s[request.row]) and math.isnan(result.requests[parent].finish_s)
        )
        if not lost and not request.failed and not request.rejected:
            assert request.generated == len(request.token_times) == table.output_tokens[request.row]
            assert request.finish_s == request.token_times[-1]
    assert sum(result.preemptions) == sum(request.preemptions for request in result.requests)
    moved = sum(m.outcome in ("completed", "moved") for m in result.migrations)
    assert sum(request.migrations for request in result.requests) == moved
    assert all(0 <= alive_s <= result.end_s for alive_s in result.alive_s)
