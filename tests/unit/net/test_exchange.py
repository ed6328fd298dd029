"""The exchange over in-memory streams: what must end badly first, then what passes, then every split of the bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.exchange import AnswerRefused, ExchangeResult, OutgoingRequest, exchange
from net.http1 import ClientConnection, ServerConnection
from net.stream import Limits, StreamBroken
from tests.support.streams import MemoryStream
from wire.heads import HeadRefused, RequestHead, ResponseHead, requested_upgrade, strip_never_forwarded
from wire.websocket import accept_value

HOST = b"Host: ok.test\r\n"
GET = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="


def same(head: ResponseHead) -> ResponseHead:
    return head


@dataclass
class Scene:
    """Client, lane and origin; `serve()` relays requests until the connection ends, as a lane would."""

    limits: Limits = field(default_factory=lambda: Limits(discard_timeout=0.05))
    on_response: Callable[[ResponseHead], ResponseHead] = same
    transform: object = None
    relay_interim: bool = True
    more: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client, inner = MemoryStream.pair()
        outer, self.origin = MemoryStream.pair()
        self.server = ServerConnection(inner, self.limits)
        self.upstream = ClientConnection(outer, self.limits)
        self.results: list[ExchangeResult] = []
        self.targets: list[str] = []

    async def once(self, head: RequestHead) -> ExchangeResult:
        request = OutgoingRequest(
            method=head.method,
            target=head.target,
            headers=strip_never_forwarded(head.headers),
            framing=self.server.framing,
            upgrade=requested_upgrade(head),
            **self.more,
        )
        return await exchange(
            self.server,
            self.upstream,
            request,
            on_response=self.on_response,
            transform=self.transform,
            relay_interim=self.relay_interim,
        )

    async def serve(self) -> None:
        try:
            while (head := await self.server.next_head()) is not None:
                self.targets.append(head.target)
                result = await self.once(head)
                self.results.append(result)
                if result.upgraded:
                    return
                if result.error and not result.head_sent and result.error != "client-gone":
                    await self.server.respond(ResponseHead(502, "Refused", "1.1", ()), result.error.encode())
                if result.error:
                    break
                await self.server.discard_bounded()
        except HeadRefused as refused:
            await self.server.respond(ResponseHead(400, "Refused", "1.1", ()), refused.reason.encode())
        except StreamBroken:
            pass
        await self.server.close()

    async def __aenter__(self) -> "Scene":
        self.task = asyncio.create_task(self.serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.abort()
        self.origin.abort()
        await self.task


async def run(scene: Scene, sent: bytes, answer: bytes, *, end: bool = False) -> bytes:
    """The client sends `sent`, the origin `answer` once it was asked; what the client got until the end."""
    async with scene:
        scene.client.write(sent)
        await scene.client.send_eof()
        await scene.origin.read_until(b"\r\n\r\n")
        scene.origin.write(answer)
        if end:
            await scene.origin.send_eof()
        return await scene.client.read_all()


# --- what must end badly ---


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>hello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 204 X\r\n\r\nhi",
        OK + OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x\r\nhi\r\n",
        b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=["http/0.9", "cl+te", "204 with bytes", "two answers", "two answers, chunked", "bad chunk", "101"],
)
async def test_a_hostile_answer_becomes_one_refusal(answer):
    """Nothing of it reaches the client, and its connection is dropped (B197, B199)."""
    scene = Scene()
    got = await run(scene, GET, answer)
    assert got.startswith(b"HTTP/1.1 502 Refused\r\n")
    assert got.endswith(b"upstream-protocol")
    assert not scene.upstream.reusable
    assert (scene.results[0].error, scene.results[0].completed) == ("upstream-protocol", False)


async def test_a_thousand_interim_answers_are_cut_at_the_bound():
    """Sixteen pass, then the exchange is refused."""
    scene = Scene()
    got = await run(scene, GET, b"HTTP/1.1 103 Early\r\n\r\n" * 1000)
    assert got.count(b"HTTP/1.1 103") == 16
    assert got.endswith(b"upstream-protocol")


@pytest.mark.parametrize("framing", [b"Content-Length: 100000\r\n\r\nhi", b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi"])
async def test_a_cut_answer_reaches_the_client_as_cut(framing):
    """The head and a part went out: the client sees a broken message, not a short whole one (RULINGS 2.4)."""
    scene = Scene()
    async with scene:
        scene.client.write(GET)
        await scene.origin.read_until(b"\r\n\r\n")
        scene.origin.write(b"HTTP/1.1 200 OK\r\n" + framing)
        await scene.client.read_until(b"hi")
        await scene.origin.send_eof()
        with pytest.raises(StreamBroken):
            await scene.client.read_all()
    assert scene.results[0].head_sent
    assert scene.results[0].error == "upstream-protocol"


async def test_an_answer_that_was_cut_before_anything_was_sent_is_refused():
    """Head, half a body and the end in one read: a plain refusal."""
    got = await run(Scene(), GET, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", end=True)
    assert got.endswith(b"upstream-protocol")


async def test_an_origin_that_only_ends_is_told_so():
    """No byte of an answer: the caller may try once more on a fresh connection."""
    scene = Scene()
    assert b" 502 " in await run(scene, GET, b"", end=True)
    assert not scene.results[0].answered


async def test_an_origin_that_says_nothing_times_out():
    """answer_timeout becomes upstream-timeout."""
    scene = Scene(limits=Limits(answer_timeout=0.02))
    assert (await run(scene, GET, b"")).endswith(b"upstream-timeout")


async def test_an_exchange_has_a_longest_time():
    """A drip that never stops is cut at exchange_timeout (B087)."""
    scene = Scene(limits=Limits(exchange_timeout=0.05))
    with pytest.raises(StreamBroken):
        await run(scene, GET, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx")
    assert scene.results[0].error == "limit-reached"


async def test_an_answer_over_its_bound_is_refused():
    """Announced: refused before the head; chunked: cut."""
    scene = Scene(more={"response_limit": 1})
    assert (await run(scene, GET, OK)).endswith(b"response-too-large")


async def test_an_answer_that_the_caller_refuses_is_not_sent():
    """AnswerRefused from on_response: its reason, nothing of the answer."""

    def no(head: ResponseHead) -> ResponseHead:
        raise AnswerRefused("answer-withheld")

    assert (await run(Scene(on_response=no), GET, OK)).endswith(b"answer-withheld")


async def test_a_fault_in_a_callback_cuts_the_origin_and_is_raised():
    """A callback that raises is no refusal: it propagates, and the upstream connection is gone."""

    def broken(head: ResponseHead) -> ResponseHead:
        raise ZeroDivisionError

    scene = Scene(on_response=broken)
    scene.client.write(GET)
    head = await scene.server.next_head()
    assert head is not None
    scene.origin.write(b"")
    asking = asyncio.create_task(scene.once(head))
    await scene.origin.read_until(b"\r\n\r\n")
    scene.origin.write(OK)
    with pytest.raises(ZeroDivisionError):
        await asking
    with pytest.raises(StreamBroken):
        await scene.origin.receive()
    assert scene.client.receive_nowait() is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"0_2\r\n", b"bad-framing"), (b"2\r\nxxx\r\n", b"bad-framing"), (b"8\r\n12345678\r\n", b"body-too-large")],
)
@pytest.mark.parametrize("late", [False, True])
async def test_a_body_that_breaks_its_framing_never_ends_well_upstream(body, reason, late):
    """The origin sees a cut request, the client the reason; also when the body comes after the head."""
    scene = Scene(more={"request_limit": 4})
    async with scene:
        scene.client.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
        if late:
            await scene.origin.read_until(b"\r\n\r\n")
        scene.client.write(body)
        assert (await scene.client.read_until(reason)).startswith(b"HTTP/1.1 502")
        with pytest.raises(StreamBroken):
            await scene.origin.read_all()


async def test_a_client_that_resets_cuts_the_origin():
    """While the origin thinks, and nobody reads from the client."""
    scene = Scene()
    async with scene:
        scene.client.write(GET)
        await scene.origin.read_until(b"\r\n\r\n")
        scene.client.abort()
        with pytest.raises(StreamBroken):
            await scene.origin.read_all()
    assert scene.results[0].error == "client-gone"


async def test_a_client_that_resets_while_sending_cuts_the_origin():
    """Half an upload is never a whole one."""
    scene = Scene()
    async with scene:
        scene.client.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\n12345")
        await scene.origin.read_until(b"12345")
        scene.client.abort()
        with pytest.raises(StreamBroken):
            await scene.origin.read_all()
    assert scene.results[0].error == "client-gone"


# --- what passes ---


async def test_two_pipelined_requests_are_two_exchanges():
    """The origin sees two heads with their own targets, in order, each after the first answer."""
    scene = Scene()
    async with scene:
        scene.client.write(b"POST /one HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\nx" + GET)
        assert (await scene.origin.read_until(b"\r\n\r\nx")).startswith(b"POST /one HTTP/1.1\r\nHost: ok.test\r\n")
        assert scene.origin.receive_nowait() is None
        scene.origin.write(OK)
        assert await scene.origin.read_until(b"\r\n\r\n") == GET
        scene.origin.write(OK)
        assert await scene.client.read_exactly(2 * len(OK)) == OK + OK


async def test_expect_is_relayed_and_so_is_every_interim_answer():
    """The origin's own 100 lets the client send; 103 passes; the body follows (T10)."""
    scene = Scene()
    async with scene:
        scene.client.write(b"PUT /a HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        head = await scene.origin.read_until(b"\r\n\r\n")
        assert b"Expect: 100-continue\r\n" in head
        assert scene.client.receive_nowait() is None
        scene.origin.write(b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 103 Early\r\nLink: <a>\r\n\r\n")
        assert await scene.client.read_until(b"<a>\r\n\r\n") == (
            b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 103 Early\r\nLink: <a>\r\n\r\n"
        )
        scene.client.write(b"data")
        assert await scene.origin.read_until(b"data") == b"data"
        scene.origin.write(OK)
        assert await scene.client.read_until(b"hi") == OK
    assert scene.results[0].interims == 2
    assert scene.results[0].bytes_up == 4


async def test_credentialed_answers_keep_their_interims_but_100():
    """relay_interim off: a bare 100 passes, 103 does not (RULINGS 11.11)."""
    scene = Scene(relay_interim=False)
    got = await run(scene, GET, b"HTTP/1.1 103 E\r\nX: y\r\n\r\nHTTP/1.1 100 C\r\nX: y\r\n\r\n" + OK)
    assert got == b"HTTP/1.1 100 Continue\r\n\r\n" + OK


async def test_an_early_answer_passes_while_the_body_is_still_being_sent():
    """The client gets it at once; the request is not taken for finished, and neither connection goes on."""
    scene = Scene()
    async with scene:
        scene.client.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000\r\n\r\nstart")
        await scene.origin.read_until(b"start")
        scene.origin.write(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno")
        got = await scene.client.read_until(b"no")
        assert got.startswith(b"HTTP/1.1 403 No\r\n")
        assert b"Connection: close\r\n" in got
    assert scene.results[0].completed
    assert not scene.upstream.reusable
    assert len(scene.results) == 1


async def test_both_directions_flow_at_once():
    """Request pieces and answer pieces alternate in one exchange (duplex)."""
    scene = Scene()
    async with scene:
        scene.client.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
        await scene.origin.read_until(b"\r\n\r\n")
        scene.origin.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await scene.client.read_until(b"\r\n\r\n")
        for _ in range(3):
            scene.client.write(b"4\r\nping\r\n")
            await scene.origin.read_until(b"ping\r\n")
            scene.origin.write(b"4\r\npong\r\n")
            assert await scene.client.read_until(b"pong\r\n") == b"4\r\npong\r\n"
        scene.client.write(b"0\r\nX-Up: 1\r\nX-Forwarded-For: 9.9.9.9\r\n\r\n")
        assert await scene.origin.read_until(b"\r\n\r\n") == b"0\r\nX-Up: 1\r\n\r\n"
        scene.origin.write(b"0\r\nX-Down: 1\r\n\r\n")
        assert await scene.client.read_until(b"\r\n\r\n") == b"0\r\nX-Down: 1\r\n\r\n"
    assert scene.upstream.exchanges == 1


async def test_events_reach_the_client_as_they_are_sent():
    """Head first, then each event by itself, while the answer goes on (T14)."""
    scene = Scene()
    async with scene:
        scene.client.write(GET)
        await scene.origin.read_until(b"\r\n\r\n")
        scene.origin.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        await scene.client.read_until(b"\r\n\r\n")
        for _ in range(3):
            scene.origin.write(b"data: x\n\n")
            assert await scene.client.read_until(b"\n\n\r\n") == b"9\r\ndata: x\n\n\r\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nhi", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", OK),
        (b"HTTP/1.1 204 X\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 204 X\r\n\r\n"),
        (b"HTTP/1.1 304 X\r\nContent-Length: 7\r\n\r\n", b"HTTP/1.1 304 X\r\nContent-Length: 7\r\n\r\n"),
        (
            b"HTTP/1.0 200 OK\r\nAlt-Svc: h3\r\nConnection: x-v\r\nX-V: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        ),
    ],
)
async def test_answers_are_written_anew(answer, expected):
    """Whole small answers get a length; fields of one connection and those aimed at us stay behind."""
    assert (await run(Scene(), GET, answer, end=True)).replace(b"Connection: close\r\n", b"") == expected


@pytest.mark.parametrize(
    ("lines", "end", "expected"),
    [
        (
            b"Trailer: X-S\r\n",
            b"X-S: 1\r\n",
            b"Trailer: X-S\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-S: 1\r\n\r\n",
        ),
        (b"Trailer: X-S\r\n", b"", b"Trailer: X-S\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"),
        (b"Connection: trailer\r\nTrailer: X-S\r\n", b"", b"Content-Length: 2\r\n\r\nhi"),
    ],
    ids=["announced", "announced and absent", "nominated"],
)
async def test_trailers_pass_with_their_announcement(lines, end, expected):
    """C068: after the body they belong to; a field that Connection nominates stays behind as ever."""
    answer = b"HTTP/1.1 200 OK\r\n" + lines + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n" + end + b"\r\n"
    got = await run(Scene(), GET, answer, end=True)
    assert got == b"HTTP/1.1 200 OK\r\n" + expected


async def test_a_head_answer_keeps_its_length():
    """HEAD: the length passes, no body is waited for."""
    got = await run(Scene(), GET.replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")
    assert got == b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"


async def test_a_judged_body_is_sent_as_it_was_judged():
    """`body`: those very bytes with their length; the client is not read again."""
    scene = Scene(more={"body": b"judged"})
    async with scene:
        scene.client.write(GET)
        assert (await scene.origin.read_until(b"judged")).endswith(b"Content-Length: 6\r\n\r\njudged")
        scene.origin.write(OK)
        assert await scene.client.read_until(b"hi") == OK


class Upper:
    keeps_length = True
    holds_head = False

    async def feed(self, data: bytes) -> AsyncIterator[bytes]:
        yield data.upper()

    async def finish(self) -> AsyncIterator[bytes]:
        yield b""


class Reverse:
    """Says nothing before it has everything."""

    keeps_length = False
    holds_head = True
    held = b""

    async def feed(self, data: bytes) -> AsyncIterator[bytes]:
        self.held += data
        if b"secret" in self.held:
            raise AnswerRefused("answer-withheld")
        yield b""

    async def finish(self) -> AsyncIterator[bytes]:
        yield self.held[::-1]


async def test_transforms_change_the_answer_and_its_framing():
    """Same length: the length stays. Head held: sent at the end with the new length. Refused: nothing was sent."""
    assert await run(Scene(transform=Upper()), GET, OK) == OK[:-2] + b"HI"
    assert await run(Scene(transform=Reverse()), GET, OK) == OK[:-2] + b"ih"
    refused = await run(Scene(transform=Reverse()), GET, OK.replace(b"2\r\n", b"6\r\n").replace(b"hi", b"secret"))
    assert refused.endswith(b"answer-withheld")
    assert b"secret" not in refused


def handshake(fields: bytes = b"") -> bytes:
    return (
        b"GET /ws HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: " + KEY.encode() + b"\r\n" + fields + b"\r\n"
    )


async def test_a_101_with_a_wrong_accept_value_is_refused():
    """Only the answer to this very handshake opens a WebSocket."""
    bad = b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAA\r\n\r\n"
    assert (await run(Scene(), handshake(), bad)).endswith(b"upstream-protocol")


async def test_a_right_101_hands_both_streams_over():
    """The client's early frame and the origin's early frame are still there."""
    scene = Scene()
    scene.client.write(handshake() + b"\x81\x80\0\0\0\0")
    serving = asyncio.create_task(scene.serve())
    head = await scene.origin.read_until(b"\r\n\r\n")
    assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n" in head
    accept = accept_value(KEY).encode()
    scene.origin.write(
        b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
        + accept
        + b"\r\n\r\n\x81\x00"
    )
    await serving
    assert scene.results[0].upgraded
    assert (await scene.client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 X\r\nSec-WebSocket-Accept: ")
    assert await scene.server.detach().receive() == b"\x81\x80\0\0\0\0"
    assert await scene.upstream.detach().receive() == b"\x81\x00"


# --- every split ---

SENT = (
    b"POST /one?x=%20 HTTP/1.1\r\n" + HOST + b"X-Forwarded-For: 1.1.1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6\r\n world\r\n0\r\nX-T: 1\r\n\r\n"
    b"GET /two HTTP/1.1\r\n" + HOST + b"\r\n"
    b"PUT /three HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc"
    b"GET /bad HTTP/1.1\r\n" + HOST + b"X: a\nb\r\n\r\n"
)
UNCHUNKED = [b"POST /one?x=%20", b"hello world", b"GET /two", b"PUT /three", b"abc"]


def without_chunks(data: bytes) -> bytes:
    """Upstream bytes with chunk boundaries taken out (where they lie depends on the reads, and may)."""
    head, empty, rest = data.partition(b"\r\n\r\n")
    if b"Transfer-Encoding: chunked" not in head:
        if not empty:
            return data
        length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length")), 0)
        return head + empty + rest[:length] + without_chunks(rest[length:])
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            trailers, _, rest = rest.partition(b"\r\n\r\n")
            return head + empty + body + trailers + without_chunks(rest)
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


async def transcript(pieces: list[bytes], answers: list[bytes]) -> tuple[bytes, bytes, list[str]]:
    """(what the origin got, what the client got, targets judged) for one split of both sides."""
    scene = Scene()
    async with scene:

        async def originate() -> bytes:
            got = b""
            for ending in (b"X-T: 1\r\n\r\n", b"\r\n\r\n", b"abc"):
                got += await scene.origin.read_until(ending)
                await scene.origin.write_pieces(answers)
            return got

        origin = asyncio.create_task(originate())
        await scene.client.write_pieces(pieces)
        client = await scene.client.read_all()
        async with asyncio.timeout(60):
            return without_chunks(await origin), client, scene.targets


def cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    cuts = sorted({at for at in cuts if 0 < at < len(raw)})
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(0, len(SENT)), max_size=25), st.lists(st.integers(0, len(OK)), max_size=6))
def test_any_split_gives_the_same_parse_and_the_same_upstream_bytes(cuts, answer_cuts):
    """Four pipelined requests, the last one bad: what is judged, sent and answered does not depend on the reads."""
    whole = asyncio.run(transcript([SENT], [OK]))
    assert whole[2] == ["/one?x=%20", "/two", "/three"]
    assert whole[1].count(b"HTTP/1.1 200 OK") == 3
    assert whole[1].endswith(b"bad-head")
    assert b"/bad" not in whole[0]
    assert b"X-Forwarded-For" not in whole[0]
    assert asyncio.run(transcript(cut(SENT, cuts), cut(OK, answer_cuts))) == whole


def test_one_byte_at_a_time_gives_the_same():
    """The worst split there is."""
    whole = asyncio.run(transcript([SENT], [OK]))
    assert asyncio.run(transcript([SENT[i : i + 1] for i in range(len(SENT))], cut(OK, list(range(len(OK)))))) == whole
