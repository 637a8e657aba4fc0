"""Faults to plant in the kernels, one at a time: misreadings of docs/model.md, and slips of the kind that one makes.

tests/cluster/test_planted_faults.py demands that each makes a difference that the comparison with the oracle sees.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of a kernel source: `old` occurs exactly once in the package's file `path`."""

    name: str
    path: str
    old: str
    new: str


KERNEL = "cluster/kernel.py"
SCHEDULER = "cluster/scheduler.py"
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
            enqueue(s, inst, engine, _dequeue_head(s, inst, engine), False)
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
        "inst.in_batch < engine.max_num_seqs",
        "inst.in_batch + 1 < max(engine.max_num_seqs, 2)",
    ),
    Fault(
        "a prefill chunk may use the budget that the decodes have used",
        SCHEDULER,
        "budget = engine.max_num_batched_tokens - inst.decodes - prefill",
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
        "            inst.first_finish_step = _first_finish(s, inst)\n            return prefill, attention",
        "            inst.first_finish_step = _first_finish(s, inst)",
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
        KERNEL,
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
