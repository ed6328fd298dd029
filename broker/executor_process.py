"""The executor process: `python -I -m broker.executor_process <boot fd>`.

It holds no key and no store: a stream to the vault, one to the auditor, and channels by which workers pass it one
socket per hand-off. When the vault falls silent everything is cut; when it is gone the process ends (RULINGS 9.5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import uvloop

from audit.events import Event, Value
from audit.journal import AuditUnavailable, Journal
from audit.link import AuditorLink
from broker.admin.peers import peer_of
from broker.executor import Executor
from broker.vault.clock import SystemClock
from broker.vaultlink import VaultLink, VaultUnavailable
from net.addresses import AddressTable
from net.aside import share_the_interpreter
from net.contexts import ClientContexts
from net.dial import DialError, SocketDialer
from net.fdchannel import ChannelBroken, FdChannel
from net.framing import FrameStream
from net.pool import Pool
from net.process import BootError, complain, harden, keep_in_memory, quiet_hooks, read_boot
from net.resolve import Lookups, SystemResolver
from net.stream import open_socket_stream
from net.turns import CALLS_BESIDES, CALLS_ROOM, Turns
from net.upstream import UpstreamProxy
from wire.control import MAX_FROM_VAULT, Cut
from wire.handoff import HANDOFF_MESSAGE

MAX_RUNNING = 512
"""Hand-offs at once; beyond it no channel is read, and workers ask another executor."""
DRAIN_SECONDS = 10.0
WATCH_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What the supervisor tells an executor. Descriptors are inherited; paths are absolute."""

    name: str
    vault_fd: int | None = None
    vault_path: str | None = None
    """For containers: the vault's listening Unix socket, where no descriptor is inherited."""
    auditor_fd: int | None = None
    auditor_path: str | None = None
    digest_key: bytes = field(default=b"", repr=False)
    channel_fds: tuple[int, ...] = ()
    """SEQPACKET sockets to workers, one each or one shared by all executors."""
    listen_path: str | None = None
    """For containers: where a SEQPACKET listener is made (mode 0660); each connection is a worker's channel."""
    listen_uids: tuple[int, ...] = ()
    """Peers accepted at `listen_path`."""
    upstream: UpstreamProxy | None = None
    """The operator's proxy that calls leave through, with its password."""
    ready_fd: int | None = None
    """Written `ready\\n` when the first snapshot is in force, then closed."""


def main() -> int:
    """Run until told to stop. Exit 0 after a drain, 1 where the vault was lost, 2 where the boot was refused."""
    try:
        harden()
        keep_in_memory()
        quiet_hooks("executor")
        boot = read_boot(int(sys.argv[1]), Boot)
        return uvloop.run(_Process(boot).run())
    except (BootError, IndexError, ValueError) as error:
        complain("executor", str(error) if isinstance(error, BootError) else "no boot document", error)
        return 2
    except OSError as error:
        complain("executor", "an inherited descriptor or a path of the boot document cannot be used", error)
        return 2


