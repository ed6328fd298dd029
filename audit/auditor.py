"""The auditor: the only process that writes the log (`python -I -m audit.auditor BOOT_FD`).

Map: main (harden, read the Boot, lock) -> Auditor (queue, write, fsync, answer) -> _Channel.

One turn of the loop: everything that arrived is checked, linked and written with one write(); then appends that
asked for *written* are answered, and those that asked for *durable* wait for the next fsync, which starts at once
if any waits and at most GROUP_S later otherwise. While one fsync runs in a thread the next group gathers.

What goes wrong: a channel that breaks the protocol is closed; a failing write or fsync ends the segment
(segments.py); what cannot be written for DEADLINE_S is answered UNAVAILABLE; a client that dies in mid-frame
costs its own unfinished frame and is recorded as process.lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from audit.boot import Boot, BootRefused, PeerBoot, harden, known_channel, read_boot
from audit.budget import Budget, Room
from audit.events import EVENTS, AuditError, EventInvalid, Value
from audit.frames import APPEND, Answer, FrameError, FrameReader, Verdict, pack_answers, unpack_appends
from audit.journal import DEADLINE_S
from audit.notary import Notary
from audit.records import accept, keyed_digest
from audit.segments import Faults, LogRefused, SegmentWriter, lock_directory, recover

GROUP_S: Final = 0.05
RETRY_S: Final = 0.1
MAX_QUEUE: Final = 16_384
MAX_UNREAD_ANSWERS: Final = 4 << 20
JUMP_MS: Final = 300_000
_OVERHEAD: Final = 250
"""Bytes that the auditor's own keys add to a record, for the quota."""


@dataclass(slots=True)
class _Waiting:
    """One append on its way through the auditor."""

    channel: _Channel | None
    ticket: int
    durable: bool
    process: str
    name: str
    fields: Mapping[str, object]
    received: float
    sequence: int = 0


