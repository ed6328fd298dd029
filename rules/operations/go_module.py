"""Go module proxy requests (https://go.dev/ref/mod#goproxy-protocol), whose module paths hold slashes.

    {module}/@v/list   {module}/@v/{version}.info|.mod|.zip   {module}/@latest
    sumdb/{database}/supported|latest|lookup/{module}@{version}|tile/...       (params: sumdb, a list of databases)

Arguments: `module` (decoded: `!x` is `X`), and `version` where one is named. With `sumdb` in the parameters only the
second form fits, with `database: true` the same without `sumdb/{database}`, as the database itself serves it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts

PARAMS = frozenset({"sumdb", "database"})

# Module paths: lower-case letters, digits and a few marks; an upper-case letter is written `!` and its lower case.
_ELEMENT = re.compile(r"(?:[a-z0-9._~-]|![a-z]){1,128}\Z")
_VERSION = re.compile(r"v[0-9](?:[a-z0-9.+-]|![a-z]){0,127}\Z")
# What the proxy resolves to a version: a branch, a tag, a commit; the same characters and no slash.
_QUERY = re.compile(r"(?:[a-z0-9._~+-]|![a-z]){1,128}\Z")
_SUFFIX = re.compile(r"(.+)\.(info|mod|zip)\Z")
_TILE = re.compile(r"x?[0-9]{3}(?:\.p)?\Z")
_PARTIAL = re.compile(r"[0-9]{1,3}\Z")


def head(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, str] | None:
    """Return `module` and `version` of a module or checksum request, {} where it names none, None if it is neither."""
    if facts.path.encoded_slash:
        return None
    segments = facts.path.segments
    if params.get("database"):
        return _database(segments)
    if "sumdb" in params:
        if len(segments) < 3 or segments[0] != "sumdb" or segments[1] not in params["sumdb"]:
            return None
        return _database(segments[2:])
    return _module(segments)


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed."""
    if not params.keys() <= PARAMS:
        raise ValueError("go_module knows the parameters sumdb and database")
    names = params.get("sumdb", ["x"])
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("sumdb is a list of names")
    if params.get("database", True) is not True or len(params) > 1:
        raise ValueError("either sumdb or database: true")


def _module(segments: tuple[str, ...]) -> dict[str, str] | None:
    if segments[-1] == "@latest":
        path, version = segments[:-1], None
    elif len(segments) > 2 and segments[-2] == "@v":
        path = segments[:-2]
        if segments[-1] == "list":
            version = None
        else:
            match = _SUFFIX.match(segments[-1])
            if match is None:
                return None
            kind = _VERSION if match[2] != "info" else _QUERY
            version = _decoded(match[1], kind)
            if version is None:
                return None
    else:
        return None
    return _named(path, version)


def _database(segments: tuple[str, ...]) -> dict[str, str] | None:
    match segments:
        case ("supported",) | ("latest",):
            return {}
        case ("lookup", *rest) if rest:
            last, at, version = rest[-1].rpartition("@")
            read = _decoded(version, _VERSION)
            return _named((*rest[:-1], last), read) if at and read is not None else None
        case ("tile", height, level, *rest) if rest and _PARTIAL.match(height):
            if not (level == "data" or _PARTIAL.match(level)) or len(rest) > 8:
                return None
            # A partial tile is `x001/234.p/17`; every other part has three digits.
            last = rest[-1]
            whole = rest[:-1] if len(rest) > 1 and rest[-2].endswith(".p") and _PARTIAL.match(last) else rest
            return {} if all(_TILE.match(part) for part in whole) else None
        case _:
            return None


def _named(path: tuple[str, ...], version: str | None) -> dict[str, str] | None:
    elements = [_decoded(element, _ELEMENT) for element in path]
    # The first element is a host name (or `golang.org`-like); one element alone is `std`-like and no module here.
    if not elements or "." not in path[0] or any(element is None for element in elements):
        return None
    module = "/".join(element for element in elements if element is not None)
    return {"module": module} if version is None else {"module": module, "version": version}


def _decoded(text: str, shape: re.Pattern[str]) -> str | None:
    """`text` with `!x` as `X`, or None where it does not fit `shape`."""
    if not shape.match(text) or text.startswith(".") or text.endswith("."):
        return None
    return re.sub(r"!([a-z])", lambda match: match[1].upper(), text)
