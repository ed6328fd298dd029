"""The two connections over in-memory streams: refusals, then transcripts, then any split of the bytes."""

import asyncio

import pytest

from net.http1 import CROWD, ClientConnection, ServerConnection
from net.stream import Limits, StreamBroken
from tests.support.streams import MemoryStream
from wire.heads import CHUNKED, NO_BODY, UNTIL_CLOSE, HeadRefused, Length, ResponseHead

OK = ResponseHead(200, "OK", "1.1", ())
GET = b"GET /a HTTP/1.1\r\nHost: ok.test\r\n\r\n"
HOST = b"Host: ok.test\r\n"


def server(limits: Limits | None = None) -> tuple[MemoryStream, ServerConnection]:
    client, inner = MemoryStream.pair()
    return client, ServerConnection(inner, limits or Limits())


def client(limits: Limits | None = None) -> tuple[ClientConnection, MemoryStream]:
    inner, origin = MemoryStream.pair()
    return ClientConnection(inner, limits or Limits()), origin


async def ask(connection: ClientConnection, method: str = "GET", **more) -> None:
    await connection.send_request(method, "/a", ((b"Host", b"ok.test"),), NO_BODY, **more)
    await connection.finish()


async def read_all(body) -> bytes:
    data = b""
    while (piece := await body.read()) is not None:
        data += piece
    return data


# --- towards the client: refusals ---


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"\x16\x03\x01", "bad-head"),
        (b"SSH-2.0-x\r\n", "bad-head"),
        (b"\r\n", "bad-head"),
        (b"GET /\r\n", "bad-head"),
        (b"GET /a HTTP/2.0\r\n", "bad-version"),
        (b"GET /a HTTP/1.1\nHost", "bad-head"),
        (b"GET /a HTTP/1.1\r\nX: " + b"y" * 70_000, "head-too-large"),
    ],
)
@pytest.mark.parametrize("step", [1, 100_000])
async def test_what_cannot_become_a_head_is_refused_before_it_is_whole(start, reason, step):
    """The client waits for nothing and sends no more: the refusal comes from the bytes alone."""
    peer, connection = server()
    for at in range(0, len(start), step):
        peer.write(start[at : at + step])
    with pytest.raises(HeadRefused) as refused:
        await connection.next_head()
    assert refused.value.reason == reason
    assert connection.must_close


async def test_a_head_that_never_ends_is_refused_after_its_time():
    """One byte now and then does not keep a connection: the bound is for the whole head."""
    peer, connection = server(Limits(head_timeout=0.05))
    peer.write(b"GET /a HT")

    async def drip() -> None:
        for _ in range(100):
            await asyncio.sleep(0.01)
            peer.write(b"P")

    dripping = asyncio.create_task(drip())
    with pytest.raises(HeadRefused) as refused:
        await connection.next_head()
    dripping.cancel()
    assert refused.value.reason == "client-timeout"


async def test_silence_before_a_head_is_a_clean_end():
    """Nobody is refused for opening a connection and saying nothing."""
    _, connection = server(Limits(head_timeout=0.02))
    assert await connection.next_head() is None
    assert connection.must_close


async def test_a_connection_that_ends_inside_a_head_is_broken():
    """Half a head is no request and no clean end."""
    peer, connection = server()
    peer.write(GET[:10])
    await peer.send_eof()
    with pytest.raises(StreamBroken, match="head"):
        await connection.next_head()


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0_2\r\nxx\r\n",
        b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nxx\r\n",
    ],
)
async def test_a_body_that_is_not_well_framed_is_refused(raw):
    """The refusal comes from read(), with the framing reason."""
    peer, connection = server()
    peer.write(raw)
    assert await connection.next_head()
    with pytest.raises(HeadRefused) as refused:
        await connection.read_body()
    assert refused.value.reason == "bad-framing"


async def test_chunks_of_one_byte_leave_others_a_turn():
    """Thousands of them in one read are decoded a few hundred at a time, with a turn for others; nothing is lost."""
    peer, connection = server()
    head = b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    bytes_sent = bytes(ord("a") + number % 26 for number in range(9000))
    peer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in bytes_sent) + b"0\r\n\r\nGET /next")
    assert await connection.next_head()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(other())
    body = connection.body()
    assert await read_all(body) == bytes_sent
    beside.cancel()
    assert turns >= 2 * len(bytes_sent) // CROWD - 2


