"""Where Exeat's files live when nobody said otherwise: XDG folders for a user, /etc and /var/lib for root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Absolute default paths of one installation."""

    config: Path
    """exeat.yaml, credentials.yaml, policy.yaml and keys/ (the store's key does not lie beside the store)."""
    state: Path
    run: Path
    """Control sockets; gone after a restart of the machine."""


def default_places(environment: Mapping[str, str], uid: int) -> Places:
    """Return the defaults for `uid` under `environment` (XDG base directory specification 0.8)."""
    if uid == 0:
        return Places(config=Path("/etc/exeat"), state=Path("/var/lib/exeat"), run=Path("/run/exeat-gateway"))
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    config = _absolute(environment.get("XDG_CONFIG_HOME")) or home / ".config"
    state = _absolute(environment.get("XDG_STATE_HOME")) or home / ".local" / "state"
    runtime = _absolute(environment.get("XDG_RUNTIME_DIR"))
    return Places(
        config=config / "exeat",
        state=state / "exeat",
        run=runtime / "exeat" if runtime else state / "exeat" / "run",
    )


def _absolute(value: str | None) -> Path | None:
    """XDG says: relative values are invalid and ignored."""
    return Path(value) if value and value.startswith("/") else None
