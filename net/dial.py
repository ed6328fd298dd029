"""One connection to one permitted destination: resolve once, vet every answer, connect to that very address, verify.

Signatures first; the procedure follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from typing import Literal, Protocol

from net.errors import NetError
from net.stream import ByteStream
from net.trust import SYSTEM_TRUST, TrustKey
from rules.names import Destination

DialReason = Literal[
    "dns-failed",
    "address-refused",
    "upstream-unreachable",
    "upstream-certificate",
    "upstream-timeout",
    "upstream-protocol",
    "policy-changing",
]


class DialError(NetError):
    """No connection. `reason` is a code of rules.reasons, `detail_for_log` a sentence, `address` the offending one."""

    def __init__(self, reason: DialReason, detail_for_log: str, address: str = "") -> None:
        super().__init__(f"{reason}: {detail_for_log}")
        self.reason: DialReason = reason
        self.detail_for_log = detail_for_log
        self.address = address


@dataclass(frozen=True, slots=True, kw_only=True)
class DialTarget:
    """Where to connect, for whom, and what may be believed there. Made from a Permit, never from client bytes.

    `addresses_allowed` and `static` are the destination's `addresses:` and `resolve:`.
    """

    tenant: str
    sandbox: str
    destination: Destination
    want_tls: bool
    addresses_allowed: tuple[IPv4Network | IPv6Network, ...] = ()
    static: tuple[str, ...] = ()
    trust: TrustKey = SYSTEM_TRUST


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """An open connection. `address` is the numeric one dialled; `tls_version` None means clear text."""

    stream: ByteStream
    address: str
    tls_version: str | None


class Dialer(Protocol):
    """Port: makes connections. The fake of tests and `SocketDialer` pass the same contract suite."""

    async def dial(self, target: DialTarget) -> Connected:
        """Raises DialError; within 3 s for the name and 10 s for connecting and TLS together."""
        ...
