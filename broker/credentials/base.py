"""The contract of a credential kind: pure, one file each, one registry entry in __init__.py.

A kind is told the request as it would go out (`Outgoing`) and says what it wants done to it as an `Injection`;
`inject` does it, always in the same order: every auth slot that any provider knows is removed first, then ours is set
(I11). The client can neither add, override nor strip it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import quote_from_bytes, unquote_plus

from broker.errors import BrokerError
from broker.vault.secret import Secret
from rules.authority_names import AUTH_HEADERS, AUTH_QUERY
from rules.credential_kinds import VALUE
from rules.policy import CredentialDef

Headers = tuple[tuple[str, str], ...]
"""(lower-case name, value) in order."""

_VISIBLE = re.compile(rb"[\x20-\x7e]+\Z")


class KindFault(BrokerError):
    """The secret and the request do not fit this kind.

    `code`: kind-unknown, kind-part-missing, kind-secret-form, kind-request-form, kind-body-unseen.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request as it would go upstream without its credential."""

    method: str
    authority: str
    """Host and, unless it is the scheme's own, port: what stands in Host."""
    target: str
    """Origin-form path and query, as the client sent them."""
    headers: Headers = field(default=(), repr=False)
    """What goes up, the client's own auth fields still among them: a kind may read its slot."""
    sent: Headers = field(default=(), repr=False)
    """What the client sent: read, never forwarded from here."""
    body: bytes | None = field(default=None, repr=False)
    """The whole body where it was judged whole; None where there is none, or where it streams (`has_body`)."""
    has_body: bool = False
    now: float = 0.0
    """Unix time in seconds, for kinds that sign it."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCertificate:
    """What a connection proves itself with. `chain_pem`: the leaf first. Both PEM; the key unencrypted."""

    chain_pem: bytes
    key: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What a kind asks for. `forms` are all byte strings that carry a secret: the answer is scrubbed of them."""

    remove_headers: frozenset[str] = frozenset()
    set_headers: Headers = field(default=(), repr=False)
    remove_query: frozenset[str] = frozenset()
    set_query: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(name, value) with the value percent-encoded already."""
    set_cookies: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(name, value). They are the whole Cookie field: no cookie of the client goes along."""
    set_path: str | None = field(default=None, repr=False)
    """The path to send instead, percent-encoded."""
    set_body: bytes | None = field(default=None, repr=False)
    """The body to send instead: only where the whole of it was judged."""
    certificate: ClientCertificate | None = None
    forms: tuple[bytes, ...] = field(default=(), repr=False)


class Kind(Protocol):
    """One kind. `parts` are the secrets of this call by their names.

    Raises KindFault where they or the request do not fit; its text is fixed.
    """

    def __call__(self, definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection: ...


def inject(request: Outgoing, injection: Injection) -> Outgoing:
    """Return the request with the injection done: all removals first, then what is set, each exactly once."""
    fields = injection.set_headers
    if injection.set_cookies:
        fields = (*fields, ("cookie", "; ".join(f"{name}={value}" for name, value in injection.set_cookies)))
    drop = injection.remove_headers | {name for name, _ in fields}
    headers = (*(pair for pair in request.headers if pair[0] not in drop), *fields)
    body = request.body
    if injection.set_body is not None:
        if request.body is None:
            raise KindFault("kind-body-unseen", "a body that was not judged whole is not rewritten")
        body = injection.set_body
    return replace(request, target=_target(request.target, injection), headers=headers, body=body)


def _target(target: str, injection: Injection) -> str:
    path, question, query = target.partition("?")
    drop_query = {name.lower() for name in injection.remove_query} | {n.lower() for n, _ in injection.set_query}
    parts = query.split("&") if question else []
    stay = [part for part in parts if unquote_plus(part.partition("=")[0]).lower() not in drop_query]
    stay += [f"{quote_from_bytes(name.encode(), safe='')}={value}" for name, value in injection.set_query]
    if injection.set_path is not None:
        path = injection.set_path
    if stay == parts:
        return f"{path}{question}{query}"
    return f"{path}?{'&'.join(stay)}" if stay else path


def part(parts: Mapping[str, Secret], name: str = VALUE) -> bytes:
    """The bytes of one part. Raises KindFault where the credential has it not."""
    secret = parts.get(name)
    if secret is None:
        raise KindFault("kind-part-missing", f"the credential has no part {name}")
    return secret.reveal()


def managed_headers(definition: CredentialDef) -> frozenset[str]:
    """Every header that carries authority anywhere, and this definition's own."""
    own = {slot.name.lower() for slot in definition.slots if slot.where in ("bearer", "basic", "header", "signature")}
    return frozenset(name.lower() for name in AUTH_HEADERS) | own


def managed_query(definition: CredentialDef) -> frozenset[str]:
    """Every query key that carries authority anywhere, and this definition's own."""
    return frozenset(AUTH_QUERY) | {slot.name for slot in definition.slots if slot.where == "query"}


def header_text(value: bytes) -> str:
    """A header value of visible ASCII and inner spaces. Raises KindFault: nothing is ever cut or escaped (B098)."""
    if not _VISIBLE.match(value) or value != value.strip():
        raise KindFault("kind-secret-form", "the secret cannot stand in a header")
    return value.decode("ascii")
