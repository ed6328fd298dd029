"""The contract of a source: what follows `name:` in a reference goes in, a value or a SourceError comes out.

Two sorts. A `Source` is at hand (memory, a file): read at each use, never cached, so that a change counts at once.
A `RemoteSource` is asked over the network or by starting a program: it gives a `Document`, the smallest thing that it
can be asked for (a secret with all its fields), and broker/vault/material.py keeps that for a while.

Nothing that is raised here holds a value, or text that a peer or a program wrote: a fixed code, what the operator
typed, and what to do about it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from broker.errors import BrokerError
from broker.vault.secret import Secret
from rules.secret_references import WHOLE

MAX_DEPTH = 8

_VERSION = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")


class SourceError(BrokerError):
    """The value cannot be had now.

    `code`: source-unknown (no such source), source-missing (it has none of that name), source-refused (it, or we, do
    not permit that), source-unreadable (what it gave is no secret), source-unreachable (it does not answer).
    """

    def __init__(self, code: str, detail: str = "", remedy: str = "", *, transient: bool = False) -> None:
        super().__init__(code, detail, remedy)
        self.transient = transient


def unreachable(detail: str, remedy: str = "") -> SourceError:
    """Nobody answered, or only that it cannot answer now: a copy that we still have may serve (`stale:`)."""
    return SourceError("source-unreachable", detail, remedy, transient=True)


class Source(Protocol):
    """One kind of reference whose values are at hand. `fetch` may block; the vault then calls it off the loop."""

    blocks: bool
    """False only where `fetch` touches nothing but memory."""

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        """The secret that `name` (what follows `scheme:`) refers to, read now. Raises SourceError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a source gave. Field `WHOLE` is the value of one that has no names inside."""

    fields: Mapping[str, bytes] = field(repr=False)
    version: str = ""
    """The source's own version of it, or "" where it has none: then a keyed digest of the value tells changes apart."""
    lasts: float | None = None
    """Seconds until it is void by the source's own word; None: until somebody changes it there."""
    lease: str = field(default="", repr=False)
    """What it is renewed and revoked by, where the source made it for us alone."""

    def value(self, name: str, what: str) -> bytes:
        """The field `name`. Raises SourceError naming `what`, the reference as the operator typed it."""
        found = self.fields.get(name)
        if found is not None:
            return found
        if name == WHOLE:
            raise SourceError("source-missing", f"{what} has several fields", "name one of them after #")
        raise SourceError("source-missing", f"{what} has no field {name}", "name a field that is there, after #")


class RemoteSource(Protocol):
    """One configured source that is asked over the network or through a program. One instance per entry of sources:."""

    own: bool
    """What it gives is made for one sandbox (a lease), and ends with it."""

    async def read(self, document: str, before: Document | None) -> Document:
        """Ask for `document` now. `before` is the one that we have: a lease may be renewed instead of made anew.

        Raises SourceError, and TimeoutError where it took too long.
        """
        ...

    async def revoke(self, document: Document) -> None:
        """Give a lease back. Raises SourceError. Does nothing for what has no lease."""
        ...

    async def close(self) -> None:
        """Give back what the source itself was given (a login)."""
        ...


class Unleased:
    """What sources have in common that give nothing back: no lease, no login of their own."""

    own = False

    async def revoke(self, document: Document) -> None:
        return None

    async def close(self) -> None:
        return None


def plain_version(text: object) -> str:
    """A source's version as it may stand in the log: short, plain words; anything else is none."""
    said = str(text) if isinstance(text, str | int) and not isinstance(text, bool) else ""
    return said if _VERSION.match(said) else ""


def from_base64(text: object) -> bytes | None:
    """What `text` encodes, or None where it is no text in base64."""
    if not isinstance(text, str):
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def json_object(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in `raw`, or None. Nothing is raised: the decoder's own error carries the whole text."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def fields_of(raw: bytes) -> dict[str, bytes]:
    """A value as it came, and, where it is a JSON object, what its fields hold by their names (`a.b` for nested)."""
    found = {WHOLE: raw}
    inside = json_object(raw)
    if inside is not None:
        found |= flat(inside)
    return found


def flat(inside: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, bytes]:
    """The texts and numbers of nested mappings, by dotted names. Lists hold no names and are left out."""
    found: dict[str, bytes] = {}
    for name, value in inside.items():
        if isinstance(value, str):
            found[prefix + name] = value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int) and not isinstance(value, bool):
            found[prefix + name] = str(value).encode()
        elif isinstance(value, dict) and depth < MAX_DEPTH:
            found |= flat(value, f"{prefix}{name}.", depth + 1)
    return found