class Auditor:
    """Queue, writer, budget and channels of one node. Runs in one event loop."""

    def __init__(self, boot: Boot, faults: Faults | None = None) -> None:
        self._boot = boot
        directory = Path(boot.log_directory)
        key = bytes.fromhex(boot.digest_key)
        self._notary = Notary(directory, boot.node, Path(boot.signing_key)) if boot.signing_key else None
        self._writer = SegmentWriter(
            directory,
            boot.node,
            time.time_ns,
            faults,
            segment_bytes=boot.limits.segment_bytes,
            on_durable=self._notary.add if self._notary else None,
        )
        self._budget = Budget(
            lambda text: keyed_digest(key, text),
            refusals_a_second=boot.limits.refusals_a_second,
            quota_bytes=boot.limits.quota_bytes,
        )
        self._queue: deque[_Waiting] = deque()
        self._linked: deque[_Waiting] = deque()
        self._undurable: deque[_Waiting] = deque()
        self._channels: set[_Channel] = set()
        self._turn_due = False
        self._sync_over = asyncio.Event()
        self._sync_over.set()
        self._sync_timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._error = OSError()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._peers = 0
        self._clock_gap = _clock_gap()
        self._checkpoint_due = 0.0

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take up the log, serve until told to stop, drain, seal. Raises LogRefused, OSError."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_fault)
        found = recover(self._writer.directory, self._boot.node)
        if self._notary is not None:
            self._notary.start(found.head.sequence)
        self._writer.start(found)
        self._own("process.started", {"program": "auditor", "pid": os.getpid(), "version": self._boot.version})
        self._turn()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        for item in self._boot.channels:
            await self._add(socket.socket(fileno=item.fd), item.process, item.kind)
        listener = self._listen()
        control = self._take_control()
        ticker = loop.create_task(self._tick())
        stopping = loop.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stopping, ticker], return_when=asyncio.FIRST_COMPLETED)
            if ticker.done():
                ticker.result()
            for closing in (listener, control):
                if closing is not None:
                    loop.remove_reader(closing)
            with contextlib.suppress(TimeoutError):
                if self._channels:
                    await asyncio.wait_for(self._idle.wait(), self._boot.limits.drain_s)
        finally:
            ticker.cancel()
            stopping.cancel()
            for closing in (listener, control):
                if closing is not None:
                    closing.close()
        await self._finish()
        # It ends already; one more would meet a loop that is closing, and be told on stderr as a fault.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def _finish(self) -> None:
        """Write what is left, seal, sign. A log that cannot be sealed is left for the next start to recover."""
        await self._sync_over.wait()
        self._summarise()
        if not self._writer.healthy:
            self._writer.reopen(self._error)
            self._written()
        self._turn()
        await self._sync_over.wait()
        self._writer.sync()
        self._settled()
        for channel in list(self._channels):
            channel.close()
        self._writer.stop("auditor", {"program": "auditor", "pid": os.getpid()})
        for timer in (self._sync_timer, self._retry):  # the file is closed: nothing may come back to it
            if timer is not None:
                timer.cancel()
        self._settled()
        if self._notary is not None:
            self._notary.sign()

    async def _tick(self) -> None:
        """Once a second: summaries, disk reserve, clock, checkpoint."""
        while True:
            await asyncio.sleep(1)
            self._summarise()
            with contextlib.suppress(OSError):
                disk = os.statvfs(self._boot.log_directory)
                self._budget.short = disk.f_bavail * disk.f_frsize < self._boot.limits.reserve_bytes
            gap = _clock_gap()
            if abs(moved := (gap - self._clock_gap) // 1_000_000) > (JUMP_MS if moved > 0 else 1_000):
                self._own("clock.jumped", {"jump_ms": moved})
                self._clock_gap = gap
            now = time.monotonic()
            if self._notary is not None and now >= self._checkpoint_due and self._writer.healthy:
                self._checkpoint_due = now + self._boot.limits.checkpoint_s
                try:
                    self._notary.sign()
                except OSError:
                    _say("a checkpoint could not be written; it is tried again")
            self._expire()

    # -- channels -----------------------------------------------------------------------------------------------

    async def _add(self, sock: socket.socket, process: str, kind: str) -> None:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: _Channel(self, process, kind), sock)

    def _listen(self) -> socket.socket | None:
        listen = self._boot.listen
        if listen is None:
            return None
        # The directory lock is held: a socket left there belongs to an auditor that is gone.
        fresh = f"{listen.path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(fresh)
        # Who may speak is decided by the peer's uid, not by the mode.
        os.chmod(fresh, 0o666)  # noqa: S103
        listener.listen(64)
        os.replace(fresh, listen.path)  # the name appears when somebody listens
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def ready() -> None:
            try:
                sock, _address = listener.accept()
            except OSError:
                return
            peer = self._peer(sock)
            if peer is None:
                sock.close()
                return
            self._peers += 1
            task = loop.create_task(self._add(sock, f"{peer.process}-{self._peers}", peer.kind))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_reader(listener, ready)
        return listener

    def _peer(self, sock: socket.socket) -> PeerBoot | None:
        _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        assert self._boot.listen is not None
        return next((peer for peer in self._boot.listen.peers if peer.uid == uid), None)

    def _take_control(self) -> socket.socket | None:
        if self._boot.control_fd is None:
            return None
        control = socket.socket(fileno=self._boot.control_fd)
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def ready() -> None:
            try:
                message, fds, _flags, _address = socket.recv_fds(control, 4_096, 4)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            try:
                told = json.loads(message) if message else None
                if len(fds) != 1 or not isinstance(told, dict) or told.keys() != {"process", "kind"}:
                    raise ValueError
                process, kind = told["process"], told["kind"]
                if not known_channel(process, kind):
                    raise ValueError
            except ValueError:
                # The end of the supervisor, or a message that it would never send: either way, stop in order.
                for descriptor in fds:
                    os.close(descriptor)
                loop.remove_reader(control)
                self._stopping.set()
                return
            task = loop.create_task(self._add(socket.socket(fileno=fds[0]), process, kind))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_reader(control, ready)
        return control

    def joined(self, channel: _Channel) -> None:
        """A channel is open."""
        self._channels.add(channel)

    def left(self, channel: _Channel, pending: int) -> None:
        """A channel ended, with `pending` bytes of an unfinished frame."""
        self._channels.discard(channel)
        if not channel.said_goodbye:
            detail = "its log channel ended in mid-frame" if pending else "its log channel ended"
            self._own("process.lost", {"instance": channel.process, "program": channel.kind, "detail": detail})
        if not self._channels:
            self._idle.set()
            if self._boot.listen is None and self._boot.control_fd is None:
                self._stopping.set()

    def received(self, channel: _Channel, payload: bytes) -> None:
        """One APPEND frame. Raises FrameError."""
        now = time.monotonic()
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        for ticket, durable, body in unpack_appends(payload):
            try:
                name, fields = _judge(body, channel.kind)
            except EventInvalid as error:
                _say(f"{channel.process}: {error}")
                channel.answer(ticket, Verdict.REFUSED)
                continue
            if len(self._queue) >= MAX_QUEUE:
                channel.answer(ticket, Verdict.UNAVAILABLE)
                continue
            match self._budget.admit(channel.process, name, fields, len(body) + _OVERHEAD, boot_s):
                case Room.COUNT:
                    channel.answer(ticket, Verdict.COUNTED)
                    continue
                case Room.NONE:
                    channel.answer(ticket, Verdict.UNAVAILABLE)
                    if self._budget.reached(fields, boot_s):
                        self._own("log.quota-reached", {"tenant": fields["tenant"], "sandbox": fields["sandbox"]})
                    continue
                case Room.WRITE:
                    pass
            if name == "process.stopped":
                channel.said_goodbye = True
            self._queue.append(_Waiting(channel, ticket, durable, channel.process, name, fields, now))
        self._due()

    # -- writing ------------------------------------------------------------------------------------------------

    def _own(self, name: str, fields: Mapping[str, object]) -> None:
        """Queue a record of the auditor's own."""
        self._queue.append(_Waiting(None, 0, False, "auditor", name, fields, time.monotonic()))
        self._due()

    def _due(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Link and write everything that waits, answer, see to the fsync."""
        self._turn_due = False
        writer = self._writer
        if not writer.healthy:
            self._heal_later()
            return
        if not self._queue:
            self._flush_answers()
            return
        while self._queue:
            waiting = self._queue.popleft()
            waiting.sequence = writer.link(waiting.process, waiting.name, waiting.fields)
            self._linked.append(waiting)
        try:
            writer.write()
            self._written()
            if writer.crowded:
                writer.sync()
                self._settled()
        except OSError as error:
            self._broken(error)
            return
        if self._undurable:
            self._start_sync()
        elif self._sync_timer is None:
            self._sync_timer = asyncio.get_running_loop().call_later(GROUP_S, self._start_sync)

    def _written(self) -> None:
        """The write returned: everything linked is in the file."""
        durable = self._writer.durable
        for waiting in self._linked:
            if waiting.channel is None:
                continue
            if not waiting.durable:
                waiting.channel.answer(waiting.ticket, Verdict.WRITTEN, waiting.sequence)
            elif waiting.sequence <= durable:
                waiting.channel.answer(waiting.ticket, Verdict.DURABLE, waiting.sequence)
            else:
                self._undurable.append(waiting)
        self._linked.clear()
        self._flush_answers()

    def _settled(self) -> None:
        """The writer's durable mark moved."""
        durable = self._writer.durable
        while self._undurable and self._undurable[0].sequence <= durable:
            waiting = self._undurable.popleft()
            if waiting.channel is not None:
                waiting.channel.answer(waiting.ticket, Verdict.DURABLE, waiting.sequence)
        self._flush_answers()

    def _flush_answers(self) -> None:
        for channel in self._channels:
            channel.flush()

    def _start_sync(self) -> None:
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if not self._sync_over.is_set() or not self._writer.healthy:
            return
        loop = asyncio.get_running_loop()
        run, mark = self._writer.begin_sync()
        self._sync_over.clear()

        def done(future: asyncio.Future[None]) -> None:
            self._sync_over.set()
            error = future.exception()
            if isinstance(error, OSError):
                self._writer.sync_failed(mark)
                if not self._writer.healthy:
                    self._broken(error)
                return
            if error is not None:
                raise error
            self._writer.end_sync(mark)
            self._settled()
            if self._undurable:
                self._start_sync()
            elif self._writer.durable < self._writer.head.sequence and self._sync_timer is None:
                self._sync_timer = loop.call_later(GROUP_S, self._start_sync)

        loop.run_in_executor(None, run).add_done_callback(done)

    # -- when writing fails -------------------------------------------------------------------------------------

    def _broken(self, error: OSError) -> None:
        _say(f"writing the log failed ({error.strerror}); a new segment is opened")
        self._error = error
        self._heal()

    def _heal_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._heal)

    def _heal(self) -> None:
        """Try a new segment; what waits longer than DEADLINE_S is answered UNAVAILABLE."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._writer.healthy:
            return
        try:
            self._writer.reopen(self._error)
        except OSError:
            self._expire()
            self._heal_later()
            return
        self._written()
        self._settled()
        self._due()

    def _expire(self) -> None:
        """Refuse what waited too long. Linked lines are still written later: an intent without an outcome."""
        oldest = time.monotonic() - DEADLINE_S
        for waiting in (*self._queue, *self._linked, *self._undurable):
            if waiting.received < oldest and waiting.channel is not None:
                waiting.channel.answer(waiting.ticket, Verdict.UNAVAILABLE)
                waiting.channel = None
        if not self._writer.healthy:
            self._queue = deque(item for item in self._queue if item.received >= oldest or item.process == "auditor")
        self._flush_answers()

    def _summarise(self) -> None:
        for summary in self._budget.summaries():
            self._own("refusals.summarised", summary.fields())


class _Channel(asyncio.Protocol):
    """One client. Its name and kind were given by the supervisor, never by the client."""

    def __init__(self, auditor: Auditor, process: str, kind: str) -> None:
        self.process = process
        self.kind = kind
        self.said_goodbye = False
        self._auditor = auditor
        self._reader = FrameReader()
        self._answers: list[Answer] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._auditor.joined(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            for kind, payload in self._reader.feed(data):
                if kind != APPEND:
                    raise FrameError("not an append")
                self._auditor.received(self, payload)
        except FrameError as error:
            _say(f"{self.process}: {error}; its channel is closed")
            self._transport.abort()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._auditor.left(self, self._reader.pending)

    def answer(self, ticket: int, verdict: Verdict, sequence: int = 0) -> None:
        """Queue one answer; flush() sends."""
        self._answers.append(Answer(ticket, verdict, sequence))

    def flush(self) -> None:
        """Send the queued answers. A client that does not read them is cut."""
        if not self._answers or self._transport is None:
            return
        answers, self._answers = self._answers, []
        if self._transport.is_closing():
            return
        self._transport.write(pack_answers(answers))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_ANSWERS:
            self._transport.abort()

    def close(self) -> None:
        """Close after what is queued was sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()