class _Process:
    """The parts of one executor process, and how they end."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._clock = SystemClock(0.0)
        self._stop = asyncio.Event()
        self._drain_seconds = DRAIN_SECONDS
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        boot = self._boot
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        journal = _journal(boot)
        control = await open_socket_stream(_stream(boot.vault_fd, boot.vault_path))
        link = VaultLink(
            FrameStream(control, MAX_FROM_VAULT),
            name=boot.name,
            clock=self._clock,
            on_cut=lambda message: executor.cut(message),
            on_drain=self._drain,
            on_floor=self._clock.lower_floor,  # also down, where an operator reset the vault's
        )
        share_the_interpreter()
        lookups = Lookups(SystemResolver(), clock=time.monotonic)
        turns = Turns(room=CALLS_ROOM, besides=CALLS_BESIDES)
        dialer = SocketDialer(lookups, ClientContexts(), lambda: _table(link), upstream=boot.upstream, turns=turns)
        pool = Pool(dialer, clock=time.monotonic)
        executor = Executor(vault=link, pool=pool, journal=journal, clock=self._clock, turns=turns)
        following = loop.create_task(link.run())
        watching = loop.create_task(self._watch(link, executor))
        await self._say(journal, "process.started")
        for fd in boot.channel_fds:
            self._serve_channel(FdChannel(socket.socket(fileno=fd)), executor)
        if boot.listen_path is not None:
            self._accepting.append(loop.create_task(self._listen(boot.listen_path, executor)))
        stopping = loop.create_task(self._stop.wait())
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        lost = following.done()
        for task in self._accepting:
            task.cancel()
        if lost:
            complain("executor", "the vault is gone; everything is cut")
        elif self._tasks:
            await asyncio.wait(self._tasks, timeout=self._drain_seconds)
        await executor.cut(Cut(id=0, kind="all"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        await executor.settle()
        await pool.close()
        await self._say(journal, "process.stopped")
        ours = asyncio.gather(following, watching, stopping, *self._accepting, return_exceptions=True)
        following.cancel()
        watching.cancel()
        stopping.cancel()
        await ours
        control.abort()
        return 1 if lost else 0

    def _drain(self, seconds: float) -> None:
        self._drain_seconds = seconds
        self._stop.set()

    async def _watch(self, link: VaultLink, executor: Executor) -> None:
        """Cut everything while the vault is silent; tell the supervisor when the first snapshot is in force."""
        ready = self._boot.ready_fd
        while True:
            if ready is not None:
                with contextlib.suppress(VaultUnavailable):
                    link.snapshot()
                    with contextlib.suppress(OSError):
                        os.write(ready, b"ready\n")
                        os.close(ready)
                    ready = None
            if link.silent and executor.running:
                complain("executor", "the vault is silent; everything is cut")
                await executor.cut(Cut(id=0, kind="all"))
            await asyncio.sleep(WATCH_SECONDS)

    def _serve_channel(self, channel: FdChannel, executor: Executor) -> None:
        task = asyncio.get_running_loop().create_task(self._take_from(channel, executor))
        self._accepting.append(task)
        task.add_done_callback(lambda done: self._accepting.remove(done) if done in self._accepting else None)

    async def _take_from(self, channel: FdChannel, executor: Executor) -> None:
        """One worker's channel: each message is a hand-off with its own socket."""
        try:
            while True:
                await self._slots.acquire()
                try:
                    passed = await channel.receive()
                except BaseException:
                    self._slots.release()
                    raise
                if passed is None:
                    self._slots.release()
                    return
                message, sock = passed
                if message != HANDOFF_MESSAGE:
                    sock.close()
                    self._slots.release()
                    continue
                task = asyncio.get_running_loop().create_task(self._hand_off(sock, executor))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except ChannelBroken:
            return
        finally:
            channel.close()

    async def _hand_off(self, sock: socket.socket, executor: Executor) -> None:
        try:
            try:
                stream = await open_socket_stream(sock)
            except OSError:
                sock.close()
                return
            await executor.serve(FrameStream(stream))
        finally:
            self._slots.release()

    async def _listen(self, path: str, executor: Executor) -> None:
        fresh = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with listener:
            listener.bind(fresh)
            os.chmod(fresh, 0o660)
            listener.listen(64)
            os.replace(fresh, path)  # the name appears when somebody listens
            listener.setblocking(False)
            loop = asyncio.get_running_loop()
            while True:
                accepted, _ = await loop.sock_accept(listener)
                if peer_of(accepted).uid in self._boot.listen_uids:
                    self._serve_channel(FdChannel(accepted), executor)
                else:
                    accepted.close()

    async def _say(self, journal: Journal, name: str) -> None:
        fields: dict[str, Value | list[str] | None] = {
            "program": "executor",
            "instance": self._boot.name,
            "pid": os.getpid(),
            "uid": os.getuid(),
        }
        try:
            await journal.append(Event(name, fields))
        except AuditUnavailable:
            complain("executor", f"{name} could not be recorded")


def _journal(boot: Boot) -> AuditorLink:
    if boot.auditor_fd is not None:
        return AuditorLink(socket.socket(fileno=boot.auditor_fd), boot.name, boot.digest_key)
    if boot.auditor_path is not None:
        return AuditorLink.open_path(boot.auditor_path, boot.name, boot.digest_key)
    raise BootError("an executor needs auditor_fd or auditor_path")


def _stream(fd: int | None, path: str | None) -> socket.socket:
    if fd is not None:
        sock = socket.socket(fileno=fd)
    elif path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.connect(path)
    else:
        raise BootError("an executor needs vault_fd or vault_path")
    sock.setblocking(False)
    return sock


def _table(link: VaultLink) -> AddressTable:
    try:
        return link.snapshot().addresses
    except VaultUnavailable:
        raise DialError("policy-changing", "no snapshot to dial by") from None


if __name__ == "__main__":
    raise SystemExit(main())
