"""Credentialed operations: what the lane does with the broker's verdicts, answers and silences."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from proxy.brokerlink import BrokerUnavailable, HandoffBroken
from rules.names import CredentialRef
from rules.placeholders import make
from tests.support.fakes import TOKEN, MemoryExchange, registered, sandbox
from tests.support.rooms import House, NoDialer, credential, op, policy, rule
from wire.handoff import (
    Answer,
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    Continue,
    Refusal,
    Upgraded,
)

PLACEHOLDER = make("sk_{24}", bytes(range(32)))
FOREIGN = make("sk_{24}", bytes(range(1, 33)))
RULES = policy(
    rule(
        "dev/orders",
        op("dev/orders", "shop.test", ["/v1/orders/{id}"], methods=["GET", "POST"], effect="write", websocket=True),
        credential=CredentialRef("shop"),
    ),
    credentials=[credential("shop", "shop.test")],
)
GET = f"GET /v1/orders/7 HTTP/1.1\r\nHost: shop.test\r\nX-Api-Key: {PLACEHOLDER}\r\n\r\n"


async def shop(answers: Iterable[Answer] = (), **more: object) -> tuple[House, NoDialer]:
    """A house whose sandbox holds a placeholder for the shop."""
    dialer = NoDialer()
    entry = registered(sandbox("sb_one"), TOKEN, placeholders={"shop": PLACEHOLDER})
    house = House(RULES, entries=[entry], dialer=dialer)  # type: ignore[arg-type]
    listed = tuple(answers)
    house.broker.answer = lambda request: MemoryExchange(listed, **more)  # type: ignore[arg-type]
    return house, dialer


# --- refused here, before the broker hears of it -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "header", "reason"),
    [
        ("a placeholder of another sandbox", f"X-Api-Key: {FOREIGN}", "placeholder-misuse"),
        ("the placeholder in another header", f"X-Other: {PLACEHOLDER}", "placeholder-misuse"),
        ("a key of the client's own", "X-Api-Key: sk_mine", "client-authority"),
    ],
)
async def test_a_wrong_key_never_reaches_the_broker(sentence: str, header: str, reason: str) -> None:
    """Refused with one record; unknown and foreign placeholders look alike."""
    house, dialer = await shop()
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(f"GET /v1/orders/7 HTTP/1.1\r\nHost: shop.test\r\n{header}\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.reason) == (403, reason), sentence
    assert house.broker.requests == []
    assert dialer.asked == []
    assert PLACEHOLDER not in repr(house.journal.events)
    assert FOREIGN not in repr(house.journal.events)


@pytest.mark.parametrize(
    ("sentence", "body"),
    [
        ("a chunk extension", "5;a=b\r\nhello\r\n0\r\n\r\n"),
        ("data beyond the chunk", "5\r\nhelloXX0\r\n\r\n"),
        ("a trailer that frames", "0\r\nContent-Length: 5\r\n\r\n"),
    ],
)
async def test_a_body_that_breaks_its_framing_is_the_clients_own_fault(sentence: str, body: str) -> None:
    """400 and closed, not 503 to be tried again; the call is cancelled, and its body never ends."""
    house, _ = await shop([Continue()], hang=True)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET.replace("GET", "POST").replace("\r\n\r\n", "\r\nTransfer-Encoding: chunked\r\n\r\n") + body)
    answer = await client.answer()
    assert (answer.status, answer.reason) == (400, "bad-framing"), sentence
    assert await client.rest() == b""
    (exchange,) = house.broker.exchanges
    assert exchange.cancelled
    assert not exchange.body_finished


# --- the broker fails --------------------------------------------------------------------------------------------


async def test_no_executor_is_broker_unavailable_and_on_record() -> None:
    """B184: never sent bare; the hand-off and its failure share one id."""
    house, dialer = await shop()
    house.broker.fail = BrokerUnavailable("none")
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    answer = await client.answer()
    assert (answer.status, answer.reason) == (503, "broker-unavailable")
    assert answer.headers["x-should-retry"] == "true"
    await client.serving
    assert house.journal.names() == ["request.handoff", "request.refused"]
    assert len({record["request_id"] for record in house.records("request.handoff") + house.records("request.refused")})
    assert dialer.asked == []


@pytest.mark.parametrize("where", ["open", "verdict"])
async def test_a_broker_that_hangs_is_refused_within_its_deadline(where: str) -> None:
    """A hanging vault or executor ends in a refusal, not in a hanging client."""
    house, dialer = await shop(hang=where == "verdict")
    house.broker.hang = where == "open"
    house.room.lane._broker._open_seconds = 0.05
    house.room.lane._broker._verdict_seconds = 0.05
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    assert (await client.answer()).reason == "broker-unavailable"
    await client.serving
    assert house.records("request.refused")[0]["reason"] == "broker-unavailable"
    assert dialer.asked == []


async def test_a_broker_that_raises_anything_ends_the_connection_with_an_outcome() -> None:
    """An exception that nobody foresaw closes both sides and is on record."""
    house, dialer = await shop()
    house.broker.fail = RuntimeError("unforeseen")
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    with pytest.raises(Exception):  # noqa: B017 - reset or truncated, as the TLS layer says it
        await client.answer()
    await client.serving
    assert house.records("request.refused")[0]["reason"] == "internal-error"
    assert house.room.gate.open_passages == 0
    assert len(house.faults) == 1
    assert dialer.asked == []


async def test_an_answer_without_its_end_is_an_aborted_message() -> None:
    """RULINGS 2.4: never a well-formed short answer."""
    house, _ = await shop([Continue(), AnswerHead(status=200, reason="OK", headers=()), AnswerData(b"half")])
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    with pytest.raises(Exception):  # noqa: B017 - reset or truncated, as the TLS layer says it
        await client.rest()
    await client.serving


# --- the broker answers ------------------------------------------------------------------------------------------


async def test_the_brokers_refusal_is_told_with_its_remedy_and_not_recorded_twice() -> None:
    """The broker recorded it; the sandbox can ask why."""
    refusal = Refusal(reason="limit-reached", rule="dev/orders", remedy="Wait a minute.", retry_after=60)
    house, _ = await shop([refusal])
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    answer = await client.answer()
    assert (answer.status, answer.reason, answer.headers["retry-after"]) == (429, "limit-reached", "60")
    assert house.journal.names() == ["request.handoff"]
    assert house.room.recent.find("default", "sb_one", answer.json["request_id"]) is not None


async def test_an_abort_before_the_head_is_told_as_its_reason() -> None:
    """An upstream failure inside the broker is a refusal of its own code."""
    house, _ = await shop([Continue(), AnswerAbort(reason="upstream-certificate")])
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    assert (await client.answer()).reason == "upstream-certificate"


async def test_a_permitted_call_carries_evidence_and_the_slot_and_streams_both_ways() -> None:
    """The request goes as judged with the sandbox's own token; each piece of the answer is sent as it comes."""
    answers = [
        Continue(),
        AnswerHead(status=200, reason="OK", headers=(("Content-Type", "application/json"),)),
        AnswerData(b'{"id":'),
        AnswerData(b" 7}"),
        AnswerEnd(),
    ]
    house, dialer = await shop(answers, reads_body=True)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(
        f"POST /v1/orders/7 HTTP/1.1\r\nHost: shop.test\r\nX-Api-Key: {PLACEHOLDER}\r\nX-Real-IP: 1.2.3.4\r\n"
        "Content-Length: 4\r\n\r\nbody"
    )
    answer = await client.answer()
    assert (answer.status, answer.json) == (200, {"id": 7})
    ((request, judged),) = house.broker.requests
    assert judged is None
    assert request.evidence.token == "token-of-box-one"
    names = [name.lower() for name, _ in request.headers]
    assert names[0] == "host"
    assert "x-api-key" in names
    assert "x-real-ip" not in names
    assert (request.body.kind, request.body.length) == ("length", 4)
    assert house.broker.exchanges[0].body == b"body"
    assert house.broker.exchanges[0].closed
    assert dialer.asked == []


