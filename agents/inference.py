"""The network of `fleetpilot.agents.scorer` in compiled loops, and the decision around it.

A loaded policy is a block of memory that kernels find by its address (`Words`), so the function that decides is
compiled once for all policies; each policy's own entry point only holds its address. With ``NUMBA_DISABLE_JIT=1`` the
address is the Python object itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numpy.typing import NDArray

from fleetpilot.agents.schema import ILLEGAL, PRESENT
from fleetpilot.fleet.features import KINDS, write_features
from fleetpilot.fleet.jit import UNCOMPILED, inlined, kernel
from fleetpilot.fleet.policy import answers, choose_at, random_unit
from fleetpilot.fleet.view import NONE

GREEDY, SAMPLE = range(2)
MODES = ("greedy", "sample")
"""How a choice is made of the logits: the likeliest, or drawn, by the decision's `random_key`."""

_K = len(KINDS)
_GATE_STREAM, _INSTANCE_STREAM = 11, 12  # of `random_unit`


class Words(IntEnum):
    """What stands where in a policy's block of 64-bit words."""

    INSTANCE = 0  # features of an instance, ...
    REQUEST = auto()
    FLEET = auto()
    HIDDEN = auto()
    MODE = auto()
    KINDS = auto()  # that the network answers, a bit for each
    WEIGHTS = auto()  # addresses
    LOW = auto()
    HIGH = auto()
    FALLBACK = auto()
    FALLBACK_KINDS = auto()  # a bit for each
    DECISIONS = auto()  # counts
    OUT_OF_RANGE = auto()


_INSTANCE, _REQUEST, _FLEET, _HIDDEN, _MODE, _KINDS = map(int, [*Words][:6])
_WEIGHTS, _LOW, _HIGH, _FALLBACK, _FALLBACK_KINDS = map(int, [*Words][6:11])
_DECISIONS, _OUT_OF_RANGE, _COUNT = int(Words.DECISIONS), int(Words.OUT_OF_RANGE), len(Words)

WEIGHTS = (
    "instance.weight",
    "common.weight",
    "common.bias",
    "context.weight",
    "context.bias",
    "key.weight",
    "query.weight",
    "query.bias",
    "score.weight",
    "gate_hidden.weight",
    "gate_hidden.bias",
    "gate.weight",
    "gate_bias",
)
"""A network's weights in the order in which they lie in memory, matrices (in, out): rows are added up."""


