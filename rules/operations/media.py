"""What a head says of its body: which type, coded or not, and so whether it may be read as JSON."""

from __future__ import annotations

from typing import Any

from rules.facts import RequestFacts
from rules.operations.strict_json import MAX_DEPTH, MAX_NODES, InvalidJson, load

_UTF8 = ("", "charset=utf-8", 'charset="utf-8"')


def media_type(value: str) -> str:
    """The media type of a Content-Type value, lower case, without parameters (RFC 9110 8.3.1)."""
    return value.partition(";")[0].strip().lower()


def is_coded(facts: RequestFacts) -> bool:
    """True for a content coding other than identity: we would read other bytes than the origin does."""
    return any(value.strip().lower() != "identity" for value in facts.header("content-encoding"))


def is_type(facts: RequestFacts, wanted: str) -> bool:
    """True for exactly one Content-Type `wanted` (charset utf-8 or none) and no content coding."""
    types = facts.header("content-type")
    if len(types) != 1 or is_coded(facts):
        return False
    kind, *parameters = (part.strip().lower() for part in types[0].split(";"))
    return kind == wanted and all(parameter in _UTF8 for parameter in parameters)


def is_json(facts: RequestFacts) -> bool:
    """`is_type` for application/json."""
    return is_type(facts, "application/json")


def json_object(
    body: bytes, facts: RequestFacts, *, depth: int = MAX_DEPTH, nodes: int = MAX_NODES
) -> dict[str, Any] | None:
    """The strict JSON object that `body` is and that the head calls JSON, within the caps; else None."""
    if not is_json(facts):
        return None
    try:
        value = load(body, depth=depth, nodes=nodes)
    except InvalidJson:
        return None
    return value if isinstance(value, dict) else None
