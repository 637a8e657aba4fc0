"""Faults to plant in the kernels, one at a time: misreadings of docs/model.md, and slips of the kind that one makes.

tests/cluster/test_planted_faults.py demands that each makes a difference that the comparison with the oracle sees.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of a kernel source: `old`, and each one of `also`, occurs exactly once in the package's file `path`."""

    name: str
    path: str
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()


ITERATIONS = "cluster/iterations.py"
KERNEL = "cluster/kernel.py"
HANDOVER = "cluster/handover.py"
LIFECYCLE = "cluster/lifecycle.py"
LINKS = "cluster/links.py"
MIGRATION = "cluster/migration.py"
SCHEDULER = "cluster/scheduler.py"
SHARED_CACHE = "cluster/shared_cache.py"
KV_CACHE = "cluster/kv_cache.py"
PREFIX_CACHE = "cluster/prefix_cache.py"
TELEMETRY = "cluster/telemetry.py"
COST_MODEL = "fleet/cost_model.py"
LEDGER = "fleet/ledger.py"
PREFIX_INDEX = "fleet/prefix_index.py"

ADMISSION_TEST = (
    "        if missing + unpinned + engine.watermark_blocks > available_blocks(inst):\n            break\n"
)

FAULTS = (
    # --- admission ---
    Fault(
        "watermark off by one",
        SCHEDULER,
        "missing + unpinned + engine.watermark_blocks > available_blocks(inst)",
        "missing + unpinned + engine.watermark_blocks >= available_blocks(inst)",
    ),
    Fault(
        "a smaller request overtakes a head that does not fit",
        SCHEDULER,
        ADMISSION_TEST,
        """\
        if missing + unpinned + engine.watermark_blocks > available_blocks(inst):
            if engine.priority_order != 0 or slot.next == NIL:
                break
            if slot_at(s, slot.next).prefill_tokens >= slot.prefill_tokens:
                break
            dequeue(s, inst, engine, index)
            enqueue(s, inst, engine, index, False)
            continue
""",
    ),
    Fault(
        "admission takes the blocks of its first chunk for those of the whole prompt",
        SCHEDULER,
        "missing = blocks_for(slot.prefill_tokens, size) - matched",
        "missing = blocks_for(min(slot.prefill_tokens, matched * size + budget), size) - matched",
    ),
    Fault(
        "blocks that pinning takes from the free list are counted twice",
        SCHEDULER,
        "missing + unpinned + engine.watermark_blocks",
        "missing + 2 * unpinned + engine.watermark_blocks",
    ),
    Fault(
        "max_num_seqs off by one",
        SCHEDULER,
        "while inst.head != NIL and budget > 0 and inst.in_batch < engine.max_num_seqs:",
        "while inst.head != NIL and budget > 0 and inst.in_batch + 1 < max(engine.max_num_seqs, 2):",
    ),
    Fault(
        "a prefill chunk may use the budget that the decodes have used",
        SCHEDULER,
        "budget = engine.max_num_batched_tokens - inst.decodes * (1 + engine.cost.draft_tokens) - prefill",
        "budget = engine.max_num_batched_tokens - prefill",
    ),
    Fault(
        "prefill_first decodes in an iteration with prefill",
        SCHEDULER,
        "            inst.sitting_out = 0\n            return prefill, attention",
        "            inst.sitting_out = inst.in_batch\n            return prefill, attention",
    ),
    Fault(
        "the waiting queue ignores priority",
        SCHEDULER,
        "    if engine.priority_order != 0:\n        before = inst.tail",
        "    if False:\n        before = inst.tail",
    ),
    Fault(
        "priority counts without priority order",
        SCHEDULER,
        "if engine.priority_order != 0 and a.priority != b.priority:",
        "if a.priority != b.priority:",
    ),
    # --- preemption ---
    Fault(
        "the victim is the first of the running list",
        SCHEDULER,
        "    last = inst.in_batch - 1\n",
        "    last = 0\n",
    ),
    Fault(
        "the choice of the victim ignores priority",
        SCHEDULER,
        "    if engine.priority_order != 0:\n        for position",
        "    if False:\n        for position",
    ),
    Fault(
        "a preempted request goes to the back of the queue",
        SCHEDULER,
        "enqueue(s, inst, engine, index, True)",
        "enqueue(s, inst, engine, index, False)",
    ),
    Fault(
        "preemption leaks the block that was taken in the same pass",
        SCHEDULER,
        "held = blocks_for(computed + 1 if has_block else computed, engine.block_size)",
        "held = blocks_for(computed, engine.block_size)",
    ),
    Fault(
        "recompute pays for the prompt alone",
        SCHEDULER,
        "slot.prefill_tokens = slot.prompt_tokens + slot.generated",
        "slot.prefill_tokens = slot.prompt_tokens",
    ),
    Fault(
        "admission in a step that preempted",
        SCHEDULER,
        "            inst.first_finish_step = first_finish(s, inst)\n            return prefill, attention",
        "            inst.first_finish_step = first_finish(s, inst)",
    ),
    Fault(
        "a second preemption restarts the loss of the first",
        SCHEDULER,
        "    if np.isnan(slot.preempted_s):\n",
        "    if True:\n",
    ),
    Fault(
        "requests that sit an iteration out get its token",
        SCHEDULER,
        "            entry.finish_step += 1\n            slot.generated -= 1\n",
        "",
    ),
    # --- blocks ---
    Fault(
        "decodes take a block one token late",
        SCHEDULER,
        "return (1 if computed % engine.block_size == 0 else 0), 1",
        "return (1 if computed % engine.block_size == 1 % engine.block_size else 0), 1",
    ),
    Fault(
        "a request that joins the decodes is counted under the next residue",
        SCHEDULER,
        "residue = (slot.prompt_tokens + slot.generated - 1 - inst.steps_done) % engine.block_size",
        "residue = (slot.prompt_tokens + slot.generated - inst.steps_done) % engine.block_size",
    ),
    Fault(
        "a leap takes no blocks for whole cycles of the block size",
        KV_CACHE,
        "demand = cycles * inst.decodes",
        "demand = 0",
    ),
    Fault(
        "the private tail of a preempted request is not kept",
        PREFIX_CACHE,
        "private = slot.resident_blocks if complete else 0",
        "private = 0",
    ),
    Fault(
        "eviction begins with the head of a node",
        PREFIX_CACHE,
        "            here.blocks -= taken\n            empty = here.blocks == 0",
        "            here.dead_blocks += here.blocks - taken\n            here.blocks = 0\n            empty = True",
    ),
    Fault(
        "pins are not released",
        PREFIX_CACHE,
        "        here.pins -= 1\n",
        "",
    ),
    Fault(
        "dead blocks go to the front of the free list",
        KV_CACHE,
        "prefix_cache.append_dead(s, inst, private - tail)",
        "inst.free_blocks += private - tail",
    ),
    Fault(
        "what decoding fills is never resident",
        KV_CACHE,
        "    prefix_cache.fill(s, inst, slot, computed, size)\n",
        "",
    ),
    Fault(
        "blocks become resident a chunk late",
        SCHEDULER,
        "prefix_cache.fill(s, inst, slot, slot.computed_tokens + chunk, engine.block_size)",
        "prefix_cache.fill(s, inst, slot, slot.computed_tokens, engine.block_size)",
    ),
    Fault(
        "a hit is counted with every chunk",
        SCHEDULER,
        "            attention += _chunk(s, inst, engine, index, tokens)",
        "            slot_at(s, index).cached_tokens += slot_at(s, index).computed_tokens\n"
        "            attention += _chunk(s, inst, engine, index, tokens)",
    ),
    # --- time ---
    Fault(
        "cached tokens are prefilled again",
        SCHEDULER,
        "        prefill += chunk\n",
        "        prefill += chunk + matched * size\n",
    ),
    Fault(
        "attention ignores the context before the chunk",
        SCHEDULER,
        "return chunk * (slot.computed_tokens + chunk * 0.5)",
        "return chunk * (chunk * 0.5)",
    ),
    Fault(
        "KV reads do not grow in a row of decodes",
        COST_MODEL,
        "e_s * (j * kv_tokens + decodes * (j * (j - 1.0) * 0.5))",
        "e_s * (j * kv_tokens)",
    ),
    Fault(
        "the expert term leaves out the decodes",
        COST_MODEL,
        "(1.0 - cost.expert_share) ** tokens",
        "(1.0 - cost.expert_share) ** prefill_tokens",
    ),
    Fault(
        "weights are read and multiplied one after the other",
        COST_MODEL,
        "max(cost.w_s, cost.b_s * tokens)",
        "cost.w_s + cost.b_s * tokens",
    ),
    Fault(
        "an arrival moves the anchor",
        KERNEL,
        "            inst.planned = boundary_step\n",
        "            inst.planned = boundary_step\n            inst.changed = 1\n",
    ),
    Fault(
        "an arrival waits for one boundary too many",
        KERNEL,
        "boundary_step = steps_before(inst, engine, clock_s(env, g)) + 1",
        "boundary_step = steps_before(inst, engine, clock_s(env, g)) + 2",
    ),
    Fault(
        "boundaries come before arrivals of the same time",
        KERNEL,
        "        if next_at(s, g).time_s >= until_s:\n",
        "        if next_at(s, g).time_s > until_s or next_at(s, g).time_s == np.inf:\n",
    ),
    Fault(
        "a turn that is released at a tie arrives before the boundaries of all other instances",
        TELEMETRY,
        "if env.time_s == env.completion_s and g <= env.completion_instance:",
        "if False:",
    ),
    # --- ends ---
    Fault(
        "requests finish one token late",
        SCHEDULER,
        "entry.finish_step = inst.steps_done + slot.output_tokens - slot.generated",
        "entry.finish_step = inst.steps_done + slot.output_tokens - slot.generated + 1",
    ),
    Fault(
        "requests finish one token early",
        SCHEDULER,
        "entry.finish_step = inst.steps_done + slot.output_tokens - slot.generated",
        "entry.finish_step = inst.steps_done + max(slot.output_tokens - slot.generated - 1, 0)",
    ),
    Fault(
        "a leap passes the first finish",
        KERNEL,
        "most = inst.first_finish_step - inst.steps_done",
        "most = inst.first_finish_step - inst.steps_done + 1",
    ),
    Fault(
        "a turn is released by its parent's first token",
        KERNEL,
        "time_s + row.think_s",
        "slot.first_token_s + row.think_s",
    ),
    Fault(
        "gaps between tokens forget the prefill of others that decodes waited for",
        ITERATIONS,
        "if inst.uneven != 0 or inst.last_decode_s != step_end_s(inst, engine, inst.steps):",
        "if inst.uneven != 0:",
    ),
    # --- what the dispatcher sees ---
    Fault(
        "polls arrive without delay",
        TELEMETRY,
        "_polls_until(env, now_s - env.poll_delay_s)",
        "_polls_until(env, now_s)",
    ),
    Fault(
        "a poll sees the instance as it is now",
        KERNEL,
        "    record_polls(s, inst, engine, env, time_s)\n",
        "",
    ),
    Fault(
        "the step in progress takes no blocks",
        TELEMETRY,
        "begun = min(steps_before(inst, engine, time_s) + 1, inst.planned)",
        "begun = max(steps_before(inst, engine, time_s), inst.steps + 1)",
    ),
    Fault(
        "tokens of the leap in progress are not streamed yet",
        TELEMETRY,
        "view.streamed_tokens += (steps - inst.steps) * inst.decodes",
        "view.streamed_tokens += 0",
    ),
    Fault(
        "a policy is told how long the output will be",
        TELEMETRY,
        "request.predicted_output_tokens = slot.predicted_output_tokens",
        "request.predicted_output_tokens = slot.output_tokens",
    ),
    Fault(
        "a finished request's prediction stays in the ledger",
        LEDGER,
        "    instance.predicted_output_tokens -= predicted_output_tokens\n",
        "",
    ),
    Fault(
        "the prefix index forgets the root of a sequence first",
        PREFIX_INDEX,
        "oldest = owner.index_head",
        "oldest = owner.index_tail",
    ),
)

