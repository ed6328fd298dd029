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
CONNECTION_SECONDS: Final = 60.0
CONNECTIONS: Final = 16
"""Open at one time on one listener. Whoever holds more of them has no use for them but ours."""


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


class StreamAnswers:
    """The same for the connections of one listener, each message with its two-byte length before it."""

    def __init__(self, answer: Answer, connections: int = CONNECTIONS) -> None:
        self._answer = answer
        self._limit = connections
        self._open = 0

    async def serve(self, stream: SocketStream) -> None:
        """Answer the messages of one connection and close it; one over the bound is cut at once."""
        if self._open >= self._limit:
            stream.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                with contextlib.suppress(StreamBroken):
                    await self._converse(stream)
                await stream.close()
        except TimeoutError:
            stream.abort()
        finally:
            self._open -= 1

    async def _converse(self, stream: SocketStream) -> None:
        stream.read_timeout = IDLE_SECONDS
        buffered = b""
        for _ in range(MESSAGES_PER_CONNECTION):
            while len(buffered) < 2 or len(buffered) < 2 + int.from_bytes(buffered[:2], "big"):
                data = await stream.receive()
                if not data:
                    return
                buffered += data
            length = int.from_bytes(buffered[:2], "big")
            message, buffered = buffered[2 : 2 + length], buffered[2 + length :]
            reply = self._answer(message)
            if reply is None:
                return
            stream.write(len(reply).to_bytes(2, "big") + reply)
            await stream.drain()
