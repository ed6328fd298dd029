"""A body that is judged by its beginning: nothing upstream before the verdict, and no more held than the beginning."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import pytest
import pytest_asyncio

from rules.names import CredentialRef
from tests.support.fakes import TOKEN, MemoryExchange, registered, sandbox
from tests.support.origins import Exchange, Origin
from tests.support.pushes import BAD, BOUND, GOOD, NEW, TYPE, ZERO, pack, packet, push, push_operations
from tests.support.rooms import Client, House, NoDialer, basic, credential, destination, policy, rule
from wire.handoff import Answer, AnswerEnd, AnswerHead, Continue, Refusal

REFS = {"repository": ("o/r",), "ref": ("refs/heads/agent/*",)}
TARGET = "/o/r.git/git-receive-pack"


@dataclass
class Forge:
    """A git forge behind a house."""

    origin: Origin
    house: House

    def ask(self, *headers: str) -> Client:
        """A push's head on a new connection."""
        at = f"forge.test:{self.origin.port}"
        client = self.house.connect()
        lines = [f"POST http://{at}{TARGET} HTTP/1.1", f"Host: {at}", f"Proxy-Authorization: {basic()}"]
        client.send("\r\n".join([*lines, f"Content-Type: {TYPE}", *headers]) + "\r\n\r\n")
        return client


@pytest_asyncio.fixture
async def forge() -> AsyncIterator[Forge]:
    async with Origin("forge.test", tls=False, keep=32 << 20) as origin:
        operations = push_operations(origin.base)
        rules = policy(rule("dev/push", *operations, bind=REFS), destinations=[destination(origin)])
        yield Forge(origin, House(rules, origins=[origin]))


