"""What each process is told at start: its boot document and descriptors. The one place that knows all of them.

Order: auditor, vault (answers on its report pipe), executors, workers (each says `ready` when a snapshot is in
force). All channels are socket pairs made here; after a start the supervisor keeps only the listener channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

from broker.admin.client import AdminClient, AdminError
from exeat.containers import publish_certificates
from exeat.environment import client_environment
from exeat.storekey import StoreKeyMissing, logged_store, store_key
from exeat.systemd_credentials import systemd_credentials
from exeat.upstream import UpstreamRefused, boot_of
from exeat.version import __version__

if TYPE_CHECKING:
    from exeat.supervisor import Supervisor, _Set

START_SECONDS = 30.0


class _Pairs:
    """Socket pairs whose child ends are closed here once the children have them."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def stream(self) -> tuple[int, int]:
        return self._pair(socket.SOCK_STREAM)

    def packets(self) -> tuple[int, int]:
        return self._pair(socket.SOCK_SEQPACKET)

    def _pair(self, kind: int) -> tuple[int, int]:
        pair = socket.socketpair(socket.AF_UNIX, kind)
        self._sockets += pair
        return pair[0].fileno(), pair[1].fileno()

    def keep(self, descriptor: int) -> socket.socket:
        """Take one end out: the caller owns it now."""
        found = next(entry for entry in self._sockets if entry.fileno() == descriptor)
        self._sockets.remove(found)
        return found

    def close(self) -> None:
        for entry in self._sockets:
            entry.close()


async def start_set(supervisor: Supervisor, started: _Set) -> None:
    """Start one generation of processes into `started`. Raises StartRefused naming what did not come up."""
    pairs = _Pairs()
    try:
        await _start(supervisor, started, pairs)
    finally:
        pairs.close()


async def _start(supervisor: Supervisor, started: _Set, pairs: _Pairs) -> None:
    settings = supervisor.settings
    workers, executors = range(settings.workers), range(settings.executors)
    digest_key = supervisor.digest_key()
    try:
        upstream = boot_of(settings.upstream)  # read anew at each start; it goes to those that dial and nowhere else
    except UpstreamRefused as error:
        supervisor.refuse({"error": "upstream", "detail": str(error), "remedy": error.remedy})
    try:
        key = store_key(settings, supervisor.environment)
    except StoreKeyMissing as error:
        supervisor.refuse({"error": "key-missing", "detail": str(error), "remedy": error.remedy})
    names = ["vault", *(f"executor-{n}" for n in executors), *(f"worker-{n}" for n in workers)]
    log = {name: pairs.stream() for name in names}
    control = {name: pairs.stream() for name in names if name != "vault"}
    handoff = {(w, e): pairs.packets() for w in workers for e in executors}

    # --- auditor
    channels = [{"fd": log[name][0], "process": name, "kind": name.partition("-")[0]} for name in names]
    supervisor.spawn(
        "auditor",
        0,
        "audit.auditor",
        {
            "node": supervisor.node(),
            "log_directory": str(settings.log),
            "digest_key": digest_key,
            "channels": channels,
            "signing_key": str(settings.auditor_state / "signing.key"),
            "version": __version__,
        },
        [log[name][0] for name in names],
    )

    # --- vault
    report_read, report_write = os.pipe()
    admin = supervisor.bind_admin()
    try:
        boot: dict[str, Any] = {
            "state_dir": str(settings.vault_state),
            "policy_path": str(settings.policy),
            "credentials_path": str(settings.credentials) if settings.credentials else None,
            **key,
            **logged_store(settings.log),
            **supervisor.flags,
            "channels": [
                {"name": name, "kind": name.partition("-")[0], "fd": pair[0]} for name, pair in control.items()
            ],
            "auditor_fd": log["vault"][1],
            "digest_key": digest_key,
            "admin_fd": admin.fileno(),
            "admin_uids": sorted({os.geteuid(), *settings.admins}),
            "proxy_url": _proxy_url(supervisor),
            "environment": dict(supervisor.environment),
            "systemd": systemd_credentials(supervisor.environment, settings.key_credential),
            "listener_ports": [entry.getsockname()[1] for entry in supervisor.sockets[:1]],
            "self_addresses": list(settings.self_addresses),
            "internal_ranges": list(settings.internal_ranges),
            "proof_seconds": settings.proof_seconds,
            "upstream": upstream,
            "report_fd": report_write,
        }
        inherited = [log["vault"][1], admin.fileno(), report_write, *(pair[0] for pair in control.values())]
        supervisor.spawn("vault", 0, "broker.vault", boot, inherited)
    finally:
        os.close(report_write)
        admin.close()
    report = await started.follow(report_read, START_SECONDS)
    if report != {"ready": True}:
        supervisor.refuse(report)
    root_pem = await _publish_certificates(supervisor)

    # --- executors and workers
    waiting: list[tuple[str, int]] = []
    for number in executors:
        name = f"executor-{number}"
        ready_read, ready_write = os.pipe()
        own = [handoff[w, number][1] for w in workers]
        boot = {
            "name": name,
            "vault_fd": control[name][1],
            "auditor_fd": log[name][1],
            "digest_key": digest_key,
            "channel_fds": own,
            "ready_fd": ready_write,
            "upstream": upstream,
        }
        supervisor.spawn(
            "executor", number, "broker.executor_process", boot, [control[name][1], log[name][1], ready_write, *own]
        )
        os.close(ready_write)
        waiting.append((name, ready_read))
    for number in workers:
        name = f"worker-{number}"
        ready_read, ready_write = os.pipe()
        listeners_ours, listeners_theirs = pairs.packets()
        own = [handoff[number, e][0] for e in executors]
        shared = list(supervisor.sockets[number : number + 1])
        boot = {
            "name": name,
            "workers": settings.workers,
            "ca_pem": root_pem,
            "digest_key": digest_key,
            "vault_fd": control[name][1],
            "auditor_fd": log[name][1],
            "executor_fds": own,
            "listeners": [{"fd": entry.fileno(), "kind": "shared", "name": "proxy"} for entry in shared],
            "listeners_fd": listeners_theirs,
            "environment": _help_environment(supervisor),
            "ready_fd": ready_write,
            "upstream": upstream,
            "check_seconds": float(settings.self_check_seconds),
        }
        inherited = [control[name][1], log[name][1], listeners_theirs, ready_write, *own]
        supervisor.spawn("worker", number, "proxy.worker", boot, [*inherited, *(entry.fileno() for entry in shared)])
        os.close(ready_write)
        started.listener_channels.append(pairs.keep(listeners_ours))
        waiting.append((name, ready_read))
    for name, descriptor in waiting:
        if not await _is_ready(descriptor):
            supervisor.refuse({"error": "not-ready", "detail": f"{name} did not start", "remedy": "see its message"})
    if started.adapter_wanted:
        # One that does not come up is no reason to keep everything closed: HTTP/2 alone is not served.
        await start_adapter(supervisor, started)


