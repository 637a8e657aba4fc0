"""Many emulated engines in one process, one port each."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvloop

from fleetpilot.dispatcher.emulator.engine import warm_up
from fleetpilot.dispatcher.emulator.server import EmulatedEngine, Options
from fleetpilot.fleet.profiles import HardwareProfile


class EmulatedFleet:
    """Engines of the same options, each with its own profile and seed.

    Attributes:
        engines: in the order of the profiles.
    """

    def __init__(self, profiles: Sequence[HardwareProfile], options: Options | None = None):
        options = options or Options()
        self.engines = [
            EmulatedEngine(profile, replace(options, seed=options.seed + i)) for i, profile in enumerate(profiles)
        ]

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen, the first engine on `port`, the others on those that follow; 0 takes free ones.

        Raises:
            OSError: an address cannot be bound; then none is.
        """
        await asyncio.to_thread(warm_up, [engine.profile for engine in self.engines])
        try:
            for i, engine in enumerate(self.engines):
                await engine.start(host, port + i if port else 0)
        except OSError:
            await self.stop()
            raise

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop listening, let requests end for `grace_s`, and cut the rest."""
        await asyncio.gather(*(engine.stop(grace_s) for engine in self.engines))

    @property
    def urls(self) -> list[str]:
        """Where the engines listen."""
        return [f"http://{engine.host}:{engine.port}" for engine in self.engines]


def run(
    profiles: Sequence[HardwareProfile],
    options: Options,
    *,
    host: str,
    port: int,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until the process is told to stop.

    Raises:
        OSError: an address cannot be bound.
    """

    async def serve() -> None:
        fleet = EmulatedFleet(profiles, options)
        await fleet.start(host, port)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        for url, engine in zip(fleet.urls, fleet.engines, strict=True):
            say(f"{url}  {engine.profile.name}")
        sys.stdout.flush()
        await stop.wait()
        await fleet.stop()

    uvloop.run(serve())
