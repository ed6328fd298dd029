"""JSON-RPC 2.0 over HTTP: one URL for everything, so that the method in the body says what is done.

Source: JSON-RPC 2.0 specification, sections 4 to 6. One strict JSON object with `jsonrpc`, `method`, `id` and `params`
and nothing else: some servers compare keys without case, and would read `Method` for `method`.

Refused by not matching: batches (section 6: an array), a null or fractional id, a method that is not printable text
in its normal form (NFC), and a method that the operation does not list.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations.media import json_object
from rules.operations.strict_json import InvalidJson, load

MAX_NAME = 256
"""Characters of a method or tool name."""
MAX_REPLIED = 64 << 10
"""Bytes of a message whose id is looked for to answer it; a larger one is answered without."""
MAX_TEXT = 512
"""Characters of one bound value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `method` is "" for an answer to a request of the server; `id` is None for a notification."""

    method: str
    id: str | int | None
    params: Mapping[str, Any] | tuple[Any, ...] | None


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {"method": ..., and what `arguments` binds}, or None. See `check` for `params`."""
    message = read(body, facts)
    if message is None or message.method == "" or not listed(message.method, params.get("methods")):
        return None
    return {"method": message.method, **bound(params.get("arguments", {}), message.params)}


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `methods`: the methods of this operation; without it every method, which a rule then binds. `arguments`: argument
    -> path into `params` (`to`, `0.to`: a number goes into a list); what is not a scalar there stays unstated.
    """
    if not params.keys() <= {"methods", "arguments"}:
        raise ValueError("unknown parameter of a JSON-RPC body")
    check_names(params.get("methods"), "a method")
    check_paths(params.get("arguments", {}), {"method"})


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    return frozenset({"method", *params.get("arguments", {})})


# --- shared with rules/operations/mcp.py ---


def read(body: bytes, facts: RequestFacts) -> Message | None:
    """Return the one message of a body, or None."""
    value = json_object(body, facts, depth=64, nodes=50_000)
    if value is None or value.get("jsonrpc") != "2.0":
        return None
    if "method" not in value:
        # Exactly one of result and error answers a request (section 5).
        answer = value.keys() - {"jsonrpc", "id"}
        if answer not in ({"result"}, {"error"}) or not _is_id(value.get("id")):
            return None
        return Message(method="", id=value["id"], params=None)
    if not value.keys() <= {"jsonrpc", "id", "method", "params"}:
        return None
    method, given = value["method"], value.get("params")
    if not is_name(method) or ("id" in value and not _is_id(value["id"])):
        return None
    if "params" in value and not isinstance(given, dict | list):
        return None
    return Message(method=method, id=value.get("id"), params=tuple(given) if isinstance(given, list) else given)


def request_id_of(body: bytes) -> str | int | None:
    """The id of the message in `body`, whatever else is wrong with it; None where none can be told."""
    try:
        value = load(body, depth=64, nodes=50_000) if len(body) <= MAX_REPLIED else None
    except InvalidJson:
        return None
    found = value.get("id") if isinstance(value, dict) else None
    return found if _is_id(found) else None


def is_name(value: Any) -> bool:
    """A short printable name without spaces around it, in its normal form: nothing else looks or compares like it."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_NAME
        and value.isprintable()
        and value == value.strip()
        and unicodedata.normalize("NFC", value) == value
        and not any(unicodedata.category(char) in ("Cf", "Co", "Cn", "Zs") for char in value)
    )


def listed(method: str, methods: Any) -> bool:
    """True if `methods` names `method`, or there is no list."""
    return methods is None or method in methods


def bound(paths: Mapping[str, str], value: Any) -> dict[str, str]:
    """argument -> the scalar at its path in `value`. What is missing or no scalar is left out.

    A key that equals a step of the path but for case makes it unsure which one a server reads: left out as well.
    """
    found: dict[str, str] = {}
    for argument, path in paths.items():
        text = scalar(_at(value, path))
        if text is not None:
            found[argument] = text
    return found


def scalar(value: Any) -> str | None:
    """Text, integer or boolean as text; None for everything else and for text that is long or not printable."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value and len(value) <= MAX_TEXT and value.isprintable():
        return value
    return None


def check_names(names: Any, what: str) -> None:
    if names is None:
        return
    if not isinstance(names, list | tuple) or not names or not all(is_name(name) for name in names):
        raise ValueError(f"{what} is a name; list at least one")


def check_paths(paths: Any, taken: set[str]) -> None:
    if not isinstance(paths, Mapping):
        raise ValueError("arguments map a name to a path")
    for argument, path in paths.items():
        if not isinstance(argument, str) or not isinstance(path, str) or not _STEPS.fullmatch(path):
            raise ValueError("arguments map a name to a path: names and numbers joined by dots")
        if argument in taken:
            raise ValueError("this argument has a meaning already")


_STEPS = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9_-]{1,64}){0,7}")


def _is_id(value: Any) -> bool:
    return (isinstance(value, str) and len(value) <= MAX_NAME) or (
        isinstance(value, int) and not isinstance(value, bool)
    )


def _at(value: Any, path: str) -> Any:
    for step in path.split("."):
        if isinstance(value, Mapping):
            if sum(key.casefold() == step.casefold() for key in value) != 1:
                return None
            value = value.get(step)
        elif isinstance(value, list | tuple) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
