"""What a tree of processes used: processor seconds and memory, from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """`pid` and everything below it."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError):
                    left += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
    return found


def cpu_seconds(pid: int | None) -> float:
    """User and system seconds of the tree, reaped children included."""
    total = 0
    for one in tree(pid) if pid else ():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime (proc(5))
    return total / _TICKS


def memory_bytes(pid: int | None) -> int:
    """Proportional set size of the tree (pages shared by n processes count 1/n each); resident size where hidden."""
    total = 0
    for one in tree(pid) if pid else ():
        with contextlib.suppress(OSError):
            try:
                text = Path(f"/proc/{one}/smaps_rollup").read_text()
                name = "Pss:"
            except OSError:
                text = Path(f"/proc/{one}/status").read_text()
                name = "VmRSS:"
            total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith(name)), 0) * 1024
    return total
