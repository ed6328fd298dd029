"""What an operator's machine gives the gateway, and what is wrong with it: `exeat doctor` outside a sandbox.

Looks and changes nothing: no socket stays open, no file is written. Each finding says what does not work without it
and what to do. `holds` is well, `fails` keeps the gateway or a part of it from working, `unknown` could not be seen.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cryptography import x509

from audit.budget import RESERVE_BYTES
from broker.admin.client import AdminClient, AdminError
from exeat.doctor import FAILS, HOLDS, UNKNOWN, Finding
from exeat.settings import Settings

KERNEL: Final = (5, 12)
"""mount_setattr(2): the boundary's read-only views."""
LOW_BYTES: Final = 256 << 20
SOON_DAYS: Final = 30
_TOOLS: Final = (("ip", "iproute2"), ("nft", "nftables"))
_WITHOUT_TOOLS: Final = "under `exeat run` only programs that read proxy variables get out, and `exeat capture` is off"
_FOLDERS: Final = "/usr/sbin:/sbin:/usr/bin:/bin"


def examine_host(settings: Settings) -> Iterator[Finding]:
    """Everything that can be seen from outside a sandbox, in the order in which it is needed."""
    yield kernel(platform.release())
    yield user_namespaces()
    for name, package in _TOOLS:
        yield tool(name, package)
    yield from files(settings)
    yield from disk(settings.log)
    try:
        status = AdminClient(settings.admin_socket, timeout=5).status()
    except AdminError as error:
        running = Finding("the gateway", FAILS, f"{error.detail or error.code}; {error.remedy}".rstrip("; "))
        yield running
        yield listener(settings)
    else:
        yield from gateway(status)
        yield listens(settings)
    yield certificate(settings.client_files / "ca.pem", time.time())


def kernel(release: str) -> Finding:
    """Whether this kernel has what the boundary needs."""
    numbers = release.split("-")[0].split(".")
    try:
        known = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        return Finding("kernel", UNKNOWN, f"{release}: no version that we can read")
    if known < KERNEL:
        return Finding("kernel", FAILS, f"{release}: `exeat run` needs Linux {KERNEL[0]}.{KERNEL[1]} or later")
    return Finding("kernel", HOLDS, release)


def user_namespaces() -> Finding:
    """Whether this user can make the namespaces of `exeat run`, tried in a child that ends at once."""
    what = "namespaces"
    pid = os.fork()
    if pid == 0:
        try:
            os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
        except OSError:
            os._exit(1)
        os._exit(0)
    _, ended = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(ended) == 0:
        return Finding(what, HOLDS, "this user can make them")
    return Finding(
        what,
        FAILS,
        "this user cannot make them: no `exeat run`, no separation of processes; start as root, or allow them "
        "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)",
    )


def tool(name: str, package: str) -> Finding:
    """Whether a program of the system is there, and what is off without it."""
    found = shutil.which(name, path=_FOLDERS)
    if found:
        return Finding(f"program {name}", HOLDS, found)
    return Finding(f"program {name}", FAILS, f"not installed: {_WITHOUT_TOOLS}; install the package {package}")


def files(settings: Settings) -> Iterator[Finding]:
    """Settings, policy, credentials and key: there, readable, and not open to others."""
    yield Finding("settings", HOLDS, str(settings.file))
    for what, path, private in (
        ("policy", settings.policy, False),
        ("credentials", settings.credentials, False),
        ("key", settings.key_file or settings.passphrase_file or settings.wrapped_file, True),
    ):
        if path is None:
            continue
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except PermissionError:
            yield Finding(what, UNKNOWN, f"{path} is another user's to see")
            continue
        except OSError as error:
            yield Finding(what, FAILS, f"{path}: {error.strerror}; 'exeat init' writes the files")
            continue
        if mode & (0o077 if private else 0o022):
            yield Finding(what, FAILS, f"{path} is open to others: chmod {'600' if private else 'go-w'} {path}")
        else:
            yield Finding(what, HOLDS, str(path))


def disk(log: Path) -> Iterator[Finding]:
    """Whether records can be written: without them everything is refused."""
    folder = next((path for path in (log, *log.parents) if path.exists()), log)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding("log", UNKNOWN, f"{folder}: {error.strerror}")
        return
    if free < RESERVE_BYTES:
        why = f"only {free >> 20} MiB are free: everything is refused until {RESERVE_BYTES >> 20} MiB are"
        yield Finding("log", FAILS, f"{folder}: {why}")
    elif free < LOW_BYTES:
        yield Finding("log", FAILS, f"{folder}: only {free >> 20} MiB are free; without a log everything is refused")
    elif not os.access(folder, os.W_OK):
        # Started by root, the log is the auditor's own; only who starts the gateway can tell.
        yield Finding("log", UNKNOWN, f"{folder} is another user's to write; {free >> 20} MiB are free")
    else:
        yield Finding("log", HOLDS, f"{folder}: {free >> 20} MiB are free")


