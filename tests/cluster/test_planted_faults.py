"""The comparison with the oracle has teeth: it finds every fault of faults.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS, FLEET_FAULTS, POOL_FAULTS, SHARED_CACHE_FAULTS, SPECULATION_FAULTS, Fault

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("fault_driver.py")
DIFFERENT = 3  # the driver's exit status


def copy_package(folder: Path) -> Path:
    """The package under its own name, as a tree of folders."""
    package = folder / "fleetpilot"
    without_bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "fleetpilot", package, ignore=without_bytecode)
    for marker in ROOT.glob("*/__init__.py"):
        shutil.copytree(marker.parent, package / marker.parent.name, ignore=without_bytecode)
    return package


def plant(fault: Fault, package: Path) -> None:
    source = package / fault.path
    text = source.read_text()
    for old, new in ((fault.old, fault.new), *fault.also):
        assert text.count(old) == 1, f"{fault.path} has changed: plant {fault.name!r} anew"
        text = text.replace(old, new)
    source.write_text(text)


def drive(package: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """Run the driver on cases of this kind, kernels uncompiled: compiling them for each fault would take minutes."""
    folders = (package.parent, DRIVER.parent, DRIVER.parents[1])
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, str(DRIVER), kind], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kind", ["clusters", "fleets", "pools", "shared_cache", "speculation"])
def test_the_kernels_as_they_are_pass(kind: str, tmp_path: Path) -> None:
    done = drive(copy_package(tmp_path), kind)
    assert done.returncode == 0, done.stdout + done.stderr


def find(fault: Fault, kind: str, folder: Path) -> None:
    package = copy_package(folder)
    plant(fault, package)
    done = drive(package, kind)
    assert done.returncode == DIFFERENT, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    find(fault, "clusters", tmp_path)


@pytest.mark.parametrize("fault", FLEET_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_planted_in_the_fleet_model_is_found(fault: Fault, tmp_path: Path) -> None:
    find(fault, "fleets", tmp_path)


@pytest.mark.parametrize("fault", POOL_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_planted_in_the_model_of_pools_is_found(fault: Fault, tmp_path: Path) -> None:
    find(fault, "pools", tmp_path)


@pytest.mark.parametrize("fault", SHARED_CACHE_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_planted_in_the_shared_cache_is_found(fault: Fault, tmp_path: Path) -> None:
    find(fault, "shared_cache", tmp_path)


@pytest.mark.parametrize("fault", SPECULATION_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_planted_in_speculative_decoding_is_found(fault: Fault, tmp_path: Path) -> None:
    find(fault, "speculation", tmp_path)
