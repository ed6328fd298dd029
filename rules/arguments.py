"""Arguments: what a request states, for rules to bind, people to read and records to keep.

An argument has one value, or several where one request names several things (all refs of a push, all fields of a
GraphQL document). Between processes and in permits they travel as sorted pairs, a name as often as it has values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Value = str | tuple[str, ...]
"""One value, or two and more: sorted, each once."""

Pairs = tuple[tuple[str, str], ...]

MAX_PAIRS = 100
"""Values of all arguments of one request. A request that states more is none that a rule can speak about."""
MAX_CHARACTERS = 32 << 10
"""Of all names and values together: they travel in a statement and in an attestation."""


def settled(found: Mapping[str, object]) -> dict[str, Value] | None:
    """`found` in the form of `Value`, or None: a value that is no text, an empty list, or more than the caps."""
    arguments: dict[str, Value] = {}
    for name, value in found.items():
        values = (value,) if isinstance(value, str) else value
        if not isinstance(name, str) or not isinstance(values, tuple) or not values:
            return None
        if not all(isinstance(item, str) for item in values):
            return None
        unique = sorted(set(values))
        arguments[name] = unique[0] if len(unique) == 1 else tuple(unique)
    flat = pairs(arguments)
    if len(flat) > MAX_PAIRS or sum(len(name) + len(value) for name, value in flat) > MAX_CHARACTERS:
        return None
    return arguments


def values_of(value: Value) -> tuple[str, ...]:
    """The values of one argument, at least one."""
    return (value,) if isinstance(value, str) else value


def pairs(arguments: Mapping[str, Value]) -> Pairs:
    """(name, value) for each value, sorted."""
    return tuple(sorted((name, value) for name, several in arguments.items() for value in values_of(several)))


def grouped(flat: Iterable[tuple[str, str]]) -> dict[str, Value]:
    """The inverse of `pairs`."""
    found: dict[str, list[str]] = {}
    for name, value in flat:
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else tuple(sorted(set(values))) for name, values in found.items()}


def shown(flat: Iterable[tuple[str, str]]) -> dict[str, str | list[str]]:
    """For JSON: a text, or a list where an argument has several values."""
    return {name: value if isinstance(value, str) else list(value) for name, value in grouped(flat).items()}
