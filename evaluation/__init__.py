"""Runs of policies against each other: metrics, paired statistics, reports and plots.

`run_one` measures one policy on one table, `evaluate` runs many against each other, `write_report` compares them. What
each name needs is imported when it is used.
"""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.evaluation, not evaluation")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetpilot.evaluation.report import Report, write_report
    from fleetpilot.evaluation.runner import Interrupted, Scenario, evaluate
    from fleetpilot.evaluation.runs import Outcome, StoredRun, run_one
    from fleetpilot.evaluation.segments import at_load, capacity_rps, cut

_HOME = {
    "Interrupted": "runner",
    "Outcome": "runs",
    "Report": "report",
    "Scenario": "runner",
    "StoredRun": "runs",
    "at_load": "segments",
    "capacity_rps": "segments",
    "cut": "segments",
    "evaluate": "runner",
    "run_one": "runs",
    "write_report": "report",
}

__all__ = [
    "Interrupted",
    "Outcome",
    "Report",
    "Scenario",
    "StoredRun",
    "at_load",
    "capacity_rps",
    "cut",
    "evaluate",
    "run_one",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
