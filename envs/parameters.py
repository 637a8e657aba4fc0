"""Numbers that differ from episode to episode: what they mean, what they may be, and how one is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Range = float | tuple[float, float]
"""A fixed number, or the ends of a uniform distribution."""

MAX_INSTANCES = 4096
"""Slots for instances of an environment, at most."""


@dataclass(frozen=True)
class Parameter:
    """One number of an episode.

    Attributes:
        unit: of the number.
        low: least value allowed.
        high: largest value allowed.
        meaning: in words.
        whole: only whole numbers.
    """

    unit: str
    low: float
    high: float
    meaning: str
    whole: bool = False

    def checked(self, name: str, value: object) -> float:
        """The number.

        Raises:
            ValueError: it is none, or out of range; naming parameter, value and expectation.
        """
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | np.integer | np.floating)
            or not math.isfinite(value)
            or not self.low <= value <= self.high
            or (self.whole and value != int(value))
        ):
            kind = "a whole number" if self.whole else "a number"
            unit = f" ({self.unit})" if self.unit else ""
            raise ValueError(f"{name} = {value!r}: expected {kind} from {self.low:g} to {self.high:g}{unit}")
        return float(value)

    def checked_range(self, name: str, value: object) -> tuple[float, float]:
        """The ends of a range.

        Raises:
            ValueError: as `checked`; or the ends are the wrong way round.
        """
        if isinstance(value, tuple | list):
            if len(value) != 2:
                raise ValueError(f"{name} = {value!r}: expected a number or the two ends of a range")
            low, high = (self.checked(name, end) for end in value)
            if low > high:
                raise ValueError(f"{name} = {value!r}: expected the lower end of the range first")
            return low, high
        number = self.checked(name, value)
        return number, number

    def at(self, share: float, low: float, high: float) -> float:
        """The value at a share, in [0, 1), of the range."""
        if self.whole:
            return min(low + math.floor(share * (high - low + 1)), high)
        return low + share * (high - low)


def checked_count(name: str, value: object, most: int) -> int:
    """A whole number from 1 to `most`.

    Raises:
        ValueError: naming the argument, its value and what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
        raise ValueError(f"{name} = {value!r}: expected a whole number from 1 to {most:,}")
    return int(value)


def checked_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse what is of another type.

    Raises:
        TypeError: naming the argument, its value and what was expected.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} = {value!r}: expected {expected}")


def checked_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse what is not known.

    Raises:
        ValueError: naming the unknown and the known.
    """
    known = sorted(known)
    for name in given:
        if name not in known:
            raise ValueError(f"{what} {name!r} is not known; expected one of {', '.join(known)}")
