"""The way through the operator's upstream proxy: refusals first, each with what proxy, origin and resolver saw."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.addresses import AddressRefused, AddressTable, Vetted
from net.contexts import ClientContexts
from net.dial import Connected, DialError, DialTarget, SocketDialer
from net.interfaces import InterfacesUnreadable
from net.pool import Pool, PoolKey
from net.resolve import Lookups
from net.trust import TrustKey
from net.upstream import MAX_PROXY_HEAD, ProxyRefused, UpstreamProxy, ask_for_tunnel
from rules.names import Destination, Host
from tests.support.authority import Authority
from tests.support.forwarders import SILENCE, Forwarder
from tests.support.origins import Origin
from tests.support.resolver import StaticResolver
from tests.support.streams import MemoryStream

NAME = "api.example.com"
PASSWORD = "canary-7c1f5e20-password"
BASIC = b"Basic " + base64.b64encode(f"corp:{PASSWORD}".encode())


def dialer(
    proxy: Forwarder | UpstreamProxy,
    resolver: StaticResolver | None = None,
    table: AddressTable | None = None,
    **more: object,
) -> SocketDialer:
    if isinstance(proxy, Forwarder):
        proxy = UpstreamProxy(host=proxy.address, port=proxy.port, authorization=BASIC)
    lookups = Lookups(resolver or StaticResolver(), clock=lambda: 0.0, seconds=0.05)
    return SocketDialer(lookups, ClientContexts(), lambda: table or AddressTable(), upstream=proxy, **more)  # type: ignore[arg-type]


def target(origin: Origin, name: str = NAME, **changes: object) -> DialTarget:
    plain = DialTarget(
        tenant="t",
        sandbox="sb",
        destination=Destination("https" if origin.tls else "http", Host.parse(name), origin.port),
        want_tls=origin.tls,
        trust=TrustKey(ca_pem=origin.ca_pem),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def places(*origins: Origin) -> Mapping[str, tuple[str, int]]:
    return {name: (origin.address, origin.port) for origin in origins for name in origin.names}


async def refused(dial: SocketDialer, where: DialTarget) -> DialError:
    with pytest.raises(DialError) as raised:
        await dial.dial(where)
    assert PASSWORD not in str(raised.value), "the password is in no message"
    assert raised.value.address == ("" if "own name" in raised.value.detail_for_log else "delegated")
    return raised.value


NOT_BY_NAME = [
    ("exeat.internal", "our own name"),
    ("help.exeat.internal", "below our own name"),
    ("127.0.0.1", "loopback"),
    ("169.254.169.254", "metadata"),
    ("93.184.216.34", "a public literal: nothing says where the proxy would route it"),
    ("[::1]", "IPv6 loopback"),
    ("[2606:2800:220:1::1]", "a public IPv6 literal"),
    ("printer.local", "multicast DNS"),
    ("metadata.google.internal", "a cloud's metadata service (T04)"),
    ("host.docker.internal", "the host of a container"),
    ("kubernetes.default.svc", "a cluster's API"),
    ("kubernetes.default.svc.cluster.local", "a cluster's API in full"),
    ("wiki.corp", "used inside networks"),
    ("nas.home.arpa", "RFC 8375"),
    ("1.0.0.127.in-addr.arpa", "reverse names"),
    ("router.lan", "used inside networks"),
    ("x.onion", "RFC 7686"),
    ("api.test", "RFC 6761"),
]


@pytest.mark.parametrize(("name", "why"), NOT_BY_NAME)
async def test_what_cannot_be_vetted_behind_the_proxy_is_not_named_to_it(name: str, why: str) -> None:
    """Literals and special-use names are refused before the proxy, a resolver or the origin see anything."""
    resolver = StaticResolver({name: ["127.0.0.1"]})
    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        fault = await refused(dialer(proxy, resolver), target(origin, name))
        assert fault.reason == "address-refused", why
        assert (proxy.connections, resolver.queries, origin.untouched) == (0, [], True)


async def test_a_destination_tied_to_addresses_is_refused_behind_the_proxy() -> None:
    """`addresses:` and `resolve:` could not be kept there; the detail says what to do, and nothing is dialled."""
    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        for tie in ({"static": ("127.0.0.1",)}, {"addresses_allowed": (ip_network("127.0.0.0/8"),)}):
            fault = await refused(dialer(proxy), target(origin, **tie))
            assert fault.reason == "address-refused"
            assert "upstream.except" in fault.detail_for_log
        assert (proxy.connections, origin.untouched) == (0, True)


ANSWERS = [
    (b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n", "407", "a wrong password"),
    (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 4\r\n\r\nevil", "answered 403", "the proxy's own policy"),
    (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "answered 503", "it cannot reach the place"),
    (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n", "answered 302", "nothing is followed"),
    (b"HTTP/1.1 201 Created\r\n\r\n", "answered 201", "only 200 opens a tunnel"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", "answered 204", "only 200 opens a tunnel"),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "answered 100", "an interim answer is no tunnel"),
    (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "answered 101", "nor is an upgrade"),
    (b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "bytes after", "an answer nobody asked for"),
    (b"HTTP/1.1 200 OK\r\n\r\n\x16\x03\x03", "bytes after", "no server speaks first in TLS"),
    (b"HTTP/1.1 200 OK\nX: y\n\n", "without an answer", "bare line feeds are no head, and then it ended"),
    (b"HTTP/1.1 200 OK\r\nX\x00: y\r\n\r\n", "not an HTTP head", "a control character"),
    (b"HTTP/1.1 200 OK\r\n folded\r\n\r\n", "not an HTTP head", "a folded line"),
    (b"HTTP/2 200\r\n\r\n", "not an HTTP head", "another version"),
    (b"SSH-2.0-x\r\n\r\n", "not an HTTP head", "another protocol"),
    (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 65 + b"\r\n", "not an HTTP head", "more header fields than there may be"),
    (b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_PROXY_HEAD, "too long", "a head without end is not read on"),
    (b"HTTP/1.1 200 OK\r\n", "without an answer", "it closed in the middle"),
    (b" ", "without an answer", "hardly anything"),
]


@pytest.mark.parametrize(("answer", "said", "why"), ANSWERS)
async def test_only_a_clean_200_of_the_proxy_opens_a_tunnel(answer: bytes, said: str, why: str) -> None:
    """Anything else is a refusal with a sentence of ours; nothing follows the CONNECT head, the origin saw nothing."""
    async with Origin(NAME) as origin, Forwarder(answer=answer) as proxy:
        fault = await refused(dialer(proxy), target(origin))
        assert fault.reason == "upstream-unreachable", why
        assert said in fault.detail_for_log, why
        assert "evil" not in fault.detail_for_log
        assert (len(proxy.heads), bytes(proxy.carried), origin.untouched) == (1, b"", True)


async def test_a_407_says_whether_a_credential_is_missing_or_wrong() -> None:
    """The operator reads which of the two it is."""
    answer = b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"
    async with Origin(NAME) as origin, Forwarder(answer=answer) as proxy:
        without = UpstreamProxy(host="127.0.0.1", port=proxy.port)
        assert "does not accept upstream.credential" in (await refused(dialer(proxy), target(origin))).detail_for_log
        assert "asks for a credential" in (await refused(dialer(without), target(origin))).detail_for_log
        assert b"Proxy-Authorization" not in proxy.heads[1]


async def test_a_silent_proxy_ends_at_the_deadline() -> None:
    """It accepts, reads and says nothing: the dial ends in its own time and nothing else is tried."""
    async with Origin(NAME) as origin, Forwarder(answer=SILENCE) as proxy:
        fault = await refused(dialer(proxy, seconds=0.2), target(origin))
        assert (fault.reason, origin.untouched, proxy.connections) == ("upstream-timeout", True, 1)


async def test_a_proxy_that_is_down_is_a_refusal_and_the_direct_way_is_not_tried() -> None:
    """The name would resolve and the origin is there; neither is asked."""
    resolver = StaticResolver({NAME: ["127.0.0.1"]})
    async with Forwarder() as gone:
        port = gone.port
    async with Origin(NAME) as origin:
        dial = dialer(UpstreamProxy(host="127.0.0.1", port=port), resolver)
        fault = await refused(dial, target(origin))
        assert fault.reason == "upstream-unreachable"
        assert fault.detail_for_log.startswith("the upstream proxy: ")
        assert (resolver.queries, origin.untouched) == ([], True)


NOT_A_PROXY = [
    (["0.0.0.0"], "this-network", "unspecified leads to ourselves"),
    (["169.254.169.254"], "link-local", "the password does not go to a metadata service"),
    (["168.63.129.16"], "cloud-platform", "nor to a cloud's host agent"),
    (["224.0.0.1"], "multicast", "not one place"),
    (["::ffff:10.0.0.1"], "ipv4-mapped of private", "an embedded form"),
    (["10.0.0.1", "169.254.1.1"], "link-local", "one bad answer refuses all"),
    (["proxy"], "not an address", "a resolver that answers a name"),
    ([], "no address", "nothing"),
]


@pytest.mark.parametrize(("addresses", "said", "why"), NOT_A_PROXY)
def test_where_the_operators_proxy_may_not_be(addresses: list[str], said: str, why: str) -> None:
    """It may be private or on this machine, but not everywhere."""
    verdict = AddressTable().vet_operators(addresses, 3128)
    assert isinstance(verdict, AddressRefused), why
    assert verdict.why == said


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "loopback"),
        ("127.9.9.9", "all of loopback"),
        ("::1", "IPv6 loopback"),
        ("10.0.0.9", "an interface"),
        ("198.51.100.7", "self_addresses"),
    ],
)
def test_our_own_listener_is_not_the_proxy(address: str, why: str) -> None:
    """An address of this machine with a listener's port is us and would ask us again; with another port it is not."""
    table = AddressTable(
        own=frozenset({ip_address("10.0.0.9")}),
        self_addresses=(ip_network("198.51.100.7/32"),),
        listener_ports=frozenset({3128}),
    )
    verdict = table.vet_operators([address], 3128)
    assert isinstance(verdict, AddressRefused), why
    assert verdict.why == "own-listener"
    assert isinstance(table.vet_operators([address], 3129), Vetted)


