"""Alibaba's Qwen-Bailian traces (JSON lines)."""

from __future__ import annotations

from fleetpilot.workloads.readers.mooncake import ceil_blocks
from fleetpilot.workloads.readers.source import TraceFile, TraceRows
from fleetpilot.workloads.table import NO_PARENT

BLOCK_TOKENS = 16
ROOT = -1


def read(file: TraceFile) -> TraceRows:
    """Read the rows. Times are SECONDS, unlike Mooncake's; a content id stands for 16 tokens, the last for the rest.

    Every row has an arrival of its own and its whole prompt; ``parent_chat_id`` links it to the turn before, and the
    content ids say what the two share. A session is named by its root's chat id. Where the parent is not among the rows
    before, the row keeps its turn and starts what is left of the session; such rows are counted.
    """
    rows = TraceRows("bailian", "s", 1.0, block_tokens=BLOCK_TOKENS)
    index_of: dict[int, int] = {}
    orphans = 0
    for row, record in file.json_rows():
        prompt_tokens = file.tokens(row, "input_length", record.get("input_length"))
        ids = ceil_blocks(file, row, "hash_ids", record, prompt_tokens, BLOCK_TOKENS)
        chat = _identity(file, row, "chat_id", record.get("chat_id"))
        parent_chat = _identity(file, row, "parent_chat_id", record.get("parent_chat_id", ROOT))
        parent = NO_PARENT if parent_chat == ROOT else index_of.get(parent_chat, NO_PARENT)
        orphans += parent == NO_PARENT and parent_chat != ROOT
        session = rows.session[parent] if parent >= 0 else chat if parent_chat == ROOT else parent_chat
        turn = file.tokens(row, "turn", record.get("turn", 1))
        if turn < 1:
            raise file.error(row, "turn", turn, "an integer >= 1")
        rows.add(
            row,
            file.seconds(row, "timestamp", record.get("timestamp")),
            prompt_tokens,
            file.tokens(row, "output_length", record.get("output_length")),
            session=session,
            turn=turn - 1,
            parent=parent,
        )
        rows.add_blocks(ids)
        index_of[chat] = len(rows) - 1
    if orphans:
        rows.notes["rows_whose_parent_is_missing"] = orphans
    return rows


def _identity(file: TraceFile, row: int, field: str, value: object) -> int:
    if type(value) is not int or not ROOT <= value < 2**63:
        raise file.error(row, field, value, "an integer >= -1 of at most 63 bits")
    return value
