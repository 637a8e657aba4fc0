"""Whether what environments return is the same, to the bit."""

from __future__ import annotations

from typing import Any


def same(a: Any, b: Any) -> bool:
    """Of arrays in tuples, lists and dictionaries."""
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a.tobytes() == b.tobytes())
