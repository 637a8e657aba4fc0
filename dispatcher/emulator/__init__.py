"""Emulated engines: vLLM's HTTP interface over the cluster model, in real time.

`run` serves a fleet of them until the process is told to stop; `EmulatedFleet` and `EmulatedEngine` do inside an event
loop.
"""

from fleetpilot.dispatcher.emulator.fleet import EmulatedFleet, run
from fleetpilot.dispatcher.emulator.server import EmulatedEngine, Faults, Options

__all__ = ["EmulatedEngine", "EmulatedFleet", "Faults", "Options", "run"]
