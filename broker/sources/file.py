"""`file:/path`: a mounted secret file. Read at each use, so that a rotated or removed file counts at once (T17).

Orchestrators swap secrets by a link (Kubernetes: `token` -> `..data/token` -> `..2026_12_01/token`): whichever file
the path leads to when it is opened is read, whole. A file that is being written is not taken: it is read again, and
refused where it goes on changing, is empty, or is shorter than a secret can be. Whoever writes one in two halves with
a pause between them should rename the finished file over the old one instead.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from broker.sources.base import SourceError
from broker.sources.env import make_secret
from broker.vault.secret import MAX_SECRET_BYTES, Secret

READS = 3


class FileSource:
    """Absolute paths only; one trailing line end is not part of the value. Files others could write are refused."""

    blocks = True

    def __init__(self, version_key: bytes) -> None:
        self._version_key = version_key

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        path = Path(name)
        if not path.is_absolute():
            raise SourceError("source-refused", f"file:{name}", "name an absolute path")
        for _ in range(READS):
            value = _read(path)
            if value is not None:
                value = value.removesuffix(b"\n").removesuffix(b"\r")
                return make_secret(value, f"file:{name}", scrub=scrub, version_key=self._version_key)
        raise SourceError("source-unreadable", f"file:{name} is being written", "rename the finished file over it")


def _read(path: Path) -> bytes | None:
    """The file's bytes; None where it changed meanwhile. Raises SourceError."""
    name = f"file:{path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = f"let the gateway's user (uid {os.geteuid()}) read it"
            raise SourceError("source-unreadable", f"{name} may not be read", remedy) from None
        raise SourceError("source-missing", name, "put the secret there again") from None
    try:
        found = os.fstat(descriptor)
        # Orchestrators mount secrets as 0444 or 0440; what matters is that nobody else may write or, where it is
        # an ordinary file of this user, read it.
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
            raise SourceError("source-refused", f"{name}: others may write it", "chmod go-w")
        if found.st_uid == os.geteuid() and found.st_uid != 0 and found.st_mode & 0o077:
            raise SourceError("source-refused", f"{name}: others may read it", "chmod 600")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            value = stream.read(MAX_SECRET_BYTES + 2)
        after = os.fstat(descriptor)
    except OSError:
        raise SourceError("source-unreadable", name, "see the gateway's machine: its disk or mount") from None
    finally:
        os.close(descriptor)
    same = (found.st_mtime_ns, found.st_size) == (after.st_mtime_ns, after.st_size)
    return value if same and (len(value) == after.st_size or len(value) > MAX_SECRET_BYTES) else None
