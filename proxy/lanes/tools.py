"""Tool calls at the help host (proxy/mcp.py): each runs as `POST /operations/<name>` on a connection of our own.

So a tool has no way of its own to the gate: identity, rules, budgets, hand-off and records are those of any request.
The inner request ends with the call: when the client is gone it is cut, and what it met that nobody foresaw is raised.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from net.few import Busy, Few
from net.http1 import ClientConnection, ServerConnection
from net.stream import ByteStream, StreamBroken, open_socket_stream
from proxy import mcp
from proxy.answers import page
from proxy.help import HelpHost, HelpRefused
from proxy.identity import Identified
from proxy.limits import BodyShare
from rules.facts import RequestFacts
from rules.names import OWN_NAME
from wire.heads import HeadRefused, Length
from wire.refusals import Rendered

CALL_SECONDS: Final = 300.0
"""For one call, its answer included."""
SETTLE_SECONDS: Final = 5.0
"""For the inner request to write its outcome, after its answer was read."""
CALLS: Final = 16
"""Of one sandbox at a time, in one worker: each has three descriptors and an answer in memory."""

Serve = Callable[[Identified, ByteStream], Awaitable[None]]
Wish = Callable[[Identified, bytes], Awaitable[Rendered | HelpRefused]]
"""`POST /access` with that body."""


class Tools:
    """Answers messages to `/mcp`. `serve` runs requests of a sandbox to the help host that come over a stream."""

    def __init__(self, *, help_host: HelpHost, serve: Serve, wish: Wish) -> None:
        self._help = help_host
        self._wish = wish
        self._serve = serve
        self._calls = Few(CALLS, waiting=0)

    def read(self, who: Identified, facts: RequestFacts, raw: bytes) -> mcp.Said | HelpRefused:
        """What one message asks for; it only looks, and may run in a thread. Never raises."""
        offered = self._help.offered(who)
        if isinstance(offered, HelpRefused):
            return offered
        versions = facts.header("mcp-protocol-version")
        return mcp.message(raw, offered, versions[0] if len(versions) == 1 else "" if not versions else "?")

    async def answer(
        self, who: Identified, said: mcp.Said, outer: ServerConnection, share: BodyShare
    ) -> Rendered | HelpRefused:
        """The answer to one message that came over `outer`. `share` holds an answer's bytes until the caller closes it.

        Raises what the inner request raised, which is a fault.
        """
        match said:
            case mcp.Reply(document=None):
                return Rendered(status=202, phrase="Accepted", headers=(("content-length", "0"),), body=b"")
            case mcp.Reply(document=document):
                return _json(document)
            case mcp.Why() as why:
                return _json(mcp.told(why, self._help.why(who, why.request_id)))
            case mcp.Ask() as ask:
                done = await self._wish(who, ask.input)
                return _json(mcp.asked(ask, done.body if isinstance(done, Rendered) else None))
            case mcp.Call() as call:
                return await self._call(who, call, outer, share)

    async def _call(
        self, who: Identified, call: mcp.Call, outer: ServerConnection, share: BodyShare
    ) -> Rendered | HelpRefused:
        owner = (who.sandbox.tenant, who.sandbox.id)
        try:
            async with self._calls.place(owner):
                return _json(await self._run(who, call, outer, share))
        except Busy:
            return HelpRefused(reason="too-many-requests")

    async def _run(self, who: Identified, call: mcp.Call, outer: ServerConnection, share: BodyShare) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        client, server = await open_socket_stream(ours), await open_socket_stream(theirs)
        client.share = server.share = outer.stream.share
        outer.on_broken(client.abort)
        serving = asyncio.ensure_future(self._serve_one(who, server))
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result = await _ask(ClientConnection(client), call, share)
                await client.send_eof()  # nothing more is asked: the inner connection ends behind its last record
            await asyncio.wait([serving], timeout=SETTLE_SECONDS)  # its outcome is the one of a whole answer
        except (StreamBroken, TimeoutError, HeadRefused):
            result = mcp.failed(call)
        finally:
            outer.on_broken(None)
            client.abort()
            server.abort()  # to the inner request its client is gone, and so says its outcome
            await asyncio.wait([serving], timeout=SETTLE_SECONDS)
            serving.cancel()
            await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()
        return result

    async def _serve_one(self, who: Identified, server: ByteStream) -> None:
        try:
            await self._serve(who, server)
        finally:
            server.abort()  # also where it was a fault: nobody is to wait for an answer that cannot come


async def _ask(connection: ClientConnection, call: mcp.Call, share: BodyShare) -> dict[str, Any]:
    """Raises StreamBroken and HeadRefused."""
    fields = (
        ("host", OWN_NAME),
        ("content-type", "application/json"),
        ("content-length", str(len(call.input))),
    )
    headers = tuple((name.encode("ascii"), value.encode("ascii")) for name, value in fields)
    target = f"/operations/{quote(call.name, safe='')}"
    await connection.send_request("POST", target, headers, Length(len(call.input)))
    await connection.send_data(call.input)
    await connection.finish()
    while (head := await connection.next_response()).status < 200:
        pass
    body, collected = connection.body(), bytearray()
    while (piece := await body.read()) is not None:
        if not share.take(len(piece)):
            connection.stream.abort()
            return mcp.crowded(call)
        collected += piece
        if len(collected) > mcp.MAX_RESULT:
            connection.stream.abort()
            return mcp.too_large(call)
    kinds = head.get("content-type")
    return mcp.finished(call, head.status, kinds[0] if kinds else "", bytes(collected))


def _json(document: Mapping[str, Any] | None) -> Rendered:
    return page(json.dumps(document, separators=(",", ":")).encode("ascii"), "application/json")
