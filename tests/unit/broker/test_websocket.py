"""Credentialed WebSockets: what ends one before a byte of it passes, then what passes, and what is recorded."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from broker.websocket import MESSAGE_BYTES, Waiting
from net.stream import StreamBroken
from net.websocket import MessageRefused
from proxy.brokerlink import HandoffExchange, HandoffRequest
from rules.placeholders import make
from tests.support.benches import Bench, Origin, running
from tests.support.calls import CANARY, PLACEHOLDER, policy
from tests.support.streams import MemoryStream
from wire.control import Cut
from wire.handoff import AnswerAbort, AnswerData, AnswerEnd, AnswerHead, Continue, Refusal, Upgraded
from wire.websocket import Frame, MessageReader, accept_value, apply_mask

CLIENT_KEY = "dGhlIHNhbXBsZSBub25jZQ=="
MASK = b"\x11\x22\x33\x44"
POLICY = """
version: 1
roles:
  dev:
    allow:
      - {name: talk, host: shop.test, methods: [GET], paths: [/talk], credential: shop, websocket: true}
      - name: short
        host: shop.test
        methods: [GET]
        paths: [/short]
        credential: shop
        websocket: true
        limits: {response: 1KiB, upload: 1KiB}
"""


def frame(opcode: int, payload: bytes = b"", *, masked: bool = True, final: bool = True) -> bytes:
    """One frame as a client (masked) or a server writes it."""
    size = len(payload)
    long = b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    length = bytes((size,)) if size < 126 else long
    first = bytes(((0x80 if final else 0) | opcode, (0x80 if masked else 0) | length[0])) + length[1:]
    return first + (MASK + apply_mask(payload, MASK) if masked else payload)


CLOSE = b"\x03\xe8"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """The bench under a policy with WebSockets."""
    async with running(policy(POLICY)) as made:
        yield made


class Talk:
    """The two ends of one upgraded hand-off."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.upstream: asyncio.Future[MemoryStream] = asyncio.get_running_loop().create_future()
        self.exchange: HandoffExchange
        self.upgraded: Upgraded
        self.last: object = None
        self.down = b""

    async def sent_up(self, count: int) -> list[Frame]:
        """The next `count` frames that reach the origin."""
        stream = await self.upstream
        reader, found = MessageReader(), []
        while len(found) < count:
            data = await stream.receive()
            assert data, found
            found += [item for unit in reader.feed(data) for item in unit]
        return found

    async def to_client(self, size: int) -> bytes:
        """The next `size` bytes that reach the client."""
        while len(self.down) < size:
            answer = await self.exchange.receive()
            assert isinstance(answer, AnswerData), answer
            self.down += answer.data
        out, self.down = self.down[:size], self.down[size:]
        return out

    async def to_the_end(self) -> bytes:
        """All that still reaches the client; `last` is the last answer."""
        while True:
            self.last = await self.exchange.receive()
            if not isinstance(self.last, AnswerData):
                out, self.down = self.down, b""
                return out
            self.down += self.last.data

    async def over(self) -> None:
        await self.exchange.close()
        await self.bench.settled()

    def outcome(self) -> dict[str, object]:
        (record,) = self.bench.journal.named("broker.outcome")
        return dict(record.fields)


async def received(talk: Talk) -> int:
    """How many bytes reached the origin before it was dropped."""
    stream, size = await talk.upstream, 0
    try:
        while data := await stream.receive():
            size += len(data)
    except StreamBroken:
        return size
    raise AssertionError("it ended cleanly")


def headers(*more: tuple[str, str], key: str = CLIENT_KEY) -> tuple[tuple[str, str], ...]:
    return (
        ("Host", "shop.test"),
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", key),
        ("X-Api-Key", PLACEHOLDER),
        *more,
    )


def asked(bench: Bench, path: str = "/talk", *more: tuple[str, str], key: str = CLIENT_KEY) -> HandoffRequest:
    name = "dev/" + path[1:]
    return bench.request(path, rule=name, operation=name, upgrade="websocket", headers=headers(*more, key=key))


