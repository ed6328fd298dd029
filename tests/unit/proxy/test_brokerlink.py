"""The worker's side of a hand-off: what reaches the client, and what never does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from net.fdchannel import FdChannel, channel_pair
from net.framing import FrameStream
from net.http1 import ServerConnection
from net.stream import StreamBroken, open_socket_stream
from proxy.brokerlink import BrokerUnavailable, HandoffRequest, HandoffResult, SocketBrokerLink, relay_handoff
from tests.support.fakes import CountingRandom, ManualClock
from tests.support.streams import MemoryStream
from wire.frames import encode_frame
from wire.handoff import (
    HANDOFF_MESSAGE,
    Answer,
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    BodyPlan,
    Continue,
    Evidence,
    FrameType,
    Refusal,
    encode_answer,
    frame_type,
    open_sealed,
)

KEY = b"k" * 32
HEAD = AnswerHead(status=200, reason="OK", headers=(("Content-Type", "text/plain"),), length=None)
SIZED = AnswerHead(status=200, reason="OK", headers=(), length=5)


def request(body: BodyPlan | None = None, method: str = "GET") -> HandoffRequest:
    """What a gate hands over."""
    return HandoffRequest(
        request_id="req_aaaaaaaaaaaaaaaaaaaa",
        tenant="default",
        sandbox="sb_one",
        epoch=1,
        evidence=Evidence(token="tok"),
        policy_digest="d",
        method=method,
        scheme="https",
        host="shop.test",
        port=443,
        target="/x",
        headers=(("Host", "shop.test"),),
        body=body or BodyPlan(),
        rule="dev/x",
        operation="dev/x",
        credential="shop",
    )


@dataclass
class FakeExecutor:
    """Takes hand-offs from its channel and answers what it was told, frame by frame."""

    channel: FdChannel
    answers: list[Answer | bytes] = field(default_factory=list)
    statements: list[bytes] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    body_ended: bool = False
    hold: bool = False
    """Keep the socket open after the last answer."""
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        while (passed := await self.channel.receive()) is not None:
            assert passed[0] == HANDOFF_MESSAGE
            frames = FrameStream(await open_socket_stream(passed[1]))
            try:
                await self._one(frames)
            except StreamBroken:
                self.left.set()
            finally:
                await frames.close()

    async def _one(self, frames: FrameStream) -> None:
        frame = await frames.receive()
        assert frame is not None
        self.statements.append(frame.payload)
        for answer in self.answers:
            frames.send(answer if isinstance(answer, bytes) else encode_answer(answer))
            await frames.drain()
        while (frame := await frames.receive()) is not None:
            match frame_type(frame):
                case FrameType.BODY:
                    self.body += frame.payload
                case FrameType.BODY_END:
                    self.body_ended = True
                    if not self.hold:
                        return
                case _:
                    raise StreamBroken("closed")
        self.left.set()


async def to_the_end(stream: MemoryStream) -> None:
    """Read until the stream ends."""
    while await stream.receive():
        pass


@dataclass
class Bench:
    """A link, an executor, and one client connection with its request already read."""

    link: SocketBrokerLink
    executor: FakeExecutor
    client: MemoryStream
    server: ServerConnection

    async def relay(self, *, method: str = "GET", streamed: bool = False, expects: bool = False) -> HandoffResult:
        """Open a hand-off and relay it for the client."""
        plan = BodyPlan(kind="chunked") if streamed else None
        handoff = await self.link.open(request(plan, method))
        return await relay_handoff(self.server, handoff, method=method, streamed=streamed, expects_continue=expects)

    async def received(self) -> bytes:
        """All that the client got, to the end of the connection."""
        await self.server.stream.close()
        out = b""
        while data := await self.client.receive():
            out += data
        return out


@pytest.fixture
async def bench() -> AsyncIterator[Callable[..., object]]:
    """A maker of benches."""
    made: list[tuple[Bench, asyncio.Task[None], FdChannel]] = []

    async def make(
        *answers: Answer | bytes, raw: bytes = b"GET /x HTTP/1.1\r\nHost: shop.test\r\n\r\n", hold: bool = False
    ) -> Bench:
        near, far = channel_pair()
        channel = FdChannel(near)
        link = SocketBrokerLink([channel], clock=ManualClock(), random=CountingRandom())
        link.arm("worker-1", KEY)
        executor = FakeExecutor(FdChannel(far), list(answers), hold=hold)
        running = asyncio.get_running_loop().create_task(executor.run())
        client, server_stream = MemoryStream.pair()
        client.write(raw)
        server = ServerConnection(server_stream)
        assert await server.next_head() is not None
        made.append((Bench(link, executor, client, server), running, channel))
        return made[-1][0]

    yield make
    for one, running, channel in made:
        channel.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        one.executor.channel.close()


async def test_without_a_key_nothing_is_handed_off() -> None:
    """A worker that the vault has not welcomed has no broker."""
    near, far = channel_pair()
    channel = FdChannel(near)
    link = SocketBrokerLink([channel], clock=ManualClock(), random=CountingRandom())
    with pytest.raises(BrokerUnavailable):
        await link.open(request())
    link.arm("worker-1", b"short")
    with pytest.raises(BrokerUnavailable):
        await link.open(request())
    link.arm("worker-1", KEY)
    link.disarm()
    with pytest.raises(BrokerUnavailable):
        await link.open(request())
    channel.close()
    far.close()


async def test_without_an_executor_nothing_is_handed_off() -> None:
    """An executor that is gone takes nothing, and is not asked again."""
    near, far = channel_pair()
    far.close()
    link = SocketBrokerLink([FdChannel(near)], clock=ManualClock(), random=CountingRandom())
    link.arm("worker-1", KEY)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            await link.open(request())


async def test_the_next_executor_takes_what_a_dead_one_cannot() -> None:
    """One dead executor costs nothing."""
    dead_near, dead_far = channel_pair()
    dead_far.close()
    near, far = channel_pair()
    channel = FdChannel(near)
    link = SocketBrokerLink([FdChannel(dead_near), channel], clock=ManualClock(), random=CountingRandom())
    link.arm("worker-1", KEY)
    for _ in range(3):
        exchange = await link.open(request())
        await exchange.close()
    channel.close()
    far.close()


async def test_a_judged_body_and_its_plan_belong_together() -> None:
    """A plan without its body, or a body without its plan, is not sent."""
    near, far = channel_pair()
    channel = FdChannel(near)
    link = SocketBrokerLink([channel], clock=ManualClock(), random=CountingRandom())
    link.arm("worker-1", KEY)
    with pytest.raises(BrokerUnavailable):
        await link.open(request(BodyPlan.judged(b"x")))
    with pytest.raises(BrokerUnavailable):
        await link.open(request(), b"x")
    channel.close()
    far.close()


CUTS: list[tuple[str, list[Answer | bytes], str]] = [
    ("the executor leaves before any verdict", [b""], "broker-unavailable"),
    ("a head comes without a verdict", [HEAD], "broker-unavailable"),
    ("noise comes instead of a frame", [Continue(), encode_frame(99, b"x")], "broker-unavailable"),
    ("a frame beyond its bound", [Continue(), b"\xff\xff\xff\xff\x13"], "broker-unavailable"),
    ("data before a head", [Continue(), AnswerData(b"x")], "broker-unavailable"),
    ("an end before a head", [Continue(), AnswerEnd()], "broker-unavailable"),
]


@pytest.mark.parametrize(("sentence", "answers", "error"), CUTS, ids=[row[0] for row in CUTS])
async def test_a_broken_executor_is_a_refusal(
    bench: Callable[..., object], sentence: str, answers: list[Answer | bytes], error: str
) -> None:
    """Before a head went out, the client can still be told: nothing was written."""
    one = await bench(*answers)  # type: ignore[misc]
    handoff = await one.link.open(request())
    if answers[-1] != HEAD:
        handoff._frames.stream.write(b"\x00\x00\x00\x00\x03")  # BODY_END: lets the fake end its side
    result = await relay_handoff(one.server, handoff, method="GET", streamed=False)
    assert (result.error, result.head_sent, result.completed) == (error, False, False)
    assert await one.received() == b""


@pytest.mark.parametrize(
    "tail",
    [
        [AnswerAbort(reason="answer-withheld")],
        [Refusal(reason="no-rule")],
        [HEAD],
        [Continue(), encode_frame(99, b"")],
    ],
    ids=["abort", "a late refusal", "two heads", "noise"],
)
async def test_an_answer_cut_short_is_aborted_for_the_client(
    bench: Callable[..., object], tail: list[Answer | bytes]
) -> None:
    """After the head, anything but the end cuts the client's message: no well-formed short answer (2.4)."""
    one = await bench(Continue(), HEAD, AnswerData(b"part"), *tail)  # type: ignore[misc]
    result = await one.relay()
    assert result.error
    assert result.head_sent
    assert not result.completed
    assert one.server.must_close
    with pytest.raises(StreamBroken):
        await to_the_end(one.client)