# Of migration, lifecycle and failures; the cases that find them are fleets.
FLEET_FAULTS = (
    # --- who moves ---
    Fault(
        "an instance may be chosen as SOURCE again in the same tick",
        MIGRATION,
        "inst.migration != NIL or inst.source_tick == env.rebalance_tick",
        "inst.migration != NIL",
    ),
    Fault(
        "max_pairs counts migrations, not chosen sources",
        KERNEL,
        "        env.pairs += 1\n",
        "",
        also=(
            (
                "        migration.begin(s, e, source, g)\n",
                "        migration.begin(s, e, source, g)\n        env.pairs += 1\n",
            ),
        ),
    ),
    Fault(
        "of requests of equal length the first of the running list leaves",
        MIGRATION,
        "better = better or tokens <= best_tokens",
        "better = better or tokens < best_tokens",
    ),
    Fault(
        "the lowest priority is the smallest value",
        MIGRATION,
        "slot.priority > best_priority",
        "slot.priority < best_priority",
    ),
    Fault(
        "ready instances offer waiting requests, too",
        MIGRATION,
        "inst.decodes > 0 or (inst.life == STATE_DRAINING and inst.tail != NIL)",
        "inst.decodes > 0 or inst.tail != NIL",
    ),
    Fault(
        "a draining instance offers the first of its queue",
        MIGRATION,
        "    return inst.tail  #",
        "    return inst.head  #",
    ),
    Fault(
        "a waiting request moves to the front of the queue",
        MIGRATION,
        "enqueue(s, other, engine_at(s, destination), index, False)",
        "enqueue(s, other, engine_at(s, destination), index, True)",
    ),
    Fault(
        "a draining instance is a candidate for DESTINATION",
        MIGRATION,
        "free = inst.life == STATE_READY and inst.migration == NIL",
        "free = inst.life in (STATE_READY, STATE_DRAINING) and inst.migration == NIL",
    ),
    # --- reservations and copies ---
    Fault(
        "an aborted migration keeps its reserved blocks",
        MIGRATION,
        "        other.free_blocks += blocks\n",
        "",
    ),
    Fault(
        "an aborted migration's blocks go to the end of the free list",
        MIGRATION,
        "    other.free_blocks += blocks\n",
        "    prefix_cache.append_dead(s, other, blocks)\n",
    ),
    Fault(
        "the destination of an aborted migration stays in it",
        MIGRATION,
        "    _log(s, env, g, outcome, time_s)\n    _end(s, env, g)\n",
        "    _log(s, env, g, outcome, time_s)\n    _end(s, env, g)\n    other.migration = g\n",
    ),
    Fault(
        "a reservation ignores the blocks of the iteration in progress",
        ITERATIONS,
        "                take(s, inst, decode_demand(s, inst, engine, inst.steps_done, 1))\n",
        "",
    ),
    Fault(
        "stage 0 copies the partial block, too",
        MIGRATION,
        "    blocks = _computed(inst, slot) // engine.block_size\n",
        "    blocks = blocks_for(_computed(inst, slot), engine.block_size)\n",
    ),
    Fault(
        "later stages copy the partial block, too",
        MIGRATION,
        "        blocks = computed // engine.block_size - migration.copied_blocks\n",
        "        blocks = blocks_for(computed, engine.block_size) - migration.copied_blocks\n",
    ),
    Fault(
        "the last stage copies all blocks again",
        MIGRATION,
        "blocks = blocks_for(computed, engine.block_size) - migration.copied_blocks",
        "blocks = blocks_for(computed, engine.block_size)",
    ),
    Fault(
        "the last stage leaves the partial block out",
        MIGRATION,
        "blocks = blocks_for(computed, engine.block_size) - migration.copied_blocks",
        "blocks = computed // engine.block_size - migration.copied_blocks",
    ),
    Fault(
        "the last stage copies what was left at the end of the stage before",
        MIGRATION,
        "blocks = blocks_for(computed, engine.block_size) - migration.copied_blocks",
        "blocks = blocks_for(computed - 1, engine.block_size) - migration.copied_blocks",
    ),
    Fault(
        "last_stage_blocks off by one",
        MIGRATION,
        "- migration.copied_blocks <= env.last_stage_blocks",
        "- migration.copied_blocks < env.last_stage_blocks",
    ),
    Fault(
        "max_stages off by one",
        MIGRATION,
        "migration.stages >= env.max_stages - 1",
        "migration.stages >= env.max_stages",
    ),
    Fault(
        "only stages with blocks pay for the round trip",
        MIGRATION,
        "time_s + (env.round_trip_s + copied_bytes / env.bandwidth_bytes_per_s)",
        "time_s + (env.round_trip_s + copied_bytes / env.bandwidth_bytes_per_s if blocks > 0 else 0.0)",
    ),
    Fault(
        "the end of a stage does not see that the request has finished",
        MIGRATION,
        "    if outcome != NIL:\n        abort(s, env, g, outcome, time_s)\n",
        "    if outcome == PREEMPTED:\n        abort(s, env, g, outcome, time_s)\n",
    ),
    Fault(
        "a request that has finished is handed over all the same",
        MIGRATION,
        "    if slot.row != migration.row:\n        return LEFT\n",
        "",
    ),
    Fault(
        "a preemption is not seen if the request decodes again",
        MIGRATION,
        "if slot.preemptions != migration.preemptions else NIL",
        "if slot.preemptions != migration.preemptions and not np.isnan(slot.preempted_s) else NIL",
    ),
    # --- slowdown and anchors ---
    Fault(
        "the slowdown of a source stays",
        KERNEL,
        "if inst.migration != NIL:\n            inst.jitter",
        "if inst.migration != NIL or migration_at(s, g).stages > 0:\n            inst.jitter",
    ),
    Fault(
        "the slowdown is the source's alone",
        KERNEL,
        "if inst.migration != NIL:\n            inst.jitter",
        "if inst.migration == g:\n            inst.jitter",
    ),
    Fault(
        "the start of a migration makes no new anchor",
        MIGRATION,
        "    inst.migration = g\n"
        "    instance_at(s, destination).migration = g\n"
        "    inst.changed = 1\n"
        "    instance_at(s, destination).changed = 1\n",
        "    inst.migration = g\n    instance_at(s, destination).migration = g\n",
    ),
    Fault(
        "the end of a migration makes no new anchor",
        MIGRATION,
        "    inst.changed = 1\n    other.changed = 1\n",
        "",
    ),
    # --- stop, COMMIT, join ---
    Fault(
        "the request stops at the end of the stage, amid the iteration",
        MIGRATION,
        "        _await_boundary(s, env, g, STOPPING)\n",
        "        _await_boundary(s, env, g, STOPPING)\n        next_at(s, g).time_s = time_s\n",
    ),
    Fault(
        "COMMIT does not release the source's blocks",
        MIGRATION,
        "    release(s, inst, engine, index, computed, blocks_for(computed, engine.block_size), False)\n",
        "",
    ),
    Fault(
        "COMMIT does not pin the request's path",
        MIGRATION,
        "        prefix_cache.pin(s, other, index, 0, other_engine.block_size)\n",
        "",
    ),
    Fault(
        "COMMIT matches what the destination holds",
        MIGRATION,
        "        prefix_cache.pin(s, other, index, 0, other_engine.block_size)\n",
        "        size = other_engine.block_size\n"
        "        matched, _ = prefix_cache.match(s, other, slot, size, computed // size)\n"
        "        prefix_cache.pin(s, other, index, matched, size)\n"
        "        other.free_blocks += matched\n",
    ),
    Fault(
        "what a migration copied never becomes resident",
        MIGRATION,
        "        prefix_cache.fill(s, other, slot, computed, other_engine.block_size)\n",
        "",
    ),
    Fault(
        "what decoding filled is not resident at the source after a COMMIT",
        MIGRATION,
        "release(s, inst, engine, index, computed, blocks_for",
        "release(s, inst, engine, index, 0, blocks_for",
    ),
    Fault(
        "an idle destination is not woken by what joins it",
        MIGRATION,
        "    if inst.doing == IDLE:\n        next_at(s, g).time_s = time_s\n    slot_at(s, index).next = NIL\n",
        "    slot_at(s, index).next = NIL\n",
    ),
    Fault(
        "an idle instance does not try its head again when reserved blocks are released",
        ITERATIONS,
        "        if inst.waiting > 0 or inst.incoming != NIL or inst.pulled != NIL:\n"
        "            next_at(s, g).time_s = min(next_at(s, g).time_s, time_s)\n",
        "        pass\n",
    ),
    Fault(
        "requests join the batch behind one that is partly prefilled",
        SCHEDULER,
        "while decodes and position > 0",
        "while False and position > 0",
    ),
    Fault(
        "requests join a batch that is full",
        MIGRATION,
        "while inst.incoming != NIL and inst.in_batch < engine.max_num_seqs:",
        "while inst.incoming != NIL:",
    ),
    Fault(
        "requests join the batch in reverse order of arrival",
        MIGRATION,
        "    slot_at(s, index).next = NIL\n    if inst.incoming == NIL:\n",
        "    slot_at(s, index).next = inst.incoming\n    if True:\n",
    ),
    Fault(
        "downtime ends with the COMMIT",
        MIGRATION,
        "        slot.downtime_s += time_s - slot.stopped_s\n",
        "",
        also=(
            (
                "    slot.migrations += 1\n    _await_join",
                "    slot.migrations += 1\n    slot.downtime_s += time_s - slot.stopped_s\n    _await_join",
            ),
        ),
    ),
    Fault(
        "the gap of a move begins when the request joins",
        MIGRATION,
        "        slot.joined_s = last_token_s\n",
        "",
    ),
    Fault(
        "the ledger keeps a moved request's streamed tokens at its source",
        MIGRATION,
        "        inst.streamed_tokens -= streamed_tokens\n        other.streamed_tokens += streamed_tokens\n",
        "",
    ),
    Fault(
        "at a stop the destination's boundary of the same time is still to come",
        MIGRATION,
        "seen_s = np.nextafter(time_s, np.inf) if migration.destination < g else time_s",
        "seen_s = time_s",
    ),
    Fault(
        "a source's boundary ahead of its turn stops the request",
        KERNEL,
        "coupled = env.closed_loop != 0 or env.held != 0 or env.stopping != 0",
        "coupled = env.closed_loop != 0 or env.held != 0",
    ),
    # --- failures ---
    Fault(
        "a stopped request is lost when its destination fails",
        MIGRATION,
        "    if outcome == DESTINATION_DIED and migration.phase == HANDING_OVER:\n",
        "    if False:\n",
    ),
    Fault(
        "a failed instance fails again and its repair begins anew",
        LIFECYCLE,
        "if inst.life != STATE_ABSENT and inst.life != STATE_FAILED:",
        "if inst.life != STATE_ABSENT:",
    ),
    Fault(
        "an instance that starts does not fail",
        LIFECYCLE,
        "if inst.life != STATE_ABSENT and inst.life != STATE_FAILED:",
        "if inst.life == STATE_READY or inst.life == STATE_DRAINING:",
    ),
    Fault(
        "a failed instance is billed during its repair",
        LIFECYCLE,
        "                inst.billed_from_s = time_s\n",
        "                inst.billed_from_s = time_s - env.repair_s\n",
    ),
    Fault(
        "a repaired instance is not billed",
        LIFECYCLE,
        "                inst.billed_from_s = time_s\n",
        "                pass\n",
    ),
    Fault(
        "requests come back in reverse order",
        LIFECYCLE,
        """\
    slot.next = NIL
    if env.returned_head == NIL:
        env.returned_head = index
    else:
        slot_at(s, env.returned_tail).next = index
    env.returned_tail = index
""",
        "    slot.next = env.returned_head\n    env.returned_head = index\n",
    ),
    Fault(
        "stopped requests come back before running ones",
        LIFECYCLE,
        "    for position in range(inst.in_batch):\n        entry = batch_at",
        "    if stopped != NIL:\n"
        "        send_back(s, env, stopped)\n"
        "        stopped = NIL\n"
        "    for position in range(inst.in_batch):\n"
        "        entry = batch_at",
    ),
    Fault(
        "a request that comes back generates all again",
        LIFECYCLE,
        "    slot.prefill_tokens = slot.prompt_tokens + slot.generated\n",
        "    slot.generated = 0\n    slot.prefill_tokens = slot.prompt_tokens\n",
    ),
    Fault(
        "a preemption loss goes on across a restart",
        LIFECYCLE,
        "    slot.preempted_s = np.nan\n",
        "",
    ),
    Fault(
        "the ledger takes a request that came back for one of its prompt's length",
        LIFECYCLE,
        "    slot.restart_tokens = slot.generated\n",
        "",
    ),
    Fault(
        "a request may be held as long as if it had not come back",
        LIFECYCLE,
        "    slot.due_s = env.time_s\n",
        "",
    ),
    Fault(
        "a failure comes after the boundaries of its time",
        KERNEL,
        "        if not _run_instances(s, e, until_s) or",
        "        failing = env.next_failure < env.failures\n"
        "        failing = failing and lifecycle.failure_at(s, env.failure0 + env.next_failure).time_s == until_s\n"
        "        if not _run_instances(s, e, np.nextafter(until_s, np.inf) if failing else until_s) or",
    ),
    Fault(
        "the SOURCE tick comes before ends of copies of its time",
        KERNEL,
        "if env.next_event_s <= until_s and env.next_event_s < np.inf:",
        "if env.next_event_s <= until_s and env.next_event_s < np.inf and rebalance_s > until_s:",
    ),
    Fault(
        "requests that come back are asked for after arrivals of that time",
        KERNEL,
        "        if env.returned_head != NIL:\n",
        "        if env.returned_head != NIL and _next_arrival(s, env)[0] > env.time_s:\n",
    ),
    Fault(
        "a request begins again once too often",
        KERNEL,
        "if slot_at(s, index).restarts > env.max_restarts:",
        "if slot_at(s, index).restarts > env.max_restarts + 1:",
    ),
    Fault(
        "the time to the next failure that is drawn counts from the repair",
        LIFECYCLE,
        "            draw_failure(env, inst, g)\n            _fail(s, env, g, time_s)\n",
        "            draw_failure(env, inst, g)\n"
        "            _fail(s, env, g, time_s)\n"
        "            inst.fail_s += env.repair_s\n",
    ),
    # --- notices ---
    Fault(
        "a notice is ignored",
        LIFECYCLE,
        "    inst.notices += 1\n    if inst.life == STATE_READY:\n        _live(env, inst, STATE_DRAINING, np.inf)\n",
        "    inst.notices += 1\n",
    ),
    Fault(
        "a notice counts as a decision to drain: the instance leaves once it is empty",
        LIFECYCLE,
        "    if inst.life == STATE_DRAINING and inst.notices == 0 and not busy:\n",
        "    if inst.life == STATE_DRAINING and not busy:\n",
    ),
    Fault(
        "an instance under notice may be kept or started",
        LIFECYCLE,
        "return inst.scale_tick != env.scale_tick and inst.notices == 0",
        "return inst.scale_tick != env.scale_tick",
    ),
    Fault(
        "an instance that becomes ready under notice takes requests",
        LIFECYCLE,
        "STATE_READY if inst.notices == 0 else STATE_DRAINING",
        "STATE_READY",
    ),
    Fault(
        "a notice outlives the failure",
        LIFECYCLE,
        "        instance_at(s, g).notices -= 1\n",
        "",
    ),
    # --- lifecycle ---
    Fault(
        "billing begins when the instance is ready",
        LIFECYCLE,
        "        inst.billed_from_s = env.time_s\n",
        "        inst.billed_from_s = env.time_s + env.start_up_s\n",
    ),
    Fault(
        "a draining instance is a candidate for DISPATCH",
        KERNEL,
        "        candidate = inst.life == STATE_READY\n",
        "        candidate = inst.life in (STATE_READY, STATE_DRAINING)\n",
    ),
    Fault(
        "min_instances counts draining instances",
        LIFECYCLE,
        "        ready += 1 if life == STATE_READY else 0\n",
        "        ready += 1 if life in (STATE_READY, STATE_DRAINING) else 0\n",
    ),
    Fault(
        "max_instances counts ready instances alone",
        LIFECYCLE,
        "present += 1 if life in (STATE_STARTING, STATE_READY, STATE_DRAINING) else 0",
        "present += 1 if life == STATE_READY else 0",
    ),
    Fault(
        "each absent instance is a candidate, not one for each profile",
        LIFECYCLE,
        "        if same and instance_at",
        "        if False and instance_at",
    ),
    Fault(
        "an instance may be chosen again in the same SCALE tick",
        LIFECYCLE,
        "return inst.scale_tick != env.scale_tick and inst.notices == 0",
        "return inst.notices == 0",
    ),
    Fault(
        "a drain that was cancelled keeps its deadline",
        LIFECYCLE,
        "    else:\n        _live(env, inst, STATE_READY, np.inf)\n",
        "    else:\n        _live(env, inst, STATE_READY, inst.due_s)\n",
        also=(
            (
                "if inst.due_s <= time_s and inst.life == STATE_DRAINING:",
                "if inst.due_s <= time_s and inst.life in (STATE_DRAINING, STATE_READY):",
            ),
        ),
    ),
    Fault(
        "an instance is drained though a migration to or from it goes on",
        LIFECYCLE,
        " or inst.incoming != NIL or inst.migration != NIL\n",
        " or inst.incoming != NIL\n",
    ),
    Fault(
        "a drained instance is absent at the next event, not at its last boundary",
        KERNEL,
        "    if inst.life == STATE_DRAINING:\n        lifecycle.leave_if_drained(s, env, g, time_s)\n",
        "",
    ),
    Fault(
        "a drained instance stays when the other side of its migration fails",
        LIFECYCLE,
        "            leave_if_drained(s, env, other, time_s)\n",
        "",
    ),
    Fault(
        "a drained instance keeps its cache",
        LIFECYCLE,
        "inst.notices == 0 and not busy:\n        _forget(s, env, g, time_s)\n",
        "inst.notices == 0 and not busy:\n",
    ),
    Fault(
        "a failed instance keeps the part of its cache that is not in use",
        LIFECYCLE,
        """\
        here = residency_at(s, inst.residency0 + node)
        here.next = 0
        here.previous = 0
        here.blocks = 0
        here.dead_blocks = 0
        here.pins = 0
""",
        """\
        here = residency_at(s, inst.residency0 + node)
        if here.pins > 0:
            here.blocks = 0
        here.pins = 0
""",
        also=(
            (
                "    inst.lru_head = NIL\n    inst.lru_tail = NIL\n    inst.lru_blocks = 0\n"
                "    inst.free_blocks = engine.kv_blocks\n",
                "    inst.free_blocks = engine.kv_blocks - inst.lru_blocks\n",
            ),
        ),
    ),
    Fault(
        "a deadline leaves the instance draining until it is empty",
        LIFECYCLE,
        "            _clear(s, env, g, time_s)\n            inst.due_s = np.inf\n",
        "            inst.due_s = np.inf\n",
    ),
)

