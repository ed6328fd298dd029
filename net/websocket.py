"""WebSocket relay: after a valid 101, frames pass both ways unchanged, checked, counted and bounded (B078, T13).

`relay()` ends when both sides ended, one broke, a frame was refused or nobody spoke for the idle time; both streams
are closed then. A frame that must not pass is not passed in part: the connection is cut before it. Who must read
messages (the executor) gives an inspector for a direction: it gets checked bytes and returns those to send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from net.stream import READ_SIZE, StreamBroken
from net.turns import Portion, Share, rest
from wire.websocket import FrameChecker, FrameRefused, FrameTooLarge

Inspector = Callable[[bytes], Awaitable[bytes]]
"""Checked bytes of one direction in, the bytes to send out; it may hold some back. Raises MessageRefused."""


class MessageRefused(Exception):
    """A message must not pass. `reason` is a code of rules.reasons; both sides are cut before any byte of it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail


class WebSocketSide(Protocol):
    """What the relay needs of a stream: a part of net.stream.ByteStream, which says what each member does."""

    read_timeout: float | None
    share: Share | None

    async def receive(self, max_bytes: int = READ_SIZE) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    async def send_eof(self) -> None: ...

    def abort(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketLimits:
    """Bounds of one WebSocket; bytes and seconds."""

    frame_bytes: int = 16 << 20
    message_bytes: int = 64 << 20
    total_bytes: int | None = None
    """Both directions together."""
    up_bytes: int | None = None
    down_bytes: int | None = None
    """From the client, and to it; frame heads included."""
    idle_timeout: float = 300.0
    """Longest silence from one side while the other is silent too."""
    closing_timeout: float = 10.0
    """The same once a Close passed: both peers should answer it and hang up (RFC 6455 7.1.1)."""
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
    client: WebSocketSide,
    upstream: WebSocketSide,
    *,
    compressed: bool = False,
    limits: WebSocketLimits | None = None,
    on_bytes: Callable[[int], None] | None = None,
    inspect_up: Inspector | None = None,
    inspect_down: Inspector | None = None,
) -> WebSocketResult:
    """Relay until the end; never raises for what peers do. `compressed`: permessage-deflate was agreed.

    `on_bytes(count)` is told of every piece before it is sent (budgets); what it raises is raised after both were cut.
    """
    bounds = limits or WebSocketLimits()
    pair = _Pair(client, upstream, compressed, bounds, on_bytes, inspect_up, inspect_down)
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
        client: WebSocketSide,
        upstream: WebSocketSide,
        compressed: bool,
        limits: WebSocketLimits,
        on_bytes: Callable[[int], None] | None,
        inspect_up: Inspector | None,
        inspect_down: Inspector | None,
    ) -> None:
        self.client = client
        self.upstream = upstream
        self.limits = limits
        self.on_bytes = on_bytes
        self.total = 0
        self.error: str | None = None
        self.detail = ""
        self.ended = False
        self.hung_up = False
        """Both closed and nobody left in time: we did, which is no error."""
        bounds = {"frame_bound": limits.frame_bytes, "message_bound": limits.message_bytes}
        self.up = FrameChecker(masked=True, compressed=compressed, **bounds)
        self.down = FrameChecker(masked=False, compressed=compressed, **bounds)
        self.inspect_up = inspect_up
        self.inspect_down = inspect_down
        self.heard = 0.0
        self.closing: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.heard = loop.time()
        up = loop.create_task(self._direction(self.client, self.upstream, self.up, self.inspect_up))
        down = loop.create_task(self._direction(self.upstream, self.client, self.down, self.inspect_down))
        tasks = (up, down)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            if self.closing is not None:
                self.closing.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()
        self.ended = True

    async def _direction(
        self, source: WebSocketSide, target: WebSocketSide, checker: FrameChecker, inspect: Inspector | None
    ) -> None:
        """One way. Ends at a clean end; anything else is recorded and cuts both."""
        from_client = checker is self.up
        kept = backlog = b""
        portion = Portion(first=1024)
        try:
            while True:
                data = backlog or await self._receive(source)
                data, backlog = data[: portion.size], data[portion.size :]
                if not data:
                    if kept or not checker.between_frames:
                        raise StreamBroken("truncated", "the connection ended inside a frame")
                    await target.send_eof()
                    return
                data = kept + data if kept else data
                try:
                    begun = time.perf_counter()
                    whole = checker.feed(data)
                    crowded = portion.took(time.perf_counter() - begun)
                    kept = data[whole:]
                    self._count(whole, checker)
                    passes = data[:whole] if kept else data
                    if inspect is not None:
                        passes = await inspect(passes)
                except FrameTooLarge as refused:
                    self.fail("body-too-large" if from_client else "response-too-large", str(refused))
                    return
                except FrameRefused as refused:
                    self.fail("bad-protocol" if from_client else "upstream-protocol", str(refused))
                    return
                except MessageRefused as refused:
                    self.fail(refused.reason, refused.detail)
                    return
                if passes:
                    target.write(passes)
                    await target.drain()
                if crowded:  # frames of a few bytes: thousands of them are in one read
                    await rest(source.share)
                if checker.closed and self.closing is None:
                    self._expect_end()
        except StreamBroken as broken:
            if self.error is not None or self.hung_up:
                return
            if (self.up.closed or self.down.closed) and checker.between_frames and broken.kind != "idle-timeout":
                # Many peers drop the connection right after a Close; what is on its way to the other still arrives.
                await self._end_of(target)
                return
            timed_out = broken.kind == "idle-timeout"
            self.fail(
                "limit-reached" if timed_out else ("client-gone" if from_client else "upstream-protocol"),
                broken.detail or broken.kind,
            )

    async def _end_of(self, target: WebSocketSide) -> None:
        try:
            await target.send_eof()
        except StreamBroken:
            target.abort()

    def _expect_end(self) -> None:
        """A Close passed: from now on silence is short."""
        loop = asyncio.get_running_loop()
        due = self.heard + self.limits.closing_timeout
        if loop.time() < due:
            self.closing = loop.call_at(due, self._expect_end)
            return
        if self.up.closed and self.down.closed:
            self.hung_up = True
            self.client.abort()
            self.upstream.abort()
        else:
            self.fail("limit-reached", "a Close was not answered in time")

    async def _receive(self, source: WebSocketSide) -> bytes:
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

    def _count(self, size: int, checker: FrameChecker) -> None:
        self.total += size
        limits = self.limits
        if limits.total_bytes is not None and self.total > limits.total_bytes:
            self.fail("limit-reached", "the WebSocket carried more bytes than its bound")
        elif limits.up_bytes is not None and checker is self.up and checker.passed > limits.up_bytes:
            self.fail("body-too-large", "the WebSocket carried more bytes up than its bound")
        elif limits.down_bytes is not None and checker is self.down and checker.passed > limits.down_bytes:
            self.fail("response-too-large", "the WebSocket carried more bytes down than its bound")
        if self.error is not None:
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
