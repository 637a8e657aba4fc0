"""The policies of the literature, one short file each.

A module's docstring is its reference: the rule in one line, then ``Source:``, ``Reads:`` (the fields of the view) and
``Notes:``. `policy_rows` reads it for ``fleetpilot list policies`` and for docs/policies.md.

A module with a function ``make`` is a policy with parameters, which a name may set as those of workloads do:
``llumnix?threshold=10&low=5``. Its ``RANGES`` say between which values `fleetpilot tune` looks for them.

`BASELINES` are policies; `ORACLE_BOUNDS` know what no dispatcher does, and are simulated only.
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
    balance_route,
    cache_aware,
    calibrated,
    dynamo_kv,
    freeness,
    hpa_kv,
    hpa_latency,
    hpa_queue,
    infaas,
    join_shortest_queue,
    least_conn,
    least_kv_usage,
    length_heuristic,
    llm_d,
    llm_d_slo,
    llumnix,
    llumnix_base,
    llumnix_paper,
    llumnix_surge,
    llumnix_v1,
    lmetric,
    mooncake,
    oracle_final_memory,
    oracle_least_work,
    oracle_past_future,
    past_future,
    polyserve,
    power_of_two,
    preble,
    random_choice,
    round_robin,
    smetric,
    splitwise,
    token_jsq,
    vllm_dp,
)
from fleetpilot.fleet.policy import CompiledPolicy, OracleBound, Policy, Range

_MODULES: dict[str, Any] = {
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
        llm_d,
        llm_d_slo,
        dynamo_kv,
        smetric,
        preble,
        balance_route,
        past_future,
        polyserve,
        calibrated,
        splitwise,
        mooncake,
        infaas,
        llumnix,
        llumnix_base,
        llumnix_paper,
        llumnix_surge,
        llumnix_v1,
        hpa_queue,
        hpa_kv,
        hpa_latency,
        oracle_least_work,
        oracle_final_memory,
        oracle_past_future,
    )
}


def _maker(module: Any) -> Callable[[], Policy]:
    """A compiled policy has no state, so all its users share one object, compiled once; others get one each."""
    return (lambda: module.POLICY) if isinstance(module.POLICY, CompiledPolicy) else module.make


_MAKERS: dict[str, Callable[[], Policy]] = {name: _maker(module) for name, module in _MODULES.items()}

BASELINES = {name: make for name, make in _MAKERS.items() if not isinstance(_MODULES[name].POLICY, OracleBound)}
"""Name -> how to make the policy, with its default parameters."""

ORACLE_BOUNDS = {name: make for name, make in _MAKERS.items() if name not in BASELINES}
"""The same of bounds."""


def load_policy(name: str) -> Policy:
    """The baseline or oracle bound of this name, with parameters behind a ``?`` if it has any.

    Raises:
        ValueError: none has this name, or a parameter is not one of its own, or not of the kind that it takes.
    """
    base, given = read_name(name)
    if base not in _MAKERS:
        raise ValueError(f"policy {base!r} is not known; expected one of {', '.join(BASELINES)}")
    if not given:
        return _MAKERS[base]()
    return (_shared if isinstance(_MODULES[base].POLICY, CompiledPolicy) else _made)(name)


def read_name(name: str) -> tuple[str, dict[str, str]]:
    """A policy's name without parameters, and these as texts.

    Raises:
        ValueError: one is given twice, or there is a ``?`` and none behind it.
    """
    base, question_mark, text = name.partition("?")
    given: dict[str, str] = {}
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key in given:
            raise ValueError(f"policy {name!r}: {key} is given twice; expected it once")
        given[key] = value
    if question_mark and not given:
        raise ValueError(f"policy {name!r}: expected PARAMETER=VALUE behind the ?")
    return base, given


@cache
def _shared(name: str) -> Policy:
    return _made(name)


def _made(name: str) -> Policy:
    base, given = read_name(name)
    known = policy_parameters(base)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            expected = f"one of {', '.join(known)}" if known else "none"
            raise ValueError(f"policy {name!r}: parameter {key!r} is not known; expected {expected}")
        values[key] = _dispatch(name, key, value) if isinstance(known[key], str) else _number(name, key, value)
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


def _dispatch(name: str, key: str, text: str) -> CompiledPolicy:
    policy = load_policy(text) if text in BASELINES else None
    if not isinstance(policy, CompiledPolicy):
        known = [each for each in BASELINES if isinstance(_MODULES[each].POLICY, CompiledPolicy)]
        raise ValueError(f"policy {name!r}: {key} = {text!r}: expected one of {', '.join(known)}")
    return policy


def policy_parameters(name: str) -> dict[str, float | str]:
    """What a policy's name may set, with the defaults; empty for many. A text is the name of another policy."""
    make = getattr(_MODULES[name], "make", None)
    defaults = {p.name: p.default for p in inspect.signature(make).parameters.values()} if make else {}
    return {key: default.name if isinstance(default, CompiledPolicy) else default for key, default in defaults.items()}


def policy_ranges(name: str) -> dict[str, Range]:
    """Between which values a policy's parameters are looked for; those without a range keep their defaults."""
    return dict(getattr(_MODULES[name], "RANGES", {}))


class PolicyRow(NamedTuple):
    """What a baseline's module says of it."""

    name: str
    rule: str
    source: str
    reads: tuple[str, ...]
    notes: str
    parameters: dict[str, float | str]


def policy_rows() -> list[PolicyRow]:
    """The policies' reference, in the order of `BASELINES`, then the bounds'.

    `reads` names the fields of the view as ``instance.in_flight``, ``request.prompt_tokens``, ``fleet.decisions``.
    """
    rows = []
    for name, module in _MODULES.items():
        text = re.sub(r"\s+", " ", inspect.getdoc(module) or "")
        rule, source, reads, notes = re.split(r" (?:Source|Reads|Notes): ", text)
        rows.append(PolicyRow(name, rule, source, tuple(reads.split(", ")), notes, policy_parameters(name)))
    return rows