POOL_FAULTS = (
    Fault(
        "a mixed instance hands its requests over",
        KERNEL,
        "elsewhere = instance_at(s, g).role != ROLE_MIXED",
        "elsewhere = True",
    ),
    Fault(
        "DECODE offers prefill instances",
        KERNEL,
        "candidate = candidate and inst.role != ROLE_PREFILL",
        "candidate = candidate",
    ),
    Fault(
        "PREFILL is asked while nobody is ready to decode",
        KERNEL,
        "if env.ready_to_prefill > 0 and env.ready_to_decode > 0:",
        "if env.ready_to_prefill > 0:",
    ),
    Fault(
        "none for DECODE is an answer after the prefill too",
        TELEMETRY,
        "            may_hold = False  # its prefill is done\n",
        "            pass\n",
    ),
    Fault(
        "an answer of one token is handed over",
        KERNEL,
        "if env.first_token_from_prefill != 0 and slot.generated + 1 == slot.output_tokens:",
        "if False:",
    ),
    Fault(
        "the end of a prefill is no completion for a held request",
        KERNEL,
        "    handover.end_prefill(s, env, g, index, time_s)\n    if env.held > 0:\n        env.next_hold_s = time_s\n",
        "    handover.end_prefill(s, env, g, index, time_s)\n",
    ),
    Fault(
        "the prefill instance is to give the whole answer",
        KERNEL,
        "        output_tokens = 0.0\n",
        "        pass\n",
    ),
    Fault(
        "the decode instance does not count a request that it was chosen for",
        KERNEL,
        "    handover.commit(s, env, index, g)\n    prefill = ",
        "    transfer_at(s, index).decode_instance = g\n    prefill = ",
    ),
    Fault(
        "a request goes to the decode instance that it was to go to, ready or not",
        HANDOVER,
        "if transfer.decode_instance >= 0 and instance_at(s, transfer.decode_instance).life == STATE_READY:",
        "if transfer.decode_instance >= 0:",
    ),
    Fault(
        "a decode instance that is not ready any more goes on counting the request",
        HANDOVER,
        "    withdraw(s, index)\n    transfer.decode_instance = UNDECIDED\n",
        "    transfer.decode_instance = UNDECIDED\n",
    ),
    Fault(
        "a prefill whose decode instance is gone is not given up",
        KERNEL,
        "        source = handover.let_go(s, env, index, env.time_s)\n",
        "        source = transfer_at(s, index).source\n        transfer_at(s, index).source = NIL\n"
        "        instance_at(s, source).exports -= 1\n",
    ),
    Fault(
        "a pull takes the blocks of what is copied alone",
        SCHEDULER,
        "    blocks = blocks_for(slot.prefill_tokens, size)\n    if blocks",
        "    blocks = blocks_for(max(slot.prefill_tokens - 1, 1), size)\n    if blocks",
    ),
    Fault(
        "what the decode instance has is copied too",
        SCHEDULER,
        "(blocks_for(slot.prefill_tokens - 1, size) - matched) * engine",
        "blocks_for(slot.prefill_tokens - 1, size) * engine",
    ),
    Fault(
        "the last prompt token is copied",
        SCHEDULER,
        "(blocks_for(slot.prefill_tokens - 1, size) - matched)",
        "(blocks_for(slot.prefill_tokens, size) - matched)",
    ),
    Fault(
        "a pull that does not fit lets the others pass",
        SCHEDULER,
        "            if not _pull(s, inst, engine, index, time_s):\n                break\n            continue\n",
        "            if not _pull(s, inst, engine, index, time_s):\n"
        "                if slot.next == NIL or engine.priority_order != 0:\n                    break\n"
        "                dequeue(s, inst, engine, index)\n                enqueue(s, inst, engine, index, False)\n"
        "                if transfer_at(s, inst.head).source != NIL:\n                    break\n"
        "            continue\n",
    ),
    Fault(
        "requests whose cache was pulled join after the waiting ones",
        SCHEDULER,
        "    while inst.pulled != NIL and budget > 0 and inst.in_batch < engine.max_num_seqs:\n",
        "    while inst.head == NIL and inst.pulled != NIL and budget > 0 and inst.in_batch < engine.max_num_seqs:\n",
    ),
    Fault(
        "they join whatever runs",
        SCHEDULER,
        "    while inst.pulled != NIL and budget > 0 and inst.in_batch < engine.max_num_seqs:\n",
        "    while inst.pulled != NIL and inst.in_batch < engine.max_num_seqs:\n",
    ),
    Fault(
        "the decode instance computes no token again",
        SCHEDULER,
        "        attention += share\n        prefill += tokens\n",
        "        attention += share\n        prefill += tokens - 1\n",
    ),
    Fault(
        "blocks that were pulled cannot be matched",
        HANDOVER,
        "        prefix_cache.fill(s, inst, slot, slot.computed_tokens, engine.block_size)\n",
        "        pass\n",
    ),
    Fault(
        "a leap goes on when a cache has come",
        HANDOVER,
        "    slot, inst, engine = slot_at(s, index), instance_at(s, g), engine_at(s, g)\n"
        "    interrupt(s, env, g, time_s)\n    links.end(s, env, index, time_s)\n    source",
        "    slot, inst, engine = slot_at(s, index), instance_at(s, g), engine_at(s, g)\n"
        "    links.end(s, env, index, time_s)\n    source",
    ),
    Fault(
        "links are not shared",
        LINKS,
        "share = max(_count(s, env, transfer.source, 0), instance_at(s, g).inbound)",
        "share = 1",
    ),
    Fault(
        "only ways in are shared",
        LINKS,
        "share = max(_count(s, env, transfer.source, 0), instance_at(s, g).inbound)",
        "share = instance_at(s, g).inbound",
    ),
    Fault(
        "a copy keeps the speed that it began with",
        LINKS,
        "                if share != transfer.share and transfer.end_s > time_s:\n",
        "                if transfer.share == 0:\n",
    ),
    Fault(
        "the round trip is shared",
        LINKS,
        "transfer.end_s = time_s + (transfer.left_s + transfer",
        "transfer.end_s = time_s + (transfer.left_s * share + transfer",
    ),
    Fault(
        "migrations have links of their own",
        MIGRATION,
        "    if env.transfers != 0:\n        ends = (g, migration.destination)\n",
        "    if False:\n        ends = (g, migration.destination)\n",
    ),
    Fault(
        "requests move to prefill instances",
        MIGRATION,
        "return free and same and inst.role != ROLE_PREFILL",
        "return free and same",
    ),
    Fault(
        "waiting requests leave an instance that drains",
        MIGRATION,
        "    if env.pools != 0:\n        return inst.decodes > 0",
        "    if False:\n        return inst.decodes > 0",
    ),
    Fault(
        "an instance that drains does not wait for its exports",
        LIFECYCLE,
        "    busy = busy or inst.exports > 0 or inst.pulls > 0\n",
        "    busy = busy or inst.pulls > 0\n",
    ),
    Fault(
        "the last prefill instance is drained",
        LIFECYCLE,
        "last = inst.role != ROLE_DECODE and env.ready_to_prefill == 1",
        "last = False",
    ),
    Fault(
        "the last decode instance is drained",
        LIFECYCLE,
        "last = last or (inst.role != ROLE_PREFILL and env.ready_to_decode == 1)",
        "last = last",
    ),
    Fault(
        "SCALE offers one absent instance of a profile, whatever its role",
        "cluster/loading.py",
        "[numbers[kind] for kind in kinds]",
        "[fleet.profiles.index(profile) for profile in fleet.profiles]",
    ),
    Fault(
        "what a failed decode instance was to pull stays exported",
        LIFECYCLE,
        "        if transfer_at(s, index).source != NIL:\n"
        "            leave_if_drained(s, env, handover.let_go(s, env, index, time_s), time_s)\n",
        "        if transfer_at(s, index).source != NIL:\n            transfer_at(s, index).source = NIL\n",
    ),
    Fault(
        "requests wait for the cache of an instance that has failed",
        LIFECYCLE,
        "    if env.pools != 0:\n        _lose_exports(s, env, g, time_s)\n",
        "",
    ),
    Fault(
        "the blocks of a pull that ends early are lost",
        HANDOVER,
        "    inst.free_blocks += slot.held_blocks - slot.node_blocks\n",
        "",
    ),
)

