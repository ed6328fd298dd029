"""Run a command before or behind what else runs on the machine: `python bench/ahead.py NICE COMMAND ...`.

Where the kernel schedules by session (autogroups, sched(7)), a nice value counts inside a session only, and each
session gets as much as any other. So the command gets a session of its own, and that session the nice value too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path


def session_nice(pid: int) -> int:
    """The nice value of the session of `pid`; 0 where the kernel has none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"nice (-?\d+)", Path(f"/proc/{pid}/autogroup").read_text()):
            return int(found[1])
    return 0


def weigh(pid: int, nice: int) -> None:
    """Give the session of `pid` the nice value `nice`; nothing where the kernel has none or does not let us."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def main() -> None:
    nice = int(sys.argv[1])
    with contextlib.suppress(OSError):  # it leads a session already
        os.setsid()
    weigh(os.getpid(), nice)
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