def test_a_proxy_elsewhere_may_have_our_port_and_a_private_address() -> None:
    """3128 is customary; internal ranges are where such proxies are."""
    table = AddressTable(listener_ports=frozenset({3128}), internal_ranges=(ip_network("10.0.0.0/8"),))
    for address in ("10.1.2.3", "192.168.1.1", "100.64.0.1", "93.184.216.34", "fd00::1"):
        assert table.vet_operators([address], 3128) == Vetted(addresses=(address,))


async def test_a_proxy_that_is_our_own_listener_is_never_connected_to() -> None:
    """The same check at the dial: the connection is not made."""
    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        fault = await refused(dialer(proxy, table=AddressTable(listener_ports=frozenset({proxy.port}))), target(origin))
        assert (fault.reason, proxy.connections) == ("upstream-unreachable", 0)
        assert "own-listener" in fault.detail_for_log


async def test_unreadable_interfaces_refuse_the_proxy_as_well() -> None:
    """Without knowing our own addresses nothing is vetted."""

    def unreadable() -> frozenset[object]:
        raise InterfacesUnreadable("interfaces cannot be read")

    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        fault = await refused(dialer(proxy, interfaces=unreadable), target(origin))
        assert (fault.reason, proxy.connections) == ("upstream-unreachable", 0)


