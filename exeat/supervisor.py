"""Starts our processes, joins them by inherited descriptors, and takes them down again. Decides nothing.

    auditor  <- events -  vault, executors, workers, supervisor      (stream socket pairs)
    vault    <- control - executors, workers                         (stream socket pairs)
    executor <- hand-off - workers                                   (sequenced packets carrying socket pairs)
    worker   <- listeners - supervisor                               (sequenced packets carrying listeners)
    adapter  <- client connections, requests -> worker               (sequenced packets carrying socket pairs)

One state folder, one supervisor: an exclusive lock and a plain bind come first, because a second start with
SO_REUSEPORT would silently share the port (RULINGS 9.4). When one process dies, all are ended and started again
together on fresh channels: no half-alive set ever serves (docs/decisions/0006). While they are down nothing
passes, since workers are the only way out. The HTTP/2 adapter is apart: it is started when a rule needs it, and when it
ends it alone is started again; a client that makes it fall takes nobody else along (docs/decisions/0007).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

from broker.admin.client import AdminClient, AdminError
from broker.admin.peers import peer_of, refuse
from exeat.drops import SETTLE_SECONDS, Drops
from exeat.launch import (
    BoundaryUnavailable,
    ListenerKind,
    Plan,
    ViewEntry,
    boot_document,
    interpreter_view,
    launch,
    masks,
    system_view,
)
from exeat.principals import Kind, uid_of
from exeat.settings import Settings
from exeat.views import wide_view

STOP_SECONDS = 10.0
MAX_RESTARTS = 5
RESTART_WINDOW_SECONDS = 60.0
MAX_PEERS = 4096
"""`exeat run` commands that may have a sandbox here at one time."""


class StartRefused(RuntimeError):
    """The gateway does not start. str() is the cause; `remedy` what to do about it."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.remedy = remedy


@dataclass(slots=True, kw_only=True)
class Child:
    """One running process of ours. `kind` and `number` name it in records: `worker-0`."""

    kind: Kind
    number: int
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxListener:
    """A listening socket that one sandbox alone can reach, with the key that proves it to the vault."""

    sandbox: str
    channel_key: str
    socket: socket.socket
    use: ListenerKind = "proxy"


