"""The world outside as a witness: a namespace behind the host's default route that owns every documentation address.

    with own_network(), world() as outside:
        ...
        outside.sync()                  # all that left before this line has arrived by now
        assert outside.heard() == []    # packets, of whatever protocol and to whatever address

What leaves the host arrives there and is written down by a packet socket, so nothing has to listen for it to be seen;
TCP and UDP listeners on every port in PORTS answer, and the kernel answers pings, so that a way out would also work.
`counted()` is the host's own count on the interface towards it. Addresses: RFC 5737, RFC 3849, and all others too.

Run as a program (`python -I world.py PORT...`) it is the witness itself: one JSON line a packet or connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

OWN4 = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")
OWN6 = ("2001:db8::/32",)
PORTS = (22, 25, 53, 80, 123, 443, 853, 3128, 3129, 4433, 5353, 8080, 8443, 9418, 51820)
"""Listened on by TCP and by UDP."""
_MARK_PORT = 47
_SO_RCVBUFFORCE = 33
_LINK = "exworld"
_HOST4, _WORLD4, _HOST6, _WORLD6 = "198.19.100.1", "198.19.100.2", "fd65:7865:ffff::1", "fd65:7865:ffff::2"
_QUIET = {133, 134, 135, 136, 137, 143}
"""ICMPv6 types by which neighbours find each other (RFC 4861, RFC 3810): every link has them."""


class World:
    """What the witness has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._marks = 0
        self._from = 0
        self._counted = 0
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        threading.Thread(target=self._read, daemon=True).start()
        self.sync()
        self.forget()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    def sync(self) -> None:
        """Send a packet of our own from this thread's network and wait for it: what left earlier is there by then."""
        self._marks += 1
        for family, address in ((socket.AF_INET, "192.0.2.47"), (socket.AF_INET6, "2001:db8::47")):
            with socket.socket(family, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"mark %d" % self._marks, (address, _MARK_PORT))
        sought = {f"mark {self._marks} v{version}" for version in (4, 6)}
        end = time.monotonic() + 20
        while not sought <= {str(json.loads(line)[0]) for line in self._lines}:
            assert time.monotonic() < end, "the witness is gone"
            assert self._process.poll() is None, "the witness ended"
            time.sleep(0.01)

    def heard(self) -> list[str]:
        """What arrived since `forget`, each once: `tcp 192.0.2.1 443`, `icmp 192.0.2.1`, `accepted 443`, ..."""
        found = [str(json.loads(line)[0]) for line in self._lines[self._from :]]
        return sorted({one for one in found if not one.startswith("mark ")})

    def forget(self) -> None:
        """From here on only what is new counts."""
        self._from = len(self._lines)
        self._counted = self._total()

    def counted(self) -> int:
        """Packets that the host sent towards the world since `forget`, our own marks aside."""
        return self._total() - self._counted

    def _total(self) -> int:
        shown = subprocess.run(
            ["nft", "-j", "list", "counter", "inet", "watch", "left"], capture_output=True, check=True
        ).stdout
        return int(json.loads(shown)["nftables"][-1]["counter"]["packets"])


@contextlib.contextmanager
def world() -> Iterator[World]:
    """The world behind this thread's network namespace, which gets its default routes."""
    name = f"exw{os.getpid()}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", _LINK, "type", "veth", "peer", "name", "world0", "netns", name)
        for at, link, four, six in (((), _LINK, _HOST4, _HOST6), (("-n", name), "world0", _WORLD4, _WORLD6)):
            _ip(*at, "addr", "add", f"{four}/30", "dev", link)
            _ip(*at, "-6", "addr", "add", f"{six}/126", "dev", link, "nodad")
            _ip(*at, "link", "set", link, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        for network in (*OWN4, *OWN6):
            _ip("-n", name, *(("-6",) if ":" in network else ()), "route", "add", "local", network, "dev", "lo")
        for at, four, six in (((), _WORLD4, _WORLD6), (("-n", name), _HOST4, _HOST6)):
            _ip(*at, "route", "add", "default", "via", four)
            _ip(*at, "-6", "route", "add", "default", "via", six)
        quiet = ", ".join(str(one) for one in sorted(_QUIET))
        rules = f"""table inet watch {{
            counter left {{ }}
            chain out {{
                type filter hook postrouting priority 300; policy accept;
                oifname != "{_LINK}" accept
                icmpv6 type {{ {quiet} }} accept
                udp dport {_MARK_PORT} accept
                counter name left
            }}
        }}"""
        subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
        command = ["ip", "netns", "exec", name, sys.executable, "-I", str(Path(__file__)), *map(str, PORTS)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield World(process)
            finally:
                process.kill()
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)


# --- the witness ---------------------------------------------------------------------------------------------------


def witness(ports: list[int]) -> None:
    """Write what arrives, until standard input ends."""
    waiting = selectors.DefaultSelector()
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))  # ETH_P_ALL
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)  # nothing is overlooked on a busy machine
    packets.bind(("world0", 0x0003))
    waiting.register(packets, selectors.EVENT_READ, "packets")
    for port in ports:
        tcp = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        udp.bind(("::", port))
        waiting.register(tcp, selectors.EVENT_READ, "tcp")
        waiting.register(udp, selectors.EVENT_READ, "udp")
    waiting.register(sys.stdin, selectors.EVENT_READ, "end")
    print("ready", flush=True)
    while True:
        for key, _ in waiting.select():
            if key.data == "end":
                return
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if key.data == "packets":
                data, (_, _, kind, *_rest) = sock.recvfrom(65536)
                if kind != 4 and (line := told(data)):  # 4: our own, outgoing
                    say(line)
            elif key.data == "tcp":
                accepted, _ = sock.accept()
                say(f"accepted {sock.getsockname()[1]}")
                with accepted, contextlib.suppress(OSError):
                    accepted.sendall(b"out\r\n")
            else:
                data, sender = sock.recvfrom(65536)
                say(f"received {sock.getsockname()[1]}")
                with contextlib.suppress(OSError):
                    sock.sendto(b"out", sender)


def say(line: str) -> None:
    print(json.dumps([line]), flush=True)


def told(packet: bytes) -> str:
    """One packet (IP header first) in words; nothing for what every link has by itself."""
    version = packet[0] >> 4 if packet else 0
    if version == 4:
        start, protocol, target = (packet[0] & 15) * 4, packet[9], socket.inet_ntop(socket.AF_INET, packet[16:20])
    elif version == 6:
        start, protocol, target = 40, packet[6], socket.inet_ntop(socket.AF_INET6, packet[24:40])
        if protocol == 0:  # hop-by-hop options, which multicast reports have
            protocol, start = packet[40], 48
    else:
        return ""  # ARP
    rest = packet[start:]
    if protocol in (6, 17) and len(rest) >= 8:
        port = struct.unpack("!H", rest[2:4])[0]
        if protocol == 17 and port == _MARK_PORT:
            return f"{rest[8:].decode()} v{version}"
        return f"{'tcp' if protocol == 6 else 'udp'} {target} {port}"
    if protocol in (1, 58):
        return "" if protocol == 58 and rest[0] in _QUIET else f"icmp {target}"
    return f"protocol {protocol} {target}"


if __name__ == "__main__":
    witness([int(word) for word in sys.argv[1:]])
