"""A policy of one's own: what `CompiledPolicy` takes and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpilot.fleet.policy import CompiledPolicy
from fleetpilot.fleet.view import empty_view


def first(instances: Any, requests: Any, fleets: Any) -> int:
    return 0


def two(instances: Any, requests: Any) -> int:
    return 0


def test_a_function_of_three_arguments_is_a_policy() -> None:
    assert CompiledPolicy("first", first).decide(empty_view(3, 2)).choice.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "choose", "error", "message"),
    [
        ("a", 3, TypeError, r"choose = 3: expected a plain function choose\(instances, requests, fleets\)"),
        ("a", "first", TypeError, "choose = 'first': expected a plain function"),
        ("a", two, ValueError, r"choose = two\(instances.*\).*: expected three arguments, \(instances, requests"),
        ("", first, ValueError, "name = '': expected a text that is not empty"),
        (" ", first, ValueError, "name = ' ': expected a text that is not empty"),
        (None, first, TypeError, "name = None: expected a text"),
    ],
)
def test_anything_else_is_refused_when_it_is_made(name: Any, choose: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CompiledPolicy(name, choose)
