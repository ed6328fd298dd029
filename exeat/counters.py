"""Reads nftables' named counters through a netlink socket that was made in another network namespace.

The launcher makes the socket inside a sandbox's namespace (exeat/confine.py) and passes it out; it speaks of that
namespace for as long as it is open, whatever became of the processes there. The kernel asks the sender too for
CAP_NET_ADMIN over the namespace, which root has, and an ordinary user over the namespaces that he made.

Format: linux/netfilter/nfnetlink.h and nf_tables.h (NFT_MSG_GETOBJ), netlink(7).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

NETLINK_NETFILTER: Final = 12
SECONDS: Final = 2.0
MAX_MESSAGES: Final = 64
"""Of one dump; each is up to 64 KiB and holds many counters."""

_GET_OBJECT: Final = 10 << 8 | 19
"""NFNL_SUBSYS_NFTABLES, NFT_MSG_GETOBJ."""
_REQUEST, _DUMP = 0x1, 0x300
_INET: Final = 1
"""NFPROTO_INET."""
_ERROR, _DONE = 2, 3
_NAME, _TYPE, _DATA, _TABLE = 2, 3, 4, 1
_PACKETS: Final = 2
_COUNTER: Final = 1


def read_counters(sock: socket.socket, table: str) -> dict[str, int]:
    """Return packets by counter name of the inet table `table`. Blocks for up to SECONDS. Raises OSError."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 16):  # what an earlier call gave up waiting for
            pass
    sock.settimeout(SECONDS)
    header = struct.pack("=IHHII", 20, _GET_OBJECT, _REQUEST | _DUMP, 1, 0)
    sock.send(header + struct.pack("=BBH", _INET, 0, 0))
    found: dict[str, int] = {}
    for _ in range(MAX_MESSAGES):
        if not _take(sock.recv(1 << 16), table, found):
            return found
    raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))


def _take(data: bytes, table: str, found: dict[str, int]) -> bool:
    """Add what one datagram says; False where it was the last one. Raises OSError."""
    while len(data) >= 16:
        length, kind, _, _, _ = struct.unpack_from("=IHHII", data)
        if not 16 <= length <= len(data):
            break
        body, data = data[16:length], data[length + 3 & ~3 :]
        if kind == _DONE:
            return False
        if kind == _ERROR:
            code = -struct.unpack_from("=i", body)[0]
            raise OSError(code, os.strerror(code))
        fields = dict(_attributes(body[4:]))
        if fields.get(_TABLE) != table.encode() + b"\0" or fields.get(_TYPE) != struct.pack("!I", _COUNTER):
            continue
        packets = dict(_attributes(fields.get(_DATA, b""))).get(_PACKETS, b"")
        if len(packets) == 8:
            found[fields.get(_NAME, b"").rstrip(b"\0").decode("ascii", "replace")] = int.from_bytes(packets, "big")
    return True


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if not 4 <= length <= len(data):
            return
        yield kind & 0x3FFF, data[4:length]  # the upper bits say nested and byte order
        data = data[length + 3 & ~3 :]