async def test_what_is_left_of_a_crowded_read_is_not_ready():
    """A caller that takes only what is here gets a few hundred chunks, and then has to wait for its turn."""
    peer, connection = server()
    head = b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    peer.write(head + b"1\r\na\r\n" * 9000)
    assert await connection.next_head()
    body = connection.body()
    first, ready = body.read_nowait()
    assert ready
    assert first is not None
    assert len(first) <= CROWD
    assert body.read_nowait() == (None, False)
    assert await body.read()


async def test_a_body_over_its_bound_is_refused():
    """An announced length at once, chunks when they pass the bound."""
    peer, connection = server()
    peer.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 11\r\n\r\n")
    assert await connection.next_head()
    with pytest.raises(HeadRefused) as refused:
        connection.body(10)
    assert refused.value.reason == "body-too-large"
    peer, connection = server()
    peer.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nb\r\nhello world\r\n")
    assert await connection.next_head()
    with pytest.raises(HeadRefused):
        await connection.body(10).read()


async def test_a_body_that_is_cut_is_broken_not_short():
    """The end of the connection inside a body raises."""
    peer, connection = server()
    peer.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nabc")
    await peer.send_eof()
    await connection.next_head()
    assert await connection.read_body() == b"abc"
    with pytest.raises(StreamBroken) as broken:
        await connection.read_body()
    assert broken.value.kind == "truncated"


async def test_an_early_refusal_pauses_reading_and_closes():
    """A large upload that is refused is not read: our answer says close, and no further head is taken (T10)."""
    peer, connection = server()
    peer.write(b"PUT /a HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 20000000\r\n\r\n")
    assert await connection.next_head()
    peer.write(b"x" * 500_000)
    await connection.respond(ResponseHead(403, "No", "1.1", ()), b"no")
    answer = await peer.read_until(b"\r\n\r\n") + await peer.receive()
    assert answer == b"HTTP/1.1 403 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    assert connection.stream.bytes_in < 1000
    assert not await connection.discard_bounded()
    assert connection.stream.bytes_in < 600_000
    assert await connection.next_head() is None


