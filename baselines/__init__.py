"""The dispatch policies of the literature, one short file each.

A module's docstring is its reference: the rule in one line, then ``Source:``, ``Reads:`` (the fields of the view) and
``Notes:``. `policy_rows` reads it for ``fleetpilot list policies`` and for docs/policies.md.
"""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.baselines, not baselines")

import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

from fleetpilot.baselines import (
    cache_aware,
    freeness,
    join_shortest_queue,
    least_conn,
    least_kv_usage,
    length_heuristic,
    lmetric,
    power_of_two,
    random_choice,
    round_robin,
    token_jsq,
    vllm_dp,
)
from fleetpilot.fleet.policy import Policy

_MODULES = {
    module.POLICY.name: module
    for module in (
        random_choice,
        round_robin,
        join_shortest_queue,
        power_of_two,
        least_kv_usage,
        token_jsq,
        length_heuristic,
        vllm_dp,
        least_conn,
        freeness,
        lmetric,
        cache_aware,
    )
}


def _shared(policy: Policy) -> Callable[[], Policy]:
    """A compiled policy has no state, so all its users share one object, compiled once."""
    return lambda: policy


BASELINES: dict[str, Callable[[], Policy]] = {name: _shared(module.POLICY) for name, module in _MODULES.items()}
"""Name -> how to make the policy."""


def load_policy(name: str) -> Policy:
    """The baseline of this name.

    Raises:
        ValueError: no baseline has this name.
    """
    if name not in BASELINES:
        raise ValueError(f"policy {name!r} is not known; expected one of {', '.join(BASELINES)}")
    return BASELINES[name]()


class PolicyRow(NamedTuple):
    """What a baseline's module says of it."""

    name: str
    rule: str
    source: str
    reads: tuple[str, ...]
    notes: str


def policy_rows() -> list[PolicyRow]:
    """The baselines' reference, in the order of `BASELINES`.

    `reads` names the fields of the view as ``instance.in_flight``, ``request.prompt_tokens``, ``fleet.decisions``.
    """
    rows = []
    for name, module in _MODULES.items():
        text = re.sub(r"\s+", " ", inspect.getdoc(module) or "")
        rule, source, reads, notes = re.split(r" (?:Source|Reads|Notes): ", text)
        rows.append(PolicyRow(name, rule, source, tuple(reads.split(", ")), notes))
    return rows
