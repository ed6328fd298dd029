"""The contract of a credential kind: pure, one file each, one registry entry in __init__.py.

A kind says what it wants done to a request as an `Injection`; `inject` does it, always in the same order: every
auth slot that any provider knows is removed first, then ours is set (I11). The client can neither add, override
nor strip it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote_from_bytes, unquote_plus

from broker.errors import BrokerError
from broker.vault.secret import Secret
from rules.authority_names import AUTH_HEADERS, AUTH_QUERY
from rules.policy import CredentialDef

Headers = tuple[tuple[str, str], ...]
"""(lower-case name, value) in order."""

_VISIBLE = re.compile(rb"[\x20-\x7e]+\Z")


class KindFault(BrokerError):
    """The secret and the request do not fit this kind. `code`: kind-unknown, kind-secret-form, kind-request-form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What a kind asks for. `forms` are all byte strings that carry the secret: the answer is scrubbed of them."""

    remove_headers: frozenset[str] = frozenset()
    set_headers: Headers = field(default=(), repr=False)
    remove_query: frozenset[str] = frozenset()
    set_query: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(name, value) with the value percent-encoded already."""
    forms: tuple[bytes, ...] = field(default=(), repr=False)


class Kind(Protocol):
    """One kind: `apply(definition, secret, target, headers)`.

    `target` is the origin-form path and query as the client sent it, `headers` the request's. Raises
    KindFault where the secret or the request does not fit; its text is fixed.
    """

    def __call__(self, definition: CredentialDef, secret: Secret, target: str, headers: Headers) -> Injection: ...


def inject(target: str, headers: Headers, injection: Injection) -> tuple[str, Headers]:
    """Return (target, headers) with the injection done: all removals first, then what is set, each exactly once."""
    drop = injection.remove_headers | {name for name, _ in injection.set_headers}
    kept = tuple((name, value) for name, value in headers if name not in drop)
    path, question, query = target.partition("?")
    drop_query = {name.lower() for name in injection.remove_query} | {n.lower() for n, _ in injection.set_query}
    parts = query.split("&") if question else []
    stay = [part for part in parts if unquote_plus(part.partition("=")[0]).lower() not in drop_query]
    stay += [f"{quote_from_bytes(name.encode(), safe='')}={value}" for name, value in injection.set_query]
    if stay == parts:
        return target, kept + injection.set_headers
    return (f"{path}?{'&'.join(stay)}" if stay else path), kept + injection.set_headers


def managed_headers(definition: CredentialDef) -> frozenset[str]:
    """Every header that carries authority anywhere, and this definition's own."""
    own = frozenset() if definition.slot.where == "query" else frozenset({definition.slot.name.lower()})
    return frozenset(name.lower() for name in AUTH_HEADERS) | own


def managed_query(definition: CredentialDef) -> frozenset[str]:
    """Every query key that carries authority anywhere, and this definition's own."""
    own = frozenset({definition.slot.name}) if definition.slot.where == "query" else frozenset()
    return frozenset(AUTH_QUERY) | own


def header_text(value: bytes) -> str:
    """A header value of visible ASCII and inner spaces. Raises KindFault: nothing is ever cut or escaped (B098)."""
    if not _VISIBLE.match(value) or value != value.strip():
        raise KindFault("kind-secret-form", "the secret cannot stand in a header")
    return value.decode("ascii")
