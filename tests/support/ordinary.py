"""Becomes an ordinary user for one command, as root: `python -I ordinary.py UID COMMAND...`.

Interpreter and project often lie where only root may go. So a private mount namespace is made first, in which the
folders above them can be entered by everybody and hold nothing else. Nothing outside that namespace changes.
Where the tests do not run as root, they are an ordinary user already and none of this is needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

UID = 65534
ROOT = Path(__file__).parents[2]
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2


def prefix() -> list[str]:
    """The words before a command that make it run as an ordinary user; none where we are one."""
    if os.geteuid() != 0:
        return []
    return [sys.executable, "-I", str(Path(__file__).resolve()), str(UID)]


def give(folder: Path) -> None:
    """Let the ordinary user own `folder` and everything in it."""
    if os.geteuid() != 0:
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, UID, UID, follow_symlinks=False)


def main(uid: int, command: list[str]) -> None:
    os.unshare(os.CLONE_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    needed = {os.path.realpath(sys.base_prefix), os.path.abspath(sys.prefix), str(ROOT)}
    for top in sorted({closed for path in needed if (closed := _first_closed(path))}):
        _open(top, sorted(path for path in needed if path.startswith(top + "/")))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execvpe(command[0], command, dict(os.environ))


def _first_closed(path: str) -> str | None:
    """The uppermost folder above `path` that others may not enter."""
    folders = [str(folder) for folder in [*reversed(Path(path).parents), Path(path)]]
    return next((folder for folder in folders if not os.stat(folder).st_mode & 0o001), None)


def _open(top: str, needed: list[str]) -> None:
    """Replace `top` by a folder that holds only `needed`."""
    held = tempfile.mkdtemp()
    _mount("tmpfs", held, "tmpfs", 0, "mode=0700")
    for number, path in enumerate(needed):
        os.mkdir(f"{held}/{number}")
        _mount(path, f"{held}/{number}", None, _MS_BIND | _MS_REC)
    _mount("tmpfs", top, "tmpfs", 0, "mode=0755")
    for number, path in enumerate(needed):
        os.makedirs(path, exist_ok=True)
        _mount(f"{held}/{number}", path, None, _MS_BIND | _MS_REC)
    ctypes.CDLL(None).umount2(held.encode(), _MNT_DETACH)
    os.rmdir(held)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