async def test_a_proxy_whose_name_does_not_resolve_is_a_refusal() -> None:
    """The proxy's name is the only one that is looked up."""
    resolver = StaticResolver({NAME: ["127.0.0.1"]})
    async with Origin(NAME) as origin:
        fault = await refused(dialer(UpstreamProxy(host="proxy.corp.example", port=3128), resolver), target(origin))
        assert fault.reason == "upstream-unreachable"
        assert resolver.queries == [("proxy.corp.example", 3128)]
        assert origin.untouched


async def test_the_origins_certificate_is_verified_through_the_tunnel() -> None:
    """A wrong name, another authority, or an inspecting proxy that nobody named: no request byte goes in."""
    other = Authority("Nobody's")
    for origin, trust in (
        (Origin("other.example.com"), None),
        (Origin(NAME), TrustKey()),
        (Origin(NAME), TrustKey(ca_pem=other.pem)),
        (Origin(NAME, certificate="expired"), None),
    ):
        async with origin, Forwarder({NAME: (origin.address, origin.port)}) as proxy:
            where = target(origin) if trust is None else target(origin, trust=trust)
            assert (await refused(dialer(proxy), where)).reason == "upstream-certificate"
            assert origin.bytes_in == 0


async def test_the_proxys_authority_counts_for_nothing_that_is_dialled_directly() -> None:
    """`ca` of the upstream proxy vouches for what it carries, not for an excepted host."""
    inspecting = Authority("Inspecting proxy")
    async with Origin(NAME, authority=inspecting) as origin, Forwarder(places(origin)) as proxy:
        upstream = UpstreamProxy(host="127.0.0.1", port=proxy.port, ca_pem=inspecting.pem, direct=(NAME,))
        where = target(origin, trust=TrustKey(), static=("127.0.0.1",), addresses_allowed=(ip_network("127.0.0.1/32"),))
        with pytest.raises(DialError) as raised:
            await dialer(upstream).dial(where)
        assert (raised.value.reason, raised.value.address) == ("upstream-certificate", "127.0.0.1")
        assert proxy.connections == 0


