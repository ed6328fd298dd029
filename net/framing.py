"""Frames over a byte stream: the transport of hand-offs and of the vault's control streams.

`send` queues, `drain` waits; `receive` returns one frame, None at a clean end between frames, and raises
StreamBroken or wire.frames.WireError for anything else, after which the stream is of no use.

What is sent leaves at the end of the loop's turn: the frames of one small answer (head, data, end), or of several
calls, cost one write and wake the other process once. GATHER_BYTES bounds what waits for that.
"""

from __future__ import annotations

import asyncio
from collections import deque

from net.stream import ByteStream, StreamBroken
from wire.frames import MAX_PAYLOAD, Frame, FrameReader, WireError

GATHER_BYTES = 32 * 1024


class FrameStream:
    """One framed stream. Reading and writing may happen in two tasks."""

    __slots__ = ("_ended", "_outgoing", "_outgoing_bytes", "_reader", "_ready", "stream")

    def __init__(self, stream: ByteStream, bound: int = MAX_PAYLOAD) -> None:
        """`bound` is the largest payload accepted; a longer one raises before it is buffered."""
        self.stream = stream
        self._reader = FrameReader(bound)
        self._ready: deque[Frame] = deque()
        self._ended = False
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0

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
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(encoded)
        self._outgoing_bytes += len(encoded)
        if self._outgoing_bytes >= GATHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Let what was queued leave now. Never raises."""
        if self._outgoing:
            pieces, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
            self.stream.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    async def drain(self) -> None:
        """Wait until the peer took enough. Raises StreamBroken."""
        await self.stream.drain()

    def abort(self) -> None:
        self.flush()
        self.stream.abort()

    async def close(self) -> None:
        self.flush()
        await self.stream.close()


__all__ = ["FrameStream", "StreamBroken", "WireError"]
