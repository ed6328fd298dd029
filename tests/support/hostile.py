"""A hostile workload: tries every way out of a sandbox that we could think of, and prints how each ended, as JSON.

    python hostile.py FACTS.json          {"attempt": "EPERM" | "ENOENT" | ... | "OPEN: what it got"}

`OPEN` is a hole. Standard library only and no import of ours: it is what runs inside. The facts name things of the
host that it should not reach. Addresses are documentation addresses (RFC 5737, RFC 3849) and loopback only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import pty
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]
NUMBERS = {
    "clone": (56, 220), "clone3": (435, 435), "pivot_root": (155, 41), "ptrace": (101, 117), "bpf": (321, 280),
    "keyctl": (250, 219), "add_key": (248, 217), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265), "process_vm_readv": (310, 270), "init_module": (175, 105),
    "kexec_load": (246, 104), "userfaultfd": (323, 282), "open_tree": (428, 428), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "syslog": (103, 116), "setns": (308, 268), "pidfd_getfd": (438, 438),
}  # fmt: skip
ATTEMPTS: dict[str, Callable[[dict[str, Any]], str | None]] = {}


def attempt(name: str) -> Callable[[Callable[[dict[str, Any]], str | None]], None]:
    """Register a way out. It returns what it got, or None for nothing; an OSError names how it was refused."""

    def register(function: Callable[[dict[str, Any]], str | None]) -> None:
        ATTEMPTS[name] = function

    return register


def call(name: str, *arguments: int) -> int:
    """The raw system call, past any library."""
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(NUMBERS[name][COLUMN]), *[ctypes.c_long(value) for value in arguments])
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def connect(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> str:
    with socket.socket(family, kind) as opened:
        opened.settimeout(3)
        opened.connect(address)
        if kind == socket.SOCK_DGRAM:
            opened.send(b"x")
        elif family != socket.AF_UNIX:
            # Where connections are captured the gateway takes them in: only an answer would be a way out.
            opened.sendall(b"GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n")
            if not opened.recv(1):
                raise ConnectionResetError(errno.ECONNRESET, "closed without a word")
        return f"connected to {address}"


# --- network ------------------------------------------------------------------------------------------------

for _family, _address in (
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET, "198.51.100.7"),
    (socket.AF_INET6, "2001:db8::1"),
):
    for _kind, _word in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):
        attempt(f"{_word} {_address}")(lambda _facts, f=_family, a=_address, k=_kind: connect(f, (a, 443), k))
attempt("broadcast")(lambda _facts: connect(socket.AF_INET, ("255.255.255.255", 67), socket.SOCK_DGRAM))
attempt("host loopback")(lambda facts: connect(socket.AF_INET, ("127.0.0.1", facts["tcp_port"])))
attempt("host abstract socket")(lambda facts: connect(socket.AF_UNIX, "\0" + facts["abstract"]))
attempt("host unix socket")(lambda facts: connect(socket.AF_UNIX, facts["unix"]))
attempt("admin socket")(lambda facts: connect(socket.AF_UNIX, facts["admin"]))
attempt("control socket")(lambda facts: connect(socket.AF_UNIX, facts["control"]))
for _name, _family, _kind in (
    ("raw ipv4 socket", socket.AF_INET, socket.SOCK_RAW),
    ("raw ipv6 socket", socket.AF_INET6, socket.SOCK_RAW),
    ("old packet socket", socket.AF_INET, 10),
    ("packet socket", 17, socket.SOCK_RAW),
    ("packet datagram socket", 17, socket.SOCK_DGRAM),
    ("vsock socket", 40, socket.SOCK_STREAM),
    ("crypto socket", 38, 5),
    ("bluetooth socket", 31, socket.SOCK_RAW),
    ("xdp socket", 44, socket.SOCK_RAW),
):
    attempt(_name)(lambda _facts, f=_family, k=_kind: f"socket {socket.socket(f, k, 1)}")


@attempt("interfaces")
def _interfaces(_facts: dict[str, Any]) -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    # gate0 and gate1 are the two ends of one pair inside (capture/inside.py): they lead to each other.
    return None if "lo" in names and set(names) <= {"lo", "gate0", "gate1"} else str(names)


@attempt("add an address")
def _add_address(_facts: dict[str, Any]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton("192.0.2.9"))
        fcntl.ioctl(probe, 0x8916, request)  # SIOCSIFADDR
    return "an address"


# --- kernel -------------------------------------------------------------------------------------------------

for _name, _flag in (
    ("mount", 0x20000), ("uts", 0x4000000), ("ipc", 0x8000000), ("user", 0x10000000), ("pid", 0x20000000),
    ("net", 0x40000000), ("cgroup", 0x2000000),
):  # fmt: skip
    attempt(f"unshare {_name}")(lambda _facts, flag=_flag: unshare(flag))

    @attempt(f"clone {_name}")
    def _clone(_facts: dict[str, Any], flag: int = _flag) -> str:
        pid = call("clone", flag | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return "a namespace"


def unshare(flag: int) -> str:
    ctypes.set_errno(0)
    if LIBC.unshare(flag) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    return "a namespace"


@attempt("setns")
def _setns(_facts: dict[str, Any]) -> str:
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY)
    return f"setns {call('setns', descriptor, 0)}"


def _mount(source: bytes, target: bytes, kind: bytes, flags: int = 0) -> str:
    ctypes.set_errno(0)
    if LIBC.mount(source, target, kind, flags, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    return "a mount"


attempt("mount tmpfs")(lambda _facts: _mount(b"x", b"/tmp", b"tmpfs"))
attempt("mount proc")(lambda _facts: _mount(b"x", b"/tmp", b"proc"))
attempt("remount writable")(lambda _facts: _mount(b"x", b"/usr", b"", 32 | 4096))


@attempt("umount")
def _umount(_facts: dict[str, Any]) -> str:
    ctypes.set_errno(0)
    if LIBC.umount2(b"/proc", 2) != 0:
        raise OSError(ctypes.get_errno(), "umount2")
    return "unmounted"


@attempt("chroot")
def _chroot(_facts: dict[str, Any]) -> str:
    os.chroot("/tmp")
    return "chroot"


attempt("clone3")(lambda _facts: f"{call('clone3', 0, 0)}")
attempt("pivot_root")(lambda _facts: f"{call('pivot_root', 0, 0)}")
attempt("ptrace me")(lambda _facts: f"{call('ptrace', 0, 0, 0, 0)}")
attempt("ptrace the first process")(lambda _facts: f"{call('ptrace', 16, 1, 0, 0)}")
attempt("bpf")(lambda _facts: f"{call('bpf', 0, 0, 0)}")
attempt("keyctl")(lambda _facts: f"{call('keyctl', 0, -3, 0)}")
attempt("add_key")(lambda _facts: f"{call('add_key', 0, 0, 0, 0, -3)}")
attempt("perf_event_open")(lambda _facts: f"{call('perf_event_open', 0, 0, -1, -1, 0)}")
attempt("io_uring")(lambda _facts: f"{call('io_uring_setup', 1, 0)}")
attempt("open_by_handle_at")(lambda _facts: f"{call('open_by_handle_at', 0, 0, 0)}")
attempt("process_vm_readv")(lambda _facts: f"{call('process_vm_readv', 1, 0, 0, 0, 0, 0)}")
attempt("init_module")(lambda _facts: f"{call('init_module', 0, 0, 0)}")
attempt("kexec")(lambda _facts: f"{call('kexec_load', 0, 0, 0, 0)}")
attempt("userfaultfd")(lambda _facts: f"{call('userfaultfd', 0)}")
attempt("open_tree")(lambda _facts: f"{call('open_tree', -100, 0, 1)}")
attempt("fsopen")(lambda _facts: f"{call('fsopen', 0, 0)}")
attempt("mount_setattr")(lambda _facts: f"{call('mount_setattr', -100, 0, 0, 0, 0)}")
attempt("pidfd_getfd")(lambda _facts: f"{call('pidfd_getfd', 0, 0, 0)}")
attempt("kernel log")(lambda _facts: f"{call('syslog', 3, 0, 0)}")


@attempt("type into a terminal")
def _tiocsti(_facts: dict[str, Any]) -> str:
    _, terminal = pty.openpty()
    fcntl.ioctl(terminal, 0x5412, b"x")
    return "typed"


for _path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/net/ipv4/ip_forward"):

    @attempt(f"write {_path}")
    def _write(_facts: dict[str, Any], path: str = _path) -> str:
        with open(path, "w") as stream:
            stream.write("0")
        return "written"


@attempt("make a device")
def _mknod(_facts: dict[str, Any]) -> str:
    os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0))
    return "a device"


@attempt("set the host name")
def _hostname(_facts: dict[str, Any]) -> str:
    socket.sethostname("evil")
    return "renamed"


# --- identity -----------------------------------------------------------------------------------------------


@attempt("capabilities")
def _capabilities(_facts: dict[str, Any]) -> str | None:
    with open("/proc/self/status") as status:
        rows = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    wanted = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)
    wanted |= {"NoNewPrivs": "1", "Seccomp": "2"}
    found = {name: rows[name].strip() for name in wanted}
    return None if found == wanted and os.getuid() != 0 and os.getgid() != 0 else str(found)


@attempt("become root")
def _setuid(_facts: dict[str, Any]) -> str:
    os.setuid(0)
    return "root"


@attempt("take a group")
def _setgroups(_facts: dict[str, Any]) -> str:
    os.setgroups([0])
    return "a group"


@attempt("setuid program")
def _suid(facts: dict[str, Any]) -> str | None:
    """`facts["suid"]` is a copy of id(1), owned by root with mode 4755, in the working directory."""
    shown = subprocess.run([facts["suid"], "-u"], capture_output=True, text=True, check=True).stdout.strip()
    return None if shown == str(os.getuid()) else f"uid {shown}"


@attempt("core files")
def _core(_facts: dict[str, Any]) -> str | None:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    return None if limits == (0, 0) else str(limits)


# --- other processes ----------------------------------------------------------------------------------------


@attempt("see host processes")
def _processes(facts: dict[str, Any]) -> str | None:
    numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return None if len(numbers) <= 4 and facts["pid"] not in numbers else str(numbers)


@attempt("signal a host process")
def _kill(facts: dict[str, Any]) -> str:
    os.kill(facts["pid"], 0)
    return "it is there"


for _name in ("mem", "environ", "root", "cwd", "fd", "maps"):

    @attempt(f"look into the first process: {_name}")
    def _first(_facts: dict[str, Any], name: str = _name) -> str:
        path = f"/proc/1/{name}"
        if name in ("root", "cwd", "fd"):
            return str(os.listdir(path))
        with open(path, "rb") as stream:
            return str(stream.read(1))


@attempt("namespaces of the host")
def _namespaces(facts: dict[str, Any]) -> str | None:
    same = [name for name, link in facts["namespaces"].items() if os.readlink(f"/proc/self/ns/{name}") == link]
    return f"shares {same}" if same else None


@attempt("inherited descriptors")
def _descriptors(facts: dict[str, Any]) -> str | None:
    return str(facts["descriptors"]) if facts["descriptors"] else None


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


# --- files --------------------------------------------------------------------------------------------------


@attempt("environment")
def _environment(facts: dict[str, Any]) -> str | None:
    found = [name for name, value in os.environ.items() if facts["canary"] in value]
    return str(found) if found else None


@attempt("old root")
def _old_root(_facts: dict[str, Any]) -> str | None:
    found = [name for name in ("/old", "/new", "/tmp/old", "/.old") if os.path.exists(name)]
    return str(found) if found else None


@attempt("sysfs and host folders")
def _folders(_facts: dict[str, Any]) -> str | None:
    shown = {
        path: os.listdir(path) for path in ("/sys", "/run/user", "/var/run", "/var/lib", "/srv") if os.path.isdir(path)
    }
    shown = {path: names for path, names in shown.items() if names and path != "/var/run"}
    return str(shown) if shown else None


for _path in ("/usr/bin/x", "/etc/passwd", "/usr/lib/x", "/dev/x"):

    @attempt(f"write to {_path}")
    def _write_system(_facts: dict[str, Any], path: str = _path) -> str:
        with open(path, "ab"):
            return "opened for writing"


@attempt("devices")
def _devices(_facts: dict[str, Any]) -> str | None:
    usual = set("null zero full random urandom tty pts ptmx shm fd stdin stdout stderr".split())
    extra = sorted(set(os.listdir("/dev")) - usual)
    return str(extra) if extra else None


def main() -> None:
    descriptors = [number for number in range(3, 4096) if _is_open(number)]
    with open(sys.argv[1], encoding="utf-8") as stream:
        facts = json.load(stream) | {"descriptors": descriptors}
    results = {name: outcome(function, facts) for name, function in ATTEMPTS.items()}
    for path in facts["files"]:
        results[f"read {path}"] = outcome(lambda _facts, path=path: f"{os.stat(path)}", facts)
    json.dump(results, sys.stdout)


def outcome(function: Callable[[dict[str, Any]], str | None], facts: dict[str, Any]) -> str:
    try:
        got = function(facts)
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return "nothing" if got is None else f"OPEN: {got}"


if __name__ == "__main__":
    main()
