"""A question-and-answer service over UDP and TCP sockets that somebody else bound; what is said is the caller's.

Used for the stub resolver inside a sandbox (RFC 1035 4.2, RFC 7766): one datagram or length-prefixed message in, one
out, bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final, cast

from net.stream import SocketStream, StreamBroken

Answer = Callable[[bytes], bytes | None]
"""The answer to a message, or None for silence. Must not raise."""

MESSAGES_PER_CONNECTION: Final = 64
IDLE_SECONDS: Final = 10.0


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # uvloop's has another base

    def datagram_received(self, data: bytes, addr: object) -> None:
        reply = self._answer(data)
        if reply is not None and self._transport is not None:
            self._transport.sendto(reply, addr)  # type: ignore[arg-type]  # what the loop itself gave us


async def answer_datagrams(sock: socket.socket, answer: Answer) -> asyncio.DatagramTransport:
    """Answer what arrives on `sock` (bound, ours to close) until the returned transport is closed."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Datagrams(answer), sock=sock)
    return transport


async def answer_stream(stream: SocketStream, answer: Answer) -> None:
    """Answer the messages of one connection, each with its two-byte length before it; then close it."""
    stream.read_timeout = IDLE_SECONDS
    buffered = b""
    with contextlib.suppress(StreamBroken):
        for _ in range(MESSAGES_PER_CONNECTION):
            while len(buffered) < 2 or len(buffered) < 2 + int.from_bytes(buffered[:2], "big"):
                data = await stream.receive()
                if not data:
                    break
                buffered += data
            else:
                length = int.from_bytes(buffered[:2], "big")
                message, buffered = buffered[2 : 2 + length], buffered[2 + length :]
                reply = answer(message)
                if reply is not None:
                    stream.write(len(reply).to_bytes(2, "big") + reply)
                    await stream.drain()
                    continue
            break
    await stream.close()