def listener(settings: Settings) -> Finding:
    """With no gateway running: whether its address is free."""
    if settings.listen is None:
        return Finding("listen", HOLDS, "none: sandboxes of `exeat run` only")
    host, port = settings.listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = f"{host}:{port}: {error.strerror}; stop what uses it, or change listen: in exeat.yaml"
            return Finding("listen", FAILS, why)
    return Finding("listen", HOLDS, f"{host}:{port} is free")


def listens(settings: Settings) -> Finding:
    """With a gateway running: whether its address takes connections."""
    if settings.listen is None:
        return Finding("listen", HOLDS, "none: sandboxes of `exeat run` only")
    host, port = settings.listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(3.0)
        try:
            probe.connect(("127.0.0.1" if host == "0.0.0.0" else host, port))  # noqa: S104 - compared, not bound
        except OSError as error:
            return Finding("listen", FAILS, f"{host}:{port} takes no connection: {error.strerror or 'no answer'}")
    return Finding("listen", HOLDS, f"{host}:{port} takes connections")


def gateway(status: Mapping[str, Any]) -> Iterator[Finding]:
    """What a running gateway says of itself."""
    policy = status["policy"]
    yield Finding("the gateway", HOLDS, f"{len(status['processes'])} processes, {status['sandboxes']} sandboxes")
    if policy["rejected"]:
        why = f"the files do not load, and an older policy stays: {policy['rejected']['detail']}"
        yield Finding("policy in force", FAILS, f"{why}; 'exeat policy check' shows all")
    else:
        yield Finding("policy in force", HOLDS, str(policy["digest"])[:16])
    checks = [member["self_check"] for member in status["processes"] if "self_check" in member]
    if not checks:
        yield Finding("self-check", UNKNOWN, "no worker has told of one yet")
    elif all(check["passed"] for check in checks):
        yield Finding("self-check", HOLDS, f"passed {max(0, int(time.time() - min(c['at'] for c in checks)))} s ago")
    else:
        yield Finding("self-check", FAILS, "something passed that must not: see selfcheck.failed in the log")
    if status["clock_behind"]:
        why = "behind the latest time on record: credentials are refused until it has caught up, or `exeat clock reset`"
        yield Finding("clock", FAILS, why)
    else:
        yield Finding("clock", HOLDS, "not behind what is on record")
    yield swap(memory_locked=bool(status["memory_locked"]))
    if status["shared_uid"]:
        yield Finding("separation", FAILS, "none: all processes run as one user (--danger-shared-uid)")
    else:
        yield Finding("separation", HOLDS, "each process is a principal of its own")


def swap(*, memory_locked: bool, table: Path = Path("/proc/swaps")) -> Finding:
    """Whether secrets in memory can reach a disk: there is no swap, or the vault is kept out of it."""
    try:
        areas = [line.split()[0] for line in table.read_text().splitlines()[1:] if line]
    except OSError:
        return Finding("swap", UNKNOWN, f"{table} cannot be read")
    if not areas:
        return Finding("swap", HOLDS, "none on this machine")
    if memory_locked:
        return Finding("swap", HOLDS, "vault and executors are kept out of it")
    why = "what vault and executors hold may be swapped out: start as root or with LimitMEMLOCK=infinity, or encrypt it"
    return Finding("swap", FAILS, f"{', '.join(areas)}: {why}")


def certificate(file: Path, now: float) -> Finding:
    """The root certificate that clients are given: there, readable by them, and not about to end."""
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
    except FileNotFoundError:
        return Finding("CA", UNKNOWN, f"{file} is written at the first start")
    except (OSError, ValueError):
        return Finding("CA", FAILS, f"{file} cannot be read; a start of the gateway writes it anew")
    days = (found.not_valid_after_utc - datetime.datetime.fromtimestamp(now, datetime.UTC)).days
    if found.not_valid_before_utc.timestamp() > now:
        return Finding("CA", FAILS, "not valid yet by this machine's clock: set the clock")
    if days < SOON_DAYS:
        return Finding("CA", FAILS, f"ends in {max(0, days)} days; clients refuse it then")
    return Finding("CA", HOLDS, f"valid for {days} days")
