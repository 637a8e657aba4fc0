"""Exports at work: a learned policy from its folder, without PyTorch.

`load_policy` gives any policy by name. A learned one is compiled code like a baseline: the simulator calls it inside
its kernel, the environments inside their step, the dispatcher in its own thread. Where a feature is out of the range
that the policy was trained in, or no number, the export's fallback baseline decides, and `LearnedPolicy.counts` says
how often.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from fleetpilot import baselines
from fleetpilot.agents.inference import MODES, WEIGHTS, Memory, decide, decide_rows, score_rows, weight_count
from fleetpilot.agents.schema import ARRAYS, SCHEMA_VERSION, feature_schema, sizes_for
from fleetpilot.fleet.admission import Admission, admission_array, admitted
from fleetpilot.fleet.features import KINDS, features, features_for
from fleetpilot.fleet.jit import UNCOMPILED, function_pointer
from fleetpilot.fleet.policy import (
    CHOOSE_SIGNATURE,
    CompiledPolicy,
    Policy,
    answers,
    choose_at,
    kind_bits,
    require_compiled,
)
from fleetpilot.fleet.view import KIND_DISPATCH, NONE, REJECT, Decision, FleetView, empty_view

FORMAT = "fleetpilot-policy"
CARD, NETWORK, ARRAYS_FILE, GOLDEN = "policy.json", "policy.onnx", "weights.npz", "golden.npz"
"""Files of an export: what it is, the network for any runtime, its weights for ours, and examples to check both by."""

SHIPPED = {path.parent.name: path.parent for path in sorted((Path(__file__).parent / "policies").glob(f"*/{CARD}"))}
"""Name -> folder of the exports that come with fleetpilot."""
RANGE_MARGIN = 0.1
"""A feature may leave its trained range by so much of the range that it has by its definition."""
OWN = "own"
"""In place of the name of an admission: what the export says."""
_GOLDEN_TOLERANCE = 1e-4
_GOLDEN_ROUNDING = 1e-6
"""Of logits in the hundreds: golden features are drawn from the whole range, and float32 has seven digits."""


def load_policy(name: str) -> Policy:
    """A policy by name: a baseline's (`fleetpilot.baselines.load_policy`), one of `SHIPPED`, or an export's folder.

    A folder is what exists as one or has a slash in it. Behind a ``?`` an export takes ``mode``, ``admission`` (a
    baseline's name, or ``none``), or numbers of an admission of its own (`Admission`), ``late``, ``cold``, ``busy``:
    ``runs/mine/export?mode=sample&admission=mooncake``.

    Raises:
        ValueError: there is no such policy, or the export cannot be used: naming file, value and what was expected.
    """
    base, given = baselines.read_name(name)
    if base in (*baselines.BASELINES, *baselines.ORACLE_BOUNDS):
        return baselines.load_policy(name)
    if not (base in SHIPPED or is_export_name(base)):
        known = ", ".join((*baselines.BASELINES, *SHIPPED))
        raise ValueError(f"policy {base!r} is not known; expected one of {known}, or the folder of an export")
    if set(given) - {"mode", "admission", "late", "cold", "busy"}:
        raise ValueError(
            f"policy {name!r}: expected nothing but mode={' or mode='.join(MODES)} and admission=NAME, or late=X, "
            "cold=X and busy=X, behind the ?"
        )
    folder = SHIPPED.get(base, Path(base))
    policy = load_export(folder, given.pop("mode", None), _asked_admission(name, folder, given))
    policy.name = name
    return policy


def _asked_admission(name: str, folder: Path, given: dict[str, str]) -> str | Admission | None:
    """What the parameters of a policy's name ask for, as `load_export` takes it."""
    baseline = given.pop("admission", OWN)
    if not given:
        return None if baseline == "none" else baseline
    if baseline != OWN:
        raise ValueError(f"policy {name!r}: admission=NAME is without late, cold and busy; expected one of both")
    try:
        asked = {key: float(value) for key, value in given.items()}
    except ValueError:
        raise ValueError(f"policy {name!r}: expected numbers for {', '.join(given)}") from None
    return replace(_own_admission(folder, read_card(folder)) or Admission(), **asked)


def is_export_name(base: str) -> bool:
    """Whether a policy's name is meant as a folder."""
    return "/" in base or (base != "" and Path(base).is_dir())


class Explanation(NamedTuple):
    """What a policy makes of a batch of B views."""

    logits: NDArray[np.float32]  # (B, N + 1)
    log_odds_of_none: NDArray[np.float32]  # (B,)
    out_of_range: NDArray[np.bool_]  # (B,)


@dataclass(frozen=True)
class Network:
    """Weights and what they are for, as an export holds them.

    Attributes:
        kinds: of decision that the policy answers.
        hidden: width of its layers.
        weights: `weight_count` numbers in the order of `WEIGHTS`.
        low: (F + R + G,) least value of each feature in training.
        high: largest.
    """

    kinds: tuple[int, ...]
    hidden: int
    weights: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of an instance, a request, a fleet."""
        sizes = sizes_for(self.kinds)
        return sizes.instance, sizes.request, sizes.fleet

    def with_margin(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Where the policy decides itself: the trained range and `RANGE_MARGIN` on both sides.

        A share of the candidates that have less of something is at home everywhere: its extremes tell the size of the
        fleet and nothing else.
        """
        table = [feature for features in features_for(self.kinds).values() for feature in features]
        margin = np.array([RANGE_MARGIN * (f.high - f.low) for f in table], np.float32)
        anywhere = np.array([np.inf if f.formula.startswith("lower(") else 0.0 for f in table], np.float32)
        return self.low - margin - anywhere, self.high + margin + anywhere


class LearnedPolicy(CompiledPolicy):
    """A learned policy.

    Args:
        name: as in results.
        network: what it learned.
        fallback: name of the baseline that decides where the policy is not at home, and answers what other kinds of
            decision it can.
        mode: ``greedy``: the likeliest choice, or ``sample``: drawn, by the decision's random key, so the same for the
            same seed.
        digest: of the export.
        admission: which requests are rejected, which the network cannot do: an `Admission`, which sends a request
            elsewhere first if it is in time there; or those that the baseline of this name would reject, unless a
            candidate is idle. (If a cold cache makes all requests late, rejecting all would leave it cold.)

    Raises:
        ValueError: the mode is not known, or a baseline that is named is not compiled, or an oracle bound.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        fallback: str,
        mode: str = "greedy",
        digest: str = "",
        admission: str | Admission | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"mode = {mode!r}: expected one of {', '.join(MODES)}")
        other = require_compiled("fallback", baselines.load_policy(fallback))
        low, high = network.with_margin()
        self._memory = Memory(
            network.sizes,
            network.hidden,
            np.ascontiguousarray(network.weights, np.float32),
            np.ascontiguousarray(low, np.float32),
            np.ascontiguousarray(high, np.float32),
            MODES.index(mode),
            kind_bits(network.kinds),
            other,
            kind_bits(other.kinds),
        )
        self.fallback = fallback
        self._fallback = other  # must live
        self.admission = admission
        named = isinstance(admission, str)
        self._gate = _gate(str(admission)) if named else None
        self._address = self._memory.address
        own = admission if isinstance(admission, Admission) else None
        self.network = network
        self.mode = mode
        self.digest = digest

        def choose(instances: Any, requests: Any, fleets: Any) -> int:
            gate = self._gate
            if gate is not None and not _any_idle(instances) and fleets[0].kind in gate.kinds:
                said = gate.python_choose(instances, requests, fleets)
                if said == REJECT:
                    return said
            slot = decide(self._memory, instances, requests, fleets)
            return _in_time(slot, instances, requests, fleets, admission_array(own)) if own else slot

        super().__init__(name, choose, tuple(sorted({*network.kinds, *other.kinds})))

    @cached_property
    def choose(self) -> Any:
        """The compiled function: `decide` with this policy's memory."""
        if UNCOMPILED:
            return self.python_choose
        decider, memory = _decider().address, int(self._address)

        def choose(instances: Any, requests: Any, fleets: Any) -> int:
            return _call(decider, memory, instances, requests, fleets)

        if self.admission is None:
            return numba.cfunc(CHOOSE_SIGNATURE, nogil=True)(choose)
        if isinstance(self.admission, Admission):
            own = tuple(admission_array(self.admission).tolist())

            def in_time(instances: Any, requests: Any, fleets: Any) -> int:
                slot = _call(decider, memory, instances, requests, fleets)
                return _in_time(slot, instances, requests, fleets, own)

            return numba.cfunc(CHOOSE_SIGNATURE, nogil=True)(in_time)
        assert self._gate is not None
        gate, kinds = int(self._gate.address), kind_bits(self._gate.kinds)

        def admit(instances: Any, requests: Any, fleets: Any) -> int:
            asked = answers(kinds, fleets[0].kind) and not _any_idle(instances)
            if asked and choose_at(gate, instances, requests, fleets) == REJECT:
                return REJECT
            return _call(decider, memory, instances, requests, fleets)

        return numba.cfunc(CHOOSE_SIGNATURE, nogil=True)(admit)

    def reset(self, batch: int, seed: int) -> None:
        """Begin to count anew."""
        self._memory.words[-2:] = 0

    def decide(self, view: FleetView) -> Decision:
        """Choose for each row of the view."""
        if self.admission is not None:
            return super().decide(view)
        choice = np.empty(len(view), np.int64)
        decide_rows(self._address, view.instances, view.request, view.fleet, choice)
        return Decision(choice)

    @property
    def counts(self) -> dict[str, int]:
        """Since the last reset: ``decisions``, and of these ``out_of_range``, which the fallback decided."""
        decisions, outside = self._memory.words[-2:].tolist()
        return {"decisions": decisions, "out_of_range": outside}

    def explain(self, view: FleetView) -> Explanation:
        """Scores behind the choices; decides and counts nothing."""
        return self.score(features(view, self.network.kinds))

    def score(self, arrays: dict[str, NDArray[np.float32]]) -> Explanation:
        """The same from features (`fleetpilot.fleet.features.features`)."""
        batch = len(arrays["request"])
        said = Explanation(
            np.empty(arrays["action_mask"].shape, np.float32), np.empty(batch, np.float32), np.empty(batch, np.bool_)
        )
        inputs = [np.ascontiguousarray(arrays[key], np.float32) for key in ARRAYS]
        arguments: tuple[Any, ...] = self._address, *inputs, *said
        score_rows(*arguments)
        return said


def _idle(instances: Any) -> bool:
    """Whether a candidate has nothing to do."""
    idle = 0
    for slot in range(len(instances)):
        idle += instances[slot].candidate and instances[slot].in_flight == 0
    return idle > 0


_any_idle = _idle if UNCOMPILED else numba.njit(nogil=True)(_idle)


def _gate(admission: str) -> CompiledPolicy:
    try:
        return require_compiled("admission", baselines.load_policy(admission))
    except ValueError as error:
        raise ValueError(f"admission = {admission!r}: {error}") from None


def _checked(slot: int, instances: Any, requests: Any, fleets: Any, admission: Any) -> int:
    """Where a request goes that is to be dispatched there."""
    sent = slot != NONE and fleets[0].kind == KIND_DISPATCH
    return admitted(slot, instances, requests[0], admission) if sent else slot


_in_time = _checked if UNCOMPILED else numba.njit(nogil=True)(_checked)


def _decider() -> Any:
    """`decide` behind a pointer."""
    return function_pointer(types.int64(types.int64, *CHOOSE_SIGNATURE.args), _decide_at)


def _decide_at(memory: Any, instances: Any, requests: Any, fleets: Any) -> int:
    return decide(memory, instances, requests, fleets)


def _caller() -> Callable[..., int]:
    """``call(function's address, memory, instances, requests, fleets)``."""

    def call(typingctx: Any, address: Any, memory: Any, instances: Any, requests: Any, fleets: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = [context.get_value_type(kind) for kind in (signature.return_type, *signature.args[1:])]
            function: Any = ir.FunctionType(values[0], values[1:])
            return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

        return types.int64(types.int64, types.int64, *CHOOSE_SIGNATURE.args), codegen

    return cast("Callable[..., int]", intrinsic(call))


_call = _caller()


# --- reading an export -----------------------------------------------------------------------------------------------


def load_export(folder: Path, mode: str | None = None, admission: str | Admission | None = OWN) -> LearnedPolicy:
    """The policy of an export.

    Args:
        folder: as ``fleetpilot export`` wrote it.
        mode: see `LearnedPolicy`; what the export says by default.
        admission: see `LearnedPolicy`; what the export says by default.

    Raises:
        ValueError: a file is missing, damaged or of another or a newer version; naming it and what was expected.
    """
    card = read_card(folder)
    files = {name: (folder / name).read_bytes() if (folder / name).is_file() else None for name in card["files"]}
    for name, content in files.items():
        if content is None:
            raise ValueError(f"{folder / name}: no such file; expected that of the export")
        if hashlib.sha256(content).hexdigest() != card["files"][name]:
            raise ValueError(f"{folder / name}: damaged or of another export; expected SHA-256 {card['files'][name]}")
    network = _network(folder, card)
    asked = _own_admission(folder, card) if admission == OWN else admission
    digest = hashlib.sha256((folder / CARD).read_bytes()).hexdigest()[:16]
    policy = LearnedPolicy(folder.name, network, card["fallback"], mode or card["mode"], digest, asked)
    policy.decide(empty_view(1, 1))  # compile now, not at the first request
    policy.reset(1, 0)
    golden = _arrays(folder / GOLDEN, (*ARRAYS, "logits"))
    found = policy.score({key: golden[key] for key in ARRAYS}).logits
    if not np.allclose(found, golden["logits"], rtol=_GOLDEN_ROUNDING, atol=_GOLDEN_TOLERANCE):
        error = float(np.abs(found - golden["logits"]).max())
        raise ValueError(
            f"{folder}: logits are off the golden ones by {error:g}; expected {_GOLDEN_TOLERANCE:g} at most"
        )
    return policy


def read_card(folder: Path) -> dict[str, Any]:
    """``policy.json`` of an export, checked.

    Raises:
        ValueError: see `load_export`.
    """
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"{folder}: expected the folder of an exported policy, with a file {CARD}")
    try:
        card = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); expected an exported policy") from None
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ValueError(f"{path}: format is not {FORMAT!r}; expected an exported policy")
    version = card.get("schema_version")
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        advice = "a newer fleetpilot is needed" if newer else "export the policy again"
        raise ValueError(f"{path}: schema_version = {version!r}: expected {SCHEMA_VERSION}; {advice}")
    wanted = {"kinds": list, "hidden": int, "features": dict, "trained_ranges": dict, "fallback": str, "mode": str}
    for key, kind in {**wanted, "files": dict}.items():
        if not isinstance(card.get(key), kind):
            raise ValueError(f"{path}: {key} = {card.get(key)!r}: expected a JSON {kind.__name__}")
    if set(card["files"]) != {NETWORK, ARRAYS_FILE, GOLDEN}:
        raise ValueError(f"{path}: files = {sorted(card['files'])}: expected {NETWORK}, {ARRAYS_FILE} and {GOLDEN}")
    _own_admission(folder, card)
    kinds = card["kinds"]
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"{path}: kinds = {kinds!r}: expected some of {', '.join(KINDS)}")
    ours = json.loads(json.dumps(feature_schema(_kinds(card))))
    if card["features"] != ours:
        raise ValueError(f"{path}: features are not those of this version: {_first_difference(card['features'], ours)}")
    return card