def accepting(talk: Talk, *lines: str, accept: str | None = None) -> Callable[[Origin, MemoryStream], Awaitable[None]]:
    """An origin that accepts the handshake and gives its stream to the test."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        key = next(
            line.split(": ")[1]
            for line in origin.seen.decode().split("\r\n")
            if line.lower().startswith("sec-websocket-key")
        )
        answer = [
            "HTTP/1.1 101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {accept or accept_value(key)}",
            *lines,
        ]
        stream.write(("\r\n".join(answer) + "\r\n\r\n").encode())
        talk.upstream.set_result(stream)
        await asyncio.Event().wait()

    return script


async def opened(bench: Bench, path: str = "/talk", *more: tuple[str, str]) -> Talk:
    """A talk whose handshake went well."""
    talk = Talk(bench)
    bench.origin.script = accepting(talk)
    talk.exchange = await bench.link.open(asked(bench, path, *more))
    assert isinstance(await talk.exchange.receive(), Continue)
    answer = await talk.exchange.receive()
    assert isinstance(answer, Upgraded), answer
    talk.upgraded = answer
    return talk


@pytest.fixture(autouse=True)
async def end_origins(bench: Bench) -> AsyncIterator[None]:
    yield
    for task in bench.origin.tasks:
        task.cancel()


# --- the handshake: refusals ---


@pytest.mark.parametrize(
    ("sentence", "lines", "accept"),
    [
        ("the answer to another key", (), accept_value("AAAAAAAAAAAAAAAAAAAAAA==")),
        ("a subprotocol that was not offered", ("Sec-WebSocket-Protocol: evil",), None),
        ("an extension that we never offered", ("Sec-WebSocket-Extensions: permessage-deflate",), None),
    ],
)
async def test_an_acceptance_that_does_not_fit_is_no_websocket(
    bench: Bench, sentence: str, lines: tuple[str, ...], accept: str | None
) -> None:
    """Told as our own refusal, with one outcome; no byte of a frame passes (RFC 6455 4.1)."""
    talk = Talk(bench)
    bench.origin.script = accepting(talk, *lines, accept=accept)
    offered = (("Sec-WebSocket-Protocol", "chat, talk"), ("Sec-WebSocket-Extensions", "permessage-deflate"))
    talk.exchange = await bench.link.open(asked(bench, "/talk", *offered))
    assert isinstance(await talk.exchange.receive(), Continue)
    assert await talk.exchange.receive() == Refusal(reason="upstream-protocol"), sentence
    await talk.over()
    assert talk.outcome()["error"] == "upstream-protocol"


@pytest.mark.parametrize("key", ["short", "\u00e4" * 24, "AAAA"])
async def test_a_key_that_is_none_sends_nothing(bench: Bench, key: str) -> None:
    """The handshake is checked before a byte of it goes upstream."""
    answers = await bench.ask(asked(bench, key=key))
    assert answers == [Continue(), Refusal(reason="upgrade-refused")]
    assert not bench.origin.seen


async def test_an_upstream_that_does_not_upgrade_answers_as_ever(bench: Bench) -> None:
    """A 401 is an ordinary answer, shaped and scrubbed."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        stream.write(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(CANARY), CANARY))
        await stream.receive()

    bench.origin.script = script
    answers = await bench.ask(asked(bench))
    assert [item.status for item in answers if isinstance(item, AnswerHead)] == [401]
    assert CANARY not in repr(answers).encode()


# --- frames: refusals ---


