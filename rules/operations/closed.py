"""Closed schemas as small composable checks: a value fits only if every key and every type is named.

A check is a function from a parsed JSON value to bool. There is no "any" and no "additional": what a schema
does not name is refused, so a feature that a vendor adds tomorrow is denied until someone has read about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]


def text(value: Any) -> bool:
    """Any string."""
    return isinstance(value, str)


def label(value: Any) -> bool:
    """A short printable string without line breaks: names, ids, tags."""
    return isinstance(value, str) and len(value) <= 512 and value.isprintable()


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def boolean(value: Any) -> bool:
    return isinstance(value, bool)


def null(value: Any) -> bool:
    return value is None


def one_of(*allowed: str) -> Check:
    """Exactly one of these strings."""
    return lambda value: isinstance(value, str) and value in allowed


def exactly(wanted: bool) -> Check:
    """This very boolean (1 is not True)."""
    return lambda value: value is wanted


def optional(check: Check) -> Check:
    """`check`, or null."""
    return lambda value: value is None or check(value)


def either(*checks: Check) -> Check:
    """At least one of `checks`."""
    return lambda value: any(check(value) for check in checks)


def array(check: Check, *, most: int = 100_000) -> Check:
    """A list of at most `most` values that all pass `check`."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(check(item) for item in value)


def mapping(check: Check, *, most: int = 64) -> Check:
    """An object with free label keys whose values all pass `check`."""
    return lambda value: (
        isinstance(value, dict)
        and len(value) <= most
        and all(label(key) and check(item) for key, item in value.items())
    )


def record(required: Mapping[str, Check], other: Mapping[str, Check] | None = None) -> Check:
    """An object with every key of `required`, any of `other`, and nothing else."""
    known = {**(other or {}), **required}

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and required.keys() <= value.keys()
            and value.keys() <= known.keys()
            and all(known[key](item) for key, item in value.items())
        )

    return check


def tagged(key: str, variants: Mapping[str, Check]) -> Check:
    """An object whose string `key` picks the check; the variant names `key` itself as any string."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        tag = value.get(key)
        return isinstance(tag, str) and tag in variants and variants[tag](value)

    return check


def json_schema(value: Any) -> bool:
    """A JSON Schema as data: an object in which every reference stays inside it (nobody fetches another's URL)."""
    return isinstance(value, dict) and _local(value)


def plain(value: Any) -> bool:
    """Any JSON object, as opaque data (the arguments of a tool call)."""
    return isinstance(value, dict)


def data_url(*prefixes: str) -> Check:
    """A `data:` URL in base64 with one of the media type `prefixes`: inline, so the vendor fetches nothing."""

    def check(value: Any) -> bool:
        if not isinstance(value, str) or not value.startswith("data:"):
            return False
        head, comma, _ = value[:200].partition(",")
        return comma == "," and head.endswith(";base64") and head[5:].startswith(prefixes)

    return check


def _local(value: Any) -> bool:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(item, str) and not item.startswith("#"):
                return False
            if not _local(item):
                return False
        return True
    return all(_local(item) for item in value) if isinstance(value, list) else True
