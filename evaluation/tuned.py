"""The file of chosen parameters: which parameters each policy has in which family of scenarios (`fleetpilot tune`).

`OURS` comes with fleetpilot (``tools/build_tuning.py``): its families are workloads, and
docs/tuning.md says what was gained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
OURS = Path(__file__).with_name("tuned.json")


def read_tuned(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Family -> policy -> what was chosen for it, and how.

    Raises:
        ValueError: it is no such file, or one of another format.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        found, families = content["format"], content["families"]
        names = [policy["chosen"] for chosen in families.values() for policy in chosen.values()]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: expected a file that fleetpilot tune wrote") from None
    if found != FORMAT:
        raise ValueError(f"{path}: format = {found!r}: expected {FORMAT}")
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{path}: chosen = {name!r}: expected a policy's name")
    return families  # type: ignore[no-any-return]


def tuned_names(path: Path, family: str, policies: Sequence[str]) -> list[str]:
    """The policies with the parameters chosen for a family; those that the file does not have stay as they are.

    Raises:
        ValueError: the file does not have the family.
    """
    families = read_tuned(path)
    if family not in families:
        raise ValueError(f"{path}: family {family!r} is not there; expected one of {', '.join(families)} (--family)")
    chosen = families[family]
    return [chosen[policy]["chosen"] if policy in chosen else policy for policy in policies]
