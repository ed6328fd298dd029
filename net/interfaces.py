"""The addresses of this machine's interfaces, asked of the kernel by rtnetlink.

Netlink and not /proc: a child in a namespace of its own may see no /proc/net, and a table that silently came out
empty would let the gateway dial itself. Reading costs about 50 microseconds, so dialers read at every dial and an
address that appears later counts at once.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv6Address

from net.addresses import Address
from net.stream import NetError

_RTM_NEWADDR, _RTM_GETADDR = 20, 22  # linux/rtnetlink.h
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")
_IFADDRMSG_BYTES = 8
_ATTEMPTS = 5


class InterfacesUnreadable(NetError):
    """The kernel did not tell the local addresses; nothing may be dialled without them."""


def local_addresses() -> frozenset[Address]:
    """Every address on every interface of this network namespace. Raises InterfacesUnreadable."""
    try:
        for _ in range(_ATTEMPTS):
            found = _dump()
            if found is not None:
                return found
    except (OSError, struct.error, ValueError) as error:
        raise InterfacesUnreadable(f"rtnetlink: {type(error).__name__}") from None
    raise InterfacesUnreadable("rtnetlink: the list kept changing while it was read")


def _dump() -> frozenset[Address] | None:
    """One whole dump, or None where it was interrupted by a change and may be incomplete."""
    found: set[Address] = set()
    interrupted = False
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(1.0)
        kernel.bind((0, 0))
        request = _HEADER.pack(_HEADER.size + _IFADDRMSG_BYTES, _RTM_GETADDR, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0)
        kernel.send(request + bytes(_IFADDRMSG_BYTES))
        while True:
            data, (sender, _groups) = kernel.recvfrom(1 << 16)
            if sender != 0:
                continue  # only the kernel (port 0) may answer
            at = 0
            while at < len(data):
                length, kind, flags, _sequence, _port = _HEADER.unpack_from(data, at)
                if length < _HEADER.size or at + length > len(data):
                    raise ValueError("a message overruns its datagram")
                interrupted = interrupted or bool(flags & _NLM_F_DUMP_INTR)
                if kind == _NLMSG_DONE:
                    return None if interrupted else frozenset(found)
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel refused the dump")
                if kind == _RTM_NEWADDR:
                    found |= _addresses(data[at + _HEADER.size : at + length])
                at += length + 3 & ~3


def _addresses(message: bytes) -> set[Address]:
    """The addresses of one RTM_NEWADDR: IFA_LOCAL (ours), or IFA_ADDRESS where the kernel gives only that."""
    family = message[0]
    attributes: dict[int, bytes] = {}
    at = _IFADDRMSG_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4 or at + length > len(message):
            raise ValueError("an attribute overruns its message")
        attributes[kind] = message[at + 4 : at + length]
        at += length + 3 & ~3
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
    if raw is None:
        return set()
    if family == socket.AF_INET:
        return {IPv4Address(raw)}
    return {IPv6Address(raw)} if family == socket.AF_INET6 else set()