@pytest.mark.parametrize(
    ("sentence", "payloads"),
    [
        ("in one message", [PLACEHOLDER.encode()]),
        ("of another sandbox", [make("sk_live_{24}", b"\x09" * 64).encode()]),
        ("percent-escaped", ["".join(f"%{ord(letter):02x}" for letter in PLACEHOLDER).encode()]),
        ("in two messages", [PLACEHOLDER[:20].encode(), PLACEHOLDER[20:].encode()]),
        ("far into a long one", [b"x" * 65_530 + PLACEHOLDER.encode()]),
    ],
)
async def test_a_placeholder_in_a_message_ends_it(bench: Bench, sentence: str, payloads: list[bytes]) -> None:
    """Not a byte of that message passes; the client gets Close 1008; alarm and outcome are on record (4.4, 7.5)."""
    talk = await opened(bench)
    for payload in payloads:
        await talk.exchange.send_body(frame(1, payload))
    told = await talk.to_the_end()
    assert told[:1] + told[2:4] == b"\x88\x03\xf0", sentence
    assert isinstance(talk.last, AnswerEnd)
    await talk.over()
    assert bench.journal.names() == ["placeholder.misused", "broker.outcome"]
    assert talk.outcome()["error"] == "placeholder-misuse"
    assert PLACEHOLDER not in repr(bench.journal.events)
    passed = len(frame(1, payloads[0])) if len(payloads) > 1 else 0
    assert talk.outcome()["bytes_up"] == sum(len(frame(1, payload)) for payload in payloads)
    assert (await received(talk)) == passed


@pytest.mark.parametrize(
    ("sentence", "from_client", "raw", "reason", "code"),
    [
        ("an unmasked frame of the client", True, frame(1, b"x", masked=False), "bad-protocol", 1002),
        ("a masked frame of the server", False, frame(1, b"x"), "upstream-protocol", 1011),
        ("a compressed frame", False, b"\xc1\x01x", "upstream-protocol", 1011),
        ("a message over the bound", False, b"\x81\x7f" + (MESSAGE_BYTES + 1).to_bytes(8), "response-too-large", 1009),
        ("a long message up", True, b"\x81\xff" + (MESSAGE_BYTES + 1).to_bytes(8) + MASK, "body-too-large", 1009),
    ],
)
async def test_a_frame_that_must_not_pass_ends_it(
    bench: Bench, sentence: str, from_client: bool, raw: bytes, reason: str, code: int
) -> None:
    """Both sides are cut; the client is told by a Close; one outcome says why."""
    talk = await opened(bench)
    if from_client:
        await talk.exchange.send_body(raw)
    else:
        (await talk.upstream).write(raw)
    told = await talk.to_the_end()
    assert int.from_bytes(told[2:4]) == code, sentence
    with pytest.raises(StreamBroken):
        await (await talk.upstream).receive()
    await talk.over()
    assert talk.outcome()["error"] == reason


async def test_what_a_rule_allows_down_bounds_the_conversation(bench: Bench) -> None:
    """`limits: {response}` counts every frame."""
    talk = await opened(bench, "/short")
    stream = await talk.upstream
    stream.write(frame(1, bytes(600), masked=False))
    await talk.to_client(604)
    stream.write(frame(1, bytes(600), masked=False))
    assert int.from_bytes((await talk.to_the_end())[2:4]) == 1009
    await talk.over()
    assert talk.outcome()["error"] == "response-too-large"


async def test_what_unfinished_messages_hold_is_bounded_for_all_together(bench: Bench) -> None:
    """Many conversations, each within its own bound, cannot fill the executor's memory: 1008, and all is given back."""
    waiting = bench.executor._waiting = Waiting(total=1000, one=600)
    first = await opened(bench)
    await first.exchange.send_body(frame(2, bytes(400), final=False))
    while waiting._total != 400:
        await asyncio.sleep(0)
    bench.origin.seen.clear()
    second = await opened(bench)
    await second.exchange.send_body(frame(2, bytes(400), final=False))
    assert int.from_bytes((await second.to_the_end())[2:4]) == 1008
    await second.exchange.close()
    await first.over()
    errors = sorted(str(event.fields["error"]) for event in bench.journal.named("broker.outcome"))
    assert errors == ["client-gone", "limit-reached"]
    assert (waiting._total, waiting._by_owner) == (0, {})


