"""The dialer against real loopback origins: denials first, each with what the origin and the resolver saw."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest
import uvloop

from net.addresses import AddressTable
from net.contexts import ClientContexts
from net.dial import Connected, DialError, DialTarget, SocketDialer
from net.interfaces import InterfacesUnreadable
from net.resolve import Lookups
from net.trust import TrustKey
from rules.names import Destination, Host
from tests.support.authority import Certificate
from tests.support.origins import Origin
from tests.support.resolver import StaticResolver

LOOPBACK = (ip_network("127.0.0.0/8"),)


def dialer(resolver: StaticResolver, table: AddressTable | None = None, **more: object) -> SocketDialer:
    lookups = Lookups(resolver, clock=lambda: 0.0, seconds=0.05)
    return SocketDialer(lookups, ClientContexts(), lambda: table or AddressTable(), **more)  # type: ignore[arg-type]


def target(origin: Origin, name: str = "api.test", **changes: object) -> DialTarget:
    scheme = "https" if origin.tls else "http"
    plain = DialTarget(
        tenant="t",
        sandbox="sb",
        destination=Destination(scheme, Host.parse(name), origin.port),
        want_tls=origin.tls,
        addresses_allowed=LOOPBACK,
        trust=TrustKey(ca_pem=origin.ca_pem),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


async def refused(dial: SocketDialer, where: DialTarget) -> DialError:
    with pytest.raises(DialError) as raised:
        await dial.dial(where)
    return raised.value


async def test_our_own_name_is_never_looked_up_or_dialled() -> None:
    """The help host and everything below it stay here, whatever a policy says."""
    resolver = StaticResolver({"exeat.internal": ["127.0.0.1"], "x.exeat.internal": ["127.0.0.1"]})
    async with Origin("exeat.internal") as origin:
        for name in ("exeat.internal", "x.exeat.internal"):
            fault = await refused(dialer(resolver), target(origin, name, static=("127.0.0.1",)))
            assert fault.reason == "address-refused"
        assert (resolver.queries, origin.untouched) == ([], True)


REFUSED_ANSWERS = [
    (["127.0.0.1", "169.254.169.254"], "169.254.169.254", "a mixed set is refused whole (T04)"),
    (["169.254.169.254", "127.0.0.1"], "169.254.169.254", "in either order"),
    (["::ffff:169.254.169.254"], "::ffff:a9fe:a9fe", "embedded metadata address (T04)"),
    (["::ffff:127.0.0.1"], "::ffff:7f00:1", "embedded loopback is another address (B024)"),
    (["10.0.0.5"], "10.0.0.5", "outside the destination's own addresses"),
    (["localhost"], "localhost", "a resolver that answers a name"),
]


@pytest.mark.parametrize(("answers", "offender", "why"), REFUSED_ANSWERS)
async def test_a_forbidden_answer_refuses_the_dial_before_any_connection(
    answers: list[str], offender: str, why: str
) -> None:
    """The offending address is named for the record and nothing was connected (field case C041)."""
    async with Origin("api.test") as origin:
        fault = await refused(dialer(StaticResolver({"api.test": answers})), target(origin))
        assert fault.reason == "address-refused", why
        assert str(ip_address(fault.address) if ":" in fault.address else fault.address) in (
            offender,
            str(ip_address(offender)) if ":" in offender else offender,
        )
        assert origin.untouched


async def test_loopback_without_a_destination_entry_is_refused_by_name_literal_and_static() -> None:
    """The same address is refused however it comes: answer, literal host, static answer."""
    async with Origin("api.test") as origin:
        dial = dialer(StaticResolver({"api.test": ["127.0.0.1"]}))
        for where in (
            target(origin, addresses_allowed=()),
            target(origin, "127.0.0.1", addresses_allowed=()),
            target(origin, addresses_allowed=(), static=("127.0.0.1",)),
        ):
            assert (await refused(dial, where)).reason == "address-refused"
        assert origin.untouched


async def test_a_port_of_our_own_listeners_is_refused_although_a_destination_names_it() -> None:
    """A sandbox cannot reach the gateway through the gateway (I06)."""
    async with Origin("api.test") as origin:
        table = AddressTable(listener_ports=frozenset({origin.port}))
        fault = await refused(dialer(StaticResolver({"api.test": ["127.0.0.1"]}), table), target(origin))
        assert (fault.reason, fault.detail_for_log) == ("address-refused", "own-listener")
        assert origin.untouched


async def test_interfaces_are_read_at_every_dial_and_unreadable_ones_refuse() -> None:
    """An address that appears on an interface counts at once; without the list nothing is dialled."""
    resolver = StaticResolver({"api.test": ["93.184.216.34"]})
    async with Origin("api.test") as origin:
        where = target(origin, addresses_allowed=())

        def unreadable() -> frozenset[object]:
            raise InterfacesUnreadable("no netlink")

        own = dialer(resolver, interfaces=lambda: frozenset({ip_address("93.184.216.34")}))
        assert (await refused(own, where)).detail_for_log == "own-address"
        assert (await refused(dialer(resolver, interfaces=unreadable), where)).reason == "address-refused"


async def test_a_name_that_does_not_resolve_or_resolves_too_late_is_dns_failed() -> None:
    """No answer and a hanging resolver end within the bound and connect nothing."""
    async with Origin("api.test") as origin:
        resolver = StaticResolver({"late.test": ["127.0.0.1"]})
        assert (await refused(dialer(resolver), target(origin))).reason == "dns-failed"
        resolver.hold()
        assert (await refused(dialer(resolver), target(origin, "late.test"))).reason == "dns-failed"
        resolver.let_go()
        assert origin.untouched


async def test_a_closed_port_is_upstream_unreachable() -> None:
    """A refused connection is reported with its address and system error."""
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    async with Origin("api.test") as origin:
        where = replace(target(origin), destination=Destination("https", Host.parse("api.test"), free.getsockname()[1]))
        fault = await refused(dialer(StaticResolver({"api.test": ["127.0.0.1"]})), where)
        assert (fault.reason, fault.detail_for_log) == ("upstream-unreachable", "127.0.0.1: ECONNREFUSED")
    free.close()


BAD_CERTIFICATES: list[tuple[Certificate, str]] = [
    ("wrong-name", "Hostname mismatch"),
    ("expired", "certificate has expired"),
    ("not-yet-valid", "certificate is not yet valid"),
    ("self-signed", "self-signed certificate"),
    ("untrusted", "unable to get local issuer certificate"),
]


@pytest.mark.parametrize(("certificate", "expected"), BAD_CERTIFICATES)
async def test_a_bad_certificate_is_upstream_certificate_and_no_byte_follows(
    certificate: Certificate, expected: str
) -> None:
    """T08: the dial fails for the stated reason and the origin gets no request byte."""
    async with Origin("api.test", certificate=certificate) as origin:
        fault = await refused(dialer(StaticResolver({"api.test": ["127.0.0.1"]})), target(origin))
        assert fault.reason == "upstream-certificate"
        assert expected in fault.detail_for_log
        await origin.until(lambda: len(origin.handshake_failures) == 1)
        assert (origin.handshakes, origin.bytes_in) == (0, 0)


async def test_a_private_ca_is_not_believed_without_its_destination_entry() -> None:
    """The system store alone does not vouch for a test origin; nor does another destination's CA."""
    async with Origin("api.test") as origin, Origin("other.test") as other:
        dial = dialer(StaticResolver({"api.test": ["127.0.0.1"]}))
        for trust in (TrustKey(), TrustKey(ca_pem=other.ca_pem)):
            assert (await refused(dial, target(origin, trust=trust))).reason == "upstream-certificate"
        assert origin.handshakes == 0


