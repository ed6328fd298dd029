"""Any collaborator that raises or hangs shuts the way out (I09), and a fault anywhere in a connection ends it whole.

Part one: each port of the proxy, one at a time: the client gets a refusal within its deadline and the origin saw no
byte. Part two: each step of a connection raises once, at each of its calls: both sides are closed and what was begun
has an outcome. Real processes that hang and die are in test_kill_switch_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import net.exchange
import proxy.front
import proxy.lanes.http1
from net.http1 import ClientConnection, ServerConnection
from net.pool import Pool
from net.resolve import ResolveFailed
from net.stream import SocketStream, serve_streams
from net.tls import TlsStream
from proxy.brokerlink import BrokerUnavailable
from proxy.front import FrontDoor
from proxy.gate import Gate
from proxy.lanes.http1 import Http1Lane
from proxy.lanes.tunnel import TunnelLane
from proxy.liveset import Live
from proxy.ports import DirectoryUnavailable
from rules.policy import Policy
from tests.support.fakes import SHARED
from tests.support.journal import MemoryJournal
from tests.support.loops import LOOPS, run_on
from tests.support.origins import Origin
from tests.support.rooms import (
    _CA,
    Client,
    House,
    basic,
    close_houses,
    credential,
    destination,
    get,
    op,
    policy,
    rule,
    tunnel_rule,
)

SECONDS = 10.0
"""Far beyond every deadline that these tests shorten, far below every one that they do not."""


class Boom(Exception):
    """What breaks."""


def boom(*_args: object, **_more: object) -> Any:
    raise Boom


async def forever(*_args: object, **_more: object) -> Any:
    await asyncio.Event().wait()


# --- part one: ports ----------------------------------------------------------------------------------------------


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with Origin("plain.test", address="127.0.0.46", tls=False) as found:
        yield found


def rules_for(origin: Origin) -> Policy:
    port = origin.port
    return policy(
        rule("dev/plain", op("dev/plain", "plain.test", port=port, scheme="http")),
        rule("dev/inside", op("dev/inside", "inside.test", port=port)),
        rule("dev/held", op("dev/held", "held.test", port=port), credential="held"),
        tunnel_rule("dev/raw", "raw.test", port),
        destinations=[destination(origin)],
        credentials=[replace(credential("held", "held.test"), authorities=(("held.test", port),))],
    )


def judging_raises(house: House) -> None:
    house.room.gate._decide = boom


def tunnel_judging_raises(house: House) -> None:
    house.room.gate._decide_connect = boom


def directory_lost(house: House) -> None:
    house.directory.lose()


def directory_silent(house: House) -> None:
    house.clock.advance(60)


def directory_raises(house: House) -> None:
    house.room.gate._directory = _Raising()


class _Raising:
    def snapshot(self) -> Any:
        raise Boom


class _Unavailable:
    def snapshot(self) -> Any:
        raise DirectoryUnavailable("told to")


def directory_unavailable(house: House) -> None:
    house.room.gate._directory = _Unavailable()


def journal_fails(house: House) -> None:
    house.journal.failing = True


def journal_raises(house: House) -> None:
    house.journal.append = boom


def journal_hangs(house: House) -> None:
    house.journal.append = forever
    house.room.gate._journal_seconds = 0.05


def resolver_raises(house: House) -> None:
    house.resolver.answer("plain.test", ResolveFailed("told to"))


def resolver_raises_anything(house: House) -> None:
    house.resolver.answer("plain.test", Boom())


def resolver_hangs(house: House) -> None:
    house.resolver.hold()


def dialer_raises(house: House) -> None:
    house.dialer.dial = boom


def broker_unavailable(house: House) -> None:
    house.broker.fail = BrokerUnavailable("told to")


def broker_raises(house: House) -> None:
    house.broker.fail = RuntimeError("told to")


def broker_hangs(house: House) -> None:
    house.broker.hang = True
    house.room.lane._broker._open_seconds = 0.05


def leaves_raise(house: House) -> None:
    house.room.front._leaves = house.room.front._refusal_leaves = _NoLeaves()


class _NoLeaves:
    get = staticmethod(boom)


async def absolute(house: House, origin: Origin) -> int:
    """A request to the proxy itself; the status of its answer, 0 for a closed connection."""
    client = house.connect()
    client.send(get(f"http://plain.test:{origin.port}/x", f"plain.test:{origin.port}"))
    return await _status(client)


async def handed_off(house: House, origin: Origin) -> int:
    """A credentialed request inside TLS."""
    return await _inside(house, f"held.test:{origin.port}", "held.test")


async def inspected(house: House, origin: Origin) -> int:
    """A plain request inside TLS."""
    return await _inside(house, f"inside.test:{origin.port}", "inside.test")


async def raw(house: House, origin: Origin) -> int:
    """An uninspected tunnel."""
    return await _inside(house, f"raw.test:{origin.port}", "raw.test")


async def _inside(house: House, authority: str, name: str) -> int:
    client = house.connect()
    client.send(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nProxy-Authorization: {basic()}\r\n\r\n")
    status = await _status(client)
    if status != 200:
        return status
    with contextlib.suppress(Exception):
        context = ssl.create_default_context(cadata=_CA.root_pem)
        await client.start_tls(context, name)
        client.send(get("/x", authority, token=None))
        return await _status(client)
    return 0


async def _status(client: Client) -> int:
    try:
        return (await client.answer()).status
    except (AssertionError, Exception):
        return 0


Break = Callable[[House], None]
Ask = Callable[[House, Origin], Awaitable[int]]

CASES: list[tuple[str, Ask, Break, set[int]]] = [
    ("policy", absolute, judging_raises, {503}),
    ("policy", inspected, judging_raises, {503, 0}),
    ("policy", handed_off, judging_raises, {503}),
    ("policy", inspected, tunnel_judging_raises, {503}),
    ("policy", raw, tunnel_judging_raises, {503}),
    ("directory", absolute, directory_lost, {503}),
    ("directory", raw, directory_lost, {503}),
    ("directory", absolute, directory_silent, {503}),
    ("directory", handed_off, directory_silent, {503}),
    ("directory", absolute, directory_raises, {503}),
    ("directory", raw, directory_raises, {503}),
    ("directory", absolute, directory_unavailable, {503}),
    ("directory", inspected, directory_unavailable, {503}),
    ("auditor", absolute, journal_fails, {503}),
    ("auditor", handed_off, journal_fails, {503}),
    ("auditor", raw, journal_fails, {503, 0}),
    ("auditor", absolute, journal_raises, {503}),
    ("auditor", absolute, journal_hangs, {503}),
    ("auditor", handed_off, journal_hangs, {503}),
    ("auditor", raw, journal_hangs, {503, 0}),
    ("resolver", absolute, resolver_raises, {502}),
    ("resolver", absolute, resolver_raises_anything, {502, 503, 0}),
    ("resolver", absolute, resolver_hangs, {502}),
    ("dialer", absolute, dialer_raises, {502, 503, 0}),
    ("executor", handed_off, broker_unavailable, {503}),
    ("executor", handed_off, broker_raises, {503, 0}),
    ("executor", handed_off, broker_hangs, {503}),
    ("vault", inspected, leaves_raise, {0}),
    ("vault", handed_off, leaves_raise, {0}),
]


@pytest.mark.parametrize(
    ("who", "ask", "breaks", "expected"), CASES, ids=[f"{c[0]}-{c[1].__name__}-{c[2].__name__}" for c in CASES]
)
async def test_what_raises_or_hangs_refuses_and_the_origin_sees_nothing(
    origin: Origin, who: str, ask: Ask, breaks: Break, expected: set[int]
) -> None:
    """One collaborator fails: the client is refused (0: closed without an answer) in time, and nothing is dialled."""
    house = House(rules_for(origin), origins=[origin], lookup_seconds=0.05)
    breaks(house)
    async with asyncio.timeout(SECONDS):
        assert await ask(house, origin) in expected
    assert origin.untouched
    house.resolver.let_go()
    assert house.room.gate.open_passages == 0
    await close_houses()


async def test_the_same_request_passes_when_nothing_is_broken(origin: Origin) -> None:
    """The control: what the table above breaks is all that stands between this request and the origin."""
    house = House(rules_for(origin), origins=[origin])
    assert await absolute(house, origin) == 200
    assert len(origin.received) == 1
    await close_houses()


# --- part two: every step of a connection -------------------------------------------------------------------------

STEPS: list[tuple[Any, str]] = [
    (SocketStream, "_made"),
    (SocketStream, "_feed"),
    (SocketStream, "_feed_eof"),
    (SocketStream, "receive"),
    (SocketStream, "receive_nowait"),
    (SocketStream, "unread"),
    (SocketStream, "write"),
    (SocketStream, "drain"),
    (SocketStream, "send_eof"),
    (SocketStream, "on_broken"),
    (TlsStream, "_handshake"),
    (TlsStream, "_decrypt"),
    (TlsStream, "receive"),
    (TlsStream, "receive_nowait"),
    (TlsStream, "write"),
    (TlsStream, "drain"),
    (TlsStream, "_notify"),
    (ServerConnection, "__init__"),
    (ServerConnection, "next_head"),
    (ServerConnection, "read_body"),
    (ServerConnection, "read_body_nowait"),
    (ServerConnection, "send_head"),
    (ServerConnection, "send_data"),
    (ServerConnection, "flush"),
    (ServerConnection, "finish"),
    (ServerConnection, "on_broken"),
    (ServerConnection, "detach"),
    (ServerConnection, "close"),
    (ClientConnection, "__init__"),
    (ClientConnection, "send_request"),
    (ClientConnection, "send_data"),
    (ClientConnection, "flush"),
    (ClientConnection, "finish"),
    (ClientConnection, "next_response"),
    (ClientConnection, "body"),
    (Pool, "acquire"),
    (Pool, "release"),
    (Live, "add"),
    (Gate, "tunnel"),
    (Gate, "enter"),
    (Gate, "head"),
    (Gate, "_think"),
    (Gate, "_record_intent"),
    (Gate, "_request_fields"),
    (FrontDoor, "_connection"),
    (FrontDoor, "_identify"),
    (FrontDoor, "_connect"),
    (FrontDoor, "_inside"),
    (FrontDoor, "_peek"),
    (Http1Lane, "serve"),
    (Http1Lane, "one"),
    (Http1Lane, "_forward"),
    (Http1Lane, "_attempt"),
    (Http1Lane, "_reserve"),
    (TunnelLane, "run"),
    (proxy.front, "connect_facts"),
    (proxy.front, "wrong_hello"),
    (proxy.front, "server_side"),
    (proxy.lanes.http1, "make_facts"),
    (proxy.lanes.http1, "dial_target"),
    (proxy.lanes.http1, "outgoing"),
    (proxy.lanes.http1, "exchange"),
    (proxy.lanes.http1, "outcome_of"),
    (proxy.lanes.http1, "live_key"),
    (net.exchange._Relay, "run"),
    (net.exchange._Relay, "_send"),
    (net.exchange._Relay, "_pump"),
    (net.exchange._Relay, "_answer"),
    (net.exchange._Relay, "_end"),
]
CALLS = 4
"""At how many of its calls each step raises."""


class Bomb:
    """Replaces `owner.name` while in force: the `at`-th call raises, the others are as before."""

    def __init__(self, owner: Any, name: str, at: int) -> None:
        self.owner, self.name, self.at = owner, name, at
        self.calls = 0
        self.went_off = False
        self._before = getattr(owner, name)

    def __enter__(self) -> Bomb:
        before = self._before

        def armed(*args: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                self.went_off = True
                raise Boom
            return before(*args, **more)

        setattr(self.owner, self.name, armed)
        return self

    def __exit__(self, *_exc: object) -> None:
        setattr(self.owner, self.name, self._before)


@pytest.fixture(scope="module")
def secure() -> Iterator[Origin]:
    """An HTTPS origin in a loop and thread of its own, under three names."""
    with Origin("inside.test", "raw.test", "plain.test", address="127.0.0.47").run_in_thread() as found:
        yield found


def test_every_step_listed_is_one_that_exists() -> None:
    """A renamed step must not silently drop out of the table."""
    assert all(callable(getattr(owner, name)) for owner, name in STEPS)


@pytest.mark.slow  # hundreds of real connections
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("host", ["inside.test", "raw.test"], ids=["inspected", "opaque"])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name in STEPS])
def test_a_step_that_raises_closes_both_sides_and_records_the_outcome(
    secure: Origin, loop: str, host: str, owner: Any, name: str
) -> None:
    """Whatever raises, and at whichever call: the client and the origin see the end, and no intent is left alone."""
    for at in range(1, CALLS + 1):
        bomb = Bomb(owner, name, at)
        run_on(loop, _one_connection(secure, host, bomb))
        if not bomb.went_off:
            break


async def _one_connection(secure: Origin, host: str, bomb: Bomb) -> None:
    """One real connection through a real listener while `bomb` is armed; then everything is looked at."""
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    journal = MemoryJournal()
    port = secure.port
    house = House(
        policy(
            rule("dev/inside", op("dev/inside", "inside.test", port=port, methods=["POST"], effect="write")),
            tunnel_rule("dev/raw", "raw.test", port),
            destinations=[destination(secure, name) for name in secure.names],
        ),
        origins=[secure],
        journal=journal,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = listener.getsockname()
    first = len(secure.connections)

    async def accepted(stream: SocketStream) -> None:
        await house.room.front.serve(stream, SHARED)

    with bomb:
        server = await serve_streams(listener, accepted, on_fault=house.faults.append)
        client = _Client(address, f"{host}:{port}", host, secure.ca_pem if host == "raw.test" else _CA.root_pem)
        try:
            async with asyncio.timeout(SECONDS):
                await client.ended
                while house.room.live.count(lambda key: True) or house.room.gate.open_passages:
                    await asyncio.sleep(0.001)
        finally:
            server.close()
    # The client's side: it saw an end by itself, not its own time-out.
    assert client.saw_end, (bomb.owner, bomb.name, bomb.at)
    # The log: an outcome for each intent.
    for intent, outcome in (("request.intent", "request.outcome"), ("tunnel.intent", "tunnel.outcome")):
        begun = [event.fields["request_id"] for event in journal.named(intent)]
        ended = [event.fields["request_id"] for event in journal.named(outcome)]
        assert sorted(begun) == sorted(ended)
    assert house.room.gate.lost_outcomes == 0
    # The origin's side: closed, but for a sound connection that waits in the pool; and that goes with the pool.
    assert house.room.pool.in_use == 0
    await house.close()
    await secure.until(lambda: all(connection.closed for connection in secure.connections[first:]), SECONDS)
    await asyncio.sleep(0)  # an aborted transport lets go of its socket in the loop's next turn
    await close_houses()


class _Client:
    """A blocking client in a thread, with none of our code in it: CONNECT, TLS, a POST, read to the end."""

    def __init__(self, address: tuple[str, int], authority: str, name: str, ca_pem: str) -> None:
        self.saw_end = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                self._run(address, authority, name, ca_pem)
            finally:
                loop.call_soon_threadsafe(lambda: self.ended.done() or self.ended.set_result(None))

        threading.Thread(target=run, daemon=True).start()

    def _run(self, address: tuple[str, int], authority: str, name: str, ca_pem: str) -> None:
        try:
            with socket.create_connection(address, timeout=SECONDS) as connection:
                head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nProxy-Authorization: {basic()}\r\n\r\n"
                connection.sendall(head.encode())
                answer = b""
                while not answer.endswith(b"\r\n\r\n"):
                    piece = connection.recv(1)
                    if not piece:
                        self.saw_end = True
                        return
                    answer += piece
                with ssl.create_default_context(cadata=ca_pem).wrap_socket(connection, server_hostname=name) as tls:
                    body = b"b" * 20000
                    lines = f"POST /x HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\nContent-Length: {len(body)}"
                    tls.sendall(lines.encode() + b"\r\n\r\n" + body)
                    while tls.recv(65536):
                        pass
                    self.saw_end = True
        except TimeoutError:
            return
        except OSError:
            self.saw_end = True  # a reset, or an end without close_notify
