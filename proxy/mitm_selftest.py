"""What the adapter must do before it may serve, tried on itself at each start (RULINGS 11.6). In memory, no socket
beyond socket pairs.

    1. a hook that raises: the lane sees no byte, the client's connection ends
    2. a request arrives at the lane as one HTTP/1.1 head with our Host, and its answer returns
    3. a client that does not read: the lane can send no more than a bounded amount

A mitmproxy whose inside changed would fail one of these; the process then ends without having said `ready`.
"""

from __future__ import annotations

import asyncio
from typing import Final

import h2.config
import h2.connection
import h2.events
from mitmproxy.proxy import commands

from net.fdchannel import socket_pair
from net.stream import ByteStream, StreamBroken, open_socket_stream
from proxy.mitm_adapter import AdapterFault, Hook, Session, stream_bodies

SECONDS: Final = 10.0
BIG: Final = 8 * 1024 * 1024
BOUND: Final = 3 * 1024 * 1024
"""Window, our buffers and the kernel's of two socket pairs stay well below."""
HEAD: Final = b"GET /self-test HTTP/1.1\r\nHost: self.test\r\n\r\n"


class SelfTestFailed(AdapterFault):
    """The adapter must not serve. str() names what failed."""


async def self_test() -> None:
    """Raises SelfTestFailed."""
    try:
        async with asyncio.timeout(SECONDS):
            await _raising_hook()
            await _one_request()
            await _stalled_client()
    except TimeoutError:
        raise SelfTestFailed("the self-test did not end") from None


class _Bench:
    """A Session between an h2 client and a list of streams that it opened into "the lane"."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.opened: asyncio.Queue[ByteStream] = asyncio.Queue()
        self.streams: list[ByteStream] = []
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))

    async def __aenter__(self) -> _Bench:
        near, far = socket_pair()
        self.client = await open_socket_stream(near)
        self.session = Session(await open_socket_stream(far), self._dial, hook=self._hook)
        self.running = asyncio.ensure_future(self.session.run())
        self.h2.initiate_connection()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for stream in (self.client, *self.streams):
            stream.abort()

    async def _dial(self) -> ByteStream:
        near, far = socket_pair()
        lane = await open_socket_stream(far)
        self.streams.append(lane)
        self.opened.put_nowait(lane)
        return await open_socket_stream(near)

    def ask(self) -> None:
        self.h2.send_headers(
            1,
            [(":method", "GET"), (":scheme", "https"), (":authority", "self.test"), (":path", "/self-test")],
            end_stream=True,
        )
        self.client.write(self.h2.data_to_send())


async def _raising_hook() -> None:
    def raises(hook: commands.StartHook) -> None:
        raise RuntimeError("the self-test")

    async with _Bench(raises) as bench:
        bench.ask()
        try:
            while await bench.client.receive():
                pass
        except StreamBroken:
            pass
        await asyncio.gather(bench.running, return_exceptions=True)
        if not isinstance(bench.running.exception(), RuntimeError):
            raise SelfTestFailed("a hook that raises does not end the connection")
        if bench.streams:
            raise SelfTestFailed("a hook that raises does not stop the request")


async def _one_request() -> None:
    async with _Bench(stream_bodies) as bench:
        bench.ask()
        lane = await bench.opened.get()
        seen = b""
        while len(seen) < len(HEAD):
            seen += await lane.receive()
        if seen != HEAD:
            raise SelfTestFailed("a request does not arrive as it was judged")
        lane.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        body = b""
        while True:
            for event in bench.h2.receive_data(await bench.client.receive()):
                match event:
                    case h2.events.DataReceived():
                        body += event.data or b""
                    case h2.events.StreamEnded():
                        if body != b"ok":
                            raise SelfTestFailed("an answer does not return")
                        return
                    case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                        raise SelfTestFailed("an answer does not return")


async def _stalled_client() -> None:
    async with _Bench(stream_bodies) as bench:
        bench.ask()
        lane = await bench.opened.get()
        lane.write_timeout = 0.5
        lane.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG)
        sent = 0
        try:
            while sent < BIG:
                lane.write(bytes(65_536))
                sent += 65_536
                await lane.drain()  # until nothing moves for write_timeout
        except StreamBroken:
            pass
        if sent > BOUND or bench.session.backlog() > BOUND:
            raise SelfTestFailed("a client that does not read fills the memory")
