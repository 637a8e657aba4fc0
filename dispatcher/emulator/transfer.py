"""The hand-off of KV between emulated engines, under the names of vLLM's NIXL connector.

The source pins the blocks of a request with ``do_remote_decode`` under a lease when it has ended, and names them in the
answer's ``kv_transfer_params``. Another engine that gets these with a request pulls the blocks: from an engine of the
same process, or over HTTP from that engine's own port. Nothing is copied but time: which blocks they are follows from
the tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fleetpilot.dispatcher.emulator.server import EmulatedEngine

NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
READ_PATH = "/emulator/kv/read"
RELEASE_PATH = "/emulator/kv/release"
_ANSWER_S = 5.0

_here: dict[str, EmulatedEngine] = {}
"""The engines of this process by their ids."""


def announce(engine: EmulatedEngine) -> None:
    """The engine can be pulled from."""
    _here[engine.engine_id] = engine


def retire(engine: EmulatedEngine) -> None:
    """The engine is gone."""
    _here.pop(engine.engine_id, None)


def wants_pull(kv: dict[str, Any]) -> bool:
    """Whether a request's parameters name blocks to be pulled."""
    return (
        bool(kv.get("do_remote_prefill"))
        and bool(kv.get("remote_block_ids"))
        and all(kv.get(name) is not None for name in NEEDED)
    )


def digest(tokens: NDArray[np.int32]) -> str:
    """What two engines compare to know that they speak of the same blocks."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()


class Leases:
    """The blocks that an engine keeps for others.

    Args:
        release: unpins a hold of the engine.
        lease_s: how long blocks stay pinned that nobody reads.
        on_expired: called when a lease has ended unread.
    """

    def __init__(self, release: Callable[[int], None], lease_s: float, on_expired: Callable[[], None]):
        self._release = release
        self._lease_s = lease_s
        self._on_expired = on_expired
        self._leases: dict[str, tuple[int, NDArray[np.int32], asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, name: str, hold: int, tokens: NDArray[np.int32]) -> None:
        """Keep the blocks of these tokens."""
        timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire, name)
        self._leases[name] = hold, tokens, timer

    def _expire(self, name: str) -> None:
        if self.release(name):
            self._on_expired()

    def read(self, name: str, wanted: str, count: int) -> bool:
        """Another engine reads the blocks of the first `count` tokens, whose digest it expects to be `wanted`.

        The lease begins anew, as with heartbeats.
        """
        lease = self._leases.get(name)
        if lease is None or digest(lease[1][:count]) != wanted:
            return False
        hold, tokens, timer = lease
        timer.cancel()
        self.grant(name, hold, tokens)
        return True

    def release(self, name: str) -> bool:
        """Nobody will read the blocks any more."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        lease[2].cancel()
        self._release(lease[0])
        return True

    def clear(self) -> None:
        """The engine is gone."""
        for _, _, timer in self._leases.values():
            timer.cancel()
        self._leases.clear()


def stands_still(kv: dict[str, Any]) -> bool:
    """Whether the source is wedged: a copy from it does not end before it goes on, or dies."""
    source = _here.get(str(kv["remote_engine_id"]))
    return source is not None and source.faults.wedged


async def read(kv: dict[str, Any], tokens: NDArray[np.int32]) -> bool:
    """Ask the source for the blocks of these tokens; False if it is gone or has them no more."""
    name, wanted = str(kv["remote_request_id"]), digest(tokens)
    source = _here.get(str(kv["remote_engine_id"]))
    if source is not None:
        return source.leases.read(name, wanted, len(tokens))
    return await _ask(kv, READ_PATH, {"request_id": name, "digest": wanted, "tokens": len(tokens)})


async def release(kv: dict[str, Any]) -> None:
    """Tell the source that its blocks have been read, or will not be."""
    name = str(kv["remote_request_id"])
    source = _here.get(str(kv["remote_engine_id"]))
    if source is not None:
        source.leases.release(name)
        return
    await _ask(kv, RELEASE_PATH, {"request_id": name})


async def _ask(kv: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    """POST to the source; whether it said 200."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(str(kv["remote_host"]), int(kv["remote_port"]))
            content = json.dumps(body).encode()
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: emulator\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
            )
            status = await reader.readline()
            writer.close()
            return status.split(b" ")[1:2] == [b"200"]
    except (OSError, TimeoutError, ValueError):
        return False
