"""Tries every way out that a program has, at once: `python -I prober.py [UNTIL]`. For tests/support/world.py.

Says in JSON what came back: `answered` (a way out!), `names` (what lookups said; the stub resolver may answer), and
`tried`. With UNTIL it goes on until that file exists. Standard library only, and no import of ours: it is a workload.
Addresses are for documentation (RFC 5737, RFC 3849).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time

ADDRESSES = ("192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1")
TCP = (22, 25, 80, 123, 443, 853, 3128, 3129, 8080, 8443, 9418)
UDP = (80, 123, 443, 853, 3129, 4433, 5353, 51820)
"""Beside 53, where a whole query is asked. 443: QUIC; 853: DNS over TLS and over QUIC; 51820: WireGuard."""
AROUND = (("255.255.255.255", 7), ("224.0.0.251", 5353), ("ff02::fb", 5353), ("ff02::1", 7))
"""Whoever is on the link: broadcast and multicast."""
QUERY = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06leaked\x04test\x00\x00\x01\x00\x01"
QUIC = b"\xc3\x00\x00\x00\x01\x08" + bytes(1194)
"""A long header of version 1 (RFC 9000 17.2), padded as an Initial has to be."""
OUT = b"out"
"""What the witness says to whoever gets there."""


def attempt(window: float) -> tuple[list[str], list[str], int]:
    """(what was answered from outside, lookups that were answered, how many attempts could be made)."""
    answered: list[str] = []
    names: list[str] = []
    waiting: dict[socket.socket, str] = {}
    tried = 0
    for address in ADDRESSES:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in (*TCP, 53):
            tcp = socket.socket(family, socket.SOCK_STREAM)
            tcp.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                tcp.connect((address, port))
            waiting[tcp] = f"tcp {address} {port}"
        for port in (*UDP, 53):
            udp = socket.socket(family, socket.SOCK_DGRAM)
            udp.setblocking(False)
            waiting[udp] = f"udp {address} {port}"
            with contextlib.suppress(OSError):
                udp.sendto({443: QUIC, 53: QUERY}.get(port, b"x" * 64), (address, port))
        for found in crafted(family, address):
            waiting[found] = f"raw {address}"
    for address, port in AROUND:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        around = socket.socket(family, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            around.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            around.sendto(b"x", (address, port))
        waiting[around] = f"around {address} {port}"
    tried = len(waiting)
    end = time.monotonic() + window
    asked = set()
    while waiting and (left := end - time.monotonic()) > 0:
        streams = [s for s in waiting if s.type == socket.SOCK_STREAM and s not in asked]
        readable, writable, _ = select.select(list(waiting), streams, [], left)
        for sock in writable:
            asked.add(sock)
            with contextlib.suppress(OSError):
                dns = waiting[sock].endswith(" 53")
                sock.send(
                    len(QUERY).to_bytes(2, "big") + QUERY if dns else b"GET / HTTP/1.1\r\nHost: leaked.test\r\n\r\n"
                )
        for sock in readable:
            try:
                data = sock.recv(2048)
            except OSError:
                data = b""
            if waiting[sock].endswith(" 53") and data and not data.startswith(OUT):
                names.append(f"{waiting[sock]} {socket.inet_ntoa(data[-4:])}")
            elif data.startswith(OUT) or is_echo(sock, data):
                answered.append(waiting[sock])
            sock.close()
            del waiting[sock]
    for sock in waiting:
        sock.close()
    return answered, names, tried


def is_echo(sock: socket.socket, data: bytes) -> bool:
    """Whether it is the answer to a ping; such sockets also get errors of whoever is near."""
    if sock.proto == socket.IPPROTO_ICMPV6:
        return data[:1] == b"\x81"
    return sock.proto == socket.IPPROTO_ICMP and data[20 if sock.type == socket.SOCK_RAW else 0 :][:1] == b"\0"


def crafted(family: int, address: str) -> list[socket.socket]:
    """Pings, a protocol nobody knows, packets with headers of our own making; none where sockets of that kind are."""
    made: list[socket.socket] = []
    four = family == socket.AF_INET
    echo = bytes.fromhex("0800f7ff00000000") if four else bytes.fromhex("8000000000000000")
    ping = socket.IPPROTO_ICMP if four else socket.IPPROTO_ICMPV6
    # 253: for experiments (RFC 3692); 132 SCTP, 136 UDP-Lite, 47 GRE, 4 and 41 IP in IP.
    kinds = [(socket.SOCK_RAW, ping, echo), (socket.SOCK_DGRAM, ping, echo)]
    kinds += [(socket.SOCK_RAW, number, b"x" * 32) for number in (253, 132, 136, 47, 4, 41)]
    for kind, protocol, data in kinds:
        with contextlib.suppress(OSError):
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.sendto(data, (address, 0))
            if protocol == ping:
                made.append(sock)
            else:
                sock.close()
    if four:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            for protocol, rest in (
                (17, struct.pack("!HHHH", 4000, 443, 8, 0)),
                (6, struct.pack("!HHIIBBHHH", 4000, 443, 1, 0, 0x50, 2, 1024, 0, 0)),
            ):
                for source in ("192.0.2.200", "0.0.0.0"):
                    head = struct.pack("!BBHHHBBH", 0x45, 0, 0, 0, 0, 64, protocol, 0)
                    raw.sendto(head + socket.inet_aton(source) + socket.inet_aton(address) + rest, (address, 0))
    return made


def main() -> None:
    until = sys.argv[1] if len(sys.argv) > 1 else None
    answered: set[str] = set()
    names: set[str] = set()
    tried = rounds = 0
    while True:
        out, said, count = attempt(0.7 if until is None else 0.2)
        answered.update(out)
        names.update(said)
        tried, rounds = tried + count, rounds + 1
        if until is None or os.path.exists(until):
            break
        if rounds == 1:
            print("started", flush=True)
    said = {"answered": sorted(answered), "names": sorted(names), "tried": tried, "rounds": rounds}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
