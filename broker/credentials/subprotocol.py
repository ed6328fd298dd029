"""`subprotocol`: the secret in the name of an offered WebSocket subprotocol.

What programs do that cannot set a header on a WebSocket: OpenAI's `openai-insecure-api-key.KEY`, and Kubernetes'
`base64url.bearer.authorization.k8s.io.BASE64URL`. The other offered names stay. A client that offers none of ours gets
none: the server chooses one of what was offered, and the client knows only what it offered itself.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from broker.credentials.base import Injection, KindFault, Outgoing, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef
from rules.slots import is_placeholder, subprotocol_value

_TOKEN = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
_NAME = "sec-websocket-protocol"


def apply_subprotocol(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The offer with the secret where the placeholder stood. Raises KindFault where none does."""
    value = part(parts)
    slot = definition.slot
    coded = base64.urlsafe_b64encode(value).rstrip(b"=") if slot.template == "{base64url}" else value
    if not _TOKEN.match(coded):
        raise KindFault("kind-secret-form", "the secret cannot stand in the name of a subprotocol")
    offered = [sent for name, sent in request.headers if name == _NAME]
    found = subprotocol_value(slot, offered[0]) if len(offered) == 1 else None
    if found is None or not is_placeholder(definition, slot.part, found):
        raise KindFault("kind-request-form", "no offered subprotocol carries the placeholder")
    items = [item.strip() for item in offered[0].split(",")]
    names = [slot.name + coded.decode("ascii") if item.startswith(slot.name) else item for item in items]
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((_NAME, ", ".join(names)),),
        forms=tuple(dict.fromkeys((value, coded))),
    )
