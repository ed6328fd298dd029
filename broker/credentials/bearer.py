"""`bearer`: `Authorization: Bearer ...` (RFC 6750 §2.1)."""

from __future__ import annotations

from broker.credentials.base import Headers, Injection, header_text, managed_headers, managed_query
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_bearer(definition: CredentialDef, secret: Secret, target: str, headers: Headers) -> Injection:
    """The secret as a bearer token in the slot's header."""
    rendered = definition.slot.template.replace("{value}", header_text(secret.reveal()))
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((definition.slot.name.lower(), f"Bearer {rendered}"),),
        forms=(secret.reveal(),),
    )