def _own_admission(folder: Path, card: dict[str, Any]) -> Admission | None:
    """What the export says of it."""
    said = card.get("admission")
    try:
        return None if said is None else Admission(**said)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CARD}: admission = {said!r}: {error}") from None


def _kinds(card: dict[str, Any]) -> tuple[int, ...]:
    return tuple(KINDS.index(kind) for kind in card["kinds"])


def _first_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    for key, expected in ours.items():
        found = theirs.get(key)
        if found != expected and isinstance(found, list) and isinstance(expected, list):
            for one, other in zip(found, expected, strict=False):
                if one != other:
                    return f"{key} has {one!r}, expected {other!r}"
            return f"{key} are {len(found)}, expected {len(expected)}"
        if found != expected:
            return f"{key} = {found!r}, expected {expected!r}"
    return f"has {sorted(set(theirs) - set(ours))} too"


def _network(folder: Path, card: dict[str, Any]) -> Network:
    path = folder / ARRAYS_FILE
    arrays = _arrays(path, WEIGHTS)
    sizes = sizes_for(_kinds(card))
    ranges = card["trained_ranges"]
    total = sum(array.size for array in arrays.values())
    expected = weight_count((sizes.instance, sizes.request, sizes.fleet), card["hidden"])
    if total != expected:
        raise ValueError(f"{path}: {total:,} weights; expected {expected:,} for hidden = {card['hidden']}")
    weights = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in WEIGHTS])
    if not np.isfinite(weights).all():
        raise ValueError(f"{path}: some weights are not finite; expected numbers")
    low, high = (
        np.array([value for key in ("instances", "request", "fleet") for value in ranges[key][end]], np.float32)
        for end in ("low", "high")
    )
    return Network(_kinds(card), card["hidden"], weights, low, high)


def _arrays(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected arrays {', '.join(names)}") from None


class OnnxNetwork:
    """The network of an export in ONNX Runtime, on one core: what another runtime would make of the same features.

    Raises:
        ModuleNotFoundError: onnxruntime is not installed.
    """

    def __init__(self, folder: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            (folder / NETWORK).read_bytes(), options, providers=["CPUExecutionProvider"]
        )

    def logits(self, arrays: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """(B, N + 1) from features."""
        return cast("NDArray[np.float32]", self.session.run(["logits"], {key: arrays[key] for key in ARRAYS})[0])
