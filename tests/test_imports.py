"""Who may know of whom: the folders' import table, read from the sources, and what an import really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CLUSTER = {"fleetpilot.cluster"}
GYMNASIUM = {"gymnasium", "fleetpilot.envs"}
TORCH = {"torch", "stable_baselines3", "sb3_contrib", "tensorboard"}
HTTP = {
    "aiohttp",
    "http",
    "httptools",
    "fleetpilot.dispatcher",
    "httpx",
    "requests",
    "socket",
    "socketserver",
    "urllib.request",
    "urllib3",
    "uvicorn",
}

FORBIDDEN: dict[str, set[str]] = {
    "fleet": {"fleetpilot"} | GYMNASIUM | TORCH | HTTP,
    "workloads": CLUSTER | GYMNASIUM | TORCH | HTTP,
    "cluster": GYMNASIUM | TORCH | HTTP,
    "envs": TORCH | HTTP,
    "baselines": CLUSTER | GYMNASIUM | TORCH | HTTP,
    "agents": CLUSTER | HTTP,
    "training": HTTP,
    "evaluation": HTTP | {"fleetpilot.training"},
    "dispatcher": GYMNASIUM | TORCH | {"fleetpilot.evaluation", "fleetpilot.training"},
    "calibration": TORCH,
}
"""Folder -> what it must not import, itself and the modules inside. A folder may always import its own."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("workloads/fetch.py", "urllib.request"): "downloads public traces when a user asks for one; nothing imports it",
    ("envs/sb3.py", "stable_baselines3"): "the adapter implements its VecEnv; nothing imports it",
}


def imported(source: Path, package: str) -> Iterator[str]:
    """The dotted names that a module imports, at any depth of its code; of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def broken_rules(folder: str) -> set[tuple[str, str]]:
    """(source file, forbidden package) for every forbidden import of a folder."""
    broken = set()
    for source in sorted((ROOT / folder).rglob("*.py")):
        path = source.relative_to(ROOT)
        for name in imported(source, ".".join(["fleetpilot", *path.parent.parts])):
            if not inside(name, f"fleetpilot.{folder}") and name != "fleetpilot":
                broken |= {(path.as_posix(), banned) for banned in FORBIDDEN[folder] if inside(name, banned)}
    return broken


def test_every_folder_has_its_row() -> None:
    assert sorted(FORBIDDEN) == sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_only_what_it_may_know_of(folder: str) -> None:
    assert broken_rules(folder) - set(EXCEPTIONS) == set()


def test_every_exception_is_still_needed() -> None:
    assert set(EXCEPTIONS) <= {rule for folder in FORBIDDEN for rule in broken_rules(folder)}


@pytest.mark.parametrize(
    ("statement", "package", "names"),
    [
        ("import a.b as c", "fleetpilot.fleet", {"a.b"}),
        ("def f():\n  from a import b", "fleetpilot.fleet", {"a", "a.b"}),
        ("from . import b", "fleetpilot.fleet", {"fleetpilot.fleet", "fleetpilot.fleet.b"}),
        (
            "from ..cluster.kernel import b",
            "fleetpilot.fleet",
            {"fleetpilot.cluster.kernel", "fleetpilot.cluster.kernel.b"},
        ),
    ],
)
def test_imports_are_found_however_they_are_written(
    statement: str, package: str, names: set[str], tmp_path: Path
) -> None:
    source = tmp_path / "module.py"
    source.write_text(statement)
    assert set(imported(source, package)) == names


HEAVY = {"pandas", "torch", "stable_baselines3", "tensorboard", "matplotlib", "pyarrow", "scipy.linalg"}
"""Of scipy its most used part: Numba itself asks the bare package for its version."""


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("fleetpilot.envs", HEAVY),
        ("fleetpilot.baselines", HEAVY | {"gymnasium", "fleetpilot.cluster"}),
        ("fleetpilot.agents", HEAVY | {"gymnasium", "fleetpilot.cluster", "onnxruntime"}),
    ],
)
def test_an_import_loads_nothing_heavy(package: str, unwanted: set[str]) -> None:
    command = [sys.executable, "-c", f"import sys, {package}; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert package in loaded
    assert unwanted & set(loaded) == set()
