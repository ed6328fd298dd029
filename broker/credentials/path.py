"""`path`: the secret in one segment of the path (Telegram: `/bot{value}/method`).

Policy judged the path with the placeholder in it, and the log holds that one alone: what is put in its place is known
here and upstream only. Where no placeholder stands nothing is guessed: there is no place for the secret then.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote_from_bytes

from broker.credentials.base import Injection, KindFault, Outgoing, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef
from rules.slots import is_placeholder, path_value


def apply_path(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The path with the secret where the placeholder stood. Raises KindFault where none stands in its place."""
    value = part(parts)
    # `:` stands plainly in a segment (RFC 3986 section 3.3), and providers compare what they see.
    encoded = quote_from_bytes(value, safe=":")
    for slot in definition.slots:
        found = path_value(slot.template, request.path)
        if found is not None and is_placeholder(definition, slot.part, found) and request.path.count(found) == 1:
            return Injection(
                remove_headers=managed_headers(definition),
                remove_query=managed_query(definition),
                set_path=request.path.replace(found, encoded),
                forms=tuple(dict.fromkeys((value, encoded.encode("ascii")))),
            )
    raise KindFault("kind-request-form", "no placeholder stands where the path takes the secret")
