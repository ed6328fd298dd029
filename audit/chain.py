"""How records are linked: sequence, hash of the line before, and the RFC 6962 tree over all lines.

Rules: sequence numbers of a node start at 1 and have no gaps. `prev` is the SHA-256 of the raw line before,
without its newline; of the first record it is GENESIS. Leaf number seq-1 of the tree is that same raw line.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from audit.events import EVENTS
from audit.records import canonical

GENESIS: Final = "0" * 64
VERSION: Final = 1
"""The record format; a reader that does not know it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last record: its sequence number (0: none yet) and the SHA-256 of its raw line in hex."""

    sequence: int = 0
    hash: str = GENESIS

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}"


def line_hash(line: bytes) -> str:
    """SHA-256 in hex of a raw line without its newline."""
    return hashlib.sha256(line).hexdigest()


def link(
    head: Head, *, node: str, process: str, name: str, fields: Mapping[str, object], now_ns: int
) -> tuple[bytes, Head]:
    """Return the raw line (no newline) that follows `head`, and the new head. `name` is a key of EVENTS."""
    sequence = head.sequence + 1
    line = canonical(
        {
            **fields,
            "at": timestamp(now_ns),
            "code": EVENTS[name].code,
            "event": name,
            "node": node,
            "prev": head.hash,
            "process": process,
            "seq": sequence,
            "v": VERSION,
        }
    )
    return line, Head(sequence=sequence, hash=line_hash(line))


def timestamp(now_ns: int) -> str:
    """RFC 3339 in UTC with nanoseconds: `2026-01-02T03:04:05.000000006Z`."""
    seconds, rest = divmod(now_ns, 1_000_000_000)
    return f"{_second(seconds)}.{rest:09d}Z"


@functools.lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


@dataclass(slots=True)
class Tree:
    """An RFC 6962 Merkle tree that keeps only the roots of its full subtrees, largest first (§2.1)."""

    size: int = 0
    roots: list[bytes] = field(default_factory=list)

    def add(self, line: bytes) -> None:
        """Append one leaf."""
        node = hashlib.sha256(b"\x00" + line).digest()
        size = self.size
        while size & 1:
            node = hashlib.sha256(b"\x01" + self.roots.pop() + node).digest()
            size >>= 1
        self.roots.append(node)
        self.size += 1

    def root(self) -> bytes:
        """The Merkle tree hash of all leaves so far; SHA-256 of nothing when empty."""
        if not self.roots:
            return hashlib.sha256(b"").digest()
        node = self.roots[-1]
        for left in reversed(self.roots[:-1]):
            node = hashlib.sha256(b"\x01" + left + node).digest()
        return node
