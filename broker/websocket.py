"""A credentialed WebSocket after its 101: whole messages, read both ways before they pass (RULINGS 7.5).

    worker --frames of the hand-off--> HandoffStream --relay--> upstream
                                                  up:   no placeholder in any message
                                                  down: every message scrubbed, masked at the same length

Nothing is compressed: the extension is never offered upstream. A message waits until it is whole, up to MESSAGE_BYTES;
control frames pass between its frames. What a secret spread over several messages shows is not found (docs/limits.md).
"""

from __future__ import annotations

import asyncio
from typing import Final

from broker.handoffside import HandoffSide
from broker.scrub import Patterns, Scrubber
from net.stream import READ_SIZE, ByteStream, StreamBroken
from net.websocket import MessageRefused, WebSocketLimits, WebSocketResult, relay
from rules.decision import Restrictions
from rules.placeholders import contains
from wire.heads import HeadRefused
from wire.websocket import Frame, MessageReader

MESSAGE_BYTES: Final = 8 << 20
"""Largest message, and so the most that one direction holds."""
_PIECE: Final = 64 * 1024
"""Scrubbed at once between two turns of the loop."""


async def relay_credentialed(
    side: HandoffSide, upstream: ByteStream, patterns: Patterns, restrictions: Restrictions
) -> tuple[WebSocketResult, int]:
    """Relay to the end; both sides are closed then. Returns how it ended and the number of masked places.

    Never raises for what peers do. A placeholder in a message ends it with `placeholder-misuse` before the message.
    """
    down = _Scrubbed(patterns)
    limits = WebSocketLimits(
        frame_bytes=MESSAGE_BYTES,
        message_bytes=MESSAGE_BYTES,
        up_bytes=restrictions.request_bytes,
        down_bytes=restrictions.response_bytes,
    )
    client = HandoffStream(side)
    result = await relay(client, upstream, limits=limits, inspect_up=_Searched(), inspect_down=down)
    return result, down.hits


class _Searched:
    """Up: messages as they are, unless one holds a placeholder."""

    def __init__(self) -> None:
        self._reader = MessageReader()

    async def __call__(self, data: bytes) -> bytes:
        out: list[bytes] = []
        for unit in self._reader.feed(data):
            if contains(b"".join(frame.payload for frame in unit).decode("latin-1")):
                raise MessageRefused("placeholder-misuse", "a placeholder in a WebSocket message")
            out += [frame.encode() for frame in unit]
        return b"".join(out)


class _Scrubbed:
    """Down: messages with every promised form of a guarded value masked. Control frames too: they carry 125 bytes."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._reader = MessageReader()
        self.hits = 0

    async def __call__(self, data: bytes) -> bytes:
        out: list[bytes] = []
        for unit in self._reader.feed(data):
            out += await self._clean(unit)
        return b"".join(out)

    async def _clean(self, unit: tuple[Frame, ...]) -> list[bytes]:
        payload = b"".join(frame.payload for frame in unit)
        scrubber = Scrubber(self._patterns)
        pieces: list[bytes] = []
        for start in range(0, len(payload), _PIECE):
            if start:
                await asyncio.sleep(0)  # a large message must not hold up the others
            pieces.append(scrubber.feed(payload[start : start + _PIECE]))
        pieces.append(scrubber.finish())
        self.hits += scrubber.hits
        clean = memoryview(b"".join(pieces))
        out: list[bytes] = []
        at = 0
        for frame in unit:
            out.append(frame.encode(bytes(clean[at : at + len(frame.payload)])))
            at += len(frame.payload)
        return out


class HandoffStream:
    """The worker's end of an upgraded hand-off as a side of net.websocket.relay."""

    def __init__(self, side: HandoffSide) -> None:
        self._side = side
        self._queued = bytearray()
        self._ended = False
        self.read_timeout: float | None = None

    async def receive(self, max_bytes: int = READ_SIZE) -> bytes:
        """The next bytes of the client, b"" at its end. Raises StreamBroken. `max_bytes` is the frames' own bound."""
        try:
            async with asyncio.timeout(self.read_timeout):
                return await self._side.read_body() or b""
        except TimeoutError:
            raise StreamBroken("idle-timeout") from None
        except HeadRefused as refused:
            raise StreamBroken("closed", refused.detail) from None
        except StreamBroken:
            if self._ended:
                return b""  # our end came first: the worker has nothing left to say
            raise

    def write(self, data: bytes) -> None:
        self._queued += data

    async def drain(self) -> None:
        if self._queued:
            data = bytes(self._queued)
            self._queued.clear()
            await self._side.send_data(data)

    async def send_eof(self) -> None:
        """The upstream has ended: so has the answer."""
        if not self._ended:
            self._ended = True
            await self.drain()
            await self._side.finish()

    def abort(self) -> None:
        if not self._ended:
            self._side.abort()

    async def close(self) -> None:
        """The hand-off is closed by who opened it; here the answer ends."""
        try:
            await self.send_eof()
        except StreamBroken:
            self._side.abort()
