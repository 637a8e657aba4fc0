"""Server-sent events, as they come in pieces."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
"""The data of the last event of the OpenAI API's streams."""


def event(data: bytes) -> bytes:
    """An event of one line of data."""
    return b"data: " + data + b"\n\n"


class EventReader:
    """Cuts a stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of every event that is complete now; of a comment (a keep-alive) nothing."""
        events = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = events.pop()
        for text in events:
            if text.startswith(b"data: "):
                yield text[6:]
