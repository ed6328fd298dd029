"""WebSocket relay: after a valid 101, frames pass both ways unchanged, checked, counted and bounded (B078, T13).

`relay()` ends when both sides ended, one broke, a frame was refused or nobody spoke for the idle time; both streams
are closed then. A frame that must not pass is not passed in part: the connection is cut before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from net.stream import ByteStream, StreamBroken
from wire.websocket import FrameChecker, FrameRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketLimits:
    """Bounds of one WebSocket; bytes and seconds."""

    frame_bytes: int = 16 << 20
    message_bytes: int = 64 << 20
    total_bytes: int | None = None
    """Both directions together."""
    idle_timeout: float = 300.0
    """Longest silence from one side while the other is silent too."""
    total_timeout: float | None = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketResult:
    """How it ended. `error`: None after a closing handshake or clean end, else a reason code or `client-gone`."""

    bytes_up: int
    bytes_down: int
    frames_up: int
    frames_down: int
    messages_up: int
    messages_down: int
    error: str | None = None
    detail: str = ""


async def relay(
    client: ByteStream,
    upstream: ByteStream,
    *,
    compressed: bool = False,
    limits: WebSocketLimits | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> WebSocketResult:
    """Relay until the end; never raises for what peers do. `compressed`: permessage-deflate was agreed.

    `on_bytes(count)` is told of every piece before it is sent (budgets); what it raises is raised after both were cut.
    """
    bounds = limits or WebSocketLimits()
    pair = _Pair(client, upstream, compressed, bounds, on_bytes)
    try:
        async with asyncio.timeout(bounds.total_timeout):
            await pair.run()
    except TimeoutError:
        pair.fail("limit-reached", "the WebSocket was open longer than its bound")
    finally:
        if pair.error is None and pair.ended:
            await client.close()
            await upstream.close()
        client.abort()
        upstream.abort()
    return pair.result()


class _Pair:
    def __init__(
        self,
        client: ByteStream,
        upstream: ByteStream,
        compressed: bool,
        limits: WebSocketLimits,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self.client = client
        self.upstream = upstream
        self.limits = limits
        self.on_bytes = on_bytes
        self.total = 0
        self.error: str | None = None
        self.detail = ""
        self.ended = False
        bounds = {"frame_bound": limits.frame_bytes, "message_bound": limits.message_bytes}
        self.up = FrameChecker(masked=True, compressed=compressed, **bounds)
        self.down = FrameChecker(masked=False, compressed=compressed, **bounds)
        self.heard = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.heard = loop.time()
        up = loop.create_task(self._direction(self.client, self.upstream, self.up, "bad-protocol"))
        down = loop.create_task(self._direction(self.upstream, self.client, self.down, "upstream-protocol"))
        tasks = (up, down)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()
        self.ended = True

    async def _direction(self, source: ByteStream, target: ByteStream, checker: FrameChecker, bad: str) -> None:
        """One way. Ends at a clean end; anything else is recorded and cuts both."""
        kept = b""
        try:
            while True:
                data = await self._receive(source)
                if not data:
                    if kept or not checker.between_frames:
                        raise StreamBroken("truncated", "the connection ended inside a frame")
                    await target.send_eof()
                    return
                data = kept + data if kept else data
                try:
                    whole = checker.feed(data)
                except FrameRefused as refused:
                    self.fail(bad, str(refused))
                    return
                kept = data[whole:]
                if whole:
                    self._count(whole)
                    target.write(data[:whole])
                    await target.drain()
        except StreamBroken as broken:
            if self.error is None:
                other = self.down if checker is self.up else self.up
                if other.closed and checker.closed:
                    # Many peers drop the connection right after the closing handshake.
                    target.abort()
                    return
                from_client = checker is self.up
                timed_out = broken.kind == "idle-timeout"
                self.fail(
                    "limit-reached" if timed_out else ("client-gone" if from_client else "upstream-protocol"),
                    broken.detail or broken.kind,
                )

    async def _receive(self, source: ByteStream) -> bytes:
        """receive(), where silence of one side counts only while the other is silent too."""
        loop = asyncio.get_running_loop()
        idle = self.limits.idle_timeout
        while True:
            source.read_timeout = max(self.heard + idle - loop.time(), 0.001)
            try:
                data = await source.receive()
            except StreamBroken as broken:
                if broken.kind == "idle-timeout" and loop.time() + 0.001 < self.heard + idle:
                    continue
                raise
            self.heard = loop.time()
            return data

    def _count(self, size: int) -> None:
        self.total += size
        if self.limits.total_bytes is not None and self.total > self.limits.total_bytes:
            self.fail("limit-reached", "the WebSocket carried more bytes than its bound")
            raise StreamBroken("closed")
        if self.on_bytes is not None:
            self.on_bytes(size)

    def fail(self, reason: str, detail: str) -> None:
        if self.error is None:
            self.error, self.detail = reason, detail
        self.client.abort()
        self.upstream.abort()

    def result(self) -> WebSocketResult:
        return WebSocketResult(
            bytes_up=self.up.passed,
            bytes_down=self.down.passed,
            frames_up=self.up.frames,
            frames_down=self.down.frames,
            messages_up=self.up.messages,
            messages_down=self.down.messages,
            error=self.error,
            detail=self.detail,
        )
