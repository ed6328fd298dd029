"""The worker's side of a hand-off: what the broker says arrives as it is, everything else breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from net.fdchannel import FdChannel, channel_pair
from net.framing import FrameStream
from net.stream import StreamBroken, open_socket_stream
from proxy.brokerlink import BrokerUnavailable, HandoffBroken, HandoffExchange, HandoffRequest, SocketBrokerLink
from tests.support.fakes import CountingRandom, ManualClock
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
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """The body ended."""

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
                    self.over.set()
                    if not self.hold:
                        return
                case _:
                    raise StreamBroken("closed")
        self.left.set()


@dataclass
class Bench:
    """A link and the executor at its other end."""

    link: SocketBrokerLink
    executor: FakeExecutor

    async def answers(self, body: BodyPlan | None = None, judged: bytes | None = None) -> list[Answer]:
        """Open a hand-off and take all its answers. Raises HandoffBroken."""
        exchange = await self.link.open(request(body), judged)
        found: list[Answer] = []
        try:
            while not found or not isinstance(found[-1], AnswerEnd | AnswerAbort | Refusal):
                found.append(await exchange.receive())
        finally:
            await exchange.close()
        return found


Make = Callable[..., Bench]


@pytest.fixture
async def bench() -> AsyncIterator[Make]:
    """A maker of benches."""
    made: list[tuple[Bench, asyncio.Task[None], FdChannel]] = []

    def make(*answers: Answer | bytes, hold: bool = False) -> Bench:
        near, far = channel_pair()
        channel = FdChannel(near)
        link = SocketBrokerLink([channel], clock=ManualClock(), random=CountingRandom())
        link.arm("worker-1", KEY)
        executor = FakeExecutor(FdChannel(far), list(answers), hold=hold)
        running = asyncio.get_running_loop().create_task(executor.run())
        made.append((Bench(link, executor), running, channel))
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


BROKEN: list[tuple[str, list[Answer | bytes]]] = [
    ("it leaves before any verdict", []),
    ("it leaves after its verdict", [Continue()]),
    ("it leaves in mid-body", [Continue(), HEAD, AnswerData(b"part")]),
    ("it leaves inside a frame", [Continue(), b"\x00\x00\x00\x09\x13half"]),
    ("noise instead of a frame", [Continue(), encode_frame(99, b"x")]),
    ("a frame of the other direction", [Continue(), encode_frame(FrameType.BODY, b"x")]),
    ("a frame beyond its bound", [Continue(), b"\xff\xff\xff\xff\x13"]),
]


@pytest.mark.parametrize(("sentence", "answers"), BROKEN, ids=[row[0] for row in BROKEN])
async def test_a_broken_executor_never_ends_an_answer_well(
    bench: Make, sentence: str, answers: list[Answer | bytes]
) -> None:
    """Whatever it does instead of END is a broken hand-off (2.4)."""
    one = bench(*answers)
    exchange = await one.link.open(request(BodyPlan(kind="chunked")))
    await exchange.finish_body()  # lets the fake end its side
    with pytest.raises(HandoffBroken):
        await to_the_end(exchange)
    await exchange.close()


async def to_the_end(exchange: HandoffExchange) -> None:
    """Take answers until the end of the exchange."""
    while not isinstance(await exchange.receive(), AnswerEnd | AnswerAbort | Refusal):
        pass


async def test_bytes_after_the_end_close_the_socket(bench: Make) -> None:
    """What follows an end belongs to nobody."""
    one = bench(Continue(), SIZED, AnswerEnd(), AnswerData(b"stray"), hold=True)
    await one.answers()
    await one.executor.left.wait()


async def test_an_upstream_cannot_forge_a_refusal(bench: Make) -> None:
    """What came from upstream is payload of DATA, whatever it looks like (11.5)."""
    forged = encode_answer(Refusal(reason="no-rule")) + encode_answer(AnswerEnd())
    one = bench(Continue(), HEAD, AnswerData(forged), AnswerEnd())
    assert await one.answers() == [Continue(), HEAD, AnswerData(forged), AnswerEnd()]


async def test_refusals_and_aborts_end_an_exchange(bench: Make) -> None:
    """Both are the broker's own words."""
    refusal = Refusal(reason="approval-required", ticket="t", retry_after=30)
    assert await bench(refusal).answers() == [refusal]
    assert await bench(Continue(), Refusal(reason="answer-withheld")).answers() == [
        Continue(),
        Refusal(reason="answer-withheld"),
    ]
    abort = AnswerAbort(reason="upstream-protocol")
    assert (await bench(Continue(), HEAD, abort).answers())[-1] == abort


async def test_the_statement_says_what_was_judged(bench: Make) -> None:
    """It is sealed under the worker's key, with a fresh nonce and the time of sending."""
    one = bench(Continue(), SIZED, AnswerData(b"hello"), AnswerEnd())
    for _ in range(2):
        await one.answers()
    first, second = (open_sealed(sealed, KEY) for sealed in one.executor.statements)
    assert (first.worker, first.issued_at) == ("worker-1", ManualClock().wall())
    assert (first.evidence.token, first.target, first.method) == ("tok", "/x", "GET")
    assert first.nonce != second.nonce


async def test_a_judged_body_follows_its_statement(bench: Make) -> None:
    """The executor has the very bytes before its verdict."""
    body = bytes(range(256)) * 1000
    one = bench(Continue(), SIZED, AnswerEnd())
    await one.answers(BodyPlan.judged(body), body)
    await one.executor.over.wait()
    assert bytes(one.executor.body) == body


async def test_a_streamed_body_arrives_whole(bench: Make) -> None:
    """In frames of bounded size, however large the pieces."""
    one = bench(Continue(), SIZED)
    exchange = await one.link.open(request(BodyPlan(kind="chunked"), "POST"))
    assert await exchange.receive() == Continue()
    payload = b"p" * 150_000
    await exchange.send_body(payload)
    await exchange.send_body(b"")
    await exchange.finish_body()
    await one.executor.over.wait()
    assert bytes(one.executor.body) == payload
    await exchange.close()


async def test_an_executor_that_does_not_read_holds_the_sender(bench: Make) -> None:
    """Back-pressure reaches the lane; leaving breaks it."""
    near, far = channel_pair()
    channel = FdChannel(near)
    link = SocketBrokerLink([channel], clock=ManualClock(), random=CountingRandom())
    link.arm("worker-1", KEY)
    receiver = FdChannel(far)
    exchange = await link.open(request(BodyPlan(kind="chunked"), "POST"))
    passed = await receiver.receive()
    assert passed is not None
    sending = asyncio.ensure_future(exchange.send_body(b"x" * (8 << 20)))
    while not getattr(exchange, "_frames").stream._write_paused:  # noqa: B009 - what is looked at is the real socket
        await asyncio.sleep(0)
    assert not sending.done()
    passed[1].close()
    with pytest.raises(HandoffBroken):
        await sending
    await exchange.close()
    channel.close()
    receiver.close()


async def test_a_client_that_leaves_cancels_the_call(bench: Make) -> None:
    """The executor learns it at once, also when cancelled twice."""
    one = bench(Continue(), HEAD, AnswerData(b"first"), hold=True)
    exchange = await one.link.open(request())
    while not isinstance(await exchange.receive(), AnswerData):
        pass
    exchange.cancel()
    exchange.cancel()
    await one.executor.left.wait()
    with pytest.raises(HandoffBroken):
        await exchange.receive()
    await exchange.close()
