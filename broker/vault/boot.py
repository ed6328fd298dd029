"""`Boot`: what the supervisor tells the vault through one inherited descriptor. Unknown fields are errors.

No key travels by argv or environment (RULINGS 1.3): this JSON comes through a pipe that only the two processes
hold, and names files and inherited descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from broker.errors import BrokerError
from net.upstream import UpstreamProxy


class BootRefused(BrokerError):
    """The vault does not start. `code`, a sentence and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One inherited stream socket to a worker or an executor. `name` is its process name in records."""

    name: str
    kind: Literal["worker", "executor"]
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """Paths are absolute. Durations in seconds."""

    state_dir: str
    """Mode 0700, ours: state.sqlite, store.json and ca/ live here."""
    policy_path: str
    """A file or a directory of *.yaml (with services/*.yaml below it)."""
    credentials_path: str | None = None
    key_file: str | None = None
    """The store's key: 32 bytes as hex or base64, mode 0600, outside state_dir."""
    key_text: str | None = field(default=None, repr=False)
    """The same, read by the supervisor where this process cannot (a service manager's credential)."""
    passphrase_file: str | None = None
    passphrase: str | None = field(default=None, repr=False)
    wrapped_file: str | None = None
    """The key as a key service wrapped it, mode 0600, and who unwraps it: JSON {"by", "folder"} (exeat/settings.py)."""
    wrapping: str | None = None
    danger_key_beside_store: bool = False
    logged_generation: int = 0
    logged_digest: str = ""
    """The store's newest generation that the log remembers, read by the supervisor; 0 where nobody could."""
    danger_shared_uid: bool = False
    channels: tuple[Channel, ...] = ()
    auditor_fd: int | None = None
    """An inherited stream socket to the auditor, or:"""
    auditor_path: str | None = None
    """the auditor's listening Unix socket (containers)."""
    digest_key: bytes = field(repr=False)
    """The per-installation key of keyed digests in records (32 bytes; hex in the JSON)."""
    admin_path: str | None = None
    """Where the admin socket is made (mode 0600), or:"""
    admin_fd: int | None = None
    """a listening Unix socket, inherited."""
    admin_uids: tuple[int, ...] = ()
    """Who may call the admin API; empty means our own uid."""
    admin_any_namespace: bool = False
    """True only for containers, where the socket's file system is the boundary (RULINGS 1.5 departs, on record)."""
    listen_path: str | None = None
    """For containers: a Unix socket where workers and executors connect (one shared secret-free directory each)."""
    listen_uids: Mapping[str, str] = field(default_factory=dict)
    """For `listen_path`: peer uid (decimal) -> `worker` or `executor`."""
    proxy_url: str = "http://127.0.0.1:3128"
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values of the operator's environment that `env:` references name (our own environment is empty)."""
    systemd: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Credentials that systemd passed to the gateway, for `systemd:` references (hex in the JSON)."""
    listener_ports: tuple[int, ...] = ()
    self_addresses: tuple[str, ...] = ()
    internal_ranges: tuple[str, ...] = ()
    upstream: UpstreamProxy | None = None
    """The operator's own proxy, through which sources and token endpoints are asked as well."""
    tenant: str = "default"
    default_ttl: int = 3600
    max_ttl: int = 7 * 24 * 3600
    acknowledge_within: float = 2.0
    proof_seconds: float = 600.0
    """How long a proof of a sandbox's boundary counts."""
    report_fd: int | None = None
    """A pipe to the supervisor, one JSON object per line: {"ready": true} once the admin API serves, or
    {"error", "detail", "remedy"} and the end; {"adapter": true}, before or after, when a rule needs HTTP/2;
    later {"lost": name} for a process that must be killed because it did
    not acknowledge a change (RULINGS 9.5)."""


def check_boot(boot: Boot) -> None:
    """Raise BootRefused unless the fields fit together (net.process.read_boot has checked names and types)."""
    for name in (
        "state_dir",
        "policy_path",
        "credentials_path",
        "key_file",
        "passphrase_file",
        "wrapped_file",
        "admin_path",
        "listen_path",
        "auditor_path",
    ):
        path = getattr(boot, name)
        if path is not None and not Path(path).is_absolute():
            raise BootRefused("boot-invalid", f"{name} must be absolute")
    if len(boot.digest_key) != 32:
        raise BootRefused("boot-invalid", "digest_key must be 32 bytes")
    if (boot.auditor_fd is None) == (boot.auditor_path is None):
        raise BootRefused("boot-invalid", "exactly one of auditor_fd and auditor_path is needed")
    if (boot.admin_fd is None) == (boot.admin_path is None):
        raise BootRefused("boot-invalid", "exactly one of admin_fd and admin_path is needed")
    if (boot.wrapped_file is None) != (boot.wrapping is None):
        raise BootRefused("boot-invalid", "wrapped_file and wrapping go together")
    keys = (boot.key_file, boot.key_text, boot.passphrase_file, boot.passphrase, boot.wrapped_file)
    if sum(value is not None for value in keys) != 1:
        raise BootRefused(
            "key-missing",
            "the store needs exactly one key: a key file or a passphrase",
            "run `exeat init`, or name one of key_file, key_text, passphrase_file, passphrase and wrapped_file",
        )
