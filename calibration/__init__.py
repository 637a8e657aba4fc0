"""The simulator against real engines.

`calibrate` measures live engines and writes their profile, `validate` replays a trace on engines and in the simulator.
What each name needs is imported when it is used.
"""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.calibration, not calibration")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetpilot.calibration.measure import Calibration, CalibrationError, calibrate
    from fleetpilot.calibration.validation import Validation, validate

_HOME = {
    "Calibration": "measure",
    "CalibrationError": "measure",
    "Validation": "validation",
    "calibrate": "measure",
    "validate": "validation",
}

__all__ = ["Calibration", "CalibrationError", "Validation", "calibrate", "validate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
