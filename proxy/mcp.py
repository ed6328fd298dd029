"""The help host as an MCP server: `POST http://exeat.internal/mcp` (Model Context Protocol, streamable HTTP).

    message -> Reply      answered here: initialize, ping, tools/list, an error, nothing (a notification)
            -> Call       an operation is asked for: the lane runs it as `POST /operations/<name>`, then `finished`
            -> Why        `why_refused`: this sandbox's own refusals
            -> Ask        `request_access`: on record for a person, as `POST /access`

Granted operations are the tools; `why_refused` explains, `request_access` asks. No tool grants anything. No session, no
stream: every answer is one JSON document, which the protocol allows, and a GET is refused (405) as it says for servers
without a stream.

Not built on the protocol's own library: that one brings a web framework, a schema library and a second event loop
into the process that parses what sandboxes send; four methods of JSON are less than that. A test speaks to it with
the library's client. Source: Model Context Protocol, revision 2025-06-18, Base Protocol and Server Features: Tools.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rules.explicit import Offer
from rules.operations.strict_json import InvalidJson, load

VERSIONS: Final = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol revisions that read the same for what is offered here, newest first."""
MAX_RESULT: Final = 256 * 1024
"""Bytes of an answer that become a tool's result; for more there is `POST /operations/<name>`, which streams.

As JSON it can be six times as long, and is made in one go while every other sandbox waits.
"""
WHY: Final = "why_refused"
ASK: Final = "request_access"

_PARSE: Final = -32700
_REQUEST: Final = -32600
_METHOD: Final = -32601
_PARAMS: Final = -32602

Id = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer. `document` None: a notification was taken, and nothing is said (202)."""

    document: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Run the operation `name` with the JSON `input`, then answer `id` with `finished`."""

    id: Id
    name: str
    input: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Explain a refusal, or with an empty `request_id` the newest ones; then answer `id` with `told`."""

    id: Id
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask for what was refused with the JSON `input`, then answer `id` with `asked`."""

    id: Id
    input: bytes


Said = Reply | Call | Why | Ask


def message(raw: bytes, offered: Sequence[Offer], version: str) -> Said:
    """Read one JSON-RPC 2.0 message. `offered` is what the sandbox may do; `version` the MCP-Protocol-Version or "".

    Never raises. A batch is refused: revision 2025-06-18 has none.
    """
    try:
        value = load(raw, depth=40, nodes=20_000)
    except InvalidJson:
        return _error(None, _PARSE, "Not strict JSON.")
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0" or not isinstance(value.get("method"), str):
        return _error(None, _REQUEST, "One JSON-RPC 2.0 request is expected.")
    params = value.get("params", {})
    ident = value.get("id")
    if ident is None and "id" not in value:
        return Reply(document=None)
    if isinstance(ident, bool) or not isinstance(ident, str | int):
        return _error(None, _REQUEST, "An id is text or a whole number.")
    if not isinstance(params, dict):
        return _error(ident, _PARAMS, "Parameters are an object.")
    if version and version not in VERSIONS:
        return _error(ident, _REQUEST, "This protocol revision is not spoken here.", {"supported": list(VERSIONS)})
    match value["method"]:
        case "initialize":
            return _reply(ident, _welcome(params))
        case "ping":
            return _reply(ident, {})
        case "tools/list":
            return _reply(ident, {"tools": _tools(offered)})
        case "tools/call":
            return _called(ident, params, offered)
        case _:
            return _error(ident, _METHOD, "No such method.")


def finished(call: Call, status: int, content_type: str, body: bytes) -> dict[str, Any]:
    """The result of `call` from the answer of its operation: refusals and failures are errors of the tool."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        blob = {"uri": f"exeat:operations/{call.name}", "mimeType": kind, "blob": base64.b64encode(body).decode()}
        return _result(call.id, [{"type": "resource", "resource": blob}], error=status >= 400)
    if status >= 400:
        text = f"{status}: {text}"
    return _result(call.id, [{"type": "text", "text": text}], error=status >= 400)


def too_large(call: Call) -> dict[str, Any]:
    """The result of a call whose answer does not fit a tool's result."""
    text = f"The answer is over {MAX_RESULT} bytes: use POST http://exeat.internal/operations/{call.name}."
    return _result(call.id, [{"type": "text", "text": text}], error=True)


def crowded(call: Call) -> dict[str, Any]:
    """The result of a call for whose answer there is no room beside what the sandbox's other requests hold."""
    text = "Too much is held for this sandbox at the moment: fewer calls at a time, or a smaller answer."
    return _result(call.id, [{"type": "text", "text": text}], error=True)