SHARED_CACHE_FAULTS = (
    Fault(
        "what decoding fills is not stored",
        KERNEL,
        "    if env.shared_cache != 0 and prefix_cache.leaf(slot) >= 0:\n"
        "        shared_cache.store(s, env, inst, slot, computed, engine.block_size, time_s)\n",
        "",
    ),
    Fault(
        "a prompt is not stored before its request finishes",
        KERNEL,
        "            if env.shared_cache != 0 and prefix_cache.leaf(slot) >= 0:\n"
        "                shared_cache.store(s, env, inst, slot, slot.computed_tokens, engine.block_size, time_s)\n",
        "",
    ),
    Fault(
        "the beginning of a sequence is dropped first",
        SHARED_CACHE,
        "            _use(s, env, node, time_s)\n        node = node_at(s, inst.node0 + node).parent\n    while",
        "            here.used_s = time_s\n        node = node_at(s, inst.node0 + node).parent\n    while",
    ),
    Fault(
        "a load is no use",
        SHARED_CACHE,
        "blocks > 0:\n            _use(s, env, node, time_s)\n",
        "blocks > 0:\n            pass\n",
    ),
    Fault(
        "the store has no bound",
        SHARED_CACHE,
        "    while env.shared_held_blocks > env.shared_capacity_blocks:\n",
        "    while False:\n",
    ),
    Fault(
        "a whole node is dropped where some blocks would do",
        SHARED_CACHE,
        "_drop(s, env, min(most, env.shared_held_blocks - env.shared_capacity_blocks))",
        "_drop(s, env, most)",
    ),
    Fault(
        "stored blocks live for ever",
        SHARED_CACHE,
        "if not updated and head.used_s + env.shared_ttl_s > time_s:",
        "if not updated:",
    ),
    Fault(
        "an update of the model changes nothing",
        SHARED_CACHE,
        "        updated = True\n",
        "",
    ),
    Fault(
        "what the instance has is loaded too",
        SCHEDULER,
        "    transfer.loaded_blocks = blocks - matched\n",
        "    transfer.loaded_blocks = blocks\n",
    ),
    Fault(
        "a load that would take the last free block waits",
        SCHEDULER,
        "                if missing + unpinned > available_blocks(inst):\n                    break\n",
        "                if missing + unpinned >= available_blocks(inst):\n                    break\n",
    ),
    Fault(
        "loads do not share the way out of the store",
        LINKS,
        "        return env.shared_loads",
        "        return 1",
    ),
    Fault(
        "loaded blocks cannot be matched",
        HANDOVER,
        "    if engine.prefix_cache != 0:\n        prefix_cache.fill",
        "    if engine.prefix_cache != 0 and source != SHARED_CACHE:\n        prefix_cache.fill",
    ),
    Fault(
        "what is left of a loaded prompt is computed beyond the budget",
        SCHEDULER,
        "    tokens = min(slot.prefill_tokens - slot.computed_tokens, budget)\n    return tokens",
        "    tokens = slot.prefill_tokens - slot.computed_tokens\n    return tokens",
    ),
    Fault(
        "a load goes on where its instance has failed",
        LIFECYCLE,
        "    if env.transfers != 0:\n        _clear_pulls(",
        "    if env.pools != 0:\n        _clear_pulls(",
    ),
)

