"""Kinds of credential: how a secret is put on a request. One file each; KINDS is the registry.

Start reading: base.py (the contract and the order of things), then bearer.py.
"""

from __future__ import annotations

from broker.credentials.base import Headers, Injection, Kind, KindFault, inject
from broker.credentials.basic import apply_basic
from broker.credentials.bearer import apply_bearer
from broker.credentials.header import apply_header
from broker.credentials.query import apply_query
from broker.vault.secret import Secret
from rules.policy import CredentialDef

KINDS: dict[str, Kind] = {
    "bearer": apply_bearer,
    "basic": apply_basic,
    "header": apply_header,
    "query": apply_query,
}
"""A new kind is one file and one line here."""


def apply(definition: CredentialDef, secret: Secret, target: str, headers: Headers) -> Injection:
    """What `definition`'s kind asks for. Raises KindFault, also for a kind that does not exist."""
    kind = KINDS.get(definition.kind)
    if kind is None:
        raise KindFault("kind-unknown", definition.kind)
    return kind(definition, secret, target, headers)


__all__ = ["KINDS", "Headers", "Injection", "Kind", "KindFault", "apply", "inject"]
