"""The interface of every policy, and the policies that are one compiled function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from fleetpilot.fleet.jit import UNCOMPILED, function_pointer, inlined, kernel
from fleetpilot.fleet.view import (
    FLEET_VIEW,
    INSTANCE_VIEW,
    KIND_DECODE,
    KIND_DISPATCH,
    KIND_PREFILL,
    NONE,
    REQUEST_VIEW,
    Decision,
    FleetView,
)


@runtime_checkable
class Policy(Protocol):
    """Chooses one instance, or none, whenever the simulator or the dispatcher asks.

    It is asked to dispatch and nothing else, unless it has an attribute ``kinds``: see `kinds_of`.

    Attributes:
        name: as in results.
    """

    name: str

    def reset(self, batch: int, seed: int) -> None:
        """Forget everything; `batch` fleets follow."""

    def decide(self, view: FleetView) -> Decision:
        """Choose for each row of the view. Rows are the same fleets from call to call since `reset`."""


def kinds_of(policy: Policy) -> tuple[int, ...]:
    """The kinds of decision that a policy answers: `fleetpilot.fleet.view.KIND_DISPATCH`, ...

    One that answers dispatch and neither prefill nor decode is asked to dispatch in their stead where there are pools.
    """
    return getattr(policy, "kinds", (KIND_DISPATCH,))


def only_places(policy: Policy) -> bool:
    """Whether it says where requests go, in pools by rules of their own or not, and moves and scales nothing."""
    return set(kinds_of(policy)) <= {KIND_DISPATCH, KIND_PREFILL, KIND_DECODE}


class Range(NamedTuple):
    """Between which values a parameter of a policy is looked for.

    Attributes:
        low: least value.
        high: largest value.
        log: whether it is the factor that counts between two values, not the difference.
        whole: whether only whole numbers count.
        kind: of decision that the parameter is about.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    kind: int = KIND_DISPATCH


def kind_bits(kinds: Iterable[int]) -> int:
    """A bit for each kind of decision, for `knows` and `answers`."""
    return sum(1 << kind for kind in set(kinds))


@inlined
def knows(kinds: int, kind: int) -> bool:
    """Whether the kind of decision is among these, a bit for each."""
    return (kinds >> kind) & 1 != 0


@inlined
def answers(kinds: int, kind: int) -> bool:
    """Whether it can be asked who answers these kinds, a bit for each: who dispatches can choose in pools as well."""
    of_pools = kind in (KIND_PREFILL, KIND_DECODE)
    return knows(kinds, kind) or (of_pools and knows(kinds, KIND_DISPATCH))


Choose = Callable[[Any, Any, Any], int]
"""``choose(instances, requests, fleets) -> slot``: one row of a view as 1-D record arrays, `requests` and `fleets` of
length 1."""

CHOOSE_SIGNATURE = types.int64(
    numba.from_dtype(INSTANCE_VIEW)[::1], numba.from_dtype(REQUEST_VIEW)[::1], numba.from_dtype(FLEET_VIEW)[::1]
)


class CompiledPolicy:
    """A policy without state of its own: one function of the view, compiled, called inside the simulator's kernel.

    Args:
        name: as listed by ``fleetpilot list policies``.
        choose: see `Choose`. Plain Python that Numba compiles.
        kinds: of decision that it answers, dispatch alone by default.

    Raises:
        TypeError: `name` is no text, or `choose` no function.
        ValueError: `name` is empty, or `choose` does not take three arguments.
    """

    def __init__(self, name: str, choose: Choose, kinds: tuple[int, ...] = (KIND_DISPATCH,)):
        if not isinstance(name, str):
            raise TypeError(f"name = {name!r}: expected a text")
        if not name.strip():
            raise ValueError(f"name = {name!r}: expected a text that is not empty")
        _check_choose(choose)
        self.name = name
        self.kinds = kinds
        self.python_choose = choose

    @cached_property
    def choose(self) -> Any:
        """The compiled function; all compiled policies share one type, so kernels are compiled once for all."""
        return function_pointer(CHOOSE_SIGNATURE, self.python_choose)

    @property
    def address(self) -> Any:
        """What `choose_at` takes for it, as long as this policy lives."""
        return self.choose if UNCOMPILED else self.choose.address

    def reset(self, batch: int, seed: int) -> None:
        """Nothing to forget."""

    def decide(self, view: FleetView) -> Decision:
        """Choose for each row of the view."""
        choice = np.empty(len(view), np.int64)
        _choose_rows(self.address, view.instances, view.request, view.fleet, choice)
        return Decision(choice)

    def __repr__(self) -> str:
        return f"CompiledPolicy({self.name!r})"


