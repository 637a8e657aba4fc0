"""The comparison with the oracle has teeth: it finds every fault of faults.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("fault_driver.py")


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
    assert text.count(fault.old) == 1, f"{fault.path} has changed: plant {fault.name!r} anew"
    source.write_text(text.replace(fault.old, fault.new))


def drive(package: Path) -> subprocess.CompletedProcess[str]:
    """Run the driver with the kernels uncompiled: compiling them anew for each fault would take minutes."""
    folders = (package.parent, DRIVER.parent, DRIVER.parents[1])
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, str(DRIVER)], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )


def test_the_kernels_as_they_are_pass(tmp_path: Path) -> None:
    done = drive(copy_package(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    plant(fault, package)
    done = drive(package)
    assert done.returncode == 1, done.stdout + done.stderr
