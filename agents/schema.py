"""What a network of ours reads: sizes, order and version of the features."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from fleetpilot.fleet.features import INSTANCE_FEATURES, KINDS, features_for, reads_more

SCHEMA_VERSION = 1
"""Of an export; a reader refuses a newer one. Counts up when features or network change their meaning."""

ILLEGAL = -1e8
"""Logit of an illegal choice."""

PRESENT = [feature.name for feature in INSTANCE_FEATURES].index("decode_speed")
"""The feature that is above 0 wherever a slot holds an instance."""

ARRAYS = ("instances", "request", "fleet", "kind", "action_mask")
"""Inputs of a network, in order."""


class Sizes(NamedTuple):
    """How many features there are of each sort."""

    instance: int
    request: int
    fleet: int
    kind: int = len(KINDS)

    @property
    def common(self) -> int:
        """Features that all instances of a fleet share."""
        return self.request + self.fleet + self.kind


def sizes_for(kinds: Collection[int]) -> Sizes:
    """Of a policy that answers these kinds of decision."""
    tables = features_for(kinds)
    return Sizes(*(len(tables[key]) for key in ("instances", "request", "fleet")))


def feature_schema(kinds: Collection[int]) -> dict[str, Any]:
    """Name, unit, range and formula of every feature, as they stand in an export."""
    return {
        "reads_more": reads_more(kinds),
        "kinds": list(KINDS),
        **{
            key: [{"name": f.name, "unit": f.unit, "low": f.low, "high": f.high, "formula": f.formula} for f in table]
            for key, table in features_for(kinds).items()
        },
    }
