"""`file:/path`: a mounted secret file. Read at each use, so that a rotated or removed file counts at once (T17)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from broker.sources.base import SourceError
from broker.sources.env import make_secret
from broker.vault.secret import MAX_SECRET_BYTES, Secret


class FileSource:
    """Absolute paths only; one trailing line end is not part of the value. Files others could write are refused."""

    blocks = True

    def __init__(self, version_key: bytes) -> None:
        self._version_key = version_key

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        path = Path(name)
        if not path.is_absolute():
            raise SourceError("source-refused", f"file:{name}", "name an absolute path")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            raise SourceError("source-missing", f"file:{name}", "put the secret there again") from None
        try:
            found = os.fstat(descriptor)
            # Orchestrators mount secrets as 0444 or 0440; what matters is that nobody else may write or, where it is
            # an ordinary file of this user, read it.
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
                raise SourceError("source-refused", f"file:{name}: others may write it", "chmod go-w")
            if found.st_uid == os.geteuid() and found.st_uid != 0 and found.st_mode & 0o077:
                raise SourceError("source-refused", f"file:{name}: others may read it", "chmod 600")
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                value = stream.read(MAX_SECRET_BYTES + 2)
        except OSError:
            raise SourceError("source-unreadable", f"file:{name}") from None
        finally:
            os.close(descriptor)
        value = value.removesuffix(b"\n").removesuffix(b"\r")
        return make_secret(value, f"file:{name}", scrub=scrub, version_key=self._version_key)
