"""Kinds of credential: how a secret is put on a request. One file each; KINDS is the registry.

Start reading: base.py (the contract and the order of things), then bearer.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import ClientCertificate, Headers, Injection, Kind, KindFault, Outgoing, inject
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


def apply(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """What `definition`'s kind asks for. Raises KindFault, also for a kind that does not exist."""
    kind = KINDS.get(definition.kind)
    if kind is None:
        raise KindFault("kind-unknown", definition.kind)
    return kind(definition, parts, request)


__all__ = [
    "KINDS",
    "ClientCertificate",
    "Headers",
    "Injection",
    "Kind",
    "KindFault",
    "Outgoing",
    "apply",
    "inject",
]
