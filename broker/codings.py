"""Content codings undone within caps, as bytes come. What cannot be undone safely is withheld (RULINGS 3.5, 7.1).

Known: gzip (and its alias x-gzip), deflate (zlib or raw, RFC 9110 8.4.1.2 and what servers send), br, zstd; identity.
Refused: anything else, two codings on one answer, output over 100 times the input, windows over 8 MiB, a stream that
is broken, cut, or followed by other bytes, and a text whose bytes are a compressed stream that no header mentions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import brotli
import zstandard

from rules.operations.media import media_type

MAX_RATIO = 100
RATIO_GRACE = 64 * 1024
"""Output allowed before the ratio counts: a few bytes of a small document compress well and harm nobody."""
MAX_WINDOW = 8 << 20
STEP = 64 * 1024
"""Bytes asked of a decoder at once, so that a bomb is seen before it is in memory."""

_ZSTD_SLICE = 256
"""Input per call: one zstd block of 4 bytes may give 128 KiB, and this decoder takes no output bound."""


class CodingRefused(Exception):
    """The body cannot be decoded within the caps. str() is a fixed sentence."""


class Decoder(Protocol):
    """Undoes one coding. `feed` gives what can be read, at most about STEP at a time, decoding as it is asked for more;
    `finish` raises unless the stream was whole. Both raise CodingRefused."""

    def feed(self, data: bytes) -> Iterator[bytes]: ...

    def finish(self) -> None: ...


def coding_of(values: tuple[str, ...]) -> str:
    """Return the one coding that the Content-Encoding `values` name: identity, gzip, deflate, br or zstd.

    Raises CodingRefused for several (also `gzip, gzip`) and for unknown ones.
    """
    names = [part.strip().lower() for value in values for part in value.split(",")]
    names = [_ALIASES.get(name, name) for name in names if name not in ("", "identity")]
    if not names:
        return "identity"
    if len(names) > 1 or names[0] not in _DECODERS:
        raise CodingRefused("an unknown or repeated content coding")
    return names[0]


def decoder_for(coding: str, content_type: str = "") -> Decoder:
    """Return the decoder for a coding from `coding_of`. `content_type` tells texts from archives."""
    if coding == "identity":
        return _Plain(textual=is_text(content_type))
    return _Capped(_DECODERS[coding]())


def is_text(content_type: str) -> bool:
    """True where the media type promises text, so that a compressed stream there is a mislabelled one."""
    kind = media_type(content_type)
    return kind.startswith("text/") or kind.endswith(("+json", "+xml")) or kind in _TEXT_TYPES


_TEXT_TYPES = frozenset(
    {
        "application/json",
        "application/x-ndjson",
        "application/jsonl",
        "application/xml",
        "application/javascript",
        "application/graphql-response+json",
        "application/x-www-form-urlencoded",
        "application/yaml",
    }
)
_MAGIC = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd")
"""gzip and zstd. zlib and brotli have no signature that text cannot have."""


def _looks_compressed(start: bytes) -> bool:
    return any(start.startswith(magic) for magic in _MAGIC)


class _Start:
    """Looks at the first bytes of a body, whatever the split; holds at most three while they may be a signature."""

    __slots__ = ("_done", "_seen")

    def __init__(self) -> None:
        self._seen = b""
        self._done = False

    def check(self, data: bytes) -> None:
        """Raise CodingRefused once the bytes so far are a signature."""
        if self._done:
            return
        self._seen += data[: 4 - len(self._seen)]
        if _looks_compressed(self._seen):
            raise CodingRefused("a compressed stream inside a text or another coding")
        self._done = len(self._seen) >= 4


class _Plain:
    """No coding: bytes pass as they are, unless a text turns out to be compressed."""

    __slots__ = ("_start",)

    def __init__(self, *, textual: bool) -> None:
        self._start = _Start() if textual else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._start is not None:
            self._start.check(data)
        yield data

    def finish(self) -> None:
        return None


class _Engine(Protocol):
    """One library's decoder. `step` returns at most about STEP bytes and whether more waits without new input."""

    done: bool

    def step(self, data: bytes) -> tuple[bytes, bool]: ...


