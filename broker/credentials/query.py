"""`query`: the secret as one query parameter. Percent-encoded; what is scrubbed is both forms."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote_from_bytes

from broker.credentials.base import Injection, Outgoing, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_query(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The secret under the slot's name, once; the client's own parameter of that name is gone."""
    value = part(parts)
    encoded = quote_from_bytes(value, safe="")
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_query=((definition.slot.name, encoded),),
        forms=tuple(dict.fromkeys((value, encoded.encode("ascii")))),
    )
