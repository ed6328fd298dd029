"""Authority in a request: the client's own is refused, a placeholder stands in its slot or nowhere (RULINGS 4.2, 4.4).

Whose placeholder it is, is not asked here: the gate and the vault compare hashes. Here only form and place count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rules.authority_names import AUTH_HEADERS, AUTH_QUERY
from rules.decision import Restrictions
from rules.facts import RequestFacts
from rules.placeholders import CORE_LENGTH, Found, find
from rules.policy import CredentialDef, Operation
from rules.sigv4 import signed_keys
from rules.slots import Spot, header_slots, in_body, in_header, in_path, in_query, is_slot, names_own, query_slots


def foreign_authority(
    operations: Sequence[Operation],
    facts: RequestFacts,
    credential: CredentialDef | None,
    restrictions: Restrictions,
    found: Sequence[Found],
    *,
    signed: bool = False,
) -> str | None:
    """Return the reason to refuse: a placeholder beside its slot, or authority that is not the slot's placeholder.

    `signed`: the query is part of an address that was granted as it stands, and its names are not asked about.
    """
    if any(credential is None or not is_slot(credential, place) for place in found):
        return "placeholder-misuse"
    if isinstance(facts.body, bytes) and not restrictions.placeholders_inert and holds_placeholder(facts.body):
        spots = None if credential is None else in_body(credential, facts)
        if spots is None or holds_placeholder(_without(facts.body, spots)):
            return "placeholder-misuse"
    if restrictions.client_auth:
        return None
    if credential is not None and any(place.where == "path" for place in found) and in_path(credential, facts) is None:
        return "placeholder-misuse"
    if credential is not None and names_own(credential, facts):
        return "client-authority"
    own_headers = {name for op in operations for name in op.auth_headers}
    own_query = {name for op in operations for name in op.auth_query}
    slots = set() if credential is None else {name for name, _ in facts.headers if header_slots(credential, name)}
    keys = {} if credential is None else query_slots(credential)
    presigned = signed_keys(facts) if any(slot.where == "sigv4" for slot in keys.values()) else frozenset[str]()
    seen: set[str] = set()
    for name, value in facts.headers:
        if name == "sec-websocket-protocol":
            if not _carries_key(value) and not (name in slots and find(value)):
                continue
        elif name == "proxy-authorization" or not (name in AUTH_HEADERS or name in own_headers or name in slots):
            continue  # Proxy-Authorization is the sandbox's own token towards us; it is never forwarded
        if name in seen or name not in slots or credential is None or in_header(credential, name, value) is None:
            return "client-authority"
        seen.add(name)
    for name, value in () if signed else facts.query.pairs:
        if name in keys and credential is not None:
            if name in seen or in_query(credential, name, value) is None:
                return "client-authority"
            seen.add(name)
        elif name in presigned and name not in seen:
            seen.add(name)
        elif name.strip().lower() in AUTH_QUERY | own_query and not _listed(operations, name):
            return "client-authority"
    return None


def _without(body: bytes, spots: Sequence[Spot]) -> bytes:
    for spot in spots:
        body = body.replace(spot.text.encode(), b"")
    return body


_KEY_SUBPROTOCOLS = ("openai-insecure-api-key.", "base64url.bearer.authorization.k8s.io.")
"""Names of WebSocket subprotocols that browsers, which cannot set a header there, make of a key."""


def _carries_key(offered: str) -> bool:
    return any(item.strip().lower().startswith(_KEY_SUBPROTOCOLS) for item in offered.split(","))


def _listed(operations: Sequence[Operation], name: str) -> bool:
    """True if every operation lists the values of this query key: then policy chose the value, not the client."""
    return all(op.query is not None and bool(op.query.get(name)) for op in operations)


_ESCAPED = re.compile(r"\\u00([2-7][0-9a-fA-F])|%([2-7][0-9a-fA-F])")


LONGEST_SPELLING = 6 * CORE_LENGTH
"""Bytes of a core of which every character is written as a JSON escape: what a search in pieces must overlap."""


def holds_placeholder(data: bytes) -> bool:
    """Look for cores raw and with JSON and percent escapes of ASCII undone (B092). Callers bound `data`."""
    text = data.decode("latin-1")
    return bool(find(text) or find(_ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), text)))
