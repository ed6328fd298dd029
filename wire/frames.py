"""Frames: u32 payload length, u8 type, payload. The envelope of hand-off and control streams.

Bounded before it is buffered: a length over the bound is refused at its fourth byte. A stream that ends inside a
frame is an error for the reader's owner to see (`pending`). Any split of the input gives the same frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEADER = 5
MAX_PAYLOAD = 1 << 20
"""Bytes in one frame's payload on hand-offs and towards the vault."""


class WireError(ValueError):
    """Bytes that are not one of our messages. str() is a fixed sentence that reflects no input."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: `type` is the table of the stream it came from (wire.handoff.FrameType, wire.control)."""

    type: int
    payload: bytes


def encode_frame(kind: int, payload: bytes, bound: int = MAX_PAYLOAD) -> bytes:
    """Return the frame's bytes. Raises WireError over `bound`."""
    if len(payload) > bound:
        raise WireError("a frame is longer than its bound")
    return len(payload).to_bytes(4, "big") + bytes((kind,)) + payload


class FrameReader:
    """Cuts a byte stream into frames, whatever its split."""

    __slots__ = ("_bound", "_buffer")

    def __init__(self, bound: int = MAX_PAYLOAD) -> None:
        self._bound = bound
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield each frame that `data` completes. Raises WireError at a length over the bound."""
        self._buffer += data
        return self._frames()

    @property
    def pending(self) -> bool:
        """True inside a frame: an end of stream now is a truncation."""
        return bool(self._buffer)

    def _frames(self) -> Iterator[Frame]:
        while True:
            if len(self._buffer) < 4:
                return
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self._bound:
                raise WireError("a frame is longer than its bound")
            end = HEADER + length
            if len(self._buffer) < end:
                return
            frame = Frame(self._buffer[4], bytes(self._buffer[HEADER:end]))
            del self._buffer[:end]
            yield frame
