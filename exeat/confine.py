"""The launcher: starts one program inside namespaces of its own, with a view of the file system that we built.

Run as `python -I -m exeat.confine FD`: FD is an inherited Unix socket on which the plan (one JSON line) arrives
and on which `{"ready": true}` with the listening sockets and, for a program that is held, descriptors of its network
namespace and of the user namespace that owns it, or `{"error": ...}`, goes back. Used for sandboxes
(`exeat run`) and for our own workers and executors; as root and as an ordinary user; needs no tool beside the
kernel (docs/decisions/0004). It imports nothing of ours but the filter, and nothing after the view changed.

The procedure, tagged below:

 (1) own user namespace where we are not root (as root: in step 4); then mount, PID, IPC, UTS and, for sandboxes,
     network namespaces
 (2) loopback up; listening sockets made inside and passed out: the only way out of the sandbox
 (3) in the first process of the new PID namespace: a root of our own on tmpfs, bind mounts, /proc, /dev; pivot
 (4) as root: a user namespace that maps the given unprivileged uid and gid alone; become them for good
 (5) every capability dropped, also from the bounding set; no_new_privs; no core files
 (6) the system-call filter (exeat/seccomp.py)
 (7) where the plan holds it: a byte awaited, which says that the boundary was proven; inherited descriptors closed; the
     program started; the first process reaps and passes the exit code on
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import warnings  # noqa: F401 - os.execvpe imports it lazily, when the disk it lies on is out of view
from typing import Any, NoReturn

from exeat.seccomp import program

_libc = ctypes.CDLL(None, use_errno=True)

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_ATTR = {"ro": 1 | 2 | 4, "rw": 2 | 4}
"""MOUNT_ATTR_RDONLY, NOSUID, NODEV for mount_setattr(2), kernel 5.12 and later."""
_SYS_MOUNT_SETATTR = 442
_SYS_OPENAT2, _RESOLVE_NO_SYMLINKS = 437, 4
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 38, 47
_CAP_NET_ADMIN = 12
_NETLINK_NETFILTER = 12
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIGNALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class ConfineError(RuntimeError):
    """A step could not be taken. str() names the step and the system's reason."""


