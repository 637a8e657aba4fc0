"""Two real vLLM engines for a benchmark, one a core, and what the tests in front of them use too."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parent, HERE.parents[1] / "tests" / "vllm"):
    sys.path.insert(0, str(folder))

from engines import Engine, build_tiny_model  # noqa: E402


@contextmanager
def two_engines(blocks: int = 513, max_num_seqs: int = 32, flags: Sequence[str] = ()) -> Iterator[list[Engine]]:
    """Both ready; stopped in the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model")
        engines = [
            Engine(model, folder, core=core, blocks=blocks, max_num_seqs=max_num_seqs, flags=flags) for core in (0, 1)
        ]
        try:
            for engine in engines:
                engine.launch()
            for engine in engines:
                engine.wait_ready()
            yield engines
        finally:
            for engine in engines:
                engine.stop()


def load() -> str:
    """Of the machine, now: engines, dispatcher and clients share its cores with whatever else runs."""
    return f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"
