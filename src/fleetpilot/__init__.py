"""fleetpilot: scheduling policies for fleets of LLM inference engines, in simulation and in front of real vLLM."""

__version__ = "0.1.0"
