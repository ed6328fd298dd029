"""The address table: denials row by row, the property over embedded forms, then what a destination may open."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.addresses import SPECIAL, AddressRefused, AddressTable, Vetted, classify, embedded
from tests.support.properties import tried
from tests.support.rows import every_row

TABLE = AddressTable()

FORBIDDEN = [
    ("0.0.0.0", "this-network", "Linux connects it to loopback"),
    ("0.255.255.255", "this-network", "the last address of this network"),
    ("10.0.0.5", "private", "RFC 1918"),
    ("172.16.0.1", "private", "RFC 1918, first of its range"),
    ("172.31.255.255", "private", "RFC 1918, last of its range"),
    ("192.168.1.1", "private", "RFC 1918"),
    ("100.64.0.1", "carrier-grade-nat", "neither private nor global for the standard helper (B020)"),
    ("100.100.100.200", "carrier-grade-nat", "a cloud's metadata service"),
    ("127.0.0.1", "loopback", "ourselves"),
    ("127.255.255.254", "loopback", "ourselves"),
    ("169.254.169.254", "link-local", "the metadata service of most clouds"),
    ("168.63.129.16", "cloud-platform", "global for the standard helper (B020)"),
    ("192.0.0.192", "ietf-protocol", "a cloud's metadata service"),
    ("192.0.2.1", "documentation", "never a real host"),
    ("198.51.100.7", "documentation", "never a real host"),
    ("203.0.113.9", "documentation", "never a real host"),
    ("198.18.0.1", "benchmarking", "B020"),
    ("224.0.0.1", "multicast", "global for the standard helper (B020)"),
    ("239.255.255.255", "multicast", "the last of multicast"),
    ("240.0.0.1", "reserved", "class E"),
    ("255.255.255.255", "reserved", "limited broadcast"),
    ("::", "unspecified", "Linux connects it to loopback"),
    ("::1", "loopback", "ourselves"),
    ("::2", "ipv4-compatible of this-network", "what is left of the compatible range"),
    ("::ffff:127.0.0.1", "ipv4-mapped of loopback", "B024"),
    ("::ffff:169.254.169.254", "ipv4-mapped of link-local", "T04"),
    ("::ffff:8.8.8.8", "ipv4-mapped", "honest DNS does not answer mapped addresses"),
    ("::ffff:0:10.0.0.1", "ipv4-translated of private", "SIIT"),
    ("::10.0.0.1", "ipv4-compatible of private", "RFC 4291, deprecated"),
    ("64:ff9b::7f00:1", "nat64 of loopback", "RFC 6052 well-known prefix"),
    ("64:ff9b:1::a00:1", "nat64-local of private", "RFC 8215 local-use prefix"),
    ("64:ff9b:1::808:808", "nat64-local", "RFC 8215: what it leads to is local knowledge"),
    ("2002:7f00:1::1", "6to4", "RFC 3056 around loopback"),
    ("2002:808:808::1", "6to4", "deprecated relays, public inside or not"),
    ("2001::1", "ietf-protocol", "Teredo"),
    ("2001:4860::5efe:10.0.0.1", "isatap of private", "RFC 5214 in a public prefix"),
    ("2001:4860::200:5efe:127.0.0.1", "isatap of loopback", "RFC 5214 with the universal bit"),
    ("fc00::1", "unique-local", "RFC 4193"),
    ("fd00:ec2::254", "unique-local", "a cloud's metadata service"),
    ("fe80::1", "link-local", "RFC 4291"),
    ("fec0::1", "site-local", "deprecated, still routed somewhere"),
    ("ff02::1", "multicast", "RFC 4291"),
    ("100::1", "discard-only", "RFC 6666"),
    ("2001:db8::1", "documentation", "never a real host"),
    ("3fff::1", "documentation", "RFC 9637"),
    ("5f00::1", "unallocated", "SRv6 identifiers, outside global unicast"),
    ("4000::1", "unallocated", "outside global unicast"),
    ("2001:4860::1%eth0", "zoned", "a zone makes it another address on another link"),
]


@every_row(("address", "expected", "why"), FORBIDDEN, ids=[row[0] for row in FORBIDDEN])
def test_a_special_address_is_refused_by_name(address: str, expected: str, why: str) -> None:
    """Every row is refused and the record can say which range it was."""
    assert classify(address) == expected, why
    assert TABLE.vet([address], 443) == AddressRefused(address=str(ip_address(address)), why=expected)


def test_the_edges_of_every_ipv4_range_are_inside_it() -> None:
    """First and last address of each row are refused: no row is off by one."""
    for row in SPECIAL:
        if row.network.version == 4:
            assert classify(row.network[0]), row
            assert classify(row.network[-1]), row


forbidden_v4 = st.sampled_from([row.network for row in SPECIAL if row.network.version == 4]).flatmap(
    lambda network: st.integers(int(network[0]), int(network[-1])).map(IPv4Address)
)


@tried(400)
@given(inner=forbidden_v4, prefix=st.integers(0x2003, 0x2FFF), rest=st.integers(0, 2**64 - 1))
def test_every_embedding_of_a_forbidden_ipv4_is_forbidden(inner: IPv4Address, prefix: int, rest: int) -> None:
    """However a forbidden IPv4 address is wrapped into IPv6, the wrapping is refused and cannot be opened."""
    four = int(inner)
    inverted = ~four & 0xFFFFFFFF
    wrappings = [
        0xFFFF << 32 | four,
        0xFFFF << 48 | four,
        four,
        0x64FF9B << 96 | four,
        0x64FF9B0001 << 80 | (rest & 0xFFFFFFFFFFFF) << 32 | four,
        0x2002 << 112 | four << 80 | rest,
        0x20010000 << 96 | four << 64 | rest,
        0x20010000 << 96 | (rest >> 32) << 64 | (rest & 0xFFFFFFFF) >> 32 << 32 | inverted,
        prefix << 112 | 0x5EFE << 32 | four,
        prefix << 112 | 0x02005EFE << 32 | four,
    ]
    for value in wrappings:
        address = IPv6Address(value)
        if value in (0, 1):
            continue  # :: and ::1 are addresses of their own, refused by their own rows
        assert classify(address) is not None, address
        assert inner in [found for _, found in embedded(address)], address
        openers = (ip_network("::/0"), ip_network("0.0.0.0/0"), ip_network((int(address), 128)))
        if not isinstance(TABLE.vet([str(address)], 443, openers), AddressRefused):
            pytest.fail(f"{address} was opened")


@tried(400)
@given(value=st.integers(0, 2**32 - 1))
def test_nothing_private_for_the_standard_library_is_public_here(value: int) -> None:
    """Our table refuses at least what ipaddress calls non-global, multicast or reserved."""
    address = IPv4Address(value)
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert classify(address) is not None


@tried(400)
@given(value=st.integers(0, 2**128 - 1))
def test_nothing_but_global_unicast_and_nat64_is_public_in_ipv6(value: int) -> None:
    """An IPv6 address passes only from 2000::/3, or as NAT64 of a public IPv4 address."""
    address = IPv6Address(value)
    if classify(address) is None:
        assert address in ip_network("2000::/3") or address in ip_network("64:ff9b::/96")
        assert address.is_global or address in ip_network("64:ff9b::/96")


def test_one_forbidden_answer_refuses_the_whole_set() -> None:
    """A mixed set is refused and names the offender (T04, B022)."""
    assert TABLE.vet(["93.184.216.34", "169.254.169.254"], 443) == AddressRefused(
        address="169.254.169.254", why="link-local"
    )


def test_an_empty_set_and_what_is_no_address_are_refused() -> None:
    """No answer, a name, a legacy spelling and leading zeros are refusals, not exceptions (B018)."""
    assert isinstance(TABLE.vet([], 443), AddressRefused)
    for text in ("localhost", "2130706433", "0x7f.1", "127.1", "0177.0.0.1", "010.0.0.1", "", "1.2.3.4:80"):
        assert TABLE.vet([text], 443) == AddressRefused(address=text, why="not an address")


def test_our_own_listeners_are_refused_on_any_address_even_when_named() -> None:
    """No destination entry opens a port of ours: a published or translated address is us as well (I06)."""
    table = AddressTable(listener_ports=frozenset({3128}))
    for address in ("127.0.0.1", "93.184.216.34", "10.1.1.1"):
        refused = table.vet([address], 3128, (ip_network(f"{address}/32"),))
        assert refused == AddressRefused(address=address, why="own-listener")
    assert isinstance(table.vet(["93.184.216.34"], 443), Vetted)


def test_public_addresses_of_this_machine_are_refused_with_their_ipv6_neighbourhood() -> None:
    """An interface's public address is us, and the /64 of a global IPv6 one is our own network."""
    table = AddressTable(own=frozenset({ip_address("93.184.216.34"), ip_address("2001:4860:1:2::5")}))
    assert table.vet(["93.184.216.34"], 443) == AddressRefused(address="93.184.216.34", why="own-address")
    assert isinstance(table.vet(["93.184.216.35"], 443), Vetted)
    assert table.vet(["2001:4860:1:2::5"], 443) == AddressRefused(address="2001:4860:1:2::5", why="own-address")
    assert table.vet(["2001:4860:1:2:ffff::9"], 443) == AddressRefused(
        address="2001:4860:1:2:ffff::9", why="own-network"
    )
    assert isinstance(table.vet(["2001:4860:1:3::5"], 443), Vetted)


