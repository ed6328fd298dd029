"""`header`: the secret in a header of the provider's choosing, through the slot's template (`token {value}`).

Where the provider takes it in Authorization as well (`also:`), it goes where the client's placeholder stands: GitLab's
API wants `PRIVATE-TOKEN` or a bearer token, its git a password, and a client must not be told to send two.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import Injection, Outgoing, header_text, managed_headers, managed_query, part
from broker.credentials.basic import basic_pair
from broker.vault.secret import Secret
from rules.policy import CredentialDef
from rules.slots import in_header


def apply_header(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The rendered template in the header of the slot that the client used; in the first where it used none."""
    value = part(parts)
    text = header_text(value)
    used = (spots for name, sent in request.headers if (spots := in_header(definition, name, sent)))
    slot = next((spots[0].slot for spots in used), definition.slot)
    forms: tuple[bytes, ...] = (value,)
    match slot.where:
        case "bearer":
            rendered = f"Bearer {text}"
        case "basic":
            rendered, forms = basic_pair(definition, value, request)
        case _:
            rendered = slot.template.replace("{value}", text)
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((slot.name.lower(), rendered),),
        forms=forms,
    )
