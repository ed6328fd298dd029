"""What travels between a client and the auditor: length-prefixed frames on one stream socket.

    frame      u32 length of the rest | u8 type | payload
    APPEND     repeated: u64 ticket | u8 durable | u32 length | JSON [event name, rendered fields]
    ACK        repeated: u64 ticket | u8 Verdict | u64 sequence

A ticket is the client's number for one append, and answered exactly once. Anything else on the wire is a broken
peer: FrameError, and the channel is closed.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from audit.events import AuditError

MAX_FRAME: Final = 1 << 20
APPEND: Final = 1
ACK: Final = 2
_HEAD = struct.Struct(">IB")
_ITEM = struct.Struct(">QBI")
_ACK = struct.Struct(">QBQ")


class FrameError(AuditError):
    """The peer does not speak this protocol."""


class Verdict(enum.IntEnum):
    """What became of one append."""

    UNAVAILABLE = 0
    """Not written in time, or no room for it: refuse the request."""
    REFUSED = 1
    """The event is not one that this channel may write."""
    COUNTED = 2
    """A refusal beyond its sandbox's budget: in the next summary."""
    WRITTEN = 3
    DURABLE = 4


class Item(NamedTuple):
    """One append as received."""

    ticket: int
    durable: bool
    body: bytes


class Answer(NamedTuple):
    """One acknowledgement; `sequence` is 0 unless written or durable."""

    ticket: int
    verdict: Verdict
    sequence: int


class FrameReader:
    """Cuts a byte stream into frames, whatever the split. `pending` is the number of bytes of an unfinished one."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (type, payload) of each frame that `data` completes. Raises FrameError for an oversized frame."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _HEAD.size:
                length, kind = _HEAD.unpack_from(buffer, start)
                if not 1 <= length <= MAX_FRAME:
                    raise FrameError("frame length out of bounds")
                end = start + 4 + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + _HEAD.size : end])
                start = end
                yield kind, payload
        finally:
            del buffer[:start]


def frame(kind: int, payload: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(len(payload) + 1, kind) + payload


def pack_appends(items: Iterable[Item]) -> bytes:
    """APPEND frames for `items`, as few as the bound allows."""
    frames: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for ticket, durable, body in items:
        if parts and size + _ITEM.size + len(body) >= MAX_FRAME:
            frames.append(frame(APPEND, b"".join(parts)))
            parts, size = [], 0
        parts += (_ITEM.pack(ticket, durable, len(body)), body)
        size += _ITEM.size + len(body)
    if parts:
        frames.append(frame(APPEND, b"".join(parts)))
    return b"".join(frames)


def unpack_appends(payload: bytes) -> list[Item]:
    """The items of an APPEND payload. Raises FrameError."""
    items: list[Item] = []
    offset = 0
    while offset < len(payload):
        if offset + _ITEM.size > len(payload):
            raise FrameError("an item is cut short")
        ticket, durable, length = _ITEM.unpack_from(payload, offset)
        offset += _ITEM.size
        if durable > 1 or offset + length > len(payload):
            raise FrameError("an item is cut short")
        items.append(Item(ticket, bool(durable), payload[offset : offset + length]))
        offset += length
    return items


def pack_answers(answers: Iterable[Answer]) -> bytes:
    """ACK frames for `answers`."""
    packed = b"".join(_ACK.pack(*answer) for answer in answers)
    step = (MAX_FRAME - 1) // _ACK.size * _ACK.size
    return b"".join(frame(ACK, packed[start : start + step]) for start in range(0, len(packed), step))


def unpack_answers(payload: bytes) -> list[Answer]:
    """The answers of an ACK payload. Raises FrameError."""
    if len(payload) % _ACK.size:
        raise FrameError("an answer is cut short")
    try:
        return [Answer(ticket, Verdict(verdict), seq) for ticket, verdict, seq in _ACK.iter_unpack(payload)]
    except ValueError:
        raise FrameError("unknown verdict") from None