class Memory:
    """A policy's block: what it holds must live as long as kernels use its address."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        hidden: int,
        weights: NDArray[np.float32],
        low: NDArray[np.float32],
        high: NDArray[np.float32],
        mode: int,
        kinds: int,
        fallback: Any,
        fallback_kinds: int,
    ):
        self.words = np.zeros(len(Words), np.int64)
        self.arrays = {Words.WEIGHTS: weights, Words.LOW: low, Words.HIGH: high}
        self.fallback = fallback
        self.words[: Words.WEIGHTS] = *sizes, hidden, mode, kinds
        self.words[Words.FALLBACK_KINDS] = fallback_kinds
        if not UNCOMPILED:
            for word, array in self.arrays.items():
                self.words[word] = array.ctypes.data
            self.words[Words.FALLBACK] = fallback.address

    @property
    def address(self) -> Any:
        """What kernels take for it."""
        return self if UNCOMPILED else self.words.ctypes.data


def _pointer() -> Callable[[Any], Any]:
    def convert(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

        return types.voidptr(types.int64), codegen

    return cast("Callable[[Any], Any]", intrinsic(convert))


def _adder() -> Callable[[Any, int], None]:
    """``add_one(memory, word)``, right from several threads too."""
    if UNCOMPILED:

        def add_one(memory: Any, word: int) -> None:
            memory.words[word] += 1

        return add_one

    def add(typingctx: Any, address: Any, word: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            i64 = ir.IntType(64)
            place = builder.add(args[0], builder.mul(args[1], i64(8)))
            builder.atomic_rmw("add", builder.inttoptr(place, i64.as_pointer()), i64(1), "monotonic")
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), codegen

    return cast("Callable[[Any, int], None]", intrinsic(add))


_as_pointer = _pointer()
_add_one = _adder()

if UNCOMPILED:

    def _words_of(memory: Any) -> Any:
        return memory.words

    def _floats_of(memory: Any, word: int, count: int) -> Any:
        return memory.arrays[word]

    def _fall_back(memory: Any, instances: Any, requests: Any, fleets: Any) -> int:
        return int(memory.fallback.python_choose(instances, requests, fleets))

else:

    @inlined
    def _words_of(memory: Any) -> Any:
        return carray(_as_pointer(memory), (_COUNT,), np.int64)

    @inlined
    def _floats_of(memory: Any, word: int, count: int) -> Any:
        return carray(_as_pointer(_words_of(memory)[word]), (count,), np.float32)

    @inlined
    def _fall_back(memory: Any, instances: Any, requests: Any, fleets: Any) -> int:
        return choose_at(_words_of(memory)[_FALLBACK], instances, requests, fleets)


def weight_count(sizes: tuple[int, int, int], hidden: int) -> int:
    """Numbers in a network: the sizes of `WEIGHTS`."""
    return _weight_count(sizes[0], sizes[1] + sizes[2] + _K, hidden)


@inlined
def _weight_count(instance: int, common: int, hidden: int) -> int:
    return (instance + 2 * common + 5 * hidden + 6) * hidden + _K


@kernel
def _add_rows(out: Any, x: Any, rows: int, weights: Any, first: int) -> int:
    """Add x W to `out`, W of `rows` rows that begin at `first`; returns where W ends."""
    width = len(out)
    j = 0
    while j + 3 < rows:  # four rows at once: the sums go through memory
        a, b, c, d = x[j], x[j + 1], x[j + 2], x[j + 3]
        w = first + j * width
        for h in range(width):
            out[h] += (
                a * weights[w + h]
                + b * weights[w + width + h]
                + c * weights[w + 2 * width + h]
                + d * weights[w + 3 * width + h]
            )
        j += 4
    while j < rows:
        for h in range(width):
            out[h] += x[j] * weights[first + j * width + h]
        j += 1
    return first + rows * width


@kernel
def _add_product(out: Any, x: Any, weights: Any, first: int) -> None:
    """Add X W to (N, H) `out`, X (N, F), W of F rows that begin at `first`."""
    count, width = out.shape
    k = 0
    while k + 3 < count:  # four instances at once: each weight is read once for all
        p, q, r, s = out[k], out[k + 1], out[k + 2], out[k + 3]
        for j in range(x.shape[1]):
            a, b, c, d = x[k, j], x[k + 1, j], x[k + 2, j], x[k + 3, j]
            w = first + j * width
            for h in range(width):
                weight = weights[w + h]
                p[h] += a * weight
                q[h] += b * weight
                r[h] += c * weight
                s[h] += d * weight
        k += 4
    while k < count:
        _add_rows(out[k], x[k], x.shape[1], weights, first)
        k += 1


@inlined
def _log_sum_exp(values: Any, count: int) -> float:
    most = np.float32(ILLEGAL)
    for k in range(count):
        most = max(most, values[k])
    total = 0.0
    for k in range(count):
        total += math.exp(values[k] - most)
    return float(most + math.log(total))


@kernel
def score(memory: Any, instances: Any, request: Any, fleet: Any, kind: Any, mask: Any, logits: Any) -> float:
    """The network: (N, F), (R,), (G,), (K,) and (N + 1,) features to (N + 1,) logits; returns the gate."""
    words = _words_of(memory)
    f, r, g, hidden = words[_INSTANCE], words[_REQUEST], words[_FLEET], words[_HIDDEN]
    count = len(instances)
    size = r + g + _K
    weights = _floats_of(memory, _WEIGHTS, _weight_count(f, size, hidden))
    common = np.empty(size, np.float32)
    common[:r] = request
    common[r : r + g] = fleet
    common[r + g :] = kind
    room = np.zeros((2 * count + 6, hidden), np.float32)
    base, mean, most, context, query, row = room[0], room[1], room[2], room[3], room[4], room[5]
    embedding, scored = room[6 : 6 + count], room[6 + count :]

    w_common = f * hidden
    w = _add_rows(base, common, size, weights, w_common)
    for h in range(hidden):
        base[h] += weights[w + h]
    w_context = w + hidden
    for k in range(count):
        embedding[k] = base
    _add_product(embedding, instances, weights, 0)
    present = 0
    for k in range(count):
        e = embedding[k]
        if instances[k, PRESENT] > 0.0:
            present += 1
            for h in range(hidden):
                e[h] = max(e[h], np.float32(0.0))
                mean[h] += e[h]
                most[h] = max(most[h], e[h])
        else:
            e[:] = 0.0
    per_instance = np.float32(1.0 / max(present, 1))
    for h in range(hidden):
        mean[h] *= per_instance
    w = _add_rows(context, mean, hidden, weights, w_context)
    w = _add_rows(context, most, hidden, weights, w)
    w = _add_rows(context, common, size, weights, w)
    for h in range(hidden):
        context[h] = max(context[h] + weights[w + h], np.float32(0.0))
    w_key = w + hidden
    w = _add_rows(query, context, hidden, weights, w_key + hidden * hidden)
    for h in range(hidden):
        query[h] += weights[w + h]
    w_score = w + hidden

    for k in range(count):
        scored[k] = query
    _add_product(scored, embedding, weights, w_key)
    any_instance = False
    for k in range(count):
        logits[k] = ILLEGAL
        if mask[k] > 0.0:
            any_instance = True
            total = np.float32(0.0)
            for h in range(hidden):
                total += max(scored[k, h], np.float32(0.0)) * weights[w_score + h]
            logits[k] = total

    w = w_score + hidden
    w = _add_rows(row, context, hidden, weights, w)
    gate = np.float32(0.0)
    for h in range(hidden):
        gate += max(row[h] + weights[w + h], np.float32(0.0)) * weights[w + hidden + h]
    w += 2 * hidden
    for j in range(_K):
        gate += kind[j] * weights[w + j]
    logits[count] = ILLEGAL
    if mask[count] > 0.0:
        logits[count] = gate + _log_sum_exp(logits, count) if any_instance else 0.0
    return float(gate)


@inlined
def _outside(values: Any, low: Any, high: Any, first: int) -> bool:
    """Whether any is out of its range, or no number."""
    inside = True
    for j in range(len(values)):
        inside &= low[first + j] <= values[j] <= high[first + j]
    return not inside


@inlined
def is_out_of_range(memory: Any, instances: Any, request: Any, fleet: Any) -> bool:
    """Whether a feature is where the policy was not trained."""
    words = _words_of(memory)
    f, r, g = words[_INSTANCE], words[_REQUEST], words[_FLEET]
    low, high = _floats_of(memory, _LOW, f + r + g), _floats_of(memory, _HIGH, f + r + g)
    if _outside(request, low, high, f) or _outside(fleet, low, high, f + r):
        return True
    outside = False
    for k in range(len(instances)):
        empty = instances[k, PRESENT] <= 0.0  # false for no number too
        outside |= not empty and _outside(instances[k], low, high, 0)
    return outside


@kernel
def choose_by_logits(logits: Any, gate: float, may_hold: bool, mode: int, random_key: int) -> int:
    """An instance, or `NONE`; (N + 1,) logits."""
    count = len(logits) - 1
    best = 0
    for k in range(1, count):
        if logits[k] > logits[best]:
            best = k
    if logits[best] <= 0.5 * ILLEGAL:
        return NONE
    if mode == GREEDY:
        return NONE if may_hold and gate > 0.0 else best
    if may_hold and random_unit(random_key, _GATE_STREAM) * (1.0 + math.exp(-gate)) < 1.0:
        return NONE
    total = 0.0
    for k in range(count):
        total += math.exp(logits[k] - logits[best])
    left = random_unit(random_key, _INSTANCE_STREAM) * total
    chosen = best
    for k in range(count):
        share = math.exp(logits[k] - logits[best])
        if share > 0.0:
            chosen = k
            left -= share
            if left < 0.0:
                break
    return chosen


@inlined
def _answer_of_fallback(memory: Any, instances: Any, requests: Any, fleets: Any) -> int:
    """Of the fallback; `NONE` to what it does not know."""
    if not answers(_words_of(memory)[_FALLBACK_KINDS], fleets[0].kind):
        return NONE
    return _fall_back(memory, instances, requests, fleets)


@kernel
def decide(memory: Any, instances: Any, requests: Any, fleets: Any) -> int:
    """The choice of the policy at an address: one row of a view, as `fleetpilot.fleet.policy.Choose` gets it."""
    words = _words_of(memory)
    if not answers(words[_KINDS], fleets[0].kind):
        return _answer_of_fallback(memory, instances, requests, fleets)
    count = len(instances)
    f = words[_INSTANCE]
    x = np.empty((1, count, f), np.float32)
    request = np.empty((1, words[_REQUEST]), np.float32)
    fleet = np.empty((1, words[_FLEET]), np.float32)
    kind = np.empty((1, _K), np.float32)
    mask = np.empty((1, count + 1), np.float32)
    scratch = np.ones((count, f), np.float32), np.empty((2, 3, count), np.float32)
    write_features(instances.reshape(1, count), requests, fleets, 0, 1, x, request, fleet, kind, mask, scratch)
    _add_one(memory, _DECISIONS)
    if is_out_of_range(memory, x[0], request[0], fleet[0]):
        _add_one(memory, _OUT_OF_RANGE)
        return _answer_of_fallback(memory, instances, requests, fleets)
    logits = np.empty(count + 1, np.float32)
    gate = score(memory, x[0], request[0], fleet[0], kind[0], mask[0], logits)
    return choose_by_logits(logits, gate, fleets[0].may_hold != 0, words[_MODE], fleets[0].random_key)


@kernel
def decide_rows(memory: Any, instances: Any, request: Any, fleet: Any, choice: Any) -> None:
    """`decide` for each row of a view."""
    for row in range(len(choice)):
        choice[row] = decide(memory, instances[row], request[row : row + 1], fleet[row : row + 1])


@kernel
def score_rows(
    memory: Any, instances: Any, request: Any, fleet: Any, kind: Any, mask: Any, logits: Any, gates: Any, outside: Any
) -> None:
    """`score` for each row of features; (B, N + 1) logits, (B,) gates, (B,) whether out of range."""
    for row in range(len(logits)):
        gates[row] = score(memory, instances[row], request[row], fleet[row], kind[row], mask[row], logits[row])
        outside[row] = is_out_of_range(memory, instances[row], request[row], fleet[row])