async def test_an_unusable_authority_of_the_proxy_refuses_before_it_is_connected_to() -> None:
    """Nothing falls back to the system's roots alone."""
    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        upstream = UpstreamProxy(host="127.0.0.1", port=proxy.port, ca_pem="no certificate")
        assert (await refused(dialer(upstream), target(origin))).reason == "upstream-certificate"
        assert proxy.connections == 0


@pytest.mark.parametrize(
    ("host", "direct", "carried", "why"),
    [
        ("git.example.com", ("git.example.com",), False, "named"),
        ("a.git.example.com", ("git.example.com",), True, "what lies below a name is not the name"),
        ("a.example.com", ("*.example.com",), False, "below the pattern"),
        ("a.b.example.com", ("*.example.com",), False, "further below"),
        ("example.com", ("*.example.com",), True, "the name itself is not below it"),
        ("notexample.com", ("*.example.com",), True, "labels are compared, not characters"),
        ("10.0.0.1", ("10.0.0.1",), False, "an address by its one spelling"),
        ("10.0.0.1", ("*.0.0.1",), True, "an address has no labels"),
    ],
)
def test_who_is_excepted(host: str, direct: tuple[str, ...], carried: bool, why: str) -> None:
    """Exact names, everything below a name, exact addresses."""
    assert UpstreamProxy(host="127.0.0.1", port=1, direct=direct).carries(Host.parse(host)) == carried, why


async def test_an_excepted_host_is_dialled_directly_and_vetted() -> None:
    """Its addresses pass the table or it is refused; the proxy hears nothing of it."""
    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        upstream = UpstreamProxy(host="127.0.0.1", port=proxy.port, direct=(NAME,))
        resolver = StaticResolver({NAME: ["127.0.0.1"]})
        with pytest.raises(DialError) as raised:
            await dialer(upstream, resolver).dial(target(origin))
        assert (raised.value.reason, raised.value.address) == ("address-refused", "127.0.0.1")
        connected = await dialer(upstream, resolver).dial(
            target(origin, addresses_allowed=(ip_network("127.0.0.1/32"),))
        )
        assert connected.address == "127.0.0.1"
        await exchange(connected)
        assert proxy.connections == 0


