"""Experiments by name: those of papers, each a module that says what was published and runs the same here, and ours.

A module of an experiment has a docstring whose first line describes it, and ``run``:

    def run(out: Path, *, workers: int | None = None) -> list[Table]

which stores its runs under `out` and returns what to show, the published figures beside ours. One on policies that are
given takes ``policies: Sequence[str]`` as well.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

PUBLISHED = (
    "llumnix-motivation",
    "llumnix-fig10",
    "llumnix-fig11",
    "llumnix-fig12",
    "llumnix-fig13",
    "llumnix-fig14",
    "llumnix-fig15",
    "llumnix-stock",
    "calibrate-then-route",
    "distserve-splitwise",
)
"""Those of papers."""
EXPERIMENTS = (*PUBLISHED, "five-scenarios", "learned")
"""Names for ``fleetpilot evaluate --experiment``; the module is called the same, with underscores."""


def load_experiment(name: str) -> ModuleType:
    """The module of an experiment.

    Raises:
        ValueError: there is no experiment of this name.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment {name!r} is not known; expected one of {', '.join(EXPERIMENTS)}")
    return import_module(f"{__name__}.{name.replace('-', '_')}")
