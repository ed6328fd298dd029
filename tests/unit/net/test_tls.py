"""The TLS layer over in-memory streams: failures first, then both half-closes, initial bytes and back-pressure."""

import asyncio
import ssl

import pytest
import trustme

from net import tls
from net.stream import StreamBroken
from tests.support.streams import MemoryStream

CA = trustme.CA()
LEAF = CA.issue_cert("ok.test")


def server_context(alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    LEAF.configure_cert(context)
    context.set_alpn_protocols(list(alpn))
    return context


def client_context(*, trust: bool = True, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(list(alpn))
    if trust:
        CA.configure_trust(context)
    return context


async def both(*, trust: bool = True, name: str = "ok.test"):
    near, far = MemoryStream.pair()
    return await asyncio.gather(
        tls.client_side(near, client_context(trust=trust), name),
        tls.server_side(far, server_context()),
        return_exceptions=True,
    )


async def test_a_certificate_for_another_name_is_refused():
    """The client side verifies the name it was given."""
    client, server = await both(name="evil.test")
    assert isinstance(client, tls.PeerCertificateRefused)
    assert isinstance(server, StreamBroken)


async def test_a_client_that_does_not_trust_our_ca_is_told_apart():
    """Its alert becomes ClientDistrustsCa, so that status can name the variable to set (RULINGS 5.8)."""
    client, server = await both(trust=False)
    assert isinstance(client, tls.PeerCertificateRefused)
    assert isinstance(server, tls.ClientDistrustsCa)


async def test_a_handshake_that_does_not_end_times_out():
    """A peer that says nothing is dropped after the handshake time, and its stream is closed."""
    near, far = MemoryStream.pair()
    with pytest.raises(StreamBroken) as broken:
        await tls.server_side(far, server_context(), timeout=0.02)
    assert broken.value.kind == "handshake-timeout"
    assert far.aborted
    del near


async def test_plain_text_on_a_tls_port_is_refused():
    """HTTP where TLS is due ends the handshake (B199)."""
    near, far = MemoryStream.pair()
    far.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(StreamBroken):
        await tls.client_side(near, client_context(), "ok.test")


async def test_an_end_without_close_notify_is_truncation():
    """The inner stream ends cleanly, TLS did not say so: raised, never read as an end."""
    client, server = await both()
    client.write(b"half of it")
    await client.inner.send_eof()
    assert await server.receive() == b"half of it"
    with pytest.raises(StreamBroken) as broken:
        await server.receive()
    assert broken.value.kind == "truncated"


async def test_bytes_changed_on_the_way_break_the_stream():
    """A record that does not authenticate raises."""
    client, server = await both()
    client.inner.write(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(StreamBroken):
        await server.receive()
    with pytest.raises(StreamBroken):
        await server.drain()


async def test_a_client_that_speaks_only_h2_is_refused():
    """No protocol in common is an audited reason of its own (RULINGS 4.5)."""
    near, far = MemoryStream.pair()
    _, server = await asyncio.gather(
        tls.client_side(near, client_context(alpn=("h2",)), "ok.test"),
        tls.server_side(far, server_context()),
    )
    assert server.selected_alpn is None
    with pytest.raises(tls.NoApplicationProtocol):
        server.require_alpn("http/1.1", offered=("h2",))
    server.require_alpn("http/1.1", offered=())


@pytest.mark.parametrize("step", [1, 16, 10_000])
async def test_the_hello_may_have_been_read_already_in_any_split(step):
    """What the front door looked at is fed in; the handshake goes on with whatever comes later (E1, T06)."""
    near, far = MemoryStream.pair()
    asking = asyncio.create_task(tls.client_side(near, client_context(), "ok.test"))
    first = await far.receive()
    serving = asyncio.create_task(tls.server_side(far, server_context(), first[:step]))
    await asyncio.sleep(0)
    for at in range(step, len(first), step):
        far._feed(first[at : at + step])
        await asyncio.sleep(0)
    client, server = await asking, await serving
    assert (client.selected_alpn, server.version) == ("http/1.1", "TLSv1.3")
    assert client.peer_cert
    client.write(b"ping")
    assert await server.receive() == b"ping"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_either_side_can_end_first_and_still_read(order):
    """After its close_notify a side still gets everything the other sends, then a clean end."""
    pair = await both()
    first, second = pair[order[0]], pair[order[1]]
    second.write(b"on its way")
    first.write(b"question")
    await first.send_eof()
    assert await second.receive() == b"question"
    assert await second.receive() == b""
    second.write(b", answered")
    await second.send_eof()
    data = b""
    while piece := await first.receive():
        data += piece
    assert data == b"on its way, answered"


async def test_large_data_arrives_whole_and_in_order():
    """Several records, several reads, put-back bytes first."""
    client, server = await both()
    data = bytes(range(256)) * 2000
    client.write(data)
    await client.close()
    got = b""
    while piece := await server.receive(10_000):
        assert len(piece) <= 10_000
        got += piece
        if len(got) == 10_000:
            server.unread(got)
            got = b""
            assert await server.receive(1) == data[:1]
            server.unread(data[:1])
            got = await server.receive(10_000)
    assert got == data
    assert server.bytes_in == client.bytes_out == len(data)


async def test_nothing_is_decrypted_ahead_of_its_reader():
    """A reader that does not read holds the writer back through the inner stream."""
    client, server = await both()
    server.pause_reading()
    client.write(b"x" * 400_000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await client.drain()
    drained = asyncio.create_task(client.drain())
    got = 0
    while got < 400_000:
        got += len(await server.receive())
    await drained


async def test_a_peer_that_is_killed_breaks_the_stream_while_nobody_reads():
    """An end without close_notify calls on_broken at once: a silent answer to a dead client is given up."""
    client, server = await both()
    calls: list[str] = []
    server.on_broken(lambda: calls.append("broken"))
    client.write(b"the last words")
    assert calls == []
    await client.inner.send_eof()
    assert calls == ["broken"]
    assert await server.receive() == b"the last words"
    with pytest.raises(StreamBroken) as broken:
        await server.receive()
    assert broken.value.kind == "truncated"


@pytest.mark.parametrize("paused", [False, True])
async def test_what_waits_under_tls_is_no_silence(paused):
    """silent() is false for plain text, cipher text and an end that nobody took; session tickets are taken first."""
    client, server = await both()
    assert client.receive_nowait() is None  # the tickets that came behind the handshake
    assert client.silent()
    if paused:
        client.pause_reading()
    server.write(b"unasked")
    assert not client.silent()
    assert await client.receive() == b"unasked"
    assert client.silent()
    client.unread(b"put back")
    assert not client.silent()
    assert await client.receive() == b"put back"
    if paused:
        client.pause_reading()
    await server.send_eof()
    assert not client.silent()
    assert await client.receive() == b""
    assert not client.silent()


async def test_a_half_close_is_no_break():
    """close_notify and the end of the transport leave the answer's direction open: on_broken is not called."""
    client, server = await both()
    calls: list[str] = []
    server.on_broken(lambda: calls.append("broken"))
    client.write(b"request")
    await client.send_eof()
    await client.inner.send_eof()
    assert calls == []
    assert await server.receive() == b"request"
    assert await server.receive() == b""
    server.write(b"answer")
    assert await client.receive() == b"answer"
