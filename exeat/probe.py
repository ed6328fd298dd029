"""Tries to get out of a sandbox's network namespace: `python -I -m exeat.probe FD` (I28, RULINGS 6.2).

FD reads as one JSON document, from exeat/proving.py; the result is one JSON line on standard output. The process is
ours and stands outside the sandbox: of its namespaces it enters the network's alone (and, where an ordinary user made
it, the user namespace that owns it). It reads no file of the sandbox, runs nothing of it, and cannot be seen from it.

 (1) the user namespace, where there is one; not dumpable
 (2) in a scratch network namespace: what the rules should look like, printed by the same tool
 (3) the sandbox's network namespace: is it the host's, which interfaces and rules are in it
 (4) sockets made and marked; then every privilege dropped, no_new_privs, the sandbox's own system-call filter
 (5) every way out tried at once, within `seconds`; nothing that comes back is interpreted here beyond its first bytes

Ways are tried with more than a sandbox has: marks and raw sockets, made in (4). Addresses are those of documentation
(RFC 5737, RFC 3849), the metadata address of clouds, and this machine's own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from exeat.confine import drop_capabilities, forbid_new_privileges, install_filter, keep_for_children

_PR_SET_DUMPABLE: Final = 4
_CAP_NET_ADMIN: Final = 12
_SIOCGIFFLAGS, _IFF_UP, _IFF_LOOPBACK = 0x8913, 0x1, 0x8
_TOOL_SECONDS: Final = 5.0

# What became of a try. The names are exeat/proving.py's to judge.
REFUSED: Final = "refused"
"""Our own kernel said no: nothing left this namespace."""
SENT: Final = "sent"
"""A datagram was taken, or a connection attempt went somewhere and was turned down there."""
CONNECTED: Final = "connected"
"""Somebody accepted."""
SILENT: Final = "silent"
"""A connection attempt that nobody answered in time."""

_OURS: Final = frozenset(
    {
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EPERM,
        errno.EACCES,
        errno.EADDRNOTAVAIL,
        errno.EAFNOSUPPORT,
        errno.ENETDOWN,
    }
)
"""Errors of our own kernel, where it says them at once: before anything left. Later they may be a router's."""

STREAMS: Final = (
    ("direct", "192.0.2.1", 443),
    ("direct-ipv6", "2001:db8::1", 443),
    ("bare-address", "198.51.100.1", 80),
    ("other-port", "203.0.113.1", 22),
    ("dot", "192.0.2.53", 853),
    ("dns-tcp", "192.0.2.53", 53),
    ("metadata", "169.254.169.254", 80),
    ("neighbour", "198.19.0.2", 80),
)
DATAGRAMS: Final = (
    ("dns-udp", "192.0.2.53", 53),
    ("dns-udp-ipv6", "2001:db8::53", 53),
    ("quic", "192.0.2.1", 443),
    ("quic-ipv6", "2001:db8::1", 443),
)
PINGS: Final = (("icmp", "192.0.2.1"), ("icmp-ipv6", "2001:db8::1"))
LOOKUP: Final = (
    struct.pack("!HHHHHH", 0xE8EA, 0x0100, 1, 0, 0, 0) + b"\x05exeat\x08internal\x00" + struct.pack("!HH", 1, 1)
)
"""One A query for exeat.internal (RFC 1035 4.1), which our stub resolver alone knows."""

Result = tuple[str, str]
"""(what became of it, the first bytes that came back as hex)."""


def main() -> int:
    """Entry point. Exits 0 with a result, 1 without one."""
    with os.fdopen(int(sys.argv[1]), "rb") as stream:
        plan: dict[str, Any] = json.load(stream)
    _step_one(plan)
    expected = _expected_rules(plan) if plan["tools"] else ""  # (2)
    os.setns(plan["net"], os.CLONE_NEWNET)  # (3)
    here = os.stat("/proc/self/ns/net")
    found: dict[str, Any] = {
        "namespace": [here.st_dev, here.st_ino],
        "interfaces": _interfaces(plan),
        "up": up_interfaces(),
        "rules": _rules(plan) == expected if plan["tools"] else True,
        "tries": {},
    }
    tries = list(_tries(plan))  # (4)
    _drop(plan)
    found["tries"] = attempt(tries, time.monotonic() + plan["seconds"])  # (5)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _step_one(plan: dict[str, Any]) -> None:
    import ctypes

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if plan["user"] >= 0:
        os.setns(plan["user"], os.CLONE_NEWUSER)
    if plan["tools"]:
        keep_for_children(_CAP_NET_ADMIN)


def _expected_rules(plan: dict[str, Any]) -> str:
    os.unshare(os.CLONE_NEWNET)
    _run([plan["tools"]["nft"], "-f", "-"], plan["ruleset"])
    return _rules(plan)


def _rules(plan: dict[str, Any]) -> str:
    return _run([plan["tools"]["nft"], "-s", "list", "ruleset"])


def _interfaces(plan: dict[str, Any]) -> list[list[str]]:
    """[name, the interface that it is a pair with, `elsewhere` where that one lies in another namespace], sorted."""
    if not plan["tools"]:
        return sorted([name, "", ""] for _, name in socket.if_nameindex())
    links = json.loads(_run([plan["tools"]["ip"], "-j", "link", "show"]))
    return sorted(
        [
            str(link.get("ifname", "?")),
            str(link.get("link", link.get("link_index", "")) or ""),
            "elsewhere" if "link_netnsid" in link else "",
        ]
        for link in links
        if link
    )


