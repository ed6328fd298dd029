"""`python -I -m broker.vault.wrap BOOT_FD ANSWER_FD`: the store's key from its file into a wrapped one.

A process of its own, as the vault's user, with the gateway stopped. The key must open the store that is there; the
service must give it back; an existing wrapped file is never overwritten. The key file stays as it is.

It writes one JSON object: {"by"} or {"error", "detail", "remedy"}.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from broker.errors import BrokerError
from broker.vault.keys import KeyRefused, read_key_file
from broker.vault.store import SecretStore
from broker.vault.wrapping import Wrapping, wrapping_of
from net.process import harden, quiet_hooks, read_boot
from net.upstream import UpstreamProxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What the command says. `from_file`: the key as it lies now."""

    state_dir: str
    from_file: str
    wrapped_file: str
    wrapping: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    systemd: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    internal_ranges: tuple[str, ...] = ()
    self_addresses: tuple[str, ...] = ()
    upstream: UpstreamProxy | None = None


async def wrap(boot: Boot, wrapping: Wrapping) -> None:
    """Raises BrokerError, and nothing has changed."""
    made = await wrapping.made(_key(boot))
    _write(Path(boot.wrapped_file), made.text)


def _key(boot: Boot) -> bytes:
    if os.path.lexists(boot.wrapped_file):
        raise KeyRefused(
            "key-invalid", f"{boot.wrapped_file} is there already", "start with it, or move it out of the way"
        )
    state = Path(boot.state_dir)
    key = read_key_file(Path(boot.from_file), state_dir=state)
    if (state / "store.json").exists():
        SecretStore(state / "store.json", lambda salt: key, os.urandom)
    return key


def _write(path: Path, text: bytes) -> None:
    """Whole or not at all: under another name first, and never over a file."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(fresh, path)
        fresh.unlink()
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyRefused(
            "key-readonly", f"{path} cannot be written ({os.strerror(error.errno or 0)})", "name another place"
        ) from None


async def _main(boot: Boot) -> str:
    wrapping = wrapping_of(boot)
    assert wrapping is not None
    await wrap(boot, wrapping)
    return wrapping.label


def main(arguments: list[str]) -> int:
    quiet_hooks("wrap")
    logging.disable(logging.CRITICAL)  # no logger of a library prints what it was given, as in the vault
    harden()
    boot = read_boot(int(arguments[0]), Boot)
    try:
        answer = {"by": asyncio.run(_main(boot))}
    except BrokerError as error:
        answer = {"error": error.code, "detail": error.detail or error.code, "remedy": error.remedy}
    with os.fdopen(int(arguments[1]), "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
