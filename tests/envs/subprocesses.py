"""Programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def printed_compiled_and_uncompiled(code: str) -> list[str]:
    """What a program prints with compiled kernels, and with uncompiled ones."""
    return [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("0", "1")
    ]