def up_interfaces() -> list[str]:
    """Names of the interfaces here that are up and are not loopback (netdevice(7)), sorted.

    Down, there are more in some: tunnels that the kernel puts into every namespace.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            asked = struct.pack("=16sH22x", name.encode(), 0)
            (flags,) = struct.unpack_from("=H", fcntl.ioctl(sock, _SIOCGIFFLAGS, asked), 16)
            if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                found.append(name)
    return sorted(found)


def _run(argv: list[str], text: str = "") -> str:
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, check=True, timeout=_TOOL_SECONDS, env={"PATH": "/usr/sbin"}
    )
    return done.stdout


def _drop(plan: dict[str, Any]) -> None:
    if plan["uid"] >= 0:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    drop_capabilities()
    forbid_new_privileges()
    install_filter()


class Try:
    """One way out: a socket, where it goes, what is sent first. `sock` is None where it could not even be made."""

    def __init__(self, name: str, sock: socket.socket | None, target: Any, hello: bytes) -> None:
        self.name = name
        self.sock = sock
        self.target = target
        self.hello = hello
        self.outcome = REFUSED if sock is None else SILENT
        self.seen = b""

    @property
    def is_stream(self) -> bool:
        return self.sock is not None and self.sock.type == socket.SOCK_STREAM


def _tries(plan: dict[str, Any]) -> Iterator[Try]:
    nonce, mark = bytes.fromhex(plan["nonce"]), plan["mark"] if plan["tools"] else 0
    streams = [*STREAMS, *((f"host-address-{n}", address, port) for n, (address, port) in enumerate(plan["hosts"]))]
    for name, address, port in streams if plan["streams"] else ():
        yield _try(name, _family(address), socket.SOCK_STREAM, 0, (address, port), nonce, mark)
    for name, address, port in plan["canaries"]:
        yield _try(name, _family(address), socket.SOCK_STREAM, 0, (address, port), nonce, mark)
    yield _try("host-socket", socket.AF_UNIX, socket.SOCK_STREAM, 0, "\0" + plan["abstract"], nonce, 0)
    for name, address, port in DATAGRAMS:
        hello = LOOKUP if port == 53 else _quic_initial()
        yield _try(name, _family(address), socket.SOCK_DGRAM, 0, (address, port), hello, mark)
    for name, address in PINGS:
        six = ":" in address
        # Echo request; the kernel fills in the checksum of ICMPv6, and nobody looks at the other one.
        echo = struct.pack("!BBHHH", 128 if six else 8, 0, 0 if six else 0xF7FF, 0, 0)
        protocol = socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP
        yield _try(name, _family(address), socket.SOCK_RAW, protocol, (address, 0), echo, mark)


def _try(name: str, family: int, kind: int, protocol: int, target: Any, hello: bytes, mark: int) -> Try:
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            raise
        return Try(name, None, target, hello)
    sock.setblocking(False)
    if mark:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    return Try(name, sock, target, hello)


def _quic_initial() -> bytes:
    """Long header of a QUIC version 1 Initial, padded to 1200 bytes (RFC 9000 17.2.2, 14.1); the rest is noise."""
    return (b"\xc0\x00\x00\x00\x01\x08" + bytes(8) + b"\x00\x00\x44\x96").ljust(1200, b"\x00")


def attempt(tries: list[Try], deadline: float) -> dict[str, Result]:
    """Make every try at once; returns what became of each by `deadline` (monotonic seconds)."""
    with selectors.DefaultSelector() as selector:
        for one in tries:
            if one.sock is not None:
                _begin(one, selector)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                _go_on(key.data, selector)
    for one in tries:
        if one.sock is not None:
            one.sock.close()
    return {one.name: (one.outcome, one.seen[:64].hex()) for one in tries}


def _begin(one: Try, selector: selectors.BaseSelector) -> None:
    assert one.sock is not None
    try:
        if one.is_stream:
            with contextlib.suppress(BlockingIOError):
                one.sock.connect(one.target)
            selector.register(one.sock, selectors.EVENT_WRITE, one)
            return
        one.sock.connect(one.target)
        one.sock.send(one.hello)
    except OSError as error:
        # Nobody has that abstract name here; or our own kernel said no.
        ours = error.errno in _OURS or one.sock.family == socket.AF_UNIX
        one.outcome = REFUSED if ours else SENT
        return
    one.outcome = SENT
    selector.register(one.sock, selectors.EVENT_READ, one)


def _go_on(one: Try, selector: selectors.BaseSelector) -> None:
    assert one.sock is not None
    done = True
    try:
        if one.is_stream and one.outcome == SILENT:
            number = one.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, "")
            one.outcome = CONNECTED
            one.sock.send(one.hello)
            selector.modify(one.sock, selectors.EVENT_READ, one)
            return
        piece = one.sock.recv(512)
        one.seen += piece
        done = not piece or not one.is_stream or len(one.seen) >= 32
    except OSError:
        one.outcome = SENT if one.outcome == SILENT else one.outcome
    if done:
        selector.unregister(one.sock)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


if __name__ == "__main__":
    raise SystemExit(main())
