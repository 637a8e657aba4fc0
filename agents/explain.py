"""Why a learned policy chose what it chose: the scores of one decision, and which features moved them.

The effect of a feature on an instance is what its log-probability loses when that feature, of that instance alone, is
put to the mean of all candidates: positive where the feature speaks for the instance against the others.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.agents.runtime import LearnedPolicy
from fleetpilot.agents.schema import ARRAYS
from fleetpilot.fleet.features import KINDS, features, features_for
from fleetpilot.fleet.view import NONE, FleetView

_SHOWN = 3  # features named per instance in the table
_DRAWN = 12  # in the picture

__all__ = ["Explained", "LearnedPolicy", "explain", "recorded_view"]


@dataclass(frozen=True)
class Explained:
    """One decision of a fleet of N instances, F features each.

    Attributes:
        policy: its name.
        kind: of decision.
        choice: slot, or `NONE`.
        out_of_range: the fallback decided.
        probability: (N + 1,) of each instance, last of none.
        names: of the features.
        values: (N, F) of the features.
        effects: (N, F) on the log-probability; 0 for instances that may not be chosen.
    """

    policy: str
    kind: str
    choice: int
    out_of_range: bool
    probability: NDArray[np.float64]
    names: tuple[str, ...]
    values: NDArray[np.float32]
    effects: NDArray[np.float64]

    def text(self) -> str:
        """A table: one line per candidate, the most probable first."""
        chosen = "none" if self.choice == NONE else f"instance {self.choice}"
        by = ", decided by the fallback: features are out of the trained range" if self.out_of_range else ""
        lines = [f"{self.kind}: {self.policy} chooses {chosen}{by}", "instance  probability  moved most by"]
        order = np.argsort(-self.probability[:-1], kind="stable")
        for slot in order[self.probability[order] > 0].tolist():
            most = np.argsort(-np.abs(self.effects[slot]), kind="stable")[:_SHOWN]
            words = [f"{self.names[j]} = {self.values[slot, j]:.3g} ({self.effects[slot, j]:+.2f})" for j in most]
            lines.append(f"{slot:8d}  {self.probability[slot]:11.1%}  {', '.join(words)}")
        lines.append(f"{'none':>8s}  {self.probability[-1]:11.1%}")
        return "\n".join(lines)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """``explanation.csv``, all values and effects, and ``explanation.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        table, picture = folder / "explanation.csv", folder / "explanation.png"
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["instance", "probability", "feature", "value", "effect"])
            for slot, probability in enumerate(self.probability[:-1].tolist()):
                for j, name in enumerate(self.names):
                    row = (slot, probability, name, float(self.values[slot, j]), float(self.effects[slot, j]))
                    writer.writerow(row)
        self._draw(picture)
        return table, picture

    def _draw(self, path: Path) -> None:
        """Probabilities as bars, beside them the effects of the features that matter most."""
        from matplotlib.figure import Figure

        columns = np.argsort(-np.abs(self.effects).max(axis=0), kind="stable")[:_DRAWN]
        count = len(self.values)
        figure = Figure(figsize=(10, 1.8 + 0.28 * count), layout="constrained")
        bars, heat = figure.subplots(1, 2, sharey=True, width_ratios=(1, 3))
        colours = ["tab:orange" if slot == self.choice else "tab:blue" for slot in range(count)]
        bars.barh(range(count), self.probability[:-1], color=colours)
        bars.set(xlabel="probability", ylabel="instance", yticks=range(count))
        bars.invert_yaxis()
        most = max(float(np.abs(self.effects).max()), 1e-6)
        image = heat.imshow(self.effects[:, columns], cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
        heat.set_xticks(range(len(columns)), [self.names[j] for j in columns], rotation=40, ha="right")
        for slot in range(count):
            for place, j in enumerate(columns.tolist()):
                heat.text(place, slot, f"{self.values[slot, j]:.2g}", ha="center", va="center", fontsize=7)
        figure.colorbar(image, label="effect on log-probability")
        none = f"none {self.probability[-1]:.1%}"
        figure.suptitle(f"{self.kind}: {self.policy}; orange is chosen, {none}; numbers are values of features")
        figure.savefig(path, dpi=120)


def explain(policy: LearnedPolicy, view: FleetView) -> Explained:
    """Explain the decision of a view of one fleet.

    Raises:
        ValueError: the view has another number of rows.
    """
    if len(view) != 1:
        raise ValueError(f"view: got {len(view)} rows, expected 1")
    arrays = features(view, policy.network.kinds)
    said = policy.score(arrays)
    probability = np.exp(_log_probabilities(said.logits))[0]
    return Explained(
        policy=policy.name,
        kind=KINDS[int(view.fleet["kind"][0])],
        choice=int(policy.decide(view).choice[0]),
        out_of_range=bool(said.out_of_range[0]),
        probability=np.where(arrays["action_mask"][0] > 0, probability, 0.0),
        names=tuple(feature.name for feature in features_for(policy.network.kinds)["instances"]),
        values=arrays["instances"][0],
        effects=_effects(policy, arrays),
    )


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _effects(policy: LearnedPolicy, arrays: dict[str, NDArray[np.float32]]) -> NDArray[np.float64]:
    """(N, F) see the module."""
    instances = arrays["instances"][0]
    count, size = instances.shape
    candidates = np.flatnonzero(arrays["action_mask"][0, :-1] > 0)
    effects = np.zeros((count, size))
    if len(candidates) == 0:
        return effects
    mean = instances[candidates].mean(axis=0)
    before = _log_probabilities(policy.score(arrays).logits)[0]
    for slot in candidates.tolist():
        changed = {key: np.repeat(arrays[key], size, axis=0) for key in ARRAYS}
        changed["instances"][np.arange(size), slot, np.arange(size)] = mean
        effects[slot] = before[slot] - _log_probabilities(policy.score(changed).logits)[:, slot]
    return effects


def recorded_view(
    policy: LearnedPolicy, scenario: str, instances: int, decision: int, *, seed: int = 0, load: float | None = None
) -> FleetView:
    """What the policy saw at a decision of an episode that it ran itself.

    Args:
        policy: decides all that it can.
        scenario: name (`fleetpilot.envs`).
        instances: of the fleet.
        decision: counted from 1.
        seed: of the episode.
        load: of the episode; the scenario's by default.

    Raises:
        ValueError: the episode has fewer decisions.
    """
    from fleetpilot.envs import FleetVectorEnv

    changes: dict[str, Any] = {} if load is None else {"load": load}
    kinds = [KINDS[kind] for kind in policy.network.kinds]
    envs = FleetVectorEnv(1, scenario=scenario, instances=instances, kinds=kinds, **changes)
    envs.reset(seed=seed)
    for asked in range(1, decision):
        choice = policy.decide(envs.view).choice
        if envs.step(np.where(choice < 0, instances, choice))[2][0]:
            raise ValueError(f"decision {decision}: the episode has {asked}; expected one of these")
    view = envs.view
    return FleetView(view.instances.copy(), view.request.copy(), view.fleet.copy())
