"""Tables back to public trace formats, so that other tools can replay them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fleetpilot.workloads.readers import mooncake, vidur
from fleetpilot.workloads.table import NO_NODE, NO_SESSION, RequestTable


def write_mooncake(table: RequestTable, path: str | Path) -> None:
    """Write an open-loop table as Mooncake JSON lines.

    Times are milliseconds, to the nanosecond. Content ids stand for 512 tokens. Requests have equal ids
    where their prompts share whole blocks, and ids of their own everywhere else, so that a tool which generates text
    from ids finds the reuse that the table has, and no more. Of a shared prefix that ends within a block, what reaches
    into it is lost, unless that is where the prompts end too.

    `read_trace` returns what was written: the same lengths and prefixes, times to better than 1 us. (With
    ``rebase=False``, if the table does not start at 0; with ``ticks="raw"``, if it has requests at the same instant.)

    Raises:
        ValueError: if the table has closed-loop rows: the format has no time for them.
    """
    _check_open_loop(table, "write_mooncake")
    _warn_of_losses(table, "write_mooncake", {"session": NO_SESSION, "priority": 0, "slo_class": 0})
    columns = zip(
        table.arrival_s.tolist(),
        table.prompt_tokens.tolist(),
        table.output_tokens.tolist(),
        _block_ids(table),
        strict=True,
    )
    with Path(path).open("w", encoding="utf-8") as out:
        for arrival_s, prompt, output, ids in columns:
            time_ms = round(arrival_s * 1000, 6)
            row = {"timestamp": time_ms, "input_length": prompt, "output_length": output, "hash_ids": ids}
            out.write(json.dumps(row) + "\n")


def write_vidur(table: RequestTable, path: str | Path) -> None:
    """Write an open-loop table as Vidur's CSV (seconds with all their digits). Prefixes have no place in it.

    Raises:
        ValueError: if the table has closed-loop rows: the format has no time for them.
    """
    _check_open_loop(table, "write_vidur")
    lost = {"session": NO_SESSION, "priority": 0, "slo_class": 0, "prefix_node": NO_NODE}
    _warn_of_losses(table, "write_vidur", lost)
    columns = zip(table.arrival_s.tolist(), table.prompt_tokens.tolist(), table.output_tokens.tolist(), strict=True)
    with Path(path).open("w", encoding="utf-8") as out:
        out.write(",".join(vidur.COLUMNS) + "\n")
        out.writelines(f"{arrival_s!r},{prompt},{output}\n" for arrival_s, prompt, output in columns)


def _block_ids(table: RequestTable) -> Iterator[list[int]]:
    """For each row one id per block of its prompt, numbered from 0 in order of appearance.

    A block belongs to the node in which its last token lies, and is the same for all prompts that run through it.
    """
    block = mooncake.BLOCK_TOKENS
    parents, ends = table.node_parent.tolist(), table.node_end_tokens.tolist()
    number: dict[tuple[int, int], int] = {}
    next_id = 0
    deepest = np.where(table.own_node >= 0, table.own_node, table.prefix_node).tolist()
    for node, prompt in zip(deepest, table.prompt_tokens.tolist(), strict=True):
        path = []
        while node != NO_NODE:
            path.append(node)
            node = parents[node]
        ids = []
        for start in range(0, prompt, block):
            end = min(start + block, prompt)
            whole = end - start == block
            while path and ends[path[-1]] < end:
                path.pop()
            shared = bool(path) and (whole or ends[path[-1]] == end)
            ids.append(number.setdefault((path[-1], start), next_id) if shared else next_id)
            next_id += ids[-1] == next_id
        yield ids


def _check_open_loop(table: RequestTable, writer: str) -> None:
    closed = np.isnan(table.arrival_s)
    if closed.any():
        row = int(np.argmax(closed))
        raise ValueError(f"{writer}: arrival_s[{row}] = nan: expected a table without closed-loop rows")


def _warn_of_losses(table: RequestTable, writer: str, defaults: dict[str, int]) -> None:
    """Say which columns hold something that the format has no place for."""
    for column, default in defaults.items():
        count = int(np.sum(getattr(table, column) != default))
        if count:
            warnings.warn(f"{writer}: {column} of {count} rows has no place in the format", stacklevel=3)