async def test_a_refusal_leaves_the_client_untouched(bench: Callable[..., object]) -> None:
    """The lane answers refusals, in the client's own shape."""
    refusal = Refusal(reason="approval-required", ticket="t", retry_after=30)
    one = await bench(refusal)  # type: ignore[misc]
    result = await one.relay()
    assert result.refusal == refusal
    assert not result.head_sent
    assert await one.received() == b""


async def test_a_refusal_after_continue_is_a_refusal_too(bench: Callable[..., object]) -> None:
    """The broker's fixed 502 takes the place of the upstream's answer."""
    one = await bench(Continue(), Refusal(reason="answer-withheld"))  # type: ignore[misc]
    assert (await one.relay()).refusal == Refusal(reason="answer-withheld")


async def test_an_upstream_cannot_forge_a_refusal(bench: Callable[..., object]) -> None:
    """What came from upstream is payload of DATA, whatever it looks like."""
    forged = encode_answer(Refusal(reason="no-rule")) + encode_answer(AnswerEnd())
    one = await bench(Continue(), HEAD, AnswerData(forged), AnswerEnd())  # type: ignore[misc]
    result = await one.relay()
    assert result.completed
    assert result.refusal is None
    assert forged in await one.received()


async def test_the_statement_says_what_was_judged(bench: Callable[..., object]) -> None:
    """It is sealed under the worker's key, with a nonce and the time of sending."""
    one = await bench(Continue(), SIZED, AnswerData(b"hello"), AnswerEnd())  # type: ignore[misc]
    result = await one.relay()
    assert (result.status, result.bytes_down, result.completed) == (200, 5, True)
    (sealed,) = one.executor.statements
    statement = open_sealed(sealed, KEY)
    assert (statement.worker, statement.issued_at) == ("worker-1", ManualClock().wall())
    assert statement.evidence.token == "tok"
    received = await one.received()
    assert received.endswith(b"\r\n\r\nhello")
    assert b"Content-Length: 5\r\n" in received


