"""A credential on a WebSocket handshake, through the executor: what the origin is shown, and the client is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from rules.placeholders import make
from rules.policy import Policy
from tests.support.benches import Origin, running
from tests.support.streams import MemoryStream
from wire.handoff import Continue, Refusal, Upgraded
from wire.websocket import accept_value

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
SECRET = b"kq9-Handshake-Real-0d7f1c52"
PLACEHOLDER = make("sk_{24}", bytes(range(32)))
KINDS = {
    "header": "kind: header, header: X-Api-Key",
    "query": "kind: query, query: key",
    "cookie": "kind: cookie, cookie: sid",
    "subprotocol": 'kind: subprotocol, subprotocol: "key."',
}


def policy(kind: str) -> Policy:
    rule = "{name: talk, host: shop.test, methods: [GET], paths: [/talk], query: any, credential: c, websocket: true}"
    credentials = (
        f"version: 1\ncredentials:\n  c: {{{KINDS[kind]}, secret: 'store:c', hosts: [shop.test], owner: o, "
        "placeholder: {env: K, shape: 'sk_{24}'}}\n"
    )
    sources = Sources(
        policy={"policy.yaml": f"version: 1\nroles: {{dev: {{allow: [{rule}]}}}}\n"},
        credentials=("credentials.yaml", credentials),
        services={},
    )
    return compile_policy(parse_sources(sources).document)


async def accept(origin: Origin, stream: MemoryStream) -> None:
    """Accept the handshake, with the first of the offered subprotocols."""
    await origin.until(stream, b"\r\n\r\n")
    lines = origin.seen.decode().split("\r\n")
    offered = [line.partition(",")[0] for line in lines if line.lower().startswith("sec-websocket-protocol")]
    lines = [
        "HTTP/1.1 101 Switching Protocols",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Accept: {accept_value(KEY)}",
        *offered,
    ]
    stream.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await asyncio.Event().wait()


def headers(*more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    own = (("Host", "shop.test"), ("Connection", "Upgrade"), ("Upgrade", "websocket"))
    return (*own, ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", KEY), *more)


async def test_an_offer_without_the_placeholder_opens_nothing() -> None:
    """Nothing is dialled for a client that offers none of the names that carry the secret."""
    async with running(policy("subprotocol")) as bench:
        bench.vault.secret = SECRET
        request = bench.request("/talk", rule="dev/talk", operation="dev/talk", credential="c", upgrade="websocket")
        answers = await bench.ask(replace(request, headers=headers(("Sec-WebSocket-Protocol", "chat"))))
        assert answers == [Refusal(reason="credential-unavailable")]
        assert bench.origin.dialled == []


@pytest.mark.parametrize(
    ("kind", "path", "header", "wanted"),
    [
        ("header", "/talk", ("X-Api-Key", PLACEHOLDER), b"X-Api-Key: " + SECRET),
        ("query", f"/talk?key={PLACEHOLDER}", ("Accept", "*/*"), b"GET /talk?key=" + SECRET),
        ("cookie", "/talk", ("Cookie", f"sid={PLACEHOLDER}"), b"Cookie: sid=" + SECRET),
        (
            "subprotocol",
            "/talk",
            ("Sec-WebSocket-Protocol", f"chat, key.{PLACEHOLDER}"),
            b"Sec-WebSocket-Protocol: chat, key." + SECRET,
        ),
    ],
)
async def test_a_handshake_carries_the_secret_and_its_answer_does_not(
    kind: str, path: str, header: tuple[str, str], wanted: bytes
) -> None:
    """Each slot that a handshake has: the origin sees the secret in it, once, and the client nothing of it."""
    async with running(policy(kind)) as bench:
        bench.vault.secret = SECRET
        bench.origin.script = accept
        request = bench.request(path, rule="dev/talk", operation="dev/talk", credential="c", upgrade="websocket")
        exchange = await bench.link.open(replace(request, headers=headers(header)))
        answers = [await exchange.receive(), await exchange.receive()]
        seen = bytes(bench.origin.seen)
        await exchange.close()
        await bench.settled()
        for task in bench.origin.tasks:
            task.cancel()
    assert isinstance(answers[0], Continue)
    assert isinstance(answers[1], Upgraded), answers
    assert wanted.lower() in seen.lower()
    assert PLACEHOLDER.encode() not in seen
    assert SECRET.decode() not in str(answers)
