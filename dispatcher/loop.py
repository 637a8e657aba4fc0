"""The event loop that a dispatcher runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run to its end, in uvloop where that is there."""
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows
        return asyncio.run(main)
    return uvloop.run(main)