class OracleBound(CompiledPolicy):
    """What no dispatcher could do: a bound, not a policy.

    The simulator tells it true lengths in place of predictions, and what engines hold with no delay
    (`fleetpilot.cluster.simulate`). A dispatcher and the environments refuse it.
    """


def refuse_oracle(argument: str, policy: Policy) -> None:
    """Where nothing can tell it the truth.

    Raises:
        ValueError: the policy is an `OracleBound`.
    """
    if isinstance(policy, OracleBound):
        raise ValueError(f"{argument} = {policy.name!r}: expected a policy; this bound knows the answers' true lengths")


def require_compiled(argument: str, policy: Policy) -> CompiledPolicy:
    """The policy, where one is called with nothing known of earlier calls.

    Raises:
        ValueError: it has a state of its own, or is an `OracleBound`.
    """
    refuse_oracle(argument, policy)
    if not isinstance(policy, CompiledPolicy):
        raise ValueError(f"{argument} = {policy.name!r}: expected a compiled policy, without state of its own")
    return policy


def _check_choose(choose: object) -> None:
    if not inspect.isfunction(choose):
        raise TypeError(f"choose = {choose!r}: expected a plain function choose(instances, requests, fleets) -> slot")
    signature = inspect.signature(choose)
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise ValueError(
            f"choose = {choose.__name__}{signature}: expected three arguments, (instances, requests, fleets)"
        ) from None


def _choose_at() -> Callable[[Any, Any, Any, Any], int]:
    """``choose_at(address, instances, requests, fleets)`` calls the `choose` of a `CompiledPolicy` by its address.

    To recognise a pointer that Python passes takes Numba 20 microseconds, as long as ten decisions; a number, none.
    """
    if UNCOMPILED:
        return lambda address, *view: address(*view)  # type: ignore[no-any-return]

    def call(typingctx: Any, address: Any, instances: Any, requests: Any, fleets: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = [context.get_value_type(kind) for kind in (signature.return_type, *signature.args[1:])]
            function: Any = ir.FunctionType(values[0], values[1:])
            return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

        return types.int64(types.int64, *CHOOSE_SIGNATURE.args), codegen

    return cast("Callable[[Any, Any, Any, Any], int]", intrinsic(call))


choose_at = _choose_at()


@kernel
def _choose_rows(address: Any, instances: Any, request: Any, fleet: Any, choice: Any) -> None:
    for row in range(len(choice)):
        choice[row] = choose_at(address, instances[row], request[row : row + 1], fleet[row : row + 1])


@kernel
def random_unit(key: int, stream: int) -> float:
    """A uniform draw in [0, 1), a pure function of its two keys (SplitMix64's finaliser)."""
    x = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(stream + 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.float64(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


# Inlined because a kernel passed as an argument would be an address, which Numba cannot cache on disk.
@numba.njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def lowest_candidate(key: Callable[[Any, Any, Any], Any], instances: Any, requests: Any, fleets: Any) -> int:
    """The candidate of the lowest ``key(instance, request, fleet)``, as `min` with a key: ties go to the lowest slot.

    `key` is a kernel that returns a float, or a tuple of floats to say how ties are broken. `NONE` without candidates.
    """
    best = NONE
    best_key = key(instances[0], requests[0], fleets[0])
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            slot_key = key(instances[slot], requests[0], fleets[0])
            if best == NONE or slot_key < best_key:
                best, best_key = slot, slot_key
    return best


@kernel
def candidate_count(instances: Any) -> int:
    """How many instances may be chosen."""
    count = 0
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            count += 1
    return count


@kernel
def nth_candidate(instances: Any, n: int) -> int:
    """The slot of the n-th candidate, counted from 0; `NONE` past the last."""
    for slot in range(len(instances)):
        if instances[slot].candidate != 0:
            if n == 0:
                return slot
            n -= 1
    return NONE