@dataclass(slots=True, kw_only=True)
class _Set:
    """One generation of children and our ends of their channels."""

    children: list[Child] = field(default_factory=list)
    listener_channels: list[socket.socket] = field(default_factory=list)
    adapter_wanted: bool = False
    """The vault said that a rule needs HTTP/2."""
    adapter_starting: asyncio.Task[None] | None = None
    _following: asyncio.Task[None] | None = None

    async def follow(self, descriptor: int, seconds: float) -> Mapping[str, Any]:
        """Read the vault's report pipe: return whether it is ready, then do what it reports."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
        try:
            async with asyncio.timeout(seconds):
                while self._noted(first := json.loads(await reader.readline())):
                    pass
        except (ValueError, TimeoutError):
            first = {"error": "not-ready", "detail": "the vault did not start", "remedy": "see its message above"}
        self._following = loop.create_task(self._keep_following(reader))
        return first if isinstance(first, dict) else {}

    async def _keep_following(self, reader: asyncio.StreamReader) -> None:
        """A process that did not acknowledge a tightening in time is killed (RULINGS 9.5); all restart then."""
        while line := await reader.readline():
            with contextlib.suppress(ValueError, AttributeError):
                said = json.loads(line)
                if self._noted(said):
                    continue
                for child in self.children:
                    if child.name == said.get("lost") and child.process.poll() is None:
                        child.process.kill()

    def _noted(self, said: Any) -> bool:
        if said != {"adapter": True}:
            return False
        self.adapter_wanted = True
        return True

    def stop_following(self) -> None:
        for task in (self._following, self.adapter_starting):
            if task is not None:
                task.cancel()


class Supervisor:
    """`start()`, then `wait()` until stopped or beyond repair, then `stop()`. Not thread-safe; one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        danger_shared_uid: bool = False,
        danger_key_beside_store: bool = False,
        environment: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._settings = settings
        self._danger_shared_uid = danger_shared_uid
        self._danger_key = danger_key_beside_store
        self._environment = dict(environment or {})
        self._report = report
        self._root = os.geteuid() == 0
        self._lock: int | None = None
        self._sockets: list[socket.socket] = []
        self._control: socket.socket | None = None
        self._peers: dict[socket.socket, set[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sandboxes: list[SandboxListener] = []
        self._set: _Set | None = None
        self._stopping = False
        self._restarts: list[float] = []
        self._adapter_starts: list[float] = []
        self._drops = Drops(AdminClient(settings.admin_socket, timeout=SETTLE_SECONDS).count_drops)
        self._counting: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the lock, bind, start every process, wait until the vault answers. Raises StartRefused."""
        try:
            self._prepare_folders()
            self._take_lock()
            self._bind()
            self._open_control()
            await self._start_set()
            await asyncio.to_thread(self._end_abandoned)
            self._counting = asyncio.get_running_loop().create_task(self._drops.run())
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Serve until `request_stop`; returns 0, or 1 when processes died too often to go on."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            dead = next((child for child in self._children() if child.process.poll() is not None), None)
            if dead is None:
                self._tend_adapter(loop.time())
                await asyncio.sleep(0.1)
                continue
            if dead.kind == "adapter":
                assert self._set is not None
                self._set.children.remove(dead)
                self._report(f"{dead.name} ended (exit {dead.process.returncode}); no HTTP/2 until it is back")
                continue
            now = loop.time()
            self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_SECONDS] + [now]
            self._report(f"{dead.name} ended unexpectedly (exit {dead.process.returncode}); restarting all processes")
            await self._stop_set()
            if len(self._restarts) > MAX_RESTARTS:
                self._report(f"{len(self._restarts)} restarts within a minute: giving up, everything stays closed")
                return 1
            try:
                await self._start_set()
            except StartRefused as error:
                self._report(f"cannot restart: {error}")
                return 1
        return 0

    def _tend_adapter(self, now: float) -> None:
        """Start the HTTP/2 adapter where it is wanted and not there; after MAX_RESTARTS in a minute, a pause."""
        current = self._set
        if current is None or not current.adapter_wanted:
            return
        starting = current.adapter_starting
        if (starting is not None and not starting.done()) or any(one.kind == "adapter" for one in current.children):
            return
        self._adapter_starts = [at for at in self._adapter_starts if now - at < RESTART_WINDOW_SECONDS]
        if len(self._adapter_starts) < MAX_RESTARTS:
            from exeat.processes import start_adapter

            self._adapter_starts.append(now)
            current.adapter_starting = asyncio.get_running_loop().create_task(start_adapter(self, current))

    def request_stop(self) -> None:
        self._stopping = True

    async def stop(self) -> None:
        """End every process in order (workers drain first, the auditor last) and free lock and sockets."""
        self._stopping = True
        for peer in self._peers:
            asyncio.get_running_loop().remove_reader(peer.fileno())
            peer.close()
        self._peers.clear()
        if self._counting is not None:
            self._counting.cancel()
        await self._drops.settle()
        await self._stop_set()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for entry in self._sockets:
            entry.close()
        self._sockets.clear()
        for listener in self._sandboxes:
            listener.socket.close()
        self._sandboxes.clear()
        if self._control is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
            with contextlib.suppress(OSError):
                self._settings.control_socket.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- sandboxes' own listeners ------------------------------------------------------------------------

    def add_listener(self, listener: SandboxListener) -> None:
        """Hand a sandbox's socket to its worker, now and after a restart."""
        if listener.use == "counters":
            self._drops.watch_namespace(listener.sandbox, listener.socket)
            return
        if listener.use == "captured" and (interface := _device_of(listener.socket)):
            self._drops.watch_interface(listener.sandbox, interface)
        self._sandboxes.append(listener)
        if self._set is not None:
            self._send(self._set, listener)

    def _send(self, current: _Set, listener: SandboxListener) -> None:
        """All sockets of a sandbox go to one worker: the names that its stub gave out are in that worker's memory."""
        channels = current.listener_channels
        if channels:
            _send_listener(channels[zlib.crc32(listener.sandbox.encode()) % len(channels)], listener)

    def remove_listeners(self, sandbox: str) -> None:
        """Forget the sockets of `sandbox`; the workers close theirs when the vault says that it ended."""
        self._drops.end(sandbox)
        for listener in [entry for entry in self._sandboxes if entry.sandbox == sandbox]:
            listener.socket.close()
            self._sandboxes.remove(listener)

    def _open_control(self) -> None:
        """The socket on which another command of ours hands listeners over: sequenced packets, our own uid only."""
        path = self._settings.control_socket
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # ours: we hold the lock of this state folder
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.bind(str(path))
        path.chmod(0o600)
        control.listen(64)
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control.fileno(), self._accept_control)
        self._control = control

    def _accept_control(self) -> None:
        assert self._control is not None
        try:
            peer, _ = self._control.accept()
        except OSError:
            return
        peer.setblocking(False)
        uids = frozenset({0, os.geteuid(), *self._settings.admins})
        # The rule of the admin socket: a sandbox that reached this path would live in other namespaces.
        refused = refuse(peer_of(peer), uids, own_uid=os.geteuid())
        if refused is not None or len(self._peers) >= MAX_PEERS:
            _answer(peer, {"error": refused or "too many commands are connected"})
            peer.close()
            return
        self._peers[peer] = set()
        asyncio.get_running_loop().add_reader(peer.fileno(), self._hear, peer)

    def _hear(self, peer: socket.socket) -> None:
        """One message of a command. When it ends, however that comes, the sandboxes that it holds end too."""
        try:
            message, descriptors, _, _ = socket.recv_fds(peer, 65536, 4)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._forget(peer)
            return
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        try:
            request = json.loads(message)
            sandbox = str(request["sandbox"])
            if request["op"] == "remove" and not sockets:
                self.remove_listeners(sandbox)
            elif request["op"] == "hold" and not sockets:
                self._peers[peer].add(sandbox)
            elif request["op"] == "add" and sockets:
                key, use = str(request["channel_key"]), request.get("use", "proxy")
                if use not in get_args(ListenerKind):
                    raise ValueError
                for entry in sockets:
                    self.add_listener(SandboxListener(sandbox=sandbox, channel_key=key, socket=entry, use=use))
            else:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            for entry in sockets:
                entry.close()
            _answer(peer, {"error": "bad request"})
            return
        _answer(peer, {"ok": True})

    def _forget(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.fileno())
        peer.close()
        for sandbox in self._peers.pop(peer, set()):
            self.remove_listeners(sandbox)
            task = loop.create_task(asyncio.to_thread(self._end_sandbox, sandbox))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _end_sandbox(self, sandbox: str) -> None:
        with contextlib.suppress(AdminError):  # ended already, as it is when the command ended by itself
            AdminClient(self._settings.admin_socket).end_sandbox(sandbox)

    def _end_abandoned(self) -> None:
        """End what an earlier supervisor left: its listeners died with it, so nobody can reach those sandboxes."""
        admin = AdminClient(self._settings.admin_socket)
        try:
            found = [row for row in admin.sandboxes() if row["channel"]["kind"] in ("namespace", "port", "unix")]
        except AdminError as error:
            raise StartRefused(error.detail or error.code, error.remedy) from None
        for row in found:
            self._end_sandbox(str(row["id"]))

    # --- folders, lock, sockets --------------------------------------------------------------------------

    def _prepare_folders(self) -> None:
        settings = self._settings
        wanted: list[tuple[Path, int, Kind | None]] = [
            (settings.state, 0o711, None),
            (settings.vault_state, 0o700, "vault"),
            (settings.auditor_state, 0o700, "auditor"),
            (settings.log, 0o700, "auditor"),
            (settings.run, 0o711, None),
            (settings.client_files, 0o755, None),
        ]
        for path, mode, owner in wanted:
            try:
                path.mkdir(mode=mode, parents=True, exist_ok=True)
                found = path.stat()
            except OSError as error:
                raise StartRefused(f"{path}: {error.strerror}", "choose another folder in exeat.yaml") from None
            expected = {os.geteuid()}
            if self._root and owner is not None:
                os.chown(path, uid_of(owner), uid_of(owner))
                expected = {0, uid_of(owner)}
            if found.st_uid not in expected:
                raise StartRefused(f"{path} belongs to uid {found.st_uid}", "remove it, or choose another folder")
            if stat.S_IMODE(found.st_mode) & 0o022 or (mode == 0o700 and stat.S_IMODE(found.st_mode) & 0o077):
                raise StartRefused(f"{path} has loose permissions", f"chmod {mode:o} {path}")

    def _take_lock(self) -> None:
        path = self._settings.run / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise StartRefused(
                f"a gateway is already running with {self._settings.run}",
                "'exeat status' shows it; stop it first, or use another --config",
            ) from None
        self._lock = descriptor

    def _bind(self) -> None:
        if self._settings.listen is None:
            return
        host, port = self._settings.listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))  # without SO_REUSEPORT: finds whoever is there already
                port = probe.getsockname()[1]
            for _ in range(self._settings.workers):
                # IPPROTO_TCP by name: asyncio sets TCP_NODELAY only then (44 ms a request without).
                listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind((host, port))
                listener.listen(1024)
                self._sockets.append(listener)
        except OSError as error:
            raise StartRefused(
                f"cannot listen on {host}:{port}: {error.strerror}",
                "stop what uses that address, or change listen: in exeat.yaml",
            ) from None

    # --- processes ---------------------------------------------------------------------------------------

    def _children(self) -> Sequence[Child]:
        return self._set.children if self._set else ()

    async def _start_set(self) -> None:
        from exeat.processes import start_set  # late: it names every process's boot fields

        self._set = _Set()
        try:
            await start_set(self, self._set)
        except BaseException:
            await self._stop_set()
            raise
        for listener in self._sandboxes:
            self._send(self._set, listener)

    async def _stop_set(self) -> None:
        current, self._set = self._set, None
        if current is None:
            return
        current.stop_following()
        order: tuple[Kind, ...] = ("worker", "adapter", "executor", "vault", "auditor")
        for kind in order:
            group = [child for child in current.children if child.kind == kind]
            for child in group:
                if child.process.poll() is None:
                    child.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            for child in group:
                try:
                    await asyncio.to_thread(child.process.wait, max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._report(f"{child.name} did not stop in time; killed")
                    child.process.kill()
                    child.process.wait()
        for channel in current.listener_channels:
            channel.close()

    def spawn(self, kind: Kind, number: int, module: str, boot: Mapping[str, Any], fds: Sequence[int]) -> Child:
        """Start `module` with `boot` on an inherited descriptor. Raises StartRefused when it cannot be confined."""
        descriptor = boot_document(boot)
        try:
            argv = (sys.executable, "-I", "-m", module, str(descriptor))
            keep = (descriptor, *fds)
            confined = kind in ("worker", "executor", "adapter") and not self._danger_shared_uid
            if self._root or confined:
                process = self._spawn_confined(kind, argv, keep)
            else:
                process = subprocess.Popen(
                    argv, pass_fds=keep, cwd="/", env={}, stdin=subprocess.DEVNULL, start_new_session=True
                )
        finally:
            os.close(descriptor)
        assert self._set is not None
        child = Child(kind=kind, number=number, process=process)
        self._set.children.append(child)
        return child

    def _spawn_confined(self, kind: Kind, argv: tuple[str, ...], keep: tuple[int, ...]) -> subprocess.Popen[bytes]:
        if kind in ("vault", "auditor"):
            view = wide_view(self._settings, kind)
        else:
            view = system_view()
            view += [("tmpfs", "mode=1777", "/tmp"), ("tmpfs", "mode=0755", "/run"), *_resolver_view()]
            view += masks([str(path) for path in self._settings.private], view)
            view += interpreter_view(view)
        uid = uid_of(kind) if self._root else os.getuid()
        gid = uid_of(kind) if self._root else os.getgid()
        plan = Plan(
            argv=argv,
            env={},
            view=tuple(view),
            cwd="/",
            uid=uid,
            gid=gid,
            hostname=f"exeat-{kind}",
            network=kind == "adapter",  # all it needs are the sockets it is given
            isolate=kind in ("worker", "executor", "adapter"),
            pass_fds=keep,
            lock_memory=self._root and kind in ("vault", "executor"),
        )
        try:
            return launch(plan).process
        except BoundaryUnavailable as error:
            raise StartRefused(
                str(error), "or start with --danger-shared-uid, which gives up the separation of processes"
            ) from None

    # --- what processes.py asks for ----------------------------------------------------------------------

    def bind_admin(self) -> socket.socket:
        """A fresh listening socket for the admin API; only our own user can reach its path."""
        path = self._settings.admin_socket
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o660 if self._settings.admins else 0o600)
        listener.listen(128)
        return listener

    def digest_key(self) -> str:
        """The installation's key of keyed digests (hex); made at the first start."""
        return self._once("digest.key", new_key)

    def node(self) -> str:
        """This installation's name in the log; a changed host name must not make it another log."""
        return self._once("node", lambda: f"{os.uname().nodename}-{secrets.token_hex(4)}")

    def _once(self, name: str, make: Callable[[], str]) -> str:
        path = self._settings.state / name
        if not path.exists():
            temporary = path.with_suffix(".new")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                stream.write(make() + "\n")
            temporary.replace(path)
        return path.read_text("ascii").strip()

    def refuse(self, report: Mapping[str, Any]) -> NoReturn:
        """Raise StartRefused for what a process reported."""
        problems = [str(line) for line in report.get("problems", ())]
        cause = str(report.get("detail") or report.get("error") or "a process did not start")
        raise StartRefused("\n       ".join([cause, *problems]), str(report.get("remedy", "")))

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return self._sockets

    @property
    def port(self) -> int | None:
        """The port that sandboxes reach, where one is open."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else None

    @property
    def flags(self) -> dict[str, bool]:
        return {"danger_shared_uid": self._danger_shared_uid, "danger_key_beside_store": self._danger_key}

    @property
    def environment(self) -> Mapping[str, str]:
        return self._environment


def new_key() -> str:
    """A fresh 256-bit key as hex."""
    return secrets.token_hex(32)


def _send_listener(channel: socket.socket, listener: SandboxListener) -> None:
    message = {
        "kind": "sandbox",
        "sandbox": listener.sandbox,
        "channel_key": listener.channel_key,
        "use": listener.use,
    }
    with contextlib.suppress(OSError):  # a worker that is going down; the next set gets it again
        socket.send_fds(channel, [json.dumps(message).encode()], [listener.socket.fileno()])


def _device_of(sock: socket.socket) -> str:
    """The interface that a socket is bound to (socket(7): SO_BINDTODEVICE), or an empty string."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).partition(b"\0")[0].decode("ascii", "replace")


def _answer(peer: socket.socket, answer: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # whoever does not wait for it
        peer.send(json.dumps(answer).encode())


def _resolver_view() -> list[ViewEntry]:
    """/etc/resolv.conf often points into /run."""
    target = os.path.realpath("/etc/resolv.conf")
    if target.startswith("/run/") and os.path.exists(target):
        folder = os.path.dirname(target)
        return [("ro", folder, folder)]
    return []
