"""Views of one fleet, written as the fields that a test is about, and what policies say to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.baselines import load_policy
from fleetpilot.fleet.policy import CompiledPolicy
from fleetpilot.fleet.view import FleetView, empty_view


def one_fleet(
    instances: int, request: dict[str, Any] | None = None, fleet: dict[str, Any] | None = None, **fields: Any
) -> FleetView:
    """A view of one row; `fields` are instance fields, each a value for all instances or one per instance."""
    view = empty_view(1, instances)
    for field, values in fields.items():
        view.instances[field][0] = values
    for field, value in (request or {}).items():
        view.request[field] = value
    for field, value in (fleet or {}).items():
        view.fleet[field] = value
    return view


def choice(policy: str | CompiledPolicy, view: FleetView) -> int:
    (slot,) = (load_policy(policy) if isinstance(policy, str) else policy).decide(view).choice
    return int(slot)


def drawn(view: FleetView, decisions: int) -> FleetView:
    """The one-row view repeated, each row with random bits of its own."""
    repeated = FleetView(
        np.repeat(view.instances, decisions, axis=0),
        np.repeat(view.request, decisions),
        np.repeat(view.fleet, decisions),
    )
    repeated.fleet["random_key"] = np.random.default_rng(1).integers(2**64, size=decisions, dtype=np.uint64)
    return repeated
