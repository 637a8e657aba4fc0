"""Checks of generator parameters: one clear error that names owner, parameter, value and expectation."""

from __future__ import annotations

import math


def require(ok: bool, owner: object, field: str, value: object, expected: str) -> None:
    """Raise a ValueError unless ``ok``."""
    if not ok:
        raise ValueError(f"{type(owner).__name__}: {field} = {value!r}: expected {expected}")


def require_positive(owner: object, field: str, value: float) -> None:
    """A finite number above 0."""
    require(math.isfinite(value) and value > 0, owner, field, value, "a finite number > 0")


def require_non_negative(owner: object, field: str, value: float) -> None:
    """A finite number of at least 0."""
    require(math.isfinite(value) and value >= 0, owner, field, value, "a finite number >= 0")
