"""Readers of public request traces: one file per format, one entry point.

`read_trace` finds out which format a file has, reads it and returns the canonical `RequestTable`.
"""

from fleetpilot.workloads.readers.detect import detect_format
from fleetpilot.workloads.readers.read import read_summary, read_trace

__all__ = ["detect_format", "read_summary", "read_trace"]
