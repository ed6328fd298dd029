"""T13: WebSockets, credentialed and plain. Client and origin both speak wsproto, which none of our code uses here.

The origin echoes messages and answers pings. Every case goes through both ways in.
"""

from __future__ import annotations

import contextlib
import random
import select
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.extensions import PerMessageDeflate

from tests.support.entries import ENTRIES, Entry, entry_of, tls_through
from tests.support.gateway import TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("websocket")

SECRET = "canary-2b9d4f6a8c1e3057-canary"
CREDENTIALS = """
version: 1
credentials:
  keyed: {kind: bearer, secret: "store:keyed", hosts: [keyed.test], owner: tests,
          placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: keyed, host: keyed.test, methods: [GET], paths: [/socket], websocket: true, credential: keyed}
      - {name: keyed.read, host: keyed.test, methods: [GET], paths: [/page], credential: keyed}
      - {name: plain, host: plain.test, methods: [GET], paths: [/socket], websocket: true}
      - {name: two, host: two.test, methods: [GET], paths: [/socket], websocket: true, protocol: h2}
"""


async def socket_echo(exchange: Exchange) -> None:
    """Accepts the first subprotocol and the compression that are offered; echoes messages. "secret?" answers it."""
    exchange.keep_alive = False
    peer = WSConnection(ConnectionType.SERVER)
    peer.receive_data(exchange.request.raw_head)
    while True:
        for event in peer.events():
            match event:
                case Request():
                    chosen = event.subprotocols[0] if event.subprotocols else None
                    answer: Event = AcceptConnection(subprotocol=chosen, extensions=[PerMessageDeflate()])
                case TextMessage(data="secret?"):
                    answer = TextMessage(data=f"it is {SECRET}.")
                case TextMessage() | BytesMessage():
                    answer = Message(data=event.data, message_finished=event.message_finished)
                case Ping() | CloseConnection():
                    answer = event.response()
                case _:
                    continue
            await exchange.send(peer.send(answer))
            if isinstance(event, CloseConnection):
                return
        peer.receive_data(await exchange.reader.read(65_536) or None)


@dataclass
class Place:
    """The origins and the gateway of this module."""

    keyed: Origin
    plain: Origin
    two: Origin
    gateway: TestGateway


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        Origin("keyed.test", address="127.0.0.61", handler=socket_echo, keep=8 << 20).run_in_thread() as keyed,
        Origin("plain.test", address="127.0.0.62", handler=socket_echo, keep=8 << 20).run_in_thread() as plain,
        Origin("two.test", address="127.0.0.63", handler=socket_echo).run_in_thread() as two,
        TestGateway(
            tmp_path_factory.mktemp("websocket"),
            policy=POLICY,
            credentials=CREDENTIALS,
            secrets={"keyed": SECRET},
            origins=[keyed, plain, two],
        ) as gateway,
    ):
        yield Place(keyed, plain, two, gateway)


@pytest.fixture(scope="module", params=ENTRIES)
def entry(request: pytest.FixtureRequest, place: Place) -> Iterator[Entry]:
    with entry_of(request.param, place.gateway) as found:
        yield found


@dataclass
class Client:
    """A WebSocket client over one TLS connection through the gateway."""

    connection: ssl.SSLSocket
    peer: WSConnection = field(default_factory=lambda: WSConnection(ConnectionType.CLIENT))
    waiting: list[Event] = field(default_factory=list)

    def send(self, event: Event) -> None:
        self.connection.sendall(self.peer.send(event))

    def next(self) -> Event:
        """The next event; AssertionError where the connection ends first."""
        while not self.waiting:
            try:
                data = self.connection.recv(65_536)
            except ConnectionError:
                data = b""
            assert data, "the connection ended"
            self.peer.receive_data(data)
            self.waiting.extend(self.peer.events())
        return self.waiting.pop(0)

    def message(self) -> str | bytes:
        """The next whole message."""
        pieces: list[str | bytes] = []
        while True:
            event = self.next()
            assert isinstance(event, TextMessage | BytesMessage), event
            pieces.append(event.data)
            if event.message_finished:
                return pieces[0][:0].join(pieces)  # type: ignore[arg-type]  # all of one kind


