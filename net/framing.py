"""Frames over a byte stream: the transport of hand-offs and of the vault's control streams.

`send` queues, `drain` waits; `receive` returns one frame, None at a clean end between frames, and raises
StreamBroken or wire.frames.WireError for anything else, after which the stream is of no use.
"""

from __future__ import annotations

from collections import deque

from net.stream import ByteStream, StreamBroken
from wire.frames import MAX_PAYLOAD, Frame, FrameReader, WireError


class FrameStream:
    """One framed stream. Reading and writing may happen in two tasks."""

    __slots__ = ("_ended", "_reader", "_ready", "stream")

    def __init__(self, stream: ByteStream, bound: int = MAX_PAYLOAD) -> None:
        """`bound` is the largest payload accepted; a longer one raises before it is buffered."""
        self.stream = stream
        self._reader = FrameReader(bound)
        self._ready: deque[Frame] = deque()
        self._ended = False

    def receive_nowait(self) -> Frame | None:
        """The next frame if it is already here, else None. Raises WireError."""
        while not self._ready:
            data = None if self._ended else self.stream.receive_nowait()
            if not data:
                self._ended = self._ended or data == b""
                return None
            self._ready.extend(self._reader.feed(data))
        return self._ready.popleft()

    async def receive(self) -> Frame | None:
        """The next frame, or None where the peer ended its side between frames. Raises StreamBroken, WireError."""
        while not self._ready:
            if self._ended:
                return None
            data = await self.stream.receive()
            if not data:
                self._ended = True
                if self._reader.pending:
                    raise StreamBroken("truncated", "the stream ended inside a frame")
                return None
            self._ready.extend(self._reader.feed(data))
        return self._ready.popleft()

    @property
    def leftover(self) -> bool:
        """True if a frame, or part of one, is here that nobody asked for."""
        return bool(self._ready) or self._reader.pending

    def send(self, encoded: bytes) -> None:
        """Queue an encoded frame. Never waits, never raises."""
        self.stream.write(encoded)

    async def drain(self) -> None:
        """Wait until the peer took enough. Raises StreamBroken."""
        await self.stream.drain()

    def abort(self) -> None:
        self.stream.abort()

    async def close(self) -> None:
        await self.stream.close()


__all__ = ["FrameStream", "StreamBroken", "WireError"]
