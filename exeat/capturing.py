"""A sandbox's own sockets on a captured interface of this machine (capture/gateway.py says who can reach them).

Bound to the gateway's address and to the device: a packet that came in elsewhere finds nobody here, whatever its
address. The device is kept by its index, so an interface that is made anew under an old name does not reach the
sandbox that had the old one.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from capture.plan import CAPTURED_PORT, DNS_PORT, PROXY_PORT, Interface, Plan
from exeat.launch import ListenerKind
from exeat.netfilter import Netfilter, NetfilterError

_SOCKETS: tuple[tuple[ListenerKind, int, socket.SocketKind], ...] = (
    ("captured", CAPTURED_PORT, socket.SOCK_STREAM),
    ("dns-udp", DNS_PORT, socket.SOCK_DGRAM),
    ("dns-tcp", DNS_PORT, socket.SOCK_STREAM),
    ("proxy", PROXY_PORT, socket.SOCK_STREAM),
)


def captured_interface(netfilter: Netfilter, name: str) -> Interface:
    """The interface `name` as the kernel captures it. Raises PlanError, and NetfilterError where anything differs."""
    found = netfilter.in_force()
    interface = (found.plan if found else Plan()).interface(name)
    differences = netfilter.differences(found.plan, found) if found else []
    differences += netfilter.unguarded(found.plan if found else Plan()) + netfilter.misfits(interface)
    if differences:
        raise NetfilterError(f"{name} is not captured as it should be: {'; '.join(differences)}", "exeat capture check")
    return interface


def quieten(interface: Interface) -> None:
    """No answer by ARP says which other addresses this machine has; rules do not see ARP. Raises OSError."""
    Path(f"/proc/sys/net/ipv4/conf/{interface.name}/arp_ignore").write_text("1", "ascii")


def sockets_on(interface: Interface) -> list[tuple[ListenerKind, socket.socket]]:
    """Bind every socket that the sandbox behind `interface` needs. Raises OSError; then none is left open."""
    made: list[tuple[ListenerKind, socket.socket]] = []
    with contextlib.ExitStack() as undo:
        for gateway in interface.gateways:
            family = socket.AF_INET6 if gateway.version == 6 else socket.AF_INET
            for use, port, kind in _SOCKETS:
                # IPPROTO_TCP by name: asyncio sets TCP_NODELAY only then (RULINGS 11.8).
                protocol = socket.IPPROTO_TCP if kind == socket.SOCK_STREAM else socket.IPPROTO_UDP
                sock = undo.enter_context(socket.socket(family, kind, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.name.encode() + b"\0")
                if kind == socket.SOCK_STREAM:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((str(gateway.ip), port))
                if kind == socket.SOCK_STREAM:
                    sock.listen(1024)
                made.append((use, sock))
        undo.pop_all()
    return made
