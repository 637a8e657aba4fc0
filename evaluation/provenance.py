"""Where a result comes from: hashes of what decides it, versions for the record, and JSON that every tool can read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fleetpilot

if TYPE_CHECKING:
    from fleetpilot.cluster import FleetConfig
    from fleetpilot.workloads import RequestTable


def to_json(value: object, indent: int | None = 1) -> str:
    """Valid JSON of dataclasses, arrays and plain values; infinite and NaN become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def fleet_json(fleet: FleetConfig) -> dict[str, object]:
    """A fleet's configuration: each profile in full once, the instances by profile name."""
    plain = _plain(fleet)
    assert isinstance(plain, dict)
    del plain["profiles"]
    return {
        "instances": [profile.name for profile in fleet.profiles],
        **plain,
        "profiles": {profile.name: _plain(profile) for profile in fleet.profiles},
    }


def table_hash(table: RequestTable) -> str:
    """A hash of a table's content: all columns and the prefix tree, not its name and provenance."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, np.ndarray):
            digest.update(
                f"{field.name}{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
            )
    return digest.hexdigest()[:16]


def config_hash(config: Mapping[str, object]) -> str:
    """A hash of a configuration, by its JSON."""
    return hashlib.sha256(json.dumps(_plain(config), sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def code_version(*, learned: bool = False) -> dict[str, str]:
    """What of the code decides a run's result: package version, kernels and baselines, metrics.

    Args:
        learned: the policy is, which decides by further code.
    """
    from fleetpilot.fleet.jit import cache_dir

    package = Path(__file__).parent.parent
    return {
        "package": fleetpilot.__version__,
        "kernels": cache_dir().name,
        "evaluation": _sources_hash(package / "evaluation", "metrics.py", "runs.py"),
        **({"learned": _sources_hash(package / "agents", "runtime.py", "schema.py")} if learned else {}),
    }


def _sources_hash(folder: Path, *names: str) -> str:
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()[:16]


@functools.cache
def provenance() -> dict[str, object]:
    """Versions and commit, for the record (they do not decide whether a stored run is used again)."""
    import numba

    return {
        "versions": {
            "fleetpilot": fleetpilot.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
        "commit": _commit(),
    }


def origin_text() -> str:
    """Commit and versions in a line, for a page."""
    origin = provenance()
    versions = origin["versions"]
    assert isinstance(versions, dict)
    return f"Commit {origin['commit']}; {', '.join(f'{name} {version}' for name, version in versions.items())}."


def _commit() -> str | None:
    """The commit of the checkout that the package runs from, with ``-dirty`` after changes; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