def main() -> NoReturn:
    """Entry point: argv[1] is the socket's descriptor. Exits with the program's code; 125 when a step failed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # kept waiting until each process knows what to do with them
    channel = socket.socket(fileno=int(sys.argv[1]))
    plan = json.loads(_read_line(channel))
    try:
        child = _prepare(plan, channel)
    except (OSError, ConfineError) as error:
        _report_error(channel, str(error))
        os._exit(125)
    # Everything else is closed: the peers of the program's channels must see their end when it ends.
    _close_all_but(sorted({0, 1, 2, channel.fileno()}))
    sys.exit(_wait_as_parent(child, channel))


def _prepare(plan: dict[str, Any], channel: socket.socket) -> int:
    """Steps (1) and (2), then fork; returns the pid of the first process inside."""
    is_root = os.geteuid() == 0
    if not is_root:
        uid, gid = os.getuid(), os.getgid()
        _step("user namespace", os.unshare, os.CLONE_NEWUSER)  # (1)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    spaces = os.CLONE_NEWNS
    if plan["isolate"]:
        spaces |= os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    listeners: list[socket.socket] = []
    namespaces: list[int] = []
    if plan["network"]:
        # Before the PID namespace: the capture's commands are children, and the first child would be its process 1.
        _step("network namespace", os.unshare, os.CLONE_NEWNET)
        _loopback_up()  # (2)
        _prove_no_route()
        if plan["capture"]:
            _capture(plan["capture"])
        _unprivileged_ports()
        for kind, host, port in plan["listeners"]:
            if kind == "counters":
                listeners.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER))
                continue
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # IPPROTO_TCP is named so that asyncio sets TCP_NODELAY on what it accepts.
            how = (socket.SOCK_DGRAM, 0) if kind == "dns-udp" else (socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener = socket.socket(family, *how)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _step(f"listener {host}:{port}", listener.bind, (host, port))
            if kind != "dns-udp":
                listener.listen(1024)
            listeners.append(listener)
        if plan["hold_fd"] >= 0:
            namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "user")]
    _step("namespaces", os.unshare, spaces)
    own_users = is_root and plan["isolate"]
    asks, answers = (os.pipe(), os.pipe()) if own_users else (None, None)
    outside = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # the view changes for this process too
    pid = os.fork()
    if pid == 0:
        try:
            mapping = (asks[1], answers[0]) if asks and answers else None
            _first_process(plan, channel, listeners, namespaces, is_root, mapping)
        except BaseException as error:
            _report_error(channel, f"{error}" if isinstance(error, OSError | ConfineError) else type(error).__name__)
            os._exit(125)
    for listener in listeners:
        listener.close()
    if asks and answers:
        os.close(asks[1])
        if os.read(asks[0], 1):  # nothing, where the first process failed: it has said why
            for name in ("uid", "gid"):
                number = plan[name]
                target = os.open(f"{pid}/{name}_map", os.O_WRONLY, dir_fd=outside)
                _step(f"{name} map", os.write, target, f"{number} {number} 1".encode())
            os.write(answers[1], b"1")
    return pid


def _first_process(
    plan: dict[str, Any],
    channel: socket.socket,
    listeners: list[socket.socket],
    namespaces: list[int],
    is_root: bool,
    mapping: tuple[int, int] | None,
) -> NoReturn:
    """Steps (3) to (7). `mapping`: pipe ends to ask for and be told of the id maps of a new user namespace."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if plan["isolate"]:
        socket.sethostname(plan["hostname"])
    _build_view(plan)  # (3)
    if is_root:
        os.setgroups([])  # (4)
        if mapping is not None:
            # Whatever privilege the program might regain then counts in a namespace that owns nothing.
            _step("user namespace", os.unshare, os.CLONE_NEWUSER)
            os.write(mapping[0], b"1")
            os.close(mapping[0])
            if not os.read(mapping[1], 1):
                raise ConfineError("user namespace: its ids were not mapped")
        if plan["lock_memory"]:
            with contextlib.suppress(ValueError, OSError):  # a container may keep even root from it: status says so
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        # Bounding capabilities can be dropped only while CAP_SETPCAP is still held.
        _drop_bounding_set()
        os.setresgid(plan["gid"], plan["gid"], plan["gid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    else:
        _drop_bounding_set()
    drop_capabilities()  # (5)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of uid clears it (prctl(2))
    forbid_new_privileges()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _step(f"enter {plan['cwd']}", os.chdir, plan["cwd"])
    os.umask(plan["umask"])
    install_filter()  # (6)
    if os.getuid() == 0 or (is_root and effective_capabilities() != 0):
        raise ConfineError("privileges could not be dropped")
    passed = [*(listener.fileno() for listener in listeners), *namespaces]
    socket.send_fds(channel, [b'{"ready": true}\n'], passed)
    channel.close()
    for listener in listeners:
        listener.close()
    for descriptor in namespaces:
        os.close(descriptor)
    if plan["hold_fd"] >= 0 and os.read(plan["hold_fd"], 1) != b"1":
        os._exit(125)  # what was to be seen first was not, or whoever looks is gone
    keep = sorted({0, 1, 2, *plan["pass_fds"]})  # (7)
    _close_all_but(keep)
    if not plan["reap"]:
        _exec(plan)
    _prctl(_PR_SET_DUMPABLE, 0)  # before the fork, so that the program never finds this process open
    pid = os.fork()
    if pid == 0:
        _exec(plan)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the terminal sends these to the program itself as well
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    while True:
        try:
            done, status = os.wait()
        except InterruptedError:
            continue
        if done == pid:
            os._exit(_exit_code(status))


def _exec(plan: dict[str, Any]) -> NoReturn:
    argv, environment = plan["argv"], plan["env"]
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"exeat: cannot start {argv[0]!r}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


# --- (3) the view ---------------------------------------------------------------------------------------


def _build_view(plan: dict[str, Any]) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    base = "/tmp"  # only a mount point that exists everywhere; what lies beneath stays reachable
    _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    os.mkdir(f"{base}/old")
    os.mkdir(f"{base}/new")
    _mount(f"{base}/new", f"{base}/new", None, _MS_BIND)
    _pivot(base, f"{base}/old")
    os.chdir("/")
    for kind, source, target in plan["view"]:
        inside = "/new" + target
        match kind:
            case "tmpfs":
                os.makedirs(inside, 0o755, exist_ok=True)
                _mount("tmpfs", inside, "tmpfs", _MS_NOSUID | _MS_NODEV, source)
            case "ro" | "rw":
                _bind("/old" + source, inside, kind)
            case "link":
                os.makedirs(os.path.dirname(inside), 0o755, exist_ok=True)
                os.symlink(source, inside)
            case "file":
                os.makedirs(os.path.dirname(inside), 0o755, exist_ok=True)
                with open(inside, "wb") as stream:
                    stream.write(source.encode())
                os.chmod(inside, 0o644)
            case _:
                raise ConfineError(f"unknown view entry {kind!r}")
    _make_dev()
    os.makedirs("/new/proc", 0o755, exist_ok=True)
    _mount("proc", "/new/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for target in ("/new/dev", "/new"):  # what lies between the mounts holds no files of the workload's
        _protect(target, "ro", nested=False)
    _pivot("/new", "/new")
    os.chdir("/")
    _check(_libc.umount2(b".", _MNT_DETACH), "detach the old root")
    os.chdir("/")


def _bind(source: str, target: str, mode: str) -> None:
    """Show `source` at `target`. No component of `source` may be a link: whoever can write in a folder on the way
    could swap one after it was checked (exeat/boundary.py gives real paths)."""
    opened = _open_without_links(source)
    if stat.S_ISDIR(os.fstat(opened).st_mode):
        os.makedirs(target, 0o755, exist_ok=True)
    elif not os.path.exists(target):  # a folder bound before may hold it already
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        with open(target, "wb"):
            pass
    _mount(f"/old/proc/self/fd/{opened}", target, None, _MS_BIND | _MS_REC)
    os.close(opened)
    _protect(target, mode, nested=True)


def _open_without_links(path: str) -> int:
    """openat2(2) with RESOLVE_NO_SYMLINKS and O_PATH. Raises ConfineError."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
    opened = int(_libc.syscall(_SYS_OPENAT2, -100, path.encode(), how, len(how)))
    if opened < 0:
        number = ctypes.get_errno()
        shown = path.removeprefix("/old")
        if number == errno.ENOENT:
            raise ConfineError(f"{shown} does not exist")
        reason = "a part of it is a symbolic link" if number == errno.ELOOP else os.strerror(number)
        raise ConfineError(f"show {shown}: {reason}")
    return opened


def _protect(target: str, mode: str, *, nested: bool) -> None:
    """Set the mount's flags, and with `nested` (AT_RECURSIVE) those of all mounts below it."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR[mode], 0, 0, 0)
    flags = 0x8000 if nested else 0
    _check(
        _libc.syscall(_SYS_MOUNT_SETATTR, -100, target.encode(), flags, attributes, len(attributes)),
        f"protect {target.removeprefix('/new') or '/'}",
    )


def _make_dev() -> None:
    os.makedirs("/new/dev", 0o755, exist_ok=True)
    _mount("tmpfs", "/new/dev", "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=0755")
    for name in _DEVICES:
        if os.path.exists(f"/old/dev/{name}"):
            with open(f"/new/dev/{name}", "wb"):
                pass
            _mount(f"/old/dev/{name}", f"/new/dev/{name}", None, _MS_BIND)
    os.mkdir("/new/dev/pts")
    _mount("devpts", "/new/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.mkdir("/new/dev/shm")
    _mount("tmpfs", "/new/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    for link, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        os.symlink(target, f"/new/dev/{link}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if value is None else value.encode() for value in (source, target, kind, data)]
    _check(
        _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
        f"mount on {target.removeprefix('/new') or '/'}",
    )


def _pivot(new: str, old: str) -> None:
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, new.encode(), old.encode()), "change the root")


# --- (2), (4), (5), (6) ---------------------------------------------------------------------------------


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        _step("loopback", fcntl.ioctl, probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | 0x41))


def _prove_no_route() -> None:
    """The namespace has loopback and nothing else, and no way to a documentation address (RFC 5737, RFC 3849)."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise ConfineError("network namespace: it holds more than loopback")
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            raise ConfineError("network namespace: there is a route out of it")


def _capture(capture: dict[str, Any]) -> None:
    """Run the given commands in the new network namespace; they need CAP_NET_ADMIN there, and nothing else."""
    keep_for_children(_CAP_NET_ADMIN)
    for argv, text in capture["commands"]:
        done = subprocess.run(argv, input=text.encode(), capture_output=True, check=False, env={"PATH": "/usr/sbin"})
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise ConfineError(f"capture, {os.path.basename(argv[0])}: {said[0] if said else done.returncode}")
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    try:
        # What is accepted here carries the mark of the packets that asked: so the worker knows a probe (wire/probe.py).
        _write("/proc/sys/net/ipv4/tcp_fwmark_accept", "1")
    except ConfineError as error:
        raise ConfineError(f"capture, {error}") from None


def keep_for_children(capability: int) -> None:
    """Let programs that an ordinary user's process starts have `capability`: it ends at exec unless it is ambient
    (capabilities(7)). Nothing to do as root."""
    if os.geteuid() == 0:
        return
    header = struct.pack("=II", 0x20080522, 0)
    kept, everything = 1 << capability, 0xFFFFFFFF
    current = effective_capabilities()
    low, high = current & everything, current >> 32
    _check(_libc.capset(header, struct.pack("=IIIIII", low, low, kept, high, high, 0)), "inherit a capability")
    _check(_libc.prctl(_PR_CAP_AMBIENT, 2, capability, 0, 0), "keep a capability for the capture")


def _unprivileged_ports() -> None:
    """Port 53 inside is ours to bind; only this namespace is concerned (ip(7), ip_unprivileged_port_start)."""
    with contextlib.suppress(ConfineError):
        _write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")


def _drop_bounding_set() -> None:
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # EINVAL: past the last capability this kernel knows


def drop_capabilities() -> None:
    """Every one, for good once the bounding set is empty or no program is started."""
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = struct.pack("=II", 0x20080522, 0)
    _check(_libc.capset(header, struct.pack("=IIIIII", 0, 0, 0, 0, 0, 0)), "drop capabilities")


def effective_capabilities() -> int:
    """As a bit mask."""
    with open("/proc/self/status", "rb") as status:  # bytes: a codec would be looked up on a disk we no longer see
        return next(int(line.split()[1], 16) for line in status if line.startswith(b"CapEff:"))


def forbid_new_privileges() -> None:
    """no_new_privs, for good."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter() -> None:
    """The filter of exeat/seccomp.py, for good."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    descriptor = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(descriptor), 0, 0), "install the system-call filter")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


# --- small things ---------------------------------------------------------------------------------------


def _check(result: int, step: str) -> None:
    if result != 0:
        raise ConfineError(f"{step}: {os.strerror(ctypes.get_errno())}")


def _step(name: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except OSError as error:
        raise ConfineError(f"{name}: {error.strerror}") from None


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfineError(f"{path}: {error.strerror}") from None


def _read_line(channel: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = channel.recv(65536)
        if not piece:
            os._exit(125)
        data += piece
    return bytes(data)


def _report_error(channel: socket.socket, text: str) -> None:
    channel.sendall(json.dumps({"error": text}).encode() + b"\n")


def _close_all_but(keep: list[int]) -> None:
    start = 0
    for descriptor in keep:
        if descriptor > start:  # os.closerange(n, n) closes everything from n on (CPython 3.13)
            os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 1 << 20)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _wait_as_parent(child: int, lifeline: socket.socket) -> int:
    """Wait outside; a terminal's Ctrl-C reaches the program by itself, SIGTERM is passed on.

    Whoever started us holds the other end of `lifeline`. When that closes, however they died, everything inside is
    killed: no sandbox outlives the command that answers for it. (PR_SET_PDEATHSIG would watch only their thread.)
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handle = os.pidfd_open(child)

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself; its number may be somebody else's already
            signal.pidfd_send_signal(handle, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    watched = select.poll()
    watched.register(handle, select.POLLIN)
    watched.register(lifeline.fileno(), select.POLLIN)
    if any(descriptor == lifeline.fileno() for descriptor, _ in watched.poll()):
        os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still this child's
    _, status = os.waitpid(child, 0)
    return _exit_code(status)


if __name__ == "__main__":
    main()
