"""In-memory byte streams: a connected pair without sockets, and readers and writers of whole transcripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from net.stream import HIGH_WATER, LOW_WATER, BufferedStream, StreamBroken


class MemoryStream(BufferedStream):
    """One end of a pair; behaves as SocketStream does, with the same receiving half."""

    def __init__(self) -> None:
        super().__init__()
        self.other: MemoryStream | None = None
        self.aborted = False
        self.closed = False
        self.eof_sent = False
        self._in_flight: list[bytes] = []  # written by the other end while we held reading
        self._in_flight_eof = False
        self._drain_waiters: list[asyncio.Future[None]] = []

    @classmethod
    def pair(cls) -> tuple[MemoryStream, MemoryStream]:
        """(one end, other end)."""
        left, right = cls(), cls()
        left.other, right.other = right, left
        return left, right

    @property
    def peer(self) -> str:
        return "memory:0"

    @property
    def unsent(self) -> int:
        """Bytes written that the other end's reader has not been given yet."""
        return sum(map(len, self.other._in_flight)) if self.other is not None else 0

    def write(self, data: bytes) -> None:
        other = self.other
        if not data or other is None or self.eof_sent or self.aborted or self.closed:
            return
        self.bytes_out += len(data)
        if other.aborted or other.closed:
            self._break(StreamBroken("reset"))
        elif other._held:
            other._in_flight.append(bytes(data))
        else:
            other._feed(bytes(data))

    async def drain(self) -> None:
        if self._error is not None:
            raise self._error
        if self.unsent <= HIGH_WATER:
            return
        loop = asyncio.get_running_loop()
        while self.unsent > LOW_WATER:
            last = self.unsent
            waiter: asyncio.Future[None] = loop.create_future()
            self._drain_waiters.append(waiter)
            try:
                async with asyncio.timeout(self.write_timeout):
                    await waiter
            except TimeoutError:
                if self.unsent >= last:
                    self.abort()
                    raise StreamBroken("write-timeout") from None
            if self._error is not None:
                raise self._error

    def _untaken(self) -> bool:
        return bool(self._in_flight) or self._in_flight_eof

    def _release(self) -> None:
        while self._in_flight and not self._held:
            self._feed(self._in_flight.pop(0))
        if self._in_flight_eof and not self._in_flight:
            self._feed_eof()
        if self.other is not None:
            waiters, self.other._drain_waiters = self.other._drain_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def send_eof(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self.eof_sent and self.other is not None and not self.aborted:
            self.eof_sent = True
            if self.other._in_flight:
                self.other._in_flight_eof = True
            else:
                self.other._feed_eof()

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._stop_timer()
            self._break(StreamBroken("closed"))
            self._wake_drains()
            if self.other is not None and not self.closed:
                self.other._break(StreamBroken("reset"))
                self.other._wake_drains()

    def _wake_drains(self) -> None:
        waiters, self._drain_waiters = self._drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def close(self) -> None:
        self._end()
        self.closed = True
        self._stop_timer()

    # --- for tests ---

    async def read_until(self, marker: bytes) -> bytes:
        """Everything up to and with `marker`; what follows stays unread."""
        data = b""
        while marker not in data:
            more = await self.receive()
            if not more:
                return data
            data += more
        at = data.index(marker) + len(marker)
        self.unread(data[at:])
        return data[:at]

    async def read_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await self.receive(count - len(data))
            if not more:
                return data
            data += more
        return data

    async def read_all(self) -> bytes:
        """Everything to the clean end. Raises StreamBroken where the end is not clean."""
        data = b""
        while more := await self.receive():
            data += more
        return data

    async def write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Write each piece and let the other end run in between."""
        for piece in pieces:
            self.write(piece)
            await asyncio.sleep(0)
