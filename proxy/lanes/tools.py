"""Tool calls at the help host (proxy/mcp.py): each runs as `POST /operations/<name>` on a connection of our own.

So a tool has no way of its own to the gate: identity, rules, budgets, hand-off and records are those of any request.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from net.http1 import ClientConnection
from net.stream import ByteStream, StreamBroken, open_socket_stream
from proxy import mcp
from proxy.help import HelpHost, HelpRefused
from proxy.identity import Identified
from rules.facts import RequestFacts
from rules.names import OWN_NAME
from wire.heads import HeadRefused, Length
from wire.refusals import Rendered

CALL_SECONDS: Final = 300.0
"""For one call, its answer included."""

Serve = Callable[[Identified, ByteStream], Awaitable[None]]


class Tools:
    """Answers messages to `/mcp`. `serve` runs requests of a sandbox to the help host that come over a stream."""

    def __init__(self, *, help_host: HelpHost, serve: Serve) -> None:
        self._help = help_host
        self._serve = serve

    async def answer(self, who: Identified, facts: RequestFacts, raw: bytes) -> Rendered | HelpRefused:
        """The answer to one message. Never raises but CancelledError."""
        offered = self._help.offered(who)
        if isinstance(offered, HelpRefused):
            return offered
        versions = facts.header("mcp-protocol-version")
        match mcp.message(raw, offered, versions[0] if len(versions) == 1 else "" if not versions else "?"):
            case mcp.Reply(document=None):
                return Rendered(status=202, phrase="Accepted", headers=(("content-length", "0"),), body=b"")
            case mcp.Reply(document=document):
                return _json(document)
            case mcp.Why() as why:
                return _json(mcp.told(why, self._help.why(who, why.request_id)))
            case mcp.Call() as call:
                return _json(await self._run(who, call))

    async def _run(self, who: Identified, call: mcp.Call) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        client, server = await open_socket_stream(ours), await open_socket_stream(theirs)
        serving = asyncio.ensure_future(self._serve(who, server))
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await _ask(ClientConnection(client), call)
        except (StreamBroken, TimeoutError, HeadRefused):
            return mcp.failed(call)
        finally:
            client.abort()
            server.abort()
            serving.cancel()
            await asyncio.wait([serving])


async def _ask(connection: ClientConnection, call: mcp.Call) -> dict[str, Any]:
    """Raises StreamBroken and HeadRefused."""
    fields = (("host", OWN_NAME), ("content-type", "application/json"), ("content-length", str(len(call.input))))
    headers = tuple((name.encode("ascii"), value.encode("ascii")) for name, value in fields)
    target = f"/operations/{quote(call.name, safe='')}"
    await connection.send_request("POST", target, headers, Length(len(call.input)))
    await connection.send_data(call.input)
    await connection.finish()
    while (head := await connection.next_response()).status < 200:
        pass
    body, collected = connection.body(), bytearray()
    while (piece := await body.read()) is not None:
        collected += piece
        if len(collected) > mcp.MAX_RESULT:
            return mcp.too_large(call)
    kinds = head.get("content-type")
    return mcp.finished(call, head.status, kinds[0] if kinds else "", bytes(collected))


def _json(document: Mapping[str, Any] | None) -> Rendered:
    body = json.dumps(document, separators=(",", ":")).encode("ascii")
    headers = (
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
    )
    return Rendered(status=200, phrase="OK", headers=headers, body=body)
