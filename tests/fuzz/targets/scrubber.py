"""The scrubber: no secret in a promised form survives, in any surroundings and any cut; nothing else changes length.

A byte from 0x80 on stands for one of the promised forms of two secrets, every other byte for itself.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from itertools import pairwise

from broker.scrub import Scrubber
from tests.support.scrubbing import FORMS, PATTERNS, shows

WORDS = (
    b"\\u00", b"%", b"%25", b"\\", b"\\\\", b"\\u0025", b'"', b"data: ", b"\n\n", b"=", b"Basic ", b"\x80", b"\x88",
    b"\x99", b"4mVZ", b"746f6b", b"\\u0074", b"%74", b"tok-4mVZx81L", b"sk_live_",
)  # fmt: skip


MAX_BYTES = 48


def check(data: bytes) -> bool:
    """See above."""
    text = b"".join(FORMS[(byte - 0x80) % len(FORMS)][1] if byte >= 0x80 else bytes((byte,)) for byte in data)
    whole = _scrub([text])
    assert len(whole) == len(text)
    assert not shows(whole), "a secret shows"
    if whole == text:
        return False
    chance = random.Random(zlib.crc32(data))
    places = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(1, 8)))
    out = _scrub([text[start:end] for start, end in pairwise([0, *places, len(text)])])
    assert len(out) == len(text)
    assert not shows(out), "a secret shows when the stream is cut"
    return True


def _scrub(pieces: Iterable[bytes]) -> bytes:
    scrubber = Scrubber(PATTERNS)
    out = b"".join(scrubber.feed(piece) for piece in pieces)
    return out + scrubber.finish()
