"""The address table: which numeric addresses may be dialled at all (I05, I06; RULINGS 5.2).

Rules, in the order in which `vet` applies them to every answer of a lookup:

1. Something that is not one canonical address, or carries a zone, is refused.
2. A port of our own listeners is refused on any address: a published or translated address is us as well.
3. Every special range is refused, after unwrapping an IPv4 address embedded in an IPv6 one. IPv6 outside the
   allocated global unicast space (2000::/3) is refused, except NAT64 of a public IPv4 address.
4. Addresses of this machine's interfaces, the /64 around each global IPv6 one, `self_addresses` and
   `internal_ranges` are refused.
5. `allowed` (a destination's `addresses:`) opens 3 and 4, but never multicast, unspecified, reserved or embedded
   forms, and only by a network at least as narrow as what it opens: `0.0.0.0/0` does not open 10.0.0.0/8. An address
   of this machine other than loopback is opened only by naming that single address.
   Where `allowed` is given, every answer must lie inside it: the operator said where this name lives.
6. One refused answer refuses the whole set: an attacker's resolver must not be able to mix.

Pure: interfaces are read by net/interfaces.py and passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class SpecialRange:
    """One row of the table. `openable`: a destination's `addresses:` may name it."""

    network: Network
    name: str
    openable: bool = True


def _row(network: str, name: str, *, openable: bool = True) -> SpecialRange:
    return SpecialRange(ip_network(network), name, openable)


