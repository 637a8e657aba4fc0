"""What the benchmarks share: the machine they ran on, fresh processes to measure in, tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def machine() -> str:
    """Processor, cores, load and versions: what a figure is worth nothing without."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("fleetpilot", "numpy", "numba"))
    return (
        f"machine: {_processor()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def in_fresh_process(module: str, function: str, *arguments: object, **environment: str) -> dict[str, Any]:
    """The dictionary that a function of a benchmark returns, called in a Python of its own.

    Args:
        module: name of the benchmark.
        function: name of the function.
        arguments: of the function; anything whose `repr` is its source.
        environment: variables to set for that process.
    """
    call = f"{function}({', '.join(map(repr, arguments))})"
    code = f"import json; from {module} import {function}; print(json.dumps({call}))"
    return run_json([sys.executable, "-c", code], environment)


def run_json(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object that a command prints last; `environment` are variables to set for it."""
    variables = {**os.environ, **environment}
    done = subprocess.run(command, cwd=HERE, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Smallest, median and largest of some measurements."""
    return " / ".join(format(value, form) for value in (min(values), statistics.median(values), max(values)))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns in line, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for first, *others in (columns, *rows):
        aligned = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *aligned]))