def chunked(body: bytes, size: int = 70_000) -> bytes:
    """`body` in chunks, with its end."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


CHUNKED = "Transfer-Encoding: chunked"
LONG_COMMANDS = b"".join(packet(f"shallow {NEW}") for _ in range(1300)) + push(GOOD, pack=pack(300_000))
"""Commands that end behind the bound."""

REFUSED: dict[str, tuple[bytes, str]] = {
    "a good ref and a bad one, and a pack": (push(GOOD, BAD, pack=pack(300_000)), "no-rule"),
    "a good ref and a bad one, whole": (push(GOOD, BAD), "no-rule"),
    "commands that end behind the bound": (LONG_COMMANDS, "body-not-judged"),
    "no push at all": (b"x" * 300_000, "body-not-judged"),
    "no push, of exactly the bound": (b"x" * BOUND, "body-not-judged"),
    "no body": (b"", "body-not-judged"),
}


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("body", "reason"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused_never_reaches_the_origin(forge: Forge, framing: str, body: bytes, reason: str) -> None:
    """Expect one refusal on record, an untouched origin, and a connection that carries nothing more."""
    client = forge.ask(CHUNKED if framing == "chunked" else f"Content-Length: {len(body)}")
    client.send(chunked(body) if framing == "chunked" else body)
    answer = await client.answer()
    record = forge.house.records("request.refused")[0]
    assert record["reason"] == reason
    assert answer.headers["proxy-status"].endswith(f'details="{reason}"')
    assert forge.origin.untouched


async def test_a_coded_body_is_refused_by_its_head(forge: Forge) -> None:
    """Expect no byte of it to be read: its beginning is not the one that the origin reads."""
    client = forge.ask("Content-Length: 300000", "Content-Encoding: gzip")
    assert (await client.answer()).status == 403
    assert forge.origin.untouched


async def test_a_client_that_leaves_before_the_verdict_reaches_nothing(forge: Forge) -> None:
    """Expect a beginning without the rest of it to be no push."""
    client = forge.ask("Content-Length: 300000")
    client.send(push(GOOD, pack=pack(1000)))
    await client.stream.close()
    await client.serving
    assert forge.origin.untouched
    assert forge.house.records("request.refused")[0]["reason"] == "client-timeout"


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("size", [0, BOUND - 400, 300_000, 3_000_000])
async def test_the_very_bytes_arrive_in_their_order(forge: Forge, framing: str, size: int) -> None:
    """Expect the judged beginning, what was read behind it and the rest to be one body again."""
    body = push(GOOD, pack=pack(size + 8))
    client = forge.ask(CHUNKED if framing == "chunked" else f"Content-Length: {len(body)}")
    client.send(chunked(body) if framing == "chunked" else body)
    assert (await client.answer()).status == 200
    (seen,) = forge.origin.received
    assert seen.body_bytes == len(body)
    assert seen.digest.digest() == hashlib.sha256(body).digest()
    streamed = len(body) > BOUND
    assert seen.header("transfer-encoding") == ("chunked" if streamed and framing == "chunked" else None)
    await client.stream.close()
    await client.serving
    (outcome,) = forge.house.records("request.outcome")
    assert (outcome["bytes_up"], outcome["completed"]) == (len(body), True)
    assert "ref=refs/heads/agent/x" in forge.house.records("request.intent")[0]["arguments"]


async def test_it_does_not_matter_where_the_bytes_are_split(forge: Forge) -> None:
    """Expect the same verdict and the same body when every byte around commands and bound comes alone."""
    body = push(GOOD, pack=pack(BOUND + 500))
    client = forge.ask(f"Content-Length: {len(body)}")
    for at in range(300):
        client.send(body[at : at + 1])
        await asyncio.sleep(0)
    client.send(body[300 : BOUND - 50])
    for at in range(BOUND - 50, BOUND + 50):
        client.send(body[at : at + 1])
        await asyncio.sleep(0)
    client.send(body[BOUND + 50 :])
    assert (await client.answer()).status == 200
    assert forge.origin.received[0].digest.digest() == hashlib.sha256(body).digest()


async def test_the_client_that_waits_for_leave_gets_it_from_us(forge: Forge) -> None:
    """Expect our own 100 before the body, and an origin that is not asked for one."""
    body = push(GOOD, pack=pack(200_000))
    client = forge.ask(f"Content-Length: {len(body)}", "Expect: 100-continue")
    assert (await client.answer()).status == 100
    client.send(body)
    assert (await client.answer()).status == 200
    assert forge.origin.received[0].header("expect") is None


async def test_the_rest_streams_and_is_not_collected(forge: Forge) -> None:
    """Expect the origin to have what was sent while the client still holds the rest of 20 MB back."""
    body = push(GOOD, pack=pack(20_000_000))
    client = forge.ask(f"Content-Length: {len(body)}")
    sent = 0
    while sent < len(body):
        client.send(body[sent : sent + 2_000_000])
        sent = min(sent + 2_000_000, len(body))
        await forge.origin.until(partial(_has, forge.origin, sent))
    assert (await client.answer()).status == 200
    assert forge.origin.received[0].digest.digest() == hashlib.sha256(body).digest()


def _has(origin: Origin, size: int) -> bool:
    return bool(origin.received) and origin.received[0].body_bytes >= size


async def test_an_answer_that_comes_early_passes(forge: Forge) -> None:
    """Expect the origin's word about the commands to reach a client that has not sent its pack."""

    async def early(exchange: Exchange) -> None:
        while exchange.request.body_bytes < BOUND:
            await exchange.read_piece()
        exchange.keep_alive = False
        await exchange.answer(413, b"too much")

    forge.origin.on(TARGET, early)
    body = push(GOOD, pack=pack(300_000))
    client = forge.ask(f"Content-Length: {len(body)}")
    client.send(body[:100_000])
    answer = await client.answer()
    assert (answer.status, answer.body) == (413, b"too much")
    await client.serving


async def test_a_client_that_leaves_in_the_middle_cuts_the_origin(forge: Forge) -> None:
    """Expect the origin to see a cut body, never a short whole one."""
    body = push(GOOD, pack=pack(400_000))
    client = forge.ask(CHUNKED)
    client.send(chunked(body)[:200_000])
    await forge.origin.until(lambda: bool(forge.origin.received) and forge.origin.received[0].body_bytes > BOUND)
    client.stream.abort()
    await client.serving
    (outcome,) = forge.house.records("request.outcome")
    assert outcome["error"] == "client-gone"
    assert not forge.origin.received[0].complete


async def test_ending_the_sandbox_cuts_a_push_in_the_middle(forge: Forge) -> None:
    """Expect both sides to end at once, and the outcome to say why."""
    body = push(GOOD, pack=pack(400_000))
    client = forge.ask(f"Content-Length: {len(body)}")
    client.send(body[:200_000])
    await forge.origin.until(lambda: bool(forge.origin.received) and forge.origin.received[0].body_bytes > BOUND)
    forge.house.install(policy(), [])
    forge.house.room.enforce(forge.house.directory.snapshot())
    await client.serving
    (outcome,) = forge.house.records("request.outcome")
    assert outcome["error"] == "sandbox-ended"


