"""Two real vLLM engines on the CPU, a core each, with a model of random weights: what real_vllm.md was tried on.

Usage: python examples/tiny_engines.py (needs .venv-vllm, which `make test-vllm` installs)

One has a quarter of the other's KV cache and places in a batch. Their addresses go to engines.txt; Ctrl-C ends them.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "vllm"))

from validate import start

ENDS = {signal.SIGINT, signal.SIGTERM}


def main() -> None:
    addresses = Path("engines.txt")
    with tempfile.TemporaryDirectory() as folder:
        engines = start(Path(folder))
        try:
            addresses.write_text("".join(f"{engine.url}\n" for engine in engines))
            print(f"{', '.join(engine.url for engine in engines)}: in {addresses}", flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
            signal.sigwait(ENDS)
        finally:
            addresses.unlink(missing_ok=True)
            for engine in engines:
                engine.stop()


if __name__ == "__main__":
    main()
