"""The forms in which a secret must not reach a sandbox, written down without our scrubber's help (docs/limits.md)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator

WINDOW = 12
"""A run of that many bytes of a secret is a hit (RULINGS 7.1)."""


def forms(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """(what it is, its bytes) for every promised form: raw, base64 at any alignment, percent, hex, JSON."""
    yield "raw", secret
    for start in range(3):
        # What stands before and after is unknown: only the characters that depend on the secret alone are looked for.
        encoded = base64.b64encode(b"\0" * start + secret)
        inner = encoded[(start * 8 + 5) // 6 : len(encoded) - 4]
        yield f"base64 at {start}", inner
        yield f"base64url at {start}", inner.translate(bytes.maketrans(b"+/", b"-_"))
    yield "percent", b"".join(b"%%%02x" % byte for byte in secret)
    yield "percent, capitals", b"".join(b"%%%02X" % byte for byte in secret)
    yield "hex", secret.hex().encode()
    yield "hex, capitals", secret.hex().upper().encode()
    yield "json", b"".join(b"\\u%04x" % byte for byte in secret)
    yield "json, capitals", b"".join(b"\\u%04X" % byte for byte in secret)
    yield "json string", json.dumps(secret.decode()).encode()[1:-1]


def found(secret: bytes, delivered: bytes) -> list[str]:
    """The names of the forms of `secret`, or of a run of WINDOW bytes of it, that stand in `delivered`."""
    hits = [name for name, form in forms(secret) if form in delivered]
    runs = (secret[at : at + WINDOW] for at in range(len(secret) - WINDOW + 1))
    hits += ["a run of it" for run in runs if re.search(re.escape(run), delivered)][:1]
    return hits