def test_internal_ranges_and_self_addresses_are_refused() -> None:
    """What the operator calls internal is not public, whatever its number says."""
    table = AddressTable(internal_ranges=(ip_network("93.184.0.0/16"),), self_addresses=(ip_network("9.9.9.9/32"),))
    assert table.vet(["93.184.216.34"], 443) == AddressRefused(address="93.184.216.34", why="internal-range")
    assert table.vet(["9.9.9.9"], 443) == AddressRefused(address="9.9.9.9", why="self-address")


TOO_WIDE = [
    ("10.20.0.1", "0.0.0.0/0", "private", "everything is wider than the private range"),
    ("10.20.0.1", "8.0.0.0/5", "private", "one bit wider than 10.0.0.0/8"),
    ("169.254.169.254", "169.0.0.0/8", "link-local", "metadata is not opened by accident"),
    ("::1", "::/0", "loopback", "everything is wider than loopback"),
    ("224.0.0.1", "224.0.0.1/32", "multicast", "multicast is nobody's destination"),
    ("0.0.0.0", "0.0.0.0/32", "this-network", "the unspecified address is nobody's destination"),
    ("::ffff:10.20.0.1", "10.20.0.0/16", "outside-destination-addresses", "a mapped answer is another address"),
    ("::ffff:10.20.0.1", "::ffff:10.20.0.1/128", "ipv4-mapped of private", "not even by its own spelling"),
    ("93.184.216.34", "10.20.0.0/16", "outside-destination-addresses", "the operator said where the name lives"),
    ("10.21.0.1", "10.20.0.0/16", "outside-destination-addresses", "a neighbouring private network"),
]