async def test_the_help_host_promises_a_push_and_no_more(forge: Forge) -> None:
    """Expect what a matcher recognises to be listed as such, not as every path of its host."""
    client = forge.house.connect()
    headers = f"Proxy-Authorization: {basic()}\r\nAccept: "
    head = f"GET http://exeat.internal/allowed HTTP/1.1\r\nHost: exeat.internal\r\n{headers}"
    client.send(head + "application/json\r\n\r\n")
    (rule_shown,) = (await client.answer()).json["allow"]
    assert {(tuple(one["urls"]), one["only"]) for one in rule_shown["operations"]} == {
        ((forge.origin.base + "/",), f"git_repository {suffix}") for suffix in ("info/refs", "git-receive-pack")
    }
    client.send(head + "text/plain\r\n\r\n")
    assert f"POST {forge.origin.base}/ only as git_repository git-receive-pack" in (await client.answer()).body.decode()


# --- through the broker ---


def keyed(*answers: Answer, **more: bool) -> House:
    """A house in which pushes go through the broker."""
    operations = push_operations("https://forge.test")
    rules = policy(
        rule("dev/push", *operations, bind=REFS, credential=CredentialRef("forge")),
        credentials=[credential("forge", "forge.test")],
    )
    house = House(rules, entries=[registered(sandbox("sb_one"), TOKEN)], dialer=NoDialer())
    house.broker.answer = lambda request: MemoryExchange(answers, **more)
    return house


async def send(house: House, body: bytes, *headers: str) -> Client:
    client = await house.tunnel("forge.test:443", tls="forge.test")
    lines = [f"POST {TARGET} HTTP/1.1", "Host: forge.test", f"Content-Type: {TYPE}", *headers]
    client.send("\r\n".join(lines) + "\r\n\r\n")
    client.send(chunked(body) if CHUNKED in headers else body)
    return client


async def test_the_broker_is_not_asked_for_what_is_refused_here() -> None:
    """Expect a bad ref among good ones never to become a hand-off."""
    house = keyed()
    client = await send(house, push(GOOD, BAD, pack=pack(300_000)), CHUNKED)
    assert (await client.answer()).status == 403
    assert house.broker.requests == []


async def test_the_brokers_refusal_is_told_before_the_rest_is_sent() -> None:
    """Expect only the beginning to have left this process."""
    house = keyed(Refusal(reason="no-rule"))
    body = push(GOOD, pack=pack(300_000))
    client = await send(house, body, f"Content-Length: {len(body)}")
    assert (await client.answer()).status == 403
    assert [judged for _, judged in house.broker.requests] == [body[:BOUND]]
    assert house.broker.exchanges[0].body == b""


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_the_beginning_goes_before_the_verdict_and_the_rest_after_it(framing: str) -> None:
    """Expect the plan to say what was judged, and the streamed part to begin right behind it."""
    house = keyed(Continue(), AnswerHead(status=200, reason="OK", headers=(), length=0), AnswerEnd(), reads_body=True)
    body = push(GOOD, pack=pack(500_000))
    client = await send(house, body, CHUNKED if framing == "chunked" else f"Content-Length: {len(body)}")
    assert (await client.answer()).status == 200
    ((request, judged),) = house.broker.requests
    assert judged == body[:BOUND]
    assert request.body.kind == framing
    assert request.body.length == (len(body) if framing == "length" else 0)
    assert (request.body.prefix, request.body.sha256) == (BOUND, hashlib.sha256(body[:BOUND]).digest())
    assert ("ref", "refs/heads/agent/x") in request.arguments
    assert house.broker.exchanges[0].body == body[BOUND:]
    assert house.broker.exchanges[0].body_finished


async def test_a_push_that_is_short_is_a_judged_body() -> None:
    """Expect what ends within the bound to travel whole, with its digest."""
    house = keyed(Continue(), AnswerHead(status=200, reason="OK", headers=(), length=0), AnswerEnd())
    body = push((ZERO, NEW, "refs/heads/agent/y"))
    client = await send(house, body, CHUNKED)
    assert (await client.answer()).status == 200
    ((request, judged),) = house.broker.requests
    assert judged == body
    assert (request.body.kind, request.body.length, request.body.prefix) == ("sha256", len(body), 0)
