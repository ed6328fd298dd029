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

_NAME = "authorization"


def apply_basic(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The pair in Authorization. Raises KindFault where no user name is known."""
    rendered, forms = basic_pair(definition, part(parts), request)
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((_NAME, rendered),),
        forms=forms,
    )


def basic_pair(definition: CredentialDef, secret: bytes, request: Outgoing) -> tuple[str, tuple[bytes, ...]]:
    """(the field's value, the forms that carry the secret). Raises KindFault where no user name is known."""
    header_text(secret)
    sent = [split for key, value in request.headers if key == _NAME and (split := split_basic(value)) is not None]
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
    return f"Basic {encoded.decode('ascii')}", (secret, pair, encoded)
