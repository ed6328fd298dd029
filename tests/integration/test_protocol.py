"""T09, T10, T12 and T14: clear text in tunnels, Expect, bodies byte for byte, events as they are sent.

One gateway; each case goes through both ways in, and where the lane matters through the plain and the credentialed one.
"""

from __future__ import annotations

import gzip
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.entries import (
    ENTRIES,
    Entry,
    connect_through,
    entry_of,
    read_answer,
    read_head,
    read_to_end,
    tls_through,
)
from tests.support.gateway import TestGateway
from tests.support.origins import Exchange, Origin, head
from tests.support.scripts import READ, chunk, script, sse
from tests.support.signals import Gate

pytestmark = pytest.mark.xdist_group("protocol")

SECRET = "canary-7a2c9e4b1d8f6035-canary"
MEBIBYTE = 1 << 20
CREDENTIALS = """
version: 1
credentials:
  keyed:
    {kind: header, header: X-Api-Key, secret: "store:keyed", hosts: [keyed.test], owner: tests,
     placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""


def policy(mcp_port: int) -> str:
    return f"""
    roles:
      agent:
        allow:
          - {{name: mcp, host: mcp.test, scheme: http, port: {mcp_port}, methods: [GET], paths: [/x]}}
          - {{name: plain.read, host: plain.test, methods: [GET], paths: ["/**"]}}
          - {{name: plain.write, host: plain.test, methods: [PUT, POST], paths: ["/upload/**"]}}
          - {{name: keyed.read, host: keyed.test, methods: [GET], paths: ["/**"], credential: keyed}}
          - {{name: keyed.write, host: keyed.test, methods: [PUT, POST], paths: ["/upload/**"], credential: keyed}}
    """


@dataclass
class Place:
    """The origins and the gateway of this module. `lanes`: the plain and the credentialed host."""

    mcp: Origin
    lanes: dict[str, Origin]
    gateway: TestGateway


async def stored(exchange: Exchange) -> None:
    """Takes the body and says so. It does not echo: three echoed secrets in an hour disarm a credential."""
    await exchange.read_body()
    await exchange.answer(200, b"stored")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        Origin("mcp.test", address="127.0.0.51", tls=False).run_in_thread() as mcp,
        Origin("plain.test", address="127.0.0.52").run_in_thread() as plain,
        Origin("keyed.test", address="127.0.0.53", handler=stored).run_in_thread() as keyed,
        TestGateway(
            tmp_path_factory.mktemp("protocol"),
            policy=policy(mcp.port),
            credentials=CREDENTIALS,
            secrets={"keyed": SECRET},
            origins=[mcp, plain, keyed],
        ) as gateway,
    ):
        yield Place(mcp, {"plain": plain, "keyed": keyed}, gateway)


@pytest.fixture(scope="module", params=ENTRIES)
def entry(request: pytest.FixtureRequest, place: Place) -> Iterator[Entry]:
    with entry_of(request.param, place.gateway) as found:
        yield found


@pytest.fixture(params=["plain", "keyed"])
def origin(request: pytest.FixtureRequest, place: Place) -> Origin:
    return place.lanes[request.param]


def key_header(origin: Origin, entry: Entry) -> list[str]:
    """curl's words for the placeholder, where the host has a credential."""
    return ["-H", f"X-Api-Key: {entry.environment['API_KEY']}"] if origin.names[0] == "keyed.test" else []


# --- T09 ---------------------------------------------------------------------------------------------------------


def test_clear_text_in_a_tunnel_is_closed_where_no_rule_says_http(place: Place, entry: Entry) -> None:
    """T09: `GET /x` in clear inside CONNECT to a host known over TLS only: closed, recorded, nothing upstream."""
    origin = place.lanes["plain"]
    before = len(origin.received)
    connection = connect_through(entry, f"plain.test:{origin.port}")
    connection.sendall(f"GET /x HTTP/1.1\r\nHost: plain.test:{origin.port}\r\n\r\n".encode())
    assert b" 200 " not in read_to_end(connection)[:16]
    connection.close()
    assert len(origin.received) == before
    assert place.gateway.awaited(sandbox=entry.id, reason="tls-required")


