"""Where a redirected connection wanted to go: the kernel's own record of it (netfilter's SO_ORIGINAL_DST).

The socket was accepted on a listener made inside a sandbox's network namespace; the option is read from outside and
without privilege, because it belongs to the socket (tried, RULINGS 11.9).
"""

from __future__ import annotations

import socket
import struct

from net.stream import SocketStream

_SO_ORIGINAL_DST = 80
"""linux/netfilter_ipv4.h; IP6T_SO_ORIGINAL_DST has the same number at its own level."""


def original_destination(stream: SocketStream) -> tuple[str, int] | None:
    """Return (numeric address, port) that the client dialled, or None where nothing was redirected."""
    sock = stream.socket()
    if sock is None:
        return None
    try:
        if sock.family == socket.AF_INET6:
            raw = sock.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28)
            (port,) = struct.unpack_from("!H", raw, 2)
            found = socket.inet_ntop(socket.AF_INET6, raw[8:24]), port
        else:
            raw = sock.getsockopt(socket.IPPROTO_IP, _SO_ORIGINAL_DST, 16)
            (port,) = struct.unpack_from("!H", raw, 2)
            found = socket.inet_ntop(socket.AF_INET, raw[4:8]), port
    except OSError:
        return None  # no record: the connection was made to the listener itself
    return None if found == sock.getsockname()[:2] else found


def mark_of(stream: SocketStream) -> int:
    """The mark that the packets of an accepted connection carried, 0 where its namespace keeps none.

    See tcp_fwmark_accept in the kernel's ip-sysctl.
    """
    sock = stream.socket()
    try:
        return 0 if sock is None else sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)
    except OSError:
        return 0
