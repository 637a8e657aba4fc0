"""A decision, and its view as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.view import FLEET_VIEW, INSTANCE_VIEW, KIND_DISPATCH, NONE, REJECT, REQUEST_VIEW, FleetView

BY_POLICY, BY_FALLBACK, BY_EXPLORATION, BY_DRY_RUN = "policy", "fallback", "exploration", "dry run"
"""Who decided; in a dry run nothing that the policy prefers is carried out."""
REJECTED = "reject"
RECENT = 30
"""Decisions that are kept for who looks."""


@dataclass(frozen=True)
class Decided:
    """A decision.

    Attributes:
        number: in its run, from 1.
        request: that it is about; empty for none.
        kind: of `fleetpilot.fleet.view`.
        policy: its name.
        by: who decided, as `BY_POLICY`.
        reason: why the policy did not; empty where it did.
        preferred: choice of the policy, or of the fallback in its place.
        choice: that was carried out.
        propensity: probability of `choice` under the way choices were made, given the view.
        view: what the policy saw, a copy.
    """

    number: int
    request: str
    kind: int
    policy: str
    by: str
    reason: str
    preferred: int
    choice: int
    propensity: float
    view: FleetView

    def fields(self) -> dict[str, Any]:
        """As in the log."""
        return {
            "decision": self.number,
            "request": self.request or None,
            "kind": KINDS[self.kind],
            "policy": self.policy,
            "by": self.by,
            "reason": self.reason or None,
            "preferred": said(self.preferred),
            "choice": said(self.choice),
            "propensity": self.propensity,
            "view": view_fields(self.view),
        }


def said(choice: int) -> int | str | None:
    """A choice as in the log: a slot, null for `NONE`, or ``"reject"``."""
    return {NONE: None, REJECT: REJECTED}.get(choice, choice)


def choice_of(recorded: int | str | None) -> int:
    """The choice that is so in the log.

    Raises:
        ValueError: it is none.
    """
    if recorded is None:
        return NONE
    if recorded == REJECTED:
        return REJECT
    if not isinstance(recorded, int) or isinstance(recorded, bool) or recorded < 0:
        raise ValueError(f"choice = {recorded!r}: expected an instance's slot, null or {REJECTED!r}")
    return recorded


def is_legal(choice: int, view: FleetView, *, may_reject: bool = True) -> bool:
    """Whether this may be chosen: a candidate, `NONE` where that is allowed, or `REJECT` of a request to be placed.

    Args:
        choice: of a policy.
        view: that it was asked about.
        may_reject: whether nothing of the request's answer has come; a view does not say it.
    """
    if choice == REJECT:
        return may_reject and int(view.fleet["kind"][0]) == KIND_DISPATCH
    if choice == NONE:
        return bool(view.fleet["may_hold"][0])
    instances = view.instances[0]
    return 0 <= choice < len(instances) and bool(instances["candidate"][choice])


# --- views as JSON, and back -----------------------------------------------------------------------------------------


def view_fields(view: FleetView) -> dict[str, Any]:
    """A view of one fleet: its instances by column."""
    instances, request, fleet = view.instances[0], view.request[0], view.fleet[0]
    return {
        "instances": {name: instances[name].tolist() for name in _names(INSTANCE_VIEW)},
        "request": dict(zip(_names(REQUEST_VIEW), request.item(), strict=True)),
        "fleet": dict(zip(_names(FLEET_VIEW), fleet.item(), strict=True)),
    }


def view_of(fields: Mapping[str, Any]) -> FleetView:
    """The view again, bit for bit.

    Raises:
        ValueError: fields are missing, unknown or of the wrong type: the log is of another version, or damaged.
    """
    try:
        columns = fields["instances"]
        view = FleetView(
            np.zeros((1, len(columns["slot"])), INSTANCE_VIEW), np.zeros(1, REQUEST_VIEW), np.zeros(1, FLEET_VIEW)
        )
        for part, records in (("instances", view.instances[0]), ("request", view.request), ("fleet", view.fleet)):
            _fill(part, fields[part], records)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"view: {type(error).__name__}: {error}; expected that of a decision log") from None
    return view


def _fill(part: str, fields: Mapping[str, Any], records: np.ndarray[Any, Any]) -> None:
    names = _names(records.dtype)
    if set(fields) != set(names):
        odd = sorted(set(fields) ^ set(names))
        raise ValueError(f"view: {part} with other fields than this version's: {', '.join(odd)}")
    for name in names:
        value = fields[name]
        values = value if part == "instances" else [value]
        if len(values) != len(records):
            raise ValueError(f"view: {part}.{name} has {len(values)} values, expected {len(records)}")
        for item in values:
            if not isinstance(item, int | float | None):
                raise ValueError(f"view: {part}.{name} = {item!r}: expected a number or null")
        records[name] = [np.inf if item is None else item for item in values]


def _names(dtype: np.dtype[np.void]) -> tuple[str, ...]:
    assert dtype.names is not None
    return dtype.names
