"""`body: {json: {field: [values] | type}}`: a hand-written operation over a flat or nested JSON object.

The object holds exactly the fields that are named (`field?` may be missing). A list gives the allowed values,
one of the words in TYPES the type, any other scalar the one value, a mapping a nested object. Every scalar
becomes an argument (`a.b` for nested ones), so a rule can bind it and an approval can show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations import closed
from rules.operations.media import json_object

MAX_TEXT = 8192
"""Characters of one string field: it is shown to people and written to records."""

TYPES: Mapping[str, closed.Check] = {
    "string": lambda value: isinstance(value, str) and len(value) <= MAX_TEXT,
    "number": closed.number,
    "integer": closed.integer,
    "boolean": closed.boolean,
}


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return the arguments of a body that has exactly the fields of `params`, or None."""
    value = json_object(body, facts, depth=16, nodes=10_000)
    found: dict[str, str] = {}
    return found if _object_fits(params, value, "", found) else None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded."""
    _check(params, 0)


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that a body of these `params` may state."""
    return frozenset(_names(params, ""))


def _names(params: Mapping[str, Any], prefix: str) -> set[str]:
    names: set[str] = set()
    for field, spec in params.items():
        path = prefix + field.removesuffix("?")
        names |= _names(spec, path + ".") if isinstance(spec, Mapping) else {path}
    return names


def _check(params: Any, depth: int) -> None:
    if not isinstance(params, Mapping) or not params:
        raise ValueError("a JSON body names at least one field")
    if depth > 8:
        raise ValueError("a JSON body is nested too deeply")
    names = set()
    for field, spec in params.items():
        if not isinstance(field, str) or not field.removesuffix("?"):
            raise ValueError("a field name is text")
        if field.removesuffix("?") in names:
            raise ValueError("a field is named twice")
        names.add(field.removesuffix("?"))
        if isinstance(spec, Mapping):
            _check(spec, depth + 1)
        elif isinstance(spec, list | tuple):
            if not spec:
                raise ValueError("an empty list of values allows nothing")
            if not all(isinstance(item, str | int | float | bool) for item in spec):
                raise ValueError("allowed values are scalars")
        elif not isinstance(spec, str | int | float | bool):
            raise ValueError("a field is a list of values, a type or one value")


def _object_fits(params: Mapping[str, Any], value: Any, prefix: str, arguments: dict[str, str]) -> bool:
    if not isinstance(value, dict):
        return False
    specs = {field.removesuffix("?"): spec for field, spec in params.items()}
    needed = {field for field in params if not field.endswith("?")}
    if not needed <= value.keys() or not value.keys() <= specs.keys():
        return False
    for field, item in value.items():
        spec = specs[field]
        if isinstance(spec, Mapping):
            if not _object_fits(spec, item, f"{prefix}{field}.", arguments):
                return False
            continue
        if not _scalar_fits(spec, item):
            return False
        arguments[prefix + field] = _spell(item)
    return True


def _scalar_fits(spec: Any, item: Any) -> bool:
    if isinstance(spec, list | tuple):
        return any(_same(allowed, item) for allowed in spec)
    if isinstance(spec, str) and spec in TYPES:
        return TYPES[spec](item)
    return _same(spec, item)


def _same(allowed: Any, item: Any) -> bool:
    # 1, 1.0 and true are equal in Python and three different things in JSON.
    return type(allowed) is type(item) and bool(allowed == item)


def _spell(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    return item if isinstance(item, str) else repr(item)
