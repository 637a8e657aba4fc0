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
PLANTED = {
    "clusters": FAULTS,
    "fleets": FLEET_FAULTS,
    "pools": POOL_FAULTS,
    "shared_cache": SHARED_CACHE_FAULTS,
    "speculation": SPECULATION_FAULTS,
}
"""By the kind of the driver's cases that find them."""


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


@pytest.mark.parametrize("kind", PLANTED)
def test_the_kernels_as_they_are_pass(kind: str, tmp_path: Path) -> None:
    done = drive(copy_package(tmp_path), kind)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind, faults in PLANTED.items() for fault in faults],
    ids=[f"{kind}-{fault.name}" for kind, faults in PLANTED.items() for fault in faults],
)
def test_a_planted_fault_is_found(kind: str, fault: Fault, tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    plant(fault, package)
    done = drive(package, kind)
    assert done.returncode == DIFFERENT, done.stdout + done.stderr