SPECIAL: tuple[SpecialRange, ...] = (
    # IANA IPv4 special-purpose registry (RFC 6890 and updates), plus what clouds put on public-looking addresses.
    _row("0.0.0.0/8", "this-network", openable=False),  # Linux connects 0.0.0.0 to loopback
    _row("10.0.0.0/8", "private"),
    _row("100.64.0.0/10", "carrier-grade-nat"),  # 100.100.100.200 is Alibaba's metadata service
    _row("127.0.0.0/8", "loopback"),
    _row("169.254.0.0/16", "link-local"),  # 169.254.169.254: metadata of most clouds
    _row("168.63.129.16/32", "cloud-platform"),  # Azure's host agent, on an address that counts as global
    _row("172.16.0.0/12", "private"),
    _row("192.0.0.0/24", "ietf-protocol"),  # 192.0.0.192 is Oracle's metadata service
    _row("192.0.2.0/24", "documentation"),
    _row("192.31.196.0/24", "as112"),
    _row("192.52.193.0/24", "amt"),
    _row("192.88.99.0/24", "6to4-relay"),
    _row("192.168.0.0/16", "private"),
    _row("192.175.48.0/24", "as112"),
    _row("198.18.0.0/15", "benchmarking"),
    _row("198.51.100.0/24", "documentation"),
    _row("203.0.113.0/24", "documentation"),
    _row("224.0.0.0/4", "multicast", openable=False),
    _row("240.0.0.0/4", "reserved", openable=False),  # limited broadcast included
    # IPv6. What is outside 2000::/3 and not named here is "unallocated".
    _row("::/128", "unspecified", openable=False),
    _row("::1/128", "loopback"),
    _row("100::/64", "discard-only", openable=False),
    _row("fc00::/7", "unique-local"),  # fd00:ec2::254 is EC2's metadata service
    _row("fe80::/10", "link-local"),
    _row("fec0::/10", "site-local"),
    _row("ff00::/8", "multicast", openable=False),
    _row("2001::/23", "ietf-protocol", openable=False),  # Teredo, benchmarking, ORCHID
    _row("2001:db8::/32", "documentation"),
    _row("2002::/16", "6to4", openable=False),
    _row("2620:4f:8000::/48", "as112"),
    _row("3fff::/20", "documentation"),
)

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_MAPPED = IPv6Network("::ffff:0:0/96")
_TRANSLATED = IPv6Network("::ffff:0:0:0/96")  # SIIT, RFC 2765
_COMPATIBLE = IPv6Network("::/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_ISATAP = (0x00005EFE, 0x02005EFE)  # upper half of the interface identifier, RFC 5214 6.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetted:
    """Every answer passed; `addresses` in the resolver's order, canonical spelling."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRefused:
    """The whole set is refused because of `address`. `why` names the range or rule, for the log."""

    address: str
    why: str
    reason: str = "address-refused"


def embedded(address: IPv6Address) -> tuple[tuple[str, IPv4Address], ...]:
    """Every IPv4 address that a host or relay may find inside `address`, with the name of the form.

    Mapped and compatible (RFC 4291), SIIT, NAT64 (RFC 6052, 8215), 6to4 (RFC 3056), Teredo server and client
    (RFC 4380), ISATAP (RFC 5214).
    """
    value = int(address)
    low = IPv4Address(value & 0xFFFFFFFF)
    found: list[tuple[str, IPv4Address]] = []
    for network, form in (
        (_MAPPED, "ipv4-mapped"),
        (_TRANSLATED, "ipv4-translated"),
        (_COMPATIBLE, "ipv4-compatible"),
        (_NAT64, "nat64"),
        (_NAT64_LOCAL, "nat64-local"),
    ):
        if address in network:
            found.append((form, low))
    if address in _SIX_TO_FOUR:
        found.append(("6to4", IPv4Address(value >> 80 & 0xFFFFFFFF)))
    if address in _TEREDO:
        found.append(("teredo", IPv4Address(value >> 64 & 0xFFFFFFFF)))
        found.append(("teredo", IPv4Address(~value & 0xFFFFFFFF)))  # the client's is stored inverted
    if value >> 32 & 0xFFFFFFFF in _ISATAP:
        found.append(("isatap", low))
    return tuple(found)


def _refusals(address: Address) -> list[SpecialRange]:
    """Every row that forbids `address`; empty means publicly routable."""
    rows = [row for row in SPECIAL if row.network.version == address.version and address in row.network]
    if isinstance(address, IPv4Address):
        return rows
    whole = IPv6Network((int(address), 128))
    if address.scope_id is not None:
        rows.append(SpecialRange(whole, "zoned", openable=False))
    forms = embedded(address)
    for form, inner in forms:
        forbidden = _refusals(inner)
        if forbidden and address not in (_COMPATIBLE_LOOPBACK, _COMPATIBLE_UNSPECIFIED):
            rows.append(SpecialRange(whole, f"{form} of {forbidden[0].name}", openable=False))
    if not rows and address not in _GLOBAL_UNICAST and address not in _NAT64:
        # Honest DNS has no reason to answer with an embedded form; a public address inside does not make it one.
        name = forms[0][0] if forms else "unallocated"
        rows.append(SpecialRange(whole, name, openable=False))
    return rows


_COMPATIBLE_UNSPECIFIED = IPv6Address("::")
_COMPATIBLE_LOOPBACK = IPv6Address("::1")


def classify(ip: str | Address) -> str | None:
    """None for a publicly routable address, else the name of the special range it is in. Raises ValueError."""
    rows = _refusals(ip_address(ip) if isinstance(ip, str) else ip)
    return rows[0].name if rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressTable:
    """What counts as "inside" on this node. All fields only ever refuse more."""

    own: frozenset[Address] = frozenset()
    """Addresses on local interfaces."""
    internal_ranges: tuple[Network, ...] = ()
    self_addresses: tuple[Network, ...] = ()
    """Ours without being on an interface: published, translated, floating."""
    listener_ports: frozenset[int] = frozenset()

    def vet(self, ips: Iterable[str], port: int, allowed: tuple[Network, ...] = ()) -> Vetted | AddressRefused:
        """Judge all answers of one lookup. `allowed` is the destination's `addresses:`. An empty set is refused."""
        passed: list[str] = []
        for text in ips:
            try:
                address = ip_address(text)
            except ValueError:
                return AddressRefused(address=text[:64], why="not an address")
            why = self._why(address, port, allowed)
            if why is not None:
                return AddressRefused(address=str(address), why=why)
            if str(address) not in passed:
                passed.append(str(address))
        if not passed:
            return AddressRefused(address="", why="no address")
        return Vetted(addresses=tuple(passed))

    def vet_operators(self, ips: Iterable[str], port: int) -> Vetted | AddressRefused:
        """Judge the addresses of a place that the operator named: it may be private or on this machine, but not us.

        No sandbox chooses it, so a listener's port counts only on an address of this machine: 3128 is customary
        for us and for others.
        """
        passed: list[str] = []
        for text in ips:
            try:
                address = ip_address(text)
            except ValueError:
                return AddressRefused(address=text[:64], why="not an address")
            ours = address.is_loopback or address in self.own or any(address in one for one in self.self_addresses)
            if ours and port in self.listener_ports:
                return AddressRefused(address=str(address), why="own-listener")
            for row in _refusals(address):
                if not row.openable or row.name in ("link-local", "cloud-platform"):
                    return AddressRefused(address=str(address), why=row.name)
            if str(address) not in passed:
                passed.append(str(address))
        if not passed:
            return AddressRefused(address="", why="no address")
        return Vetted(addresses=tuple(passed))

    def _why(self, address: Address, port: int, allowed: tuple[Network, ...]) -> str | None:
        if port in self.listener_ports:
            return "own-listener"
        openers = [network for network in allowed if network.version == address.version and address in network]
        if allowed and not openers:
            return "outside-destination-addresses"
        for row in (*_refusals(address), *self._own_rows(address)):
            if not row.openable or not any(_within(network, row.network) for network in openers):
                return row.name
        return None

    def _own_rows(self, address: Address) -> list[SpecialRange]:
        """The rows of this node that forbid `address`. Addresses of this machine are opened one by one."""
        rows: list[SpecialRange] = []
        for own in self.own:
            if own == address and not own.is_loopback:
                rows.append(SpecialRange(_single(own), "own-address"))
            elif isinstance(own, IPv6Address) and isinstance(address, IPv6Address) and not _refusals(own):
                neighbours = IPv6Network((int(own) >> 64 << 64, 64))
                if address in neighbours:
                    rows.append(SpecialRange(neighbours, "own-network"))
        for name, networks in (("self-address", self.self_addresses), ("internal-range", self.internal_ranges)):
            for network in networks:
                if network.version == address.version and address in network:
                    rows.append(SpecialRange(network, name))
        return rows


def _single(address: Address) -> Network:
    if isinstance(address, IPv4Address):
        return IPv4Network((int(address), 32))
    return IPv6Network((int(address), 128))


def _within(inner: Network, outer: Network) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)
