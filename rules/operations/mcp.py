"""MCP (Model Context Protocol) over streamable HTTP: the method, and of `tools/call` the tool and its arguments.

Sources: specification 2025-06-18 and 2025-11-25, basic/transports and server/tools; 2026-07-28 for the headers
`Mcp-Method`, `Mcp-Name` and `Mcp-Param-*`, which repeat the body and must agree with it here as they must there.
`readOnlyHint` and other annotations are claims of the server and are not looked at.

Beyond JSON-RPC (rules/operations/jsonrpc.py) this refuses by not matching: arrays, which 2025-06-18 removed; unknown
keys beside a tool's name and arguments; task requests, whose results come by another method.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations import jsonrpc

_NAMED: Mapping[str, tuple[str, str]] = {
    "tools/call": ("tool", "name"),
    "prompts/get": ("prompt", "name"),
    "resources/read": ("uri", "uri"),
    "resources/subscribe": ("uri", "uri"),
    "resources/unsubscribe": ("uri", "uri"),
}
"""method -> (argument, where it is in `params`)."""
_KEYS = {"arguments", "_meta", "inputResponses", "requestState"}
"""What such a method has beside its name."""
_MAX_MIRRORED = 1000
"""Scalars of a tool call that a header may repeat."""


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return `method` and, where the method has one, `tool`, `prompt` or `uri`, or None. See `check` for `params`."""
    message = jsonrpc.read(body, facts)
    if message is None or isinstance(message.params, tuple):
        return None
    if message.method == "":
        return {} if params.get("answers") is True and not _mirrored(facts) else None
    if message.method not in params.get("methods", ()):
        return None
    given = message.params or {}
    found: dict[str, Value] = {"method": message.method}
    name = ""
    if message.method in _NAMED:
        argument, key = _NAMED[message.method]
        name = given.get(key, "")
        if not given.keys() <= {key, *_KEYS}:
            return None
        if argument == "uri":
            if jsonrpc.scalar(name) is None or not isinstance(name, str) or " " in name:
                return None
        elif not jsonrpc.is_name(name):
            return None
        found[argument] = name
    inner = given.get("arguments", {})
    if message.method == "tools/call":
        if not isinstance(inner, dict):
            return None
        found.update(jsonrpc.bound(params.get("arguments", {}), inner))
    return found if _headers_agree(facts, message.method, name, inner) else None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `methods`: those of this operation. `arguments`: argument -> path into the arguments of a tool call, for servers
    whose tools are known. `answers` true: answers to the server's own requests (sampling, elicitation, roots).
    """
    if not params.keys() <= {"methods", "arguments", "answers"}:
        raise ValueError("unknown parameter of an MCP body")
    if not isinstance(params.get("answers", False), bool):
        raise ValueError("answers is true or false")
    if params.get("methods") is None and params.get("answers") is not True:
        raise ValueError("an MCP body names its methods, or takes answers")
    jsonrpc.check_names(params.get("methods"), "a method")
    jsonrpc.check_paths(params.get("arguments", {}), {"method", "tool", "prompt", "uri"})


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    methods = params.get("methods") or ()
    named = {_NAMED[method][0] for method in methods if method in _NAMED}
    return frozenset({*({"method"} if methods else ()), *named, *params.get("arguments", {})})


# --- headers that repeat the body (2026-07-28, transports, custom headers) ---


def _mirrored(facts: RequestFacts) -> bool:
    return any(name in ("mcp-method", "mcp-name") or name.startswith("mcp-param-") for name, _ in facts.headers)


def _headers_agree(facts: RequestFacts, method: str, name: str, inner: Any) -> bool:
    if not _mirrored(facts):
        return True
    if facts.header("mcp-method") not in ((), (method,)):
        return False
    named = facts.header("mcp-name")
    if named and (len(named) > 1 or not name or _decoded(named[0]) != name):
        return False
    given = [(key, value) for key, value in facts.headers if key.startswith("mcp-param-")]
    if not given:
        return True
    if len({key for key, _ in given}) != len(given):
        return False
    # Which argument a header repeats stands in the tool's schema, which is not here: it must repeat one of them.
    stated = {text for text, _ in zip(_scalars(inner), range(_MAX_MIRRORED), strict=False)}
    return all(_decoded(value) in stated for _, value in given)


def _scalars(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, bool):
            yield "true" if item else "false"
        elif isinstance(item, int | str):
            yield str(item)


def _decoded(value: str) -> str | None:
    if not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    payload = value[9:-2]
    try:
        raw = base64.b64decode(payload, validate=True)
        return raw.decode("utf-8") if base64.b64encode(raw).decode() == payload else None
    except (binascii.Error, UnicodeDecodeError):
        return None