async def test_nonces_differ(bench: Callable[..., object]) -> None:
    """No two statements are alike."""
    one = await bench(Refusal(reason="no-rule"))  # type: ignore[misc]
    for _ in range(2):
        await (await one.link.open(request())).close()
    while len(one.executor.statements) < 2:
        await asyncio.sleep(0)
    first, second = (open_sealed(sealed, KEY).nonce for sealed in one.executor.statements)
    assert first != second


async def test_a_streamed_body_waits_for_continue_and_arrives_whole(bench: Callable[..., object]) -> None:
    """The client's 100 Continue is the broker's yes."""
    raw = b"POST /x HTTP/1.1\r\nHost: shop.test\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    one = await bench(Continue(), SIZED, raw=raw)  # type: ignore[misc]
    relaying = asyncio.ensure_future(one.relay(method="POST", streamed=True, expects=True))
    assert (await one.client.receive()).startswith(b"HTTP/1.1 100 Continue\r\n")
    assert not one.executor.body
    payload = b"p" * 150_000
    one.client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload))
    result = await relaying
    assert hashlib.sha256(one.executor.body).digest() == hashlib.sha256(payload).digest()
    assert one.executor.body_ended
    assert result.bytes_up == len(payload)
    assert result.error  # the fake ended after the body, in the middle of its announced answer
    assert not result.completed


async def test_a_client_that_leaves_cancels_the_handoff(bench: Callable[..., object]) -> None:
    """The executor learns it at once."""
    one = await bench(Continue(), HEAD, AnswerData(b"first"), hold=True)  # type: ignore[misc]
    relaying = asyncio.ensure_future(one.relay())
    while b"first" not in await one.client.receive():
        pass
    one.client.abort()
    result = await relaying
    assert result.error
    assert not result.completed
    await one.executor.left.wait()


async def test_an_early_answer_leaves_the_rest_of_the_body(bench: Callable[..., object]) -> None:
    """An answer before the request's end is an answer; the lane is told that body is left."""
    raw = b"POST /x HTTP/1.1\r\nHost: shop.test\r\nContent-Length: 1000\r\n\r\nstart"
    one = await bench(Continue(), SIZED, AnswerData(b"early"), AnswerEnd(), raw=raw, hold=True)  # type: ignore[misc]
    result = await one.relay(method="POST", streamed=True)
    assert result.completed
    assert result.body_left


async def test_an_answer_to_head_has_no_body(bench: Callable[..., object]) -> None:
    """HEAD keeps the length that its GET would have."""
    head = AnswerHead(status=200, reason="OK", headers=(("Content-Length", "10"),), length=0)
    one = await bench(Continue(), head, AnswerEnd(), raw=b"HEAD /x HTTP/1.1\r\nHost: shop.test\r\n\r\n")  # type: ignore[misc]
    assert (await one.relay(method="HEAD")).completed
    received = await one.received()
    assert b"Content-Length: 10\r\n" in received
    assert received.endswith(b"\r\n\r\n")
