"""`basic`: `Authorization: Basic base64(user:password)` (RFC 7617).

The secret stands where the placeholder stood: as the password, or as the user name where providers take the key
there. A fixed `username` always wins over what the client sent.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from broker.credentials.base import Injection, KindFault, Outgoing, header_text, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.placeholders import contains, split_basic
from rules.policy import CredentialDef


def apply_basic(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The pair in the slot's header. Raises KindFault where no user name is known."""
    name = definition.slot.name.lower()
    secret = part(parts)
    header_text(secret)
    sent = [split for key, value in request.headers if key == name and (split := split_basic(value)) is not None]
    user, password = sent[0] if len(sent) == 1 else (None, "")
    if definition.username is not None:
        pair = definition.username.encode() + b":" + secret
    elif user is not None and contains(user):
        pair = secret + b":" + password.encode()
    elif user is not None:
        pair = user.encode() + b":" + secret
    else:
        raise KindFault("kind-request-form", "the client sent no user name and the credential has none")
    encoded = base64.b64encode(pair)
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((name, f"Basic {encoded.decode('ascii')}"),),
        forms=(secret, pair, encoded),
    )
