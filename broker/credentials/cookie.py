"""`cookie`: the secret as a cookie (RFC 6265 section 4.2.1). No cookie of the client goes along."""

from __future__ import annotations

import re
from collections.abc import Mapping

from broker.credentials.base import Injection, KindFault, Outgoing, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef

_COOKIE_VALUE = re.compile(rb"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]+\Z")
"""cookie-octet: no spaces, quotes, commas, semicolons and backslashes."""


def apply_cookie(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """Each slot's cookie. Raises KindFault for a value that a cookie cannot hold: nothing is quoted or cut."""
    values = {slot.part: part(parts, slot.part) for slot in definition.slots}
    if any(not _COOKIE_VALUE.match(value) for value in values.values()):
        raise KindFault("kind-secret-form", "the secret cannot stand in a cookie")
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_cookies=tuple((slot.name, values[slot.part].decode("ascii")) for slot in definition.slots),
        forms=tuple(values.values()),
    )
