"""The system-call filter, run instruction by instruction in a small interpreter of classic BPF: no kernel is asked."""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass

import pytest

from exeat.seccomp import UnsupportedMachine, program
from tests.support.rows import every_row

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(ARCH)


# Numbers from the kernel's own tables (syscall_64.tbl, asm-generic/unistd.h), written down apart from the product's.
def table(text: str) -> dict[str, dict[str, int]]:
    """`name x86_64 aarch64; ...` by machine; - where the machine has no such call."""
    rows = [row.split() for row in text.replace("\n", " ").split(";")]
    return {
        machine: {row[0]: int(row[column]) for row in rows if row[column] != "-"}
        for column, machine in enumerate(MACHINES, start=1)
    }


DENIED = table("""\
setns 308 268; unshare 272 97; mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51; fsopen 430 430;
fsconfig 431 431; fsmount 432 432; fspick 433 433; open_tree 428 428; move_mount 429 429; mount_setattr 442 442;
open_tree_attr 467 467; ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271;
pidfd_getfd 438 438; kcmp 312 272; bpf 321 280; perf_event_open 298 241; userfaultfd 323 282; keyctl 250 219;
add_key 248 217; request_key 249 218; init_module 175 105; finit_module 313 273; delete_module 176 106;
kexec_load 246 104; kexec_file_load 320 294; open_by_handle_at 304 265; reboot 169 142; swapon 167 224;
swapoff 168 225; acct 163 89; quotactl 179 60; settimeofday 164 170; clock_settime 227 112;
clock_adjtime 305 266; adjtimex 159 171; syslog 103 116; iopl 172 -; ioperm 173 -; io_uring_setup 425 425;
io_uring_enter 426 426; io_uring_register 427 427; vmsplice 278 75""")
CALLS = table("""\
clone 56 220; clone3 435 435; socket 41 198; ioctl 16 29; read 0 63; write 1 64; execve 59 221; openat 257 56;
fork 57 -""")
THREAD = 0x3D0F00
"""What a C library passes to clone for a thread: VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, the tid words."""
SIGCHLD = 17
NAMESPACES = {
    "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
    "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """struct seccomp_data: the call's number, architecture and arguments (64 bits each)."""

    number: int
    arch: int
    arguments: tuple[int, ...] = ()

    def data(self) -> bytes:
        six = (*self.arguments, *[0] * 6)[:6]
        return struct.pack("=iIQ6Q", self.number, self.arch, 0, *six)


def verdict(code: bytes, call: Call) -> int:
    """Run `code` as the kernel does and return what it answers; anything it would not load is an error here."""
    data = call.data()
    instructions = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    assert 0 < len(instructions) <= 4096
    at = accumulator = 0
    while True:
        operation, jump_true, jump_false, k = instructions[at]
        at += 1
        match operation:
            case 0x20:  # LD W ABS
                assert k % 4 == 0
                assert k < len(data)
                accumulator = struct.unpack_from("=I", data, k)[0]
            case 0x15:
                at += jump_true if accumulator == k else jump_false
            case 0x35:
                at += jump_true if accumulator >= k else jump_false
            case 0x45:
                at += jump_true if accumulator & k else jump_false
            case 0x54:
                accumulator &= k
            case 0x06:
                return k
            case _:
                raise AssertionError(f"unexpected instruction {operation:#x}")


def answer(machine: str, name_or_number: str | int, *arguments: int) -> str:
    number = CALLS[machine][name_or_number] if isinstance(name_or_number, str) else name_or_number
    result = verdict(program(machine), Call(number, ARCH[machine], arguments))
    if result == ALLOW:
        return "allow"
    if result == KILL:
        return "kill"
    assert result & 0xFFFF0000 == 0x00050000
    return errno.errorcode[result & 0xFFFF]


@every_row(("machine", "name"), [(machine, name) for machine in MACHINES for name in DENIED[machine]], ids=str)
def test_calls_that_reach_out_of_a_sandbox_are_refused(machine: str, name: str) -> None:
    """Namespaces, mounts, tracing, kernel interfaces and keyrings answer EPERM, whatever their arguments."""
    for arguments in ((), (1, 2, 3, 4, 5, 6), ((1 << 64) - 1,) * 6):
        assert answer(machine, DENIED[machine][name], *arguments) == "EPERM"


@every_row("machine", MACHINES)
@every_row("space", NAMESPACES)
def test_clone_makes_no_namespace(machine: str, space: str) -> None:
    """A new namespace by way of clone is refused as one by unshare is; the upper half of the flags changes nothing."""
    flags = NAMESPACES[space] | SIGCHLD
    assert answer(machine, "clone", flags) == "EPERM"
    assert answer(machine, "clone", flags | 1 << 40) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_clone3_is_not_there(machine: str) -> None:
    """Its flags lie in memory that a filter cannot read; ENOSYS sends the C library back to clone."""
    assert answer(machine, "clone3", 0, 88) == "ENOSYS"


@every_row("machine", MACHINES)
@every_row("family", [0, 3, 4, 9, 17, 21, 29, 31, 38, 40, 43, 44, 45, 1 << 20])
def test_other_socket_families_do_not_exist(machine: str, family: int) -> None:
    """Packet, vsock, Bluetooth, AF_ALG, XDP and every other family answer as on a kernel without them."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        assert answer(machine, "socket", family, kind, 0) == "EAFNOSUPPORT"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("kind", [3, 10], ids=["raw", "packet"])
def test_raw_sockets_are_refused(machine: str, family: int, kind: int) -> None:
    """Raw Internet sockets, and the old packet type, answer EPERM; flags in the type do not hide them."""
    for flags in (0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 1 << 33):
        assert answer(machine, "socket", family, kind | flags, 1) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("request_", [0x5412, 0x541C], ids=["TIOCSTI", "TIOCLINUX"])
def test_nobody_types_into_the_terminal(machine: str, request_: int) -> None:
    """The requests that put characters into the operator's terminal are refused; 64-bit disguises as well."""
    assert answer(machine, "ioctl", 0, request_) == "EPERM"
    assert answer(machine, "ioctl", 0, request_ | 1 << 32) == "EPERM"


def test_the_x32_table_is_closed() -> None:
    """x32 renumbers every call under the same architecture value, so all of it is killed."""
    for number in (0x40000000, 0x40000000 | DENIED["x86_64"]["mount"], 0x40000000 | CALLS["x86_64"]["read"]):
        assert answer("x86_64", number) == "kill"
    assert verdict(program("x86_64"), Call(-1, ARCH["x86_64"])) == KILL


@every_row("machine", MACHINES)
@every_row("arch", [0, 0x40000003, 0x40000028, 0xC000003E, 0xC00000B7, 0xFFFFFFFF])
def test_a_foreign_architecture_is_killed(machine: str, arch: int) -> None:
    """32-bit entries and other machines' tables number calls differently: none of them runs."""
    if arch == ARCH[machine]:
        return
    for number in (CALLS[machine]["read"], DENIED[machine]["mount"], 0):
        assert verdict(program(machine), Call(number, arch)) == KILL


@pytest.mark.parametrize("machine", ["riscv64", "i686", "armv7l"])
def test_an_unknown_processor_is_not_confined_loosely(machine: str) -> None:
    """Without a table for the machine there is no filter, and so no sandbox."""
    with pytest.raises(UnsupportedMachine, match=machine):
        program(machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_programs_need_passes(machine: str) -> None:
    """Files, threads, processes, ordinary sockets and terminals work as everywhere."""
    for name in ("read", "write", "execve", "openat"):
        assert answer(machine, name, 3, 4096, 10) == "allow"
    assert answer(machine, "clone", SIGCHLD) == "allow"
    assert answer(machine, "clone", THREAD) == "allow"
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            assert answer(machine, "socket", family, kind | socket.SOCK_CLOEXEC, 0) == "allow"
    assert answer(machine, "socket", 16, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) == "allow"  # netlink is always raw
    assert answer(machine, "socket", socket.AF_UNIX, 5, 0) == "allow"
    for request_ in (0x5401, 0x5413, 0x540F):  # TCGETS, TIOCGWINSZ, TIOCGPGRP
        assert answer(machine, "ioctl", 0, request_) == "allow"


@pytest.mark.parametrize("machine", MACHINES)
def test_every_path_through_the_filter_ends(machine: str) -> None:
    """No jump leaves the program, and every call number up to 1,000 gets an answer that is one of the four."""
    for number in range(1000):
        assert answer(machine, number) in {"allow", "EPERM", "ENOSYS", "EAFNOSUPPORT"}
