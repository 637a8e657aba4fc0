"""Messages between the process that leads and a worker: a name and arguments, pickled, over a socket pair."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from typing import Any

_LENGTH_BYTES = 4


class Channel(asyncio.Protocol):
    """One end.

    Args:
        handle: called with each message's name and arguments.
        lost: called when the other end is gone.
    """

    def __init__(self, handle: Callable[..., None], lost: Callable[[], None]):
        self._handle = handle
        self._lost = lost
        self._transport: Any = None
        self._buffer = b""

    async def open(self, end: socket.socket) -> None:
        """Over one socket of a pair; messages may come from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, name: str, *arguments: Any) -> None:
        """Nothing is sent where the other end has gone."""
        if not self._transport.is_closing():
            data = pickle.dumps((name, *arguments), pickle.HIGHEST_PROTOCOL)
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    @property
    def waiting_bytes(self) -> int:
        """That the other end has not taken yet."""
        return int(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """What was sent arrives."""
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        """The channel is there."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """A part of a message, or several."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if len(self._buffer) < end:
                return
            message, self._buffer = self._buffer[_LENGTH_BYTES:end], self._buffer[end:]
            self._handle(*pickle.loads(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self._lost()
