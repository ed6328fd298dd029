"""Down to streams: folders, archives, compressed files and git's objects, one within the other, each bounded.

Every stream is searched as it lies there, and what is packed in it is searched as well: gzip, bzip2, xz, Zstandard,
zlib (git's loose objects), tar (image layers in what `docker save` writes), zip (wheels, jars), git packs. Links are
not followed; their targets are searched as text, as names are. What cannot be read to its end is told: a scan that
says nothing was found has seen everything.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol, cast

import zstandard

from exeat.scan.packs import MAGIC, objects
from exeat.scan.search import Finding, Search

DEPTH: Final = 6
"""Containers within containers."""
MAX_OUTPUT: Final = 16 << 30
"""Bytes that one packed thing may give, all in all: a bomb ends there, and is told."""
SPOOL: Final = 16 << 20
"""Bytes of a zip within something else that stay in memory; more go to a temporary file."""
_PIECE = 256 * 1024
_HEAD = 512
_XZ_MEMORY = 256 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_WINDOW = 128 << 20
_ZSTD_PIECE = 512
"""Four bytes can give 128 KiB (RFC 8878 section 3.1.1.2), and what one piece gives comes at once."""
_DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
_DAMAGED = (*_DAMAGE, zstandard.ZstdError, RuntimeError, NotImplementedError)

Told = Callable[[str, str], None]
"""(place, why): something was not searched to its end."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Walk:
    """One scan over everything below some places."""

    def __init__(self, search: Search, told: Told) -> None:
        self._search = search
        self._told = told
        self._given = 0
        self.streams = 0
        self.bytes = 0

    def path(self, path: Path) -> Iterator[Finding]:
        """Everything in a file, or below a folder. Raises OSError for `path` itself only."""
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            yield from self._entry(str(path), path, found)
            return
        for folder, folders, files in os.walk(path, onerror=self._unreadable):
            folders.sort()
            for name in sorted((*files, *folders)):
                place = os.path.join(folder, name)
                yield from self._name(place, os.fsencode(name))
                try:
                    there = os.lstat(place)
                except OSError as error:
                    self._unreadable(error)
                    continue
                if not stat.S_ISDIR(there.st_mode):
                    yield from self._entry(place, Path(place), there)

    def stream(self, place: str, stream: BinaryIO) -> Iterator[Finding]:
        """Everything in one stream, such as standard input."""
        self._given = 0
        yield from self._stream(place, stream, DEPTH)

    def _entry(self, place: str, path: Path, found: os.stat_result) -> Iterator[Finding]:
        if stat.S_ISLNK(found.st_mode):
            yield from self._name(f"{place} (target of a link)", os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(found.st_mode):
            try:
                with os.fdopen(
                    os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
                ) as stream:
                    yield from self.stream(place, stream)
            except OSError as error:
                self._unreadable(error)

    def _name(self, place: str, name: bytes) -> Iterator[Finding]:
        look = self._search.stream(f"the name {place}")
        look.feed(name)
        yield from look.end()

    def _unreadable(self, error: OSError) -> None:
        self._told(str(error.filename), error.strerror or "cannot be read")

    def _stream(self, place: str, raw: _Readable, depth: int) -> Iterator[Finding]:
        self.streams += 1
        look = self._search.stream(place)
        seen = _Seen(raw, look.feed)
        opener = _opener(seen.head())
        if opener is not None and depth == 0:
            self._told(place, "packed too deep")
        elif opener is not None:
            try:
                yield from opener(self, place, seen, depth - 1)
            except _DAMAGED:
                self._told(place, "packed, and damaged or of an unknown kind: searched as it lies there")
        try:
            while seen.read(_PIECE):
                pass
        except OSError as error:
            self._told(place, error.strerror or "cannot be read to its end")
        self.bytes += seen.taken
        yield from look.end()

    def _bounded(self, read: Callable[[int], bytes]) -> _Unpacked:
        return _Unpacked(read, self)

    def spend(self, count: int) -> None:
        """Raises ValueError beyond MAX_OUTPUT."""
        self._given += count
        if self._given > MAX_OUTPUT:
            raise ValueError("too much")

    # --- kinds of packing

    def _compressed(self, place: str, read: Callable[[int], bytes], depth: int) -> Iterator[Finding]:
        yield from self._stream(f"{place} (unpacked)", self._bounded(read), depth)

    def gzip(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        return self._compressed(place, gzip.GzipFile(fileobj=seen).read, depth)

    def bzip2(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        return self._compressed(place, bz2.BZ2File(cast("BinaryIO", seen)).read, depth)

    def xz(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

        def read(size: int) -> bytes:
            while not decoder.eof:
                data = seen.read(_PIECE) if decoder.needs_input else b""
                if decoder.needs_input and not data:
                    raise EOFError
                if piece := decoder.decompress(data, size):
                    return piece
            return b""

        return self._compressed(place, read, depth)

    def zstd(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        whole = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        frame, ended, rest = whole.decompressobj(), False, b""

        def read(size: int) -> bytes:
            nonlocal frame, ended, rest
            while True:
                data = rest or seen.read(_ZSTD_PIECE)
                if ended:
                    if not data.startswith(_ZSTD):
                        return b""  # what follows the last frame is searched as it lies there
                    frame, ended = whole.decompressobj(), False
                if not data:
                    raise EOFError
                piece = frame.decompress(data)
                ended, rest = frame.eof, frame.unused_data
                if piece:
                    return piece

        return self._compressed(place, read, depth)

    def zlib(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        decoder = zlib.decompressobj()
        try:
            zlib.decompressobj().decompress(seen.head(), 1)
        except zlib.error:
            return iter(())  # text that begins with x^ or the like

        def read(size: int) -> bytes:
            while not decoder.eof:
                data = decoder.unconsumed_tail or seen.read(_PIECE)
                if not data:
                    raise EOFError
                if piece := decoder.decompress(data, size):
                    return piece
            return b""

        return self._compressed(place, read, depth)

    def tar(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        with tarfile.open(fileobj=cast("BinaryIO", seen), mode="r|") as archive:
            for member in archive:
                if member.isfile() and (content := archive.extractfile(member)) is not None:
                    inner = self._bounded(content.read)
                    yield from self._stream(f"{place}!{member.name}", inner, depth)
                    if inner.given < member.size:
                        raise EOFError

    def zip(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        with tempfile.SpooledTemporaryFile(SPOOL) as whole:  # its table of contents stands at the end
            while data := seen.read(_PIECE):
                self.spend(len(data))
                whole.write(data)
            whole.seek(0)
            with zipfile.ZipFile(cast("BinaryIO", whole)) as archive:
                for member in archive.infolist():
                    if member.is_dir():
                        continue
                    if member.flag_bits & 1:
                        self._told(f"{place}!{member.filename}", "encrypted")
                        continue
                    with archive.open(member) as content:
                        yield from self._stream(f"{place}!{member.filename}", self._bounded(content.read), depth)

    def pack(self, place: str, seen: _Seen, depth: int) -> Iterator[Finding]:
        for number, pieces in enumerate(objects(cast("BinaryIO", seen)), 1):
            look = self._search.stream(f"{place} (object {number} of the pack)")
            for piece in pieces:
                self.spend(len(piece))
                look.feed(piece)
            yield from look.end()


_Opener = Callable[[Walk, str, "_Seen", int], Iterator[Finding]]
_MAGICS: Final[tuple[tuple[bytes, _Opener], ...]] = (
    (b"\x1f\x8b\x08", Walk.gzip),
    (b"BZh", Walk.bzip2),
    (b"\xfd7zXZ\x00", Walk.xz),
    (_ZSTD, Walk.zstd),
    (b"PK\x03\x04", Walk.zip),
    (b"PK\x05\x06", Walk.zip),
    (MAGIC + b"\x00\x00\x00", Walk.pack),
)


def _opener(head: bytes) -> _Opener | None:
    for magic, opener in _MAGICS:
        if head.startswith(magic):
            return opener
    if head[257:262] == b"ustar":
        return Walk.tar
    if head[:1] == b"\x78" and len(head) > 1 and int.from_bytes(head[:2]) % 31 == 0:
        return Walk.zlib  # RFC 1950 section 2.2; ordinary text seldom begins so, and then it is no zlib after all
    return None


class _Seen(io.RawIOBase):
    """A stream whose every byte is searched as somebody reads it."""

    def __init__(self, raw: _Readable, feed: Callable[[bytes], None]) -> None:
        self._raw = raw
        self.feed = feed
        self._head = b""
        self.taken = 0

    def head(self) -> bytes:
        """The first bytes, which stay to be read."""
        while len(self._head) < _HEAD and (data := self._raw.read(_HEAD - len(self._head))):
            self._head += data
        return self._head

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            pieces = []
            while data := self.read(_PIECE):
                pieces.append(data)
            return b"".join(pieces)
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
        else:
            data = self._raw.read(size) or b""
        self.taken += len(data)
        self.feed(data)
        return data

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast("bytearray", buffer)).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


class _Unpacked:
    """What was unpacked, counted."""

    def __init__(self, read: Callable[[int], bytes], walk: Walk) -> None:
        self._read = read
        self._walk = walk
        self.given = 0

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self.given += len(data)
        self._walk.spend(len(data))
        return data
