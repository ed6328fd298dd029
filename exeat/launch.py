"""Starts exeat.confine with a plan and hands back the process and the listening sockets it made inside.

`Plan` is what a boundary consists of, as data: exeat/boundary.py makes one for a sandbox, exeat/principals.py
one for each of our own processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_READY_SECONDS = 20.0

ViewKind = Literal["ro", "rw", "tmpfs", "link", "file"]
ViewEntry = tuple[ViewKind, str, str]
"""(ro or rw, outside path, inside path), (tmpfs, mount options, path), (link, target, path), (file, text, path)."""


ListenerKind = Literal["proxy", "captured", "dns-tcp", "dns-udp", "counters"]
"""What a passed-out socket is for: the explicit proxy, redirected connections, the stub resolver, and reading the
counters of the rules inside (exeat/counters.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Commands that are run inside the network namespace before anything else: (argv, standard input)."""

    commands: tuple[tuple[tuple[str, ...], str], ...]


class BoundaryUnavailable(RuntimeError):
    """The kernel or the machine's settings do not let us confine. str() names the step and the remedy."""


class CaptureUnavailable(BoundaryUnavailable):
    """The boundary could stand, but the redirects inside it could not be made. str() names the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One confined program: its identity, namespaces, view, and what is started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    view: tuple[ViewEntry, ...]
    cwd: str
    uid: int
    gid: int
    hostname: str
    network: bool
    """A network namespace of its own, with loopback and nothing else."""
    isolate: bool = True
    """PID, IPC and UTS namespaces of its own. False for the vault, which must know its callers' processes."""
    listeners: tuple[tuple[ListenerKind, str, int], ...] = ()
    """(kind, address, port) of sockets made inside the namespace and passed out."""
    capture: Capture | None = None
    pass_fds: tuple[int, ...] = ()
    reap: bool = False
    hold: bool = False
    """Everything stands, but the program is not started before `Confined.release`."""
    umask: int = 0o077
    lock_memory: bool = False
    """It may keep its memory out of swap; root alone can give that."""


@dataclass(slots=True, kw_only=True)
class Confined:
    """A started program (`process` ends with its exit code) and the sockets that listen inside its namespace."""

    process: subprocess.Popen[bytes]
    listeners: tuple[socket.socket, ...]
    namespaces: tuple[int, int] | None = None
    """Of a held program: descriptors of its network namespace and of the user namespace that owns that. See `close`."""
    hold: int | None = None

    def release(self) -> None:
        """Let a held program start. Raises OSError where it is gone."""
        if self.hold is not None:
            descriptor, self.hold = self.hold, None
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, b"1")
            os.close(descriptor)

    def close(self) -> None:
        """Give the descriptors back; a program that is still held ends."""
        for descriptor in (self.hold, *(self.namespaces or ())):
            if descriptor is not None:
                os.close(descriptor)
        self.hold = self.namespaces = None


