"""Authority in a request: the client's own is refused, a placeholder stands in its slot or nowhere (RULINGS 4.2, 4.4).

Whose placeholder it is, is not asked here: the gate and the vault compare hashes. Here only form and place count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from rules.authority_names import AUTH_HEADERS, AUTH_QUERY
from rules.decision import Restrictions
from rules.facts import RequestFacts
from rules.placeholders import CORE_LENGTH, Found, find, split_basic
from rules.policy import CredentialDef, Operation


def foreign_authority(
    operations: Sequence[Operation],
    facts: RequestFacts,
    credential: CredentialDef | None,
    restrictions: Restrictions,
    found: Sequence[Found],
) -> str | None:
    """Return the reason to refuse: a placeholder beside its slot, or authority that is not the slot's placeholder."""
    if any(credential is None or not is_slot(credential, place) for place in found):
        return "placeholder-misuse"
    if isinstance(facts.body, bytes) and not restrictions.placeholders_inert and holds_placeholder(facts.body):
        return "placeholder-misuse"
    if restrictions.client_auth:
        return None
    slot_header, slot_query = _slot_names(credential)
    own_headers = {name for op in operations for name in op.auth_headers}
    own_query = {name for op in operations for name in op.auth_query}
    seen: set[str] = set()
    for name, value in facts.headers:
        if name == "sec-websocket-protocol" and _carries_key(value):
            return "client-authority"
        if name == "proxy-authorization" or not (name in AUTH_HEADERS or name in own_headers or name == slot_header):
            continue  # Proxy-Authorization is the sandbox's own token towards us; it is never forwarded
        if name in seen or name != slot_header or credential is None or not _holds_placeholder(credential, value):
            return "client-authority"
        seen.add(name)
    for name, value in facts.query.pairs:
        if name == slot_query and credential is not None:
            if name in seen or not _is_placeholder(credential, value):
                return "client-authority"
            seen.add(name)
        elif name.strip().lower() in AUTH_QUERY | own_query and not _listed(operations, name):
            return "client-authority"
    return None


_KEY_SUBPROTOCOLS = ("openai-insecure-api-key.", "base64url.bearer.authorization.k8s.io.")
"""Names of WebSocket subprotocols that browsers, which cannot set a header there, make of a key."""


def _carries_key(offered: str) -> bool:
    return any(item.strip().lower().startswith(_KEY_SUBPROTOCOLS) for item in offered.split(","))


def is_slot(credential: CredentialDef, place: Found) -> bool:
    match credential.slot.where:
        case "bearer" | "basic":
            return place.where in ("header", "basic") and place.name == "authorization"
        case "header":
            return place.where in ("header", "basic") and place.name == credential.slot.name.lower()
        case "query":
            return place.where == "query" and place.name == credential.slot.name
        case "cookie":
            return place.where == "header" and place.name == "cookie"


def _slot_names(credential: CredentialDef | None) -> tuple[str | None, str | None]:
    if credential is None:
        return None, None
    match credential.slot.where:
        case "bearer" | "basic":
            return "authorization", None
        case "header":
            return credential.slot.name.lower(), None
        case "query":
            return None, credential.slot.name
        case "cookie":
            return "cookie", None


def _listed(operations: Sequence[Operation], name: str) -> bool:
    """True if every operation lists the values of this query key: then policy chose the value, not the client."""
    return all(op.query is not None and bool(op.query.get(name)) for op in operations)


def _holds_placeholder(credential: CredentialDef, value: str) -> bool:
    """True if a slot header holds exactly one placeholder of the credential's shape, in a form that clients send."""
    value = value.strip()
    slot = credential.slot
    if slot.where == "cookie":
        name, equals, rest = value.partition("=")
        return bool(equals) and name == slot.name and _is_placeholder(credential, rest)
    if slot.where == "header":
        before, _, after = slot.template.partition("{value}")
        rendered = value.startswith(before) and value.endswith(after)
        inner = value[len(before) : len(value) - len(after)] if rendered else value
        if _is_placeholder(credential, inner) or _is_placeholder(credential, value):
            return True
        if slot.name.lower() != "authorization":
            return False
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "basic":
        pair = split_basic(value)
        if pair is None:
            return False
        user, password = pair
        in_user = _is_placeholder(credential, user) and password == ""
        return in_user or (_is_placeholder(credential, password) and not find(user))
    return _is_placeholder(credential, rest if rest else value)


def _is_placeholder(credential: CredentialDef, value: str) -> bool:
    return _shape(credential.placeholder.shape).match(value) is not None and len(find(value)) == 1


@cache
def _shape(shape: str) -> re.Pattern[str]:
    prefix, _, rest = shape.partition("{")
    count, _, suffix = rest.partition("}")
    return re.compile(rf"{re.escape(prefix)}[0-9A-Za-z]{{{int(count)}}}{re.escape(suffix)}\Z")


_ESCAPED = re.compile(r"\\u00([2-7][0-9a-fA-F])|%([2-7][0-9a-fA-F])")


LONGEST_SPELLING = 6 * CORE_LENGTH
"""Bytes of a core of which every character is written as a JSON escape: what a search in pieces must overlap."""


def holds_placeholder(data: bytes) -> bool:
    """Look for cores raw and with JSON and percent escapes of ASCII undone (B092). Callers bound `data`."""
    text = data.decode("latin-1")
    return bool(find(text) or find(_ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), text)))
