"""`mtls`: a client certificate (RFC 8446 section 4.4.2). Nothing of it is on the request: the connection proves it.

The connection belongs to this credential alone: its pool key holds the certificate's digest.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import (
    ClientCertificate,
    Injection,
    KindFault,
    Outgoing,
    managed_headers,
    managed_query,
    part,
)
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_mtls(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The certificate's chain and its key. Raises KindFault where a part is no PEM of its kind."""
    chain, key = part(parts, "certificate"), part(parts, "key")
    if b"-----BEGIN CERTIFICATE-----" not in chain or b"PRIVATE KEY" in chain:
        raise KindFault("kind-secret-form", "the certificate is not a chain in PEM")
    if b"PRIVATE KEY-----" not in key or b"ENCRYPTED" in key:
        raise KindFault("kind-secret-form", "the key is not an unencrypted private key in PEM")
    body = b"".join(line.strip() for line in key.splitlines() if line and not line.startswith(b"-----"))
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        certificate=ClientCertificate(chain_pem=chain, key=parts["key"]),
        forms=(key, body),
    )