class _Capped:
    """An engine under the caps: ratio, wholeness, nothing behind the end, no compressed stream inside."""

    __slots__ = ("_engine", "_in", "_out", "_start")

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._in = 0
        self._out = 0
        self._start = _Start()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._in += len(data)
        more = bool(data)
        while more:
            try:
                piece, more = self._engine.step(data)
            except (zlib.error, brotli.error, zstandard.ZstdError, ValueError):
                raise CodingRefused("the body is not what its content coding says") from None
            data = b""
            self._out += len(piece)
            if self._out > MAX_RATIO * self._in + RATIO_GRACE:
                raise CodingRefused("the body expands beyond the cap")
            self._start.check(piece)
            yield piece

    def finish(self) -> None:
        if not self._engine.done and self._in:
            raise CodingRefused("the compressed body was cut short")


class _Zlib:
    """gzip (several members allowed, RFC 1952 2.2) or deflate (zlib, or raw as some servers send it)."""

    __slots__ = ("_gzip", "_input", "_object", "_used", "done")

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._object = zlib.decompressobj(31) if gzip else None
        self._input = b""
        self._used = False
        self.done = False

    def step(self, data: bytes) -> tuple[bytes, bool]:
        self._input += data
        if self._object is None:
            if len(self._input) < 2:
                return b"", False
            # RFC 1950: method 8 in the low nibble, and the two bytes are a multiple of 31.
            wrapped = self._input[0] & 15 == 8 and int.from_bytes(self._input[:2], "big") % 31 == 0
            self._object = zlib.decompressobj(15 if wrapped else -15)
        if self.done:
            if not self._input:
                return b"", False
            if not self._gzip:
                raise ValueError("bytes behind the end")
            self._object, self.done = zlib.decompressobj(31), False
        piece = self._object.decompress(self._input, STEP)
        self._input = self._object.unconsumed_tail
        if self._object.eof:
            self._input = self._object.unused_data
            self.done = True
            return piece, bool(self._input)
        return piece, bool(self._input) or len(piece) >= STEP


class _Brotli:
    """br, with a window of at most 8 MiB: the first bits name it (RFC 7932 9.1)."""

    __slots__ = ("_object", "_started", "done")

    def __init__(self) -> None:
        self._object = brotli.Decompressor()
        self._started = False
        self.done = False

    def step(self, data: bytes) -> tuple[bytes, bool]:
        if data and not self._started:
            self._started = True
            # 1111 is 2^24; x0001001 and its kin are the large-window extension, which this decoder refuses itself.
            if data[0] & 15 == 15:
                raise ValueError("the window is too large")
        if self.done and data:
            raise ValueError("bytes behind the end")
        piece = self._object.process(data, output_buffer_limit=STEP)
        self.done = self._object.is_finished()
        return piece, not self.done and not self._object.can_accept_more_data()


class _Zstd:
    """zstd frames (RFC 8878), one behind the other, each with a window of at most 8 MiB."""

    __slots__ = ("_context", "_input", "_object", "done")

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._object = self._context.decompressobj()
        self._input = b""
        self.done = False

    def step(self, data: bytes) -> tuple[bytes, bool]:
        self._input += data
        if not self._input:
            return b"", False
        if self.done:
            self._object, self.done = self._context.decompressobj(), False
        taken, self._input = self._input[:_ZSTD_SLICE], self._input[_ZSTD_SLICE:]
        piece = self._object.decompress(taken)
        if self._object.eof:
            self._input = self._object.unused_data + self._input
            self.done = True
        return piece, bool(self._input)


_ALIASES = {"x-gzip": "gzip"}
_DECODERS: Mapping[str, Callable[[], _Engine]] = {
    "gzip": lambda: _Zlib(gzip=True),
    "deflate": lambda: _Zlib(gzip=False),
    "br": _Brotli,
    "zstd": _Zstd,
}