def test_one_sandbox_does_not_hold_what_belongs_to_all() -> None:
    """Its bound is smaller than the executor's; giving back is never refused."""
    waiting = Waiting(total=1000, one=600)
    waiting.change(("t", "one"), 0, 600)
    with pytest.raises(MessageRefused):
        waiting.change(("t", "one"), 600, 601)
    waiting.change(("t", "two"), 0, 399)
    with pytest.raises(MessageRefused):
        waiting.change(("t", "two"), 399, 400)
    waiting.change(("t", "one"), 601, 300)


async def test_a_cut_ends_it_with_what_was_counted(bench: Bench) -> None:
    """The sandbox ends: ABORT to the worker, the upstream dropped, one outcome with the bytes until then."""
    talk = await opened(bench)
    await talk.exchange.send_body(frame(1, b"hello"))
    await talk.sent_up(1)
    (await talk.upstream).write(frame(1, b"hi", masked=False))
    await talk.to_client(4)
    async with asyncio.timeout(60):
        assert await bench.executor.cut(Cut(id=1, kind="sandbox", tenant=bench.box.tenant, subject=bench.box.id)) >= 1
    await talk.to_the_end()
    assert talk.last == AnswerAbort(reason="sandbox-ended")
    with pytest.raises(StreamBroken):
        await (await talk.upstream).receive()
    await talk.over()
    outcome = talk.outcome()
    assert (outcome["error"], outcome["bytes_up"], outcome["bytes_down"]) == ("sandbox-ended", 11, 4)
    assert [done.sent for done in bench.vault.dones] == [True]


async def test_a_client_that_vanishes_ends_it(bench: Bench) -> None:
    """The worker cancels: the upstream is dropped at once."""
    talk = await opened(bench)
    talk.exchange.cancel()
    with pytest.raises(StreamBroken):
        await (await talk.upstream).receive()
    await talk.over()
    assert talk.outcome()["error"] == "client-gone"


async def test_an_upstream_that_vanishes_is_told(bench: Bench) -> None:
    """Close 1011 for the client instead of silence."""
    talk = await opened(bench)
    (await talk.upstream).abort()
    assert int.from_bytes((await talk.to_the_end())[2:4]) == 1011
    await talk.over()
    assert talk.outcome()["error"] == "upstream-protocol"


# --- scrubbing ---


@pytest.mark.parametrize(
    ("sentence", "frames"),
    [
        ("in a text message", [(1, b"a " + CANARY + b" b", True)]),
        ("in a binary message", [(2, CANARY, True)]),
        ("across frames", [(1, CANARY[:7], False), (0, CANARY[7:20], False), (0, CANARY[20:], True)]),
        ("in base64", [(1, base64.b64encode(CANARY), True)]),
        ("in a ping", [(9, CANARY, True)]),
    ],
)
async def test_a_secret_in_a_message_is_masked_at_its_length(
    bench: Bench, sentence: str, frames: list[tuple[int, bytes, bool]]
) -> None:
    """Frames keep their number, heads and lengths; the vault is told at once (7.1)."""
    talk = await opened(bench)
    raw = b"".join(frame(opcode, payload, masked=False, final=final) for opcode, payload, final in frames)
    stream = await talk.upstream
    for at in range(0, len(raw), 5):
        stream.write(raw[at : at + 5])
    clean = await talk.to_client(len(raw))
    seen = [item for unit in MessageReader().feed(clean) for item in unit]
    assert [(item.opcode, len(item.payload), item.final) for item in seen] == [
        (opcode, len(payload), final) for opcode, payload, final in frames
    ]
    shown = b"".join(item.payload for item in seen)
    assert b"*" * 12 in shown, sentence
    assert CANARY[10:22] not in shown
    assert [echo.hits for echo in bench.vault.echoes] == [1]
    await talk.over()
    assert talk.outcome()["redacted"] == 1


