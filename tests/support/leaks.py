"""Finding what must not be anywhere: every window of every secret, plain and in base64, in text and bytes."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

WINDOW = 8


def windows(secret: str, *, public: str = "") -> frozenset[bytes]:
    """All windows of `secret` beyond its `public` prefix, and of its base64 forms at the three alignments.

    Base64 letters that depend on what stands before or after the secret are left out.
    """
    raw = secret.removeprefix(public).encode()
    found = _windows(raw)
    for shift in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(b"\0" * shift + raw)
            start, spare = -(-shift * 8 // 6), (shift + len(raw)) % 3
            end = len(text) - (4 if spare else 0)
            found |= _windows(text[start:end])
    return found


def _windows(text: bytes) -> frozenset[bytes]:
    return frozenset(text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1))


def leaks(data: bytes, secrets: Mapping[str, frozenset[bytes]]) -> list[str]:
    """Names of the secrets that `data` holds a window of, each with the text around the first one."""
    found = []
    for name, parts in secrets.items():
        at = min((data.find(part) for part in parts if part in data), default=-1)
        if at >= 0:
            found.append(f"{name}: ...{data[max(0, at - 60) : at + 40]!r}...")
    return found


def descendants(root: int) -> list[int]:
    """`root` and every process below it, as /proc shows them now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # After the command in parentheses: state, then the parent.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def command_line(pid: int) -> bytes:
    """argv of a process, spaces between; b"" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def process_texts(pids: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """(where, bytes) of what the process list shows of each: command line, name and environment."""
    for pid in pids:
        for name in ("cmdline", "comm", "environ"):
            try:
                yield f"/proc/{pid}/{name}", Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue


def files_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of every regular file below `folder`."""
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield str(path), path.read_bytes()
