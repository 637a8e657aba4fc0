"""Numba compilation with a cache that notices every change.

Numba's own cache looks at the file of the compiled function alone; a change in a function it calls would go unseen.
Here the cache directory's name is a hash over all kernel sources, so an edit anywhere starts a fresh cache.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import config as _config
from numpy.typing import NDArray

config: Any = _config  # its attributes are made at run time
njit: Any = numba.njit  # its stubs lack options

UNCOMPILED: bool = bool(config.DISABLE_JIT)
"""``NUMBA_DISABLE_JIT=1``: kernels run as plain Python."""

F = TypeVar("F", bound=Callable[..., Any])

_KERNEL_SOURCES = ("fleet/*.py", "cluster/*.py", "baselines/*.py", "envs/*.py", "workloads/*.py", "agents/inference.py")


@cache
def cache_dir() -> Path:
    """The directory that holds the compiled kernels of exactly these sources and this Numba."""
    package = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__}".encode())
    for source in sorted(path for pattern in _KERNEL_SOURCES for path in package.parent.glob(pattern)):
        digest.update(source.name.encode() + source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fleetpilot"
    )
    return Path(base) / f"kernels-{digest.hexdigest()[:16]}"


@contextmanager
def _our_cache(part: str = "") -> Iterator[None]:
    """Numba reads its cache directory once, when a function is decorated."""
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(cache_dir() / part)
    try:
        yield
    finally:
        config.CACHE_DIR = previous


def kernel(function: F) -> F:
    """Compile with Numba on first use, without the GIL, cached on disk by the hash of all kernel sources."""
    return _compiled(function)


def inlined(function: F) -> F:
    """Like `kernel`, but LLVM inlines it where it is called."""
    return _compiled(function, forceinline=True)


def part(function: F) -> F:
    """Like `inlined`, for what calls half of all kernels and is called in one place: there alone Numba compiles it."""
    return _compiled(function, inline="always")


def _compiled(function: F, **options: Any) -> F:
    options |= {"cache": True, "nogil": True, "error_model": "numpy"}
    with _our_cache():
        compiled = njit(**options)(function)
    if not UNCOMPILED:
        with _our_cache("called"):
            called = njit(**options, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
        _let_kernels_call(compiled, called)
    return cast("F", compiled)


def _let_kernels_call(compiled: Any, called: Any) -> None:
    """Kernels that call `compiled` get `called`, which Python cannot call: what Numba adds for that takes it long.

    They hand it 64-bit integers, or it would be compiled for each width of records' fields.
    """
    types = cast("Any", numba.types)

    def widened(kind: Any) -> Any:
        kind = types.unliteral(kind)
        return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind

    compiled.get_call_template = lambda args, kws: called.get_call_template(tuple(map(widened, args)), kws)
    compiled.get_overload = called.get_overload


def kernel_array(length: int, dtype: Any) -> NDArray[Any]:
    """Zeros, padding between fields too, for kernels to work in.

    They share no cache line with anything that another thread may write, and lie in huge pages where the system has
    them, which NumPy asks for in `empty`, not in `zeros`: the state of many environments is too large for the CPU to
    keep the addresses of its small pages at hand.
    """
    line = 64
    size = length * np.dtype(dtype).itemsize
    memory = np.empty(size + 2 * line, np.uint8)
    memory[...] = 0
    start = -memory.ctypes.data % line
    return memory[start : start + size].view(dtype)


def function_pointer(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile now, to a pointer: kernels that take one are compiled once for all functions of this signature."""
    if UNCOMPILED:
        return function
    # Numba cannot cache what was typed into a notebook, nor load again what no module holds.
    on_disk = os.path.exists(function.__code__.co_filename) and function.__module__ in sys.modules
    with _our_cache():
        return numba.cfunc(signature, cache=on_disk, nogil=True, error_model="numpy")(function)
