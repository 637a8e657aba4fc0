"""The canonical table: what it refuses, and how it says so."""

from __future__ import annotations

import numpy as np
import pytest

from fleetpilot.workloads import RequestTable, make_table
from fleetpilot.workloads.table import split

NAN = float("nan")


def table(**columns: object) -> RequestTable:
    known: dict[str, object] = {"arrival_s": [0.0, 1.0], "prompt_tokens": [10, 20], "output_tokens": [1, 2]}
    return make_table("t", **{**known, **columns})  # type: ignore[arg-type]


def test_unknown_columns_get_their_defaults() -> None:
    made = table()
    assert made.predicted_output_tokens.tolist() == [1.5, 1.5]  # the mean, as a dispatcher would learn it
    assert made.session.tolist() == made.parent.tolist() == made.prefix_node.tolist() == [-1, -1]
    assert made.span_s == 1.0
    assert make_table("empty", [], [], []).span_s == 0.0


TREE = {"node_parent": [-1, 0], "node_end_tokens": [5, 10]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival_s": [0.0, NAN]}, r"arrival_s\[1\] = nan: expected a finite time >= 0"),
        ({"arrival_s": [-1.0, 0.0]}, r"arrival_s\[0\] = -1.0: expected a finite time >= 0"),
        ({"arrival_s": [2.0, 1.0]}, r"arrival_s\[1\] = 1.0: expected rows sorted by arrival"),
        ({"prompt_tokens": [10, 0]}, r"prompt_tokens\[1\] = 0: expected >= 1"),
        ({"prompt_tokens": [10, 2.5]}, r"prompt_tokens\[1\] = 2.5: expected an integer in"),
        ({"prompt_tokens": [10, 2**31]}, r"prompt_tokens\[1\] = .*: expected an integer in"),
        ({"prompt_tokens": ["a", "b"]}, r"prompt_tokens: expected integers"),
        ({"output_tokens": [0, 1]}, r"output_tokens\[0\] = 0: expected >= 1"),
        ({"output_tokens": [1]}, "output_tokens has 1 rows, arrival_s has 2"),
        ({"predicted_output_tokens": [1.0, 0.0]}, r"predicted_output_tokens\[1\] = 0.0: expected a finite number > 0"),
        ({"slo_class": [0, -1]}, r"slo_class\[1\] = -1: expected >= 0"),
        ({"parent": [1, -1]}, r"parent\[0\] = 1: expected -1 or a smaller row"),
        ({"arrival_s": [0.0, NAN], "think_s": [NAN, 1.0]}, r"parent\[1\] = -1: expected a row, where think_s is given"),
        ({"parent": [-1, 0], "think_s": [NAN, 1.0]}, r"arrival_s\[1\] = 1.0: expected NaN where think_s is given"),
        (
            {"arrival_s": [0.0, NAN], "parent": [-1, 0], "think_s": [NAN, -1.0]},
            r"think_s\[1\] = -1.0: expected a finite time >= 0",
        ),
        ({"node_parent": [-1]}, "node_parent has 1 rows, node_end_tokens has 0"),
        ({**TREE, "node_parent": [-1, 1]}, r"node_parent\[1\] = 1: expected -1 or a smaller node"),
        ({**TREE, "node_end_tokens": [5, 5]}, r"node_end_tokens\[1\] = 5: expected more than the parent node's end"),
        ({**TREE, "prefix_node": [0, 2]}, r"prefix_node\[1\] = 2: expected -1 or a node below 2"),
        (
            {**TREE, "prefix_node": [1, -1], "prompt_tokens": [9, 20]},
            r"prefix_node\[0\] = 1: expected a node no lon",
        ),
        ({**TREE, "own_node": [1, -1]}, r"own_node\[0\] = 1: expected a child of prefix_node"),
        ({**TREE, "own_node": [0, -1], "prompt_tokens": [3, 20]}, r"own_node\[0\] = 0: expected a node no longer than"),
        ({"color": [1, 2]}, "unknown column 'color'; expected one of"),
    ],
)
def test_what_is_wrong_is_named(columns: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**columns)


def test_a_changed_copy_is_checked_too() -> None:
    made = table()
    assert made.replace(name="other").name == "other"
    with pytest.raises(ValueError, match=r"output_tokens\[0\] = 0"):
        made.replace(output_tokens=np.array([0, 1], np.int32))


def test_parts_for_streaming() -> None:
    whole = make_table("t", np.arange(5.0), np.arange(1, 6), np.ones(5))
    parts = list(split(whole, 2))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert np.concatenate([part.prompt_tokens for part in parts]).tolist() == whole.prompt_tokens.tolist()
    with pytest.raises(ValueError, match="without sessions and shared prefixes"):
        list(split(table(parent=[-1, 0]), 2))
