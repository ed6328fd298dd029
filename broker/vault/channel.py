"""`ControlChannel`: one worker's or executor's control stream, as frames of wire/control.py.

The vault reads nothing else from those processes. A frame out of order, of an unknown type or over its bound closes
the stream; so does any exception in a callback (RULINGS 11.3). What is sent leaves at the end of the loop's turn, so
that answers to several calls cost one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from net.process import complain
from wire.control import MAX_TO_VAULT, ToVault, decode_to_vault
from wire.frames import FrameReader, WireError

MAX_HELD = 64
"""Messages of one process that may be in work at once; beyond, reading pauses."""


class ControlChannel(asyncio.Protocol):
    """Calls `on_message` for each message and `on_lost` once at the end. Both run in the loop and must not block."""

    def __init__(self, on_message: Callable[[ToVault], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = FrameReader(MAX_TO_VAULT)
        self._transport: asyncio.Transport | None = None
        self._held = 0
        self._outgoing: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream's transport always is one; uvloop's do not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._on_message(decode_to_vault(frame))
        except WireError:
            complain("vault", "a process broke the control protocol; its stream is closed")
            self.close()
        except Exception as error:
            complain("vault", "a control message failed; its stream is closed", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._on_lost()
        except Exception as error:
            complain("vault", "a control stream could not be given up", error)

    def send(self, data: bytes) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._write_out)
        self._outgoing.append(data)

    def unsent(self) -> int:
        waiting = sum(map(len, self._outgoing))
        return waiting + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def close(self) -> None:
        self._write_out()
        if self._transport is not None:
            self._transport.abort()

    def _write_out(self) -> None:
        pieces, self._outgoing = self._outgoing, []
        if pieces and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(pieces))

    def hold(self) -> None:
        """One more message is in work."""
        self._held += 1
        if self._held == MAX_HELD and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def release(self) -> None:
        """One message less is in work."""
        self._held -= 1
        if self._held == MAX_HELD - 1 and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
