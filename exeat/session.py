"""A sandbox under `exeat run`: created at the gateway, confined here, joined by its own listeners, ended together.

async with gateway(settings, ...) as link:                  the running one, or one started for this command
    async with sandbox(link, ...) as session:               created, listeners handed over, boundary proven, started
        code = await session.wait()

The boundary is proven before the command starts and again every few minutes (exeat/proving.py). A way out that is found
later ends the command and disarms the sandbox's credentials for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from broker.admin.client import AdminClient, AdminError
from exeat.boundary import INSIDE, NODE_PRELOAD, PROXY_PORT, Surroundings, find_capture_tools, plan_sandbox
from exeat.environment import client_environment
from exeat.google_account import VARIABLE, throw_away_account
from exeat.launch import BoundaryUnavailable, CaptureUnavailable, Confined, launch
from exeat.output import EXIT_BOUNDARY
from exeat.principals import uid_of_sandbox
from exeat.proving import Namespaces, prove
from exeat.settings import Settings
from exeat.supervisor import SandboxListener, StartRefused, Supervisor

FIRST_PROBES = 3
"""Before a command starts."""
WAKE_SECONDS = 5.0
AGAIN_SECONDS = 15.0
"""After a probe that saw too little."""


class Listeners(Protocol):
    """Where listening sockets of sandboxes go: our own supervisor, or another process's."""

    def hold(self, sandbox: str) -> None:
        """From now on the sandbox ends when this process does."""

    def add(self, listener: SandboxListener) -> None: ...

    def remove(self, sandbox: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway to work with. `embedded` is set when it was started for this command alone."""

    settings: Settings
    admin: AdminClient
    listeners: Listeners
    report: Callable[[str], None]
    embedded: Supervisor | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """One confined command and its sandbox."""

    id: str
    role: str
    confined: Confined
    cwd: str
    """The working directory inside; another than the caller's where that one is not shown."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    escaped: tuple[str, ...] = ()
    """Ways out that a later probe found; the command was ended then."""

    async def wait(self) -> int:
        """The command's exit code, as a shell gives it, once it has ended; EXIT_BOUNDARY where a probe got out."""
        code = await asyncio.to_thread(self.confined.process.wait)
        if self.escaped:
            return EXIT_BOUNDARY
        return code if code >= 0 else 128 - code


@contextlib.asynccontextmanager
async def gateway(
    settings: Settings,
    *,
    danger_shared_uid: bool = False,
    report: Callable[[str], None],
    only_embedded: bool = False,
    listen: tuple[str, int] | None = None,
) -> AsyncIterator[Gateway]:
    """The running gateway of `settings`, or one started now (a shared listener only where `listen` asks).

    Raises StartRefused.
    """
    admin = AdminClient(settings.admin_socket)
    running = False
    if not only_embedded:
        with contextlib.suppress(AdminError):
            await asyncio.to_thread(admin.status)
            running = True
    if running:
        yield Gateway(settings=settings, admin=admin, report=report, listeners=RemoteListeners(settings))
        return
    supervisor = Supervisor(
        replace(settings, listen=listen), danger_shared_uid=danger_shared_uid, environment=os.environ, report=report
    )
    await supervisor.start()
    watch = asyncio.create_task(supervisor.wait())
    try:
        yield Gateway(
            settings=settings, admin=admin, report=report, listeners=_OwnListeners(supervisor), embedded=supervisor
        )
    finally:
        supervisor.request_stop()
        await watch
        await supervisor.stop()


@contextlib.asynccontextmanager
async def sandbox(
    link: Gateway,
    *,
    argv: Sequence[str],
    surroundings: Surroundings,
    role: str,
    ttl: str | None = None,
    owner: str = "",
    agent: str = "",
    task: str = "",
    attributes: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    read_only: Sequence[str] = (),
    read_write: Sequence[str] = (),
    capture: bool = False,
) -> AsyncIterator[Session]:
    """Create a sandbox, confine `argv` in it, and end both afterwards.

    Unless its output is captured, Ctrl-C is the command's own affair from now on, and SIGTERM and SIGHUP are passed
    on to it. Raises AdminError, BoundaryRefused, BoundaryUnavailable; then nothing is left behind.
    """
    answer: dict[str, Any] = await asyncio.to_thread(
        link.admin.create_sandbox,
        role,
        ttl=ttl,
        owner=owner,
        agent=agent or os.path.basename(argv[0]),
        task=task,
        attributes=attributes,
        channel={"kind": "namespace"},
    )
    identifier = str(answer["id"])
    confined: Confined | None = None
    proving: asyncio.Task[None] | None = None
    signals = _Signals()
    try:
        link.listeners.hold(identifier)
        uid, gid = _uid_for(identifier)
        placeholders = {str(name): str(value) for name, value in answer.get("env", {}).items()}
        inside = client_environment(
            proxy_url=f"http://127.0.0.1:{PROXY_PORT}",
            ca_file=f"{INSIDE}/ca.pem",
            bundle_file=f"{INSIDE}/bundle.pem",
            node_preload=NODE_PRELOAD,
        )
        files: dict[str, str] = {}
        if token_uri := answer.get("google_token_uri"):
            files[f"{INSIDE}/google-account.json"] = await asyncio.to_thread(throw_away_account, str(token_uri))
            inside[VARIABLE] = f"{INSIDE}/google-account.json"
        plan_with = partial(
            plan_sandbox,
            argv=argv,
            surroundings=surroundings,
            variables=inside | placeholders | dict(variables or {}) | {"EXEAT_SANDBOX": identifier},
            ca_pem=(link.settings.client_files / "ca.pem").read_text("ascii"),
            bundle_pem=(link.settings.client_files / "bundle.pem").read_text("ascii"),
            uid=uid,
            gid=gid,
            read_only=read_only,
            read_write=read_write,
            files=files,
        )
        plan = plan_with(tools=find_capture_tools())
        if not capture:
            signals.take()
        try:
            confined = await asyncio.to_thread(launch, plan, foreground=not capture, capture=capture)
        except CaptureUnavailable as error:  # the boundary stands without it: clients need the proxy variables then
            link.report(f"exeat: {error}; only clients that read the proxy variables get out")
            plan = plan_with(tools=None)
            confined = await asyncio.to_thread(launch, plan, foreground=not capture, capture=capture)
        signals.pass_to(confined.process)
        # The command waits. The probe needs the listeners: a captured connection has to end at our worker.
        key = str(answer["channel_key"])
        for (use, _, _), listener in zip(plan.listeners, confined.listeners, strict=True):
            link.listeners.add(SandboxListener(sandbox=identifier, channel_key=key, use=use, socket=listener))
        tools = find_capture_tools() if plan.capture is not None else None
        assert confined.namespaces is not None
        net, user = confined.namespaces
        inside_it = Namespaces(net=net, user=user, tools=tools, channel_key=bytes.fromhex(key))
        await _prove_first(link, identifier, inside_it)
        confined.release()
        session = Session(id=identifier, role=role, confined=confined, cwd=plan.cwd, placeholders=placeholders)
        proving = asyncio.create_task(_keep_proving(link, session, inside_it))
        yield session
    finally:
        if proving is not None:
            proving.cancel()
            await asyncio.gather(proving, return_exceptions=True)
        if confined is not None and confined.process.poll() is None:
            confined.process.kill()
            await asyncio.to_thread(confined.process.wait)
        if confined is not None:
            confined.close()
            if confined.process.stdout is not None:
                confined.process.stdout.close()
        with contextlib.suppress(AdminError):  # the gateway may be gone already; its own end cuts everything
            await asyncio.to_thread(link.admin.end_sandbox, identifier)
        link.listeners.remove(identifier)
        signals.release()


async def _prove_first(link: Gateway, sandbox: str, namespaces: Namespaces) -> None:
    """Arm `sandbox`, whose command waits. Raises BoundaryUnavailable where a way leads out or the probe saw too little.

    A worker that is busy starting may leave a try without its answer, so there is a second probe.
    """
    for _ in range(FIRST_PROBES):
        found = await asyncio.to_thread(prove, namespaces)
        if found.passed:
            with contextlib.suppress(AdminError):  # it is ended, unarmed, in any case
                await asyncio.to_thread(link.admin.break_boundary, sandbox, found.passed)
            raise BoundaryUnavailable(
                f"a probe got out of the sandbox ({', '.join(found.passed)}); nothing was started"
            )
        if found.proven:
            await asyncio.to_thread(link.admin.prove_boundary, sandbox)
            return
    raise BoundaryUnavailable(
        f"the boundary could not be proven, nothing was seen of: {', '.join(found.unclear)}; is the machine very busy?"
    )


async def _keep_proving(link: Gateway, session: Session, namespaces: Namespaces) -> None:
    """Prove the boundary again and again while the command runs; end it where a way leads out.

    A probe that saw too little is repeated soon; the vault takes a proof back that is not repeated for long.
    """
    every = link.settings.self_check_seconds
    due = _boot() + every
    while True:
        await asyncio.sleep(min(WAKE_SECONDS, max(0.0, due - _boot())))
        if _boot() < due:
            continue  # by the boot clock, so that a machine that was asleep is looked at when it wakes
        found = await asyncio.to_thread(prove, namespaces)
        if found.passed:
            session.escaped = found.passed
            if session.confined.process.poll() is None:
                session.confined.process.kill()
            link.report(f"exeat: a probe got out of sandbox {session.id} ({', '.join(found.passed)}); it was ended")
            with contextlib.suppress(AdminError):  # it is ended by `sandbox` in any case
                await asyncio.to_thread(link.admin.break_boundary, session.id, found.passed)
            return
        if found.proven:
            with contextlib.suppress(AdminError):  # the gateway is starting anew; or it says no, and arms nothing
                await asyncio.to_thread(link.admin.prove_boundary, session.id)
        due = _boot() + (every if found.proven else min(every, AGAIN_SECONDS))


def _boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _uid_for(identifier: str) -> tuple[int, int]:
    """As root: a host uid of its own, from the random part of the id. Otherwise: the caller's."""
    if os.geteuid() != 0:
        return os.getuid(), os.getgid()
    uid = uid_of_sandbox(int.from_bytes(identifier.encode()[-8:], "big"))
    return uid, uid


class _Signals:
    """Taken before the command starts, so that none is missed; those that come too early are passed on at its start."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = False

    def take(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal sends it to the command as well
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._terminate)
        self._taken = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

    def pass_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self._waiting:
            process.terminate()

    def release(self) -> None:
        for number in self._taken:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _terminate(self) -> None:
        self._waiting = True
        if self._process is not None:
            self._process.terminate()


class _OwnListeners:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def hold(self, sandbox: str) -> None:
        """Nothing to do: a supervisor of our own dies with us, and the next one ends what it left."""

    def add(self, listener: SandboxListener) -> None:
        self._supervisor.add_listener(listener)

    def remove(self, sandbox: str) -> None:
        self._supervisor.remove_listeners(sandbox)


class RemoteListeners:
    """Speaks to another supervisor's control socket. Every method raises StartRefused, but `remove`."""

    def __init__(self, settings: Settings) -> None:
        self._path = str(settings.control_socket)
        self._held: dict[str, socket.socket] = {}

    def hold(self, sandbox: str) -> None:
        """Keep a connection for `sandbox`: when it closes, because we died, the supervisor ends the sandbox."""
        self._held[sandbox] = self._connect()
        self._ask(self._held[sandbox], {"op": "hold", "sandbox": sandbox}, [])

    def add(self, listener: SandboxListener) -> None:
        """Hand over a listener of a sandbox that we hold."""
        self._hand_over(self._held[listener.sandbox], listener)

    def leave(self, listener: SandboxListener) -> None:
        """Hand a listener over that stays until its sandbox is ended."""
        with self._connect() as control:
            self._hand_over(control, listener)

    def remove(self, sandbox: str) -> None:
        """Have the listeners of `sandbox` forgotten."""
        if (held := self._held.pop(sandbox, None)) is not None:
            held.close()
            return
        with contextlib.suppress(StartRefused), self._connect() as control:
            self._ask(control, {"op": "remove", "sandbox": sandbox}, [])

    def _hand_over(self, control: socket.socket, listener: SandboxListener) -> None:
        message = {
            "op": "add",
            "sandbox": listener.sandbox,
            "channel_key": listener.channel_key,
            "use": listener.use,
        }
        self._ask(control, message, [listener.socket.fileno()])
        listener.socket.close()

    def _connect(self) -> socket.socket:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(5)
        try:
            control.connect(self._path)
        except OSError as error:
            control.close()
            raise StartRefused(
                f"the running gateway does not take listeners: {error.strerror}", "'exeat status' says whether it runs"
            ) from None
        return control

    def _ask(self, control: socket.socket, message: Mapping[str, Any], descriptors: list[int]) -> None:
        try:
            socket.send_fds(control, [json.dumps(message).encode()], descriptors)
            answer = json.loads(control.recv(65536) or b"{}")
        except (OSError, ValueError) as error:
            raise StartRefused(f"the running gateway does not take listeners: {error}") from None
        if answer != {"ok": True}:
            raise StartRefused(f"the running gateway refused the listener: {answer.get('error', 'no answer')}")
