"""The system-call filter of everything we confine: what no sandbox and no worker ever needs (RULINGS 6.1).

A deny list, because the workload is any program: namespaces, mounts, tracing, kernel interfaces, keyrings and
every socket family but Unix, IPv4, IPv6 and netlink answer EPERM or EAFNOSUPPORT. `clone3` answers ENOSYS, so
that the C library falls back to `clone`, whose flags a filter can read. A foreign architecture is killed.

Written as the kernel reads it: a list of classic BPF instructions (linux/filter.h, linux/seccomp.h).
"""

from __future__ import annotations

import errno
import platform
import struct

_LD_W_ABS = 0x20
_JEQ = 0x15
_JGE = 0x35
_JSET = 0x45
_AND = 0x54
_RET = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000

_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24

_NEW_NAMESPACES = 0x7E020000 | 0x80
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""

_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (the C library lists interfaces through it)."""

_INET = (2, 10)
_SOCK_RAW = 3
_SOCK_PACKET = 10
"""With AF_INET, the kernel still reads this one as a packet socket (packet(7))."""
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: typing into the operator's terminal."""

# name: (x86_64, aarch64). Numbers from linux/arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "setns": (308, 268),
    "unshare": (272, 97),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "open_by_handle_at": (304, 265),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "vmsplice": (278, 75),
}

_MACHINES = {
    "x86_64": (0xC000003E, 0, {"clone": 56, "clone3": 435, "socket": 41, "socketpair": 53, "ioctl": 16}),
    "aarch64": (0xC00000B7, 1, {"clone": 220, "clone3": 435, "socket": 198, "socketpair": 199, "ioctl": 29}),
}


class UnsupportedMachine(RuntimeError):
    """No filter is known for this processor; confinement is refused rather than weakened."""


def program(machine: str | None = None) -> bytes:
    """Return the filter as packed `struct sock_filter` entries for `machine` (default: this one).

    Raises UnsupportedMachine for anything but x86_64 and aarch64.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise UnsupportedMachine(f"no system-call filter for {name}; exeat confines on x86_64 and aarch64")
    arch, column, special = _MACHINES[name]
    code: list[tuple[int, int, int, int]] = []

    def deny_if_equal(value: int, number: int) -> None:
        code.append((_JEQ, 0, 1, value))
        code.append((_RET, 0, 0, _ERRNO | number))

    code += [(_LD_W_ABS, 0, 0, _ARCH), (_JEQ, 1, 0, arch), (_RET, 0, 0, _KILL), (_LD_W_ABS, 0, 0, _NR)]
    if name == "x86_64":  # the x32 table shares the architecture value and renumbers every call
        code += [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _KILL)]
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            deny_if_equal(number, errno.EPERM)
    deny_if_equal(special["clone3"], errno.ENOSYS)
    code += [
        (_JEQ, 0, 4, special["clone"]),
        (_LD_W_ABS, 0, 0, _ARG0),
        (_JSET, 0, 1, _NEW_NAMESPACES),
        (_RET, 0, 0, _ERRNO | errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]
    code += [
        (_JEQ, 0, 5, special["ioctl"]),
        (_LD_W_ABS, 0, 0, _ARG1),
        (_JEQ, 1, 0, _TERMINAL_INJECTION[0]),
        (_JEQ, 0, 1, _TERMINAL_INJECTION[1]),
        (_RET, 0, 0, _ERRNO | errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]
    block = [
        (_LD_W_ABS, 0, 0, _ARG0),
        *[(_JEQ, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)],
        (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_JEQ, 1, 0, _INET[0]),
        (_JEQ, 0, 5, _INET[1]),
        (_LD_W_ABS, 0, 0, _ARG1),
        (_AND, 0, 0, 0xF),
        (_JEQ, 1, 0, _SOCK_RAW),
        (_JEQ, 0, 1, _SOCK_PACKET),
        (_RET, 0, 0, _ERRNO | errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]
    code += [(_JEQ, 0, len(block), special["socket"]), *block]
    code.append((_RET, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