async def test_an_unusable_ca_connects_nothing() -> None:
    """A destination whose CA cannot be read is refused before a connection is made."""
    async with Origin("api.test") as origin:
        dial = dialer(StaticResolver({"api.test": ["127.0.0.1"]}))
        fault = await refused(dial, target(origin, trust=TrustKey(ca_pem="canary")))
        assert fault.reason == "upstream-certificate"
        assert "canary" not in str(fault)
        assert origin.untouched


async def test_clear_text_where_tls_is_wanted_is_upstream_protocol() -> None:
    """An origin that does not speak TLS is refused, and there is no fallback to clear text."""
    accepted = 0

    async def confused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(confused, "127.0.0.1", 0)
    async with Origin("api.test") as origin, server:
        port = server.sockets[0].getsockname()[1]
        where = target(origin, destination=Destination("https", Host.parse("api.test"), port))
        fault = await refused(dialer(StaticResolver({"api.test": ["127.0.0.1"]})), where)
        assert (fault.reason, accepted) == ("upstream-protocol", 1)


async def test_an_origin_that_never_answers_the_handshake_is_a_timeout() -> None:
    """The whole of connecting and TLS has one bound."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    async with Origin("api.test") as origin:
        where = target(origin, destination=Destination("https", Host.parse("api.test"), silent.getsockname()[1]))
        dial = dialer(StaticResolver({"api.test": ["127.0.0.1"]}), seconds=0.1)
        assert (await refused(dial, where)).reason == "upstream-timeout"
    silent.close()


async def test_scheme_and_tls_must_agree() -> None:
    """A caller that would send a https request in clear text is stopped here."""
    async with Origin("api.test") as origin:
        fault = await refused(dialer(StaticResolver()), target(origin, want_tls=False))
        assert fault.reason == "internal-error"
        assert origin.untouched


async def test_a_permitted_name_is_resolved_once_and_connected_verified() -> None:
    """One lookup, one connection to the vetted address, TLS for the name; the answer is then kept for the sandbox."""
    resolver = StaticResolver({"api.test": ["127.0.0.2"]})
    async with Origin("api.test", address="127.0.0.2") as origin:
        dial = dialer(resolver)
        for _ in range(2):
            connected = await dial.dial(target(origin))
            assert (connected.address, connected.tls_version) == ("127.0.0.2", "TLSv1.3")
            await exchange(connected)
        assert resolver.queries == [("api.test", origin.port)]
        assert [connection.sni for connection in origin.connections] == ["api.test", "api.test"]
        assert [connection.alpn for connection in origin.connections] == ["http/1.1", "http/1.1"]


async def test_a_kept_answer_is_vetted_again() -> None:
    """What was allowed a moment ago is refused once the table says so."""
    resolver = StaticResolver({"api.test": ["127.0.0.1"]})
    tables = [AddressTable()]
    async with Origin("api.test") as origin:
        lookups = Lookups(resolver, clock=lambda: 0.0)
        dial = SocketDialer(lookups, ClientContexts(), lambda: tables[-1])
        (await dial.dial(target(origin))).stream.abort()
        tables.append(AddressTable(listener_ports=frozenset({origin.port})))
        assert (await refused(dial, target(origin))).reason == "address-refused"
        assert len(resolver.queries) == 1


async def test_static_addresses_and_literals_are_dialled_without_a_lookup() -> None:
    """`resolve:` replaces DNS; an IP literal is verified by its address in the certificate."""
    resolver = StaticResolver()
    async with Origin("api.test", address="127.0.0.3") as origin:
        for where in (target(origin, static=("127.0.0.3",)), target(origin, "127.0.0.3")):
            await exchange(await dialer(resolver).dial(where))
        assert resolver.queries == []


async def test_the_next_vetted_address_is_tried_when_one_does_not_answer() -> None:
    """A dead first address costs no failure."""
    async with Origin("api.test", address="127.0.0.4") as origin:
        dial = dialer(StaticResolver({"api.test": ["127.0.0.5", "127.0.0.4"]}))
        connected = await dial.dial(target(origin))
        assert connected.address == "127.0.0.4"
        await exchange(connected)


async def test_clear_text_is_dialled_only_as_such() -> None:
    """A destination with scheme http gets a plain connection and says so."""
    async with Origin("api.test", tls=False) as origin:
        connected = await dialer(StaticResolver({"api.test": ["127.0.0.1"]})).dial(target(origin))
        assert connected.tls_version is None
        await exchange(connected)


async def test_nothing_is_sent_before_the_caller_sends() -> None:
    """After a dial the origin has completed a handshake and received no application byte."""
    async with Origin("api.test") as origin:
        connected = await dialer(StaticResolver({"api.test": ["127.0.0.1"]})).dial(target(origin))
        await origin.until(lambda: origin.handshakes == 1)
        assert origin.bytes_in == 0
        connected.stream.abort()


async def exchange(connected: Connected) -> None:
    """One request over the dialled stream, to its end."""
    stream = connected.stream
    stream.write(b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
    await stream.drain()
    answer = b""
    while piece := await stream.receive():
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")
    await stream.close()


def test_the_dialer_works_on_uvloop_too() -> None:
    """The same dial, verified and refused, on the loop that workers run on."""

    async def both(origin: Origin) -> None:
        dial = dialer(StaticResolver({"api.test": ["127.0.0.1"]}))
        await exchange(await dial.dial(target(origin)))
        assert (await refused(dial, target(origin, trust=TrustKey()))).reason == "upstream-certificate"
        closed = replace(target(origin), destination=Destination("https", Host.parse("api.test"), 1))
        assert (await refused(dial, closed)).reason == "upstream-unreachable"

    with Origin("api.test").run_in_thread() as origin:
        uvloop.run(both(origin))
        assert [request.target for request in origin.received] == ["/"]
