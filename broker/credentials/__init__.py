"""Kinds of credential: how a secret is put on a request. One file each; KINDS is the registry.

Start reading: base.py (the contract and the order of things), then bearer.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import ClientCertificate, Headers, Injection, Kind, KindFault, Outgoing, inject
from broker.credentials.basic import apply_basic
from broker.credentials.bearer import apply_bearer
from broker.credentials.body import apply_body
from broker.credentials.cookie import apply_cookie
from broker.credentials.header import apply_header
from broker.credentials.headers import apply_headers
from broker.credentials.hmac_request import apply_hmac
from broker.credentials.mtls import apply_mtls
from broker.credentials.path import apply_path
from broker.credentials.query import apply_query
from broker.credentials.sigv4 import apply_sigv4
from broker.credentials.subprotocol import apply_subprotocol
from broker.credentials.token import apply_token
from broker.credentials.totp import apply_totp
from broker.vault.secret import Secret
from rules.policy import CredentialDef

KINDS: dict[str, Kind] = {
    "bearer": apply_bearer,
    "basic": apply_basic,
    "header": apply_header,
    "query": apply_query,
    "headers": apply_headers,
    "cookie": apply_cookie,
    "path": apply_path,
    "body": apply_body,
    "subprotocol": apply_subprotocol,
    "sigv4": apply_sigv4,
    "hmac": apply_hmac,
    "totp": apply_totp,
    "mtls": apply_mtls,
    "oauth2": apply_token,
    "github-app": apply_token,
    "google": apply_token,
    "azure": apply_token,
    "aws-sts": apply_sigv4,
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
