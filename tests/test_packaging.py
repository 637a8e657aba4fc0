"""The wheel holds what the tree holds, under one import name."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fleetpilot

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]
FOLDER_OF: dict[str, str] = SETUPTOOLS["package-dir"]
"""Mapped package -> folder, the root package included."""
BARE_NAMES = sorted(folder for package, folder in FOLDER_OF.items() if package != "fleetpilot")


def tree() -> dict[str, Path]:
    """Every file under the mapped folders, by its path inside the wheel."""
    files = {}
    for package, folder in FOLDER_OF.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"] = path
    return files


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no earlier build's left-overs can get into it."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDER_OF.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "dist",
        ".",
    ]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_every_package_of_the_tree_is_listed_once() -> None:
    packages = {path.rpartition("/")[0].replace("/", ".") for path in tree() if path.endswith(".py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages)


def test_every_package_has_an_init() -> None:
    missing = [p for p in SETUPTOOLS["packages"] if f"{p.replace('.', '/')}/__init__.py" not in tree()]
    assert missing == []


def test_every_top_level_package_folder_is_mapped() -> None:
    assert sorted(path.parent.name for path in ROOT.glob("*/__init__.py")) == BARE_NAMES
    assert all(FOLDER_OF[f"fleetpilot.{name}"] == name for name in BARE_NAMES)


@pytest.mark.parametrize("name", BARE_NAMES)
def test_the_bare_import_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=f"^import fleetpilot.{name}, not {name}$"):
        importlib.import_module(name)


def test_the_linter_bans_the_bare_imports() -> None:
    code = "\n".join(f"import {name}" for name in BARE_NAMES)
    command = [sys.executable, "-m", "ruff", "check", "--select=TID251", "--output-format=concise", "-"]
    report = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True).stdout
    assert re.findall(r"`(\w+)` is banned: import fleetpilot\.(\w+)", report) == [(name, name) for name in BARE_NAMES]


def test_the_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == set(tree())


def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import importlib, pkgutil, sys
import fleetpilot
assert fleetpilot.__file__.startswith(sys.argv[1]), fleetpilot.__file__
for module in pkgutil.walk_packages(fleetpilot.__path__, "fleetpilot."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    bootstrap = f"import sys; sys.path.insert(0, sys.argv[1])\n{code}"
    subprocess.run([sys.executable, "-c", bootstrap, str(tmp_path)], cwd=tmp_path, check=True, timeout=300)


@pytest.mark.parametrize(
    "command",
    [[str(Path(sys.executable).parent / "fleetpilot")], [sys.executable, "-m", "fleetpilot"]],
    ids=["script", "module"],
)
def test_the_command_answers(command: list[str]) -> None:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.split() == ["fleetpilot", fleetpilot.__version__]
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert usage.stdout.startswith("usage: fleetpilot")


def test_one_version_everywhere(wheel: Path) -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fleetpilot.__version__}\n" in citation
    assert wheel.name.split("-")[1] == fleetpilot.__version__


def test_an_install_brings_no_training_stack() -> None:
    requirements = [r for r in metadata.requires("fleetpilot") or [] if "extra ==" not in r]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in requirements) == ["gymnasium", "numba", "numpy"]  # type: ignore[index]


def test_everything_that_is_installed_for_development_is_pinned() -> None:
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    pins = dict(line.split("==") for line in lines)
    public = re.compile(r"[\d.]+(b\d+|\.post\d+)?")  # OpenTelemetry has betas alone of some parts
    assert all(public.fullmatch(version) for version in pins.values()), "exact public versions only"
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    extras: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"], *(r for extra in extras.values() for r in extra)]
    assert {re.match(r"[\w-]+", r)[0].lower() for r in wanted} - {"fleetpilot"} <= pinned  # type: ignore[index]
