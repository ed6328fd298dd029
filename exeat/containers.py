"""One process of ours in a container of its own (`exeat serve KIND`), joined to the others by Unix sockets in volumes.

    SOCKETS/audit/audit.sock         auditor listens        vault, executor, worker connect
    SOCKETS/control/vault.sock       vault listens          executor, worker connect
    SOCKETS/handoff/executor.sock    executor listens       worker connects
    SOCKETS/admin/admin.sock         vault listens          the operator's container alone mounts this one
    SOCKETS/client/                  ca.pem, bundle.pem for sandboxes

Each socket lies in a folder of its own, so that a container mounts only what it may reach; the peer's uid decides
who it is. The key of keyed digests is a file (a container secret) that all four read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from broker.admin.client import AdminClient, AdminError
from exeat.environment import client_environment
from exeat.launch import boot_document
from exeat.principals import ContainerKind
from exeat.settings import Settings
from exeat.storekey import StoreKeyMissing, store_key
from exeat.upstream import UpstreamRefused, boot_of
from exeat.version import __version__
from net.trust import system_bundle_pem

WAIT_SECONDS = 60.0


class ServeRefused(RuntimeError):
    """The process is not started. str() is the cause."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Containers:
    """How the containers are laid out. `uids` names the user of each."""

    sockets: Path
    digest_key: Path
    uids: Mapping[ContainerKind, int]
    listen: str

    def socket(self, kind: str) -> Path:
        return (
            self.sockets
            / {
                "audit": "audit/audit.sock",
                "vault": "control/vault.sock",
                "executor": "handoff/executor.sock",
                "admin": "admin/admin.sock",
            }[kind]
        )

    @property
    def client_files(self) -> Path:
        return self.sockets / "client"


def serve(kind: ContainerKind, settings: Settings, layout: Containers) -> NoReturn:
    """Become the process `kind`. Raises ServeRefused when what it needs does not appear."""
    expected = layout.uids[kind]
    if os.geteuid() != expected:
        raise ServeRefused(f"the {kind} runs as uid {expected}, not {os.geteuid()}", "set the container's user")
    try:
        digest_key = layout.digest_key.read_text("ascii").strip()
    except OSError as error:
        raise ServeRefused(f"{layout.digest_key}: {error.strerror}", "mount the digest key (64 hex digits)") from None
    match kind:
        case "auditor":
            _fresh(layout.socket("audit"))
            _become("audit.auditor", _auditor(settings, layout, digest_key))
        case "vault":
            _await(layout.socket("audit"))
            _fresh(layout.socket("admin"))
            _vault(settings, layout, digest_key)
        case "executor":
            _await(layout.socket("vault"))
            _fresh(layout.socket("executor"))
            _become("broker.executor_process", _executor(settings, layout, digest_key))
        case "worker":
            _await(layout.socket("executor"))
            _await(layout.client_files / "ca.pem")
            _become("proxy.worker", _worker(settings, layout, digest_key))


def healthy(kind: ContainerKind, layout: Containers) -> bool:
    """Whether the process answers where it should; for a container's health check."""
    try:
        if kind == "worker":
            host, _, port = layout.listen.rpartition(":")
            address = "127.0.0.1" if host == "0.0.0.0" else host.strip("[]")  # noqa: S104 - compared, not bound
            socket.create_connection((address, int(port)), timeout=2).close()
            return True
        if kind == "vault":
            AdminClient(layout.socket("admin"), timeout=2).status()
            return True
        return _listening(layout.socket("audit" if kind == "auditor" else "executor"))
    except (OSError, AdminError, ValueError):
        return False


def _auditor(settings: Settings, layout: Containers, digest_key: str) -> dict[str, Any]:
    peers = [
        {"uid": layout.uids["vault"], "process": "vault", "kind": "vault"},
        {"uid": layout.uids["executor"], "process": "executor", "kind": "executor"},
        {"uid": layout.uids["worker"], "process": "worker", "kind": "worker"},
    ]
    return {
        "node": "containers",
        "log_directory": str(settings.log),
        "digest_key": digest_key,
        "listen": {"path": str(layout.socket("audit")), "peers": peers},
        "signing_key": str(settings.auditor_state / "signing.key"),
        "version": __version__,
    }


