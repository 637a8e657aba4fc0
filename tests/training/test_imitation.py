"""What imitation learns from."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from fleetpilot.fleet.features import KINDS
from fleetpilot.training.imitation import newest_of_each_kind

DISPATCH, SCALE = KINDS.index("dispatch"), KINDS.index("scale")


def newest(kinds: list[int], size: int) -> list[int]:
    """Which of these decisions, oldest first, are kept."""
    one_hot = np.eye(len(KINDS), dtype=np.float32)[kinds]
    kept = newest_of_each_kind({"kind": one_hot, "at": np.arange(len(kinds))}, size)
    assert (kept["kind"] == one_hot[kept["at"]]).all()
    return sorted(kept["at"].tolist())


def test_rare_kinds_of_decision_count_as_much_as_frequent_ones() -> None:
    kinds = [SCALE, SCALE, *[DISPATCH] * 6, SCALE, *[DISPATCH] * 2]
    assert newest(kinds, 4) == [1, 8, 9, 10]


def test_of_a_kind_that_there_is_less_of_all_is_kept() -> None:
    assert newest([SCALE, *[DISPATCH] * 6], 6) == [0, 4, 5, 6]


def test_of_a_single_kind_the_last_round_is_kept() -> None:
    assert newest([DISPATCH] * 8, 4) == [4, 5, 6, 7]