@pytest.mark.parametrize(("address", "allowed", "expected", "why"), TOO_WIDE)
def test_a_destination_opens_no_more_than_it_names(address: str, allowed: str, expected: str, why: str) -> None:
    """A network opens a special address only where it is at least as narrow as the range it opens."""
    refused = TABLE.vet([address], 443, (ip_network(allowed),))
    assert isinstance(refused, AddressRefused), why
    assert refused.why == expected, why


def test_an_address_of_this_machine_is_opened_only_by_its_own_number() -> None:
    """A corporate range that happens to hold the gateway does not open the gateway's host."""
    table = AddressTable(own=frozenset({ip_address("10.20.3.4")}))
    wide, single = (ip_network("10.20.0.0/16"),), (ip_network("10.20.3.4/32"),)
    assert table.vet(["10.20.3.4"], 22, wide) == AddressRefused(address="10.20.3.4", why="own-address")
    assert table.vet(["10.20.3.5"], 443, wide) == Vetted(addresses=("10.20.3.5",))
    assert table.vet(["10.20.3.4"], 443, single) == Vetted(addresses=("10.20.3.4",))


def test_public_addresses_pass_in_order_and_once() -> None:
    """Public answers pass, in the resolver's order, without duplicates, in canonical spelling."""
    answers = ["2606:2800:0220:1::1", "93.184.216.34", "93.184.216.34", "64:ff9b::8.8.8.8"]
    assert TABLE.vet(answers, 443) == Vetted(addresses=("2606:2800:220:1::1", "93.184.216.34", "64:ff9b::808:808"))


@pytest.mark.parametrize(
    ("address", "allowed"),
    [("10.20.0.1", "10.20.0.0/16"), ("127.0.0.2", "127.0.0.2/32"), ("::1", "::1/128"), ("fd00::9", "fd00::/8")],
)
def test_a_destination_opens_the_private_network_it_names(address: str, allowed: str) -> None:
    """`addresses:` is the one exception to the table."""
    table = AddressTable(own=frozenset({ip_address("127.0.0.1"), ip_address("::1")}))
    assert table.vet([address], 443, (ip_network(allowed),)) == Vetted(addresses=(address,))