def _upstream(settings: Settings) -> dict[str, Any] | None:
    try:
        return boot_of(settings.upstream, private=False)
    except UpstreamRefused as error:
        raise ServeRefused(str(error), error.remedy) from None


def _executor(settings: Settings, layout: Containers, digest_key: str) -> dict[str, Any]:
    return {
        "name": "executor",
        "vault_path": str(layout.socket("vault")),
        "auditor_path": str(layout.socket("audit")),
        "digest_key": digest_key,
        "listen_path": str(layout.socket("executor")),
        "listen_uids": [layout.uids["worker"]],
        "upstream": _upstream(settings),
    }


def _worker(settings: Settings, layout: Containers, digest_key: str) -> dict[str, Any]:
    return {
        "name": "worker",
        "ca_pem": (layout.client_files / "ca.pem").read_text("ascii"),
        "digest_key": digest_key,
        "vault_path": str(layout.socket("vault")),
        "auditor_path": str(layout.socket("audit")),
        "executor_path": str(layout.socket("executor")),
        "listen": layout.listen,
        "upstream": _upstream(settings),
        "environment": client_environment(proxy_url="{proxy}", ca_file="{ca}", bundle_file="{bundle}"),
    }


def _vault(settings: Settings, layout: Containers, digest_key: str) -> NoReturn:
    """Start the vault as a child, publish the certificates once it serves, and stay with it to the end."""
    try:
        key = store_key(settings, os.environ)
    except StoreKeyMissing as error:
        raise ServeRefused(str(error), error.remedy) from None
    report_read, report_write = os.pipe()
    boot = {
        "state_dir": str(settings.vault_state),
        "policy_path": str(settings.policy),
        "credentials_path": str(settings.credentials) if settings.credentials else None,
        **key,
        "auditor_path": str(layout.socket("audit")),
        "digest_key": digest_key,
        "admin_path": str(layout.socket("admin")),
        "admin_uids": sorted({os.geteuid(), *settings.admins}),
        "admin_any_namespace": True,
        "listen_path": str(layout.socket("vault")),
        "listen_uids": {str(layout.uids["worker"]): "worker", str(layout.uids["executor"]): "executor"},
        "proxy_url": f"http://{layout.listen}",
        "listener_ports": [int(layout.listen.rpartition(":")[2])],
        "self_addresses": list(settings.self_addresses),
        "internal_ranges": list(settings.internal_ranges),
        "upstream": _upstream(settings),
        "report_fd": report_write,
    }
    descriptor = boot_document(boot)
    child = subprocess.Popen(
        [sys.executable, "-I", "-m", "broker.vault", str(descriptor)],
        pass_fds=(descriptor, report_write),
        cwd="/",
        env={},
    )
    os.close(report_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: child.terminate())
    with os.fdopen(report_read, "rb") as report:
        # The vault also reports other things (broker/vault/report.py) to its end; an error ends it with its code.
        for line in iter(report.readline, b""):
            if json.loads(line).get("ready"):
                publish_certificates(str(AdminClient(layout.socket("admin")).ca()["root_pem"]), layout.client_files)
    raise SystemExit(child.wait())


def publish_certificates(root_pem: str, folder: Path) -> None:
    """Write ca.pem (ours alone) and bundle.pem (the system's roots and ours) for sandboxes."""
    for name, text in (("ca.pem", root_pem), ("bundle.pem", system_bundle_pem() + root_pem)):
        temporary = folder / f".{name}"
        temporary.write_text(text, encoding="ascii")
        temporary.chmod(0o644)
        temporary.replace(folder / name)


def _become(module: str, boot: Mapping[str, Any]) -> NoReturn:
    descriptor = boot_document(boot)
    os.set_inheritable(descriptor, True)
    os.chdir("/")
    os.execve(sys.executable, [sys.executable, "-I", "-m", module, str(descriptor)], {})


def _await(path: Path) -> None:
    """Wait until another container has made `path`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise ServeRefused(f"{path} did not appear within {WAIT_SECONDS:.0f} s", "is the other container running?")
        time.sleep(0.1)


def _listening(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(2)
            try:
                probe.connect(str(path))
                return True
            except OSError:
                continue
    return False


def _fresh(path: Path) -> None:
    """Remove the socket of an earlier run; the folder is this container's to write."""
    if path.is_socket():
        if _listening(path):
            raise ServeRefused(f"another process listens at {path}", "stop it first")
        path.unlink()
