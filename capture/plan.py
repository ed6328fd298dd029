"""Which interfaces lead to sandboxes, as a value: checked here, written as rules by capture/gateway.py.

    NAME=GATEWAY/PREFIX[,GATEWAY6/PREFIX]        tap-a=198.19.0.1/30,fd65:7865:6174:1::1/126

GATEWAY is this machine's own address on that interface and what the sandbox has as its default route. Rules:
one interface is one sandbox; every interface has a subnet of its own, that no other one overlaps; a bridge belongs to
one sandbox whole, since who shares a bridge hears and can imitate its neighbours (RULINGS 2.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, ip_interface
from itertools import pairwise
from typing import Final, Literal, Self

CAPTURED_PORT: Final = 3129
DNS_PORT: Final = 3153
"""Not 53: a resolver of the host may hold that on every address. Lookups are redirected from 53."""
PROXY_PORT: Final = 3128
"""For clients in the sandbox that do use a proxy variable."""

MAX_INTERFACES: Final = 1024
SYNTHETIC: Final = IPv4Network("198.18.0.0/16")
"""What the stub resolver gives out (RULINGS 5.7); no sandbox may live there."""

Kind = Literal["link", "bridge"]
"""`link`: a veth, a tap, or anything else with one machine at its other end. `bridge`: a bridge of one sandbox."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}\Z")
"""Kernel: 15 bytes, no slash, no blank. Ours: nothing that means anything to nft either."""
_SHORTEST: Final = {4: 16, 6: 64}
_LONGEST: Final = {4: 30, 6: 126}


class PlanError(ValueError):
    """The plan would not keep sandboxes apart or cannot be read. str() is the cause; `remedy` what helps."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One interface of the host and the sandbox behind it. At least one of the gateway addresses is set."""

    name: str
    kind: Kind = "link"
    gateway4: IPv4Interface | None = None
    gateway6: IPv6Interface | None = None

    @property
    def gateways(self) -> tuple[IPv4Interface | IPv6Interface, ...]:
        return tuple(one for one in (self.gateway4, self.gateway6) if one is not None)

    @property
    def addresses(self) -> str:
        """`GATEWAY/PREFIX[,GATEWAY6/PREFIX]`, as it is written on a command line."""
        return ",".join(str(one) for one in self.gateways)

    @property
    def option(self) -> str:
        """The words that put this interface into a plan."""
        return f"--{'bridge' if self.kind == 'bridge' else 'interface'} {self.name}={self.addresses}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Interfaces in order of their names. Made by `of`, which checks what no interface can know of the others."""

    interfaces: tuple[Interface, ...] = ()

    @classmethod
    def of(cls, interfaces: Iterable[Interface]) -> Self:
        """Raises PlanError: two of one name, overlapping subnets, too many."""
        listed = tuple(sorted(interfaces, key=lambda one: one.name))
        if len(listed) > MAX_INTERFACES:
            raise PlanError(f"more than {MAX_INTERFACES} interfaces")
        for one, other in pairwise(listed):
            if one.name == other.name:
                raise PlanError(f"{one.name} is named twice")
        # Subnets lie within one another or apart, so two that overlap make two neighbours in this order overlap.
        networks = [(one.name, gateway.network) for one in listed for gateway in one.gateways]
        networks.sort(key=lambda entry: (entry[1].version, int(entry[1].network_address), entry[1].prefixlen))
        for (name, network), (other_name, beside) in pairwise(networks):
            if network.version == beside.version and int(network.broadcast_address) >= int(beside.network_address):
                raise PlanError(
                    f"{name} and {other_name} have overlapping subnets ({network}, {beside})",
                    "give every sandbox a subnet of its own; a /30 is enough",
                )
        return cls(listed)

    def with_interfaces(self, added: Iterable[Interface]) -> Plan:
        """This plan and `added`, which replace those of the same names. Raises PlanError."""
        fresh = tuple(added)
        Plan.of(fresh)
        names = {one.name for one in fresh}
        return Plan.of([*(one for one in self.interfaces if one.name not in names), *fresh])

    def without(self, names: Iterable[str]) -> Plan:
        """This plan without `names`. Raises PlanError where one is not in it."""
        gone = set(names)
        for name in sorted(gone):
            self.interface(name)
        return Plan(tuple(one for one in self.interfaces if one.name not in gone))

    def interface(self, name: str) -> Interface:
        """Raises PlanError where it is not in the plan."""
        for one in self.interfaces:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.interfaces) or "none"
        raise PlanError(f"{name} is not captured", f"captured: {known}; 'exeat capture apply' adds one")


def parse_interface(text: str, kind: Kind = "link") -> Interface:
    """Read `NAME=GATEWAY/PREFIX[,GATEWAY6/PREFIX]`. Raises PlanError."""
    name, equals, addresses = text.partition("=")
    if not equals:
        raise PlanError(f"{text!r} is not NAME=GATEWAY/PREFIX", "for example tap0=198.19.0.1/30")
    if not _NAME.match(name) or name == "lo":
        raise PlanError(f"{name!r} is no interface that can lead to a sandbox")
    found = Interface(name=name, kind=kind)
    for written in addresses.split(","):
        gateway = _gateway(name, written)
        if isinstance(gateway, IPv4Interface) and found.gateway4 is None:
            found = replace(found, gateway4=gateway)
        elif isinstance(gateway, IPv6Interface) and found.gateway6 is None:
            found = replace(found, gateway6=gateway)
        else:
            raise PlanError(f"{name}: one IPv4 and one IPv6 address at most")
    return found


def _gateway(name: str, written: str) -> IPv4Interface | IPv6Interface:
    if "/" not in written:
        raise PlanError(f"{name}: {written!r} has no prefix length", "for example 198.19.0.1/30")
    try:
        gateway = ip_interface(written)
    except ValueError:
        raise PlanError(f"{name}: {written!r} is no address with its prefix length") from None
    network = gateway.network
    shortest, longest = _SHORTEST[gateway.version], _LONGEST[gateway.version]
    if not shortest <= network.prefixlen <= longest:
        raise PlanError(f"{name}: /{network.prefixlen} is not within /{shortest} to /{longest}")
    if gateway.ip in (network.network_address, network.broadcast_address) and gateway.version == 4:
        raise PlanError(f"{name}: {gateway.ip} names the subnet or all of it, and no machine")
    if gateway.ip == network.network_address:
        raise PlanError(f"{name}: {gateway.ip} is every router's address in its subnet (RFC 4291 2.6.1)")
    ip = gateway.ip
    if ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_link_local or getattr(ip, "scope_id", None):
        raise PlanError(f"{name}: {ip} cannot be a gateway's address")
    if isinstance(network, IPv4Network) and network.overlaps(SYNTHETIC):
        raise PlanError(
            f"{name}: {network} overlaps {SYNTHETIC}, which stands for looked-up names", "use 198.19.0.0/16"
        )
    return gateway