def test_clear_text_in_a_tunnel_is_judged_request_by_request(place: Place, entry: Entry) -> None:
    """T09: with `scheme: http`, /x is answered by the origin and /y on the same tunnel is 403; both are on record."""
    before = len(place.mcp.received)
    authority = f"mcp.test:{place.mcp.port}"
    connection = connect_through(entry, authority)
    connection.sendall(f"GET /x HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
    head, body = read_answer(connection)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b'"target": "/x"' in body
    connection.sendall(f"GET /y HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
    head, body = read_answer(connection)
    assert head.startswith(b"HTTP/1.1 403 ")
    assert b"no-rule" in body
    connection.close()
    assert len(place.mcp.received) == before + 1
    (allowed,) = place.gateway.awaited(sandbox=entry.id, event="request.outcome", host="mcp.test")
    (denied,) = place.gateway.awaited(sandbox=entry.id, event="request.refused", host="mcp.test")
    assert [(r["method"], r["path"], r["scheme"]) for r in (allowed, denied)] == [
        ("GET", "/x", "http"),
        ("GET", "/y", "http"),
    ]


# --- T10 ---------------------------------------------------------------------------------------------------------


def test_a_denied_upload_is_refused_before_its_body(place: Place, entry: Entry, origin: Origin) -> None:
    """T10, C064: a 20 MB PUT that waits for 100 gets 403 and no 100; the client sent no body; nothing upstream."""
    before = origin.bytes_in
    file = entry.shared / "denied.bin"
    file.write_bytes(bytes(20_000_000))
    done = entry.command(
        *("curl", "-sSv", "-o", "/dev/null", "-w", "%{http_code} %{size_upload}", "-T", str(file)),
        *("-H", "Expect: 100-continue", "--expect100-timeout", "20", *key_header(origin, entry)),
        origin.url("/denied"),
    )
    status, sent = done.out.split()
    assert status == "403", done
    assert int(sent) < 65_536
    assert "100 Continue" not in done.err
    assert origin.bytes_in == before


def test_a_denied_upload_that_does_not_wait_is_cut(place: Place, entry: Entry, origin: Origin) -> None:
    """T10 for a client that pushes its body at once: it is told 403 before the body is over, and then cut."""
    before = origin.bytes_in
    authority = f"{origin.names[0]}:{origin.port}"
    with tls_through(entry, authority) as connection:
        connection.sendall(
            f"PUT /denied HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 20000000\r\n\r\n".encode() + bytes(32_768)
        )
        head, _ = read_answer(connection)
        assert head.startswith(b"HTTP/1.1 403 ")
        sent = 32_768
        try:
            while sent < 20_000_000:
                connection.sendall(bytes(32_768))
                sent += 32_768
        except OSError:
            pass
        assert sent < 20_000_000, "the whole body was taken"
    assert origin.bytes_in == before


def test_an_allowed_upload_gets_its_continue_and_arrives_whole(place: Place, entry: Entry, origin: Origin) -> None:
    """T10, C064: the same PUT on an allowed path is asked to continue, answered 200, and every byte arrives."""
    data = random.Random(10).randbytes(20_000_000)
    file = entry.shared / "allowed.bin"
    file.write_bytes(data)
    done = entry.command(
        *("curl", "-sSv", "-o", "/dev/null", "-w", "%{http_code} %{time_total}", "-T", str(file)),
        *("-H", "Expect: 100-continue", "--expect100-timeout", "20", *key_header(origin, entry)),
        origin.url("/upload/file"),
    )
    status, seconds = done.out.split()
    assert status == "200", done
    assert "100 Continue" in done.err
    # Three seconds on a quiet machine; a client that waited in vain for its 100 would take twenty.
    assert float(seconds) < 15
    received = origin.received[-1]
    assert received.body_sha256 == hashlib.sha256(data).hexdigest()
    assert received.values("content-length") == ["20000000"]


# --- T12 ---------------------------------------------------------------------------------------------------------

BODIES = {
    "random": (random.Random(12).randbytes(MEBIBYTE), []),
    "gzip": (gzip.compress(b"compress me " * 10_000), ["-H", "Content-Encoding: gzip"]),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_arrives_byte_for_byte(place: Place, entry: Entry, kind: str) -> None:
    """T12, C054, C058: a body on a credentialed call keeps bytes, coding and length; the secret is in its header."""
    origin = place.lanes["keyed"]
    data, headers = BODIES[kind]
    file = entry.shared / "body.bin"
    file.write_bytes(data)
    done = entry.command(
        *("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "--data-binary", f"@{file}", *headers),
        *(*key_header(origin, entry), origin.url("/upload/body")),
    )
    assert done.out == "200", done
    received = origin.received[-1]
    assert received.body_sha256 == hashlib.sha256(data).hexdigest()
    assert received.values("content-length") == [str(len(data))]
    assert received.values("transfer-encoding") == []
    assert received.values("content-encoding") == (["gzip"] if kind == "gzip" else [])
    assert received.values("x-api-key") == [SECRET]
    assert received.raw.count(SECRET.encode()) == 1


def test_a_chunked_body_arrives_byte_for_byte(place: Place, entry: Entry, origin: Origin) -> None:
    """T12, C054 without a length: the content is the same and the message has exactly one framing."""
    data, _ = BODIES["random"]
    file = entry.shared / "chunked.bin"
    file.write_bytes(data)
    done = entry.command(
        *("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "--data-binary", f"@{file}"),
        *("-H", "Transfer-Encoding: chunked", *key_header(origin, entry), origin.url("/upload/chunked")),
    )
    assert done.out == "200", done
    received = origin.received[-1]
    assert received.body_sha256 == hashlib.sha256(data).hexdigest()
    assert received.values("transfer-encoding") == ["chunked"]
    assert received.values("content-length") == []


# --- heads and trailers ------------------------------------------------------------------------------------------


def test_header_names_keep_their_case_and_order(place: Place, entry: Entry) -> None:
    """C074: what passes reaches an HTTP/1.1 origin as it was written, because old servers compare letters."""
    origin = place.lanes["plain"]
    authority = f"plain.test:{origin.port}"
    lines = ["X-CuStOm: one", "aCCEPT: */*", "x-lower: two", "X-CuStOm: three", 'IF-NONE-MATCH: "four"']
    with tls_through(entry, authority) as connection:
        head = "\r\n".join([f"GET /case HTTP/1.1\r\nHost: {authority}", *lines])
        connection.sendall(f"{head}\r\n\r\n".encode())
        assert read_answer(connection)[0].startswith(b"HTTP/1.1 200 ")
    sent = origin.received[-1].raw_head.decode().split("\r\n")
    assert [line for line in sent if line in lines] == lines


def test_an_injected_header_has_the_case_that_its_credential_says(place: Place, entry: Entry) -> None:
    """C074: the client writes `x-api-KEY`; the origin reads the operator's `X-Api-Key`, once."""
    origin = place.lanes["keyed"]
    authority = f"keyed.test:{origin.port}"
    with tls_through(entry, authority) as connection:
        key = entry.environment["API_KEY"]
        connection.sendall(f"GET /case HTTP/1.1\r\nHost: {authority}\r\nx-api-KEY: {key}\r\n\r\n".encode())
        assert read_answer(connection)[0].startswith(b"HTTP/1.1 200 ")
    sent = origin.received[-1].raw_head.decode().split("\r\n")
    assert [line for line in sent if line.lower().startswith("x-api-key")] == [f"X-Api-Key: {SECRET}"]


def test_trailers_follow_the_body_they_belong_to(place: Place, entry: Entry) -> None:
    """C068: announced trailers of a chunked answer arrive after its body; the connection goes on."""
    origin = place.lanes["plain"]
    opening = head(200, (("Trailer", "X-Sum"), ("Transfer-Encoding", "chunked")))
    answer = opening + chunk(b"counted") + b"0\r\nX-Sum: 7\r\n\r\n"
    origin.on("/trailers", script(READ, answer))
    authority = f"plain.test:{origin.port}"
    with tls_through(entry, authority) as connection:
        asked = f"GET /trailers HTTP/1.1\r\nHost: {authority}\r\nTE: trailers\r\n\r\n"
        connection.sendall(asked.encode())
        said = read_head(connection).lower()
        assert b"transfer-encoding: chunked" in said
        assert b"trailer: x-sum" in said
        body = b""
        while not body.endswith(b"\r\n\r\n"):
            piece = connection.recv(1)
            assert piece, body
            body += piece
        assert body == b"7\r\ncounted\r\n0\r\nX-Sum: 7\r\n\r\n"
        connection.sendall(f"GET /after HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        assert read_answer(connection)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("upgrade", ["SPDY/3.1", "h2c", "TLS/1.0", "anything"])
def test_an_upgrade_to_anything_but_websocket_is_refused(
    place: Place, entry: Entry, origin: Origin, upgrade: str
) -> None:
    """C076: what follows a 101 could not be judged, so it is never asked for; nothing upstream, one reason."""
    before = origin.bytes_in
    authority = f"{origin.names[0]}:{origin.port}"
    with tls_through(entry, authority) as connection:
        connection.sendall(
            f"GET /exec HTTP/1.1\r\nHost: {authority}\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n\r\n".encode()
        )
        said, body = read_answer(connection)
    assert said.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), said
    assert b"upgrade-refused" in body
    assert origin.bytes_in == before


# --- T14 ---------------------------------------------------------------------------------------------------------


def test_events_reach_the_client_as_they_are_sent(place: Place, entry: Entry, origin: Origin) -> None:
    """T14: the origin sends event n+1 only after the client has event n: nothing can be held back in between."""
    events = [f"event-{number}" for number in range(10)]
    gates = [Gate() for _ in events]
    origin.on("/events", sse(events, gates))
    authority = f"{origin.names[0]}:{origin.port}"
    key = f"X-Api-Key: {entry.environment['API_KEY']}\r\n" if origin.names[0] == "keyed.test" else ""
    with tls_through(entry, authority) as connection:
        connection.settimeout(60)
        connection.sendall(f"GET /events HTTP/1.1\r\nHost: {authority}\r\n{key}\r\n".encode())
        gates[0].open()
        assert read_head(connection).startswith(b"HTTP/1.1 200 ")
        seen = b""
        for number, event in enumerate(events):
            wanted = f"data: {event}\n\n".encode()
            while wanted not in seen:
                piece = connection.recv(65_536)
                assert piece, seen
                seen += piece
            assert f"event-{number + 1}".encode() not in seen
            if number + 1 < len(gates):
                gates[number + 1].open()
        while not seen.endswith(b"0\r\n\r\n"):
            piece = connection.recv(65_536)
            assert piece, seen
            seen += piece
