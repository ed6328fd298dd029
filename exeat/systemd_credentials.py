"""What systemd passed to the gateway, read at the start and handed to the vault (systemd.exec(5), "Credentials").

The folder that CREDENTIALS_DIRECTORY names can be read by the service's own user alone: the vault, which has another
uid when root starts us, could not. Read anew with each start of our processes; systemd replaces them with the unit.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from exeat.storekey import FOLDER

MAX_ONE = 64 * 1024
"""Bytes: no secret is longer."""
MAX_ALL = 256 * 1024
"""Bytes of all together: what follows in order of name is left out."""


def systemd_credentials(environment: Mapping[str, str], store_key: str | None) -> dict[str, str]:
    """Name -> value in hex, as the vault's boot document takes it. `store_key` is not for credentials: left out."""
    folder = environment.get(FOLDER)
    found: dict[str, str] = {}
    total = 0
    if not folder:
        return found
    try:
        names = sorted(entry.name for entry in Path(folder).iterdir())
    except OSError:
        return found
    for name in names:
        value = _read(Path(folder) / name) if name != store_key else None
        if value is None or total + len(value) > MAX_ALL:
            continue
        total += len(value)
        found[name] = value.hex()
    return found


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return None
            value = stream.read(MAX_ONE + 1)
    except OSError:
        return None
    return value if len(value) <= MAX_ONE else None
