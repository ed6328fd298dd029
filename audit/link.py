"""The client's side of the log: the Journal that every process holds over its inherited socket.

Map: append() renders and queues; _flush() sends everything queued in this turn of the loop as one frame; the
auditor's answers resolve the waiting appends. Silence for DEADLINE_S, a closed channel and a refused event are
all AuditUnavailable, so that the caller refuses the request (I21).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, cast

import orjson

from audit.events import Event
from audit.frames import ACK, FrameError, FrameReader, Item, Verdict, pack_appends, unpack_answers
from audit.journal import DEADLINE_S, AuditUnavailable
from audit.records import Renderer

MAX_WAITING: Final = 8_192
"""Appends without an answer; beyond it append() refuses at once (the auditor is behind by more than it can be)."""
MAX_UNSENT: Final = 16 << 20
"""Bytes that the auditor has not taken; the same."""


class AuditorLink:
    """Journal over one AF_UNIX stream socket; used from one event loop (asyncio or uvloop).

    `process` is the name under which the auditor knows this channel; it is only used in messages: the auditor
    writes its own name for the channel. `digest_key` is the installation's, given at boot.
    """

    def __init__(self, sock: socket.socket, process: str, digest_key: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        self._sock: socket.socket | None = sock
        self._connect: Callable[[], socket.socket] | None = None
        self._process = process
        self._renderer = Renderer(digest_key)
        self._deadline_s = deadline_s
        self._starting: asyncio.Task[None] | None = None
        self._wire: _Wire | None = None
        self._outgoing: list[Item] = []
        self._waiting: dict[int, tuple[asyncio.Future[int], float]] = {}
        self._ticket = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    def open_path(cls, path: str, process: str, digest_key: bytes, *, deadline_s: float = DEADLINE_S) -> AuditorLink:
        """A link to the auditor's listening socket (containers); connects anew after the auditor was restarted.

        Raises OSError when the first connection fails.
        """

        def connect() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)  # a full backlog is an error here, not a wait
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                raise
            return sock

        made = cls(connect(), process, digest_key, deadline_s=deadline_s)
        made._connect = connect
        return made

    async def append(self, event: Event, *, durable: bool = False) -> int:
        """See audit.journal.Journal. Returns the sequence number, or 0 for a refusal that was only counted."""
        if self._wire is None or self._wire.lost:
            # Shielded: a caller that is cancelled must not take the socket with it.
            if self._starting is None or self._starting.done():
                self._starting = asyncio.ensure_future(self._start())
                self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._starting)
        if len(self._waiting) >= MAX_WAITING or (self._wire is not None and self._wire.unsent > MAX_UNSENT):
            raise AuditUnavailable("too many records wait for the auditor")
        loop = asyncio.get_running_loop()
        self._ticket = ticket = self._ticket + 1
        body = orjson.dumps((event.name, self._renderer.fields(event)))
        answer: asyncio.Future[int] = loop.create_future()
        self._waiting[ticket] = (answer, loop.time() + self._deadline_s)
        if not self._outgoing:
            loop.call_soon(self._flush)
        self._outgoing.append(Item(ticket, durable, body))
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._deadline_s, self._sweep)
        try:
            return await answer
        finally:
            self._waiting.pop(ticket, None)

    async def close(self) -> None:
        """Send what is queued and close; appends that still wait raise AuditUnavailable."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._wire is not None:
            self._flush()
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._wire is not None:
            await self._wire.close_within(self._deadline_s)
        elif self._sock is not None:
            self._sock.close()
        self._fail("the log channel is closed")

    async def _start(self) -> None:
        if self._closed:
            raise AuditUnavailable("the log channel is closed")
        if self._wire is not None and not self._wire.lost:
            return
        sock, self._sock = self._sock, None
        try:
            if sock is None:
                if self._connect is None:
                    raise AuditUnavailable("the auditor is gone")
                sock = self._connect()
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            wire = _Wire(self._answered, self._lost)
            await loop.create_unix_connection(lambda: wire, sock=sock)
        except (OSError, ValueError):
            if sock is not None:
                sock.close()
            raise AuditUnavailable("the auditor cannot be reached") from None
        self._wire = wire

    def _flush(self) -> None:
        items, self._outgoing = self._outgoing, []
        if self._wire is None or self._wire.lost:
            self._fail("the auditor is gone")
        elif items:
            self._wire.send(pack_appends(items))

    def _answered(self, payload: bytes) -> None:
        for ticket, verdict, sequence in unpack_answers(payload):
            waiting = self._waiting.pop(ticket, None)
            if waiting is None or waiting[0].done():
                continue
            match verdict:
                case Verdict.WRITTEN | Verdict.DURABLE | Verdict.COUNTED:
                    waiting[0].set_result(sequence)
                case Verdict.REFUSED:
                    waiting[0].set_exception(AuditUnavailable("the auditor refuses this event from this channel"))
                case Verdict.UNAVAILABLE:
                    waiting[0].set_exception(AuditUnavailable("the record could not be written"))

    def _lost(self) -> None:
        self._outgoing = []
        self._fail("the auditor is gone")

    def _fail(self, why: str) -> None:
        for answer, _deadline in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(AuditUnavailable(why))
        self._waiting.clear()

    def _sweep(self) -> None:
        """One timer for all appends: they were queued in the order of their deadlines."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        now = loop.time()
        for ticket, (answer, deadline) in list(self._waiting.items()):
            if deadline > now:
                self._sweeper = loop.call_at(deadline, self._sweep)
                return
            del self._waiting[ticket]
            if not answer.done():
                answer.set_exception(AuditUnavailable("the auditor did not answer in time"))


class _Wire(asyncio.Protocol):
    """The socket: frames in, bytes out."""

    def __init__(self, answered: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._answered = answered
        self._on_lost = lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.lost = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream's transport always is one; uvloop's do not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, payload in self._reader.feed(data):
                if kind != ACK:
                    raise FrameError("not an acknowledgement")
                self._answered(payload)
        except FrameError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.ended.done():
            self.ended.set_result(None)
        self._on_lost()

    def send(self, data: bytes) -> None:
        """Queue bytes; MAX_WAITING bounds what can pile up behind a stalled auditor."""
        if self._transport is not None:
            self._transport.write(data)

    @property
    def unsent(self) -> int:
        """Bytes that the auditor has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def close_within(self, seconds: float) -> None:
        """Close after what is queued was sent, or without it once `seconds` are over."""
        self.close()
        done, _pending = await asyncio.wait([self.ended], timeout=seconds)
        if not done and self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close after what is queued was sent."""
        if self._transport is not None:
            self._transport.close()