SPECULATION_FAULTS = (
    Fault(
        "drafts are computed for free",
        COST_MODEL,
        "decodes * (1 + cost.draft_tokens)",
        "decodes",
    ),
    Fault(
        "an iteration without decodes drafts too",
        COST_MODEL,
        "if cost.draft_tokens > 0 and decodes > 0:",
        "if cost.draft_tokens > 0:",
    ),
    Fault(
        "drafts take nothing of the budget",
        SCHEDULER,
        "budget = engine.max_num_batched_tokens - inst.decodes * (1 + engine.cost.draft_tokens) - prefill",
        "budget = engine.max_num_batched_tokens - inst.decodes - prefill",
    ),
    Fault(
        "a draft is right whatever those before it were",
        ITERATIONS,
        "            probability *= engine.cost.acceptance\n",
        "",
    ),
    Fault(
        "a request gets more tokens than its output has",
        ITERATIONS,
        "more = min(right, min(slot.output_tokens - generated, room",
        "more = min(right, min(slot.output_tokens, room",
    ),
    Fault(
        "drafts that are right take no blocks",
        ITERATIONS,
        "take(s, inst, blocks_for(computed + more, engine.block_size) - blocks_for(computed, engine.block_size))",
        "pass",
    ),
    Fault(
        "drafts that are right are lost where they need a block",
        ITERATIONS,
        "        room = blocks_for(computed, engine.block_size) + available_blocks(inst)\n",
        "        room = blocks_for(computed, engine.block_size)\n",
    ),
    Fault(
        "requests that sit an iteration out are given drafts",
        ITERATIONS,
        "    for position in range(inst.sitting_out):\n        entry = batch_at(s, inst.batch0 + position)\n"
        "        if entry.finish_step == NEVER:\n            continue\n",
        "    for position in range(inst.in_batch):\n        entry = batch_at(s, inst.batch0 + position)\n"
        "        if entry.finish_step == NEVER:\n            continue\n",
    ),
    Fault(
        "a decode that is further keeps its residue",
        SCHEDULER,
        "    slot.generated += tokens\n    residue = (slot.prompt_tokens + slot.generated - 1) % engine.block_size\n",
        "    slot.generated += tokens\n",
    ),
    Fault(
        "a leap is made over drafts",
        KERNEL,
        "one_by_one = engine.cost.jitter_sigma != 0.0 or engine.cost.draft_tokens > 0",
        "one_by_one = engine.cost.jitter_sigma != 0.0",
    ),
    Fault(
        "the first to finish is not looked for again",
        ITERATIONS,
        "    inst.first_finish_step = first_finish(s, inst)\n    inst.changed = 1\n",
        "    inst.changed = 1\n",
    ),
)