async def start_adapter(supervisor: Supervisor, started: _Set) -> None:
    """Start the HTTP/2 adapter and give each worker its channel to it, once its self-test passed.

    Where that does not happen in time it is killed; the supervisor sees that it ended.
    """
    pairs = _Pairs()
    ready_read, ready_write = os.pipe()
    try:
        channels = [pairs.packets() for _ in started.listener_channels]
        theirs = [pair[1] for pair in channels]
        boot = {"name": "adapter-0", "channel_fds": theirs, "ready_fd": ready_write}
        child = supervisor.spawn("adapter", 0, "proxy.mitm_process", boot, [ready_write, *theirs])
        os.close(ready_write)
        ready_write = -1
        if not await _is_ready(ready_read):
            child.process.kill()
            return
        for worker, (ours, _) in zip(started.listener_channels, channels, strict=True):
            with contextlib.suppress(OSError):  # a worker that is going down; all restart then
                socket.send_fds(worker, [b'{"kind": "adapter"}'], [ours])
    finally:
        if ready_write >= 0:
            os.close(ready_write)
        pairs.close()


async def _is_ready(descriptor: int) -> bool:
    """Whether `ready` came within START_SECONDS; the pipe is closed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        return (await asyncio.wait_for(reader.readline(), START_SECONDS)).startswith(b"ready")
    except TimeoutError:
        return False
    finally:
        transport.close()


async def _publish_certificates(supervisor: Supervisor) -> str:
    """Write ca.pem and bundle.pem for clients on this machine; return the root in PEM."""
    settings = supervisor.settings
    try:
        answer = await asyncio.to_thread(AdminClient(settings.admin_socket, timeout=10).ca)
    except AdminError as error:
        supervisor.refuse({"error": error.code, "detail": error.detail, "remedy": error.remedy})
    root_pem = str(answer["root_pem"])
    publish_certificates(root_pem, settings.client_files)
    return root_pem


def _proxy_url(supervisor: Supervisor) -> str:
    if not supervisor.sockets:
        return "http://127.0.0.1:3128"
    host, port = supervisor.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _help_environment(supervisor: Supervisor) -> dict[str, str]:
    return client_environment(proxy_url="{proxy}", ca_file="{ca}", bundle_file="{bundle}")