def _judge(body: bytes, kind: str) -> tuple[str, dict[str, Value]]:
    """The event in one append, if this kind of process may write it. Raises EventInvalid."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EventInvalid("not JSON") from None
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not str or not isinstance(value[1], dict):
        raise EventInvalid("not an event")
    name, fields = value
    kept = accept(name, fields)
    if kind not in EVENTS[name].writers:
        raise EventInvalid(f"{name} is not written by a {kind}")
    return name, kept


def _fault(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """A callback of ours raised: end at once. Unanswered appends are refused; the next start recovers the log."""
    _say(f"internal error ({type(context.get('exception')).__name__})")
    if "handle" in context or "task" in context:
        os._exit(70)


def _clock_gap() -> int:
    """Wall clock minus boot clock in nanoseconds: constant unless somebody sets the clock."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _say(sentence: str) -> None:
    """One line for whoever runs us; never a value from a record."""
    sys.stderr.write(f"auditor: {sentence}\n")
    sys.stderr.flush()


def main(argv: list[str] | None = None, faults: Faults | None = None) -> int:
    """Run the auditor: 0 after an orderly end, 2 when it cannot start, 1 when the log could not be sealed."""
    arguments = sys.argv[1:] if argv is None else argv
    os.umask(0o077)
    try:
        harden()
        if len(arguments) != 1 or not arguments[0].isdigit():
            raise BootRefused("the only argument is the number of the boot descriptor")
        boot = Boot.parse(read_boot(int(arguments[0])))
        lock = lock_directory(Path(boot.log_directory))
    except (AuditError, OSError) as error:
        _say(str(error))
        return 2
    # The supervisor decides when a terminal's Ctrl-C becomes an end: workers first, the log last.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:

        async def run() -> None:
            await Auditor(boot, faults).run()

        asyncio.run(run())
    except LogRefused as error:
        _say(str(error))
        return 2
    except OSError as error:
        _say(f"the log could not be sealed ({error.strerror})")
        return 1
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