async def test_lingering_is_bounded():
    """A client that keeps sending after its refusal is cut off."""
    peer, connection = server(Limits(discard_timeout=0.05))
    peer.write(b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 20000000\r\n\r\n" + b"x" * 200_000)
    await connection.next_head()
    await connection.respond(ResponseHead(403, "No", "1.1", ()))
    await connection.close()
    assert (await peer.read_all()).startswith(b"HTTP/1.1 403")
    peer.write(b"x")
    with pytest.raises(StreamBroken):
        await peer.drain()


async def test_an_answer_shorter_or_longer_than_announced_is_cut():
    """A wrong length is our own fault: the client must not take it for a whole message."""
    for data in (b"abc", b"abcdef"):
        peer, connection = server()
        peer.write(GET)
        await connection.next_head()
        await connection.send_head(OK, Length(5))
        with pytest.raises(ValueError, match="announced"):
            await _send(connection, data)
        with pytest.raises(StreamBroken):
            await peer.read_all()


async def _send(connection: ServerConnection, data: bytes) -> None:
    await connection.send_data(data)
    await connection.finish()


# --- towards the client: transcripts ---


async def test_two_requests_in_one_read_are_judged_one_by_one():
    """The second stays queued until the first was answered, and is never part of it."""
    peer, connection = server()
    peer.write(
        b"POST /allowed HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 3\r\n\r\nabcGET /forbidden HTTP/1.1\r\n"
        + HOST
        + b"\r\n"
    )
    first = await connection.next_head()
    assert first is not None
    assert (first.target, await read_all(connection.body())) == ("/allowed", b"abc")
    await connection.respond(OK, b"1")
    second = await connection.next_head()
    assert second is not None
    assert (second.method, second.target, second.headers) == ("GET", "/forbidden", ((b"Host", b"ok.test"),))
    assert connection.body_done


async def test_a_small_refused_body_keeps_the_connection():
    """What is already here and small is dropped, and the next request is answered."""
    peer, connection = server()
    peer.write(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc" + GET)
    await connection.next_head()
    await connection.respond(ResponseHead(403, "No", "1.1", ()))
    assert b"close" not in await peer.read_until(b"\r\n\r\n")
    assert await connection.next_head() is not None


async def test_the_answer_to_a_half_closed_request_leaves():
    """A client may end its side after the request and still gets its answer."""
    peer, connection = server()
    peer.write(GET)
    await peer.send_eof()
    assert await connection.next_head() is not None
    await connection.respond(OK, b"late")
    assert (await peer.receive()).endswith(b"late")
    assert await connection.next_head() is None


@pytest.mark.parametrize(
    ("version", "framing", "expected"),
    [
        (b"1.1", CHUNKED, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"),
        (b"1.1", UNTIL_CLOSE, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"),
        (b"1.1", Length(2), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"),
        (b"1.0", CHUNKED, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi"),
        (b"1.0", Length(2), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"),
    ],
)
async def test_answers_are_framed_for_the_client_that_asked(version, framing, expected):
    """Chunks for HTTP/1.1, the end of the connection for HTTP/1.0."""
    peer, connection = server()
    peer.write(GET.replace(b"1.1", version))
    await connection.next_head()
    await connection.send_head(OK, framing)
    await connection.send_data(b"hi")
    await connection.finish()
    await connection.close()
    assert await peer.read_all() == expected


async def test_head_answers_keep_their_length_and_have_no_body():
    """HEAD and 304 say how long the body would be."""
    peer, connection = server()
    peer.write(GET.replace(b"GET", b"HEAD") + GET)
    await connection.next_head()
    await connection.send_head(ResponseHead(200, "OK", "1.1", ((b"Content-Length", b"9"),)), NO_BODY)
    await connection.send_data(b"ignored")
    await connection.finish()
    assert await peer.receive() == b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    await connection.next_head()
    await connection.send_head(ResponseHead(304, "", "1.1", ((b"Content-Length", b"9"), (b"ETag", b"x"))), NO_BODY)
    await connection.finish()
    assert await peer.receive() == b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 9\r\n\r\n"


async def test_continue_is_sent_once_and_only_where_it_is_waited_for():
    """NeedsBody: our own 100; nothing for a client that did not ask or speaks HTTP/1.0."""
    peer, connection = server()
    peer.write(b"PUT /a HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    await connection.next_head()
    await connection.send_continue()
    await connection.send_continue()
    assert await peer.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
    peer.write(b"hi")
    assert await connection.read_body() == b"hi"
    for raw in (GET, GET.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nExpect: 100-continue\r\n")):
        peer, connection = server()
        peer.write(raw)
        await connection.next_head()
        await connection.send_continue()
        assert peer.receive_nowait() is None


async def test_what_was_read_beyond_a_connect_goes_with_the_stream():
    """A ClientHello sent at once after CONNECT is not lost."""
    peer, connection = server()
    peer.write(b"CONNECT ok.test:443 HTTP/1.1\r\nHost: ok.test:443\r\n\r\n\x16\x03\x01hello")
    await connection.next_head()
    await connection.send_head(ResponseHead(200, "OK", "1.1", ()), NO_BODY)
    stream = connection.detach()
    assert await stream.receive() == b"\x16\x03\x01hello"


# --- towards the origin ---


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>hello",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 204 X\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 204 X\r\n\r\nhi",
        b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nho",
        b"HTTP/1.1 103 Early\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nX: a\nY: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    ],
    ids=[
        "http/0.9",
        "tls",
        "cl+te",
        "204 with length",
        "204 with bytes",
        "101",
        "two answers",
        "interims",
        "lf",
        "big",
    ],
)
async def test_hostile_answers_are_one_refusal(answer):
    """Whatever the origin sends that is not one answer: upstream-protocol, and the connection is of no more use."""
    connection, origin = client()
    await ask(connection)
    origin.write(answer)

    async def until_final() -> None:
        while (await connection.next_response()).status < 200:
            pass

    with pytest.raises(HeadRefused) as refused:
        await until_final()
    assert refused.value.reason == "upstream-protocol"
    assert not connection.reusable


async def test_an_answer_before_its_request_is_refused():
    """Bytes that are already there cannot answer what was not asked."""
    connection, origin = client()
    origin.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(HeadRefused):
        await ask(connection)
    assert origin.receive_nowait() is None


async def test_an_idle_connection_that_spoke_or_ended_is_not_quiet():
    """A pool asks is_quiet() and drops what is not."""
    for unquiet in (lambda origin: origin.write(b"x"), lambda origin: origin.abort()):
        connection, origin = client()
        assert connection.is_quiet()
        unquiet(origin)
        assert not connection.is_quiet()
        with pytest.raises((HeadRefused, StreamBroken)):
            await ask(connection)


async def test_no_answer_at_all_is_told_from_a_started_one():
    """`answered` says whether a request may be tried again on a fresh connection."""
    connection, origin = client()
    await ask(connection)
    await origin.send_eof()
    with pytest.raises(StreamBroken):
        await connection.next_response()
    assert not connection.answered
    connection, origin = client()
    await ask(connection)
    origin.write(b"HTTP/1.1 2")
    await origin.send_eof()
    with pytest.raises(StreamBroken):
        await connection.next_response()
    assert connection.answered


@pytest.mark.parametrize("line", [b"HTTP/0.9 200 OK", b"HTTP/2 200", b"ICY 200 OK", b"HTTP/1.1 2000 X"])
async def test_a_refused_answer_is_an_answer(line):
    """B199: what came for a request was refused, so the request is not tried again on a fresh connection."""
    connection, origin = client()
    await ask(connection)
    origin.write(line + b"\r\n\r\n")
    with pytest.raises(HeadRefused):
        await connection.next_response()
    assert connection.answered


async def test_an_answer_that_does_not_come_times_out():
    """answer_timeout bounds the wait for a head."""
    connection, _ = client(Limits(answer_timeout=0.02))
    await ask(connection)
    with pytest.raises(StreamBroken) as broken:
        await connection.next_response()
    assert broken.value.kind == "idle-timeout"


async def test_a_connection_is_used_again_after_clean_answers_only():
    """Keep-alive, close, HTTP/1.0, until-close, unread body."""
    for answer, again in [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 304 X\r\nContent-Length: 2\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", False),
    ]:
        connection, origin = client()
        await ask(connection)
        origin.write(answer)
        await connection.next_response()
        if answer.endswith(b"hi"):
            assert not connection.reusable
        await read_all(connection.body())
        assert connection.reusable is again
        if again:
            await ask(connection)
            origin.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            assert (await connection.next_response()).status == 200


async def test_a_body_that_ends_with_the_connection_must_end_cleanly():
    """A clean end is the end of the body; a reset is not."""
    connection, origin = client()
    await ask(connection)
    origin.write(b"HTTP/1.1 200 OK\r\n\r\npart")
    await connection.next_response()
    body = connection.body()
    assert await body.read() == b"part"
    await origin.send_eof()
    assert await body.read() is None
    connection, origin = client()
    await ask(connection)
    origin.write(b"HTTP/1.1 200 OK\r\n\r\npart")
    await connection.next_response()
    assert await connection.body().read() == b"part"
    origin.abort()
    with pytest.raises(StreamBroken):
        await connection.body().read()


async def test_interim_answers_come_in_order_and_trailers_at_the_end():
    """100, 103, 200 in one read are three heads; trailers follow the body (E6)."""
    connection, origin = client()
    await ask(connection)
    origin.write(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 1\r\n\r\n"
    )
    assert [(await connection.next_response()).status for _ in range(3)] == [100, 103, 200]
    body = connection.body()
    assert await read_all(body) == b"hi"
    assert body.trailers == ((b"X-Sum", b"1"),)


async def test_requests_are_written_whole():
    """Head and first data leave in one write; a chunked body ends with its trailers."""
    connection, origin = client()
    await connection.send_request("POST", "/a", ((b"Host", b"h"),), CHUNKED)
    assert origin.receive_nowait() is None
    await connection.send_data(b"hello")
    await connection.finish(((b"X-T", b"1"),))
    assert await origin.receive() == (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-T: 1\r\n\r\n"
    )
