"""JSON of which a few places say what is bound: to whom mail goes, in which project an issue is opened.

    arguments: {recipient: ["personalizations[].to[].email", "personalizations[].cc[].email"]}
    required: [recipient]          arguments that have to be there
    single: [parent]               arguments that at most one of their places may state (alternatives, not a list)
    sole: [fields.project]         objects that hold the picked key and nothing else
    absent: [update]               places that must not be there: they would say the same again, elsewhere
    shapes: {parent: uuid}         a shape of rules/shapes.py for each value of an argument

The body is otherwise the service's own: whoever permits the operation permits what else it may hold. It is strict JSON;
a key that differs from a wanted one by case alone is refused, since some servers take both. Values are plain words of
ASCII: what a server could read as two addresses is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations.media import json_object
from rules.shapes import SHAPES

PARAMS = frozenset({"arguments", "required", "single", "sole", "absent", "shapes"})

_PLACE = re.compile(r"[A-Za-z_@][A-Za-z0-9_@-]{0,63}(?:\[\])?(?:\.[A-Za-z_@][A-Za-z0-9_@-]{0,63}(?:\[\])?){0,7}\Z")
_WORD = re.compile(r"[!#-+\--:=?-\[\]-~]{1,256}\Z")
"""Printable ASCII without blanks, quotes, comma, semicolon, angle brackets and backslash."""


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return the arguments that `body` states, or None where it is not such JSON."""
    value = json_object(body, facts, depth=32, nodes=100_000)
    try:
        return None if value is None else _picked(params, value)
    except _Refused:
        return None


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    return frozenset(params["arguments"])


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when a catalogue is loaded."""
    named = params.get("arguments")
    if not params.keys() <= PARAMS or not isinstance(named, Mapping) or not named:
        raise ValueError("json_pick names arguments and their places")
    for places in named.values():
        _check_places(places)
    for key in ("sole", "absent"):
        if key in params:
            _check_places(params[key])
    for key in ("required", "single"):
        listed = params.get(key, ())
        if not isinstance(listed, list | tuple) or not set(listed) <= named.keys():
            raise ValueError("required and single list arguments")
    shapes = params.get("shapes", {})
    if (
        not isinstance(shapes, Mapping)
        or not shapes.keys() <= named.keys()
        or not set(shapes.values()) <= SHAPES.keys()
    ):
        raise ValueError("shapes names a shape for an argument")


class _Refused(Exception):
    """The body says something that could be read in two ways."""


def _check_places(places: Any) -> None:
    if not isinstance(places, list | tuple) or not places:
        raise ValueError("places are a list")
    if not all(isinstance(place, str) and _PLACE.match(place) for place in places):
        raise ValueError("a place is names with dots, and [] behind what is a list")


def _picked(params: Mapping[str, Any], value: dict[str, Any]) -> dict[str, Value] | None:
    if any(True for place in params.get("absent", ()) for _ in _at(value, place.split("."))):
        return None
    for place in params.get("sole", ()):
        if any(not isinstance(found, dict) or len(found) != 1 for found in _at(value, place.split("."))):
            return None
    stated: dict[str, Value] = {}
    for name, places in params["arguments"].items():
        by_place = [tuple(_at(value, place.split("."))) for place in places]
        if name in params.get("single", ()) and sum(1 for found in by_place if found) > 1:
            return None
        words = [_word(item, params.get("shapes", {}).get(name)) for found in by_place for item in found]
        if words:
            stated[name] = tuple(words)
        elif name in params.get("required", ()):
            return None
    return stated


def _at(value: Any, steps: list[str]) -> Iterator[Any]:
    """What stands at a place; nothing where it is missing or null. Raises _Refused where the way is not as expected."""
    if not steps:
        yield value
        return
    if value is None:
        return
    if not isinstance(value, dict):
        raise _Refused
    key = steps[0].removesuffix("[]")
    if any(other != key and other.lower() == key.lower() for other in value):
        raise _Refused
    if key not in value or value[key] is None:
        return
    if not steps[0].endswith("[]"):
        yield from _at(value[key], steps[1:])
        return
    if not isinstance(value[key], list):
        raise _Refused
    for item in value[key]:
        yield from _at(item, steps[1:])


def _word(item: Any, shape: str | None) -> str:
    if not isinstance(item, str) or not _WORD.match(item) or item.count("@") > 1:
        raise _Refused
    word = item if shape is None else SHAPES[shape](item)
    if word is None:
        raise _Refused
    return word
