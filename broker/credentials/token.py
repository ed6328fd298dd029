"""`oauth2`, `github-app`, `google`, `azure`: a short-lived token that the vault obtained, as bearer or in a header.

How it was obtained is broker/exchanges/; here there is nothing but the token.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.credentials.base import Injection, Outgoing
from broker.credentials.bearer import apply_bearer
from broker.credentials.header import apply_header
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_token(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """As the slot says. Raises KindFault."""
    kind = apply_header if definition.slot.where == "header" else apply_bearer
    return kind(definition, parts, request)
