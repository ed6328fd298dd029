"""A forward proxy that is an independent witness: it remembers every byte and joins CONNECT to where the test says.

async with Forwarder({"api.example.com": ("127.0.0.1", origin.port)}) as proxy:
    ...
    assert proxy.heads == [b"CONNECT api.example.com:443 HTTP/1.1\\r\\n..."]

`answer` replaces its answer by bytes of the test's choice (and then joins nothing); SILENCE keeps it from answering.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress

SILENCE = b""


class Forwarder:
    """One listening proxy. `heads` are the requests it got, `carried` the bytes that clients sent inside tunnels."""

    def __init__(
        self,
        places: Mapping[str, tuple[str, int]] | None = None,
        *,
        answer: bytes | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.port = 0
        self.address = address
        self.answer = answer
        self.heads: list[bytes] = []
        self.carried = bytearray()
        self.connections = 0
        self._places = dict(places or {})
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Forwarder:
        self._server = await asyncio.start_server(self._accepted, self.address, 0, family=socket.AF_INET)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if self.answer == SILENCE:
            await reader.read()
            return
        if self.answer is not None:
            writer.write(self.answer)
            writer.write_eof()
            self.carried += await reader.read()
            return
        name = head.split(b" ")[1].rpartition(b":")[0].decode()
        far_reader, far_writer = await asyncio.open_connection(*self._places[name])
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(self._pump(reader, far_writer, keep=True), self._pump(far_reader, writer, keep=False))
        finally:
            far_writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, keep: bool) -> None:
        while data := await source.read(65536):
            if keep:
                self.carried += data
            sink.write(data)
            await sink.drain()
        sink.write_eof()
