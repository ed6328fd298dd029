"""Passing sockets between processes: a SEQPACKET socket whose messages carry one socket each (SCM_RIGHTS).

The worker makes a socket pair per hand-off and gives one end away, so that no path in any file system leads to an
executor and one hand-off cannot touch another. Several executors may read the same end: each message goes to one.
Works on asyncio and uvloop through add_reader and add_writer, and closes every descriptor it does not hand on.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
from collections.abc import Callable

from net.stream import NetError

MAX_MESSAGE = 4096
MAX_FDS = 4
"""Descriptors that fit one message; more than the expected one are closed."""


class ChannelBroken(NetError):
    """The other side is gone, or sent what is no message of this channel."""


class FdChannel:
    """One end of a SEQPACKET socket. `send` and `receive` may run in two tasks; each is used by one at a time."""

    def __init__(self, sock: socket.socket, *, channels_too: bool = False) -> None:
        """Take over `sock` (AF_UNIX, SOCK_SEQPACKET). What it carries are stream sockets.

        `channels_too`: SEQPACKET and datagram sockets may come as well (from the supervisor).
        """
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            raise ChannelBroken("the channel is not a SEQPACKET socket")
        sock.setblocking(False)
        self._sock = sock
        more = {socket.SOCK_SEQPACKET, socket.SOCK_DGRAM} if channels_too else set()
        self._kinds = {socket.SOCK_STREAM, *more}
        self._closed = False
        self._waiters: set[asyncio.Future[None]] = set()

    async def send(self, message: bytes, passed: socket.socket) -> None:
        """Send `message` (1..MAX_MESSAGE bytes) with `passed`, which the caller still owns and closes.

        Raises ChannelBroken.
        """
        if not 0 < len(message) <= MAX_MESSAGE:
            raise ChannelBroken("a channel message is empty or too long")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed.fileno()]))]
        loop = asyncio.get_running_loop()
        while True:
            self._check_open()
            try:
                self._sock.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                await self._ready(loop.add_writer, loop.remove_writer)
            except OSError:
                raise ChannelBroken("the other side of the channel is gone") from None
            else:
                return

    async def receive(self) -> tuple[bytes, socket.socket] | None:
        """Return the next message with its socket (close-on-exec), or None when the other side left.

        A message without exactly one socket of a permitted kind is dropped with all it carried.
        Raises ChannelBroken once closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._check_open()
            try:
                message, sockets, whole = _receive(self._sock)
            except (BlockingIOError, InterruptedError):
                await self._ready(loop.add_reader, loop.remove_reader)
                continue
            except OSError:
                return None
            if not message and not sockets:
                return None
            if whole and len(sockets) == 1 and sockets[0].type in self._kinds:
                sockets[0].setblocking(False)
                return message, sockets[0]
            for stray in sockets:
                stray.close()

    def close(self) -> None:
        """Close this end; waiting calls raise ChannelBroken. Idempotent."""
        if not self._closed:
            self._closed = True
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_exception(ChannelBroken("the channel was closed"))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            loop.remove_writer(self._sock)
            self._sock.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelBroken("the channel was closed")

    async def _ready(self, add: Callable[..., None], remove: Callable[..., object]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        add(self._sock, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if not self._closed:
                remove(self._sock)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of non-blocking stream sockets: one hand-off."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of SEQPACKET sockets, for a supervisor to hand down."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _receive(sock: socket.socket) -> tuple[bytes, list[socket.socket], bool]:
    item = array.array("i").itemsize
    message, ancillary, flags, _ = sock.recvmsg(
        MAX_MESSAGE, socket.CMSG_SPACE(MAX_FDS * item), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % item])
    sockets: list[socket.socket] = []
    whole = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    for number in numbers:
        try:
            sockets.append(socket.socket(fileno=number))
        except OSError:  # not a socket at all
            whole = False
            with contextlib.suppress(OSError):
                socket.close(number)
    return message, sockets, whole