def failed(call: Call) -> dict[str, Any]:
    """The result of a call whose answer broke off."""
    return _result(call.id, [{"type": "text", "text": "The answer broke off; see why_refused."}], error=True)


def told(why: Why, note: Any) -> dict[str, Any]:
    """The result of `why`. `note` is a JSON value, None where there is no such refusal of this sandbox."""
    if note is None:
        return _result(why.id, [{"type": "text", "text": "No refusal of this sandbox has that id."}], error=True)
    return _result(why.id, [{"type": "text", "text": json.dumps(note, indent=1)}], error=False)


def asked(ask: Ask, done: bytes | None) -> dict[str, Any]:
    """The result of `ask`: what was put on record, or None where nothing was."""
    if done is None:
        text = "Nothing was asked: give the request_id of a refusal of this sandbox, not more often than every 10 s."
        return _result(ask.id, [{"type": "text", "text": text}], error=True)
    return _result(ask.id, [{"type": "text", "text": done.decode("ascii")}], error=False)


def tool_name(offer: Offer) -> str:
    """The tool for an operation: many clients take only letters, digits, `_` and `-`, at most 64."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "_-") else "_" for char in offer.name)[:64]


# --- helpers -----------------------------------------------------------------------------------------------------


def _welcome(params: Mapping[str, Any]) -> dict[str, Any]:
    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "exeat", "title": "Exeat: operations of this sandbox", "version": "1"},
        "instructions": "Each tool is one operation that this sandbox's policy names. Credentials are added outside.",
    }


def _by_tool(offered: Sequence[Offer]) -> dict[str, Offer]:
    tools: dict[str, Offer] = {}
    for offer in offered:
        # The first of two that are written alike keeps the name; the other is still at /operations.
        tools.setdefault(tool_name(offer), offer)
    tools.pop(WHY, None)
    tools.pop(ASK, None)
    return tools


def _tools(offered: Sequence[Offer]) -> list[dict[str, Any]]:
    listed = [
        {
            "name": name,
            "description": _describe(offer),
            "inputSchema": offer.schema(),
            "annotations": {"readOnlyHint": offer.effect == "read"},
        }
        for name, offer in _by_tool(offered).items()
    ]
    why = {
        "name": WHY,
        "description": "Why was a request of this sandbox refused, and what would help. Without an id: the newest.",
        "inputSchema": {
            "type": "object",
            "properties": {"request_id": {"type": "string"}},
            "required": [],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True},
    }
    ask = {
        "name": ASK,
        "description": "Ask a person for what a request of this sandbox was refused. Grants nothing by itself.",
        "inputSchema": {
            "type": "object",
            "properties": {"request_id": {"type": "string"}},
            "required": ["request_id"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": False},
    }
    return [*listed, why, ask]


def _describe(offer: Offer) -> str:
    bound = "; ".join(f"{name}: {' or '.join(values)}" for name, values in offer.bound.items())
    asked = f" A person of {offer.approval} must approve it." if offer.approval else ""
    return f"{offer.name} ({offer.effect}).{' Only for ' + bound + '.' if bound else ''}{asked}"


def _called(ident: Id, params: Mapping[str, Any], offered: Sequence[Offer]) -> Said:
    name, given = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        return _error(ident, _PARAMS, "A call has a name, and arguments that are an object.")
    if name == WHY:
        asked = given.get("request_id", "")
        if not isinstance(asked, str) or not given.keys() <= {"request_id"}:
            return _error(ident, _PARAMS, "why_refused takes one request_id.")
        return Why(id=ident, request_id=asked)
    if name == ASK:
        return Ask(id=ident, input=json.dumps(given).encode())
    offer = _by_tool(offered).get(name)
    if offer is None:
        return _error(ident, _PARAMS, "No such tool is granted to this sandbox.")
    return Call(id=ident, name=offer.name, input=json.dumps(given).encode())


def _reply(ident: Id, result: Mapping[str, Any]) -> Reply:
    return Reply(document={"jsonrpc": "2.0", "id": ident, "result": result})


def _result(ident: Id, content: list[dict[str, Any]], *, error: bool) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "result": {"content": content, "isError": error}}


def _error(ident: Id | None, code: int, text: str, data: Any = None) -> Reply:
    error: dict[str, Any] = {"code": code, "message": text}
    if data is not None:
        error["data"] = data
    return Reply(document={"jsonrpc": "2.0", "id": ident, "error": error})
