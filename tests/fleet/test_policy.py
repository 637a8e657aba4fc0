"""A policy of one's own: what `CompiledPolicy` takes and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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


def test_a_function_of_a_file_that_is_no_module_is_a_policy_every_time(tmp_path: Path) -> None:
    """In the second process it must not come out of Numba's cache, which cannot load it again."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from fleetpilot.fleet.policy import CompiledPolicy\n"
        "from fleetpilot.fleet.view import empty_view\n"
        "def choose(instances, requests, fleets):\n"
        "    return 1\n"
        "print(CompiledPolicy('mine', choose).decide(empty_view(3, 2)).choice.tolist())\n"
    )
    run = f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'), {{'__name__': 'mine'}})"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
        assert done.stdout == "[1, 1, 1]\n", done.stderr