def opened(entry: Entry, origin: Origin, path: str = "/socket") -> tuple[Client, Event]:
    """A client and the answer to its handshake, which offers two subprotocols and compression."""
    authority = f"{origin.names[0]}:{origin.port}"
    client = Client(tls_through(entry, authority))
    headers = []
    if origin.names[0] == "keyed.test":
        headers.append((b"Authorization", f"Bearer {entry.environment['API_KEY']}".encode()))
    client.send(
        Request(
            host=authority,
            target=path,
            subprotocols=["chat.v2", "chat.v1"],
            extensions=[PerMessageDeflate()],
            extra_headers=headers,
        )
    )
    return client, client.next()


def closed(client: Client) -> None:
    """The closing handshake with 1000."""
    client.send(CloseConnection(code=1000, reason="done"))
    answer = client.next()
    assert isinstance(answer, CloseConnection)
    assert answer.code == 1000
    client.connection.close()


def test_an_operation_without_websocket_refuses_the_upgrade(place: Place, entry: Entry) -> None:
    """A rule for reads does not open a socket, with the same host and credential: 403, nothing upstream."""
    before = len(place.keyed.received)
    client, answer = opened(entry, place.keyed, "/page")
    assert isinstance(answer, RejectConnection), answer
    assert answer.status_code == 403
    body = client.next()
    assert isinstance(body, RejectData)
    assert b"websocket-refused" in body.data
    client.connection.close()
    assert len(place.keyed.received) == before


def test_a_placeholder_in_a_message_ends_a_credentialed_socket(place: Place, entry: Entry) -> None:
    """Its slot is the handshake: in a message it is cut before it is sent, with an alarm."""
    before = sum(connection.bytes_in for connection in place.keyed.connections)
    client, _ = opened(entry, place.keyed)
    until(lambda: sum(connection.bytes_in for connection in place.keyed.connections) > before)
    before = sum(connection.bytes_in for connection in place.keyed.connections)
    client.send(TextMessage(data=f"key={entry.environment['API_KEY']}"))
    answer = client.next()
    assert isinstance(answer, CloseConnection), answer
    assert (answer.code, answer.reason) == (1008, "Refused by Exeat policy: placeholder-misuse")
    client.connection.close()
    assert sum(connection.bytes_in for connection in place.keyed.connections) == before
    assert place.gateway.awaited(sandbox=entry.id, event="placeholder.misused")


@pytest.mark.parametrize("lane", ["keyed", "plain"])
def test_an_ended_sandbox_keeps_no_socket(place: Place, lane: str) -> None:
    """Ending a sandbox returns after its sockets are cut, credentialed and plain; the origin sees them close."""
    origin = place.keyed if lane == "keyed" else place.plain
    with entry_of("token", place.gateway) as entry:
        client, answer = opened(entry, origin)
        assert isinstance(answer, AcceptConnection), answer
        client.send(TextMessage(data="alive"))
        assert client.message() == "alive"
        upstream = origin.received[-1].connection
        assert not upstream.closed
        place.gateway.admin.end_sandbox(entry.id)
        origin.wait_until(lambda: upstream.closed)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            assert client.connection.recv(65_536) == b""
        client.connection.close()


@pytest.mark.parametrize("lane", ["keyed", "plain"])
def test_a_reload_that_still_permits_it_leaves_a_socket_open(place: Place, entry: Entry, lane: str) -> None:
    """C078: an edit elsewhere in the policy cuts no conversation."""
    origin = place.keyed if lane == "keyed" else place.plain
    client, answer = opened(entry, origin)
    assert isinstance(answer, AcceptConnection), answer
    place.gateway.write_policy(POLICY + "      - {name: more, host: plain.test, methods: [GET], paths: [/more]}\n")
    try:
        place.gateway.reload()
        client.send(TextMessage(data="still here"))
        assert client.message() == "still here"
    finally:
        place.gateway.write_policy(POLICY)
        place.gateway.reload()
    client.send(TextMessage(data="and now"))
    assert client.message() == "and now"
    closed(client)


def test_a_socket_opens_beside_http2_on_one_host(place: Place, entry: Entry) -> None:
    """C076: where rules say h2, a handshake over HTTP/1.1 still gets a connection of its own and flows both ways."""
    client, answer = opened(entry, place.two)
    assert isinstance(answer, AcceptConnection), answer
    request = place.two.received[-1]
    assert (request.version, request.connection.alpn) == ("HTTP/1.1", "http/1.1")
    client.send(TextMessage(data="both ways"))
    assert client.message() == "both ways"
    closed(client)


