"""The live page at ``/dashboard``: what the dispatcher knows and decides, to read and nothing else.

The page is one file without anything from elsewhere; it asks for ``/dashboard/state`` every second. Decisions are kept
only while somebody looks.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetpilot.agents import LearnedPolicy
from fleetpilot.baselines import policy_rows
from fleetpilot.dispatcher.decisions import RECENT, Decided, said
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.features import KINDS
from fleetpilot.fleet.policy import Policy
from fleetpilot.fleet.view import INSTANCE_VIEW

if TYPE_CHECKING:
    from fleetpilot.dispatcher.migration import Migration
    from fleetpilot.dispatcher.policy_host import PolicyHost
    from fleetpilot.dispatcher.service import Dispatcher
    from fleetpilot.dispatcher.tally import Tally

HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cache-control", b"no-store"),
]
_WATCHED_S = 10.0
"""Decisions are kept for so long after the page last asked."""
_COLUMNS = ("running", "waiting", "kv_usage", "in_flight", "unstarted", "streamed_tokens", "poll_age_s")
_READ_BY_OTHERS = ("in_flight", "kv_usage", "waiting", "matched_tokens")
"""What is shown of a decision of a policy whose reference does not say what it reads."""


@cache
def page() -> bytes:
    """The page."""
    return Path(__file__).with_name("dashboard.html").read_bytes()


@cache
def _rule(policy: str) -> tuple[str, tuple[str, ...]]:
    """A baseline's rule, and the fields of an instance that it reads."""
    for row in policy_rows():
        if row.name == policy.partition("?")[0]:
            reads = [name.removeprefix("instance.") for name in row.reads if name.startswith("instance.")]
            names = INSTANCE_VIEW.names or ()
            return row.rule, tuple(name for name in reads if name in names)
    return "", _READ_BY_OTHERS


def _said_of(policy: Policy) -> str:
    """A baseline's rule; of a learned policy which requests it turns away."""
    if not isinstance(policy, LearnedPolicy):
        return _rule(policy.name)[0]
    admission = policy.admission
    if admission is None:
        rejected = "no request is rejected"
    elif isinstance(admission, Admission):
        rejected = (
            f"a request that would be later than {admission.late:g} times its target on all of them is rejected, on "
            f"slow ones {admission.busy * admission.late:g} times, where nobody waits and its own prefill is why, "
            f"{admission.cold:g} times"
        )
    else:
        rejected = f"what {admission} would reject is rejected"
    return f"A network scores the instances; {rejected}."


def watch(host: PolicyHost) -> None:
    """Somebody looks."""
    now_s = time.monotonic()
    if now_s >= host.watched_until_s:
        host.recent.clear()
    host.watched_until_s = now_s + _WATCHED_S


def state(dispatcher: Dispatcher, tally: Tally) -> dict[str, Any]:
    """What the page shows: of the fleet, and what all processes counted."""
    fleet, host, shadow = dispatcher.fleet, dispatcher.fleet.host, dispatcher.shadow
    return {
        "policy": {
            "name": host.policy.name,
            "rule": _said_of(host.policy),
            "fallback": host.fallback.name,
            "own_fallback": getattr(host.policy, "fallback", None),  # of a learned one, where it was not trained
        },
        "dry_run": host.dry_run,
        "explore": host.explore,
        "shadow": None if shadow is None else {"name": shadow.policy.name, "counts": dict(shadow.counts)},
        "log": None if dispatcher.log is None or not dispatcher.config.decision_log else tally.records,
        "held": fleet.held,
        "outcomes": tally.outcomes,
        "events": tally.events,
        "fallbacks": tally.fallbacks,
        "instances": [_instance(dispatcher, slot) for slot in range(len(fleet.engines))],
        "migrations": tally.migrations,
        "decisions": [_decision(of) for of in reversed(tally.recent[-RECENT:])],
    }


def _instance(dispatcher: Dispatcher, slot: int) -> dict[str, Any]:
    fleet, engine = dispatcher.fleet, dispatcher.fleet.engines[slot]
    record = fleet.view.instances[0][slot]
    numbers = {name: float(record[name]) for name in _COLUMNS} | {"poll_age_s": fleet.poll_age_s(slot)}
    return {
        "slot": slot,
        "url": engine.url if engine.has_address else "no address yet",
        "state": engine.state.name.lower(),
        "migrating": bool(record["migrating"]),
        **{name: value if np.isfinite(value) else None for name, value in numbers.items()},
    }


def migration(of: Migration) -> dict[str, Any]:
    """As the page has it."""
    return of.fields() | {"downtime_s": of.resumed_s - of.stopped_s if of.resumed_s else None}


def _decision(of: Decided) -> dict[str, Any]:
    """A decision with what the policy read of the chosen one beside the other candidates."""
    return {
        "number": of.number,
        "kind": KINDS[of.kind],
        "request": of.request,
        "policy": of.policy,
        "by": of.by,
        "reason": of.reason,
        "preferred": said(of.preferred),
        "choice": said(of.choice),
        "prompt_tokens": float(of.view.request["prompt_tokens"][0]),
        "read": _read(of) if of.preferred >= 0 else [],
    }


def _read(of: Decided) -> list[tuple[str, float, float, float]]:
    """(field, of the preferred instance, least of the other candidates, most); what tells none apart is left out."""
    instances = of.view.instances[0]
    others = (instances["candidate"] != 0) & (instances["slot"] != of.preferred)
    found = []
    for name in _rule(of.policy)[1]:
        mine, theirs = float(instances[name][of.preferred]), instances[name][others].astype(float)
        if len(theirs) and np.isfinite([mine, *theirs]).all() and not (theirs == mine).all():
            found.append((name, mine, float(theirs.min()), float(theirs.max())))
    return found
