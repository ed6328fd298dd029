"""Our own answers on a server connection: refusals and help pages, written early, reading paused, discard bounded."""

from __future__ import annotations

from net.http1 import ServerConnection
from net.stream import StreamBroken
from proxy.gate import Refuse
from wire.heads import ResponseHead
from wire.refusals import Refusal, Rendered, render, shape_for


def rendered(refuse: Refuse, user_agent: str = "", *, at_connect: bool = False) -> Rendered:
    """The answer that tells `refuse`, in the shape that the client shows; `at_connect`: it answers a CONNECT."""
    refusal = Refusal(
        code=refuse.reason,
        request_id=refuse.request_id,
        rule=refuse.rule,
        remedy=refuse.remedy,
        message=refuse.message,
        ticket=refuse.ticket,
        retry_after=refuse.retry_after,
        reply_to=refuse.reply_to,
    )
    return render(refusal, shape_for(refuse.native, user_agent), at_connect=at_connect)


def page(body: bytes, content_type: str) -> Rendered:
    """A page of the help host: 200, kept by nobody, and read as the type that it says."""
    headers = (
        ("content-type", content_type),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
    )
    return Rendered(status=200, phrase="OK", headers=headers, body=body)


def head_of(answer: Rendered) -> ResponseHead:
    """The answer's head for the engine, which writes the framing itself."""
    headers = tuple((name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in answer.headers)
    return ResponseHead(answer.status, answer.phrase, "1.1", headers)


async def answer(connection: ServerConnection, what: Rendered, *, close: bool = False) -> bool:
    """Send a whole answer of our own to the current request; return whether the connection can go on.

    The engine does not wait for a body that is still to come: it drops a small one that is here, and otherwise the
    connection must close (T10). Closing is the caller's. Never raises for what the client does.
    """
    if close:
        connection.must_close = True
    try:
        await connection.respond(head_of(what), what.body)
    except StreamBroken:
        connection.abort()
    return not connection.must_close


async def refuse_with(connection: ServerConnection, refuse: Refuse, *, close: bool = False) -> bool:
    """`answer` for a refusal, in the shape for the current request's client."""
    asked = connection.request
    agents = asked.get("user-agent") if asked is not None else ()
    at_connect = asked is not None and asked.method == "CONNECT"
    return await answer(connection, rendered(refuse, agents[0] if agents else "", at_connect=at_connect), close=close)