async def test_a_placeholder_in_a_streamed_body_is_an_alarm_beside_the_hand_off() -> None:
    """4.4: once, however often it stands there; the call itself goes on."""
    answers = [Continue(), AnswerHead(status=200, reason="OK", headers=()), AnswerEnd()]
    house, _ = await shop(answers, reads_body=True)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    body = f"{PLACEHOLDER} {PLACEHOLDER}"
    client.send(
        f"POST /v1/orders/7 HTTP/1.1\r\nHost: shop.test\r\nX-Api-Key: {PLACEHOLDER}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    assert (await client.answer()).status == 200
    (alarm,) = house.records("placeholder.misused")
    (handed,) = house.records("request.handoff")
    assert alarm["request_id"] == handed["request_id"]


async def test_ending_the_sandbox_cuts_a_hand_off_in_progress() -> None:
    """The executor is told to abort and the client's message is cut."""
    house, _ = await shop([Continue()], hang=True)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    while not house.broker.exchanges:
        await asyncio.sleep(0)
    house.install(RULES, [])
    house.room.enforce(house.directory.snapshot())
    await client.serving
    assert house.broker.exchanges[0].cancelled
    assert house.room.live.count() == 0


async def test_an_upgrade_becomes_raw_bytes_both_ways() -> None:
    """T13: after Upgraded the executor's bytes and the client's pass unframed."""
    answers = [Continue(), Upgraded(headers=(("Sec-WebSocket-Accept", "x"),)), AnswerData(b"\x81\x02hi"), AnswerEnd()]
    house, _ = await shop(answers)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(
        f"GET /v1/orders/7 HTTP/1.1\r\nHost: shop.test\r\nX-Api-Key: {PLACEHOLDER}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert (await client.answer()).status == 101
    assert await client.rest() == b"\x81\x02hi"
    await client.serving


async def test_an_upgraded_connection_that_is_cut_is_reset() -> None:
    """RULINGS 2.4: an abort of the executor is no end of a conversation."""
    answers = [Continue(), Upgraded(headers=(("Sec-WebSocket-Accept", "x"),)), AnswerAbort(reason="sandbox-ended")]
    house, _ = await shop(answers)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(
        f"GET /v1/orders/7 HTTP/1.1\r\nHost: shop.test\r\nX-Api-Key: {PLACEHOLDER}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with pytest.raises(Exception):  # noqa: B017 - reset or truncated, as the TLS layer says it
        await client.rest()
    await client.serving


async def test_the_head_of_a_stream_does_not_wait_for_its_first_event() -> None:
    """T14: the head reaches the client while the answer has no byte of body yet."""
    head = AnswerHead(status=200, reason="OK", headers=(("Content-Type", "text/event-stream"),))
    house, _ = await shop([Continue(), head], hang=True)
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    async with asyncio.timeout(60):
        assert (await client._until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    house.broker.exchanges[0].cancel()
    await client.serving


async def test_a_broken_exchange_is_not_a_refusal_by_anybody() -> None:
    """HandoffBroken before any answer is broker-unavailable."""

    def broken(request: object) -> MemoryExchange:
        raise HandoffBroken("gone")

    house, _ = await shop()
    house.broker.answer = broken
    client = await house.tunnel("shop.test:443", tls="shop.test")
    client.send(GET)
    assert (await client.answer()).reason == "broker-unavailable"