async def test_the_third_message_with_the_secret_ends_it(bench: Bench) -> None:
    """Two are masked; the third does not pass at all, as three disarm the credential."""
    talk = await opened(bench)
    stream = await talk.upstream
    raw = frame(1, CANARY, masked=False)
    stream.write(raw)
    await talk.to_client(len(raw))
    stream.write(raw)
    await talk.to_client(len(raw))
    stream.write(raw)
    assert int.from_bytes((await talk.to_the_end())[2:4]) == 1008
    await talk.over()
    assert talk.outcome()["error"] == "secret-echoed"
    assert len(bench.vault.echoes) == 3


# --- what passes ---


async def test_the_secret_goes_up_once_and_nothing_is_compressed(bench: Bench) -> None:
    """The handshake carries it; the extension is not offered; only accept and the chosen subprotocol come back."""
    talk = Talk(bench)
    bench.origin.script = accepting(
        talk, "Sec-WebSocket-Protocol: talk", "Set-Cookie: a=b", "X-Secret: " + CANARY.decode()
    )
    offered = (("Sec-WebSocket-Protocol", "chat, talk"), ("Sec-WebSocket-Extensions", "permessage-deflate"))
    talk.exchange = await bench.link.open(asked(bench, "/talk", *offered))
    assert isinstance(await talk.exchange.receive(), Continue)
    answer = await talk.exchange.receive()
    assert isinstance(answer, Upgraded)
    assert {name.lower(): value for name, value in answer.headers} == {
        "sec-websocket-accept": accept_value(CLIENT_KEY),
        "sec-websocket-protocol": "talk",
    }
    seen = bytes(bench.origin.seen)
    assert seen.count(CANARY) == 1
    assert PLACEHOLDER.encode() not in seen
    assert b"permessage" not in seen.lower()
    assert b"chat, talk" in seen
    await talk.over()


async def test_a_conversation_passes_unchanged_both_ways(bench: Bench) -> None:
    """T13: text, fragments around a ping, 2 MiB, Close: payloads as sent, masked anew, counted, one outcome."""
    talk = await opened(bench)
    large = bytes(range(256)) * 8192
    up = [
        frame(1, "grüße".encode()),
        frame(2, b"ab", final=False) + frame(9, b"?") + frame(0, b"cd"),
        frame(2, large),
        frame(8, CLOSE),
    ]
    for raw in up:
        await talk.exchange.send_body(raw)
    arrived = await talk.sent_up(6)
    assert [(item.opcode, item.payload, item.final) for item in arrived] == [
        (1, "grüße".encode(), True),
        (9, b"?", True),
        (2, b"ab", False),
        (0, b"cd", True),
        (2, large, True),
        (8, CLOSE, True),
    ]
    masks = {item.mask for item in arrived}
    assert len(masks) == 6
    assert MASK not in masks
    stream = await talk.upstream
    down = frame(10, b"?", masked=False) + frame(2, large, masked=False) + frame(8, CLOSE, masked=False)
    stream.write(down)
    assert await talk.to_client(len(down)) == down
    await stream.close()
    assert await talk.to_the_end() == b""
    assert isinstance(talk.last, AnswerEnd)
    await talk.over()
    assert bench.journal.names() == ["broker.outcome"]
    outcome = talk.outcome()
    assert (outcome["status"], outcome["completed"], outcome.get("error")) == (101, True, None)
    assert (outcome["bytes_up"], outcome["bytes_down"]) == (len(b"".join(up)), len(down))
    assert outcome["effect"] == "write"
    assert not bench.vault.echoes


async def test_a_side_that_ends_between_frames_ends_well(bench: Bench) -> None:
    """A clean end of the client's side between frames is passed on; the upstream then ends it."""
    talk = await opened(bench)
    await talk.exchange.finish_body()
    stream = await talk.upstream
    assert await stream.receive() == b""
    await stream.close()
    assert await talk.to_the_end() == b""
    assert isinstance(talk.last, AnswerEnd)
    await talk.over()
    assert talk.outcome().get("error") is None
