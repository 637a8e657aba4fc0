"""Views of one fleet, written as the fields that a test is about."""

from __future__ import annotations

from typing import Any

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
