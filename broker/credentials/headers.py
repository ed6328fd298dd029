"""`headers`: several headers, each with one part of the secret through its own template (Datadog's two keys)."""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import Injection, Outgoing, header_text, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_headers(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """Every slot's header. Raises KindFault where a part is missing: half a credential is not sent."""
    values = {slot.part: part(parts, slot.part) for slot in definition.slots}
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=tuple(
            (slot.name.lower(), slot.template.replace("{value}", header_text(values[slot.part])))
            for slot in definition.slots
        ),
        forms=tuple(values.values()),
    )
