"""`query`: the secret as one query parameter. Percent-encoded; what is scrubbed is both forms."""

from __future__ import annotations

from urllib.parse import quote_from_bytes

from broker.credentials.base import Headers, Injection, managed_headers, managed_query
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_query(definition: CredentialDef, secret: Secret, target: str, headers: Headers) -> Injection:
    """The secret under the slot's name, once; the client's own parameter of that name is gone."""
    encoded = quote_from_bytes(secret.reveal(), safe="")
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_query=((definition.slot.name, encoded),),
        forms=tuple(dict.fromkeys((secret.reveal(), encoded.encode("ascii")))),
    )
