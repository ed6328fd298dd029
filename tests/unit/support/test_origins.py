"""The test origin itself: a witness that is wrong makes every test that rests on it worthless."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import socket
import ssl

import pytest

from tests.support.origins import Origin
from tests.support.scripts import ABORT, READ, chunked, early, script, slow_read, sse, text, websocket_echo
from tests.support.signals import Gate


def https(origin: Origin, name: str = "api.test") -> ssl.SSLSocket:
    raw = socket.create_connection((origin.address, origin.port), timeout=60)
    try:
        return origin.authority.client_context().wrap_socket(raw, server_hostname=name)
    except BaseException:
        raw.close()
        raise


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        ("wrong-name", "Hostname mismatch"),
        ("expired", "certificate has expired"),
        ("not-yet-valid", "certificate is not yet valid"),
        ("self-signed", "self-signed certificate"),
        ("untrusted", "unable to get local issuer certificate"),
    ],
)
def test_a_bad_certificate_is_refused_by_a_strict_client_for_that_reason_and_no_request_is_seen(
    certificate, expected
) -> None:
    """Each bad certificate is wrong in exactly the way its name says, and the origin records the failed handshake."""
    with Origin("api.test", certificate=certificate).run_in_thread() as origin:
        with pytest.raises(ssl.SSLCertVerificationError, match=expected):
            https(origin)
        origin.wait_until(lambda: len(origin.handshake_failures) == 1)
        assert (origin.handshakes, origin.received, len(origin.connections)) == (0, [], 1)


def test_a_request_is_recorded_to_the_byte_and_echoed() -> None:
    """A strict client gets the echo; head, framed body and decoded body are on record exactly as sent."""
    sent = (
        b"POST /a?b=%2f HTTP/1.1\r\nHost: api.test\r\nX-Odd:   spaced \r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\nX-Trailer: t\r\n\r\n"
    )
    with Origin("api.test").run_in_thread() as origin, https(origin) as client:
        client.sendall(sent)
        response = http.client.HTTPResponse(client)
        response.begin()
        echoed = json.loads(response.read())
        response.close()
        request = origin.received[0]
        assert (echoed["method"], echoed["target"]) == ("POST", "/a?b=%2f")
        assert echoed["body_sha256"] == hashlib.sha256(b"abc").hexdigest()
        assert request.raw == sent == bytes(origin.connections[0].raw)
        assert request.trailers == [("X-Trailer", "t")]
        assert (origin.handshakes, origin.connections[0].sni, origin.faults) == (1, "api.test", [])


def test_a_connection_is_kept_for_the_next_request() -> None:
    """Two requests on one connection are two records on one connection."""
    with Origin("api.test", tls=False).run_in_thread() as origin:
        client = http.client.HTTPConnection(origin.address, origin.port, timeout=60)
        for path in ("/1", "/2"):
            client.request("GET", path, headers={"Host": "api.test"})
            client.getresponse().read()
        client.close()
        assert [request.target for request in origin.received] == ["/1", "/2"]
        assert len(origin.connections) == 1


def test_expect_is_answered_only_when_the_body_is_read() -> None:
    """An early answer comes without 100 Continue; reading the body sends it first."""
    ask = b"POST %s HTTP/1.1\r\nHost: api.test\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with Origin("api.test", tls=False).run_in_thread() as origin:
        origin.on("/early", early(403))
        with socket.create_connection((origin.address, origin.port), timeout=60) as client:
            client.sendall(ask % b"/early")
            assert read_all(client).startswith(b"HTTP/1.1 403 ")
        with socket.create_connection((origin.address, origin.port), timeout=60) as client:
            client.sendall(ask % b"/echo")
            assert client.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(b"ok")
            assert b'"body_bytes": 2' in client.recv(65536)


async def test_a_script_pauses_at_its_gate() -> None:
    """Nothing behind a closed gate is sent; the test learns when the script stands there."""
    gate = Gate()
    async with Origin("api.test", tls=False) as origin:
        origin.on("/events", sse(["one", "two"], [Gate(), gate]))
        origin.on("/raw", script(READ, text("first"), gate, text("second")))
        origin.on("/chunks", script(READ, chunked([b"a", b"b"], (("X-T", "1"),))))
        reader, writer = await asyncio.open_connection(origin.address, origin.port)
        writer.write(b"GET /raw HTTP/1.1\r\nHost: api.test\r\n\r\n")
        assert await reader.readexactly(len(text("first"))) == text("first")
        await gate.arrived()
        gate.open()
        assert await reader.readexactly(len(text("second"))) == text("second")
        writer.write(b"GET /chunks HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"1\r\na\r\n1\r\nb\r\n0\r\nX-T: 1\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert origin.faults == []


async def test_a_slow_reader_holds_the_sender_back() -> None:
    """While the gate is closed a large body cannot all be sent; afterwards it arrives whole."""
    gate = Gate()
    body = bytes(20 << 20)
    async with Origin("api.test", tls=False) as origin:
        origin.on("/up", slow_read(gate))
        reader, writer = await asyncio.open_connection(origin.address, origin.port)
        writer.write(b"PUT /up HTTP/1.1\r\nHost: api.test\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await gate.arrived()
        assert origin.received[0].body_bytes < len(body)
        gate.open()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
        assert origin.received[0].body_bytes == len(body)


async def test_a_websocket_is_echoed() -> None:
    """A masked text frame comes back unmasked; a close frame ends the connection."""
    async with Origin("api.test", tls=False, handler=websocket_echo) as origin:
        reader, writer = await asyncio.open_connection(origin.address, origin.port)
        writer.write(
            b"GET /ws HTTP/1.1\r\nHost: api.test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\x82\x01\x02\x03\x04" + bytes((ord("h") ^ 1, ord("i") ^ 2)))
        assert await reader.readexactly(4) == b"\x81\x02hi"
        writer.write(b"\x88\x80\x00\x00\x00\x00")
        assert await reader.read() == b"\x88\x00"
        writer.close()
        await writer.wait_closed()


async def test_an_abort_resets_the_connection() -> None:
    """ABORT in a script is a reset, not a clean end of the answer."""
    async with Origin("api.test", tls=False, handler=script(READ, b"HTTP/1.1 200 Half", ABORT)) as origin:
        reader, writer = await asyncio.open_connection(origin.address, origin.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()
