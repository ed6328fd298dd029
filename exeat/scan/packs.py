"""The objects in a git pack, one stream of bytes each (gitformat-pack(5)). Deltas are given as they lie there: what a
delta adds is in it in clear, so that a secret that a commit brought in is seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO

MAGIC = b"PACK"
_READ = 16 * 1024
"""Small: what an object leaves of it is kept for the next one, copied."""
_OFS_DELTA, _REF_DELTA = 6, 7


class PackDamaged(ValueError):
    """The bytes are no pack, or not a whole one."""


def objects(stream: BinaryIO) -> Iterator[Iterator[bytes]]:
    """Each object's decompressed pieces; an object must be taken to its end before the next. Raises PackDamaged."""
    source = _Bytes(stream)
    if source.take(4) != MAGIC or int.from_bytes(source.take(4)) not in (2, 3):
        raise PackDamaged("no pack of a known version")
    for _ in range(int.from_bytes(source.take(4))):
        kind = _header(source)
        if kind == _OFS_DELTA:
            while source.take(1)[0] & 0x80:
                pass
        elif kind == _REF_DELTA:
            source.take(20)
        yield _inflated(source)


def _header(source: _Bytes) -> int:
    byte = source.take(1)[0]
    kind = byte >> 4 & 7
    while byte & 0x80:
        byte = source.take(1)[0]
    return kind


def _inflated(source: _Bytes) -> Iterator[bytes]:
    inflate = zlib.decompressobj()
    data = b""
    while not inflate.eof:
        data = data or source.some()
        try:
            piece = inflate.decompress(data, _READ)
        except zlib.error:
            raise PackDamaged("an object is damaged") from None
        data = inflate.unconsumed_tail
        if piece:
            yield piece
    source.back(inflate.unused_data)


class _Bytes:
    """A stream that takes bytes back."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._held = b""

    def take(self, count: int) -> bytes:
        while len(self._held) < count:
            self._held += self._more()
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def some(self) -> bytes:
        taken, self._held = self._held or self._more(), b""
        return taken

    def back(self, data: bytes) -> None:
        self._held = data + self._held

    def _more(self) -> bytes:
        data = self._stream.read(_READ)
        if not data:
            raise PackDamaged("the pack ends too soon")
        return data