def test_a_secret_in_a_message_is_masked_at_its_length(place: Place, entry: Entry) -> None:
    """What the origin says of the secret reaches the sandbox as asterisks, and is recorded as an echo."""
    client, _ = opened(entry, place.keyed)
    client.send(TextMessage(data="secret?"))
    assert client.message() == f"it is {'*' * len(SECRET)}."
    closed(client)
    assert place.gateway.awaited(sandbox=entry.id, event="secret.echoed")


def test_a_credentialed_socket_carries_everything_unchanged(place: Place, entry: Entry) -> None:
    """T13, C078: text, fragments, binary, 2 MiB, pings across a silence, close 1000; the secret once, at the start."""
    random_bytes = random.Random(13).randbytes
    client, answer = opened(entry, place.keyed)
    request = place.keyed.received[-1]
    assert isinstance(answer, AcceptConnection), answer
    assert answer.subprotocol == "chat.v2"
    assert answer.extensions == []  # no compression where messages are read
    assert request.values("authorization") == [f"Bearer {SECRET}"]
    assert request.values("sec-websocket-extensions") == []
    assert request.values("sec-websocket-protocol") == ["chat.v2, chat.v1"]

    sent: list[str | bytes] = ["text with ünïcödé", random_bytes(1000), random_bytes(2 << 20)]
    for data in sent:
        client.send(Message(data=data))
        assert client.message() == data
    for number, piece in enumerate(["one ", "two ", "three"]):
        client.send(TextMessage(data=piece, message_finished=number == 2))
        if number == 1:
            client.send(Ping(payload=b"between fragments"))
    assert client.next() == Pong(payload=b"between fragments")
    assert client.message() == "one two three"
    for number in range(4):
        quiet, _, _ = select.select([client.connection], [], [], 0.5)
        assert not quiet
        client.send(Ping(payload=b"%d" % number))
        assert client.next() == Pong(payload=b"%d" % number)
    closed(client)

    handshake = request.raw_head.count(SECRET.encode())
    assert handshake == 1
    assert bytes(request.connection.raw).count(SECRET.encode()) == 1
    (record,) = place.gateway.awaited(where=large, sandbox=entry.id, event="broker.outcome", host="keyed.test")
    assert int(str(record["bytes_down"])) > 2 << 20
    assert (record["status"], record["completed"], record["effect"]) == (101, True, "write")
    same = [r for r in place.gateway.settled(request_id=record["request_id"]) if r["event"].startswith("broker.")]
    assert [r["event"] for r in same] == ["broker.intent", "broker.outcome"]


def test_a_plain_socket_carries_compressed_messages(place: Place, entry: Entry) -> None:
    """C078: without a credential nothing in a message is read, so what both ends agreed on passes as it is."""
    client, answer = opened(entry, place.plain)
    assert isinstance(answer, AcceptConnection), answer
    assert [extension.name for extension in answer.extensions] == ["permessage-deflate"]
    for data in ("compress me " * 1000, random.Random(7).randbytes(2 << 20)):
        client.send(Message(data=data))
        assert client.message() == data
    client.send(Ping(payload=b"p"))
    assert client.next() == Pong(payload=b"p")
    closed(client)
    (record,) = place.gateway.awaited(where=large, sandbox=entry.id, event="request.outcome", host="plain.test")
    assert record["completed"] is True


def large(record: dict[str, Any]) -> bool:
    """Whether so much went up that it is the conversation with the large message."""
    return int(record.get("bytes_up") or 0) > 2 << 20


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_silence_with_pings_and_without_ends_no_conversation(place: Place, entry: Entry) -> None:
    """T13, C078: a minute without a byte, then five minutes in which only pings pass; both sockets still carry."""
    clients = [opened(entry, origin)[0] for origin in (place.keyed, place.plain)]
    for seconds in (65, *[20] * 16):
        quiet, _, _ = select.select([client.connection for client in clients], [], [], seconds)
        assert not quiet
        for client in clients:
            client.send(Ping(payload=b"%d" % seconds))
            assert client.next() == Pong(payload=b"%d" % seconds)
    for client in clients:
        client.send(TextMessage(data="after all that"))
        assert client.message() == "after all that"
        closed(client)
