"""Bodies of git pushes for tests, and the operations that recognise them.

push((ZERO, NEW, "refs/heads/x"), pack=pack(20_000_000))
"""

from __future__ import annotations

import hashlib

from rules.catalogue import builtin_services, resolve_service
from rules.policy import Operation

ZERO, OLD, NEW = "0" * 40, "a" * 40, "b" * 40
BOUND = 65536
"""Bytes of a push that are judged (rules/services/git.yaml)."""
TYPE = "application/x-git-receive-pack-request"
CAPS = " report-status side-band-64k agent=git/2.39.5"
Command = tuple[str, str, str]

GOOD: Command = (ZERO, NEW, "refs/heads/agent/x")
BAD: Command = (OLD, NEW, "refs/heads/main")


def packet(text: str | bytes) -> bytes:
    """One pkt-line."""
    raw = text.encode() if isinstance(text, str) else text
    return b"%04x" % (len(raw) + 4) + raw


def push(*commands: Command, caps: str = CAPS, pack: bytes = b"PACK\x00\x00\x00\x02") -> bytes:
    """The body of a push: commands, flush, pack."""
    lines = [" ".join(command) for command in commands]
    lines[0] += "\x00" + caps
    return b"".join(map(packet, lines)) + b"0000" + pack


def pack(size: int) -> bytes:
    """`size` bytes that begin like a pack and do not repeat themselves early."""
    block = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(2048))
    return (b"PACK\x00\x00\x00\x02" + block * (size // len(block) + 1))[:size]


def push_operations(base: str) -> tuple[Operation, ...]:
    """git.push of a service `like: git` at `base`."""
    return resolve_service(builtin_services(), "forge", "git", base).select("git.push")
