"""What the auditor is told at its start, and how it shuts itself in before it reads that."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
from dataclasses import dataclass, field
from typing import Final

from audit.budget import QUOTA_BYTES, REFUSALS_A_SECOND, RESERVE_BYTES
from audit.events import AuditError
from audit.segments import SEGMENT_BYTES

_PROCESS = re.compile(r"[a-z0-9-]{1,64}\Z")
KINDS: Final = frozenset({"worker", "executor", "vault", "supervisor", "console"})


class BootRefused(AuditError):
    """The boot message is not what Boot says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelBoot:
    """One inherited stream socket, the name under which its records appear, and the kind of process behind it."""

    fd: int
    process: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBoot:
    """Who may connect to the listening socket."""

    uid: int
    process: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenBoot:
    """A Unix socket for containers: its path and the uids behind it."""

    path: str
    peers: tuple[PeerBoot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Figures with units; the defaults are documented in docs/limits.md."""

    segment_bytes: int = SEGMENT_BYTES
    refusals_a_second: int = REFUSALS_A_SECOND
    quota_bytes: int = QUOTA_BYTES
    reserve_bytes: int = RESERVE_BYTES
    checkpoint_s: int = 60
    drain_s: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """The JSON that the auditor reads to EOF from the descriptor named in argv. Unknown keys are errors.

    `digest_key` is hex, at least 32 bytes, the same that every AuditorLink has. `signing_key` is a PEM path, made
    when missing; without it there are no checkpoints. `control_fd` is a SOCK_SEQPACKET socket on which the
    supervisor hands over channels of processes it started later: JSON {process, kind} with one descriptor; its
    end means that the supervisor is gone.
    """

    node: str
    log_directory: str
    digest_key: str
    channels: tuple[ChannelBoot, ...] = ()
    listen: ListenBoot | None = None
    control_fd: int | None = None
    signing_key: str | None = None
    version: str = ""
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def parse(cls, raw: bytes) -> Boot:
        """From JSON. Raises BootRefused."""
        try:
            value = json.loads(raw)
            value["channels"] = tuple(ChannelBoot(**item) for item in value.get("channels", ()))
            if (listen := value.get("listen")) is not None:
                value["listen"] = ListenBoot(**{**listen, "peers": tuple(PeerBoot(**item) for item in listen["peers"])})
            value["limits"] = Limits(**value.get("limits", {}))
            boot = cls(**value)
            if len(bytes.fromhex(boot.digest_key)) < 32 or not boot.node:
                raise ValueError
            peers = boot.listen.peers if boot.listen else ()
            named = [(item.process, item.kind) for item in boot.channels] + [
                (peer.process, peer.kind) for peer in peers
            ]
            numbers = [item.fd for item in boot.channels] + [peer.uid for peer in peers]
            if not all(known_channel(process, kind) for process, kind in named) or any(
                type(n) is not int for n in numbers
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise BootRefused("the boot message of the auditor is not valid") from None
        return boot


def known_channel(process: object, kind: object) -> bool:
    """A name that may stand in a record, and a kind that EVENTS knows."""
    return isinstance(process, str) and _PROCESS.match(process) is not None and kind in KINDS


def harden() -> None:
    """No core, no ptrace by our uid, no new privileges (RULINGS 1.2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_dumpable, pr_set_no_new_privs = 4, 38
    for option, value in ((pr_set_dumpable, 0), (pr_set_no_new_privs, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_boot(descriptor: int) -> bytes:
    """Everything up to EOF from an inherited descriptor, which is closed. Raises OSError."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
