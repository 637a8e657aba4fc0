"""Scaling: an actuator carries out what the policy decides on SCALE, within limits (docs/dispatcher.md)."""