def launch(plan: Plan, *, foreground: bool = False, capture: bool = False) -> Confined:
    """Start `plan`. Returns when the boundary stands and the program is about to be started.

    `foreground` keeps standard input and the terminal; otherwise standard input is /dev/null. `capture` makes
    `process.stdout` a pipe with everything the program prints.
    The program and everything it started are killed when this process ends, however it ends, or when it drops
    `process`. Raises BoundaryUnavailable where a step fails; nothing is left running then.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, contextlib.ExitStack() as undo:
        waits, hold = os.pipe() if plan.hold else (-1, None)
        if hold is not None:
            undo.callback(os.close, hold)
        # Inherited, so that a Ctrl-C cannot hit the launcher before it knows what to do with it; it unblocks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "exeat.confine", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *plan.pass_fds, *((waits,) if plan.hold else ())),
            stdin=None if foreground else subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=not foreground,  # a Ctrl-C is for the command, not for our own processes
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        if plan.hold:
            os.close(waits)
        ours.settimeout(_READY_SECONDS)
        try:
            document = {**dataclasses.asdict(plan), "hold_fd": waits}
            ours.sendall(json.dumps(document).encode() + b"\n")
            answer, descriptors, _, _ = socket.recv_fds(ours, 65536, 32)
            while answer and not answer.endswith(b"\n"):
                answer += ours.recv(65536)
        except OSError as error:
            _stop(process)
            raise BoundaryUnavailable(f"the launcher did not answer: {error}") from None
        reply = json.loads(answer) if answer else {"error": "the launcher ended"}
        if reply != {"ready": True} or len(descriptors) != len(plan.listeners) + (2 if plan.hold else 0):
            for descriptor in descriptors:
                os.close(descriptor)
            _stop(process)
            step = str(reply.get("error", "the launcher ended"))
            if step.startswith("capture"):
                raise CaptureUnavailable(f"there is no transparent capture here ({step})")
            raise BoundaryUnavailable(_explain(step))
        weakref.finalize(process, os.close, ours.detach())  # the lifeline: see confine._wait_as_parent
        undo.pop_all()
        listeners = tuple(socket.socket(fileno=descriptor) for descriptor in descriptors[: len(plan.listeners)])
        namespaces = (descriptors[-2], descriptors[-1]) if plan.hold else None
        return Confined(process=process, listeners=listeners, namespaces=namespaces, hold=hold)


def boot_document(boot: Mapping[str, Any]) -> int:
    """A descriptor that reads as `boot` in JSON: how each of our processes is told what it is. The caller closes it."""
    descriptor = os.memfd_create("exeat-boot", os.MFD_CLOEXEC)
    os.write(descriptor, json.dumps(boot).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def system_view() -> list[ViewEntry]:
    """The operating system, read-only: programs and libraries, /etc, no /var, /srv, /home, /root, /run."""
    view: list[ViewEntry] = []
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu"):
        if os.path.islink(path):
            view.append(("link", os.readlink(path), path))
        elif os.path.isdir(path):
            view.append(("ro", path, path))
    return view


def covered(path: str, view: Sequence[ViewEntry]) -> bool:
    """Whether `path` is already visible through a bind mount of `view`; the last entry over it decides."""
    over = [kind for kind, _, inside in view if path == inside or path.startswith(inside.rstrip("/") + "/")]
    return bool(over) and over[-1] in ("ro", "rw")


def masks(paths: Sequence[str], view: Sequence[ViewEntry]) -> list[ViewEntry]:
    """Nothing, mounted over those of `paths` (folders or files) that `view` would show."""
    made: list[ViewEntry] = []
    for path in sorted({os.path.realpath(entry) for entry in paths}):
        if path == "/" or not covered(path, [*view, *made]):
            continue
        if os.path.isdir(path):
            made.append(("tmpfs", "mode=0000", path))
        elif os.path.exists(path):
            made.append(("ro", "/dev/null", path))
    return made


def interpreter_view(view: Sequence[ViewEntry]) -> list[ViewEntry]:
    """What our own interpreter needs beyond `view`: its prefix, its base installation, the rooms themselves."""
    import exeat

    extra: list[ViewEntry] = []
    rooms = os.path.dirname(os.path.dirname(os.path.abspath(exeat.__file__)))
    candidates = [os.path.realpath(sys.base_prefix), os.path.abspath(sys.prefix)]
    if not rooms.startswith(os.path.abspath(sys.prefix) + "/"):  # an editable installation
        candidates += [
            f"{rooms}/{room}"
            for room in ("rules", "wire", "net", "audit", "state", "broker", "proxy", "capture", "exeat")
        ]
    for path in candidates:
        if os.path.isdir(path) and not covered(path, [*view, *extra]):
            extra.append(("ro", os.path.realpath(path), path))
    return extra


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _explain(step: str) -> str:
    remedy = ""
    if step.startswith(("user namespace", "namespaces", "/proc/self/uid_map")):
        remedy = (
            "; this machine does not let ordinary users make namespaces: run exeat as root, or allow them "
            "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)"
        )
    elif step.startswith("mount on /proc"):
        remedy = "; /proc is masked here (a container does that): run exeat on the host, or unmask /proc"
    elif step.startswith("enter "):
        remedy = "; the sandbox has a user of its own: let others enter that folder (chmod o+rx), or start elsewhere"
    elif step.startswith("protect"):
        remedy = "; Linux 5.12 or later is needed"
    return f"the boundary could not be built at step '{step}'{remedy}"
