"""`body`: the secret in one field of a form or of JSON, in a body that was read and judged whole.

Only the placeholder's own bytes are replaced; every other byte is what was judged. A body that streams is never
rewritten: the operation must judge it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import quote_from_bytes

from broker.credentials.base import Injection, KindFault, Outgoing, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.placeholders import pattern
from rules.policy import CredentialDef, Slot


def apply_body(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The body with each slot's placeholder replaced. Raises KindFault where one is missing or stands twice."""
    if request.body is None:
        raise KindFault("kind-body-unseen", "the body was not judged whole, so nothing is put into it")
    body, forms = request.body, []
    for slot in definition.slots:
        value = part(parts, slot.part)
        written = _written(slot, value)
        forms += [value, written]
        body = _replaced(definition, slot, body, written)
    return Injection(
        remove_headers=managed_headers(definition) | {"content-md5", "digest", "content-digest", "repr-digest"},
        remove_query=managed_query(definition),
        set_body=body,
        forms=tuple(dict.fromkeys(forms)),
    )


def _replaced(definition: CredentialDef, slot: Slot, body: bytes, written: bytes) -> bytes:
    spec = definition.placeholder_of(slot.part)
    found = [] if spec is None else [match[0] for match in pattern(spec.shape).finditer(body.decode("latin-1"))]
    if len(found) != 1:
        raise KindFault("kind-request-form", "the body does not hold the placeholder exactly once")
    return body.replace(found[0].encode("latin-1"), written)


def _written(slot: Slot, value: bytes) -> bytes:
    """The secret as the body's format spells it: an opening quote is not ours, the client wrote it."""
    if slot.name.startswith("form:"):
        return quote_from_bytes(value, safe="").encode("ascii")
    try:
        return json.dumps(value.decode("utf-8"))[1:-1].encode("ascii")
    except UnicodeDecodeError:
        raise KindFault("kind-secret-form", "the secret is no text, which JSON needs") from None