async def test_a_permitted_name_goes_through_the_proxy_unresolved_and_verified() -> None:
    """One CONNECT by name with the credential, TLS for the name inside, `delegated` as the address."""
    resolver = StaticResolver({"proxy.corp.example": ["127.0.0.1"]})
    async with Origin(NAME) as origin, Forwarder(places(origin)) as proxy:
        upstream = UpstreamProxy(host="proxy.corp.example", port=proxy.port, authorization=BASIC)
        dial = dialer(upstream, resolver)
        for _ in range(2):
            connected = await dial.dial(target(origin))
            assert (connected.address, connected.tls_version) == ("delegated", "TLSv1.3")
            await exchange(connected)
        where = f"{NAME}:{origin.port}".encode()
        assert (
            proxy.heads
            == [b"CONNECT %b HTTP/1.1\r\nHost: %b\r\nProxy-Authorization: %b\r\n\r\n" % (where, where, BASIC)] * 2
        )
        assert resolver.queries == [("proxy.corp.example", proxy.port)]
        assert PASSWORD.encode() not in bytes(proxy.carried)
        assert [connection.sni for connection in origin.connections] == [NAME, NAME]
        assert BASIC not in b"".join(request.raw_head for request in origin.received)


async def test_clear_text_goes_through_the_proxy_by_connect_as_well() -> None:
    """Never as an absolute-form request, which the proxy could answer itself."""
    async with Origin(NAME, tls=False) as origin, Forwarder(places(origin)) as proxy:
        connected = await dialer(proxy).dial(target(origin))
        assert (connected.address, connected.tls_version) == ("delegated", None)
        await exchange(connected)
        assert proxy.heads[0].startswith(b"CONNECT ")


@pytest.mark.parametrize("pinned", [True, False], ids=["beside the destination's own", "beside the system's"])
async def test_the_authority_of_an_inspecting_proxy_is_believed_for_what_it_carries(pinned: bool) -> None:
    """`ca` is added to what the destination believes."""
    inspecting = Authority("Inspecting proxy")
    async with Origin(NAME, authority=inspecting) as origin, Forwarder(places(origin)) as proxy:
        upstream = UpstreamProxy(host="127.0.0.1", port=proxy.port, ca_pem=inspecting.pem)
        trust = TrustKey(ca_pem=Authority("Of the destination").pem) if pinned else TrustKey()
        await exchange(await dialer(upstream).dial(target(origin, trust=trust)))


async def test_a_pooled_connection_belongs_to_the_proxy_that_it_went_through() -> None:
    """The key of a lease names the proxy, or nothing for an excepted host."""
    async with Origin(NAME, tls=False) as origin, Forwarder(places(origin)) as proxy:
        dial = dialer(proxy)
        pool = Pool(dial, clock=lambda: 0.0)
        lease = await pool.acquire(PoolKey(target=target(origin)))
        assert (lease.key.via, lease.address) == (f"127.0.0.1:{proxy.port}", "delegated")
        assert lease.key != PoolKey(target=target(origin))
        await pool.close()
        direct = dialer(UpstreamProxy(host="127.0.0.1", port=proxy.port, direct=(NAME,)))
        assert direct.via(target(origin)) == ""


@given(pieces=st.lists(st.integers(1, 40), max_size=6), answer=st.sampled_from([row[0] for row in ANSWERS[:12]]))
async def test_an_answer_is_judged_alike_however_it_is_cut(pieces: list[int], answer: bytes) -> None:
    """Every split of a refused answer is refused; the one good answer is accepted in every split."""
    destination = Destination("https", Host.parse(NAME), 443)
    for said, good in ((answer, False), (b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\n", True)):
        near, far = MemoryStream.pair()
        rest = said
        for size in pieces:
            far.write(rest[:size])
            rest = rest[size:]
        far.write(rest)
        await far.send_eof()
        if good:
            await ask_for_tunnel(near, destination, b"")
        else:
            with pytest.raises(ProxyRefused):
                await ask_for_tunnel(near, destination, b"")


async def exchange(connected: Connected) -> None:
    """One request over the dialled stream, to its end."""
    stream = connected.stream
    stream.write(b"GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
    await stream.drain()
    answer = b""
    while piece := await stream.receive():
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")
    await stream.close()
