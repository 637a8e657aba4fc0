"""The policies of the literature, one short file each.

A module's docstring is its reference: the rule in one line, then ``Source:``, ``Reads:`` (the fields of the view) and
``Notes:``. `policy_rows` reads it for ``fleetpilot list policies`` and for docs/policies.md.

A module with a function ``make`` is a policy with parameters, which a name may set as those of workloads do:
``llumnix?threshold=10&low=5``.
"""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.baselines, not baselines")

import inspect
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from fleetpilot.baselines import (
    cache_aware,
    freeness,
    infaas,
    join_shortest_queue,
    least_conn,
    least_kv_usage,
    length_heuristic,
    llumnix,
    llumnix_base,
    llumnix_paper,
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
        infaas,
        llumnix,
        llumnix_base,
        llumnix_paper,
    )
}


def _shared(policy: Policy) -> Callable[[], Policy]:
    """A compiled policy has no state, so all its users share one object, compiled once."""
    return lambda: policy


BASELINES: dict[str, Callable[[], Policy]] = {name: _shared(module.POLICY) for name, module in _MODULES.items()}
"""Name -> how to make the policy, with its default parameters."""


def load_policy(name: str) -> Policy:
    """The baseline of this name, with parameters behind a ``?`` if it has any.

    Raises:
        ValueError: no baseline has this name, or a parameter is not one of its own or no number.
    """
    base, question_mark, parameters = name.partition("?")
    if base not in BASELINES:
        raise ValueError(f"policy {base!r} is not known; expected one of {', '.join(BASELINES)}")
    return _with_parameters(name, base, parameters) if question_mark else BASELINES[base]()


@cache  # compiled policies have no state: all who give the same name share one object
def _with_parameters(name: str, base: str, parameters: str) -> Policy:
    known = policy_parameters(base)
    values = {}
    for key, text in parse_qsl(parameters, keep_blank_values=True):
        if key not in known:
            expected = f"one of {', '.join(known)}" if known else "none"
            raise ValueError(f"policy {name!r}: parameter {key!r} is not known; expected {expected}")
        if key in values:
            raise ValueError(f"policy {name!r}: {key} is given twice; expected it once")
        values[key] = _number(name, key, text)
    if not values:
        raise ValueError(f"policy {name!r}: expected PARAMETER=VALUE behind the ?")
    policy: Any = _MODULES[base].make(**values)
    policy.name = name
    return policy  # type: ignore[no-any-return]


def _number(name: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"policy {name!r}: {key} = {text!r}: expected a number")
    return value


def policy_parameters(name: str) -> dict[str, float]:
    """What a baseline's name may set, with the defaults; empty for most."""
    make = getattr(_MODULES[name], "make", None)
    return {p.name: p.default for p in inspect.signature(make).parameters.values()} if make else {}


class PolicyRow(NamedTuple):
    """What a baseline's module says of it."""

    name: str
    rule: str
    source: str
    reads: tuple[str, ...]
    notes: str
    parameters: dict[str, float]


def policy_rows() -> list[PolicyRow]:
    """The baselines' reference, in the order of `BASELINES`.

    `reads` names the fields of the view as ``instance.in_flight``, ``request.prompt_tokens``, ``fleet.decisions``.
    """
    rows = []
    for name, module in _MODULES.items():
        text = re.sub(r"\s+", " ", inspect.getdoc(module) or "")
        rule, source, reads, notes = re.split(r" (?:Source|Reads|Notes): ", text)
        rows.append(PolicyRow(name, rule, source, tuple(reads.split(", ")), notes, policy_parameters(name)))
    return rows
