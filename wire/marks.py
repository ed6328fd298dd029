"""Marks: how something is searched for secrets by a process that must not know them.

A mark is one way a secret may be written: two bytes that are shown, and a keyed digest of the whole piece. Who scans
looks for the two bytes, which costs little, and takes the digest of what stands there. The key is made for one scan.
Two of at least twelve bytes help nobody guess the rest.

The closed list of forms: raw, base64 (both alphabets, at each of the three alignments), hexadecimal (both cases),
percent-encoding of every byte or of those that need it (both cases), JSON with every byte as `\\uXXXX` (both cases) or
those that need it escaped (`/` too, or not), UTF-16 (both orders).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

SHOWN: Final = 2
"""Bytes of the secret that a mark shows."""
PIECE: Final = 48
"""Bytes of a secret that a mark covers: its last, since its first are often the same for everyone (`sk_live_`)."""
MIN_PIECE: Final = 8
LONGEST: Final = 6 * PIECE
"""Bytes that a form of a piece may take: every one written as `\\uXXXX`."""
KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`lead`: what to look for; `length`: bytes from there on; `digest`: HMAC-SHA256 of them, 16 bytes."""

    name: str
    form: str
    lead: bytes
    length: int
    digest: bytes = field(repr=False)


def marks(name: str, value: bytes, key: bytes) -> Iterator[Mark]:
    """The marks of one secret; a value of fewer than MIN_PIECE bytes has none."""
    if len(value) < MIN_PIECE:
        return
    for form, lead, whole in _forms(value[-PIECE:]):
        yield Mark(name=name, form=form, lead=whole[:lead], length=len(whole), digest=digest(key, whole))


def digest(key: bytes, piece: bytes) -> bytes:
    """What is compared."""
    return hmac.digest(key, piece, "sha256")[:16]


def _forms(piece: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(form, length of the lead, the bytes)."""
    yield "raw", SHOWN, piece
    seen = {piece}
    for alphabet, encode in (("base64", base64.b64encode), ("base64url", base64.urlsafe_b64encode)):
        for before in range(3):
            whole = encode(bytes(before) + piece)
            # Characters that also hold bits of what stands before or behind are left out.
            first, last = -(-before * 8 // 6), (before + len(piece)) * 8 // 6
            if (found := whole[first:last]) not in seen:
                seen.add(found)
                yield alphabet, SHOWN, found
    for form, write in _WRITINGS:
        found = b"".join(map(write, piece))
        if found not in seen:
            seen.add(found)
            yield form, len(b"".join(map(write, piece[:SHOWN]))), found
    # Without the last zero, and without a first one, it is the same in both orders.
    yield "utf-16", 2 * SHOWN - 1, b"\x00".join(bytes((byte,)) for byte in piece)


def _as_needed(byte: int, escape: Callable[[int], bytes], plain: bytes) -> bytes:
    return bytes((byte,)) if byte in plain else escape(byte)


_UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
_JSON = {ord('"'): b'\\"', ord("\\"): b"\\\\"}
_WRITINGS: Final[tuple[tuple[str, Callable[[int], bytes]], ...]] = (
    ("hex", lambda byte: b"%02x" % byte),
    ("hex", lambda byte: b"%02X" % byte),
    ("percent", lambda byte: b"%%%02x" % byte),
    ("percent", lambda byte: b"%%%02X" % byte),
    ("percent", lambda byte: _as_needed(byte, lambda one: b"%%%02x" % one, _UNRESERVED)),
    ("percent", lambda byte: _as_needed(byte, lambda one: b"%%%02X" % one, _UNRESERVED)),
    ("json", lambda byte: b"\\u%04x" % byte),
    ("json", lambda byte: b"\\u%04X" % byte),
    ("json", lambda byte: _JSON.get(byte, bytes((byte,)))),
    ("json", lambda byte: b"\\/" if byte == ord("/") else _JSON.get(byte, bytes((byte,)))),
)
