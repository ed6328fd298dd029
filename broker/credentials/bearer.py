"""`bearer`: `Authorization: Bearer ...` (RFC 6750 §2.1)."""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import Injection, Outgoing, header_text, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_bearer(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The secret as a bearer token in the slot's header."""
    value = part(parts)
    rendered = definition.slot.template.replace("{value}", header_text(value))
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((definition.slot.name.lower(), f"Bearer {rendered}"),),
        forms=(value,),
    )
