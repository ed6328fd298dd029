"""Who may call: the uid is on the list, and user, PID and network namespaces are our own (RULINGS 1.5).

A sandbox that reached the socket, even as an equal uid or as the root of a user namespace of its own, lives in other
namespaces. Where its namespaces cannot be read: a peer of our own uid is refused (it has made itself unreadable on
purpose); for another uid on the list the kernel never lets us look, and the uid alone counts.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

NAMESPACES = ("user", "pid", "net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The process at the other end, as the kernel saw it when it connected."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """From SO_PEERCRED (unix(7)). Raises OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return Peer(pid=pid, uid=uid)


def namespace(pid: int | str, kind: str) -> tuple[int, int]:
    """Device and inode of a namespace: its identity. Raises OSError."""
    found = os.stat(f"/proc/{pid}/ns/{kind}")
    return found.st_dev, found.st_ino


def refuse(
    peer: Peer,
    uids: frozenset[int],
    *,
    any_namespace: bool = False,
    own_uid: int,
    read: Callable[[int | str, str], tuple[int, int]] = namespace,
) -> str | None:
    """Why this peer may not call, or None. `read` is passed in so that tests need no namespaces."""
    if peer.uid not in uids:
        return "the caller's uid is not on the list"
    if any_namespace:
        return None
    if peer.pid <= 0:
        return "the caller is in another PID namespace"
    for kind in NAMESPACES:
        try:
            theirs = read(peer.pid, kind)
        except PermissionError:
            if peer.uid == own_uid:
                return "the caller's namespaces cannot be read"
            continue
        except OSError:
            return "the caller is gone"
        if theirs != read("self", kind):
            return f"the caller is in another {kind} namespace"
    return None
