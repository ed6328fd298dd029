"""APIs that call methods by name: `/api/{family.method}`, with arguments in the query, a form or JSON (Slack).

Source: Slack Web API, "calling methods": GET and POST do the same, arguments may stand in the query and in the body.
So `GET /api/chat.postMessage?channel=...` writes and `POST /api/conversations.list` reads: the name says what is done.

`method_name` matches the head, `call` judges the arguments: one that stands in two places, repeats or has a name of
authority (`token`) is refused, multipart bodies are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations import forms, jsonrpc
from rules.operations.media import is_json
from rules.operations.strict_json import InvalidJson, load

_METHOD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}(?:\.[A-Za-z][A-Za-z0-9_]{0,63}){0,4}")


def match(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {"method": name} where the path is `under` and one listed name, else None. See `check`."""
    under = [part for part in str(params.get("under", "")).split("/") if part]
    *before, name = facts.path.segments
    return {"method": name} if before == under and name in params["methods"] else None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `methods`: exact names. `under`: the path before the name (`/api`).
    """
    methods = params.get("methods")
    if not params.keys() <= {"methods", "under"} or not isinstance(methods, list | tuple) or not methods:
        raise ValueError("a method name takes methods, a list, and under, a path")
    if not all(isinstance(name, str) and _METHOD.fullmatch(name) for name in methods):
        raise ValueError("a method is family.name")
    if not re.fullmatch(r"(?:/[A-Za-z0-9_.-]+)*", str(params.get("under", ""))):
        raise ValueError("under is a path without a slash at its end")


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    return frozenset({"method"})


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return what `arguments` binds of query and body, or None. See `check_call` for `params`."""
    if facts.query.duplicates():
        return None
    given: dict[str, Any] = dict(facts.query.pairs)
    if not all(forms.is_name(name) for name in given):
        return None
    if body:
        if facts.method in ("GET", "HEAD"):
            return None
        fields = _fields(body, facts)
        if fields is None or fields.keys() & given.keys():
            return None
        given |= fields
    plain = [forms.folded(name) for name in given if "[" not in name]
    parts = {forms.folded(name) for name in given if "[" in name}
    if len(set(plain)) != len(plain) or parts & set(plain) or forms.carries_authority(given):
        return None
    if forms.refused(params) & {*plain, *parts}:
        return None
    allowed = params.get("fields")
    if allowed is not None and not all(forms.fits(name, allowed) for name in given):
        return None
    found: dict[str, Value] = {}
    for argument, name in params.get("arguments", {}).items():
        if name in given:
            value = given[name]
            if not isinstance(value, str) or not forms.plain(value):
                return None
            found[argument] = value
    return found


def _fields(body: bytes, facts: RequestFacts) -> Mapping[str, Any] | None:
    if not is_json(facts):
        return forms.read(body, facts)
    try:
        value = load(body, depth=40, nodes=50_000)
    except InvalidJson:
        return None
    return value if isinstance(value, dict) else None


def check_call(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `arguments`: argument -> name of a field. `fields`: all that may be there; without it any but those of authority and
    those of `refuse`, which the service would read beside the field or in its place.
    """
    if not params.keys() <= {"arguments", "fields", "refuse"}:
        raise ValueError("unknown parameter of a call")
    forms.check(params)
    jsonrpc.check_paths(params.get("arguments", {}), {"method"})


def call_arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that `call` may state under `params`."""
    return frozenset(params.get("arguments", {}))
