"""What a head must say before a body is read as JSON."""

from __future__ import annotations

from rules.facts import RequestFacts


def is_json(facts: RequestFacts) -> bool:
    """True for exactly one Content-Type `application/json` (charset utf-8 or none) and no content coding.

    A coded body is not judged: we would read other bytes than the origin does.
    """
    types = facts.header("content-type")
    codings = facts.header("content-encoding")
    if len(types) != 1 or any(value.strip().lower() != "identity" for value in codings):
        return False
    kind, *parameters = (part.strip().lower() for part in types[0].split(";"))
    return kind == "application/json" and all(
        parameter in ("", "charset=utf-8", 'charset="utf-8"') for parameter in parameters
    )
