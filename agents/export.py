"""Writes a trained policy to a folder that `fleetpilot.agents.runtime` loads without PyTorch.

==================  ===================================================================================================
``policy.onnx``     the network: `ARRAYS` in, ``logits`` out; any batch and any number of instances
``policy.json``     schema and version of the features, trained ranges, kinds of decision, fallback, mode, provenance,
                    SHA-256 of the other files
``weights.npz``     the weights for the compiled loops
``golden.npz``      features and the logits that they must give
==================  ===================================================================================================
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetpilot.agents.inference import WEIGHTS
from fleetpilot.agents.runtime import ARRAYS_FILE, CARD, FORMAT, GOLDEN, NETWORK, Network
from fleetpilot.agents.schema import ARRAYS, SCHEMA_VERSION, feature_schema
from fleetpilot.agents.scorer import SetScorer
from fleetpilot.baselines import load_policy
from fleetpilot.fleet.admission import Admission
from fleetpilot.fleet.features import KINDS, features_for
from fleetpilot.fleet.policy import require_compiled

_GROUPS = ("instances", "request", "fleet")
_GOLDEN_VIEWS, _GOLDEN_INSTANCES = 64, 8


def network_of(scorer: SetScorer, kinds: tuple[int, ...]) -> Network:
    """What the runtime needs of a network, without a file."""
    low, high = _ranges(scorer)
    weights = np.concatenate([array.ravel() for array in _weights(scorer).values()])
    return Network(kinds, scorer.hidden, weights, low, high)


def export_policy(
    scorer: SetScorer,
    kinds: tuple[int, ...],
    folder: Path,
    *,
    fallback: str,
    mode: str,
    provenance: Mapping[str, Any],
    admission: Admission | None = None,
) -> None:
    """Write the folder.

    Args:
        scorer: the network.
        kinds: of decision that it answers.
        folder: is made; files of an earlier export are written over.
        fallback: baseline that decides where the policy is not at home.
        mode: default of the runtime.
        provenance: where it is from, JSON-serialisable.
        admission: which requests the runtime rejects by default.

    Raises:
        ValueError: the network was not trained, so that nothing is known of its ranges; or the fallback is not
            compiled, or not known.
    """
    require_compiled("fallback", load_policy(fallback))
    low, high = _ranges(scorer)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError("scorer: its features' ranges are not known; expected a trained network")
    folder.mkdir(parents=True, exist_ok=True)
    _write_onnx(scorer, folder / NETWORK)
    np.savez(folder / ARRAYS_FILE, **_weights(scorer))  # type: ignore[arg-type]
    np.savez(folder / GOLDEN, **_golden(scorer, kinds, low, high))  # type: ignore[arg-type]
    edges = np.cumsum([len(features_for(kinds)[key]) for key in _GROUPS])[:-1]
    parts = zip(_GROUPS, np.split(low, edges), np.split(high, edges), strict=True)
    card = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kinds": [KINDS[kind] for kind in kinds],
        "hidden": scorer.hidden,
        "fallback": fallback,
        "mode": mode,
        "admission": None if admission is None else asdict(admission),
        "trained_ranges": {key: {"low": least.tolist(), "high": most.tolist()} for key, least, most in parts},
        "features": feature_schema(kinds),
        "files": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (NETWORK, ARRAYS_FILE, GOLDEN)
        },
        "provenance": dict(provenance),
    }
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n", "utf-8")


def _weights(scorer: SetScorer) -> dict[str, NDArray[np.float32]]:
    """By the names of `WEIGHTS`; matrices (in, out)."""
    state = scorer.state_dict()
    return {name: np.ascontiguousarray(state[name].cpu().numpy().T, np.float32) for name in WEIGHTS}


def _ranges(scorer: SetScorer) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    state = scorer.state_dict()
    low, high = (np.concatenate([state[f"{end}_{key}"].cpu().numpy() for key in _GROUPS]) for end in ("low", "high"))
    return low, high


def _golden(
    scorer: SetScorer, kinds: tuple[int, ...], low: NDArray[np.float32], high: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    """Random features within the trained ranges, of every kind, with empty slots and illegal choices among them."""
    rng = np.random.default_rng(0)
    sizes = scorer.sizes
    draws = {
        key: rng.random((_GOLDEN_VIEWS, *shape)).astype(np.float32)
        for key, shape in {
            "instances": (_GOLDEN_INSTANCES, sizes.instance),
            "request": (sizes.request,),
            "fleet": (sizes.fleet,),
        }.items()
    }
    first = 0
    for key, draw in draws.items():
        last = first + draw.shape[-1]
        draws[key] = low[first:last] + draw * (high - low)[first:last]
        first = last
    empty = rng.random((_GOLDEN_VIEWS, _GOLDEN_INSTANCES)) < 0.2
    empty[:, 0] = False
    draws["instances"][empty] = 0.0
    mask = np.ones((_GOLDEN_VIEWS, _GOLDEN_INSTANCES + 1), np.float32)
    mask[:, :-1] = ~empty & (rng.random(empty.shape) < 0.9)
    mask[:, -1] = (rng.random(_GOLDEN_VIEWS) < 0.5) | (mask[:, :-1].sum(axis=1) == 0)
    draws["kind"] = np.eye(sizes.kind, dtype=np.float32)[np.resize(kinds, _GOLDEN_VIEWS)]
    draws["action_mask"] = mask
    with torch.no_grad():
        logits = scorer(*(torch.as_tensor(draws[key]) for key in ARRAYS)).logits.numpy()
    return {**draws, "logits": logits}


class _Actor(nn.Module):
    """The logits alone."""

    def __init__(self, scorer: SetScorer):
        super().__init__()
        self.scorer = scorer

    def forward(self, instances: Tensor, request: Tensor, fleet: Tensor, kind: Tensor, action_mask: Tensor) -> Tensor:
        logits: Tensor = self.scorer(instances, request, fleet, kind, action_mask).logits
        return logits


def _write_onnx(scorer: SetScorer, path: Path) -> None:
    sizes = scorer.sizes
    batch, count = torch.export.Dim("batch"), torch.export.Dim("instances")
    example = {
        "instances": torch.ones(3, 5, sizes.instance),
        "request": torch.ones(3, sizes.request),
        "fleet": torch.ones(3, sizes.fleet),
        "kind": torch.ones(3, sizes.kind),
        "action_mask": torch.ones(3, 6),
    }
    shapes: Any = {
        "instances": {0: batch, 1: count},
        "request": {0: batch},
        "fleet": {0: batch},
        "kind": {0: batch},
        "action_mask": {0: batch, 1: count + 1},
    }
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            _Actor(scorer).eval(),
            tuple(example[key] for key in ARRAYS),
            input_names=list(ARRAYS),
            output_names=["logits"],
            dynamic_shapes=tuple(shapes[key] for key in ARRAYS),
            dynamo=True,
            verbose=False,
        )
    for node in program.model.graph:
        node.metadata_props.clear()  # where in whose files each came from
    program.save(str(path), external_data=False)
